"""Everything that the plugin uses of vLLM is there in each known release, read from its source without importing it.

A release that is neither installed nor unpacked is skipped; `python tests/contract/vllm_source.py RELEASE` unpacks it.
What cannot be seen this way: whether compiled operators behave, and whether anything runs.
"""

import ast
import pkgutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_vllm_seams import SIGNATURES, without_self
from vllm_source import VARIABLE, Source, assigned_on_self, folder_of, sources

import selfspec_cli
from selfspec_cli.vllm_plugin import versions, vllm_names
from selfspec_cli.vllm_plugin.releases import admission
from selfspec_cli.vllm_plugin.releases.seams import MOE, V1_PROPOSER, V1_RUNNER, V2_RUNNER, V2_SPECULATOR
from selfspec_cli.vllm_plugin.spec_config import VLLM_KEYS

pytestmark = pytest.mark.contract

PACKAGE = Path(selfspec_cli.__file__).parent
OURS = {
    V1_PROPOSER: [("v1/proposer.py", "_EarlyExit")],
    V2_SPECULATOR: [("v2/draft_loop.py", "DraftLoop"), ("v2/speculator.py", "EarlyExitSpeculator")],
}
"""A class of vLLM's -> our files with subclasses of it, one of the other, and their names."""


@pytest.fixture(scope="module", params=[each.release for each in versions.SUPPORTED])
def release(request) -> str:
    if folder_of(request.param) is None:
        pytest.skip(
            f"vLLM {request.param} is neither installed nor under {sources()} (${VARIABLE}): "
            f"python tests/contract/vllm_source.py {request.param}"
        )
    return request.param


@pytest.fixture(scope="module")
def vllm(release) -> Source:
    return Source(folder_of(release))


@pytest.mark.slow
def test_every_name_signature_and_field_is_there(vllm, release):
    """What is compared at the start of an engine on a release that nobody has tried."""
    assert admission.moved(vllm, versions.known(release)) == []


def test_keys_of_a_speculative_config_are_those_of_the_release(vllm, release):
    """A key that another release alone has would be passed on to a vLLM that does not know it."""
    there = set(vllm.fields("vllm.config:SpeculativeConfig"))
    assert set(VLLM_KEYS) <= there
    some_have = {key for each in versions.SUPPORTED for key in each.speculative_keys}
    assert there & some_have == set(versions.known(release).speculative_keys)


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


@pytest.mark.parametrize("base", OURS, ids=lambda base: base.rpartition(":")[2])
def test_what_our_subclasses_read_of_themselves_is_theirs_or_their_bases(vllm, base):
    ours = [node for one in our_classes(base) for node in one.body]
    read = {
        node.attr
        for one in ours
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == "self"
    }
    own = {name for one in our_classes(base) for name in assigned_on_self(one)}
    own |= {node.name for node in ours if isinstance(node, ast.FunctionDef)}
    own |= {
        node.id for part in ours if isinstance(part, ast.Assign) for node in part.targets if isinstance(node, ast.Name)
    }
    own |= {part.target.id for part in ours if isinstance(part, ast.AnnAssign)}
    assert len(read - own) > 5
    assert read - own <= vllm.attributes(base), read - own - vllm.attributes(base)


@pytest.mark.parametrize("base", OURS, ids=lambda base: base.rpartition(":")[2])
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


@pytest.mark.parametrize("base", OURS, ids=lambda base: base.rpartition(":")[2])
def test_our_subclasses_assign_to_no_property_of_their_bases(vllm, base):
    """`max_model_len` is an attribute in 0.32 and a property in 0.33."""
    properties = {
        node.name
        for kind in vllm.classes(base)
        for node in kind.body
        if isinstance(node, ast.FunctionDef) and "property" in map(ast.unparse, node.decorator_list)
    }
    for ours in our_classes(base):
        assert not assigned_on_self(ours) & properties


@pytest.mark.parametrize("base", OURS, ids=lambda base: base.rpartition(":")[2])
def test_our_overrides_take_what_the_base_is_called_with(vllm, base):
    """An override has the parameters of the base's method in its order, or takes the rest as *args, **kwargs."""
    overridden = 0
    for node in (node for ours in our_classes(base) for node in ours.body):
        if not isinstance(node, ast.FunctionDef) or not isinstance(vllm.find(f"{base}.{node.name}"), ast.FunctionDef):
            continue
        if node.name == "__init__" and base == V2_SPECULATOR:
            continue  # `init_with_early_exit` calls it, which stands in vLLM's place
        overridden += 1
        theirs = vllm.parameters(f"{base}.{node.name}")
        mine = [each.arg for each in [*node.args.args, *node.args.kwonlyargs] if each.arg != "self"]
        if node.args.vararg is None and node.args.kwarg is None:
            assert mine == theirs, node.name
        elif node.args.kwarg is not None:
            assert set(mine) <= set(theirs), node.name
    assert overridden >= 6


def test_runners_call_drafters_as_we_expect(vllm):
    v1 = calls(vllm, V1_RUNNER, "self.drafter.propose")
    (propose,) = [call for call in v1 if "next_token_ids" in keywords(call)]
    assert not propose.args and {"num_speculative_tokens", "sampling_metadata"} <= keywords(propose)
    assert [len(call.args) for call in calls(vllm, V1_RUNNER, "self.drafter.prepare_inputs")] == [3]
    assert [len(call.args) for call in calls(vllm, V1_RUNNER, "self.drafter.prepare_next_token_ids_cpu")] == [4]
    assert len(calls(vllm, V1_RUNNER, "self.drafter.take_last_draft_probs")) == 1
    assert calls(vllm, "vllm.v1.worker.cpu_model_runner", "self.drafter.load_model")
    proposed = our_method("v2/speculator.py", "EarlyExitSpeculator", "propose")
    names = [each.arg for each in proposed.args.args if each.arg != "self"]
    for call in calls(vllm, V2_RUNNER, "self.speculator.propose"):
        assert keywords(call) <= set(names)
        assert names[: len(call.args)] == vllm.parameters(f"{V2_SPECULATOR}.propose")[: len(call.args)]
    assert [len(call.args) for call in calls(vllm, V2_RUNNER, "self.speculator.set_attn")] == [5]
    assert calls(vllm, V2_RUNNER, "self.speculator.capture")
    assert calls(vllm, V2_RUNNER, "self.speculator.init_cudagraph_manager")


def test_workers_learn_a_shorter_context_before_the_kv_cache_is_made(vllm):
    """`max_model_len=auto` shrinks it; both runners set what the drafter reads again in `set_attn` and its like."""
    core = vllm.segment("vllm.v1.engine.core:EngineCore._initialize_kv_caches")
    assert core.index("'update_max_model_len'") < core.index("initialize_from_config(")
    worker = vllm.segment("vllm.v1.worker.gpu_worker:Worker.update_max_model_len")
    assert "self.model_config.max_model_len = max_model_len" in worker


def test_verification_refuses_a_place_that_holds_no_token(vllm):
    """Places that were not drafted are invalid drafts to the rejection sampler, which makes them -1 (v2/sampler.py)."""
    folder = V2_RUNNER.rpartition(".")[0]
    kernels = vllm.text(f"{folder}.spec_decode.rejection_sampler_utils")
    assert "is_valid_draft = draft_sampled >= 0" in kernels
    assert "accepted &= is_valid_draft" in kernels
    sampler = vllm.segment(f"{folder}.spec_decode.rejection_sampler:RejectionSampler.__call__")
    assert "masked_fill(invalid_drafts, -1)" in sampler
    (call,) = calls(vllm, V2_RUNNER, "self.rejection_sampler")
    assert len(call.args) == 4 and ast.unparse(call.args[3]) == "invalid_drafts"


@pytest.mark.slow
def test_plugins_are_loaded_where_the_names_are_that_register_replaces(vllm):
    """`register` imports nothing: the process that builds an engine has EngineArgs, one that runs it the worker."""
    arguments = vllm.segment("vllm.engine.arg_utils:EngineArgs.__post_init__")
    assert "load_general_plugins()" in arguments
    assert "vllm.v1.worker.worker_base" in vllm.imported_with("vllm.v1.engine.core")
    assert "load_general_plugins()" in vllm.segment("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker")


def test_decoders_cut_their_loop_at_end_layer(vllm):
    folder = vllm.file("vllm.model_executor.models").parent
    cutting = {file.stem for file in folder.glob("*.py") if "self.end_layer)" in file.read_text(encoding="utf-8")}
    assert len(cutting) >= 60
    assert {"llama", "qwen3_moe", "gemma", "gemma2", "gemma3"} <= cutting


def test_the_state_of_a_compiled_decoder_is_what_we_reset(vllm):
    text = vllm.text("vllm.compilation.decorators")
    for name in ("compiled", "aot_compiled_fn", "was_aot_compile_fn_loaded_from_disk"):
        assert f"self.{name} =" in text, name
    assert "self.do_not_compile" in text
    assert "self.forward" in vllm.segment("vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper")


def test_an_artifact_on_disk_is_found_and_loaded_by_the_config_that_a_view_is_given(vllm):
    text = vllm.text("vllm.compilation.decorators")
    for part in ("aot_compile_hash_factors(self.vllm_config)", "finalize_loading(model.vllm_config)"):
        assert part in text, part
    assert "model.compilation_config.dynamic_shapes_config" in text


def test_a_pass_of_ours_sees_norms_before_vllm_lowers_them(vllm):
    """weights/fused.py looks for a norm's operator, its arguments in this order, and gives vLLM one pass."""
    manager = vllm.segment("vllm.compilation.passes.pass_manager:PostGradPassManager.__call__")
    assert manager.index("for pass_ in self.passes") < manager.index("self.ir_lowering(graph)")
    backend = vllm.text("vllm.compilation.backends")
    assert "self.compilation_config.inductor_compile_config[self.pass_key]" in backend
    assert backend.index("self.pass_manager.configure(") < backend.index("self.pass_manager.add(")
    assert "def pass_key(self)" in vllm.text("vllm.platforms.interface")
    norm = vllm.parameters("vllm.ir.ops.layernorm:fused_add_rms_norm")
    assert norm == ["x", "x_residual", "weight", "epsilon", "variance_size"]
    forward = vllm.segment("vllm.model_executor.layers.layernorm:RMSNorm.forward_native")
    assert "ir.ops.fused_add_rms_norm.maybe_inplace(" in forward
    assert "F.silu(x[..., :d]) * x[..., d:]" in vllm.segment("vllm.model_executor.layers.activation:SiluAndMul")


def test_a_mixture_of_experts_is_found_by_its_name(vllm):
    """Copies of experts run because they stand under a name of their own (weights/experts.py)."""
    runner = f"{MOE}.runner.moe_runner"
    assert "layer = forward_context.no_compile_layers[layer_name]" in vllm.segment(f"{runner}:get_layer_from_name")
    assert "return LayerName(self.layer_name)" in vllm.segment(f"{runner}:MoERunner._encode_layer_name")
    context = vllm.text("vllm.forward_context")
    assert "no_compile_layers=vllm_config.compilation_config.static_forward_context" in context
    assert "self.isa" in vllm.text(f"{MOE}.experts.cpu_moe")


@pytest.mark.slow
def test_reader_and_import_agree_on_the_installed_release():
    """What is read as text is what Python sees: the check of the reader itself."""
    found = versions.installed()
    folder = folder_of(found[1].partition("+")[0])
    for target in SIGNATURES:
        assert Source(folder).parameters(target) == without_self(pkgutil.resolve_name(target)), target


def from_vllm(file: Path) -> Iterator[tuple[str, str]]:
    """(name in our file, "module:name") of everything that a file imports from vLLM, for annotations too."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module == vllm_names.__name__:
            yield from ((alias.asname or alias.name, vllm_names.PLACES[alias.name]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)


def imported() -> set[str]:
    """ "module:name" of everything that this package imports from vLLM."""
    return {place for file in PACKAGE.rglob("*.py") for _, place in from_vllm(file)}


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
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield file, node, names[node.func.id]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def our_class(file: str, name: str) -> ast.ClassDef:
    (found,) = [node for node in parsed(PACKAGE / "vllm_plugin" / file).body if getattr(node, "name", "") == name]
    return found


def our_classes(base: str) -> list[ast.ClassDef]:
    return [our_class(file, name) for file, name in OURS[base]]


def our_method(file: str, kind: str, name: str) -> ast.FunctionDef:
    (found,) = [node for node in our_class(file, kind).body if getattr(node, "name", "") == name]
    return found


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
