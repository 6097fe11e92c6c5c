"""Mutation testing: small faults are put into the code one by one, and the tests are asked whether they notice.

    python tests/mutation/run.py costs                           every module of a suite of pyproject.toml
    python tests/mutation/run.py costs --module cost_model       some of its modules
    python tests/mutation/run.py costs --every 8                 every eighth mutant of each module
    python tests/mutation/run.py                                 the verdicts so far, in Markdown; exit code 1 if a
                                                                 survivor is not explained

mutmut makes the mutants (`make.py`); README.md says why it does not run them. Each mutant is a fork that runs the tests
that reach the mutated line (as coverage.py saw them), the quickest first, until one fails.

A mutant counts as killed if a test fails, if the module cannot be imported, or if ten times the CPU time of the tests
is not enough. Verdicts are added to a file as they come. Started again, a run takes up where it was: a mutant that was
killed stays so, because tests are only added, and the others are tried again.

`explained.toml` holds groups of mutants that no test can tell from the original, or that none should: `why`, and for
each mutant a part of its module's path, and regular expressions that its function, the code before and the code after
match."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import importlib.abc
import importlib.util
import inspect
import json
import linecache
import os
import re
import resource
import signal
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
from make import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, UNREACHED, TIMEOUT = "killed", "survived", "unreached", "timeout"
EXPLAINED = Path(__file__).with_name("explained.toml")
Row = dict[str, Any]


def key_of(row: Row) -> tuple[str, ...]:
    """What tells a mutant from others, also after lines have moved. Files of before there were numbers have none."""
    return (*(row[name] for name in ("module", "function", "was", "now")), str(row.get("number", 0)))


def rows(path: Path) -> list[Row]:
    """What a file of verdicts holds; later verdicts on a mutant replace earlier ones."""
    if not path.exists():
        return []
    found = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return list({key_of(row): row for row in found}.values())


class Session:
    """A pytest plugin that takes the place of the test loop."""

    def __init__(self, modules: list[Path], out: Path, cov: coverage.Coverage, every: int) -> None:
        self.modules, self.out, self.cov, self.every = modules, out, cov, every
        self.known = {key_of(row): row["verdict"] for row in rows(out)}
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed = False
        self.anew: set[Path] = set()  # modules that were imported anew as they are
        self.pipe: int | None = None  # in a fork, to say which test failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """In a fork: the first failure is the verdict, and a report of it would take longer than the test."""
        if self.pipe is not None and call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            os.write(self.pipe, item.nodeid.encode())
            os._exit(1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """How long a test took, and whether it failed."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed = True
            self.why = report.longreprtext

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """All tests once, and then the mutants."""
        self.items = {item.nodeid: item for item in session.items}
        if session.testsfailed:
            raise _stopped("the tests cannot be collected")
        for number, (name, item) in enumerate(self.items.items()):
            self.cov.switch_context(name)
            following = session.items[number + 1] if number + 1 < len(session.items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                raise _stopped(f"{name} fails without a mutant:\n{self.why}")
        self.cov.stop()
        self.reached = self.cov.get_data()
        gc.collect()
        functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
        self.caches = [
            thing
            for thing in gc.get_objects()
            if type(thing) is functools._lru_cache_wrapper and thing.__module__.startswith("selfspec_cli")
        ]
        gc.freeze()
        for path in self.modules:
            here = [function for function in functions if function.__code__.co_filename == str(path)]
            self._module(path, here)
        return True

    def _module(self, path: Path, functions: list[FunctionType]) -> None:
        started, cpu, tally = time.time(), sum(os.times()[:4]), defaultdict(int)
        contexts = self.reached.contexts_by_lineno(str(path))
        reach, current = _Reach(path, contexts), set()
        with self.out.open("a", encoding="utf-8") as file:
            for mutant in mutants_of(path, ROOT, self.every):
                current.add(key_of(asdict(mutant)))
                if self.known.get(key_of(asdict(mutant))) in (KILLED, TIMEOUT):
                    tally["killed before"] += 1
                    continue
                verdict, by = self._verdict(mutant, path, functions, reach)
                tally[verdict] += 1
                row = {key: value for key, value in asdict(mutant).items() if key not in ("source", "at_import")}
                row |= {"verdict": verdict, "by": by}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
        # What is no mutant any more, because the code has changed, leaves the file.
        name = str(path.relative_to(ROOT))
        whole = self.every == 1
        kept = [row for row in rows(self.out) if not whole or row["module"] != name or key_of(row) in current]
        self.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
        spent = sum(os.times()[:4]) - cpu
        print(
            f"\n{name}: {dict(tally)}, {spent:.0f} s of CPU in {time.time() - started:.0f} s",
            file=sys.__stderr__,
            flush=True,
        )

    def _verdict(self, mutant: Mutant, path: Path, functions: list[FunctionType], reach: _Reach) -> tuple[str, str]:
        try:
            compiled = compile(mutant.source, str(path), "exec", dont_inherit=True)
        except SyntaxError:
            return KILLED, "no Python"
        tests = reach.tests(mutant.line)
        at_import = mutant.at_import or tests == {""} or _functions_of(path) == _optimised(compiled)
        # No test runs a line of a module that has no functions, and any test may look at what it holds.
        tests = (reach.of_the_module or set(self.items) if at_import else tests) - {""}
        if not tests:
            return UNREACHED, ""
        if at_import and path not in self.anew:
            self.anew.add(path)
            unchanged = replace(mutant, source=path.read_text(encoding="utf-8"), at_import=True)
            if self._verdict(unchanged, path, functions, reach)[0] != SURVIVED:
                raise _stopped(f"the tests fail when {path} is imported anew without a mutant")
        names = sorted(tests, key=lambda name: self.seconds[name])
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            with contextlib.suppress(BaseException):
                self.pipe = writing
                self._run(mutant, functions, compiled, names, at_import)
            os._exit(3)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            by = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL):
            return TIMEOUT, by
        return (SURVIVED, "") if status == 0 else (KILLED, by or f"status {status}")

    def _run(
        self, mutant: Mutant, functions: list[FunctionType], compiled: CodeType, names: list[str], at_import: bool
    ) -> None:
        """In a fork: put the fault in, run the tests, and leave with 1 if one fails, else with 0."""
        path = ROOT / mutant.module
        limit = int(20 + 10 * sum(self.seconds[name] for name in names))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        signal.alarm(20 * limit)
        quiet = os.open(os.devnull, os.O_RDWR)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        gc.disable()
        linecache.cache[str(path)] = (len(mutant.source), None, mutant.source.splitlines(True), str(path))
        if at_import:
            _import_anew(path, mutant.source)
            files = list(dict.fromkeys(name.partition("::")[0] for name in names))
            code = pytest.main(["-x", "-q", "--assert=plain", "--tb=native", "-p", "no:cacheprovider", *files])
            os.write(self.pipe, b"" if code == 0 else b"imported anew")
            os._exit(0 if code == 0 else 1)
        _exchange(path, functions, compiled)
        for cache in self.caches:
            cache.cache_clear()
        if "triton.runtime.interpreter" in sys.modules:
            sys.modules["triton.runtime.interpreter"].InterpretedFunction.rewritten_fn.clear()
        for number, name in enumerate(names):
            item = self.items[name]
            following = self.items[names[number + 1]] if number + 1 < len(names) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        os._exit(0)


def _stopped(why: str) -> BaseException:
    """Ends the run, with exit code 1; pytest itself does not print why."""
    print(f"\n{why}", file=sys.__stderr__, flush=True)
    return pytest.Session.Failed(why)


class _Reach:
    """Which tests reach a line of a module."""

    def __init__(self, path: Path, contexts: dict[int, list[str]]) -> None:
        self.contexts = contexts
        self.of_the_module = {name for names in contexts.values() for name in names if name}
        statements = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "lineno")]
        spans = [(node.lineno, node.end_lineno or node.lineno) for node in statements if isinstance(node, ast.stmt)]
        self.spans = sorted(spans, key=lambda span: span[1] - span[0])

    def tests(self, line: int) -> set[str]:
        """Those that reach the innermost statement around a line; "" is the import."""
        first, last = next((first, last) for first, last in self.spans if first <= line <= last)
        lines = {line, first} | (set(range(first, last + 1)) if last - first < 12 else set())
        return {name for at in lines for name in self.contexts.get(at, ())}


def _exchange(path: Path, functions: list[FunctionType], compiled: CodeType) -> None:
    """Give every function of a module the code that it has in `compiled`."""
    new = _codes(compiled)
    old = {
        (code.co_qualname, code.co_firstlineno): key
        for key, code in _codes(compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)).items()
    }
    for function in functions:
        code = function.__code__
        key = old.get((code.co_qualname, code.co_firstlineno))
        if key in new and len(new[key].co_freevars) == len(code.co_freevars):
            function.__code__ = new[key]


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Code objects by qualified name and their number among those of that name."""
    found: dict[tuple[str, int], CodeType] = {}
    waiting = [code]
    while waiting:
        for constant in waiting.pop(0).co_consts:
            if isinstance(constant, CodeType):
                number = sum(name == constant.co_qualname for name, _ in found)
                found[constant.co_qualname, number] = constant
                waiting.append(constant)
    return found


def _optimised(compiled: CodeType) -> dict[tuple[str, int], CodeType]:
    """Those of `_codes` that are functions: a class has the defaults of its methods' arguments among its constants."""
    return {key: code for key, code in _codes(compiled).items() if code.co_flags & inspect.CO_OPTIMIZED}


@functools.cache
def _functions_of(path: Path) -> dict[tuple[str, int], CodeType]:
    return _optimised(compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True))


def _import_anew(path: Path, source: str) -> None:
    """Forget this project's modules and the tests', and let the next import of one find the mutant."""

    class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
        def find_spec(self, name: str, *_: Any) -> Any:
            wanted = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__")
            if name != wanted:
                return None
            places = [str(path.parent)] if path.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(name, path, loader=self, submodule_search_locations=places)

        def get_filename(self, name: str) -> str:
            return str(path)

        def get_data(self, name: str | bytes) -> bytes:
            return source.encode()

        def path_stats(self, name: str) -> Any:
            raise OSError  # no bytecode

    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        if where.startswith((str(ROOT / "selfspec_cli"), str(ROOT / "tests"))) and name != "__main__":
            if (library := vars(module).get("_LIBRARY")) is not None:
                library._destroy()  # PyTorch takes an operator once
            del sys.modules[name]
    sys.meta_path.insert(0, Mutated())


# ---- the verdicts ----------------------------------------------------------------------------------------------------


def explanation(row: Row, groups: Iterable[Row]) -> str | None:
    """Why a survivor may live; None where nobody has said."""
    for group in groups:
        for entry in group["mutants"]:
            if entry.get("module", "") in row["module"] and all(
                re.search(entry.get(name, ""), row[name]) for name in ("function", "was", "now")
            ):
                return str(group["why"])
    return None


def table(found: list[Row], groups: list[Row]) -> list[str]:
    """One line a module, and one for all: killed, and what is left."""
    modules = defaultdict(list)
    for row in found:
        modules[row["module"]].append(row)
    lines = [
        "| module | mutants | killed | explained | left | not reached |",
        "|---|---|---|---|---|---|",
    ]
    for name, here in [*modules.items(), ("all", found)]:
        killed = [row for row in here if row["verdict"] in (KILLED, TIMEOUT)]
        living = [row for row in here if row["verdict"] not in (KILLED, TIMEOUT)]
        known = sum(explanation(row, groups) is not None for row in living)
        unreached = sum(row["verdict"] == UNREACHED for row in living)
        file = f"`{name.removeprefix('selfspec_cli/')}`"
        dead = f"{len(killed)} ({100 * len(killed) / len(here):.1f} %)" if here else "0"
        cells = (file, len(here), dead, known, len(living) - known, unreached)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def report() -> int:
    """Print the table, the explained survivors by reason, and the others; 1 if a survivor is not explained."""
    found = [row for file in sorted((ROOT / "mutants").glob("*.jsonl")) for row in rows(file)]
    groups = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["group"]
    living: dict[str | None, list[Row]] = defaultdict(list)
    for row in found:
        if row["verdict"] not in (KILLED, TIMEOUT):
            living[explanation(row, groups)].append(row)
    left = living.pop(None, [])
    print("\n".join(table(found, groups)))
    for why, members in [*living.items(), ("Left", left)]:
        print(f"\n{why} ({len(members)})\n")
        for row in members:
            place = f"{row['module'].removeprefix('selfspec_cli/')}:{row['line']} {row['function']}"
            print(f"- {row['verdict']} {place}: `{row['was']}` → `{row['now']}`")
    return 1 if left else 0


# ---- the script ------------------------------------------------------------------------------------------------------


def unknown(suite: str, words: list[str], suites: dict[str, Any]) -> str | None:
    """What is wrong with the name of a suite, or with parts of its modules' paths; None: nothing."""
    modules = suites[suite]["modules"] if suite in suites else []
    strange = [word for word in words if not any(word in name for name in modules)]
    if suite in suites and not strange:
        return None
    from selfspec_cli.early_exit.errors import closest  # not before: in a run, modules are imported under coverage

    if suite not in suites:
        return closest(suite, suites, "suite")
    return closest(strange[0], dict.fromkeys(Path(name).stem for name in modules), f"module of the suite {suite}")


def main() -> int:
    """Run a suite; 0 once every mutant has its verdict. Without one, report."""
    suites = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["selfspec-mutants"]
    parser = argparse.ArgumentParser(description="mutation testing; the suites are in pyproject.toml")
    parser.add_argument("suite", nargs="?", help="; ".join([", ".join(suites), "none prints the verdicts so far"]))
    parser.add_argument("--module", action="append", help="only modules with this in their path")
    parser.add_argument("--out", type=Path, help="JSON lines are added to it; default mutants/SUITE.jsonl")
    parser.add_argument("--every", type=int, default=1, help="a sample: with 8 every eighth mutant of each module")
    options = parser.parse_args()
    if options.suite is None:
        return report()
    sys.path[:0] = [str(ROOT)]
    if wrong := unknown(options.suite, options.module or [], suites):
        parser.error(wrong)
    suite = suites[options.suite]
    modules = [ROOT / name for name in suite["modules"] if not options.module or any(m in name for m in options.module)]
    out = options.out or ROOT / "mutants" / f"{options.suite}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # a fork of a process with more threads hangs in its first parallel operation
    os.environ.update(suite.get("environment", {}))
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    for name in suite.get("preload", []):
        importlib.import_module(name)
    assert not any(name.startswith("selfspec_cli.") for name in sys.modules)
    cov = coverage.Coverage(data_file=None, include=[str(path) for path in modules])
    cov.start()
    # Nobody reads why a test failed: plain assertions and tracebacks are made faster.
    arguments = ["-q", "--no-header", "--assert=plain", "--tb=native", "-p", "no:cacheprovider", "-p", "no:xdist"]
    arguments += ["-o", "tmp_path_retention_policy=none", "--basetemp", str(out.with_suffix(".tmp"))]
    return int(pytest.main([*arguments, *suite["tests"]], plugins=[Session(modules, out, cov, options.every)]))


if __name__ == "__main__":
    sys.exit(main())
