"""2,000 pairs of questions of our own making: paraphrases, and near misses that an encoder takes for paraphrases.

A pair is (a question that a cache has answered, a question that is asked later, whether the old answer is right for
it).
That truth is by construction: two questions mean the same if and only if they come from the same family, meaning and
values of slots. `cache_pairs_dev.yaml` was there while the guards were made; `cache_pairs_held_out.yaml` was written
after they were fixed. Each gives half of the pairs.

    python experiments/gateway/cache_pairs.py          # prints how many pairs of which kind, and some of them
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SPLITS = ("dev", "held_out")
PAIRS = 2000
PARAPHRASES, NEAR_MISSES = 5, 3  # of each anchor
SEED = 40


@dataclass(frozen=True)
class Question:
    """A text with what it means: (family, meaning, values of the slots in their first form)."""

    text: str
    meaning: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Two questions, the kind of change between them ("paraphrase", "number", "negation", ...) and the split of the
    family.
    """

    cached: Question
    asked: Question
    kind: str
    split: str

    @property
    def same(self) -> bool:
        return self.cached.meaning == self.asked.meaning


def families(split: str) -> list[dict[str, Any]]:
    return yaml.safe_load((HERE / f"cache_pairs_{split}.yaml").read_text(encoding="utf-8"))


def _forms(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _question(family: dict[str, Any], meaning: str, values: dict[str, Any], rng: random.Random) -> Question:
    template = rng.choice(family["meanings"][meaning])
    text = template.format(**{slot: rng.choice(_forms(value)) for slot, value in values.items()})
    names = tuple(_forms(values[slot])[0] for slot in family["slots"])
    return Question(text[0].upper() + text[1:], (family["family"], meaning, *names))


def _values(family: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One value of each slot, no two slots with the same."""
    while True:
        values = {slot: rng.choice(of["values"]) for slot, of in family["slots"].items()}
        if len({_forms(value)[0] for value in values.values()}) == len(values):
            return values


def _near_miss(family: dict[str, Any], change: str, values: dict[str, Any], rng: random.Random) -> tuple[Question, str]:
    """A question that differs by `change`: a slot's name (another value), "swap", or another meaning's name."""
    if change == "swap":
        one, other = family["swap"]
        return _question(family, "plain", {**values, one: values[other], other: values[one]}, rng), "direction"
    if change in family["slots"]:
        taken = [_forms(value)[0] for value in values.values()]
        others = [value for value in family["slots"][change]["values"] if _forms(value)[0] not in taken]
        return _question(family, "plain", {**values, change: rng.choice(others)}, rng), family["slots"][change]["kind"]
    return _question(family, change, values, rng), change


def pairs_of(split: str, count: int, seed: int = SEED) -> list[Pair]:
    """`count` pairs of a split's families, the families in turn; every text of a pair is new within its anchor."""
    rng = random.Random(f"{split} {seed}")
    found: list[Pair] = []
    anchors: set[tuple[str, ...]] = set()
    kinds: Counter[tuple[str, str]] = Counter()
    every = families(split)
    while len(found) < count:
        for family in every:
            values = _values(family, rng)
            cached = _question(family, "plain", values, rng)
            if cached.meaning in anchors:
                continue
            anchors.add(cached.meaning)
            texts = {cached.text}
            changes = [slot for slot, of in family["slots"].items() if len(of["values"]) > 1]
            changes += [*(["swap"] if "swap" in family else []), *(set(family["meanings"]) - {"plain"})]
            changes.sort(key=lambda change, name=family["family"]: (kinds[name, change], change))
            for number in range(PARAPHRASES + NEAR_MISSES):
                for _ in range(100):
                    if number < PARAPHRASES:
                        asked, kind = _question(family, "plain", values, rng), "paraphrase"
                    else:
                        change = changes[(number - PARAPHRASES) % len(changes)]
                        asked, kind = _near_miss(family, change, values, rng)
                    if asked.text not in texts:
                        break
                else:
                    continue  # the family has no further text of this kind
                texts.add(asked.text)
                if kind != "paraphrase":
                    kinds[family["family"], change] += 1
                found.append(Pair(cached, asked, kind, split))
    return found[:count]


def all_pairs() -> list[Pair]:
    """The 2,000 pairs, half of each split; the same at every call."""
    return [pair for split in SPLITS for pair in pairs_of(split, PAIRS // len(SPLITS))]


def main() -> None:
    pairs = all_pairs()
    for split in SPLITS:
        counts = Counter(pair.kind for pair in pairs if pair.split == split)
        print(f"{split}: {sum(counts.values())} pairs: " + ", ".join(f"{kind} {n}" for kind, n in counts.most_common()))
    for pair in random.Random(1).sample(pairs, 12):
        print(f"  {pair.kind:<11} {pair.cached.text} | {pair.asked.text}")


if __name__ == "__main__":
    main()
