#!/usr/bin/env python3
"""Simulate how many GPUs a day of requests needs, with plain and with drafting servers (docs/serving.md).

    PYTHONPATH=. python experiments/scale/fleet.py check          # the simulation compared with measured open loops
    PYTHONPATH=. python experiments/scale/fleet.py day            # GPUs for a day, by server and by policy

A server is described by two curves over the number of running requests, both measured in closed loops
(`results/published/serving.jsonl.xz`, the widened reference model on one H200): the median time to the first token, and
the median time per further token. Between two levels they are interpolated in log-log; beyond the last one, where the
server is saturated, the time grows in proportion. A request waits for its first token as the curve says for the load at
its arrival. Then all running requests advance at the rate of the current load (processor sharing).

A step with a prefill delays all running requests. In a closed loop of equal requests all join at once, so the curves
hardly show that delay: one number per server, fitted to the lightest open loop. The heavier loops are not used for the
fit and are the check. Not modelled: preemption, lengths of prompts, the prefix cache.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.arguments import among
from selfspec_cli.load_patterns.poisson import moments

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "generate"))

TOKENS = 128  # of an answer, in the measured loops and here
RUN = "serving/load_h200_rust_long.json"
SIDES = ("plain", "early exit")
OPEN = ("poisson 30%", "poisson 60%", "poisson 90%")
TOLERANCE = 0.10
SEED = 0  # of the arrivals of a load test's only run


@dataclass(frozen=True)
class Server:
    """Curves of one kind of server.

    points: (running requests, ms to the first token, ms per further token), ascending. stall: ms by which a step with a
    prefill delays running requests.
    """

    name: str
    points: tuple[tuple[float, float, float], ...]
    stall: float = 0.0

    def _at(self, running: float, column: int) -> float:
        levels = [point[0] for point in self.points]
        running = max(running, levels[0])
        if running >= levels[-1]:
            return self.points[-1][column] * running / levels[-1]
        place = bisect_right(levels, running)
        (low, *_), (high, *_) = self.points[place - 1], self.points[place]
        share = math.log(running / low) / math.log(high / low)
        return float(self.points[place - 1][column] ** (1 - share) * self.points[place][column] ** share)

    def first(self, running: float) -> float:
        """Return the seconds to the first token of a request that arrives at `running` others."""
        return self._at(running + 1, 1) / 1000

    def token(self, running: float) -> float:
        """Return the seconds per further token of `running` requests."""
        return self._at(running, 2) / 1000


@dataclass
class Served:
    """The times of a request, in seconds. first: to its first token. ended: to its last one."""

    first: float
    ended: float

    @property
    def token(self) -> float:
        """Seconds per further token."""
        return (self.ended - self.first) / (TOKENS - 1)


class Replica:
    """One server under processor sharing. work: tokens that a request would have had since the start."""

    def __init__(self, server: Server) -> None:
        self.server, self.now, self.work, self.joined = server, 0.0, 0.0, -1.0
        self.prefilling: list[tuple[float, int]] = []  # (when the first token comes, request)
        self.decoding: list[tuple[float, int]] = []  # (work at which it ends, request)

    @property
    def running(self) -> int:
        """Number of its requests."""
        return len(self.prefilling) + len(self.decoding)

    def begin(self, request: int) -> float:
        """Take a request now; return the seconds to its first token."""
        wait = self.server.first(self.running)
        step = self.server.token(max(self.running, 1))
        if self.now - self.joined > step:  # else it shares a prefill step with the last request
            self.joined = self.now
            self.work -= self.server.stall / 1000 / step
        heapq.heappush(self.prefilling, (self.now + wait, request))
        return wait

    def until(self, time: float) -> Iterator[tuple[float, int]]:
        """Advance to `time`; yield (time, request) of requests that end before."""
        while True:
            rate = 1 / self.server.token(max(self.running, 1))
            joins = self.prefilling[0][0] if self.prefilling else math.inf
            ends = self.now + (self.decoding[0][0] - self.work) / rate if self.decoding else math.inf
            following = min(joins, ends, time)
            self.work += (following - self.now) * rate
            self.now = following
            if following == time and time < min(joins, ends):
                return
            if joins <= ends:
                _, request = heapq.heappop(self.prefilling)
                heapq.heappush(self.decoding, (self.work + TOKENS - 1, request))
            else:
                yield self.now, heapq.heappop(self.decoding)[1]


Choose = Callable[[Sequence[Replica], random.Random], int]


def round_robin() -> Choose:
    """Choose replicas in turn."""
    turn = iter(range(sys.maxsize))
    return lambda replicas, draw: next(turn) % len(replicas)


def least_time() -> Choose:
    """Choose the replica on which the request would end soonest, by curves and load: the gateway's policy."""

    def choose(replicas: Sequence[Replica], draw: random.Random) -> int:
        costs = [
            replica.server.first(replica.running) + (TOKENS - 1) * replica.server.token(replica.running + 1)
            for replica in replicas
        ]
        return min(range(len(replicas)), key=costs.__getitem__)

    return choose


def simulate(servers: Sequence[Server], arrivals: Sequence[float], choose: Choose, seed: int = 0) -> list[Served]:
    """Serve requests that arrive at these seconds on replicas; return the times of each."""
    replicas, draw = [Replica(server) for server in servers], random.Random(seed)
    first, ended = [0.0] * len(arrivals), [0.0] * len(arrivals)
    for request, time in enumerate(arrivals):
        for replica in replicas:
            for when, other in replica.until(time):
                ended[other] = when
        first[request] = replicas[choose(replicas, draw)].begin(request)
    for replica in replicas:
        while replica.running:
            for when, other in replica.until(replica.now + 60):
                ended[other] = when
    return [Served(wait, end - time) for wait, end, time in zip(first, ended, arrivals, strict=True)]


def poisson(rate: Callable[[float], float], most: float, seconds: float, seed: int) -> list[float]:
    """Return arrival times of a Poisson process whose rate (requests a second, at most `most`) depends on the time."""
    draw, now, arrivals = random.Random(seed), 0.0, []
    while True:
        now += draw.expovariate(most)
        if now > seconds:
            return arrivals
        if draw.random() < rate(now) / most:
            arrivals.append(now)


def measured(run: dict[str, Any], side: str) -> Server:
    """Return the curves of one side of a published load test, from its closed loops."""
    points = []
    for level, sides in run["rows"].items():
        words = level.split()
        if len(words) == 2 and words[0] == "closed" and words[1].isdigit() and side in sides:
            row = sides[side]["settled"]
            points.append((float(words[1]), row["ttft_ms"], row["tpot_ms"]))
    return Server(side, tuple(sorted(points)))


def fitted(server: Server, row: dict[str, Any]) -> Server:
    """Fit the stall with which the simulation has an open loop's measured median."""
    low, high = 0.0, 20.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if median_ms(replace(server, stall=middle), row) < row["e2e_ms"] else (low, middle)
    return replace(server, stall=(low + high) / 2)


def median_ms(server: Server, row: dict[str, Any]) -> float:
    """Return the simulated median end-to-end time (ms) of a measured open loop, with the same arrivals."""
    arrivals = moments(row["rate"], SEED, requests=row["requests"])
    return 1000 * statistics.median(served.ended for served in simulate([server], arrivals, round_robin()))


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def check(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return simulated and measured medians of the open loops of a run; the first of each side was fitted."""
    rows = []
    for side in SIDES:
        levels = [(level, run["rows"][level][side]) for level in OPEN if side in run["rows"].get(level, {})]
        server = fitted(measured(run, side), levels[0][1])
        for level, row in levels:
            simulated = median_ms(server, row)
            rows.append(
                {
                    "side": side,
                    "load": level,
                    "fitted": level == levels[0][0],
                    "stall_ms": server.stall,
                    "requests_s": row["rate"],
                    "measured_ms": row["e2e_ms"],
                    "simulated_ms": simulated,
                    "difference": simulated / row["e2e_ms"] - 1,
                }
            )
    return rows


def day_rate(hour: float, peak: float) -> float:
    """Return requests a second at an hour of the day: a quarter of the peak at 4 in the morning, the peak at 16."""
    return peak * (0.25 + 0.75 * ((1 - math.cos(2 * math.pi * (hour - 4) / 24)) / 2) ** 1.5)


def keeps(servers: Sequence[Server], rate: float, limits: dict[str, float]) -> bool:
    """Whether these replicas keep p99 TPOT and p99 TTFT (s) below the limits at a rate, with `least_time`."""
    served = simulate(servers, poisson(lambda time: rate, rate, SECONDS, 0), least_time(), 0)
    settled = served[len(served) // 5 :]
    return (
        percentile([request.token for request in settled], 0.99) <= limits["token"]
        and percentile([request.first for request in settled], 0.99) <= limits["first"]
    )


def needed(server: Server, rate: float, limits: dict[str, float]) -> int:
    """Return the smallest number of replicas that keep the limits at a rate, by doubling and bisection.

    Raises:
        ValueError: a request alone on a server does not keep them.
    """
    alone = {"token": server.token(1), "first": server.first(0)}
    for name, limit in limits.items():
        if limit < alone[name]:
            raise ValueError(
                f"--{name} {1000 * limit:g}: no number of servers keeps it; {server.name} takes "
                f"{1000 * alone[name]:.2f} ms for a request alone; allowed: that or more"
            )
    high = 1
    while not keeps([server] * high, rate, limits):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps([server] * middle, rate, limits) else (middle, high)
    return high


def day(run: dict[str, Any], peak: float, limits: dict[str, float]) -> list[dict[str, Any]]:
    """Return the GPUs for each third hour of a day, by kind of server."""
    servers = [fitted(measured(run, side), run["rows"][OPEN[0]][side]) for side in SIDES]
    rows = []
    for hour in range(1, 24, 3):
        rate = day_rate(hour, peak)
        rows.append(
            {"hour": hour, "requests_s": rate} | {server.name: needed(server, rate, limits) for server in servers}
        )
    return rows


def mixed(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return median and p99 end to end (ms) of two plain and two drafting replicas at rising loads, by policy."""
    plain, drafting = (fitted(measured(run, side), run["rows"][OPEN[0]][side]) for side in SIDES)
    rows = []
    for rate in (50.0, 150.0, 300.0, 450.0):
        row: dict[str, Any] = {"requests_s": rate}
        for policy in (round_robin, least_time):
            arrivals = poisson(lambda time, rate=rate: rate, rate, SECONDS, 0)
            times = [1000 * served.ended for served in simulate([plain] * 2 + [drafting] * 2, arrivals, policy())]
            row |= {
                f"{policy.__name__} p50": statistics.median(times),
                f"{policy.__name__} p99": percentile(times, 0.99),
            }
        rows.append(row)
    return rows


SECONDS = 60.0  # of each simulation


def curves() -> list[str]:
    """Return published load tests with closed loops of both sides and the open loop to which a stall is fitted."""
    from figure_cells import data_of, names

    runs = []
    for name in names("serving/load_*.json"):
        rows = data_of(name).get("rows", {})
        closed = [level for level in rows if level.startswith("closed ") and "settled" in rows[level].get(SIDES[0], {})]
        if len(closed) > 1 and all(side in rows.get(OPEN[0], {}) for side in SIDES):
            runs.append(name)
    return runs


def main() -> None:
    """Print the rows of a check, a day or the policies."""
    from figure_cells import data_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "day", "policies"))
    parser.add_argument(
        "--run", default=RUN, type=among(curves(), "run"), help="published load test that the curves come from"
    )
    parser.add_argument("--peak", type=float, default=400.0, help="requests a second at the busiest hour")
    parser.add_argument("--token", type=float, default=8.0, help="limit of p99 TPOT, ms")
    parser.add_argument("--first", type=float, default=300.0, help="limit of p99 TTFT, ms")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    run = data_of(options.run)
    if options.what == "check":
        rows = check(run)
    elif options.what == "day":
        if not options.peak > 0:
            parser.error(f"--peak {options.peak:g}: allowed: more than 0")
        try:
            rows = day(run, options.peak, {"token": options.token / 1000, "first": options.first / 1000})
        except ValueError as error:
            parser.error(str(error))
    else:
        rows = mixed(run)
    for row in rows:
        print(
            "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
