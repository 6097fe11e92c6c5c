"""Calls from the driver into live workers.

`EarlyExitWorker` is mixed into vLLM's worker class (`worker_extension_cls`), so each method can be called by name:
`llm.collective_rpc("early_exit_set_gate", args=("maxp", 0.4))`, also through a server. Plain values in, plain values
out: they cross process borders."""

import functools
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

from selfspec_cli.early_exit.draft_weights import require_draft_weights
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.resolved import ResolvedSettings, checked_table
from selfspec_cli.early_exit.settings import AUTO
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.target_facts import facts_of

WORKERS = (("vllm.v1.worker.gpu_worker", "Worker"), ("vllm.v1.worker.cpu_worker", "CPUWorker"))


def leave_worker_classes() -> None:
    """Take this package's extensions out of vLLM's worker classes before an engine starts: vLLM mixes one in for good,
    and then refuses another that has names in common with it. Engines that still live keep their methods."""
    for module, name in WORKERS:
        worker = getattr(sys.modules.get(module), name, None)
        if worker is not None:
            kept = tuple(base for base in worker.__bases__ if not base.__module__.startswith("selfspec_cli."))
            if len(kept) < len(worker.__bases__):
                worker.__bases__ = kept


def register_kernels_once() -> None:
    """Let vLLM put its CPU kernels in place for the first engine of this process alone. It searches every loaded
    module, and fails on llvmlite, which its n-gram drafter loads: '_lib_fn_wrapper' object has no attribute 'get'."""
    original = vllm.dispatcher.register_kernels
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def missing_alone(overrides: Mapping[str, Callable[..., Any]]) -> None:
        missing = {name: kernel for name, kernel in overrides.items() if not _is_in_place(name)}
        if missing:
            original(missing)

    vllm.dispatcher.register_kernels = missing_alone


def _is_in_place(name: str) -> bool:
    """Whether a kernel, by its dotted name, is one of a platform's already."""
    kind = vllm.KernelOverride
    try:
        return isinstance(pkgutil.resolve_name(name), kind)
    except (ImportError, AttributeError):
        return False


class EarlyExitWorker:
    """Methods added to vLLM's worker. `self` is that worker."""

    model_runner: Any
    vllm_config: Any

    def early_exit_set_gate(self, kind: str, threshold: float | None) -> None:
        """Change the gate between two rounds. Raises SettingsError for a bad gate or threshold, and for
        `auto` on an engine that was started with another one: it has no graphs for the widths."""
        drafter: Any = self._early_exit_drafter()
        measured = getattr(getattr(drafter, "settings", None), "chooses_width", False)
        if kind == AUTO and not measured:
            raise SettingsError(f"gate {AUTO!r} has to be the gate that an engine is started with")
        drafter.gate.set(kind, threshold)
        if measured:
            drafter.set_chooses_width(kind == AUTO)

    def early_exit_set_draft_length(self, k: int) -> None:
        """Draft at most k tokens from the next round on; 0 drafts nothing. Raises SettingsError beyond the k that the
        engine was started with, which is what it has room for."""
        drafter = self._early_exit_drafter_with("draft_length", "its draft length is fixed")
        most = drafter.settings.k
        if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= most:
            raise SettingsError(f"k = {k!r} is out of range on this live engine; allowed: 0 to {most}")
        drafter.draft_length = k

    def early_exit_set_length_table(self, text: str | None) -> None:
        """Other draft lengths by load (`length_table`) from the next round on; None: k for every load. On CUDA a length
        between two of the widths that the engine was started with is verified at the longer one, which has graphs.
        Raises SettingsError for what is no table of this engine, and where the scheduler runs in another process than
        the worker."""
        drafter = self._early_exit_drafter_with("set_table", "it has no table of draft lengths")
        settings = drafter.settings
        known = checked_table(text, settings.k)
        drafter.set_table(LengthTable.fixed(settings.k) if known is None else LengthTable.parse(known, settings.k))

    def early_exit_set_view(self, view: dict[str, Any]) -> None:
        """Draft with other layers, weights or context from the next round on, on an eager engine. view: the key
        layer_skip and those of `DraftView.options` of a speculative_config; what is left out is at its default. Head,
        gate and draft length stay.
        Raises SettingsError for a view that there cannot be, after which the old one drafts on, and on an engine that
        compiles, whose code and CUDA graphs are of the view that it was started with."""
        drafter = self._early_exit_drafter_with("set_view", "it has no view to change")
        config = self.vllm_config.model_config
        if not config.enforce_eager:
            raise SettingsError("a view can be changed on an eager engine only; allowed: enforce_eager = True")
        wanted = ResolvedSettings.from_user({"method": "layer_skip", **view}, self.early_exit_layers())
        require_draft_weights(wanted.draft_weights, facts_of(config, self.vllm_config.parallel_config))
        names = ("layer", "skip_layers", "draft_weights", "draft_weights_path", "draft_context")
        before = drafter.settings
        try:
            drafter.set_view(replace(before, **{name: getattr(wanted, name) for name in names}))
        except Exception:
            drafter.set_view(before)  # a context is refused when the layers that draft are others already
            raise

    def _early_exit_drafter(self) -> Any:
        """The V1 runner's drafter or the V2 runner's speculator; None where nothing drafts."""
        return getattr(self.model_runner, "drafter", None) or getattr(self.model_runner, "speculator", None)

    def _early_exit_drafter_with(self, attribute: str, consequence: str) -> Any:
        """The drafter. Raises SettingsError for one without this attribute, which is none of ours."""
        drafter = self._early_exit_drafter()
        if not hasattr(drafter, attribute):
            raise SettingsError(f"this engine does not draft with its own layers, so {consequence}")
        return drafter

    def early_exit_counters(self) -> dict[str, Any] | None:
        """What drafting did since the engine started; None for an engine without early exit."""
        counters = getattr(self._early_exit_drafter(), "counters", None)
        return counters.snapshot() if counters is not None else None

    def early_exit_record(self, on: bool) -> None:
        """Begin an empty record of drafting, or drop the one there is."""
        drafter = self._early_exit_drafter_with("recorder", "there is nothing to record")
        drafter.recorder = drafter.new_recorder() if on else None

    def early_exit_recorded(self) -> dict[str, Any]:
        """The record so far: `DraftRecorder.plain`. Raises SettingsError if none was begun."""
        recorder = getattr(self._early_exit_drafter(), "recorder", None)
        if recorder is None:
            raise SettingsError("no record of drafts was begun on this engine")
        return recorder.plain()

    def early_exit_split_seeded_prompts(self) -> None:
        """Let prompts of seeded requests be computed in pieces on a CPU, in an engine without early exit too."""
        from selfspec_cli.vllm_plugin.v1.sampling import keep_seeds_of_prompts

        runner = self.model_runner
        if hasattr(runner, "discard_request_mask"):  # the V1 runner, which is the one that cannot
            runner.sample_tokens = MethodType(keep_seeds_of_prompts(type(runner).sample_tokens), runner)

    def early_exit_weights(self) -> dict[str, int]:
        """Bytes of the target's weights, and of what drafting adds (the exit head, copies of weights)."""
        from selfspec_cli.vllm_plugin.step_bytes import weight_bytes

        runner, drafter = self.model_runner, self._early_exit_drafter()
        target = weight_bytes([runner.get_model()])
        if not hasattr(drafter, "head"):
            return {"target": target, "draft": 0}
        head = drafter.head
        copies = [] if head.copied is None else [head.copied[0]]
        fused = getattr(drafter, "fused_step", None)
        tensors = [*head.tensors, *([] if fused is None else [fused.copies])]
        both = weight_bytes([runner.get_model(), drafter.model, *copies], tensors)
        return {"target": target, "draft": both - target}

    def early_exit_step_bytes(self) -> dict[str, float] | None:
        """Bytes that one full step and one draft step read: weights, and keys and values a token of context.
        None for an engine without early exit, and for a mixture of experts, whose step reads some of its weights."""
        from selfspec_cli.vllm_plugin.step_bytes import step_bytes

        drafter = self._early_exit_drafter()
        if not hasattr(drafter, "head"):
            return None
        runner = self.model_runner
        fused = getattr(drafter, "fused_step", None)
        return step_bytes(runner.get_model(), drafter.model, drafter.head, runner.kv_cache_config, fused)

    def early_exit_watch(self, on: bool) -> dict[str, dict[str, Any]] | None:
        """Begin to count what must not happen while drafting (early_exit/counters.py), or end it; the counts.
        Raises SettingsError on an engine that does not draft with its own layers."""
        from selfspec_cli.vllm_plugin.observe.watch import Watch

        watch = self.__dict__.pop("_early_exit_watch", None)
        found = None if watch is None else watch.stop()
        if on:
            self._early_exit_watch = Watch(self.model_runner, self._early_exit_drafter())
        return found

    def early_exit_profile_start(self) -> None:
        """Begin to record with PyTorch's profiler, with named ranges around the parts of a round from now on."""
        from selfspec_cli.vllm_plugin.observe import profiler

        profiler.annotate(self.model_runner, self._early_exit_drafter())
        self._early_exit_profiler = profiler.start(self.device)  # type: ignore[attr-defined]

    def early_exit_profile_stop(self, path: str) -> list[dict[str, Any]]:
        """End it; rank 0 writes its trace (Chrome's format) to `path`. The slowest kernels (`profiler.stop`)."""
        from selfspec_cli.vllm_plugin.observe import profiler

        own = path if self.rank == 0 else None  # type: ignore[attr-defined]
        return profiler.stop(self._early_exit_profiler, self.device, own)  # type: ignore[attr-defined]

    def early_exit_meter_start(self) -> None:
        """Begin a measurement of the GPU; nothing on the CPU."""
        from selfspec_cli.vllm_plugin.observe.profiler import Meter

        self._early_exit_meter = Meter(self.device)  # type: ignore[attr-defined]

    def early_exit_meter_stop(self) -> dict[str, float]:
        """What was measured since the start, by the names of `Record`; a figure that cannot be had is left out."""
        return self._early_exit_meter.stop()

    def early_exit_layers(self) -> int:
        return int(self.vllm_config.model_config.hf_text_config.num_hidden_layers)

    def early_exit_collect(self, heads: list[str], plan: dict[str, Any]) -> None:
        """Begin to collect for `heads` (short names); plan: `wanted` and `ridge` of `fitting.Collector`."""
        from selfspec_cli.vllm_plugin.fitting import Collector

        tap, config = self.model_runner.get_model().early_exit_tap, self.vllm_config.model_config
        specs = tuple(map(HeadSpec.from_name, heads))
        tap.collector = Collector(tap.model, tap.layers, specs, config.get_vocab_size(), config.dtype, **plan)

    def early_exit_observe(self, layers: list[int] | None = None) -> None:
        """Begin to collect what the linear layers of `layers` see (all of them: None), anew."""
        from selfspec_cli.vllm_plugin.fitting import Moments

        before = getattr(self, "_early_exit_moments", None)
        if before is not None:
            before.end()
        chosen = range(self.early_exit_layers()) if layers is None else layers
        self._early_exit_moments = Moments(self.model_runner.get_model(), chosen, self.vllm_config)

    def early_exit_fit_weights(self, path: str, kind: str, about: dict[str, Any]) -> dict[str, Any]:
        """Make copies of the weights for what was collected, and save them; returns what is left of the error by layer.
        Raises SettingsError where there can be no such copies."""
        from selfspec_cli.early_exit import fitted_weights

        moments = self._early_exit_moments
        moments.end()
        fitted, report = moments.fitted(kind, about)
        fitted_weights.save(path, fitted)
        return {"layers": report, "tokens": moments.tokens}

    def early_exit_collect_mode(self, mode: str) -> None:
        """What the forward passes from now on are for: fit, validate or test."""
        self.model_runner.get_model().early_exit_tap.collector.mode = mode

    def early_exit_collected(self) -> dict[str, Any]:
        """Pairs so far by mode, and under "error" why collecting stopped (None while all is well)."""
        collector = self.model_runner.get_model().early_exit_tap.collector
        return {**collector.seen, "error": collector.error}

    def early_exit_fit(
        self, folder: str, about: dict[str, Any], vocabularies: dict[str, list[int]]
    ) -> list[dict[str, Any]]:
        """Solve every planned head at every layer and vocabulary (tag -> token ids), test it, and save it under
        `folder`; returns one plain report a head. about: what the metadata say of the data (corpus, versions)."""
        from selfspec_cli.vllm_plugin.fitting import save_all

        return save_all(self.model_runner.get_model(), self.vllm_config, folder, about, vocabularies)
