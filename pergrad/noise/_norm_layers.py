"""The noise scale from the norm layers alone, and the step from there to that of all parameters.

A norm layer's gradient is a sum over positions: a scale's is the sum of its input times the residual,
and a bias's is the sum of the residual. So each example's own gradient has as few entries as the layer
has features, and it costs next to nothing beside the matrix products of the backward pass.

Gray et al. (2024, arXiv 2411.00999) found that in transformers the noise scale of these layers predicts
that of all parameters. The two are not equal. How they are related is measured: for a few steps with
both, `calibrate` fits

    log Bn(all) = log factor + exponent * log Bn(norm layers),

by least squares. Logarithms, since noise scales are positive and grow by orders of magnitude, and so
that the error is relative. By default the exponent is 1 and the two are proportional.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

from pergrad._errors import ArgumentError

# Short names of layer, batch and group norms, as in "ln_1".
_SHORT = {"ln", "bn", "gn"}
_NORM = re.compile(r"[a-z]*norm(s|alization|alisation)?")
# These norms are norms of weights: they do not normalise what a layer computes.
_OF_WEIGHTS = ("weight", "spectral")


def norm_layers(path: str) -> bool:
    """Whether a parameter belongs to a norm layer, as its path tells: for `where=`.

    The name of the module that holds the parameter decides, or the parameter's own name: the last two
    names of the path, without numbers and without the `value` of a variable of Flax. Such a name is that
    of a norm layer if one of its words is `norm`, ends in `norm` (`layernorm`, also `norms` and
    `normalization`), or is `ln`, `bn` or `gn`. Words are split at underscores, digits and capitals. The
    modules further outside do not count: a `Dense_0` within a `PreNorm_0` is no norm layer. The words
    `weight` and `spectral` before `norm` exclude it, since these norms are norms of weights.

    This finds the norm layers of Flax (`LayerNorm_0`, or the attribute that an NNX module gives them),
    of Haiku (`layer_norm`), and those of Equinox and of your own code whose field has such a name. In
    Equinox a norm layer in a list, `layers[1].weight`, has no name of its own. If your names are
    different, write a predicate of your own.

    >>> pg.noise.norm_layers("['params']['Block_0']['LayerNorm_1']['scale']")
    True
    >>> pg.noise.norm_layers("['transformer/~/layer_norm']['offset']")
    True
    >>> pg.noise.norm_layers(".blocks[3].attention.query.weight")
    False
    """
    names = [name for name in re.findall(r"[^][.'\"/~]+", path) if not name.isdigit()]
    if path.endswith(".value"):
        names = names[:-1]
    return any(_is_norm(name) for name in names[-2:])


def _is_norm(name: str) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    for before, word in zip(["", *words], words, strict=False):
        is_of_weights = before in _OF_WEIGHTS or word.startswith(_OF_WEIGHTS)
        if word in _SHORT or (_NORM.fullmatch(word) and not is_of_weights):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Predicts the noise scale of all parameters from that of a part of them: see `calibrate`.

    `factor` and `exponent` were fitted to `steps` steps. One of these was off by a factor of `spread`,
    as a standard deviation of logarithms.
    """

    factor: float
    exponent: float
    spread: float
    steps: int

    def __call__(self, noise_scale: float | None) -> float | None:
        """The noise scale of all parameters; None if that of the part is not known."""
        own = _logarithm(noise_scale)
        return None if own is None else self.factor * math.exp(self.exponent * own)


def calibrate(
    part: Iterable[float | None], whole: Iterable[float | None], *, exponent: float | None = 1.0
) -> Calibration:
    """Fits the noise scale of all parameters to that of a part of them, such as the norm layers.

    The result is a function from the second to the first, `factor * part ** exponent`.

    Args:
      part: the noise scales of the part, one for each step where both were measured, such as
        `monitor.summary(state)["noise_scale"]`. A step with a noise scale that is None, infinite or
        not positive does not count.
      whole: the noise scales of all parameters in the same steps.
      exponent: the exponent, or None to fit it, too. To fit it, the noise scale must have changed a lot
        between the steps.

    The moving averages of a monitor change slowly, so steps that follow each other say nearly the same.
    Take them as far apart as the averages remember.

    >>> fit = pg.noise.calibrate([10.0, 20.0, 40.0], [30.0, 66.0, 120.0])
    >>> round(fit.factor, 2), round(fit.spread, 2), round(fit(100.0))
    (3.1, 1.06, 310)
    """
    part, whole = list(part), list(whole)
    if len(part) != len(whole):
        raise ArgumentError(f"calibrate: part has {len(part)} steps, but whole has {len(whole)}.")
    logarithms = zip(map(_logarithm, part), map(_logarithm, whole), strict=True)
    pairs = [(x, y) for x, y in logarithms if x is not None and y is not None]
    n, fitted = len(pairs), 1 if exponent is not None else 2
    if n < fitted + 1:
        raise ArgumentError(
            f"calibrate: {n} steps have both noise scales, of {len(part)}; it takes {fitted + 1}. Where "
            "the noise hides the signal there is no noise scale: average over more steps "
            "(Monitor(decay=...))."
        )
    x_mean, y_mean = (math.fsum(side) / n for side in zip(*pairs, strict=True))
    if exponent is None:
        squares = math.fsum((x - x_mean) ** 2 for x, _ in pairs)
        if squares == 0:
            raise ArgumentError(
                "calibrate: the noise scale of the part is the same in all steps, which says nothing "
                "about the exponent. Leave exponent=1."
            )
        exponent = math.fsum((x - x_mean) * (y - y_mean) for x, y in pairs) / squares
    logarithm = y_mean - exponent * x_mean
    residuals = [y - logarithm - exponent * x for x, y in pairs]
    variance = math.fsum(r**2 for r in residuals) / (n - fitted)
    return Calibration(math.exp(logarithm), exponent, math.exp(math.sqrt(variance)), n)


def _logarithm(noise_scale: float | None) -> float | None:
    """None if the noise scale is not known: where no signal is seen, it is None or infinite."""
    if noise_scale is None or not 0 < noise_scale < math.inf:
        return None
    return math.log(noise_scale)
