"""Published files of load tests as sections of docs/figures.md."""

from __future__ import annotations

from figure_cells import data_of, number, ratio, table

LOADS = ("load_h200", "load_h200_swapped", "load_h200_alone")
"""Runs of experiments/serving/load_on_gpu.py, in their order."""


def served() -> str:
    """Every load of experiments/serving/load_on_gpu.py, early exit over plain vLLM."""
    rows = []
    for name in (*LOADS, "load_h200_smollm2", "load_h100_smollm2", "load_h100_smollm2_control"):
        found = data_of(f"serving/{name}.json")
        for level, over in found["compared"].items():
            sides = found["rows"][level]
            speeds = [number(sides[side]["tok_s"], 5) if "tok_s" in sides.get(side, {}) else None
                      for side in ("plain", "early exit")]  # fmt: skip
            tails = [f"{over[tail]:.2f}" if tail in over else None
                     for tail in ("tpot_p99", "ttft_p99", "settled_ttft_p99", "e2e_p99")]  # fmt: skip
            control = ratio(over["control"]) if "control" in over else None
            rows.append((f"`{name}.json`", level, *speeds, ratio(over["throughput"]), control, *tails))
    text = """### serving: early exit beside plain vLLM, over HTTP

Two H200s, a server on each; the widened reference model, E=3, k=4, 8-bit copies, a table of lengths, `adaptive_length`;
one run of 8 to 30 seconds a level. [Load tests](load.md) says what each level is and what disturbed some of them. Settled
are the requests that began after a tenth of the run. The last three files are of an ordinary model,
SmolLM2-135M-Instruct widened, under early exit (E=8, k=4, `adaptive_length`), with all servers on one card. During the
first of them other engines started on the same host; during the two others, on H100s, every other program was stopped
while it was timed. The last one has a second plain server, whose throughput over the first says how far a ratio near 1
is to be relied on.

```
python experiments/serving/load_on_gpu.py --model ./reference_widened --layer 3 --k 4 --draft-weights int8 --adaptive --gpus 2 --minutes 12 --out load.json
experiments/gpu_host.sh MODELS OUT widened load_alone     # the third
experiments/gpu_host.sh MODELS OUT smollm2 load_smollm2   # the last three
```

"""
    header = ("file", "level", "plain tok/s", "early exit tok/s", "throughput", "second plain server",
              "p99 TPOT over plain", "p99 TTFT over plain", "the same, settled", "p99 end to end over plain")  # fmt: skip
    return text + table(header, rows)


def agreement() -> str:
    """What `selfspec load` and `vllm bench serve` say of the same server."""
    rows = []
    for name, where in (("agree_h200", "NVIDIA H200, widened reference model"),
                        ("agree_cpu_one", "two CPU cores, one for the server and one for the clients"),
                        ("agree_cpu", "the same")):  # fmt: skip
        found = data_of(f"serving/{name}.json")
        spread = [f"{number(min(one[side]['tok_s'] for one in found['rounds']), 4)} to "
                  f"{number(max(one[side]['tok_s'] for one in found['rounds']), 4)}" for side in ("selfspec", "vllm")]  # fmt: skip
        apart = [f"{found['per_cent_apart'][figure]:+.1f} %" for figure in ("tok_s", "tpot_ms", "ttft_ms")]
        rows.append((f"`{name}.json`", where, found["clients"], len(found["rounds"]), *spread, *apart))
    text = """### serving: `selfspec load` beside `vllm bench serve`

One server without drafts, by turns; ours over theirs within each round, and the median of that over the rounds. With 8
clients, rounds are 200 requests of 128 tokens; with one, 100 of 32.

```
python experiments/serving/agree.py --out agree.json --clients 8 --requests 200 model=./reference_widened method=baseline engine=h100
python experiments/serving/agree.py --out agree.json --clients 1 --requests 100 --rounds 9 --server-cores 0 --client-cores 1 model=reference method=baseline engine.max_num_seqs=32 workload.output_len=32
```

"""
    header = ("file", "machine", "clients", "rounds", "tok/s by selfspec", "tok/s by vLLM", "tok/s", "median TPOT",
              "median TTFT")  # fmt: skip
    return text + table(header, rows)
