"""What two ranks can exchange inside a loop of a CUDA graph on this host: by vLLM's kernels, and through NCCL.

    python experiments/scale/exchange_in_a_loop.py --out exchange.json

Each way is tried in processes of its own, which are killed after `--seconds`: a loop may wait for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

WAYS: dict[str, tuple[bool, dict[str, str]]] = {
    "vLLM's kernels": (True, {}),
    "NCCL": (False, {}),
    "NCCL, NCCL_GRAPH_MIXING_SUPPORT=0": (False, {"NCCL_GRAPH_MIXING_SUPPORT": "0"}),
}
"""Name -> whether the kernels may be used, and variables of the environment."""


def rank(number: int, place: str, kernels: bool) -> None:
    """One of the two processes; leaves in a file why a loop cannot hold the exchange, or null."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from selfspec_cli.vllm_plugin.v2 import device_loop, ranks

    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.set_custom_all_reduce(kernels)
        parallel_state.init_distributed_environment(2, number, f"file://{place}/meet", number, "nccl")
        parallel_state.initialize_model_parallel(2)
        reason = device_loop.unavailable()
        if reason is None:
            with torch.inference_mode():  # as in vLLM's workers
                reason = ranks.reason_against_a_loop(device_loop.DeviceLoop(device), device)
    (Path(place) / f"{number}.json").write_text(json.dumps(reason), encoding="utf-8")
    os._exit(0)


def tried(kernels: bool, environment: dict[str, str], seconds: float) -> Any:
    """Why two ranks cannot exchange in a loop; None if they can."""
    with tempfile.TemporaryDirectory() as place:
        os.environ.update(environment)
        both = [processes.get_context("spawn").Process(target=rank, args=(number, place, kernels)) for number in (0, 1)]
        for one in both:
            one.start()
        ends = time.monotonic() + seconds
        for one in both:
            one.join(max(0.0, ends - time.monotonic()))
        late = [one for one in both if one.is_alive()]
        for one in late:
            one.kill()
            one.join()
        for name in environment:
            del os.environ[name]
        if late:
            return f"it did not end within {seconds:.0f} s"
        files = sorted(Path(place).glob("[01].json"))
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return next(filter(None, found), None) if len(found) == 2 else "a rank died"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each way")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = {}
    for name, (kernels, environment) in WAYS.items():
        reason = tried(kernels, environment, given.seconds)
        found[name] = reason or "works"
        print(f"{name}: {found[name]}", flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
