"""The configuration: files, overrides, and what is said of mistakes in them."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from selfspec_cli.commands import gateway as command
from selfspec_cli.commands.app import app
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.gateway import files
from selfspec_cli.gateway.backends import BACKENDS
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.settings import BackendSettings, GatewaySettings, KeySettings
from selfspec_cli.record.gateway_log import Gain

UNSET, ANN = ["backends.0.url=null"], ["keys.0.name=ann"]
ONE = ["backends.0.name=a", "backends.0.url=http://127.0.0.1:1"]


def test_every_named_gateway_can_be_read(monkeypatch):
    monkeypatch.setenv("REMOTE_API_KEY", "x")
    assert {"demo", "two_servers"} <= set(files.choices())
    for name in files.choices():
        assert files.load(name).backends


def test_overrides_reach_backends_by_number_and_by_name():
    made = files.load("two_servers", ["backends.plain.price_hour=3", "backends.0.words=[layer=4]", "limits.at_once=2"])
    assert (made.backends[1].price_hour, made.backends[0].words, made.limits.at_once) == (3.0, ["layer=4"], 2)
    assert files.load("two_servers", ["slo.tpot_ms=1e-3"]).slo.tpot_ms == 0.001  # YAML takes 1e-3 for text
    made = files.load(None, [*ONE, "backends.1.name=b", "backends.1.kind=openai", "backends.1.url=http://x"])
    assert [one.kind for one in made.backends] == ["openai", "openai"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["polcy=fixed"], "did you mean 'policy'"),
        (["policy=fixd"], "did you mean 'fixed'"),
        (["port=70000"], "from 0 to 65535"),
        (["port=true"], "port=True"),
        (["workers=2", "backends.0.at_once=1"], "backends.a.at_once=1: 2 or more, a share for each worker"),
        (["workers=2", "policy=quality"], "policy=quality: 2 workers cannot share what it knows: workers=1"),
        (["policy"], "write KEY=VALUE"),
        (["policy=["], "policy=["),
        (["backends.0.kind=opnai"], "did you mean 'openai'"),
        (["backends.0.url=localhost"], "write http://HOST:PORT"),
        (["backends.0.key_env=NOT_THERE"], "that environment variable is not set"),
        (["backends.1.name=a", "backends.1.url=http://x"], "a name of its own"),
        (["backends.x.name=a"], "there is no item 'x'"),
        (["policy_options.cascade.sur=3"], "did you mean 'policy_options.cascade.sure'"),
        (["limits.at_oncee=2"], "did you mean 'limits.at_once'"),
        (["limits.at_once=0"], "limits.at_once=0: allowed: 1 or more"),
        (["limits.at_once=many"], "limits.at_once='many': a whole number is needed"),
        (["limits.stall_seconds=1" + "0" * 400], ": a number is needed"),
        (["log_text=1"], "true or false is needed"),
        (["tls=[cert.pem]"], "give two files that can be read"),
        (ANN, "keys.0: give name, and key"),
        ([*ANN, "keys.0.key=abc"], "keys.0.key=abc: that environment variable is not set, and it is no SHA-256"),
        ([*ANN, "keys.0.key=12"], "keys.0.key=12: text is needed"),
        (["backends.0.kind=pool", "backends.0.words=[http://x, http://]"], "words='http://': write"),
        (["policy_options.round_robin.explore=3"], "'policy_options.round_robin.explore' is not known; allowed: none"),
        (["policy_options.quality.enough=.nan"], "policy_options.quality.enough=nan: allowed: from 0 to 1"),
        (["cache.mib=.nan"], "cache.mib=nan: allowed: from 0 to 1e+06"),
        (["cache.also_for=[tool]"], "did you mean 'tools'"),
        (["limits.body_mib=1.0e300"], "limits.body_mib=1e+300: allowed: more than 0, up to 1e+06"),
        (["limits=3"], "a mapping of settings is needed"),
        (["backends.0.words=3"], "a list is needed"),
        (["policy_options.fixed.backend=aa"], "policy_options.fixed.backend 'aa' is not known; allowed: a; did you"),
        (["policy_options.least_time=5"], "policy_options.least_time: a mapping of settings is needed, not 5"),
        (["backends.0.words=[a=b]", "backends.0.words.0.x=1"], "backends.0.words.0 is 'a=b', which has no 'x'"),
        (["backends.0.url=http://"], "url='http://': write http://HOST:PORT"),
        (["backends.0.url=http://h:99999"], "write http://HOST:PORT"),
        (["backends.0.url=http://user:key@h"], "without a key, which key_env names"),
        (["backends.0.kind=local", "backends.0.url=localhost:8001"], "write http://HOST:PORT"),
        (["backends.0.kind=split", "backends.0.prefill=gpu1"], "prefill='gpu1': write"),
        (UNSET, "write http://HOST:PORT"),
        ([*UNSET, "backends.0.kind=local"], "give url, or words"),
        ([*UNSET, "backends.0.kind=local", "backends.0.words=[layer]"], "write KEY=VALUE"),
        ([*UNSET, "backends.0.kind=quantised", "backends.0.words=[layer=3]"], "say nothing of fewer bits"),
        ([*UNSET, "backends.0.kind=pool"], "give words"),
        ([*UNSET, "backends.0.kind=pool", "backends.0.words=[http://x, program=/no/router]"], "no program"),
        (["backends.0.words=[k=4]"], "words=['k=4']: kind openai does not use it; of words, environment"),
        (["backends.0.kind=local", "backends.0.prefill=http://x"], "kind local does not use it"),
        ([*ANN, f"keys.0.key={'A' * 64}", "keys.1.name=b", f"keys.1.key={'a' * 64}"], "keys.1: the same key as keys.0"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(words, message):
    with pytest.raises((ConfigError, SettingsError)) as found:
        files.load(None, [*ONE, *words])
    assert message in str(found.value)


def test_a_file_that_is_not_there_is_named_once():
    with pytest.raises(ConfigError) as found:
        files.load("gone.yaml")
    assert str(found.value).startswith("gone.yaml: there is no such file; allowed: a file NAME.yaml, or one of demo, ")


def test_what_a_backend_is_started_with():
    words = BACKENDS["local"].command(BackendSettings(name="a", words=["k=4", "--", "--x"]), 81)
    at = words.index("serve")
    assert words[at : at + 7] == ["serve", "k=4", "--", "--host", "127.0.0.1", "--port", "81"]
    assert words[at + 7 :] == ["--x"]
    pool = BackendSettings(name="p", kind="pool", words=["http://x", "http://y", "program=r", "--policy", "z"])
    words = "r --worker-urls http://x http://y --host 127.0.0.1 --port 82 --policy z"
    assert BACKENDS["pool"].command(pool, 82) == words.split()


def test_policies_and_kinds_of_backends_say_what_they_do():
    assert next(iter(POLICIES)) == "least_time"
    for one in (*BACKENDS.values(), *POLICIES.values()):
        assert one.help


def test_the_command_shows_what_it_would_run_and_refuses_bad_input():
    shown = CliRunner().invoke(app, ["gateway", "two_servers", "--dry-run", "--json"])
    assert shown.exit_code == 0
    assert '"price_hour": 1.0' in shown.stdout
    for words in ((), ("nothing",), ("demo", "two_servers"), ("two_servers", "prt=1")):
        assert CliRunner().invoke(app, ["gateway", *words, "--dry-run"]).exit_code == 2


def test_the_tables_of_the_demo_have_headings_that_need_no_glossary(capsys):
    route = dict.fromkeys(command.ROUTES.values(), 1.0) | {"route": "early", "plain": True}
    found = {
        "routes": [route, route | {"plain": False, "ttft_ms": None}],
        "gains": [asdict(Gain("demo", "all", "money", 24, 12, 1.5, 1.25, 1.75))],
        "checks": {"streams that were continued": 1},
        "log": "requests.jsonl",
    }
    command._show(found)
    shown = capsys.readouterr().out
    words = " ".join(shown.replace("┃", " ").replace("│", " ").split())
    assert "_" not in words.replace("requests.jsonl", "")  # no field's own name
    assert "baseline" in words and "by policy" in words
    assert "all together" in words and "1.25 to 1.75" in words
    assert "streams that were continued: 1" in words


def test_the_page_has_every_setting_with_its_default():
    """docs/generate/doc_pages.py writes it."""
    text = (Path(__file__).parents[2] / "docs" / "gateway_reference.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(re.search("<!-- settings -->\n```yaml\n(.*?)```", text, re.S)[1])
    options = shown.pop("policy_options")
    assert {name: asdict(POLICIES[name].options()) for name in options} == options and len(options) >= 3
    plain = asdict(GatewaySettings(backends=[BackendSettings()], keys=[KeySettings()]))
    assert shown == {name: value for name, value in plain.items() if name != "policy_options"}
