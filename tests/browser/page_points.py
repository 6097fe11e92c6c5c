"""Points of a made-up sweep that has something for every figure of the page."""

from dataclasses import replace

import points

from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.record.point import Measurement, Repeat, compare
from selfspec_cli.record.statistics import RequestTimes


def _measured(tok_s, drafts, batch, ppl):
    repeats = []
    for n in range(5):
        speed = tok_s * (1 + 0.01 * (n - 2))
        events = tuple(round(place * 8 / speed, 6) for place in (0.2, 0.4, 0.7, 1.0))
        requests = tuple(RequestTimes(0.0, events, 8) for _ in range(batch))
        repeats.append(Repeat(8 * batch / (speed * batch), requests, drafts))
    engine = {
        "kv_blocks": 7,
        "power_w": 300.0,
        "sm_util": 0.7,
        "step_bytes": {"full": 1e9, "draft": 2e8, "full_kv_token": 1e3, "draft_kv_token": 2e2},
    }
    return Measurement(tuple(repeats), ("aa", "bb"), engine, perplexity=ppl, seconds=2.0)


def _point(number, arm, measured, **more):
    return points.point(f"{number:012x}", arm, measured, number=number, **more)


def sweep_points(batches=(1, 4), thresholds=(4.0, 5.0, 6.0), lengths=(2, 4, 6)):
    """Baselines, gates of three thresholds, three draft lengths, a lossy arm, a loss and a failure, at each batch."""
    made = []
    for batch in batches:
        work = {"batch": batch, "output_len": 8, "repeats": 5}
        base_measured = _measured(100.0, None, batch, 10.0)
        shared = points.BASELINE | work
        base = _point(len(made), shared, base_measured)
        made.append(base)
        draft = shared | {"arm": "layer_skip", "E": 4, "head": "lens", "vocab": "full"}
        arms = [
            (draft | {"k": 4, "gate": "varH", "threshold": tau}, 110.0 + 30 * n, 10.0)
            for n, tau in enumerate(thresholds)
        ]
        arms += [(draft | {"k": k, "gate": "none"}, 85.0 + 10 * k, 10.0) for k in lengths]
        arms += [(draft | {"k": 9, "gate": "none"}, 80.0, 10.0)]
        arms += [(shared | {"arm": "skip", "E": 12, "head": "lsq", "vocab": "full"}, 190.0, 11.5)]
        for arm, speed, ppl in arms:
            drafts = None if arm["arm"] == "skip" else VerifyCounts(100, 400, 250, [90, 70, 50, 40])
            measured = _measured(speed / batch**0.2, drafts, batch, ppl)
            against = compare(measured, base, reused=False, real_text=True)
            made.append(_point(len(made), arm, measured, compared_with=against))
        failed = {"status": "failed", "reason": "out of memory", "repeats": (), "outputs": (), "engine": {}}
        made.append(_point(len(made), draft | {"k": 64, "gate": "none"}, base_measured, **failed))
    kinds = {"writing": 1.0, "math": 1.4, "coding": 1.8, "a category with a long name": 0.8}
    for number, speed in ((0, 0.0), (1, 1.0), (2, 1.3)):
        found = {name: _category(1 + speed * times) for name, times in kinds.items()}
        made[number] = replace(made[number], engine=made[number].engine | {"categories": found})
    return made


def _category(speed):
    """What `record.statistics.by_category` finds of one category, at a speed over plain decoding's."""
    counts = {"requests": 15, "steps": 100, "accepted_at": [int(90 - 60 / speed), 20]}
    return counts | {"tok_s": [99.0 * speed, 100.0 * speed, 101.0 * speed], "tpot_ms": 10 / speed}


def profile(point, seconds):
    """A profile of the arm of a point. seconds: of each part."""
    wall = sum(seconds.values())
    return points.profile(point.key, points.RUN, arm=point.arm, seconds=seconds, wall=wall, tok_s=128 / wall, gpu=True)
