"""Right: a quadratic through the normal equations, and slopes by covariance, without polyfit."""

import math


def isoflop_optimum(sizes, losses):
    center = sum(map(math.log10, sizes)) / len(sizes)
    x = [math.log10(size) - center for size in sizes]
    moments = [sum(value**power for value in x) for power in range(5)]
    rows = [[moments[i + j] for j in range(3)] for i in range(3)]
    right = [sum(y * value**i for value, y in zip(x, losses, strict=True)) for i in range(3)]
    r, q, p = solve(rows, right)
    if p <= 0:
        return None
    return 10 ** (center - q / (2 * p)), r - q * q / (4 * p)


def solve(rows, right):
    """Gauss-Jordan elimination with pivots."""
    rows = [[*row, y] for row, y in zip(rows, right, strict=True)]
    for i in range(3):
        pivot = max(range(i, 3), key=lambda n: abs(rows[n][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for n in range(3):
            if n != i:
                rows[n] = [a - rows[n][i] * b for a, b in zip(rows[n], rows[i], strict=True)]
    return [row[3] for row in rows]


def fit_power_law(budgets, optima):
    x = [math.log2(value) for value in budgets]
    y = [math.log2(value) for value in optima]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    a = covariance / sum((value - mean_x) ** 2 for value in x)
    return 2 ** (mean_y - a * mean_x), a


PREDICTION = {"n_params": 130_000, "loss": 1.52, "band": 0.09}
