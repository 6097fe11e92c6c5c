"""vLLM read as text: what a release of it defines, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """The Python files of one vLLM, read with `ast`. Targets are written "module:Class.method"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = cache(self._tree)
        self.names = cache(self._names)

    def file(self, module: str) -> Path | None:
        """The file of a module, None if there is none."""
        path = self.folder.joinpath(*module.split("."))
        return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)

    def text(self, module: str) -> str:
        """The source of a module."""
        file = self.file(module)
        assert file is not None, f"there is no module {module}"
        return file.read_text(encoding="utf-8")

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
            for node in kind.body:
                if isinstance(node, Definition) and node.name == rest[0]:
                    return node
        return None

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
        """Parameters of a function or a method, in order, without self; None if it is nowhere. A dataclass's __init__
        takes its fields."""
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
            found |= assigned_on_self(kind) | {node.name for node in kind.body if isinstance(node, Definition)}
            found |= {
                node.id
                for part in kind.body
                if isinstance(part, ast.Assign)
                for node in part.targets
                if isinstance(node, ast.Name)
            }
        return found | set(self.fields(target))


def assigned_on_self(node: ast.AST) -> set[str]:
    """Names that are assigned as self.NAME anywhere in `node`."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }


def top_level(tree: ast.Module, type_checking: bool = True) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those of conditions and of try included."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.If) and (type_checking or "TYPE_CHECKING" not in ast.unparse(node.test)):
            waiting = [*node.body, *node.orelse, *waiting]
        elif isinstance(node, ast.Try):
            handlers = [part for handler in node.handlers for part in handler.body]
            waiting = [*node.body, *handlers, *node.orelse, *waiting]
        elif not isinstance(node, ast.If):
            yield node
