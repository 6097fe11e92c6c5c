"""ARC, HellaSwag and ShareGPT-like conversations as local files of the same form, where no hub can be reached.

    python experiments/local_tasks.py --out tasks && cd tasks
    selfspec eval --tasks arc_easy,hellaswag method=skip layer=8,12,16
    selfspec ppl --corpus conversations.jsonl method=skip layer=8,12,16

The folders are called as the data sets are (`allenai/ai2_arc`, `Rowan/hellaswag`), so `datasets` takes them before it
asks the Hub, and lm-evaluation-harness runs its own tasks over them, unchanged. Their contents are made of the
held-out standard library of the Python that runs this: which of four lines comes next, and requests for a function and
for its renaming. So scores compare arms with each other, and cannot be compared with published ones.
"""

import argparse
import ast
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec_cli.texts import library, questions

Rows = Sequence[Mapping[str, Any]]
LABELS = "ABCD"
LINES = (6, 30)  # of a function in a conversation


def arc(found: Rows) -> Iterator[dict[str, Any]]:
    """Questions in ARC's form."""
    for number, one in enumerate(found):
        yield {
            "id": f"stdlib_{number}",
            "question": f"Which line of Python comes next?\n{one['context']}",
            "choices": {"text": [choice.strip() for choice in one["choices"]], "label": list(LABELS)},
            "answerKey": LABELS[one["answer"]],
        }


def hellaswag(found: Rows) -> Iterator[dict[str, Any]]:
    """Questions in HellaSwag's form. The harness puts the label before the context and takes brackets out."""
    for one in found:
        yield {
            "activity_label": "Python",
            "ctx_a": one["context"],
            "ctx_b": "",
            "label": str(one["answer"]),
            "endings": [choice.strip() for choice in one["choices"]],
        }


def conversations() -> Iterator[dict[str, Any]]:
    """Four turns about each function of a middle length, in ShareGPT's form."""
    for module, text in library.held_out_text():
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            if not LINES[0] <= node.end_lineno - node.lineno + 1 <= LINES[1]:
                continue
            source = textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
            renamed = source.replace(node.name, f"{node.name}_renamed")
            said = (
                f"Show me the function `{node.name}` of {module}.",
                source,
                f"Rename it to `{node.name}_renamed`.",
                renamed,
            )
            turns = zip(("human", "gpt") * 2, said, strict=True)
            yield {"conversations": [{"from": who, "value": value} for who, value in turns]}


def write(folder: Path, seed: int = 0) -> None:
    """All three, below `folder`."""
    found = questions.stdlib_choice(seed)
    parts = {
        "allenai/ai2_arc": (("ARC-Easy", "ARC-Challenge"), "arc.jsonl", arc(found)),
        "Rowan/hellaswag": (("default",), "hellaswag.jsonl", hellaswag(found)),
    }
    for name, (configs, file, rows) in parts.items():
        at = folder / name
        at.mkdir(parents=True, exist_ok=True)
        _lines(at / file, rows)
        splits = [{"split": split, "path": file} for split in ("train", "validation", "test")]
        listed = [{"config_name": config, "data_files": splits} for config in configs]
        (at / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n", encoding="utf-8")
    _lines(folder / "conversations.jsonl", conversations())


def _lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
