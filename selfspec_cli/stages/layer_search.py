"""Which layers a draft can do without: a search by drafts of one token on a live engine.

Whether the thinned model's next token is the full model's is found as it will be used: over the full model's own keys
and values, on its own answers. Every candidate drafts one token a round for the same prompts (k = 1), which is the
cheap proxy; the sets that it finds are then measured with drafts of full length (stages/views.py).

Greedy, and lazy: leaving out one more layer hardly ever helps, so what a candidate reached in a smaller set bounds what
it reaches in a larger one, and only those that lead by their bounds are asked again (Minoux's accelerated greedy
algorithm). Agreement is not exactly submodular, so a bound may be wrong, and another set a little better.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from selfspec_cli import interrupts
from selfspec_cli.progress import Progress, ignore

Agreement = Callable[[tuple[int, ...]], float]
"""Layers to skip -> share of first drafts that were accepted."""


@dataclass(frozen=True)
class Step:
    """One more layer left out: all that are, how often the first draft was accepted, and candidates asked so far."""

    skipped: tuple[int, ...]
    agreement: float
    asked: int


def search(
    layers: Sequence[int], most: int, agreement: Agreement, start: Sequence[int] = (), progress: Progress = ignore
) -> Iterator[Step]:
    """Sets of 1 to `most` layers to skip, each the one before and one layer more, as they are found.

    layers: those that draft now. start: those that are skipped already, and stay so. An interrupt ends it between two
    candidates. Fewer steps come where no layer would be left.
    """
    skipped, asked, size = tuple(start), 0, 0
    bounds = dict.fromkeys(layers, 1.0)
    while size < most and len(bounds) > 1:
        size += 1
        fresh: set[int] = set()
        while True:
            leading = max(bounds, key=lambda layer: (bounds[layer], layer))
            if leading in fresh:
                break
            interrupts.check()
            bounds[leading] = agreement(tuple(sorted((*skipped, leading))))
            fresh.add(leading)
            asked += 1
            progress(f"candidates of step {size}", len(fresh), len(bounds))
        progress.ended(f"candidates of step {size}", len(fresh), len(bounds))
        skipped = tuple(sorted((*skipped, leading)))
        yield Step(skipped, bounds.pop(leading), asked)
