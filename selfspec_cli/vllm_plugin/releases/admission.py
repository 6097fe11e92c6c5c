"""Whether a release of vLLM that nobody has tried has what the plugin uses: names, parameters, fields.

Its source is read, not imported. A release that has all of it is treated like the supported one that it agrees with.
Names that are replaced are in patches.py, all else in seams.toml."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os.path
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import cache, cached_property, partial
from pathlib import Path

from selfspec_cli.vllm_plugin import patches, releases, vllm_names
from selfspec_cli.vllm_plugin.releases import SUPPORTED, Release
from selfspec_cli.whole import cache_dir, written

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_STATEMENT = re.compile(r"\n(?=[^\s#)\]}])")
_MEMBER = re.compile(r"\n    (?=[^\s#)\]}])")
_DEFINED = re.compile(r"(?:class|def|async def) (\w+)")
_ASSIGNED = re.compile(r"""\n +self\.(\w+)(?:, self\.\w+|: [^=\n"']+)* = """)
"""Outside of a string, a line that begins like this can only be an assignment."""


class Source:
    """The Python files of one vLLM, read with `ast`. Targets are written "module:Class.method"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = cache(self._file)
        self.tree = cache(self._tree)
        self.names = cache(self._names)
        self.own_names = cache(self._own_names)

    @cached_property
    def outline(self) -> Outline:
        """The same files, read in a fraction of the time."""
        return Outline(self)

    def _file(self, module: str) -> Path | None:
        path = os.path.join(self.folder, *module.split("."))
        return next((Path(each) for each in (f"{path}.py", f"{path}/__init__.py") if os.path.isfile(each)), None)

    def text(self, module: str) -> str:
        file = self.file(module)
        assert file is not None, f"there is no module {module}"
        return file.read_bytes().decode()

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))

    def _names(self, module: str) -> dict[str, ast.stmt | tuple[str, str]]:
        """What a module defines at its top level: a statement, or (module, name) for what it imports."""
        found: dict[str, ast.stmt | tuple[str, str]] = {}
        for node in top_level(self.tree(module)):
            if isinstance(node, Definition):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.ImportFrom):
                origin = self.absolute(module, node)
                if node.names[0].name == "*" and self.file(origin) is not None:
                    found.update({name: (origin, name) for name in self.names(origin)})
                found.update({alias.asname or alias.name: (origin, alias.name) for alias in node.names})
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update({target.id: node for target in targets if isinstance(target, ast.Name)})
        return found

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that `node`, in `module`, imports from."""
        if not node.level:
            return node.module or ""
        file = self.file(module)
        parts = module.split(".")
        keep = len(parts) - node.level + (file is not None and file.name == "__init__.py")
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def defined(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Where `name` of `module` is defined: (module, statement), imports followed; None if it is nowhere."""
        if self.file(module) is None:
            return None
        found = self.names(module).get(name)
        if isinstance(found, tuple):
            return self.defined(*found) if found[0].startswith("vllm") else (module, ast.Pass())
        if found is None and self.file(f"{module}.{name}") is not None:
            return f"{module}.{name}", ast.Pass()
        return None if found is None else (module, found)

    def find(self, target: str, own: bool = False) -> ast.stmt | None:
        """The statement that defines "module:Class.method"; own: not one that a base class has."""
        module, _, path = target.partition(":")
        name, *rest = path.split(".")
        found = self.defined(module, name)
        if found is None or not rest:
            return None if found is None else found[1]
        for kind in list(self.classes(target.rpartition(".")[0]))[: 1 if own else None]:
            if (method := self.method(kind, rest[0])) is not None:
                return method
        return None

    def method(self, kind: ast.ClassDef, name: str) -> ast.stmt | None:
        """The statement that defines a method, or a class, in the body of a class; None if there is none."""
        return next((node for node in kind.body if isinstance(node, Definition) and node.name == name), None)

    def _own_names(self, kind: ast.ClassDef) -> set[str]:
        """Names of the methods of a class, and names that they assign on self."""
        return assigned_on_self(kind) | {node.name for node in kind.body if isinstance(node, Definition)}

    def classes(self, target: str) -> Iterator[ast.ClassDef]:
        """The class "module:Class" and its bases, as far as they are vLLM's."""
        module, _, name = target.partition(":")
        found = self.defined(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return
        yield found[1]
        for base in found[1].bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name):
                yield from self.classes(f"{found[0]}:{plain.id}")

    def parameters(self, target: str) -> list[str] | None:
        """Parameters of a function, a method (without self) or a dataclass (its fields); None if it is nowhere."""
        node = self.find(target)
        if node is None and target.endswith(".__init__"):
            return self.fields(target.removesuffix(".__init__")) or None
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        given = node.args
        every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        return [each.arg for each in every if each is not None and each.arg != "self"]

    def fields(self, target: str) -> list[str]:
        """Annotated names in the body of a class and of its bases, base classes first; none where there is no class."""
        kinds = list(self.classes(target))
        nodes = [node for kind in reversed(kinds) for node in kind.body if isinstance(node, ast.AnnAssign)]
        return list(dict.fromkeys(node.target.id for node in nodes if isinstance(node.target, ast.Name)))

    def attributes(self, target: str) -> set[str]:
        """What can be read from an instance: assigned on self, or defined in the body of the class or of a base."""
        found: set[str] = set()
        for kind in self.classes(target):
            found |= self.own_names(kind)
            found |= {
                node.id
                for part in kind.body
                if isinstance(part, ast.Assign)
                for node in part.targets
                if isinstance(node, ast.Name)
            }
        return found | set(self.fields(target))


class Outline(Source):
    """The same files, cut at the lines where statements begin. No body of a function is parsed, and the header of one
    only if it is asked for. What it finds is there. What it does not find may still be there (an attribute that `with`
    assigns), and a file that is not formatted as vLLM's can be a SyntaxError: then the whole file has to be asked."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.folder)
        self.source = source
        self.cut = cache(self._cut)
        self.parsed = cache(self._parsed)
        self.methods: dict[ast.ClassDef, dict[str, str]] = {}

    def text(self, module: str) -> str:
        """The source of a module, with nothing in its triple quotes: an example in a docstring defines nothing."""
        text = self.source.text(module)
        if "'''" in text:
            raise SyntaxError(f"{module} has strings that are not in double quotes")
        return '""'.join(text.split('"""')[::2])

    def _cut(self, module: str) -> tuple[dict[str, str], str]:
        """The functions and classes of a module by name, and its other statements."""
        definitions, rest = _told_apart(_STATEMENT.split(self.text(module)))
        return definitions, "\n".join(rest)

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.cut(module)[1])

    def _names(self, module: str) -> dict[str, ast.stmt | tuple[str, str]]:
        return {name: (module, name) for name in self.cut(module)[0]} | super()._names(module)

    def defined(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        definitions, rest = self.cut(module) if self.file(module) is not None else ({}, "")
        if name in definitions and (name not in rest or self.names(module)[name] == (module, name)):
            return module, self.parsed(definitions[name])
        return super().defined(module, name)

    def _parsed(self, text: str) -> ast.stmt:
        """A function with an empty body, or a class without its methods."""
        if not text.startswith("class "):
            header, colon, _ = text.partition(":\n")
            return ast.parse(f"{header}: ..." if colon else text).body[0]
        first, *members = _MEMBER.split(text)
        methods, rest = _told_apart(members)
        node = ast.parse("\n    ".join([first, *rest, "..."] if members else [first])).body[0]
        assert isinstance(node, ast.ClassDef)
        self.methods[node] = methods
        return node

    def method(self, kind: ast.ClassDef, name: str) -> ast.stmt | None:
        text = self.methods.get(kind, {}).get(name)
        return super().method(kind, name) if text is None else self.parsed(text)

    def _own_names(self, kind: ast.ClassDef) -> set[str]:
        methods = self.methods.get(kind, {})
        return super()._own_names(kind).union(methods, *map(_ASSIGNED.findall, methods.values()))


def _told_apart(statements: list[str]) -> tuple[dict[str, str], list[str]]:
    """The first definition of each name, and the statements that are neither a definition nor its decorator."""
    definitions: dict[str, str] = {}
    rest: list[str] = []
    for statement in statements:
        if defined := _DEFINED.match(statement):
            definitions.setdefault(defined[1], statement)
        elif not statement.startswith("@"):
            rest.append(statement)
    return definitions, rest


def assigned_on_self(node: ast.AST) -> set[str]:
    """Names that are assigned as self.NAME anywhere in `node`."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those of conditions and of try included."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If):
            waiting = [*node.body, *node.orelse, *waiting]
        elif isinstance(node, ast.Try):
            handlers = [part for handler in node.handlers for part in handler.body]
            waiting = [*node.body, *handlers, *node.orelse, *waiting]
        else:
            yield node


SHOWN = 3
"""Differences that a refusal names."""


def admit() -> str | None:
    """Admit the installed release if nothing has moved in it. Returns why early exit cannot be had; None if it can."""
    found = releases.installed()
    if found is None or releases.known(found[1]) is not None:
        return releases.refusal()
    missing = differences(found[1])
    if not missing:
        return None
    more = f"; and {len(missing) - SHOWN} more (selfspec doctor)" if len(missing) > SHOWN else ""
    return f"{releases.unknown(*found)}. Unlike the nearest supported release: {'; '.join(missing[:SHOWN])}{more}"


def differences(version: str) -> list[str]:
    """What moved in the installed vLLM since the nearest supported release, a line each. Admits it if nothing did."""
    agrees, missing = compared(version.partition("+")[0], SUPPORTED)
    if agrees is not None:
        releases.admit(version, agrees)
    return missing


Question = Callable[[Source], list[str]]
"""What is said of a release that does not have something, a line each; nothing of one that has it."""


def moved(source: Source, release: Release) -> list[str]:
    """What `source` does not have as `release` has it, a line each; empty where an engine can be tried."""
    return list(dict.fromkeys(line for question in _doubts(source, release) for line in question(source)))


def _doubts(source: Source, release: Release) -> list[Question]:
    """The questions that the outline of `source` does not answer: whole files have to be read for them."""
    return [question for question in _questions(release) if _doubtful(question, source.outline)]


def _doubtful(question: Question, outline: Outline) -> bool:
    try:
        return bool(question(outline))
    except SyntaxError:  # a file that is not formatted as vLLM's are
        return True


def _questions(release: Release) -> Iterator[Question]:
    """One for each name that is replaced or imported, each signature, and each class whose parts are used."""
    for target in [*(patch.target for patch in patches.PATCHES), *vllm_names.PLACES.values()]:
        yield partial(_is_there, target)
    for target, expected in signatures(release).items():
        yield partial(_signature, target, expected)
    for target, names in vllm_names.SEAMS["fields"].items():
        yield partial(_has, Source.fields, target, names.split())
    for target, names in vllm_names.SEAMS["attributes"].items():
        yield partial(_has, Source.attributes, target, names.split())


def signatures(release: Release) -> dict[str, list[str]]:
    """Target -> its parameters in `release`."""
    own = vllm_names.SEAMS.get(f"signatures of {release.release}", {})
    return {target: words.split() for target, words in {**vllm_names.SEAMS["signatures"], **own}.items()}


def _is_there(target: str, source: Source) -> list[str]:
    """A name that is replaced must be the class's own: what a base class has is replaced there."""
    return [] if source.find(target, own=True) is not None else [f"{target} is not there"]


def _signature(target: str, expected: list[str], source: Source) -> list[str]:
    found = source.parameters(target)
    if found is None:
        return [f"{target} is not there"]
    if found == expected:
        return []
    changes = [f"without {name}" for name in expected if name not in found]
    changes += [f"with {name}" for name in found if name not in expected]
    return [f"{target} takes other parameters: {', '.join(changes) or 'another order'}"]


def _has(read: Callable[[Source, str], Collection[str]], target: str, names: list[str], source: Source) -> list[str]:
    found = read(source, target)
    return [f"{target} has no {name}" for name in names if name not in found]


def compared(version: str, supported: tuple[Release, ...]) -> tuple[Release | None, list[str]]:
    """The supported release that the installed vLLM agrees with, and what is missing for the nearest one where there is
    none. Reads some hundred files the first time (0.1 s), and what was found from then on."""
    kept = cache_dir() / "vllm" / f"{version}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["asked"] == asked(supported):
            agrees = next((each for each in supported if each.release == known["agrees"]), None)
            return agrees, list(known["moved"])
    found = importlib.util.find_spec("vllm")
    if found is None or not found.origin:
        return None, ["the package vllm is not there"]
    source = Source(Path(found.origin).parents[1])
    newest_first = supported[::-1]
    nearest_first = sorted(newest_first, key=lambda each: len(_doubts(source, each)))
    agrees = next((each for each in nearest_first if not moved(source, each)), None)
    missing = [] if agrees is not None else moved(source, nearest_first[0])
    with suppress(OSError), written(kept) as part:
        document = {"asked": asked(supported), "agrees": agrees and agrees.release, "moved": missing}
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return agrees, missing


def asked(supported: tuple[Release, ...]) -> str:
    """A digest of all that is compared: another selfspec asks anew."""
    every = [vllm_names.SEAMS, [patch.target for patch in patches.PATCHES], supported]
    return hashlib.sha256(repr(every).encode()).hexdigest()[:16]
