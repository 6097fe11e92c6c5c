"""Text to train, fit and measure on: the Python sources that come with every interpreter.

Standard-library modules in HELD_OUT are excluded from all training and fitting. So figures measured on them are
held-out figures on any machine, with nothing to download. Imports the standard library only.
"""

import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_LISTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("library.json").read_text(encoding="utf-8"))
HELD_OUT = tuple(_LISTS["held_out"])  # modules
NOT_FOR_FITTING = frozenset(_LISTS["not_for_fitting"])  # folders
_HELD_OUT_TAILS = [tuple(f"{name.replace('.', '/')}.py".split("/")) for name in HELD_OUT]

WINDOW_LINES = 8
MIN_WINDOW_CHARS = 120  # windows of closing brackets and `else:` lines occur everywhere and prove nothing
MAX_SHARED_SHARE = 0.05
MAX_SHARED_WINDOWS = 50  # a held-out module pasted into a much larger file stays below the share


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def held_out_text() -> list[tuple[str, str]]:
    """Return (module name, source text) of every held-out module that exists, in the order of HELD_OUT. Raises
    FileNotFoundError when this interpreter has none of them (a Python installed without its sources)."""
    texts = []
    for name in HELD_OUT:
        stem = _stdlib() / name.replace(".", "/")
        for path in filter(Path.is_file, (stem.with_suffix(".py"), stem / "__init__.py")):
            texts.append((name, path.read_text(encoding="utf-8")))
            break
    if not texts:
        raise FileNotFoundError(
            f"none of the held-out modules ({', '.join(HELD_OUT)}) has a .py source under {_stdlib()}: "
            "this Python seems to be installed without its standard-library sources"
        )
    return texts


def prose_text() -> list[tuple[str, str]]:
    """Return (topic, text) of Python's reference documentation: English, on which no head is fitted either."""
    from pydoc_data.topics import topics

    return sorted(topics.items())


def fitting_text() -> list[tuple[str, str]]:
    """Return (module name, source text) of the other standard-library modules, sorted by name, to fit exit heads on.
    Leaves out test suites, IDLE, lib2to3 and installed packages, files that are not UTF-8, and files that share text
    with a held-out module. Raises FileNotFoundError as held_out_text does."""
    held_out = fingerprints(text for _, text in held_out_text())
    texts = []
    for folder, inner, files in os.walk(_stdlib()):
        inner[:] = [name for name in inner if name not in NOT_FOR_FITTING]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if not named_like_held_out(path) and not is_contaminated(text, held_out):
                texts.append((".".join(path.relative_to(_stdlib()).with_suffix("").parts), text))
    return sorted(texts)


def named_like_held_out(path: Path) -> bool:
    """Whether a file has the name of a held-out module (`argparse.py`, `json/decoder.py`), in any folder."""
    return any(path.parts[-len(tail) :] == tail for tail in _HELD_OUT_TAILS)


def _windows(text: str) -> list[bytes]:
    """Return digests of all runs of WINDOW_LINES non-blank lines, whitespace-normalised, and last of the whole text."""
    lines = [line for line in (" ".join(raw.split()) for raw in text.splitlines()) if line]
    runs = ("\n".join(lines[i : i + WINDOW_LINES]) for i in range(len(lines) - WINDOW_LINES + 1))
    texts = [*(run for run in runs if len(run) >= MIN_WINDOW_CHARS), "\n".join(lines)]
    return [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]


def fingerprints(texts: Iterable[str]) -> set[bytes]:
    """Return the 8-byte digests by which `is_contaminated` recognises copies of these texts."""
    return {digest for text in texts for digest in _windows(text)}


def is_contaminated(text: str, fingerprints: set[bytes]) -> bool:
    """Whether `text` repeats fingerprinted text: the whole of it, or more than a small share of its 8-line windows. The
    share is MAX_SHARED_SHARE of the text's own windows, or MAX_SHARED_WINDOWS of them if that is fewer."""
    *windows, whole = _windows(text)
    shared = sum(digest in fingerprints for digest in windows)
    return whole in fingerprints or shared > min(MAX_SHARED_SHARE * len(windows), MAX_SHARED_WINDOWS)


def token_windows(
    encode: Callable[[str], list[int]], texts: list[tuple[str, str]], length: int, count: int, seed: int
) -> list[list[int]]:
    """Draw `count` windows of exactly `length` token ids from (name, text) pairs, the same ones for the same seed. Each
    begins at a line start that is not blank, no two at the same one, though they may overlap. Texts take turns, so that
    a long module does not crowd out a short one. `encode` maps text to token ids without special tokens. Raises
    ValueError if `length` or `count` is below 1 or the texts hold too few windows."""
    if length < 1 or count < 1:
        raise ValueError(f"length and count must be at least 1, got length={length}, count={count}")
    draw = random.Random(seed)
    turns = [(text, _line_starts(text)) for _, text in texts]
    draw.shuffle(turns)
    for _, starts in turns:
        draw.shuffle(starts)
    windows: list[list[int]] = []
    while turns:
        for text, starts in turns:
            while starts:
                window = leading_tokens(encode, text, length, starts.pop())
                if len(window) == length:  # the text does not end before
                    windows.append(window)
                    break
            if len(windows) == count:
                return windows
        turns = [turn for turn in turns if turn[1]]
    raise ValueError(
        f"not enough text for {count} windows of {length} tokens: "
        f"{len(texts)} texts ({sum(len(text) for _, text in texts):,} characters) hold {len(windows)}"
    )


def _line_starts(text: str) -> list[int]:
    starts, position = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            starts.append(position)
        position += len(line)
    return starts


def leading_tokens(encode: Callable[[str], list[int]], text: str, most: int, start: int = 0) -> list[int]:
    """Return at most the first `most` token ids of `text` from `start` on, without encoding a long text whole."""
    reach = 6 * most
    while True:
        ids = encode(text[start : start + reach])
        # A cut changes the tokens next to it, so the ids in use must end well before the cut.
        if len(ids) >= most + 16 or start + reach >= len(text):
            return ids[:most]
        reach *= 2


def rolling(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, scored, end) of windows of at most `window` tokens over a document of `length` tokens. Tokens
    scored..end-1 are predicted from start..scored-1 and those before them. The first window scores all its tokens but
    the document's first, each later one the next `stride` tokens, so every token has at least `window - stride` tokens
    of context, or all that exist. `stride = window - 1` is the rolling log-likelihood of lm-evaluation-harness. Raises
    ValueError for a stride that is not in 1..window-1."""
    if not 1 <= stride < window:
        raise ValueError(
            f"stride={stride}: it must be from 1 to window - 1 = {window - 1}, so that every scored token "
            "has a token before it"
        )
    scored, end = 1, min(window, length)
    while scored < end:
        yield max(0, end - window), scored, end
        scored, end = end, min(end + stride, length)
