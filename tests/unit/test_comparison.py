"""Rounds laid over agreements, and what `selfspec fit --compare` makes of them and of step times."""

import itertools
import random
from pathlib import Path

import pytest

from selfspec_cli.early_exit.cost_model import Costs, expected_tokens
from selfspec_cli.early_exit.fitting import tokens_a_round
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.record import documents
from selfspec_cli.record.columns import Record
from selfspec_cli.record.head_rows import LENGTHS, HeadRow, by_speedup
from selfspec_cli.report import heads
from selfspec_cli.report.figures import exits
from selfspec_cli.stages.heads import beside, predict


def rounds_by_hand(agreed, k):
    """Greedy speculative decoding, token by token: the slow reference."""
    position = rounds = 0
    while position < len(agreed):
        drafts = agreed[position : position + k]
        accepted = len(list(itertools.takewhile(bool, drafts)))
        position += min(accepted + 1, len(agreed) - position)
        rounds += 1
    return rounds


@pytest.mark.parametrize("k", [1, 3, 8])
def test_rounds_are_the_slow_references(k):
    draw = random.Random(k)
    sequences = [[draw.random() < 0.7 for _ in range(draw.randrange(1, 60))] for _ in range(40)]
    want = sum(map(len, sequences)) / sum(rounds_by_hand(sequence, k) for sequence in sequences)
    assert tokens_a_round(sequences, k) == pytest.approx(want)


def test_rounds_need_positions_and_a_k():
    with pytest.raises(ValueError, match="no generated positions"):
        tokens_a_round([[]], 2)
    with pytest.raises(ValueError, match="k = 0"):
        tokens_a_round([[True]], 0)


def row(layer, head, vocab, rate, head_us):
    tokens = {f"tokens_k{k}": expected_tokens(rate, k) for k in LENGTHS}
    return HeadRow("m", layer, head, vocab, rate, rate, head_us=head_us, bytes_per_step=4096, **tokens)


def test_the_best_head_balances_cost_and_acceptance(tmp_path):
    rows = [
        row(2, "lens", "full", 0.6, 300),
        row(2, "lens", "1024", 0.58, 80),
        row(12, "lsq", "full", 0.3, 300),
        HeadRow("m", 4, "lens", "full"),
    ]
    times = Costs(plain=8e-3, verify=8e-3, draft=1e-4, per_layer=3e-4)
    predict(rows, times)
    assert [r.head for r in by_speedup(rows)] == ["lens", "lens", "lsq"]
    best = by_speedup(rows)[0]
    assert best.vocab == "1024"
    assert best.predicted_speedup == max(times.at(2, 80e-6).speedup(t, k) for k, t in best.tokens.items())
    best.measured_speedup, best.measured_min, best.measured_max = 1.5, 1.4, 1.6
    files = documents.save_rows("heads", HeadRow, rows, {"pairs": 7}, tmp_path)
    lines = (tmp_path / "heads.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[0].startswith("model,E,head,vocab,agreement")
    assert lines[4].startswith("m,4,lens,full,,,")  # what was not measured is empty, not 0
    assert set(files) == {"csv", "json"}
    assert Path(heads.draw(rows, tmp_path / "new" / "heads.png")).stat().st_size > 1000
    assert heads.table(rows).row_count == 3


def test_heads_of_one_kind_have_shades_of_its_colour():
    colours = exits.head_colours(["lens", "translator", "translator_r4", "lsq"])
    assert len(set(colours.values())) == 4
    assert colours["translator"] == HEADS["translator"].colour
    assert colours["translator_r4"] > colours["translator"]


def test_measured_beside_predicted_says_where_they_differ():
    times = Costs(plain=8e-3, verify=8e-3, draft=1e-4, per_layer=3e-4)
    head = row(2, "lens", "full", 0.6, 300)
    predict([head], times)
    tokens, k = head.tokens[head.best_k], head.best_k
    round_ms = 1.1 * 1000 * times.at(2, 300e-6).round(k)  # a round takes a tenth longer, the baseline a twentieth
    itl = round_ms / (0.9 * tokens)
    baseline = Record("r", "t", "baseline", "m", tok_s_median=1000 / 8.4, tpot_ms=8.4)
    speed = 1000 / itl
    record = Record(
        "r",
        "t",
        "layer_skip",
        "m",
        tok_s_median=speed,
        tok_s_min=0.9 * speed,
        tok_s_max=speed,
        speedup=speed * 8.4 / 1000,
        mean_accepted_len=0.9 * tokens,
        tpot_ms=itl,
    )
    beside(head, record, baseline, times)
    assert (head.tokens_ratio, head.round_ratio, head.baseline_ratio) == pytest.approx((0.9, 1 / 1.1, 1.05))
    assert head.efficiency == pytest.approx(head.tokens_ratio * head.round_ratio * head.baseline_ratio)
    assert head.measured_min == pytest.approx(0.9 * head.measured_speedup)
