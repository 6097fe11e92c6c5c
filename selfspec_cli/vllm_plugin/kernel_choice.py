"""Which settings the draft's kernels run with, by a file that `selfspec tune-kernels` measured on this kind of GPU.

An engine looks for a file of its GPU and of its model's shape. Where there is one, products with integer copies
(weights/lowbit.py) and the draft's attention (attention/) ask here for their settings, and it is kept which of them
found one. A file is bound to the source of the kernels and to Triton's version: after a change of either it is refused,
the kernels run with their usual settings, and the log says so.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from selfspec_cli.whole import cache_dir, written

SOURCES = (
    "weights/one_token.py",
    "weights/rounding.py",
    "weights/lowbit_one_token.py",
    "weights/lowbit_few_tokens.py",
    "attention/one_query.py",
)
"""Whose kernels are chosen."""
Setting = dict[str, Any]
"""Arguments of a kernel's function, all of them whole numbers."""


@dataclass(frozen=True)
class DraftShape:
    """What a draft step multiplies and attends to on one tensor-parallel rank.

    bits: of the copies. products: name -> rows and columns of the weight.
    """

    bits: int
    products: Mapping[str, tuple[int, int]]
    query_heads: int
    heads: int
    dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any], bits: int, ranks: int = 1, vocabulary: int | None = None) -> DraftShape:
        """Of a model whose layers are those of Llama, by its config.json.

        vocabulary: tokens of a draft vocabulary. Raises KeyError, with the name of what the config does not say.
        """
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"]) // ranks
        all_heads = int(config["num_attention_heads"])
        dim = int(config.get("head_dim") or hidden // all_heads)
        query_heads = all_heads // ranks
        heads = max(1, int(config.get("num_key_value_heads") or all_heads) // ranks)
        products = {
            "qkv": ((query_heads + 2 * heads) * dim, hidden),
            "o": (hidden, query_heads * dim),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "lm_head": ((vocabulary or int(config["vocab_size"])) // ranks, hidden),
        }
        return cls(bits, products, query_heads, heads, dim)

    @property
    def name(self) -> str:
        """Of a file for it. The vocabulary is not in it, because a model has several draft vocabularies."""
        hidden, inner = self.products["down"]
        return f"{hidden}x{inner}_heads{self.query_heads}-{self.heads}x{self.dim}_{self.bits}bits"


@dataclass
class KernelChoice:
    """Settings of one GPU and shape.

    products: (rows, columns, bits) -> tokens -> setting. attention: (query heads, heads, dim) -> (requests, tokens that
    a block table has room for) -> setting. stale: why the file is refused; the tables are empty then. ran: what was
    launched since -> whether it found a setting.
    """

    path: Path
    products: dict[tuple[int, int, int], dict[int, Setting]] = field(default_factory=dict)
    attention: dict[tuple[int, int, int], dict[tuple[int, int], Setting]] = field(default_factory=dict)
    names: dict[tuple[int, int, int], str] = field(default_factory=dict)
    stale: str | None = None
    ran: dict[str, bool] = field(default_factory=dict)

    def of_product(self, rows: int, columns: int, bits: int, tokens: int) -> Setting:
        """Setting of a product of `tokens` tokens that runs now, or that a graph records."""
        found = self.for_product(rows, columns, bits, tokens)
        name = self.names.get((rows, columns, bits), f"[{rows}, {columns}] of {bits} bits")
        self.ran[f"{name} at {tokens}"] = found is not None
        return found or {}

    def for_product(self, rows: int, columns: int, bits: int, tokens: int) -> Setting | None:
        """Measured setting for `tokens`, or for the next larger count; None if there is none."""
        known = self.products.get((rows, columns, bits), {})
        return _next(known, tokens) if tokens > 1 else known.get(1)

    def of_attention(self, query_heads: int, heads: int, dim: int, requests: int, room: int) -> Setting:
        """Fastest measured setting of the one-query attention kernel.

        requests: batch size. room: tokens that each block table can hold.
        """
        known = self.attention.get((query_heads, heads, dim), {})
        count = min((n for n, _ in known if n >= requests), default=None)
        found = _next({context: setting for (n, context), setting in known.items() if n == count}, room)
        self.ran[f"attention at {requests} with room for {room}"] = found is not None
        return found or {}

    def unchosen(self) -> list[str]:
        """What ran without a setting from the file; of a file that is refused all that it was for."""
        return (
            [*self.names.values(), "attention"]
            if self.stale
            else [name for name, found in self.ran.items() if not found]
        )

    def __str__(self) -> str:
        """How many of the kernels that ran were chosen, and which were not."""
        missing = self.unchosen()
        if self.stale:
            return f"none is chosen: {self.stale}"
        share = f"{len(self.ran) - len(missing)} of {len(self.ran)} are chosen by {self.path}"
        return share + (f"; not {', '.join(missing)}" if missing else "")


def _next(known: Mapping[int, Setting], wanted: int) -> Setting | None:
    number = min((one for one in known if one >= wanted), default=None)
    return None if number is None else known[number]


# ---- files ----------------------------------------------------------------------------------------------------------


def version() -> str:
    """Changes with the kernels' source, and with the Triton that compiles them."""
    package = files("selfspec_cli.vllm_plugin")
    digest = hashlib.sha256(b"\0".join((package / name).read_bytes() for name in SOURCES))
    try:
        digest.update(importlib.metadata.version("triton").encode())
    except importlib.metadata.PackageNotFoundError:
        digest.update(b"none")
    return digest.hexdigest()[:16]


def path_for(device: str, shape: DraftShape) -> Path:
    """Where the file of a GPU's name and a shape lies."""
    return cache_dir() / "kernels" / f"{re.sub(r'[^A-Za-z0-9]+', '_', device)}_{shape.name}.json"


def write(path: Path, device: str, shape: DraftShape, rows: Iterable[Mapping[str, Any]]) -> None:
    """Keep what was chosen; rows: see `read`."""
    products = {name: list(size) for name, size in shape.products.items()}
    document = {
        "device": device,
        "kernels": version(),
        "bits": shape.bits,
        "products": products,
        "heads": [shape.query_heads, shape.heads, shape.dim],
        "chosen": list(rows),
    }
    with written(path) as part:
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> KernelChoice:
    """The choice in a file; one that is refused is `stale`, and says why.

    Each row of "chosen" has a "setting", and is for a "product" at "tokens", or for "attention" at "tokens" requests
    with room for "context" tokens of each.
    """
    again = "run selfspec tune-kernels again"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        bits, sizes = int(document["bits"]), {name: (int(a), int(b)) for name, (a, b) in document["products"].items()}
        choice = KernelChoice(path, names={(*size, bits): name for name, size in sizes.items()})
        if document["kernels"] != version():
            choice.stale = f"{path} was measured with other kernels or another Triton; {again}"
            return choice
        heads = tuple(map(int, document["heads"]))
        for row in document["chosen"]:
            setting = {name: int(value) for name, value in row["setting"].items()}
            if row["kind"] == "attention":
                places = choice.attention.setdefault(heads, {})  # type: ignore[arg-type]
                places[int(row["tokens"]), int(row["context"])] = setting
            else:
                choice.products.setdefault((*sizes[row["kind"]], bits), {})[int(row["tokens"])] = setting
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return KernelChoice(path, stale=f"{path} cannot be read ({type(error).__name__}: {error}); {again}")
    return choice


# ---- of the engine in this process ----------------------------------------------------------------------------------

_current: KernelChoice | None = None


def current() -> KernelChoice | None:
    """The choice of the engine that loaded its drafts last in this process; None where no file was measured for it."""
    return _current


def use(choice: KernelChoice | None) -> None:
    """From now on, in this process."""
    global _current
    _current = choice


def for_engine(config: Mapping[str, Any], bits: int | None, ranks: int, device: str) -> KernelChoice | None:
    """What was measured for an engine, if anything. config: of the model. bits: of the copies it drafts on; None: none.
    device: the GPU's name."""
    if bits is None:
        return None
    try:
        path = path_for(device, DraftShape.of(config, bits, ranks))
    except (KeyError, TypeError, ValueError):  # not a shape that could have been measured
        return None
    return read(path) if path.exists() else None
