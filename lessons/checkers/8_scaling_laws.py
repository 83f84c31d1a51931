"""Checks exercise 8: the fits on data whose answer is known, the prediction against real runs."""

import math

import numpy as np

from lessons import scaling_fits, scaling_runs
from lessons.answers import Skipped, ToDo, close, is_number, need

WIDEST = 0.1  # nats per byte
FACTOR = 2  # between the predicted size and the one that the grid supports
NEAREST = 1.7  # factor between the predicted size and that of the run it is compared with
KEYS = ("n_params", "loss", "band")


def check_isoflop_optimum(answer):
    """isoflop_optimum: the lowest point of a parabola in log size"""
    compare_optimum(answer, [1e4, 1e5, 1e6], [2.5, 2.0, 2.5], "three runs around 1e5")
    compare_optimum(answer, [1e4, 4e4, 16e4], [2.6, 2.1, 2.2], "a minimum between two runs")
    compare_optimum(answer, [1e5, 2e5, 4e5], [2.0, 2.1, 2.3], "a minimum below the smallest run")
    compare_optimum(answer, [9e4, 1e4, 3e4], [2.3, 2.4, 2.1], "sizes that are not in order")
    draw = np.random.default_rng(8)
    sizes = np.geomspace(2e4, 2e6, 7)
    losses = 2 + 0.1 * np.log(sizes / 3e5) ** 2 + draw.normal(0, 0.01, 7)
    compare_optimum(answer, sizes.tolist(), losses.tolist(), "seven runs with noise")
    compare_optimum(answer, [7e9, 7e10, 7e11], [2.1, 2.0, 2.2], "large models")
    got = answer.call("isoflop_optimum", [1e4, 1e5, 1e6], [2.0, 2.5, 2.1])
    need(got is None, f"isoflop_optimum of a curve that opens downwards: expected None, got {got}")


def compare_optimum(answer, sizes: list, losses: list, case: str) -> None:
    """Compare one optimum with scaling_fits.isoflop_optimum."""
    size, loss = scaling_fits.isoflop_optimum(sizes, losses)
    got = answer.call("isoflop_optimum", sizes, losses)
    shown = f"{case}, sizes {[f'{n:.3g}' for n in sizes]}, losses {[round(x, 3) for x in losses]}"
    is_pair = isinstance(got, tuple | list) and len(got) == 2
    need(is_pair, f"isoflop_optimum: expected (size, loss), got {got!r}, for {shown}")
    close("size at the minimum", got[0], size, size * 1e-3, shown)
    close("loss at the minimum", got[1], loss, 1e-4, shown)


def check_fit_power_law(answer):
    """fit_power_law: a line in the logs"""
    compare_power_law(answer, [1.0, 10.0], [3.0, 30.0], "optimum = 3 * budget")
    compare_power_law(answer, [1.0, 4.0, 16.0], [5.0, 10.0, 20.0], "optimum = 5 * budget ** 0.5")
    compare_power_law(answer, [1e18, 1e20, 1e21], [8e7, 9e8, 2.6e9], "noisy optima")
    compare_power_law(answer, [1e10, 1e11, 1e12], [2.4, 2.0, 1.7], "losses, which fall")


def compare_power_law(answer, budgets: list, optima: list, case: str) -> None:
    """Compare one power law with scaling_fits.fit_power_law."""
    k, a = scaling_fits.fit_power_law(budgets, optima)
    got = answer.call("fit_power_law", budgets, optima)
    shown = f"{case}, budgets {budgets}, optima {optima}"
    is_pair = isinstance(got, tuple | list) and len(got) == 2
    need(is_pair, f"fit_power_law: expected (k, a), got {got!r}, for {shown}")
    shown += mix_up(got, k, a)
    close("a", got[1], a, 1e-4, shown)
    close("k", got[0], k, k * 1e-3, shown)


def mix_up(got, k: float, a: float) -> str:
    """A hint if the answer's pair is k and a swapped, or has log k for k; else nothing."""
    log_k = math.log(k)
    for pair in ((a, k), (a, log_k), (log_k, a)):
        are_numbers = all(map(is_number, got))
        if are_numbers and np.allclose(np.array(got, dtype=float), pair, rtol=1e-3, atol=1e-6):
            is_log = f"{log_k:.4f} is log {k:.4g}: " if log_k in pair else ""
            return f" ({is_log}are k and a swapped, or is k still a log?)"
    return ""


def check_prediction(answer):
    """PREDICTION: the best size for the held-out budget, and a narrow band around its loss"""
    predicted = numbers(answer.value("PREDICTION"))
    size, loss, band = (predicted[key] for key in KEYS)
    need(band <= WIDEST, f"band: expected at most {WIDEST} nats, got {band:g}, which says little")

    rows, held_out, _ = find_runs()
    found = scaling_fits.minima(rows)
    k, a = scaling_fits.fit_power_law(list(found), [n for n, _ in found.values()])
    supported = k * scaling_runs.HELD_OUT**a
    within = supported / FACTOR <= size <= supported * FACTOR
    need(
        within,
        f"n_params: a power law through the optima of the grid supports about {supported:,.0f} "
        f"parameters, within a factor of {FACTOR}, but PREDICTION has {size:,.0f}",
    )
    run = min(held_out, key=lambda row: abs(math.log(row["n_params"] / size)))
    command = f"python -m lessons.scaling_runs --budget={scaling_runs.HELD_OUT:g} --d_model=..."
    near = max(run["n_params"] / size, size / run["n_params"]) <= NEAREST
    nearest = f"the nearest run on this budget has {run['n_params']:,}"
    need(near, f"no run has about {size:,.0f} parameters, {nearest}: make one with {command}")
    off = loss - run["loss"]
    need(
        abs(off) <= band,
        f"The run: {run['n_params']:,} parameters, {run['loss']:.3f}. Your bet: {loss:g} +- "
        f"{band:g}, {abs(off):.3f} too {'high' if off > 0 else 'low'}: the run lies outside of the "
        "band, and the bet is lost.\nThat is a result, too. Keep the bet as a comment, find out "
        "why it was lost (python -m lessons 8 --answers), then change it: the next is not blind.",
    )


def check_whose_runs(answer):
    """the runs that PREDICTION is compared with: your own"""
    _, _, missing = find_runs()
    if missing:
        name = scaling_runs.GRID.name
        reason = f"there is no {missing} in runs/lessons/{name}"
        raise Skipped(f"compared with the stored runs, lessons/8_grid.jsonl: {reason}")


def numbers(predicted) -> dict:
    """PREDICTION, if it has three positive numbers."""
    is_dict = isinstance(predicted, dict) and set(KEYS) <= predicted.keys()
    need(is_dict, f"PREDICTION: expected a dict with {', '.join(KEYS)}, got {predicted!r}")
    empty = [key for key in KEYS if predicted[key] is None]
    if empty:
        raise ToDo(f"fill in {', '.join(empty)} of PREDICTION")
    for key in KEYS:
        number = predicted[key]
        good = is_number(number) and 0 < number < math.inf
        need(good, f"PREDICTION[{key!r}]: expected a positive number, got {number!r}")
    return predicted


def find_runs() -> tuple[list[dict], list[dict], str]:
    """(the grid, runs on the held-out budget, what the reader's own lack).

    The reader's own if they lack nothing: a whole grid and a run on that budget. Else the stored.
    """
    keys = {cell.key for cell in scaling_runs.grid()}
    own = scaling_runs.own_runs()
    own_grid = [row for row in own if row["key"] in keys]
    own_held_out = [row for row in own if row["budget"] == scaling_runs.HELD_OUT]
    if keys <= {row["key"] for row in own_grid} and own_held_out:
        return own_grid, own_held_out, ""
    stored = scaling_runs.read(scaling_runs.STORED)
    grid = [row for row in stored if row["budget"] < scaling_runs.HELD_OUT]
    held_out = [row for row in stored if row["budget"] == scaling_runs.HELD_OUT]
    missing = "run on 2.7e12 FLOPs" if keys <= {row["key"] for row in own_grid} else "whole grid"
    return grid, held_out, missing
