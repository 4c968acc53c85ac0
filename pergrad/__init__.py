"""pergrad: statistics of per-example gradients at the price of the mean gradient."""

from pergrad import _compat as _compat  # first, since it says what is wrong with the version of JAX
from pergrad import noise, optim, scaling
from pergrad._call import check, explain, grad_stats, value_and_stats
from pergrad._cut import FactorPair
from pergrad._errors import ArgumentError, NotPerExampleError, PergradError
from pergrad._ir import plan_for
from pergrad._plan import Plan
from pergrad._statistics import (
    ClippedMean,
    Count,
    Dot,
    Factors,
    Fold,
    Gram,
    Individual,
    Loss,
    Mean,
    Norm,
    Statistic,
    Variance,
    all_combine,
    combine,
    power,
)

__version__ = "0.2.0"

__all__ = [
    "ArgumentError",
    "ClippedMean",
    "Count",
    "Dot",
    "FactorPair",
    "Factors",
    "Fold",
    "Gram",
    "Individual",
    "Loss",
    "Mean",
    "Norm",
    "NotPerExampleError",
    "PergradError",
    "Plan",
    "Statistic",
    "Variance",
    "all_combine",
    "check",
    "combine",
    "explain",
    "grad_stats",
    "noise",
    "optim",
    "plan_for",
    "power",
    "scaling",
    "value_and_stats",
]
