"""A plugin of pytest: Triton's interpreter with the same results in less processor time.

It replaces the functions of Triton's language by its own in each launch of a kernel and again in each function that a
kernel calls, for which it looks through hundreds of names. Here they are replaced once. And it writes a table of types
down whenever it asks for the type of an array.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton import language
from triton.runtime import interpreter


def pytest_configure() -> None:
    interpreter._patch_lang(SimpleNamespace(__globals__={"language": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    type_of, known = interpreter._get_np_dtype, dict[str, Any]()

    def known_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = type_of(kind)
        return known[name]

    interpreter._get_np_dtype = known_type_of
