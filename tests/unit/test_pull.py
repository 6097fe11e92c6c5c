"""`selfspec pull`, against a server on this machine that speaks the Hub's protocol."""

import io
import json
import os
import subprocess
import sys

import pytest
from hub_server import COMMIT, Hub, served

from selfspec_cli.config import memory
from selfspec_cli.config.model_digest import snapshot
from selfspec_cli.config.schema import ConfigError, ModelConfig, RunConfig
from selfspec_cli.stages import doctor, pull

CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 1024,
}
WEIGHTS = os.urandom(24 << 20)  # huggingface_hub writes pieces of 10 MiB
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not read by vLLM beside safetensors",
    "consolidated.safetensors": b"nor is this",
    "original/params.json": b"{}",
    "README.md": b"# tiny",
    "modeling_tiny.py": b"",
}


def begun(hub, cache, *words, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return subprocess.Popen(
        [sys.executable, "-m", "selfspec_cli", "pull", *(words or ["model=org/tiny"])],
        env=clean
        | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
            "HF_HUB_DISABLE_XET": "1",
            "COLUMNS": "200",
        }
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def selfspec(hub, cache, *words, **environment):
    process = begun(hub, cache, *words, **environment)
    process.stdout, process.stderr = (io.StringIO(text) for text in process.communicate())
    return process


@pytest.mark.slow
def test_only_what_vllm_reads_is_fetched_at_one_commit_and_a_second_pull_fetches_nothing(tmp_path):
    with served(Hub(FILES)) as hub:
        done = selfspec(hub, tmp_path, "model=org/tiny", "--json")
        assert done.returncode == 0, done.stderr.read()
        document = json.loads(done.stdout.read().splitlines()[-1])
        snapshot = tmp_path / "models--org--tiny" / "snapshots" / COMMIT
        assert document["commit"] == COMMIT
        assert document["folder"] == str(snapshot)
        assert document["bytes_to_fetch"] >= len(WEIGHTS)
        assert sorted(file.name for file in snapshot.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
        hub.requests.clear()
        again = json.loads(selfspec(hub, tmp_path, "model=org/tiny", "--json").stdout.read().splitlines()[-1])
        assert again["bytes_to_fetch"] == 0
        assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]


def asked_for_weights(hub):
    """(file, Range header) of every download of weights that was asked for."""
    return [
        (path.rpartition("/")[2], asked)
        for method, path, asked in hub.requests
        if method == "GET" and path.endswith(".safetensors")
    ]


@pytest.mark.slow
def test_a_connection_that_breaks_is_gone_on_with_inside_the_file(tmp_path):
    with served(Hub(FILES, cut_after=15 << 20)) as hub:
        done = selfspec(hub, tmp_path)
        assert done.returncode == 0, done.stderr.read()
        assert asked_for_weights(hub) == [("model.safetensors", None), ("model.safetensors", f"bytes={10 << 20}-")]
        (file,) = tmp_path.glob("models--org--tiny/snapshots/*/model.safetensors")
        assert file.read_bytes() == WEIGHTS


@pytest.mark.slow
def test_a_pull_that_was_killed_keeps_the_files_that_were_whole(tmp_path):
    shards = {"a-1.safetensors": b"whole before the server stalls in the second one", "a-2.safetensors": WEIGHTS}
    index = json.dumps({"weight_map": {"one": "a-1.safetensors", "two": "a-2.safetensors"}}).encode()
    hub = Hub({"config.json": FILES["config.json"], pull.INDEX: index, **shards}, cut_after=1 << 20, stall=True)
    with served(hub):
        killed = begun(hub, tmp_path)
        assert hub.stalled.wait(60)
        killed.kill()
        killed.communicate()
        hub.over.set()
        hub.requests.clear()
        done = selfspec(hub, tmp_path)
        assert done.returncode == 0, done.stderr.read()
        assert asked_for_weights(hub) == [("a-2.safetensors", None)]
        (file,) = tmp_path.glob("models--org--tiny/snapshots/*/a-2.safetensors")
        assert file.read_bytes() == WEIGHTS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "hub", "environment", "code", "said"),
    [
        ((), Hub(FILES, gated=True), {}, 2, "is gated: ask for access"),
        (
            ("model=org/tiny", "model.revision=nowhere"),
            Hub(FILES),
            {},
            2,
            "model.revision=nowhere: org/tiny has no such branch",
        ),
        (("model=org/other",), Hub(FILES), {}, 2, "model=org/other: the Hub knows no such model"),
        (("model=reference",), Hub(FILES), {}, 2, "only a model on the Hugging Face Hub can be pulled"),
        ((), Hub({"config.json": b"{}", "x.gguf": b""}), {}, 2, "holds no weights that vLLM reads"),
        ((), Hub(FILES), {"HF_HUB_OFFLINE": "1"}, 2, "HF_HUB_OFFLINE is set"),
        ((), Hub(FILES), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "the same command fetches what is missing"),
    ],
)
def test_what_goes_wrong_is_explained(tmp_path, words, hub, environment, code, said):
    with served(hub):
        done = selfspec(hub, tmp_path, *words, **environment)
    stderr = done.stderr.read()
    assert done.returncode == code, stderr
    assert said in " ".join(stderr.split())
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_gated_model_is_fetched_with_a_token(tmp_path):
    with served(Hub(FILES, gated=True)) as hub:
        assert selfspec(hub, tmp_path, HF_TOKEN="hf_right").returncode == 0


def test_the_index_decides_which_weights_are_read():
    names = ["config.json", "a-1.safetensors", "a-2.safetensors", "other.safetensors", "deep/x.safetensors"]
    assert pull.wanted(names, ["a-1.safetensors", "a-2.safetensors"], False) == names[1:3] + names[:1]
    assert pull.wanted(["config.json", "m.bin", "m.pt", "code.py"], None, True) == ["code.py", "config.json", "m.bin"]
    assert pull.wanted(["consolidated.safetensors"], None, False) == ["consolidated.safetensors"]


def test_a_disk_without_room_is_found_before_anything_is_fetched(tmp_path):
    with pytest.raises(ConfigError, match=r"GiB free, and .* are to be fetched: free some, or set HF_HUB_CACHE"):
        pull.check_room(1 << 60, tmp_path / "not" / "made")
    pull.check_room(1, tmp_path)


def test_what_a_model_takes_of_a_gpu():
    found = memory.needed(CONFIG, 1000 << 20, "int8", 0.5, 1024, ranks=2)
    assert found.kv_token == 2 * 4 * 2 * 16 * 2 // 2
    assert found.weights == 500 << 20
    assert found.copies == pytest.approx((1000 << 20) / 2 * 0.5 * (8 + 16 / 64) / 8 / 2, rel=0.05)
    assert memory.needed(CONFIG, 1000, "shared", 1.0, None).copies == 0
    assert memory.kv_token_bytes({"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}) == 2 * 576 * 2
    assert memory.kv_token_bytes({"hidden_size": 64}) is None


def test_keys_and_values_that_cannot_be_divided_are_kept_by_every_gpu():
    assert memory.kv_token_bytes(CONFIG, 4) == 2 * 4 * 1 * 16 * 2  # two heads on four GPUs: each has one
    latent = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert memory.kv_token_bytes(latent, 8) == memory.kv_token_bytes(latent)


@pytest.mark.slow
def test_what_was_pulled_is_found_without_a_network_and_what_was_not_is_missed(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = ModelConfig(path="org/tiny")
    with served(Hub(FILES)) as hub:
        at = "model=org/tiny", f"model.revision={COMMIT}"
        assert selfspec(hub, tmp_path, *at, "--dry-run").returncode == 0  # it fetches config.json
        assert not pull.is_whole(RunConfig(model=model), COMMIT)
        assert selfspec(hub, tmp_path).returncode == 0
    assert snapshot(model) == COMMIT
    assert pull.is_whole(RunConfig(model=model), COMMIT)
    assert doctor._model(RunConfig(model=model)).detail == "org/tiny is in the Hugging Face cache"


@pytest.mark.slow
def test_a_model_without_a_config_json_is_fetched(tmp_path):
    with served(Hub({"params.json": b"{}", "consolidated.safetensors": b"weights"})) as hub:
        done = selfspec(hub, tmp_path)
        assert done.returncode == 0, done.stderr.read()


def test_the_verdict_compares_with_the_smallest_gpu():
    found = memory.Memory(weights=10 * memory.GIB, copies=0, kv_token=None, tokens=None)
    cards = [("large", 80 * memory.GIB), ("small", 11 * memory.GIB)]
    assert memory.verdict(found, cards, 0.95) == (
        True,
        "needs weights 10.0 GiB; small gives 10.4 GiB (95% of its memory)",
    )
    assert memory.verdict(found, cards, 0.9)[0] is False
    assert memory.verdict(found, [], 0.9)[0] is None
