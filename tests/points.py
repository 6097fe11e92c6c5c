"""Points as a sweep writes them, made up: what tests of the record and of the report begin from."""

from dataclasses import replace

from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.record.point import Measurement, Point, Repeat, compare
from selfspec_cli.record.quality import Profile
from selfspec_cli.record.statistics import RequestTimes

RUN = "20261121-000000-aaaa"
ARM = {
    "arm": "layer_skip",
    "model": "m",
    "E": 4,
    "k": 5,
    "head": "lens",
    "vocab": "full",
    "gate": "varH",
    "threshold": 5.0,
    "workload": "headline",
    "batch": 1,
    "input_len": 32,
    "output_len": 4,
    "temperature": 0.0,
    "repeats": 3,
}
BASELINE = {name: ARM[name] for name in ARM if name not in ("E", "k", "head", "vocab", "gate", "threshold")}
BASELINE["arm"] = "baseline"


def repeat(tok_s, verified=None, drafting=None):
    """A repeat of one request of four tokens, one output a token."""
    seconds = 4 / tok_s
    times = tuple(round(seconds * part / 4, 6) for part in (1, 2, 3, 4))
    return Repeat(seconds, (RequestTimes(0.0, times, 4),), verified, drafting)


def measured(*tok_s, outputs=("aa", "bb"), **more):
    return Measurement(tuple(map(repeat, tok_s)), outputs, {"kv_blocks": 7}, seconds=2.0, **more)


def point(key="1", arm=ARM, measurement=None, run_id=RUN, number=0, **more):
    """A measured point; more: other fields of `Point`."""
    found = measurement or measured(100.0, 110.0, 90.0)
    key = (key * 12)[:12]
    fields = {
        "id": f"{key}-{run_id}",
        "key": key,
        "run_id": run_id,
        "number": number,
        "status": "ok",
        "reason": None,
        "time": "2026-11-21T00:00:00+0000",
        "seconds": found.seconds,
        "start_seconds": 10.0,
        "device": "a machine",
        "arm": arm,
        "engine": found.engine,
        "perplexity": found.perplexity,
        "outputs": found.outputs,
        "repeats": found.repeats,
        "command": ["selfspec", "sweep"],
        "config": {"k": 5},
        "digests": {"model": "m0"},
        "versions": {"selfspec": "0.1.0"},
        "git": {"revision": "a" * 40, "dirty": False},
    }
    return Point(**fields | more)


def baseline(key="0", *tok_s, run_id=RUN, **more):
    return point(key, BASELINE, measured(*(tok_s or (100.0, 105.0, 90.0))), run_id, **more)


def against(base, key="1", *tok_s, reused=False, arm=ARM, run_id=None, **more):
    """A point of an arm, compared with a baseline's point."""
    found = measured(*(tok_s or (150.0, 160.0, 140.0)))
    compared = compare(found, base, reused=reused, real_text=arm.get("acceptance_length") is None)
    return point(key, arm, found, run_id or base.run_id, **{"number": 1, "compared_with": compared} | more)


def failed(key="2", reason="out of memory", **more):
    made = point(key, **more)
    return replace(made, status="failed", reason=reason, repeats=(), outputs=(), engine={}, seconds=None)


def profile(key="0", run_id="20261122-000000-aaaa", **more):
    """A profile of an arm; more: other fields of `Profile`."""
    fields = {
        "key": (key * 12)[:12],
        "run_id": run_id,
        "time": "2026-11-22T00:00:00+0000",
        "device": "a machine",
        "arm": BASELINE,
        "seconds": {"verify": 0.6, "sampler": 0.1, "other": 0.1, "idle": 0.2},
        "wall": 1.0,
        "rounds": 10,
        "tokens": 10,
        "tok_s": 12.0,
        "tok_s_profiled": 10.0,
        "gpu": False,
        "kernels": [{"name": "aten::mm", "seconds": 0.5, "calls": 20}],
        "trace": "x.trace.json.gz",
    }
    return Profile(**fields | more)


def drafts(rounds=10, places=50, accepted=30, at=(10, 8, 6, 4, 2)):
    return VerifyCounts(rounds, places, accepted, list(at))
