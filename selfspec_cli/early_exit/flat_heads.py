"""A gate meets a head whose outputs are no distribution."""

import os
from pathlib import Path

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.head_metadata import find_head, read_metadata
from selfspec_cli.early_exit.heads import HEADS

FLAT_PERPLEXITY, FLAT_VOCABULARY = 3850, 4096  # where the lens has 8 to 20
FLAT_SOURCE = "results/LOG.md, results/published/quality.jsonl.xz"


def flat_head_warning(gate: str, path: str | os.PathLike[str] | None, layer: int | None = None) -> str | None:
    """That a gate meets a head whose outputs are no distribution; None where it does not, or that cannot be said.

    Such a head has rows of its own and was solved by least squares, without a scale in its file (`head_scale.py`).
    path: a head file, or a directory of heads for `layer`; None is the lens.
    """
    if path is None or GATES[gate].key is None:
        return None
    file = Path(path)
    try:
        file = find_head(file, layer) if file.is_dir() and layer is not None else file
        if file.suffix == ".pt":
            from selfspec_cli.early_exit.legacy import load_pt  # imports torch, which alone can read it

            flat = load_pt(file).scale is None
        else:
            metadata = read_metadata(file)
            flat = bool(HEADS[metadata.kind].rows) and metadata.fit.get("scale") is None
    except SettingsError:
        return None  # whoever loads the head says what is wrong
    if not flat:
        return None
    return (
        f"gate {gate!r} reads a distribution, and the outputs of head {file} are none: a least-squares head "
        f"without a scale had a perplexity of {FLAT_PERPLEXITY:,} over {FLAT_VOCABULARY:,} tokens ({FLAT_SOURCE}); "
        "fit it again with `selfspec fit-lsq`, which fits a scale"
    )
