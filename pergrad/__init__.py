"""pergrad: statistics of per-example gradients at the price of the mean gradient."""

from pergrad._api import explain, grad_stats, value_and_stats
from pergrad._check import check
from pergrad._errors import ArgumentError, NotPerExampleError, PergradError
from pergrad._plan import Plan
from pergrad._statistics import Count, Fold, Individual, Loss, Mean, Statistic, Variance, power

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Count",
    "Fold",
    "Individual",
    "Loss",
    "Mean",
    "NotPerExampleError",
    "PergradError",
    "Plan",
    "Statistic",
    "Variance",
    "check",
    "explain",
    "grad_stats",
    "power",
    "value_and_stats",
]
