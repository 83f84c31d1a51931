"""Checks exercise 8: the fits on data whose answer is known, the prediction against real runs."""

import math

import numpy as np

from lessons import scaling_fits, scaling_runs
from lessons.answers import ToDo, close

WIDEST = 0.1  # nats per byte
FACTOR = 2  # between the predicted size and the one that the grid supports
NEAREST = 1.7  # factor between the predicted size and that of the run it is compared with


def check_isoflop_optimum(answer):
    """isoflop_optimum: the lowest point of a parabola in log size"""
    noisy = np.geomspace(2e4, 2e6, 7)
    noise = np.random.default_rng(8).normal(0, 0.01, 7)
    noisy_losses = 2 + 0.1 * np.log(noisy / 3e5) ** 2 + noise
    for sizes, losses, case in (
        ([1e4, 1e5, 1e6], [2.5, 2.0, 2.5], "three runs around 1e5"),
        ([1e4, 4e4, 16e4], [2.6, 2.1, 2.2], "a minimum between two runs"),
        ([9e4, 1e4, 3e4], [2.3, 2.4, 2.1], "sizes that are not in order"),
        (noisy.tolist(), noisy_losses.tolist(), "seven runs with noise"),
    ):
        expected_size, expected_loss = scaling_fits.isoflop_optimum(sizes, losses)
        size, loss = answer.call("isoflop_optimum", sizes, losses)
        hint = "fit the parabola in log N, and take its lowest point, not that of a run"
        close(f"size at the minimum, {case}", size, expected_size, expected_size * 1e-3, hint)
        close(f"loss at the minimum, {case}", loss, expected_loss, 1e-4)
    got = answer.call("isoflop_optimum", [1e4, 1e5, 1e6], [2.0, 2.5, 2.1])
    assert got is None, f"isoflop_optimum of a curve that opens downwards: expected None, got {got}"


def check_fit_power_law(answer):
    """fit_power_law: a line in the logs"""
    for budgets, optima, case in (
        ([1.0, 4.0, 16.0], [5.0, 10.0, 20.0], "optimum = 5 * budget ** 0.5"),
        ([1e18, 1e20, 1e21], [8e7, 9e8, 2.6e9], "noisy optima"),
        ([1e10, 1e11, 1e12], [2.4, 2.0, 1.7], "losses, which fall"),
    ):
        k, a = scaling_fits.fit_power_law(budgets, optima)
        got_k, got_a = answer.call("fit_power_law", budgets, optima)
        hint = "`polyfit` returns the slope, a, first; what it returns second is log k"
        close(f"a, {case}, budgets {budgets}", got_a, a, 1e-4, hint)
        close(f"k, {case}, budgets {budgets}", got_k, k, k * 1e-3, hint)


def check_prediction(answer):
    """PREDICTION: the best size for the held-out budget, and a narrow band around its loss"""
    predicted = answer.value("PREDICTION")
    for key in ("n_params", "loss", "band"):
        if predicted[key] is None:
            raise ToDo(f"fill in {key} of PREDICTION")
        assert 0 < predicted[key] < math.inf, f"PREDICTION[{key!r}]: got {predicted[key]!r}"
    size, loss, band = predicted["n_params"], predicted["loss"], predicted["band"]
    assert band <= WIDEST, f"band: at most {WIDEST} nats, got {band:g}, which says little"

    rows, held_out, whose = find_runs()
    found = scaling_fits.minima(rows)
    k, a = scaling_fits.fit_power_law(list(found), [n for n, _ in found.values()])
    supported = k * scaling_runs.HELD_OUT**a
    assert supported / FACTOR <= size <= supported * FACTOR, (
        f"n_params: a power law through the optima of {whose} supports about {supported:,.0f} "
        f"parameters, within a factor of {FACTOR}, but PREDICTION has {size:,.0f}"
    )
    run = min(held_out, key=lambda row: abs(math.log(row["n_params"] / size)))
    command = f"python -m lessons.scaling_runs --budget={scaling_runs.HELD_OUT:g} --d_model=..."
    nearest = f"the nearest run on this budget has {run['n_params']:,}"
    is_near = max(run["n_params"] / size, size / run["n_params"]) <= NEAREST
    assert is_near, f"no run has about {size:,.0f} parameters, {nearest}: make one with {command}"
    off = loss - run["loss"]
    assert abs(off) <= band, (
        f"The run ({whose}): {run['n_params']:,} parameters, {run['loss']:.3f}. Your bet: {loss:g} "
        f"+- {band:g}, {abs(off):.3f} too {'high' if off > 0 else 'low'}: the run lies outside of "
        "the band, and the bet is lost. That is a result, too: python -m lessons 8 --answers.\n"
        "Two ways to extrapolate differ by more than two seeds do."
    )
    return f"compared with {whose}"


def find_runs() -> tuple[list[dict], list[dict], str]:
    """(the grid, runs on the held-out budget, whose they are).

    The reader's own if they are whole: a grid and a run on that budget. Else the stored ones.
    """
    keys = {cell.key for cell in scaling_runs.grid()}
    own = scaling_runs.own_runs()
    grid = [row for row in own if row["key"] in keys]
    held_out = [row for row in own if row["budget"] == scaling_runs.HELD_OUT]
    if len(grid) == len(keys) and held_out:
        return grid, held_out, "your own runs"
    stored = scaling_runs.read(scaling_runs.STORED)
    grid = [row for row in stored if row["budget"] < scaling_runs.HELD_OUT]
    held_out = [row for row in stored if row["budget"] == scaling_runs.HELD_OUT]
    return grid, held_out, "the stored runs, lessons/8_grid.jsonl"
