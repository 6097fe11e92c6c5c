"""Counts what must not happen while a model drafts (`early_exit/counters.py`), on a live engine.

What watching costs must be in no timing, so a run that is timed is not watched. Outputs stay what they are."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from selfspec_cli.early_exit.counters import INVARIANTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.vllm_names import CUDAGraphMode
from selfspec_cli.vllm_plugin.wrap import Undo, around, around_object, wrap

NO_DEVICE = "on the CPU the host is the device"
NO_LOOP = "on the CPU the host ends the draft loop"
SYNCHRONISED = "called a synchronizing CUDA operation"
"""What PyTorch warns of under `torch.cuda.set_sync_debug_mode`. It says nothing of `WAITS`."""
WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))
PLACES = (0, 6, 9)
"""Of the V2 runner's arguments of `propose`: the batch, rejected drafts of each row, temperatures of each slot."""
GREEDY_BELOW = 1e-5  # vLLM's own limit of a temperature


class Watch:
    """Counts from its construction to `stop`."""

    def __init__(self, runner: Any, drafter: Any) -> None:
        if not hasattr(drafter, "head"):
            raise SettingsError("this engine does not draft with its own layers, so there is nothing to watch")
        self.counts: Counter[str] = Counter()
        self.absent: dict[str, str] = {}
        self._undo = (_watch_v2 if hasattr(runner, "speculator") else _watch_v1)(runner, drafter, self)

    def stop(self) -> dict[str, dict[str, Any]]:
        """measured: name -> count; not_applicable: name -> why."""
        for undo in reversed(self._undo):
            undo()
        measured = {name: self.counts[name] for name in INVARIANTS if name not in self.absent}
        return {"measured": measured, "not_applicable": dict(self.absent)}


def _watch_v1(runner: Any, drafter: Any, watch: Watch) -> list[Undo]:
    watch.absent |= dict.fromkeys(("host_synchronisations", "allocations", "host_copies"), NO_DEVICE)
    watch.absent["unrolled_rounds"] = NO_LOOP
    counts, drafting, through = watch.counts, [False], [0]
    closed: set[int] = set()

    @around
    def decide(original: Callable[..., Any], state: Any, *args: Any) -> Any:
        rows = state.rows.tolist()
        counts["closed_rows"] += sum(row in closed for row in rows)
        decided = original(state, *args)
        if decided[2] is not None:
            closed.update(row for row, open_ in zip(rows, decided[2].tolist(), strict=True) if not open_)
        return decided

    @around
    def propose(original: Callable[..., Any], *args: Any, sampling_metadata: Any, **more: Any) -> Any:
        before, through[0], drafting[0] = drafter.counters.drafted, 0, True
        closed.clear()
        try:
            proposals = original(*args, sampling_metadata=sampling_metadata, **more)
        finally:
            drafting[0] = False
        # A row that went through the layers and was not drafted for did work for nothing.
        counts["closed_rows"] += through[0] - (drafter.counters.drafted - before)
        if not sampling_metadata.all_greedy:
            counts["sampled_rows"] += int((sampling_metadata.temperature > GREEDY_BELOW).sum())
        drafted = [row for row, draft in enumerate(proposals) if draft]
        counts["finished_rows"] += sum(_ended_v1(runner, row) for row in drafted)
        return proposals

    @around_object
    def trunk(original: Any, ids: Tensor, *args: Any, **more: Any) -> Any:
        through[0] += len(ids)
        return original(ids, *args, **more)

    def eager(*_: Any) -> None:
        counts["eager_steps"] += drafting[0]

    # Compiled code has a layer's own call inlined, so a hook is called where a layer runs from Python.
    hook = drafter.model.drafting_layers[0].register_forward_pre_hook(eager)
    return [
        hook.remove,
        wrap(drafter, "model", trunk),
        wrap(drafter, "_decide", decide),
        wrap(drafter, "propose", propose),
    ]


def _ended_v1(runner: Any, row: int) -> bool:
    """Whether a row has all tokens that its request asked for; decided apart from the proposer, which is watched."""
    batch = runner.input_batch
    parameters = runner.requests[batch.req_ids[row]].sampling_params
    made = int(batch.num_tokens_no_spec[row]) - int(batch.num_prompt_tokens[row])
    return parameters is not None and parameters.max_tokens is not None and made >= parameters.max_tokens


def _watch_v2(runner: Any, speculator: Any, watch: Watch) -> list[Undo]:
    """On vLLM's V2 model runner. The device's state is read after `propose`, which is all that is watched."""
    counts, replays = watch.counts, [0]
    on_device = torch.device(speculator.device).type == "cuda"
    if not on_device:
        watch.absent |= dict.fromkeys(("host_synchronisations", "allocations", "host_copies"), NO_DEVICE)

    @around
    def propose(original: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        if more.get("dummy_run"):
            return original(*arguments, **more)
        replays[0] = 0
        with _counted(counts) if on_device else ExitStack():
            drafts = original(*arguments, **more)
        batch, rejected, temperature = (arguments[place] for place in PLACES)
        _after_round(speculator, batch, rejected, counts, replays[0])
        slots = batch.idx_mapping[: batch.num_reqs]
        counts["sampled_rows"] += int((temperature[slots] > GREEDY_BELOW).sum())
        return drafts

    @around
    def replay(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        replays[0] += 1
        return original(*args, **more)

    @around
    def dispatch(
        original: Callable[..., Any], num_reqs: int, num_tokens: int, uniform: int | None, *args: Any, **more: Any
    ) -> Any:
        chosen = original(num_reqs, num_tokens, uniform, *args, **more)
        counts["eager_steps"] += uniform is not None and chosen.cg_mode == CUDAGraphMode.NONE
        return chosen

    undo = [wrap(speculator, "propose", propose)]
    if speculator.decode_cudagraph_manager is not None:
        undo.append(wrap(speculator.decode_cudagraph_manager, "run_fullgraph", replay))
    if getattr(runner, "cudagraph_manager", None) is not None:
        undo.append(wrap(runner.cudagraph_manager, "dispatch", dispatch))
    return undo


def _after_round(speculator: Any, batch: Any, rejected: Tensor, counts: Counter[str], replays: int) -> None:
    """What the state of the device says of the round that is over. Waits for the device."""
    state, rows, slots = speculator.state, batch.num_reqs, batch.idx_mapping[: batch.num_reqs]
    lengths = state.lengths[slots]
    if int(lengths.max()):
        counts["eager_steps"] += replays == 0
        counts["unrolled_rounds"] += speculator._loop is None
    known = batch.seq_lens[:rows] - rejected[:rows]
    counts["finished_rows"] += int(((known + 1 >= state.limits.ends[slots]) & (lengths > 0)).sum())
    # A row has no length for attention from the moment that its gate is closed, and after a round all are.
    counts["closed_rows"] += int((speculator.input_buffers.seq_lens[:rows] != 0).sum())


@contextmanager
def _counted(counts: Counter[str]) -> Iterator[None]:
    """Counts waits for the device, allocations on it and values that leave it, inside the block."""

    thread = threading.get_ident()

    @around
    def counted(original: Callable[..., Any], *args: Any, **more: Any) -> Any:
        counts["host_synchronisations"] += threading.get_ident() == thread
        return original(*args, **more)

    before, mode = _allocated(), torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        for owner, name in WAITS:
            stack.callback(wrap(owner, name, counted))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        leaving = stack.enter_context(_Leaving())
        stack.callback(torch.cuda.set_sync_debug_mode, mode)
        torch.cuda.set_sync_debug_mode("warn")
        yield
    warned = sum(SYNCHRONISED in str(one.message) for one in caught)
    counts["host_synchronisations"] += max(warned, leaving.numbers)  # a number that is read is warned of, too
    counts["host_copies"] += leaving.numbers + leaving.tensors
    counts["allocations"] += _allocated() - before


def _allocated() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


READ = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__)


class _Leaving(TorchFunctionMode):
    """Counts calls that take numbers or tensors from the device to the host, waiting for them or not."""

    numbers = tensors = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        source = args[1] if func is Tensor.copy_ and len(args) > 1 else args[0] if args else None
        if isinstance(source, Tensor) and self.on_device(source):
            self.numbers += func in READ
            self.tensors += isinstance(made, Tensor) and not self.on_device(made)
        return made

    @staticmethod
    def on_device(tensor: Tensor) -> bool:
        return tensor.is_cuda
