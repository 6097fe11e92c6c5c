"""What is read from vLLM's source about a speculative_config is what vLLM itself says once it is imported."""

import inspect
from dataclasses import fields
from typing import Any, get_args

from vllm.config import speculative as theirs
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from selfspec_cli.config import speculative


def _flat(words: tuple[Any, ...]) -> list[str]:
    return [word for one in words for word in ([one] if isinstance(one, str) else _flat(get_args(one)))]


def test_methods_and_keys_are_vllms():
    known = speculative.known_to_vllm()
    assert known is not None
    methods, keys = known
    assert sorted(methods) == sorted(set(_flat(get_args(theirs.SpeculativeMethod))))
    assert {field.name for field in fields(theirs.SpeculativeConfig)} - set(keys) == set(speculative._SET_BY_VLLM)
    assert set(speculative.DRAFTERS) <= set(methods)
    assert set(speculative.NOT_ON_CPU) <= set(methods)


def test_suffix_decoding_comes_from_the_package_that_is_looked_for():
    assert f"from {speculative.SUFFIX_PACKAGE}.suffix_decoding import" in inspect.getsource(SuffixDecodingProposer)
