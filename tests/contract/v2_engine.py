"""Settings, requests, and a model runner of arithmetic for vLLM's scheduler: what the V2 runner does without a GPU."""

import queue
import random
from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.detection import SETTINGS_KEY

K, MOST, BLOCK, LEN = 4, 8, 16, 256


def settings(**spec):
    """Those of an engine of 24 layers with these keys of a speculative_config."""
    return ResolvedSettings.from_user({"method": "layer_skip", "num_speculative_tokens": K, **spec}, 24)


def early_exit(**spec):
    """The speculative configuration of such an engine, as far as the plugin reads it."""
    return SimpleNamespace(**{SETTINGS_KEY: settings(**spec).to_dict()})


class Runner:
    """In place of the V2 runner: of the places in a step it accepts as many drafts as were made and are right.

    made: what each request drafted for its next step, within the width that the scheduler announced. lengths: of each
    step without prefills, the number of requests and the places that they had."""

    def __init__(self, rate, asked):
        self.draw, self.rate, self.asked = random.Random(0), rate, asked
        self.known, self.made, self.lengths = {}, {}, []

    def step(self, output):
        from vllm.v1.outputs import ModelRunnerOutput

        for new in output.scheduled_new_reqs:  # resumed requests come as new ones, with all of their tokens
            self.known[new.req_id] = [new.num_computed_tokens, len(new.prefill_token_ids)]
            self.made[new.req_id] = 0
        names = list(output.num_scheduled_tokens)
        sampled, decoding = [], []
        for name, tokens in output.num_scheduled_tokens.items():
            places = len(output.scheduled_spec_decode_tokens.get(name, ()))
            computed, length = self.known[name]
            assert tokens > places or computed + tokens - places <= length
            decoding.append((computed + 1, tokens - places) == (length, 1))
            self.known[name][0] = computed = computed + tokens - places
            if computed < length:
                sampled.append([])
                continue
            drafts = min(places, self.made[name])
            stood = next((n for n in range(drafts) if self.draw.random() >= self.rate), drafts)
            sampled.append([7] * (1 + stood))
            self.known[name] = [computed + stood, computed + stood + 1]
            width = output.num_spec_tokens_to_schedule
            self.made[name] = min(width, self.asked.get(name, K))
        if names and all(decoding):
            places = {len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names}
            self.lengths.append((len(names), places))
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)


def crowd(count=24, extra=lambda number: None):
    draw = random.Random(1)
    return [(f"r{number}", draw.randrange(1, 90), draw.randrange(20, 100), extra(number)) for number in range(count)]


def asked_of(requests):
    """The draft lengths that some requests ask for, by name."""
    return {name: extra["selfspec_k"] for name, _, _, extra in requests if extra and "selfspec_k" in extra}


def add(scheduler, name, prompt, most, extra=None):
    """A request for `most` tokens after `prompt` tokens of a prompt, which waits in the scheduler."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(max_tokens=most, ignore_eos=True, extra_args=extra, temperature=0)
    request = Request(name, [5] * prompt, parameters, None)
    scheduler.add_request(request)
    return request


# ---- vLLM's engine core and its queue of steps, over its own scheduler and a runner of arithmetic


class Tokens:
    """In place of an event on the device that is over after `late` looks at it. looked: called at each."""

    def __init__(self, late, looked=lambda: None):
        self.left, self.looked = late, looked

    def query(self):
        self.left -= 1
        self.looked()
        return self.left < 0


def engine_of(scheduler, first=False, rate=0.7, asked=None, late=2):
    """An engine core over `scheduler`, and its reader. first: what its orders are. log: of launches and readings."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
    from vllm.v1.outputs import DraftTokenIds

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
    core.is_mm_encoder_only = core.is_pooling_model = False
    core.async_scheduling = scheduler.scheduler_config.async_scheduling
    core.check_for_draft_tokens = not core.async_scheduling
    core.input_queue, core.looked = queue.Queue(), lambda: None

    def execute_model(scheduled, non_block):
        log.append("launch" if scheduled.num_scheduled_tokens else "nothing")
        core.answer, width = core.runner.step(scheduled), scheduled.num_spec_tokens_to_schedule
        core.drafts = DraftTokenIds(core.answer.req_ids, [[-1] * width for _ in core.answer.req_ids])
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
        execute_model=execute_model,
        sample_tokens=sample_tokens,
        take_draft_token_ids=lambda: core.drafts,
        driver_worker=worker,
    )
    core.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=1))
    core.step_fn = core.step_with_batch_queue if core.async_scheduling else core.step
    reader = step_order.reader_of(core)
    reader._orders = defaultdict(lambda: step_order.Order(first=first))
    return core, reader


def run(core, requests=(), every=3):
    """Steps until all have ended; a request arrives every few steps. Tokens of each."""
    waiting, live, turn = deque(requests), {}, 0
    while waiting or core.scheduler.has_requests() or core.batch_queue:
        if waiting and turn % every == 0:
            name, prompt, most, extra = waiting.popleft()
            live[name] = add(core.scheduler, name, prompt, most, extra)
        _, worked = core.step_fn()
        core.post_step(worked)
        assert worked or not core.scheduler.requests  # else vLLM sleeps
        turn += 1
        assert turn < 9000
    return {name: len(request.output_token_ids) for name, request in live.items()}


def serve(scheduler, requests):
    """Run requests (name, prompt tokens, output tokens, extra_args) to their end; runner, and tokens of each."""
    core, _ = engine_of(scheduler, asked=asked_of(requests))
    return core.runner, run(core, requests)


def alternating():
    """In place of a reader's orders: one for every load, which says the other one each time that it is asked.

    It decides nothing by times: for that the reader would ask again, and with two questions a step every step would
    have the same order."""

    class ByTurns:
        asked = 0

        @property
        def first(self):
            self.asked += 1
            return self.asked % 2 == 0

        def add(self, host, device):
            pass

        def __getitem__(self, load):
            return self

    return ByTurns()
