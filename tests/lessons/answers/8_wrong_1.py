"""Wrong: the parabola is fitted in the size, not in its logarithm.

Refused by check_isoflop_optimum.
"""

import numpy as np


def isoflop_optimum(sizes, losses):
    p, q, r = np.polyfit(sizes, losses, 2)
    if p <= 0:
        return None
    return float(-q / (2 * p)), float(r - q * q / (4 * p))


def fit_power_law(budgets, optima):
    a, log_k = np.polyfit(np.log(budgets), np.log(optima), 1)
    return float(np.exp(log_k)), float(a)


PREDICTION = {"n_params": 156_000, "loss": 1.55, "band": 0.1}
