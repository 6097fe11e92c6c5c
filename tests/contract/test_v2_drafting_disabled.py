"""Steps that rest, through what vLLM's runner does with its speculator in one step."""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from selfspec_cli.vllm_plugin.v2.runner import leave_out_drafting

pytestmark = pytest.mark.contract


def runner(**changes):
    """A runner whose speculator drafted nothing in the last step, before a step of three requests without drafts."""
    handler = DraftTokensHandler.__new__(DraftTokensHandler)
    handler.req_ids, handler.draft_tokens_np, handler.num_draft_tokens = ["gone"], torch.zeros(1, 4).numpy(), 4
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_draft_tokens=0, has_structured_output_reqs=False)
    made = SimpleNamespace(
        speculator=SimpleNamespace(drafting_disabled=True),
        num_speculative_steps=4,
        draft_tokens_handler=handler,
        execute_model_state=SimpleNamespace(input_batch=batch, num_spec_tokens_to_schedule=0),
        pp_handler=None,
    )
    for path, value in changes.items():
        *owners, name = path.split("__")
        owner = made
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    return made


def step(made):
    """What vLLM's part of the step sees: the speculator, and how many drafts a step has at most."""

    def sample_tokens(self, grammar_output):
        assert grammar_output == "grammar"
        return self.speculator, self.num_speculative_steps

    return leave_out_drafting(sample_tokens)(made, "grammar")


def test_a_step_that_rests_has_no_speculator_and_gets_it_back():
    made = runner()
    speculator = made.speculator
    assert step(made) == (None, 0)
    assert (made.speculator, made.num_speculative_steps) == (speculator, 4)
    found = made.draft_tokens_handler.get_draft_tokens()
    assert (found.req_ids, found.draft_token_ids) == (["a", "b", "c"], [[], [], []])


def test_the_speculators_clock_is_found_when_the_forward_pass_was_launched():
    made = runner(speculator=SimpleNamespace(clock=SimpleNamespace(launched=0.0)))
    step(made)
    assert made.speculator.clock.launched > 0


def test_a_step_that_fails_gives_the_speculator_back():
    made = runner()
    kept = made.speculator

    def fails(self):
        raise MemoryError

    with pytest.raises(MemoryError):
        leave_out_drafting(fails)(made)
    assert made.speculator is kept


@pytest.mark.parametrize(
    "changes",
    [
        {"speculator__drafting_disabled": False},  # takes in what was accepted
        {"speculator": SimpleNamespace()},  # one of vLLM's
        {"speculator": None},
        {"execute_model_state": None},
        {"execute_model_state__num_spec_tokens_to_schedule": 2},
        {"execute_model_state__input_batch__num_draft_tokens": 3},
        {"execute_model_state__input_batch__has_structured_output_reqs": True},
        {"pp_handler": object()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_any_other_step_is_vllms(changes):
    made = runner(**changes)
    kept = made.draft_tokens_handler.req_ids
    assert step(made) == (made.speculator, 4)
    assert made.draft_tokens_handler.req_ids == kept


def test_vllm_does_without_a_speculator_wherever_it_asks_for_one():
    """In its sampling step, what it does with a speculator is below a question whether there is one."""
    original = inspect.unwrap(model_runner.GPUModelRunner.sample_tokens)
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(original))).body
    guarded = [node for node in ast.walk(function) if isinstance(node, ast.If | ast.Assign)]
    asks = {
        id(part)
        for node in guarded
        if "self.speculator is not None" in ast.unparse(getattr(node, "test", node))
        for part in ast.walk(node)
    }
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == "speculator"]
    assert uses and all(id(node) in asks for node in uses)
