"""No circle of imports inside the package, imports inside functions and for annotations included: of two modules that
need each other's types, one has a type that belongs elsewhere."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

import selfspec_cli


def circle(edges: dict[str, set[str]]) -> list[str]:
    """One circle, as names each of which imports the next; empty where there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def imports() -> dict[str, set[str]]:
    graph = grimp.build_graph(selfspec_cli.__name__, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.mark.slow
def test_modules_do_not_import_each_other_in_a_circle():
    edges = imports()
    assert len(edges) > 200
    assert not (found := circle(edges)), " -> ".join(found)


def test_a_circle_is_found_and_named_in_the_order_of_its_imports():
    found = circle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()})
    assert len(found) == 4 and "".join(found) in ("abca", "bcab", "cabc")
