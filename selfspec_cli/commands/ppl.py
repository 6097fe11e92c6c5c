"""`selfspec ppl`: perplexity."""

from typing import Annotated

import typer

from selfspec_cli.commands import configs, findings
from selfspec_cli.commands.screen import FINDINGS_KEPT, Output
from selfspec_cli.commands.shared import Corpus, Overrides, command


@command(
    epilog="Examples: selfspec ppl method=skip layer=4,8,12   ·   selfspec ppl gate=margin --corpus sharegpt.json",
    then=FINDINGS_KEPT,
)
def ppl(
    out: Output,
    overrides: Overrides = None,
    corpus: Corpus = "stdlib",
    documents: Annotated[int, typer.Option("--documents", min=1, help="Score at most this many documents.")] = 1000,
    document_tokens: Annotated[
        int, typer.Option("--document-tokens", min=2, help="Score this many tokens from the start of each document.")
    ] = 2048,
    window: Annotated[int, typer.Option("--window", min=2, help="Length of the rolling window in tokens.")] = 512,
    stride: Annotated[
        int, typer.Option("--stride", min=1, help="Tokens that each window after the first scores.")
    ] = 256,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Held-out prompts that every arm continues.")] = 64,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of each prompt.")] = 32,
    length: Annotated[int, typer.Option("--length", min=1, help="Tokens that each prompt is continued by.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Temperature of the sampled continuations.")
    ] = 1.0,
) -> None:
    """Perplexity with intervals: of a text under the arm's own predictions (baseline and skip), and, for every arm, of
    what it generates under the plain model."""
    from selfspec_cli.stages.ppl import Request

    of_text = (corpus, documents, document_tokens, window, stride)
    request = Request(*of_text, prompts, prompt_tokens, length, temperature)
    findings.ppl(configs.several(overrides), request, out)
