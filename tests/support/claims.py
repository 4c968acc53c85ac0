"""What tests claim: two trees are close, and bad input is refused in words."""

import re

import jax
import numpy as np
import pytest

import pergrad as pg


def close(actual, expected, rtol=1e-10, atol=1e-12):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


def refused(error, *words):
    """The block must raise `error`, with all these words in its message."""
    assert issubclass(error, pg.PergradError)
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))
