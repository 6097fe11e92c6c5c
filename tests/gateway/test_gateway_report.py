"""The gateway's section of the report page."""

import json

from selfspec_cli.record import gateway_log
from selfspec_cli.report import gateway, page
from selfspec_cli.report.sources import Sources


def row(number, plain=False, **more):
    way = {"plain": plain, "e2e_ms": 100.0 if plain else 50.0, "cost": 2.0 if plain else 1.0, "cache": "off"}
    asked = {"at": number, "model": "m<b>", "route": "a", "status": 200, "tokens": 10, "ttft_ms": 5.0, "survived": 0}
    return asked | way | more


def test_the_section_has_routes_gains_and_nothing_that_was_not_measured(tmp_path):
    assert gateway.section(tmp_path) is None
    folder = tmp_path / gateway_log.FOLDER
    folder.mkdir()
    rows = [row(number, plain=number % 3 == 0) for number in range(30)]
    rows += [row(40, route="cache", cache="hit", cost=None, ttft_ms=None), row(41, status=502), row(42, route=None)]
    lines = [json.dumps(one) for one in rows]
    (folder / "requests.jsonl").write_text("\n".join(lines[:20]) + '\n{"cut off\n[]\n')
    (folder / "others.jsonl").write_text("\n".join(lines[20:]) + "\n")
    found = gateway.section(tmp_path)
    assert found["requests"] == "33"
    by_way = {(line[1], line[2]): dict(zip(found["columns"], line, strict=True)) for line in found["rows"]}
    assert set(by_way) == {("a", "plain"), ("a", "routed"), ("cache", "routed")}
    routed, hit = by_way["a", "routed"], by_way["cache", "routed"]
    assert (routed["requests"], routed["tokens"], routed["TTFT"], routed["TPOT"]) == ("20", "200", "5 ms", "")
    assert routed["gain in time"] == routed["gain in money"] == "2.00 (2.00 to 2.00)"
    assert (by_way["a", "plain"]["gain in time"], hit["TTFT"], hit["money"], hit["hits"]) == ("", "", "", "1")
    made = page.html(Sources([], [], [], gateway=found), [])
    assert "What the gateway did" in made and "m&lt;b&gt;" in made and "m<b>" not in made
    assert "What the gateway did" not in page.html(Sources([], [], []), [])
