"""Sections of the page of all figures for published files that are not points."""

from __future__ import annotations

from collections.abc import Callable

from figure_cells import at, data_of, names, number, percent, ratio, rows_of, table
from figure_gpu import attention, fits, kernels, lossless, low_bits, trace
from figure_hosts import SERVED, served_section
from figure_quality import COLUMNS, cells
from figure_serving import (
    RUNS,
    VARYING,
    adaptive_verification,
    agreement,
    api_server,
    full_graphs,
    orders,
    served,
    varying,
)


def gates() -> str:
    """Write a table of arms that took turns on one engine."""
    lines = []
    for file in names("gates/fixed_E*"):
        for row in data_of(file)["rows"]:
            between = f"{ratio(row['speedup_min'])} to {ratio(row['speedup_max'])}"
            lines.append(
                (
                    f"`{file}`",
                    row["E"],
                    row["k"] or "plain",
                    gate_of(row),
                    number(row["tok_s_median"], 4),
                    f"{ratio(row['speedup'])} ({between})",
                )
            )
    text = """### gates: comparisons on one engine

Arms of one engine take turns prompt by prompt; every arm is a row: every draft length without a gate, and some settings.
Files with "widened" are from one H200, the others from two CPU cores.

```
python experiments/confidence_gates/compare.py fixed --layer 3 --setting survival:0.12:12 --out results/gates
```

"""
    header = ("file", "E", "k", "gate", "tok/s", "speedup (lowest to highest of the repeats)")
    return text + table(header, lines)


def gate_of(row: dict[str, str]) -> str:
    """The gate of a row of a comparison, with its threshold."""
    return "" if row["gate"] == "none" else f"{row['gate']} at {float(row['threshold']):.3g}"


def gate_costs() -> str:
    """Write the cost of gates on a GPU."""
    text = """### gates: what one costs on a GPU

Median milliseconds of a plain step or of a speculation step; one H200, Llama-3-8B shape, E=8, k=3.

```
python experiments/confidence_gates/cost_on_gpu.py --out results/gates/cost_on_gpu.json
```

"""
    rows = [(row, f"{figures['ms']:.3f}") for row, figures in data_of("gates/cost_on_gpu.json")["rows"].items()]
    return text + table(("what", "ms"), rows)


def roc() -> str:
    """Write the areas under the curves of the gates."""
    text = """### gates: which one tells good drafts from bad

Real drafts of the reference model. The area under the curve is 0.5 for a coin and 1 for a gate that is always right; "at
stake" counts only drafts after accepted ones. `gates/roc/choice.json` has the choice.

```
selfspec roc
```

"""
    rows = [
        (
            row["E"],
            row["gate"],
            row["drafted"],
            f"{float(row['auc']):.2f}",
            f"{float(row['auc_at_stake']):.2f}",
            row["threshold"],
            ratio(row["expected_speedup"]),
        )
        for row in rows_of("gates/roc/auc.csv")
    ]
    header = ("E", "gate", "drafts", "area", "area at stake", "best threshold", "expected speedup")
    return text + table(header, rows)


def tuning() -> str:
    """Write what `selfspec tune` chose."""
    choice = data_of("gates/tune/choice.json")
    words = [word for word in choice["overrides"] if not word.startswith(("model=", "head=", "vocab="))]
    text = """### gates: what `selfspec tune` chose

On two CPU cores. `reference.yaml` is the file that was written.

```
selfspec tune
```

"""
    row = (" ".join(words), ratio(choice["speedup"]), f"{choice['seconds']:.0f} s")
    return text + table(("chosen", "measured speedup", "time of the search"), [row])


def heads(name: str) -> str:
    """The heads of one run of `selfspec fit --compare`."""
    rows = [
        (
            row["E"],
            row["head"],
            row["vocab"],
            percent(row["agreement"]),
            percent(row["agreement_generated"]),
            row["best_k"],
            ratio(row["predicted_speedup"]),
            ratio(row["measured_speedup"]),
        )
        for row in data_of(f"{name}/heads.json")["rows"]
    ]
    report = data_of(f"{name}/heads.json")
    text = f"""### {name}: exit heads

{report["device"]}; fitted in {report["fit_seconds"]:.0f} s. Agreement is with the full model's choice, on held-out text and
on what the model generates.

```
selfspec fit --compare
```

"""
    header = ("E", "head", "draft vocabulary", "agreement", "on generated text", "best k", "predicted", "measured")
    return text + table(header, rows)


VIEWS = ("smollm2_views", "smollm2_fitted", "reference_views", "plain_views")


def views() -> str:
    """Write the acceptance of cheaper draft configurations."""
    engine = [
        (
            row["model"],
            row["draft_weights"],
            row["skip_layers"],
            row["rounds"],
            percent(row["first"]),
            f"{float(row['mean_accepted_len']):.2f}",
            f"{float(row['cost']):.2f}",
            ratio(row["predicted"]),
        )
        for row in data_of("views/cpu_engine/views.json")["rows"]
    ]
    plain = [
        (
            row["model"],
            row["view"],
            row["temperature"],
            row["drafts"],
            percent(row["given_before"]),
            f"{percent(row['low'])} to {percent(row['high'])}",
            f"{float(row['tokens_a_round']):.2f}",
        )
        for name in VIEWS
        for row in rows_of(f"views/{name}.csv")
        if row["position"] == "1"
    ]
    text = """### views: drafts with quantised weights of all layers

In the engine on a CPU, few steps; "predicted" is the speedup that bytes allow at batch 1, not a measurement:

```
selfspec views
```

"""
    header = (
        "model",
        "weights",
        "layers left out",
        "rounds",
        "first draft accepted",
        "tokens a round",
        "bytes of a draft step over a plain one",
        "predicted",
    )
    second = """

In plain PyTorch on one H200, on the models' own answers: SmolLM2-135M-Instruct, an ordinary model, on chat questions, and
the embedded reference model on held-out code; on a CPU its control, `reference_plain`, and the trained corrections. A
view is a draft configuration; the table has the first draft of each step, the files all four positions. Names with "weights-" are
weights rounded with data, with a correction of the rank after "r". Names with "kl" were trained as well: "kl" in 60
steps on 64 answers at a rate of 1e-3, "kl-gentle" in 100 steps on 256 answers at 2e-4. "drawn" drafts are sampled from
the view at the request's temperature (`draft_sample_method=probabilistic`).

```
experiments/views/measure.sh SMOLLM2_FOLDER results/views
python experiments/views/acceptance.py --model experiments/reference_model/plain --name reference_plain --prompts library --answers 32 --views "int8;int6;int5;int4;fp8;int4=FITTED;12-17;12-13;int4@12-13;shared@3-23;shared@6-23" --out plain_views.csv
selfspec fit-weights model=./smollm2 model.name=smollm2_135m model.dtype=float32 model.max_model_len=1024 engine=cpu engine.kv_cache_gib=2 engine.max_num_seqs=32 workload=chat draft_weights=int4 --prompts 32 --rank 32
python experiments/views/train_corrections.py --model smollm2 --weights FITTED --steps 100 --answers 256 --length 96 --rate 2e-4 --out TRAINED
python experiments/views/acceptance.py --model smollm2 --name smollm2_135m --answers 16 --views "int4=FITTED;int4=TRAINED" --out smollm2_trained.csv
```

"""
    names = ("model", "view", "temperature", "drafts", "first draft accepted", "95 % interval", "tokens a round, k=4")
    return text + table(header, engine) + second + table(names, plain)


def quality() -> str:
    """The table of perplexities."""
    text = """### quality: perplexity

One busy CPU. An arm that verifies its drafts has the baseline's perplexity by construction, so the arms here do not
verify (method `skip`). [Perplexity and evaluations](verify.md#perplexity-selfspec-ppl) explains the columns.

```
python experiments/quality_table.py reference results/quality/reference --run
```

"""
    return text + table(COLUMNS, cells(at("quality/reference")))


PARTS: tuple[tuple[Callable[[], str], tuple[str, ...]], ...] = (
    (gates, ("gates/fixed_E*",)),
    (gate_costs, ("gates/cost_on_gpu.json",)),
    (roc, ("gates/roc/*",)),
    (tuning, ("gates/tune/*",)),
    (lambda: heads("heads"), ("heads/heads.json",)),
    (lambda: heads("heads_2"), ("heads_2/heads.json",)),
    (views, ("views/*",)),
    (quality, ("quality/*",)),
    (served, tuple(f"serving/{name}.json" for name in RUNS)),
    (served_section, (SERVED,)),
    (adaptive_verification, ()),
    (varying, tuple(f"serving/{name}.json" for name in VARYING)),
    (api_server, ("serving/api_server_cpu.json",)),
    (full_graphs, ("serving/full_graphs_apart_h200.json",)),
    (orders, ("serving/load_h200_read_first.json", "serving/host_time_h200.txt")),
    (agreement, ("serving/agree_*.json",)),
    (lossless, ("gpu/*lossless*.json",)),
    (trace, ("gpu/*trace_batch1.json",)),
    (low_bits, ("gpu/lowbit/engine_h200.json", "gpu/rearranged/before_after.json", "gpu/vllm_0.33/gpu_8b.json")),
    (fits, ("gpu/fit_*.json",)),
    (attention, ("gpu/attention/*",)),
    (
        kernels,
        (
            "gpu/kernels_h200.txt",
            "gpu/tune_kernels_h200.json",
            "gpu/fp8/*",
            "gpu/lowbit/kernels_h100.json",
            "gpu/lowbit/few_tokens_h200.json",
            "gpu/lowbit/one_token_h200.json",
            "gpu/lowbit/one_token_early_h200.json",
            "gpu/lowbit/one_token_layouts_h200.json",
            "gpu/lowbit/products_h100.json",
        ),
    ),
)
"""Functions that write a part of the page, and the files for each."""

NO_FIGURES = (
    "serving/*",
    "install/*",
    "profile/*",
    "serving/README.md",
    "gpu/qwen_1.5b_h200/by_context.json",
    "gpu/two_gpus/*",
    "blog/streams_qwen.json",
)
"""Transcripts and recordings without measured figures, and files that other pages show."""
