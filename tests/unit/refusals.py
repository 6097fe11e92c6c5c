"""What is said of what cannot be had."""

import pytest


def said(error, call, *given, **named):
    """The text of the `error` that a call ends with."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)
