"""Everything that the plugin uses of vLLM is there in each known release, read from its source without importing it.

A release that is neither installed nor unpacked is skipped; `python tests/contract/vllm_source.py RELEASE` unpacks it.
What cannot be seen this way: whether compiled operators behave, and whether anything runs."""

import ast
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from vllm_source import V1_PROPOSER, V1_RUNNER, V2_RUNNER, V2_SPECULATOR, Source, assigned_on_self, folder_of, sources

import selfspec_cli
from selfspec_cli.vllm_plugin import releases, vllm_names
from selfspec_cli.vllm_plugin.releases import SUPPORTED, admission
from selfspec_cli.vllm_plugin.spec_config import VLLM_KEYS

PACKAGE = Path(selfspec_cli.__file__).parent
SELF = Source(PACKAGE.parent)
PROPOSER, LOOP, SPECULATOR = (
    f"selfspec_cli.vllm_plugin.{name}"
    for name in ("v1.proposer:_EarlyExit", "v2.draft_loop:DraftLoop", "v2.speculator:EarlyExitSpeculator")
)
OURS = {V1_PROPOSER: [PROPOSER], V2_SPECULATOR: [LOOP, SPECULATOR]}
"""A class of vLLM's -> our subclasses of it, one of the other."""
subclassed = pytest.mark.parametrize("base", OURS, ids=lambda base: base.rpartition(":")[2])
SAYS = tomllib.loads((Path(__file__).parent / "vllm_says.toml").read_text(encoding="utf-8"))
CHECKS = {"in_order", "has", "absent", "ends_with", "count", "words"}


@pytest.mark.parametrize("target", SAYS)
def test_the_source_says_what_the_plugin_relies_on(vllm, target):
    line = SAYS[target]
    assert CHECKS & line.keys() and line.keys() <= {"why", "if_there", *CHECKS}
    if "if_there" in line and vllm.file(line["if_there"]) is None:
        return
    why = line["why"]
    text = vllm.segment(target) if ":" in target else vllm.text(target)
    places = [text.find(part) for part in line.get("in_order", ())]
    assert places == sorted(places) and -1 not in places, why
    assert [part for part in line.get("has", ()) if part not in text] == [], why
    assert [part for part in line.get("absent", ()) if part in text] == [], why
    assert text.rstrip().endswith(line.get("ends_with", "")), why
    assert {part: text.count(part) for part in line.get("count", {})} == line.get("count", {}), why
    words = line.get("words", {})
    assert {word: len(re.findall(rf"\b{word}\b", text)) for word in words} == words, why


def test_every_name_signature_and_field_is_there_and_no_whole_file_is_parsed_to_see_it(vllm, release):
    """What is compared at the start of an engine on a release that nobody has tried; files would take half a second."""
    assert admission.moved(vllm, release) == []
    fresh = Source(vllm.folder)
    fresh.tree = lambda module: pytest.fail(f"{module} was parsed")
    assert admission.moved(fresh, release) == []


def test_keys_of_a_speculative_config_are_those_of_the_release(vllm, release):
    """A key that another release alone has would be passed on to a vLLM that does not know it."""
    there = set(vllm.fields("vllm.config:SpeculativeConfig"))
    assert set(VLLM_KEYS) <= there
    some_have = {key for each in releases.SUPPORTED for key in each.speculative_keys}
    assert there & some_have == set(release.speculative_keys)


@pytest.mark.slow
def test_every_call_of_an_imported_function_fits_its_parameters(vllm, release):
    """Keywords that we pass exist, and there are no more positions than parameters."""
    checked = 0
    for file, call, place in calls_of_imported():
        module, name = place.split(":")
        node = vllm.defined(module, name)[1]
        if isinstance(node, ast.ClassDef):
            parameters, rest = vllm.parameters(f"{module}:{name}.__init__"), False
        elif isinstance(node, ast.FunctionDef):
            parameters, rest = vllm.parameters(f"{module}:{name}"), node.args.vararg or node.args.kwarg
        else:
            continue
        where = f"{file.name}:{call.lineno} {name}"
        assert rest or {word.arg for word in call.keywords if word.arg} <= set(parameters), where
        assert rest or len(call.args) <= len(parameters), where
        checked += 1
    assert checked >= 10


def our_classes(base: str) -> list[ast.ClassDef]:
    return [next(SELF.classes(target)) for target in OURS[base]]


def our_methods(base: str) -> list[ast.FunctionDef]:
    return [node for kind in our_classes(base) for node in kind.body if isinstance(node, ast.FunctionDef)]


@subclassed
def test_what_our_subclasses_read_of_themselves_is_theirs_or_their_bases(vllm, base):
    read = {
        node.attr
        for method in our_methods(base)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self"
    }
    of_the_base = read.difference(*map(SELF.attributes, OURS[base]))
    assert len(of_the_base) > 5
    assert of_the_base - vllm.attributes(base) == set()


@subclassed
def test_our_subclasses_call_methods_of_their_bases_with_parameters_that_they_have(vllm, base):
    methods = [{node.name for node in one.body if isinstance(node, ast.FunctionDef)} for one in our_classes(base)]
    own, inherited = set().union(*methods), set()  # of all of our classes, and of those above the one that is looked at
    for one, defined in zip(our_classes(base), methods, strict=True):
        for call in (node for node in ast.walk(one) if isinstance(node, ast.Call)):
            owner, _, method = ast.unparse(call.func).rpartition(".")
            if method in {"super()": inherited, "self": own}.get(owner, {method}):
                continue
            if isinstance(vllm.find(f"{base}.{method}"), ast.FunctionDef):
                parameters = vllm.parameters(f"{base}.{method}")
                assert keywords(call) <= set(parameters) and len(call.args) <= len(parameters), method
        inherited |= defined


@subclassed
def test_our_subclasses_assign_to_no_property_of_their_bases(vllm, base):
    """`max_model_len` is an attribute in 0.32 and a property in 0.33."""
    properties = {
        node.name
        for kind in vllm.classes(base)
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list)
    }
    assert not any(properties & assigned_on_self(kind) for kind in our_classes(base))


@subclassed
def test_our_overrides_take_what_the_base_is_called_with(vllm, base):
    """An override has the parameters of the base's method in its order, or takes the rest as *args, **kwargs."""
    overrides = [node for node in our_methods(base) if isinstance(vllm.find(f"{base}.{node.name}"), ast.FunctionDef)]
    if base == V2_SPECULATOR:  # `init_with_early_exit` calls its __init__, which stands in vLLM's place
        overrides = [node for node in overrides if node.name != "__init__"]
    for node in overrides:
        theirs = vllm.parameters(f"{base}.{node.name}")
        ours = [each.arg for each in [*node.args.args, *node.args.kwonlyargs] if each.arg != "self"]
        if node.args.vararg is None and node.args.kwarg is None:
            assert ours == theirs, node.name
        elif node.args.kwarg is not None:
            assert set(ours) <= set(theirs), node.name
    assert len(overrides) >= 6


def test_runners_call_drafters_as_we_expect(vllm):
    v1 = calls(vllm, V1_RUNNER, "self.drafter.propose")
    (propose,) = [call for call in v1 if "next_token_ids" in keywords(call)]
    assert not propose.args and {"num_speculative_tokens", "sampling_metadata"} <= keywords(propose)
    assert [len(call.args) for call in calls(vllm, V1_RUNNER, "self.drafter.prepare_inputs")] == [3]
    assert [len(call.args) for call in calls(vllm, V1_RUNNER, "self.drafter.prepare_next_token_ids_cpu")] == [4]
    names = SELF.parameters(f"{SPECULATOR}.propose")
    for call in calls(vllm, V2_RUNNER, "self.speculator.propose"):
        assert keywords(call) <= set(names)
        assert names[: len(call.args)] == vllm.parameters(f"{V2_SPECULATOR}.propose")[: len(call.args)]
    assert [len(call.args) for call in calls(vllm, V2_RUNNER, "self.speculator.set_attn")] == [5]


def test_decoders_cut_their_loop_at_end_layer(vllm):
    folder = vllm.file("vllm.model_executor.models").parent
    cutting = {file.stem for file in folder.glob("*.py") if "self.end_layer)" in file.read_text(encoding="utf-8")}
    assert len(cutting) >= 60
    assert {"llama", "qwen3_moe", "gemma", "gemma2", "gemma3"} <= cutting


@pytest.mark.slow
def test_reader_and_import_agree_on_the_installed_release():
    """What is read as text is what Python sees: the check of the reader itself."""
    found = releases.installed()
    folder = folder_of(found[1].partition("+")[0])
    for target in admission.signatures(releases.here()):
        parameters = inspect.signature(inspect.unwrap(pkgutil.resolve_name(target))).parameters
        assert Source(folder).parameters(target) == [name for name in parameters if name != "self"], target


def from_vllm(file: Path) -> Iterator[tuple[str, str]]:
    """(name in our file, "module:name") of everything that a file has from vLLM, for annotations too."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "vllm" and node.attr in vllm_names.PLACES:
            yield f"vllm.{node.attr}", vllm_names.PLACES[node.attr]
        if isinstance(node, ast.ImportFrom) and node.module == vllm_names.__name__:
            yield from ((alias.asname or alias.name, vllm_names.PLACES[alias.name]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)


def test_the_plugin_imports_from_vllm_through_its_table_alone_and_nothing_in_it_is_unused():
    """What a function imports counts too. `import vllm.x` has no name to move."""
    used = set()
    for file in (PACKAGE / "vllm_plugin").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "vllm", f"{file}:{node.lineno}"
        used |= {place for _, place in from_vllm(file)}
    assert used == set(vllm_names.PLACES.values())


def calls_of_imported() -> Iterator[tuple[Path, ast.Call, str]]:
    """(our file, call, "module:name") where something that was imported from vLLM is called by its name."""
    for file in sorted(PACKAGE.rglob("*.py")):
        names = dict(from_vllm(file))
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield file, node, names[ast.unparse(node.func)]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def calls(vllm: Source, module: str, function: str) -> list[ast.Call]:
    nodes = [node for node in ast.walk(vllm.tree(module)) if isinstance(node, ast.Call)]
    return [call for call in nodes if ast.unparse(call.func) == function]


def keywords(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg}


# ---- The patches in docs/upstream apply to the release of vLLM that they are written for


UPSTREAM = Path(__file__).parents[2] / "docs" / "upstream"
FIRST = "custom_class_v2.patch"
LATER = ("custom_class_batch_invariance.patch", "draft_length_policy.patch", "drafter_stats.patch")
"""Each goes on top of the first one, and of no other."""
RELEASE = "0.33.0"


@pytest.mark.parametrize("patches", [(FIRST,), *((FIRST, later) for later in LATER)], ids=lambda names: names[-1])
def test_a_patch_applies_to_the_source_of_the_release(patches):
    folder = sources() / RELEASE
    if not (folder / "vllm" / "__init__.py").is_file():
        pytest.skip(f"vLLM {RELEASE} is not unpacked here: python tests/contract/vllm_source.py {RELEASE}")
    whole = "".join((UPSTREAM / name).read_text(encoding="utf-8") for name in patches)
    # Outside of a repository git compares with the files as they are.
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "apply", "--check", "--verbose", "-"],
        input=whole,
        cwd=folder,
        env={"GIT_CEILING_DIRECTORIES": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Checking patch") == whole.count("diff --git")


def test_every_patch_is_named_on_its_page():
    page = (UPSTREAM / "next_pull_requests.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in UPSTREAM.glob("*.patch")) == sorted((FIRST, *LATER))
    assert all(f"`{name}`" in page for name in (FIRST, *LATER))


# ---- untried releases of vLLM are judged by what they have: made-up ones, from the source of one that is installed----


CORE, SCHEDULER = "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"
REJECTION_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"


class MadeUp(Source):
    """A release that differs from another one in some words of one module."""

    def __init__(self, base: Source, module: str, old: str, new: str) -> None:
        super().__init__(base.folder)
        assert old in base.text(module)
        self.module, self.old, self.new = module, old, new

    def text(self, module: str) -> str:
        text = super().text(module)
        return text.replace(self.old, self.new) if module == self.module else text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("class Scheduler(", "class Other: ...\n\n\nclass Scheduler("),
        ("self.max_num_running_reqs = ", "(self.other, self.max_num_running_reqs) = "),
        ("class Scheduler(", '# a """ too many\nclass Scheduler('),
        ("class Scheduler(", "OTHER = '''\nclass Scheduler:\n'''\n\n\nclass Scheduler("),
        ("class Scheduler(", "OTHER = [\nNone,\n]\n\n\nclass Scheduler("),
    ],
)
def test_one_that_changed_nothing_that_is_used_is_taken(release, vllm, old, new):
    """However it is written: what an outline does not show is looked for in whole files."""
    assert admission.moved(MadeUp(vllm, SCHEDULER, old, new), release) == []


def test_an_outline_says_of_all_that_is_used_what_whole_files_say(release, vllm):
    outline = vllm.outline
    for target in admission.signatures(release):
        assert outline.parameters(target) == vllm.parameters(target), target
    for target in vllm_names.SEAMS["fields"]:
        assert outline.fields(target) == vllm.fields(target), target
    for target, names in vllm_names.SEAMS["attributes"].items():
        assert set(names.split()) <= outline.attributes(target) <= vllm.attributes(target), target
    for target in [*vllm_names.SEAMS["fields"], *vllm_names.SEAMS["attributes"]]:
        assert [kind.name for kind in outline.classes(target)] == [kind.name for kind in vllm.classes(target)]


STEP, STEPS = "    def step_with_batch_queue(", "EngineCore.step_with_batch_queue"


@pytest.mark.parametrize(
    ("module", "old", "new", "said"),
    [
        (V2_RUNNER, "num_spec_tokens_to_schedule", "drafts", "ExecuteModelState has no num_spec_tokens_to_schedule"),
        (SCHEDULER, "def make_spec_decoding_stats(", "def stats(", "Scheduler.make_spec_decoding_stats is not there"),
        (CORE, f"{STEP}\n        self,", f"{STEP}\n        self, wait,", f"{STEPS} takes other parameters: with wait"),
        (REJECTION_SAMPLER, "class RejectionSampler", "class DraftVerifier", "RejectionSampler is not there"),
        # An example in a string defines nothing.
        (CORE, STEP, f'    """\n{STEP}self): ...\n    """\n\n    def another(', f"{STEPS} is not there"),
        (CORE, STEP, f"    '''\n{STEP}self): ...\n    '''\n\n    def another(", f"{STEPS} is not there"),
    ],
)
def test_one_that_renamed_something_is_refused_with_its_name(release, vllm, module, old, new, said):
    found = admission.moved(MadeUp(vllm, module, old, new), release)
    assert f"{module}:{said}" in found
    assert all(line.partition(" ")[0].startswith("vllm.") for line in found)


def test_a_comparison_is_made_once_for_a_version(tmp_path, monkeypatch):
    """And anew by another selfspec."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agrees, missing = admission.compared("0.98.0", SUPPORTED)
    assert (agrees.release, missing) == (releases.known(releases.installed()[1]).release, [])
    kept = tmp_path / "selfspec" / "vllm" / "0.98.0.json"
    known = json.loads(kept.read_text())
    monkeypatch.setattr(admission, "_questions", lambda release: [lambda source: ["everything"]])
    assert admission.compared("0.98.0", SUPPORTED) == (agrees, [])
    kept.write_text(json.dumps(known | {"asked": "what another selfspec asked"}))
    assert admission.compared("0.98.0", SUPPORTED) == (None, ["everything"])


def test_a_vllm_that_cannot_be_found_or_a_folder_that_cannot_be_written_is_no_crash(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(admission, "_questions", lambda release: [])
    assert admission.compared("0.98.0", SUPPORTED) == (SUPPORTED[-1], [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert admission.compared("0.98.0", SUPPORTED)[0] is None
