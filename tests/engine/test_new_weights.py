"""Weights that are replaced in a live engine: drafts on copies follow them, and the output is the new model's own."""

from harness import greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB, save_tiny

from selfspec_cli.vllm_plugin.weights import copied

EXIT, K = LAYERS // 2, 5


def test_copies_follow_weights_that_are_replaced(model_dir, tmp_path, monkeypatch, report):
    """Before, copies stayed those of the old weights: two drafts of a thousand were accepted, without a word."""
    other = save_tiny("llama", tmp_path / "other", seed=1)
    prompts, params = ragged_prompts(8, VOCAB, seed=3), greedy(48)
    with live(other) as engine:
        want = tokens(engine.generate(prompts, params))
    with live(model_dir("llama"), layer_skip(EXIT, K, draft_weights="int8"), enable_prefix_caching=False) as engine:

        def accepted() -> float:
            before = engine.counts()
            outputs.append(tokens(engine.generate(prompts, params)))
            made = engine.counts() - before
            made.require_both_verdicts()
            return made.accepted / made.drafted

        outputs: list[list[list[int]]] = []
        old = accepted()
        with monkeypatch.context() as without:  # what would happen without renewal: the test sees a difference
            without.setattr(copied, "renew", lambda *_: None)
            without.setattr("selfspec_cli.vllm_plugin.v1.proposer.renew", lambda *_: None)
            engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
            stale = accepted()
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        new = accepted()
    report(f"accepted of drafted: {old:.3f} before, {stale:.3f} on stale copies, {new:.3f} on new ones")
    assert outputs[0] != outputs[1] == outputs[2] == want
    assert new > 0.5 * old > 2 * stale
