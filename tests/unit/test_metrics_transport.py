"""Numbers of drafting on their way to a server's metrics, and the dashboard and alert rules that read them."""

import json
import logging
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import programs
import pytest
import torch
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.observe.transport import ATTRIBUTE, NAN_LOGITS, News, attach
from selfspec_cli.vllm_plugin.spec_config import LOGGER, set_strict
from selfspec_cli.vllm_plugin.v2 import state
from selfspec_cli.vllm_plugin.v2.state import LateCopy

INFRA = Path(__file__).resolve().parents[2] / "infra"


def test_news_are_what_grew_and_a_state_that_changed():
    news = News()
    assert news.since({"rounds": 1, "off.load": 0, "in_force": 4}) == {"rounds": 1, "in_force": 4}
    assert news.since({"rounds": 1, "off.load": 0, "in_force": 4}) == {}
    assert news.since({}) == {}  # a step whose worker had nothing new
    assert news.since({"rounds": 5, "off.load": 2, "in_force": 0}) == {"rounds": 4, "off.load": 2, "in_force": 0}


def test_logits_that_are_no_numbers_are_warned_of_once_and_end_a_strict_engine(monkeypatch):
    def step(self):
        return SimpleNamespace(req_ids=["a"])

    def runner():
        return SimpleNamespace(drafter=SimpleNamespace(counters=counters))

    counters, lines = DraftCounters(3), []
    logger = logging.getLogger(LOGGER)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(logger, "handlers", [handler])
    sample, one = attach(step), runner()
    sample(one)
    assert lines == []
    counters.nan_logits = 2
    assert vars(sample(one))[ATTRIBUTE]["nan_logits"] == 2
    sample(one)
    assert lines == [NAN_LOGITS]
    set_strict(True)
    try:
        with pytest.raises(SettingsError, match=r"strict = True, .* logits that are no numbers"):
            sample(runner())
        record = logger.makeRecord(LOGGER, logging.WARNING, "requests.py", 1, "of a client", (), None)
        assert logger.filter(record), "a client's request never ends an engine"
    finally:
        set_strict(False)


def test_a_late_copy_never_waits_and_is_made_once_in_a_while(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(state.time, "monotonic", lambda: clock[0])
    source = torch.tensor([1, 2])
    copy = LateCopy(source, every=0.5)
    copy._done = event = Mock()  # a CUDA event
    event.query.return_value = False
    assert copy.read() is None and event.record.call_count == 1
    source += 10
    clock[0] += 10
    assert copy.read() is None and event.record.call_count == 1  # the device has not come to it: no other is begun
    event.query.return_value = True
    assert copy.read() == [1, 2]  # as they were, and the next one is under way
    assert event.record.call_count == 2
    assert copy.read() == [11, 12]
    clock[0] += 0.4
    assert copy.read() is None and event.record.call_count == 2
    clock[0] += 0.2
    assert copy.read() is None and event.record.call_count == 3


@pytest.mark.parametrize("made_inside", [True, False])
def test_a_copy_may_begin_inside_of_inference_mode_and_go_on_outside_or_the_other_way_round(made_inside):
    source = torch.tensor([1, 2])
    with torch.inference_mode(made_inside):
        copy = LateCopy(source, every=0.0)
        assert copy.read() is None
    with torch.inference_mode(not made_inside):
        assert copy.read() == [1, 2]
    assert copy.read() == [1, 2]


# ---- dashboard and alerts --------------------------------------------------------------------------------------------


def our_metrics() -> set[str]:
    """Names of the metrics that the plugin makes, from its source."""
    source = (INFRA.parent / "selfspec_cli/vllm_plugin/observe/metrics.py").read_text(encoding="utf-8")
    tables = re.split(r"^GAUGES = ", source, flags=re.MULTILINE)
    counters, gauges = (re.findall(r'^    \((?:"\w+"|[A-Z]+), "(\w+)",', table, re.MULTILINE) for table in tables)
    assert len(counters) == 7 + 6 and len(gauges) == 4
    return {f"vllm:selfspec_{name}_total" for name in counters} | {f"vllm:selfspec_{name}" for name in gauges}


def used(text: str) -> set[str]:
    return set(re.findall(r"vllm:selfspec_\w+", text))


def test_the_dashboard_and_the_rules_use_our_metrics_by_the_names_that_they_have_and_the_page_explains_each():
    dashboard = (INFRA / "grafana" / "selfspec.json").read_text(encoding="utf-8")
    assert used(dashboard) == our_metrics()
    assert used((INFRA / "prometheus" / "alerts.yml").read_text(encoding="utf-8")) <= our_metrics()
    assert used((INFRA.parent / "docs" / "serving.md").read_text(encoding="utf-8")) == our_metrics()


def test_panels_do_not_overlap_and_each_says_what_it_shows():
    panels = json.loads((INFRA / "grafana" / "selfspec.json").read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in panels)


def read_by_grafana(document: dict[str, Any]) -> Any:
    """A dashboard as Grafana's own library writes what it read: with defaults, without what it does not know."""
    plugins.register_default_plugins()  # they know Prometheus's queries
    return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(document)))


def kept(wanted: Any, found: Any) -> bool:
    """Whether everything of a document is in another one."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and kept(wanted[key], found[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(wanted) == len(found) and all(map(kept, wanted, found))
    return bool(wanted == found)


@pytest.mark.parametrize("name", ["selfspec", "gateway"])
def test_every_field_of_a_dashboard_is_one_that_grafana_knows(name):
    document = json.loads((INFRA / "grafana" / f"{name}.json").read_text(encoding="utf-8"))
    assert document["panels"] and kept(document, read_by_grafana(document))
    document["panels"][0]["targets"][0]["legend"] = "a misspelt legendFormat"
    assert not kept(document, read_by_grafana(document))


@programs.needs("promtool")
@pytest.mark.parametrize(
    "words", ["check config prometheus.yml", "check rules alerts.yml", "test rules alerts_test.yml"]
)
def test_promtool(words):
    folder = INFRA / "prometheus"
    run = subprocess.run(["promtool", *words.split()], cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
