"""Answers that clients judge: the policy `quality` learns from them."""

import hashlib
import json

import pytest
from fake import Fake, answer
from running import running

from selfspec_cli.gateway.settings import KeySettings

HARD, EASY = "prove that this integral converges, number ", "what colour has the sky on day "


async def test_judged_answers_move_requests_of_their_kind(tmp_path):
    backends = {"small": {"price_out": 1.0}, "large": {"price_out": 10.0}}
    async with running([Fake("small"), Fake("large")], tmp_path, policy="quality", backends=backends) as on:
        for number in range(8):
            for text in (HARD, EASY):
                prompt = text * 20 + str(number)
                _, _, headers = await on.post({"model": "toy", "prompt": prompt, "max_tokens": 4})
                right = headers["x-selfspec-backend"] == "large" or text == EASY
                await on.settled()
                judged = {"request_id": headers["x-request-id"], "quality": float(right)}
                async with on.session.post(f"{on.url}/gateway/feedback", json=judged) as response:
                    assert response.status == 200
        routes = [row["route"] for row in await on.rows()]
        assert routes[0] == "small"  # nothing is known yet
        assert routes[-2:] == ["large", "small"]
        assert max(len(asked.text) for asked, _ in on.gateway.routing.routes.values()) <= 2000


async def test_a_tenant_judges_its_own_requests_alone(tmp_path):
    """Two tenants give their requests the same id."""
    keys = [KeySettings(name=name, key=hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob", "eve")]
    async with running([Fake("a"), Fake("b")], tmp_path, policy="quality", keys=keys) as on:
        for name, backend in (("ann", "a"), ("bob", "b")):
            head = {"Authorization": f"Bearer {name}", "X-Request-Id": "1"}
            await on.post(COMPLETION | {"selfspec": {"backend": backend}}, **head)
        await on.settled()
        for name, status in (("ann", 200), ("eve", 404)):
            head = {"Authorization": f"Bearer {name}", "Content-Type": "application/json"}
            assert (await on.post({"request_id": "1", "quality": 0}, "/gateway/feedback", **head))[0] == status
        assert list(on.gateway.routing.choosers["quality"].judged) == ["a"]


COMPLETION = {"model": "toy", "prompt": "an easy one", "max_tokens": 5}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "an easy one"}], "max_tokens": 5}


@pytest.mark.parametrize("body", [COMPLETION, CHAT])
async def test_a_cascade_asks_the_dear_model_where_the_cheap_one_is_not_sure(tmp_path, body):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    hard = json.loads(json.dumps(body).replace("easy", "hard"))
    backends = {"large": {"price_out": 10.0}, "small": {"price_out": 1.0}}
    fakes = [Fake("large"), Fake("small", unsure=-1.0)]
    async with running(fakes, tmp_path, policy="cascade", backends=backends) as on:
        easy, asked_for = await on.post(body, path), await on.post(body | {"logprobs": 1}, path)
        difficult, stream = await on.post(hard, path), await on.stream(hard, path)
        assert [easy[2]["x-selfspec-backend"], difficult[2]["x-selfspec-backend"]] == ["small", "large"]
        assert stream.headers["x-selfspec-backend"] == "large"
        assert easy[1]["choices"][0]["logprobs"] is None  # the client has not asked for them
        assert asked_for[1]["choices"][0]["logprobs"]
        rows = await on.rows()
        assert [row["reason"] for row in rows] == ["cascade", "cascade", "cascade_unsure", "dearest"]
        assert rows[2]["tried"] == ["small"]
        assert rows[2]["cost"] > rows[3]["cost"] > rows[0]["cost"]  # both were paid
        assert not on.gateway.replicas[1].breaker.outcomes or on.gateway.replicas[1].breaker.open_until == 0


async def test_where_nobody_else_can_answer_the_unsure_answer_is_taken(tmp_path):
    hard = {**COMPLETION, "prompt": "a hard one"}
    backends = {"large": {"price_out": 10.0}}
    fakes = [Fake("large", refuse=500), Fake("small", unsure=-1.0)]
    async with running(fakes, tmp_path, policy="cascade", backends=backends) as on:
        status, found, headers = await on.post(hard)
        assert (status, headers["x-selfspec-backend"]) == (200, "small")
        assert found["choices"][0]["text"] == answer("a hard one", 5)
        on.fakes["large"].dead = True
        assert (await on.post(hard))[0] == 200
        assert {row["route"] for row in await on.rows()} == {"small"}
