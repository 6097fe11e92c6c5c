"""How the processes of engines on a GPU start: forked from this one, or spawned as vLLM's servers do it."""

from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import RunConfig


def fork_engines(cfg: RunConfig) -> None:
    """Have the engines on a GPU that this process will start forked from it: each is spared importing vLLM again, which
    takes half a minute on a slow host. For processes that leave the work to engines.

    PyTorch is kept to one thread here, and in the engines, for which vLLM does so itself once they are loaded. Threads
    that it had here before do not matter then.
    """
    if device_of(cfg) == "cpu":
        return  # such an engine runs in this process, with all of its cores
    import torch

    torch.set_num_threads(1)


def how_they_start() -> str:
    """vLLM's word for it. A forked engine hangs in its first parallel operation once PyTorch has run one here, as it
    does counting a draft vocabulary; with one thread it runs none."""
    import torch

    return "fork" if torch.get_num_threads() == 1 else "spawn"
