"""The mutants of a module: mutmut's operators, also in decorated functions and outside functions.

Not mutated: annotations, decorators, the wording of messages (a string is only put between XX), and outside functions
everything but numbers, operators, True and False, and lambdas."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

OUTSIDE = (
    cst.BaseNumber,
    cst.BinaryOperation,
    cst.UnaryOperation,
    cst.BooleanOperation,
    cst.ComparisonTarget,
    cst.Lambda,
    cst.Name,
    cst.IfExp,
)


@dataclass(frozen=True)
class Mutant:
    """A fault. line: of the original. was, now: the lines before and after. number: how many before it in its function
    change equal code in the same way. at_import: it is in no function."""

    module: str
    function: str
    line: int
    was: str
    now: str
    number: int
    at_import: bool
    source: str  # of the whole module


class Visitor(MutationVisitor):
    """mutmut's, which also goes into decorated functions."""

    METADATA_DEPENDENCIES = (PositionProvider, *MutationVisitor.METADATA_DEPENDENCIES)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[tuple[Any, int, str, bool]] = []  # mutation, line, function, in no function
        self._inside: list[str] = []
        self._functions = 0

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return False
        return bool(super()._skip_node_and_children(node))

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self._inside.append(node.name.value)
            self._functions += isinstance(node, cst.FunctionDef)
        before = len(self.mutations)
        visit_children = bool(super().on_visit(node))
        for mutation in self.mutations[before:]:
            line = self.get_metadata(PositionProvider, mutation.original_node).start.line
            if self._wanted(mutation):
                self.found.append((mutation, line, ".".join(self._inside), not self._functions))
        return visit_children

    def on_leave(self, original_node: cst.CSTNode) -> None:
        super().on_leave(original_node)
        if isinstance(original_node, (cst.FunctionDef, cst.ClassDef)):
            self._inside.pop()
            self._functions -= isinstance(original_node, cst.FunctionDef)

    def _wanted(self, mutation: Any) -> bool:
        old, new = mutation.original_node, mutation.mutated_node
        if isinstance(old, cst.SimpleString):
            return bool(self._functions) and new.value.strip("\"'").startswith("XX")
        return bool(self._functions) or isinstance(old, OUTSIDE)


def mutants_of(path: Path, root: Path, every: int = 1) -> Iterator[Mutant]:
    """Every mutant of a module, or with `every` a sample of them, in the order of its lines."""
    code = path.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(code))
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()), None)
    module = wrapper.visit(visitor)
    original = code.splitlines()
    seen, counts, numbered = set(), Counter(), []
    for mutation, line, function, at_import in visitor.found:
        change = (function, *map(module.code_for_node, (mutation.original_node, mutation.mutated_node)))
        numbered.append((mutation, line, function, at_import, counts[change]))
        counts[change] += 1
    for mutation, line, function, at_import, number in numbered[every // 2 :: every]:
        source = deep_replace(module, mutation.original_node, mutation.mutated_node).code
        if source == code or source in seen:
            continue
        seen.add(source)
        was, now = _changed(original, source.splitlines())
        yield Mutant(str(path.relative_to(root)), function, line, was, now, number, at_import, source)


def _changed(old: list[str], new: list[str]) -> tuple[str, str]:
    """The lines that differ, each joined into one; where lines are only missing, with the line before them."""
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    rest = old[first:][::-1], new[first:][::-1]
    whole = min(map(len, rest))
    last = next((i for i, (a, b) in enumerate(zip(*rest, strict=False)) if a != b), whole)
    first = max(first - 1, 0) if last == whole else first
    return tuple(" ".join(" ".join(lines[first : len(lines) - last]).split()) for lines in (old, new))  # type: ignore
