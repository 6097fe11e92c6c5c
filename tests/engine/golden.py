"""The golden file: what plain vLLM generates with the embedded reference model, kept so that a change is seen.

Make it again, with the weights and the vLLM that are installed, and look at the difference before committing it:

    PYTHONPATH=.:tests python tests/engine/golden.py
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import Live, greedy, live, tokens

from selfspec_cli.config.model_digest import model_fingerprint
from selfspec_cli.config.paths import reference_model_dir
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.vllm_plugin.versions import installed

FILE = Path(__file__).with_name("golden.json")
COMMAND = "PYTHONPATH=.:tests python tests/engine/golden.py"
LENGTH = 32  # tokens a prompt
PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "for index, line in enumerate(lines):\n    if not line.strip():\n        ",
    "    try:\n        value = int(text)\n    except ValueError:\n        ",
    '"""Tools for reading and writing files."""\n\nimport ',
    "assert ",
    "x = [",
)


@dataclass(frozen=True)
class Golden:
    """model: the fingerprint of the weights. vllm: distribution and version. prompts, outputs: token ids."""

    model: str
    vllm: str
    prompts: list[list[int]]
    outputs: list[list[int]]

    def problems(self, model: str, vllm: str, prompts: list[list[int]], outputs: list[list[int]]) -> str | None:
        """What differs from this file, and what that means; None where nothing does."""
        if model != self.model:
            return (
                f"{FILE.name} was made with the weights {self.model}, and the reference model's are {model}: it "
                f"says nothing of them. If the model was meant to change, make it again: {COMMAND}"
            )
        if prompts != self.prompts:
            return f"the prompts, or their tokens, are not those of {FILE.name}; make it again: {COMMAND}"
        apart = {
            number: _first_difference(ours, other)
            for number, (ours, other) in enumerate(zip(outputs, self.outputs, strict=True))
            if ours != other
        }
        if not apart:
            return None
        places = ", ".join(f"prompt {number} from token {place} on" for number, place in apart.items())
        if vllm != self.vllm:
            return (
                f"{places}: not what {FILE.name} holds. The weights are the same and vLLM is not ({self.vllm} "
                f"then, {vllm} now), so its arithmetic or its scheduling may have changed. Compare the two "
                "versions without selfspec; if they differ from each other in the same way, make the file again: "
                f"{COMMAND}"
            )
        return (
            f"{places}: not what {FILE.name} holds, with the same weights and the same {vllm}. Something here "
            "changes what plain vLLM generates, or this processor rounds otherwise"
        )


def _first_difference(ours: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (place for place, pair in enumerate(zip(ours, other, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(other)),
    )


def read() -> Golden:
    """The file. Raises FileNotFoundError, which says how it is made."""
    if not FILE.exists():
        raise FileNotFoundError(f"{FILE} is not there; make it: {COMMAND}")
    return Golden(**json.loads(FILE.read_text(encoding="utf-8")))


def here() -> tuple[str, str]:
    """The fingerprint of the reference model's weights, and the vLLM that is installed."""
    return model_fingerprint(RunConfig()), " ".join(installed() or ())


def prompts() -> list[list[int]]:
    """The prompts as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference_model_dir())
    return [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]


def generate(engine: Live, ids: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    return tokens(engine.generate(ids, greedy(LENGTH)))


def main() -> None:
    """Make the file again."""
    ids = prompts()
    with live(reference_model_dir()) as engine:
        made = Golden(*here(), ids, generate(engine, ids))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(made).items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"wrote {FILE} for weights {made.model} and {made.vllm}")


if __name__ == "__main__":
    main()
