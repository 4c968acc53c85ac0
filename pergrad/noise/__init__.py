"""How much the examples of a batch agree: signal, noise, and what follows for batch sizes and signs.

The gradients g_i of B examples have the mean mu and the covariance Sigma. Let s be the mean of ||g_i||^2
and G = ||gbar||^2. Then two quantities have unbiased estimates (McCandlish et al. 2018):

    noise   tr Sigma = (s - G) B / (B - 1)
    signal  |mu|^2   = G - tr Sigma / B

The mean gradient of a batch of B has the noise tr Sigma / B. It is as large as the signal if B is the
noise scale, Bn = tr Sigma / |mu|^2. Near a point where the loss has the Hessian H, the best step along
the gradient lowers the loss by an amount that is proportional to

    1 / (1 + Bc / B)     with the critical batch size  Bc = tr(H Sigma) / (mu' H mu).

A batch of Bc examples reaches half of what is possible. If H is a multiple of the identity, Bc is Bn.
If nothing is known about H, Bn is the best guess.

Both batch sizes are ratios of noisy numbers. The mean of ratios is not the ratio of means, and a single
batch may even have a negative estimate of the signal. So the numerators and the denominators are
averaged over steps before they are divided, which `Monitor` does.

The noise scale of the norm layers alone is nearly free, and predicts that of all parameters
(`norm_layers`, `calibrate`). All functions and methods of this module can be jitted, except
`Monitor.summary` and `calibrate`, which work with plain numbers.
"""

from pergrad.noise._curvature import curvature
from pergrad.noise._estimates import SignalNoise, by_layer, diversity, outliers, share, snr, total
from pergrad.noise._monitor import Monitor, NoiseState
from pergrad.noise._norm_layers import Calibration, calibrate, norm_layers
from pergrad.noise._signs import SIGN_FACTOR, sign_disagreement

__all__ = [
    "SIGN_FACTOR",
    "Calibration",
    "Monitor",
    "NoiseState",
    "SignalNoise",
    "by_layer",
    "calibrate",
    "curvature",
    "diversity",
    "norm_layers",
    "outliers",
    "share",
    "sign_disagreement",
    "snr",
    "total",
]
