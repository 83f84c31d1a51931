"""The fits of lesson 8: where an IsoFLOP curve has its minimum, power laws, the surface L(N, D).

    L(log N) = p (log N)^2 + q log N + r          one budget: the minimum is at log N = -q / (2 p)
    optimum(C) = k C^a                            all budgets: a line in log C
    L(N, D) = E + A / N^alpha + B / D^beta        all runs

These are approaches 2 and 3 of Hoffmann et al. 2022 (Chinchilla, arXiv 2203.15556). N: parameters.
D: tokens, here bytes. C: FLOPs. L: nats per token, here per byte.

lessons/scaling_runs.py makes the runs.
"""

from dataclasses import dataclass

import numpy as np

import program

EXPONENTS = np.geomspace(0.05, 2, 60)  # that `fit_surfaces` tries


def isoflop_optimum(sizes, losses) -> tuple[float, float] | None:
    """(size, loss) at the minimum of a parabola in log size, fitted by least squares.

    None if the parabola has no minimum.
    """
    p, q, r = np.polyfit(np.log(sizes), losses, 2)
    if p <= 0:
        return None  # it opens downwards
    return float(np.exp(-q / (2 * p))), float(r - q * q / (4 * p))


def fit_power_law(budgets, optima) -> tuple[float, float]:
    """(k, a) of optimum = k * budget^a: the least squares of the logs."""
    a, log_k = np.polyfit(np.log(budgets), np.log(optima), 1)
    return float(np.exp(log_k)), float(a)


@dataclass
class Surface:
    """L(N, D) = E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, n, d):
        """The loss of n parameters trained on d tokens."""
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta


def fit_surfaces(n, d, losses) -> list[Surface]:
    """The best surfaces with E, A, B >= 0, for several sets of losses of the same runs.

    n, d: one entry a run; losses (sets, runs).
    With the two exponents given, the best E, A, B solve a linear system. So all pairs of EXPONENTS
    are tried, and the one with the smallest squared error wins.
    """
    n, d, losses = (np.asarray(values, dtype=float) for values in (n, d, losses))
    alpha, beta = (grid.reshape(-1, 1) for grid in np.meshgrid(EXPONENTS, EXPONENTS))  # (pairs, 1)
    # Scaled to 1 at the median run, so that the systems are well conditioned.
    terms = [np.ones((len(alpha), len(n))), (n / np.median(n)) ** -alpha]
    terms = np.stack([*terms, (d / np.median(d)) ** -beta], axis=2)  # (pairs, runs, 3)
    inverse = np.linalg.pinv(terms)  # (pairs, 3, runs)

    found = []
    for loss in losses:
        factors = inverse @ loss  # (pairs, 3)
        errors = np.einsum("prt,pt->pr", terms, factors) - loss
        squares = np.where((factors >= 0).all(axis=1), (errors**2).mean(axis=1), np.inf)
        i = int(squares.argmin())
        program.require(np.isfinite(squares[i]), "no surface with E, A, B >= 0 fits these losses")
        a = factors[i, 1] * np.median(n) ** alpha[i, 0]
        b = factors[i, 2] * np.median(d) ** beta[i, 0]
        numbers = (factors[i, 0], a, b, alpha[i, 0], beta[i, 0])
        found.append(Surface(*map(float, numbers)))
    return found


def minima(rows: list[dict], losses=None) -> dict[float, tuple[float, float]]:
    """{budget: (size, loss) at the minimum}, the smallest budget first.

    rows: lines of a grid. losses: one for each row, in place of its own. Runs of one size and
    budget, with several seeds, are averaged first. Budgets without a minimum are left out.
    """
    losses = [row["loss"] for row in rows] if losses is None else losses
    runs = {}  # budget -> {size: losses of its seeds}
    for row, loss in zip(rows, losses, strict=True):
        runs.setdefault(row["budget"], {}).setdefault(row["n_params"], []).append(loss)
    found = {}
    for budget, of_size in sorted(runs.items()):
        means = [np.mean(values) for values in of_size.values()]
        minimum = isoflop_optimum(list(of_size), means) if len(of_size) > 2 else None
        if minimum:
            found[budget] = minimum
    return found


def seed_deviation(rows: list[dict]) -> float:
    """The standard deviation of the loss over seeds, pooled over all cells with several."""
    groups = {}
    for row in rows:
        groups.setdefault((row["budget"], row["d_model"]), []).append(row["loss"])
    several = [group for group in groups.values() if len(group) > 1]
    squares = sum(np.var(group) * len(group) for group in several)
    return float(np.sqrt(squares / sum(len(group) - 1 for group in several)))


def resampled(rows: list[dict], deviation: float, draw, files_too: bool = True) -> np.ndarray:
    """The losses of all rows as they might have been: other held-out files, other seeds.

    The files are drawn with replacement, the same for all rows. deviation: of the seeds.
    draw: a numpy Generator. files_too=False: only the seeds change.
    """
    measured = np.array([row["documents"] for row in rows])  # (rows, files, 2): nats, bytes
    chosen = np.arange(measured.shape[1])
    if files_too:
        chosen = draw.choice(chosen, len(chosen))
    nats, n_bytes = measured[:, chosen].sum(axis=1).T
    return nats / n_bytes + draw.normal(0, deviation, len(rows))
