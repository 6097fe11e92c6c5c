r"""What the bandit over thresholds and lengths gains over the best fixed setting and over lengths by acceptance.

    python experiments/confidence_gates/bandit.py --out results/gates/bandit_E3.json

No engine: a draft of 12 from every position of the model's own greedy output is made by the first E layers in
transformers, over held-out library code; "nothing accepted" is the same log with every draft rejected. From such a log
the rounds of any rule for lengths and thresholds follow exactly, one request after the other. A round takes the time of
a plain step, and the cost of a draft for each draft step; `verify` is what each draft adds to the verify pass, which no
rule knows. What is written is the number of tokens in the time of a plain step.

--late names how many rounds later the bandit hears what a round yielded. On CUDA the host would hear it late: one round
at least, because it begins a round before the last one is over, and some 100 by the copy of the counters for /metrics.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from selfspec_cli.config.paths import model_path
from selfspec_cli.config.schema import ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit import replay
from selfspec_cli.early_exit.acceptance import USUAL_WEIGHT, Ladder, RequestEstimate
from selfspec_cli.early_exit.bandit import Arm, Bandit, arms
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.estimate import trials, updated
from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.gates.distribution import Distribution
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine.arguments import ModelTokens
from selfspec_cli.scripts import numbers
from selfspec_cli.texts.prompts import workload_prompts

LONGEST = 12
Round = tuple[int, int]  # draft steps, and how many of them were accepted
Chooser = Callable[[int], Callable[[int], Round]]
"""From the number of a request to what it does in a round that begins at a place of the log."""


def log_of(cfg: RunConfig, layer: int) -> DraftLog:
    """Drafts from every position, prompt after prompt; `request` numbers the prompts."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(model_path(cfg.model), dtype=torch.float32).eval()
    names, parts = features(), []
    layers = model.model.layers
    for number, prompt in enumerate(workload_prompts(cfg, ModelTokens(cfg))):
        start = len(prompt)
        # One token more than there are rounds: where a draft may still be right.
        whole = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=cfg.workload.output_len,
                               max_new_tokens=cfg.workload.output_len)[0]  # fmt: skip
        model.model.layers = layers[:layer]
        ends = torch.arange(start, len(whole) - 1)
        rows, context = len(ends), len(whole)
        cache = DynamicCache()
        model.model(whole[None], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(rows)
        mask = torch.where(torch.arange(context)[None] < ends[:, None], 0.0, float("-inf"))
        token, previous = whole[ends], dict.fromkeys(names, 1.0)
        tokens, statistics = [], []
        for step in range(LONGEST):
            mask = torch.cat([mask, torch.zeros(rows, 1)], 1)
            hidden = model.model(token[:, None], past_key_values=cache, position_ids=(ends + step)[:, None],
                                 attention_mask=mask[:, None, None], use_cache=True).last_hidden_state  # fmt: skip
            logits = model.lm_head(hidden[:, -1])
            found = {name: GATES[name].statistic(Distribution(logits), previous[name]) for name in names}
            previous, token = found, logits.argmax(-1)
            tokens.append(token)
            statistics.append(torch.stack([found[name] for name in names], -1))
        model.model.layers = layers
        beyond = torch.cat([whole, torch.full((LONGEST,), -1)])  # what comes after the last token is not known
        right = torch.stack(tokens, 1) == torch.stack([beyond[ends + 1 + step] for step in range(LONGEST)], 1)
        accepted = right.long().cumprod(1).sum(1)
        parts.append((torch.stack(statistics, 1), torch.full_like(accepted, LONGEST), accepted,
                      torch.full_like(accepted, number)))  # fmt: skip
    return DraftLog(*(torch.cat(each) for each in zip(*parts, strict=True)), names)


def joined(*logs: DraftLog) -> DraftLog:
    """Alternating logs, eight requests of each."""
    chosen, numbers = [], 0
    for block in range(0, max(int(log.request.max()) + 1 for log in logs), 8):
        for log in logs:
            for request in range(block, block + 8):
                part = log.choose(log.request == request)
                if len(part.request):
                    named = torch.full_like(part.request, numbers)
                    chosen.append((part.statistics, part.drafted, part.accepted, named))
                    numbers += 1
    return DraftLog(*(torch.cat(each) for each in zip(*chosen, strict=True)), logs[0].features)


def laid(log: DraftLog, choose: Chooser, cost: float, verify: float, passes: int) -> float:
    """Tokens in the time of a plain step, when all requests come so many times."""
    tokens = time = 0.0
    for request, places in [*starts(log)] * passes:
        act, at = choose(request), places[0]
        while at <= places[-1]:
            steps, accepted = act(at)
            tokens, time = tokens + accepted + 1, time + 1 + (cost + verify) * steps
            at += accepted + 1
    return tokens / time


def starts(log: DraftLog) -> Iterator[tuple[int, range]]:
    numbers = log.request.tolist()
    at = 0
    for request in dict.fromkeys(numbers):
        end = at + numbers.count(request)
        yield request, range(at, end)
        at = end


def fixed(log: DraftLog, setting: Setting) -> Chooser:
    steps = replay.draft_lengths(log, setting) if setting.k else torch.zeros_like(log.drafted)
    accepted, taken = log.accepted.minimum(steps).tolist(), steps.tolist()
    return lambda request: lambda at: (taken[at], accepted[at])


def by_acceptance(log: DraftLog, gate: str, threshold: float | None, k: int, cost: float) -> Chooser:
    """`adaptive_length`, as on the CPU."""
    ladder, usual = Ladder.of(k, cost), 1.0
    by_length = {length: fixed(log, Setting(gate, threshold, length))(0) for length in ladder.lengths}

    def choose(request: int) -> Callable[[int], Round]:
        estimate = RequestEstimate.beginning(ladder, usual)

        def act(at: int) -> Round:
            nonlocal usual
            length = estimate.length()
            if not length:
                return 0, 0
            steps, accepted = by_length[length](at)
            usual = updated(usual, accepted, trials(accepted, steps), USUAL_WEIGHT)
            estimate.verdict(accepted, steps)
            return steps, accepted

        return act

    return choose


def by_bandit(
    log: DraftLog, gate: str, threshold: float | None, k: int, cost: float, seed: int, late: int = 0
) -> Chooser:
    choices = arms(gate, threshold, k)
    bandit = Bandit(choices, cost, seed)
    unheard: deque[tuple[Arm, list[tuple[int, int]]]] = deque()

    def limit(arm: Arm) -> float | None:
        return threshold if arm.threshold is None else arm.threshold

    by_arm = {arm: fixed(log, Setting(gate, limit(arm), arm.k))(0) for arm in choices}

    def act(at: int) -> Round:
        arm = bandit.choose()
        steps, accepted = by_arm[arm](at)
        unheard.append((arm, [(accepted, steps)] if arm.k else []))
        if len(unheard) > late:
            bandit.learn(*unheard.popleft())
        return steps, accepted

    return lambda request: act


def table(
    log: DraftLog,
    gate: str,
    threshold: float | None,
    k: int,
    cost: float,
    verify: float,
    passes: int,
    lates: Sequence[int] = (),
) -> dict[str, Any]:
    """Speeds over plain decoding. best fixed: of the arms that the bandit has."""

    def speed(chooser: Chooser) -> float:
        return round(laid(log, chooser, cost, verify, passes), 4)

    alone = {arm: speed(fixed(log, Setting(gate, threshold if arm.threshold is None else arm.threshold, arm.k)))
             for arm in arms(gate, threshold, k)}  # fmt: skip
    best = max(alone, key=lambda arm: alone[arm])

    def tried(late: int) -> list[float]:
        return sorted(speed(by_bandit(log, gate, threshold, k, cost, seed, late)) for seed in range(5))

    tries = tried(0)
    late = {f"bandit, {rounds} rounds late": tried(rounds)[2] for rounds in lates}
    return {"as configured": alone[Arm(None, k)], "best fixed": alone[best], "it is": f"k={best.k}, {best.threshold}",
            "adaptive_length": speed(by_acceptance(log, gate, threshold, k, cost)), "bandit": tries[2],
            "bandit, least to most": [tries[0], tries[-1]], **late}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--passes", type=int, default=8, help="times that the same requests come")
    parser.add_argument("--late", type=numbers, default=[], help="rounds, such as 1,8,128")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the drafts, for another run")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)

    def log(prompts: str) -> DraftLog:
        kept = given.logs and given.logs / f"{prompts}-{given.layer}-{given.prompts}-{given.output_len}.pt"
        if kept and kept.is_file():
            return DraftLog(**torch.load(kept))
        work = WorkloadConfig(num_prompts=given.prompts, output_len=given.output_len, prompts=prompts)
        with torch.inference_mode():
            found = log_of(RunConfig(model=ModelConfig(), workload=work), given.layer)
        if kept:
            given.logs.mkdir(parents=True, exist_ok=True)
            torch.save(vars(found), kept)
        return found

    code = log("heldout")
    noise = replace(code, accepted=torch.zeros_like(code.accepted))
    logs = {"held-out code": code, "nothing accepted": noise, "both alternating": joined(code, noise)}
    share = {name: round(float(one.accepted.clamp_max(4).sum() / (4 * len(one.accepted))), 3)
             for name, one in logs.items()}  # fmt: skip
    rows = []
    for name, one in logs.items():
        for cost, verify in ((0.17, 0.0), (0.17, 0.1), (0.35, 0.0)):
            for gate, threshold, k in (("none", None, 4), ("none", None, 12), ("maxp", 0.3, 4), ("maxp", 0.3, 12)):
                rows.append({"traffic": name, "cost": cost, "verify": verify, "gate": gate, "threshold": threshold,
                             "k": k,
                             **table(one, gate, threshold, k, cost, verify, given.passes, given.late)})  # fmt: skip
                print(rows[-1], flush=True)
    document = {"layer": given.layer, "prompts": given.prompts, "passes": given.passes, "accepted of 4": share,
                "rounds": {name: len(one.drafted) for name, one in logs.items()}, "rows": rows}  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
