"""Rolling windows over a document: every token except the first is scored exactly once, with a minimum context."""

from __future__ import annotations

from collections.abc import Iterator


def rolling(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, scored, end) of windows over a document of `length` tokens.

    Tokens scored..end-1 are predicted from all tokens of the window before them, at least start..scored-1. The first
    window scores all its tokens except the document's first. Each later window scores the next `stride` tokens (the
    last window the remaining ones), so every token has at least `window - stride` tokens of context, or all that exist.
    Windows hold at most `window` tokens. `stride = window - 1` is the rolling log-likelihood of lm-evaluation-harness,
    with one token of context between two windows.

    Raises:
        ValueError: stride is not in 1..window-1.
    """
    if not 1 <= stride < window:
        raise ValueError(
            f"stride={stride}: it must be from 1 to window - 1 = {window - 1}, so that every scored token "
            "has a token before it"
        )
    scored, end = 1, min(window, length)
    while scored < end:
        yield max(0, end - window), scored, end
        scored, end = end, min(end + stride, length)
