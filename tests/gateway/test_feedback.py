"""Answers that clients judge: the policy `quality` learns from them."""

from fake import Fake
from running import running

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
        assert max(len(asked.text) for asked, _ in on.gateway.routes.values()) <= 2000
