"""vLLM's engine core and its queue of steps, over its own scheduler and a runner of arithmetic."""

from __future__ import annotations

import queue
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from v2_engine import Runner


class Tokens:
    """In place of an event on the device that is over after so many looks at it. looked: called at each."""

    def __init__(self, late, looked=lambda: None):
        self.left, self.looked = late, looked

    def query(self):
        self.left -= 1
        self.looked()
        return self.left < 0


def engine_of(scheduler, first, rate=0.7, asked=None, late=2):
    """An engine core over `scheduler`, and its reader. first: what its orders are. log: of launches and readings."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from selfspec_cli.vllm_plugin.v2 import step_order

    class Core(EngineCore):
        def __init__(self):
            pass

        def capture_iteration_details(self, _):
            return nullcontext()

        log_error_detail = capture_iteration_details

        def _attach_iteration_details(self, *_):
            pass

        _attach_weight_version = _attach_iteration_details

        def _should_throttle_prefills(self):
            return False

    core, log = Core(), []
    core.runner, core.log, core.scheduler = Runner(rate, asked or {}), log, scheduler
    core.batch_queue, core.batch_queue_size, core.aborts_queue = deque(maxlen=2), 2, queue.Queue()
    core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = False
    core.input_queue, core.looked = queue.Queue(), lambda: None

    def execute_model(scheduled, non_block):
        log.append("launch" if scheduled.num_scheduled_tokens else "nothing")
        core.answer = core.runner.step(scheduled) if scheduled.num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT
        return SimpleNamespace(result=lambda answer=core.answer: answer, done=lambda: True)

    def sample_tokens(grammar, non_block):
        def get_output(answer=core.answer):
            log.append("read")
            return answer

        return AsyncOutputFuture(
            SimpleNamespace(get_output=get_output, copy_event=Tokens(late, lambda: core.looked())), single_value=True
        )

    speculator = SimpleNamespace(clock=step_order.DraftClock(torch.device("cpu")))
    worker = SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator))
    core.model_executor = SimpleNamespace(
        execute_model=execute_model, sample_tokens=sample_tokens, driver_worker=worker
    )
    core.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=1))
    core.step_fn = core.step_with_batch_queue
    reader = step_order.reader_of(core)
    reader._orders = defaultdict(lambda: step_order.Order(first=first))
    return core, reader
