"""Which examples of a batch have an unusually large gradient, as a row of the metrics lists them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import pergrad as pg
from pergrad.lab.run.records import plain

LISTED = 5  # of one batch, those with the largest gradients
READ = 160  # bytes of an example's text


def listed(norms: Any, batch: Any, tokens: str) -> list[dict[str, Any]]:
    """The outliers among the norms [B] of a batch, the largest first.

    An outlier has its `place` in the batch, its `norm`, how many times the median that is, and the
    beginning of its `text` if the batch is text that is cut into bytes.
    """
    is_outlier = np.asarray(pg.noise.outliers(jnp.asarray(norms)))
    norms = np.asarray(norms, float)
    largest = sorted(np.flatnonzero(is_outlier), key=lambda place: -norms[place])[:LISTED]
    median = np.nanmedian(norms) if largest else np.nan
    return [
        {"place": int(i), "norm": plain(norms[i]), "times_median": plain(norms[i] / median)}
        | _text(batch, int(i), tokens)
        for i in largest
    ]


def _text(batch: Any, place: int, tokens: str) -> dict[str, str]:
    """A batch of text is one array of tokens [B, T], and that of images has more axes or arrays."""
    if tokens != "bytes" or not isinstance(batch, np.ndarray) or batch.ndim != 2:
        return {}
    return {"text": bytes(batch[place, :READ].astype(np.uint8)).decode(errors="replace")}
