"""Greedy drafting changes no token of other architectures than Llama: two exits and lengths on an engine each."""

import pytest
from conftest import FULL
from test_lossless import FEW, LENGTHS, OTHERS, check_engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", OTHERS)
def test_greedy(expected, report, name):
    layer, k = FEW[0]
    check_engine(expected(name), name, (layer, max(LENGTHS) if FULL else k), report, OTHERS.index(name))
