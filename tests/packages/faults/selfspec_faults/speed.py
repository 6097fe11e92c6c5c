"""Faults that cost speed and change no output: what a performance check has to find. Each function plants one in the
runner of a live engine and returns its undoing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin.wrap import Undo, wrap

CYCLES = 20_000_000
"""Of the device's clock, about 11 ms: longer than a round of any model that a gate is for."""


def lost_draft(runner: Any) -> list[Undo]:
    """All drafts of a round but the first are lost before they are verified."""
    if hasattr(runner, "speculator"):
        return [_behind_propose(runner, lambda drafts: runner.speculator.state.lengths.clamp_(max=1))]

    def make(original: Any) -> Any:
        return lambda *args, **more: [draft[:1] for draft in original(*args, **more)]

    return [wrap(runner.drafter, "propose", make)]


def slower_step(runner: Any) -> list[Undo]:
    """A kernel takes longer than it has to; on the CPU each draft step is taken twice."""
    if hasattr(runner, "speculator"):
        return [_behind_propose(runner, lambda drafts: torch.cuda._sleep(CYCLES))]

    def make(original: Any) -> Any:
        def forward(state: Any) -> Tensor:
            original(state)
            state.ahead.step -= 1
            return original(state)

        return forward

    return [wrap(runner.drafter, "_forward", make)]


def eager_step(runner: Any) -> list[Undo]:
    """Draft steps run from Python, neither compiled nor as CUDA graphs."""
    if hasattr(runner, "speculator"):
        return [wrap(runner.speculator, "eager", lambda _: True)]
    return [wrap(runner.drafter.model.drafting_decoder, "do_not_compile", lambda _: True)]


def host_synchronisation(runner: Any) -> list[Undo]:
    """The host reads a number of each draft before it goes on."""
    return [_behind_propose(runner, lambda drafts: drafts.max().item())]


def debug_copy(runner: Any) -> list[Undo]:
    """A copy of each draft goes to the host, which does not wait for it."""
    kept: list[Tensor] = []

    def copy(drafts: Tensor) -> None:
        if not kept:
            kept.append(torch.empty(drafts.shape[1], dtype=drafts.dtype, pin_memory=True))
        kept[0].copy_(drafts[0], non_blocking=True)

    return [_behind_propose(runner, copy)]


def _behind_propose(runner: Any, do: Callable[[Tensor], Any]) -> Undo:
    """Call `do(drafts)` at the end of each round of the V2 runner, inside `propose`."""

    def make(original: Any) -> Any:
        def propose(*args: Any, **more: Any) -> Tensor:
            drafts = original(*args, **more)
            if not more.get("dummy_run"):
                do(drafts)
            return drafts

        return propose

    return wrap(runner.speculator, "propose", make)


ANYWHERE = {fault.__name__: fault for fault in (lost_draft, slower_step, eager_step)}
ON_CUDA = ANYWHERE | {fault.__name__: fault for fault in (host_synchronisation, debug_copy)}
