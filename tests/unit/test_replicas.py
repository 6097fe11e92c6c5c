"""Several servers behind one address: what is planned, and what is done when one of them dies."""

import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from commands import until

from selfspec_cli.config import machine
from selfspec_cli.config.schema import ConfigError, EngineConfig, ModelConfig, RunConfig
from selfspec_cli.engine.deployment import Deployment
from selfspec_cli.engine.server import ServerError, free_port
from selfspec_cli.gateway import files
from selfspec_cli.gateway.limits import Keys
from selfspec_cli.gateway.supervisor import replica
from selfspec_cli.gateway.upstream import key_of
from selfspec_cli.gateway.wire import GatewayError
from selfspec_cli.stages import replicas
from selfspec_cli.stages.launch import work

MADE = Deployment("model", None, environment={"LD_PRELOAD": "x.so"})
CPU, CUDA = RunConfig(), RunConfig(engine=EngineConfig(device="cuda"))
SERVER = Path(__file__).with_name("openai_server.py")


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """Four cores, four GPUs of which CUDA shows three, and no router installed."""
    monkeypatch.setattr(work, "own_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["NVIDIA H100"] * 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    monkeypatch.setattr(replicas.shutil, "which", lambda name: None)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray, where a test has used it, leaves a handler that ends pytest


def test_words_about_replicas_are_not_settings_of_a_model():
    assert replicas.asked(["layer=3", "replicas=2", "router=gateway", "k=4"]) == (2, "gateway", ["layer=3", "k=4"])
    assert replicas.asked(["layer=3"]) == (1, None, ["layer=3"])
    assert replicas.asked(["repeats=3", "runner=v2"])[2] == ["repeats=3", "runner=v2"]
    with pytest.raises(ConfigError, match=r"key 'replica' is not known; .*did you mean 'replicas'"):
        replicas.asked(["replica=2"])
    for words, message in (
        (["replicas=two"], "replicas=two: allowed: a whole number"),
        (["replicas=0"], "at least 1"),
        (["router=gateway"], "give replicas=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            replicas.asked(words)


def test_each_replica_has_gpus_of_its_own_and_the_front_the_address_that_was_asked_for():
    servers, front = replicas.plan(MADE, CUDA, ["--host", "0.0.0.0", "--port=81", "--api-key", "KEY"], 2, None)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in servers] == ["3", "1"]
    ports = {one.url.rpartition(":")[2] for one in servers}
    assert len(ports) == 2
    assert "81" not in ports
    for one in servers:
        assert one.command[-6:-3] == ["--api-key", "KEY", "--host"]
        assert one.environment["LD_PRELOAD"] == "x.so"
    assert "host=0.0.0.0" in front.command
    assert "port=81" in front.command
    assert [word.partition("url=")[2] for word in front.command if ".url=" in word] == [one.url for one in servers]


def test_the_front_is_asked_at_the_address_at_which_it_listens():
    for host, reached in (("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("fd00::1", "[fd00::1]")):
        front = replicas.plan(MADE, CPU, ["--host", host, "--port", "81"], 2, None)[1]
        assert front.url == f"http://{reached}:81"
    front = replicas.plan(MADE, CPU, ["--port", "0"], 2, "gateway")[1]  # 0: a free one, which the command has to know
    port = front.url.rpartition(":")[2]
    assert int(port) > 0 and f"port={port}" in front.command


REFUSED = [f"-- --port {port}: allowed: a whole number from 0 to 65535" for port in ("abc", "70000", "")]
OPTIONS = ("--uds", "--grpc-port", "--grpc", "--headless", "--ssl-keyfile", "--ssl_certfile")
REFUSED += [f"-- {option}: 2 servers behind a router answer by plain HTTP" for option in OPTIONS]


@pytest.mark.parametrize("said", REFUSED)
def test_an_option_that_replicas_cannot_have_is_refused_before_anything_starts(said):
    option = said.partition(":")[0].removeprefix("-- ")
    words = option.split(" ") if option.startswith("--port") else [f"{option}=x"]
    with pytest.raises(ConfigError, match=f"^{said}"):
        replicas.plan(MADE, CPU, words, 2, None)


def test_the_gateway_has_the_key_of_the_replicas_and_wants_it_of_clients(monkeypatch):
    """Without it no replica would tell the gateway its models; without wanting it, everybody could ask."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    words = ["--api-key", "ann's", "bob's", "--port", "81"]
    servers, front = replicas.plan(MADE, CPU, words, 2, "gateway")
    assert servers[0].command[-7:-4] == words[:3]
    for name, value in front.environment.items():
        monkeypatch.setenv(name, value)
    made = files.load(None, [word for word in front.command if "=" in word])
    assert [key_of(replica(one)) for one in made.backends] == [{"Authorization": "Bearer ann's"}] * 2
    keys = Keys(made.keys)
    assert all(keys.tenant(f"Bearer {key}").admin for key in ("ann's", "bob's"))
    with pytest.raises(GatewayError, match="a wrong API key"):
        keys.tenant("Bearer eve's")


def test_a_replica_takes_as_many_gpus_as_its_model_is_divided_among():
    wide = replace(CUDA, model=ModelConfig(tensor_parallel_size=2))
    (one,) = replicas.plan(MADE, wide, [], 1, None)[0]
    assert one.environment["CUDA_VISIBLE_DEVICES"] == "3,1"
    with pytest.raises(ConfigError, match=r"replicas=2: 2 x model.tensor_parallel_size=2 GPUs.*3 can be seen.*up to 1"):
        replicas.plan(MADE, wide, [], 2, None)
    with pytest.raises(ConfigError, match="replicas=4: 4 GPUs are needed, and 3 can be seen; allowed: up to 3"):
        replicas.plan(MADE, CUDA, [], 4, None)


def test_on_a_cpu_replicas_share_the_cores():
    servers, _ = replicas.plan(MADE, CPU, [], 2, None)
    assert [one.environment["VLLM_CPU_OMP_THREADS_BIND"] for one in servers] == ["0,2", "1,3"]
    with pytest.raises(ConfigError, match="replicas=5: this machine has 4 processor cores"):
        replicas.plan(MADE, CPU, [], 5, None)


def test_the_router_is_the_one_that_is_installed_or_named(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'gateway'"):
        replicas.plan(MADE, CPU, [], 2, "gatway")
    with pytest.raises(ConfigError, match="no program '/there/vllm-router'"):
        replicas.plan(MADE, CPU, [], 2, "/there/vllm-router")
    monkeypatch.setattr(replicas.shutil, "which", lambda name: name)
    servers, front = replicas.plan(MADE, CPU, ["--port", "81"], 2, None)
    assert front.command[:4] == ["vllm-router", "--worker-urls", *(one.url for one in servers)]
    assert front.command[-6:] == ["--host", "0.0.0.0", "--port", "81", "--policy", "power_of_two"]


def program(name):
    port = free_port()
    return replicas.Program(name, [sys.executable, str(SERVER), "--port", str(port)], f"http://127.0.0.1:{port}")


def die(one):
    one.process.kill()
    one.process.wait()


def process_that_answers(one):
    replicas._until_it_answers(one, [one], Path("."))
    return one.process.pid


@pytest.mark.slow
def test_what_dies_is_started_again_and_all_end_together(tmp_path):
    servers, front, said = [program("replica0"), program("replica1")], program("router"), []

    def user():
        until(lambda: any("2 replicas answer" in line for line in said))
        before = process_that_answers(servers[0])
        die(servers[0])
        until(lambda: any("started again" in line for line in said))
        said.append(f"another process: {process_that_answers(servers[0]) != before}")
        replicas.os.kill(replicas.os.getpid(), signal.SIGTERM)

    clock = threading.Thread(target=user)
    clock.start()
    replicas.serve(servers, front, tmp_path, said.append)
    clock.join()
    assert "replica0: ended with exit code -9; it is started again" in said
    assert "another process: True" in said
    assert all(one.process.poll() is not None for one in (*servers, front))


@pytest.mark.slow
def test_a_replica_that_keeps_dying_is_left_alone_and_a_router_without_any_ends(tmp_path):
    one, front, said = program("replica0"), program("router"), []
    for each in (one, front):
        replicas._start(each, tmp_path, said.append)
        process_that_answers(each)
    one.deaths = replicas.RESTARTS
    die(one)
    with pytest.raises(ServerError, match="no replica is left"):
        replicas.look([one], front, tmp_path, said.append)
    assert said[-1] == f"replica0: ended with exit code -9 for the {replicas.RESTARTS + 1}th time, and is left alone"
    die(front)
    with pytest.raises(ServerError, match="the router ended"):
        replicas.look([one], front, tmp_path, said.append)


@pytest.mark.slow
def test_a_replica_that_never_answers_is_said_with_its_last_lines(tmp_path):
    bad = replicas.Program(
        "replica0", [sys.executable, "-c", "raise SystemExit('no such model')"], "http://127.0.0.1:9"
    )
    good, said = program("replica1"), []
    with pytest.raises(ServerError, match="replica0 ended before it answered: no such model"):
        replicas.serve([bad, good], program("router"), tmp_path, said.append)
    assert good.process.poll() is not None
