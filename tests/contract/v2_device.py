"""An engine core over vLLM's scheduler, a runner of arithmetic, and a host and a device in virtual time."""

from __future__ import annotations

import queue
from types import SimpleNamespace

from v2_engine import add
from v2_queue import engine_of

TURN = 1e-3
"""Seconds from a client's last token to its next request."""


class Host:
    """In place of the module `time`: what is asked of it takes virtual seconds. due: what happens at which moment."""

    def __init__(self):
        self.now, self.due = 0.0, []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.pass_by(seconds + 60e-6)  # what Linux adds

    def pass_by(self, seconds):
        self.pass_until(self.now + seconds)

    def pass_until(self, moment):
        while self.due and self.due[0][0] <= moment:
            self.now, what = max(self.now, self.due[0][0]), self.due.pop(0)[1]
            what()
        self.now = max(self.now, moment)

    def at(self, moment, what):
        self.due.append((moment, what))
        self.due.sort(key=lambda one: one[0])


class Device:
    """Works on steps one after the other. idle: seconds in which it had nothing to do between two of them."""

    def __init__(self, verify, loop, prefill):
        self.verify, self.loop, self.prefill = verify, loop, prefill
        self.free, self.idle = 0.0, 0.0

    def run(self, scheduled, now):
        """A step that was launched now; when its tokens are there."""
        self.idle += max(0.0, now - self.free)
        new = len(scheduled.scheduled_new_reqs)
        sampled = max(now, self.free) + self.verify + new * self.prefill
        self.free = sampled + (self.loop if scheduled.num_spec_tokens_to_schedule else 0.0)
        return sampled


class World:
    """Clients in a closed loop, an engine, and its device. launch: seconds that the host takes for the forward pass of
    a step and again for what is behind it; of a prefill, slow. hiccup: at every so manieth launch, seconds more."""

    def __init__(self, scheduler, monkeypatch, device, launch=0.9e-3, slow=2.5e-3, rate=0.7):
        from selfspec_cli.vllm_plugin.v2 import step_order

        self.host, self.device, self.launch, self.slow = Host(), device, launch, slow
        self.hiccup = 0, 0.0
        monkeypatch.setattr(step_order, "time", self.host)
        self.core, self.reader = engine_of(scheduler, first=False, rate=rate)
        self.reader._orders.default_factory = step_order.Order
        self.clock = self.reader._clock = SimpleNamespace(launched=-1.0, seconds=lambda: device.loop)
        execute, sample = self.core.model_executor.execute_model, self.core.model_executor.sample_tokens
        self.steps, self.asked, self.first, self.ended = 0, {}, {}, {}

        def execute_model(scheduled, non_block):
            answer = execute(scheduled, non_block)
            if scheduled.num_scheduled_tokens:
                self.steps += 1
                self.scheduled = scheduled
                every, more = self.hiccup
                late = more if every and self.steps % every == 0 else 0.0
                self.host.pass_by((self.slow if scheduled.scheduled_new_reqs else self.launch) + late)
            return answer

        def sample_tokens(grammar, non_block):
            future = sample(grammar, non_block)
            self.clock.launched = self.host.now
            self.host.pass_by(self.launch)
            sampled = self.device.run(self.scheduled, self.clock.launched)
            output = future.async_output

            def get_output(original=output.get_output):
                self.host.pass_until(sampled)
                self.host.pass_by(50e-6)
                return original()

            output.get_output = get_output
            output.copy_event = SimpleNamespace(query=lambda: self.host.now >= sampled)
            return future

        self.core.model_executor.execute_model, self.core.model_executor.sample_tokens = execute_model, sample_tokens

    def ask(self, name, prompt=20, most=30):
        """A request of a client's, now."""
        self.asked[name] = self.host.now
        self.core.input_queue.put((name, prompt, most))

    def turn(self):
        """One turn of the engine's loop; what a request yields is seen where its tokens are read."""
        inbox = self.core.input_queue
        while True:
            try:
                add(self.core.scheduler, *inbox.get_nowait())
            except queue.Empty:
                break
        if not (self.core.scheduler.has_requests() or self.core.batch_queue):
            self.host.pass_until(self.host.due[0][0])
            return
        outputs, _ = self.core.step_fn()
        for group in (outputs or {}).values():
            for one in group.outputs:
                if one.new_token_ids:
                    self.first.setdefault(one.request_id, self.host.now)
                if one.finish_reason is not None:
                    self.ended[one.request_id] = self.host.now
                    self.answered(one.request_id)
        self.host.pass_by(100e-6)  # what the host does with them

    def answered(self, name):
        client, number = name.split(".")
        self.host.at(self.host.now + TURN, lambda: self.ask(f"{client}.{int(number) + 1}"))

    def serve(self, clients, steps):
        """A closed loop of so many clients. Median seconds to the first token of the later half of the requests, and
        the device's idle seconds a step meanwhile."""
        for client in range(clients):
            self.host.at(self.host.now + 3e-3 * client, lambda client=client: self.ask(f"{client}.0"))
        while self.steps < steps // 2:
            self.turn()
        idle, since, steps_before = self.device.idle, self.host.now, self.steps
        while self.steps < steps:
            self.turn()
        waits = sorted(self.first[name] - self.asked[name] for name in self.first if self.asked[name] >= since)
        return waits[len(waits) // 2], (self.device.idle - idle) / (self.steps - steps_before)
