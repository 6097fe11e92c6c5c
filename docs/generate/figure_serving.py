"""Published files of load tests as sections of the page of all figures."""

from __future__ import annotations

import re
import statistics

from figure_cells import data_of, number, ratio, table, text_of

LOADS = (
    "load_h200",
    "load_h200_swapped",
    "load_h200_alone",
    "load_h200_late",
    "load_h200_again",
    "load_h200_full_graphs",
    "load_h200_128",
    "load_h200_rust",
    "load_h200_rust_measured",
    "load_h200_rust_long",
    "load_h200_python_long",
    "load_h200_trimmed",
    "load_h200_two_api_servers",
)
"""Runs of experiments/serving/load_on_gpu.py on the widened reference model, in their order."""

RUNS = (
    *LOADS,
    "load_h200_smollm2",
    "load_h100_smollm2",
    "load_h100_smollm2_control",
    "load_h200_smollm2_control",
    "load_h200_smollm2_pinned",
)
"""These, and those on an ordinary model under early exit."""

ADAPTIVE_SIDE = "adaptive verification"
"""The side of a level that compares adaptive with full verification."""

TIMED = re.compile(r"\w+ at (\d+): ([\d.]+) ms a step \(([\d.]+ to [\d.]+)\)")
"""A line of experiments/serving/host_time.py."""


def served() -> str:
    """Write every load of experiments/serving/load_on_gpu.py, early exit over plain vLLM."""
    rows = []
    for name in RUNS:
        run = data_of(f"serving/{name}.json")
        for level, over in run["compared"].items():
            sides = run["rows"][level]
            if ADAPTIVE_SIDE in sides:
                continue  # `adaptive_verification` has them
            speeds = [
                number(sides[side]["tok_s"], 5) if "tok_s" in sides.get(side, {}) else None
                for side in ("plain", "early exit")
            ]
            tails = [
                f"{over[tail]:.2f}" if tail in over else None
                for tail in ("tpot_p99", "ttft_p99", "settled_ttft_p99", "e2e_p99")
            ]
            control = ratio(over["control"]) if "control" in over else None
            rows.append((f"`{name}.json`", level, *speeds, ratio(over["throughput"]), control, *tails))
    text = """### serving: early exit beside plain vLLM, over HTTP

The widened reference model, E=3, k=4, 8-bit copies, a table of lengths, `adaptive_length`; one run of 8 to 30 seconds per
level, 100 seconds at 128 and 256 clients in the tenth and eleventh file. The first three files have two H200s with a server on each;
the fourth to the thirteenth one H200 for both, with every other program stopped during a measurement. In the eighth, ninth,
tenth and twelfth both servers have vLLM's front end in Rust. The seventh was measured on the same machine in the same minutes
as the eighth, and the eleventh as the tenth, with the API server in Python. In the thirteenth each server has two API servers
in Python. [Load tests](load.md#load-tests) describes the levels. Settled requests began after a tenth of the run. A number in brackets is a further
turn of the same level. The last five files are of an
ordinary model, SmolLM2-135M-Instruct widened, under early exit (E=8, k=4, `adaptive_length`), with all servers on one card.
During the first of them other engines started on the same host; during the others every other program was stopped while it
was timed. The last three have a second plain server, whose throughput over the first shows the noise of a ratio near 1.
In the last one the processes of all servers had the same cores. Each file holds its arguments.

```
python experiments/serving/load_on_gpu.py --model ./reference_widened --layer 3 --k 4 --draft-weights int8 --adaptive --gpus 2 --minutes 12 --out load.json
experiments/gpu_host.sh MODELS OUT widened load_alone     # the third
experiments/gpu_host.sh MODELS OUT widened load_widened   # the fourth to the sixth
experiments/gpu_host.sh MODELS OUT widened load_128       # the seventh
experiments/gpu_host.sh MODELS OUT widened load_rust      # the eighth
experiments/gpu_host.sh MODELS OUT widened load_rust_measured   # the ninth
experiments/gpu_host.sh MODELS OUT widened load_rust_long       # the tenth
experiments/gpu_host.sh MODELS OUT widened load_python_long     # the eleventh
experiments/gpu_host.sh MODELS OUT widened load_trimmed         # the twelfth
experiments/gpu_host.sh MODELS OUT widened load_two_api_servers # the thirteenth
experiments/gpu_host.sh MODELS OUT smollm2 load_smollm2   # the last five
```

"""
    header = (
        "file",
        "level",
        "plain tok/s",
        "early exit tok/s",
        "throughput",
        "second plain server",
        "p99 TPOT over plain",
        "p99 TTFT over plain",
        "the same, settled",
        "p99 end to end over plain",
    )
    return text + table(header, rows)


VARYING = {
    "load_h200_again": "one that another host had given, on another day; this host is slow",
    "load_h200_full_graphs": "the same",
}
"""Runs in which a load varies, and where their table is from."""


def varying() -> str:
    """Write a load that varies: the table of lengths, and each of its lengths for every load."""
    tables = []
    for file, source in VARYING.items():
        run = data_of(f"serving/{file}.json")
        names, rows = ["clients come and go", *run["over_fixed"]["fixed"]], []
        for name in names:
            turns = [row["early exit"] for level, row in run["rows"].items() if re.sub(r" \(\d+\)$", "", level) == name]
            rows.append(
                (
                    name.removeprefix("clients come and go ") if name != names[0] else "the table",
                    *(number(one["tok_s"], 5) for one in turns),
                    " / ".join(number(one["e2e_ms"], 3) for one in turns),
                )
            )
        over = run["over_fixed"]["over_the_best"]
        header = ("length", *(f"turn {turn}, tok/s" for turn in range(1, len(turns) + 1)), "end to end, median, ms")
        tables.append(f"""`{file}.json`: over the length with the best median of the turns, the table reaches
{" / ".join(ratio(one) for one in over["all"])}. The table is {source}.

{table(header, rows)}""")
    both = "\n\n".join(tables)
    return f"""### serving: a table of lengths where loads vary

The widened reference model on one H200, E=3, 8 bits, `adaptive_length`; the table `{run["table"]}`. 128 and 32 clients,
alternating every 2.5 s, 10 s a turn, everything else stopped.

```
experiments/gpu_host.sh MODELS OUT widened load_widened
```

{both}"""


def full_graphs() -> str:
    """Write full graphs for mixed prefill and decode batches, and vLLM's piecewise graphs."""
    rows = []
    for one in data_of("serving/full_graphs_apart_h200.json"):
        cpu = " / ".join(f"{share:.2f}" for share in one["server_cpu"].values())
        rows.append(
            (
                one["clients"],
                one["server"],
                one["table"],
                number(one["tok_s"], 5),
                *(number(one[name], 3) for name in ("ttft_ms", "ttft_p99_ms", "tpot_ms", "tpot_p99_ms")),
                cpu,
                one["unlike_answers"],
            )
        )
    header = (
        "clients",
        "server",
        "table of lengths",
        "tok/s",
        "TTFT (ms)",
        "p99 TTFT (ms)",
        "TPOT (ms)",
        "p99 TPOT (ms)",
        "of a core: API server, engine",
        "prompts with unlike answers",
    )
    return f"""### serving: full graphs for mixed prefill and decode batches

The widened reference model on one H200, E=3, 8 bits, k=6 at most, `adaptive_length`; three servers on one card, closed loops
of 3 to 10 seconds, alternating, in the order of the rows. One early exit server had full graphs for mixed prefill and decode batches
(one for each size, and none for short queries yet), the other one vLLM's graphs of the parts of such a step. A script of the day
measured it, and a switch that is not in the code.

{table(header, sorted(rows, key=lambda row: row[0]))}"""


ADAPTIVE = {
    "load_h200_rust_long": "The first form, with `adaptive_length`: tokens left out of the verify pass counted as "
    "rejected, and drafts after a pause were always left out, so it did not begin again.",
    "load_h200_trimmed": "Both corrected, on another host. Drafts are admitted by the exit head's own probability.",
    "load_h200_trimmed_estimated": "Drafts are admitted by how likely they are to be accepted, as vLLM's estimator learns it "
    "while the engine serves; another host again. In the last column the same server verifies every draft, as it does below "
    "`verification_from`.",
}
"""Runs with adaptive verification, and their differences."""


def adaptive_verification() -> str:
    """Write adaptive and full verification, at fixed draft lengths."""
    tables = []
    for file, about in ADAPTIVE.items():
        rows = []
        for level, sides in data_of(f"serving/{file}.json")["rows"].items():
            if ADAPTIVE_SIDE not in sides:
                continue
            _, clients, drafts = level.replace("k=", "").split()
            plain, full, ours = (sides[name] for name in ("plain", "early exit", ADAPTIVE_SIDE))
            whole = [number(one["tok_s"], 5) for name, one in sides.items() if name == "adaptive, all verified"]
            rounds = [sum(side["drafting"]["length_histogram"]) for side in (full, ours)]
            rows.append(
                (
                    int(clients),
                    int(drafts),
                    *(number(side["tok_s"], 5) for side in (plain, full, ours)),
                    ratio(ours["tok_s"] / full["tok_s"]),
                    *(f"{side['tokens_a_round']:.2f}" for side in (full, ours)),
                    *rounds,
                    *whole,
                )
            )
        header = (
            "clients",
            "drafts a round",
            "plain tok/s",
            "every draft verified",
            "adaptive verification",
            "over every draft verified",
            "tokens a round with drafts",
            "the same, adaptive",
            "rounds with drafts",
            "the same, adaptive",
            "adaptive, every draft verified",
        )
        tables.append(f"`{file}.json`. {about}\n\n{table(header[: len(rows[0])], sorted(rows))}")
    all_of_them = "\n\n".join(tables)
    return f"""### serving: adaptive verification

The widened reference model on one H200, E=3, 8 bits, behind vLLM's front end in Rust; a server with `verification=adaptive`
and one that verifies every draft, 5 to 8 seconds per level, alternating, everything else stopped. It gained nothing over a
table of lengths and was removed.

```
experiments/gpu_host.sh MODELS OUT widened load_rust_long       # the first
experiments/gpu_host.sh MODELS OUT widened load_trimmed         # the second
experiments/gpu_host.sh MODELS OUT widened load_trimmed_short   # the third
```

{all_of_them}"""


ENGINES = {
    "plain": "plain vLLM, mixed batches 2.5 ms longer",
    "slow joins": "plain vLLM, mixed batches 6 ms longer",
    "early exit": "early exit, two drafts at most from 46 requests on",
    "longer": "early exit, four drafts at any number of requests",
    "none first": "early exit, no drafts while requests arrive",
    "held": "early exit, steps 4 ms longer while requests arrive",
}
"""Behaviour of the stand-in for an engine in experiments/serving/api_server.py."""


def api_server() -> str:
    """Write vLLM's API server in front of a stand-in for the engine."""
    rows = []
    for arm, runs in data_of("serving/api_server_cpu.json")["runs"].items():
        cells = []
        for name, digits in (
            ("tok_s", 5),
            ("ttft_p99_ms", 3),
            ("last_of_the_start_ms", 3),
            ("settled_ttft_ms", 3),
            ("settled_ttft_p99_ms", 3),
        ):
            values = [run[name] for run in runs]
            middle, low, high = (number(of(values), digits) for of in (statistics.median, min, max))
            cells.append(f"{middle} ({low} to {high})")
        rows.append((ENGINES[arm], len(runs), *cells))
    header = (
        "the engine behaves like",
        "runs",
        "tok/s",
        "p99 TTFT (ms)",
        "last first token of the start (ms)",
        "TTFT, settled (ms)",
        "p99 TTFT, settled (ms)",
    )
    return f"""### serving: the share of the API server in a first token

vLLM's API server in front of a stand-in for the engine, whose steps last as long as the widened reference model's on
an H200; 128 clients that begin at once, runs of 8 seconds, three per server and two servers of each kind, alternating. Two
cores of an Intel Xeon, one for the server and one for the clients. Settled requests began after
the first second. Medians, and the least and the greatest.

```
python experiments/serving/api_server.py --out api_server.json
```

{table(header, rows)}"""


def orders() -> str:
    """Write early exit that reads a step's tokens before it launches the next one, and in vLLM's order, over plain vLLM."""
    lines = text_of("serving/host_time_h200.txt").splitlines()
    steps = [
        (("early exit" if line.startswith("layer_skip") else "plain vLLM"), *TIMED.match(line).groups())
        for line in lines
    ]
    return f"""### serving: when a step's tokens are read

Closed loops of 10 to 20 seconds, one run a level; one server with early exit in both orders (`read_first`), and everything
else stopped. Settled requests began after a tenth of the run. SmolLM2-135M-Instruct widened on one H200, all
its layers in 8 bits, k=4, where the draft loop hides what the host does:

```
experiments/gpu_host.sh MODELS OUT smollm2 load_orders host_time
```

{_in_both_orders("load_h200_read_first")}

The host's time for a step, including the client, which was in the same process: the embedded model (`reference`, E=3, k=4), which takes the device hardly any time, on the machine of the first table.

{table(("engine", "requests", "ms a step, median", "of five runs"), steps)}"""


def _in_both_orders(name: str) -> str:
    run, rows = data_of(f"serving/{name}.json"), []
    levels = [level for level, over in run["compared"].items() if "launched first" in over]
    for level in sorted(levels, key=lambda name: int(name.split()[1])):
        sides = run["rows"][level]
        for side, order in (
            ("plain", "plain vLLM"),
            ("launched first", "launched first"),
            ("early exit", "read first"),
        ):
            one, plain = sides[side], sides["plain"]
            rows.append(
                (
                    level.split()[1],
                    order,
                    number(one["tok_s"], 5),
                    ratio(one["tok_s"] / plain["tok_s"]),
                    *(number(one[name], 3) for name in ("ttft_ms", "ttft_p99_ms")),
                    number(one["settled"]["ttft_p99_ms"], 3),
                    number(one["tpot_ms"], 3),
                )
            )
    return table(
        ("clients", "order", "tok/s", "throughput", "TTFT (ms)", "p99 TTFT (ms)", "the same, settled", "TPOT (ms)"),
        rows,
    )


def agreement() -> str:
    """Write the results of `selfspec load` and `vllm bench serve` on one server."""
    rows = []
    for name, where in (
        ("agree_h200", "NVIDIA H200, widened reference model"),
        ("agree_cpu_one", "two CPU cores, one for the server and one for the clients"),
        ("agree_cpu", "the same"),
    ):
        comparison = data_of(f"serving/{name}.json")
        spread = [
            f"{number(min(one[side]['tok_s'] for one in comparison['rounds']), 4)} to "
            f"{number(max(one[side]['tok_s'] for one in comparison['rounds']), 4)}"
            for side in ("selfspec", "vllm")
        ]
        apart = [f"{comparison['per_cent_apart'][figure]:+.1f} %" for figure in ("tok_s", "tpot_ms", "ttft_ms")]
        rows.append((f"`{name}.json`", where, comparison["clients"], len(comparison["rounds"]), *spread, *apart))
    text = """### serving: `selfspec load` beside `vllm bench serve`

One server without drafts, alternating; ours over theirs within each round, and the median of that over the rounds. With 8
clients, rounds are 200 requests of 128 tokens; with one, 100 of 32.

```
python experiments/serving/agree.py --out agree.json --clients 8 --requests 200 model=./reference_widened method=baseline engine=gpu
python experiments/serving/agree.py --out agree.json --clients 1 --requests 100 --rounds 9 --server-cores 0 --client-cores 1 model=reference method=baseline engine.max_num_seqs=32 workload.output_len=32
```

"""
    header = (
        "file",
        "machine",
        "clients",
        "rounds",
        "tok/s by selfspec",
        "tok/s by vLLM",
        "tok/s",
        "median TPOT",
        "median TTFT",
    )
    return text + table(header, rows)
