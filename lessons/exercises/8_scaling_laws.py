"""Exercise 8: the minimum of an IsoFLOP curve, a power law, and a prediction for a larger budget.

Write the two functions. Then use them on the grid that the lesson has trained to predict what the
best model on 2.7e12 FLOPs is, three times the grid's largest budget, and what loss it reaches:
fill in PREDICTION. Write your bet down before you check: the message names the run on 2.7e12 FLOPs
that `python -m lessons check 8` compares it with.

The lines of your grid are in runs/lessons/8-grid.jsonl: JSON with "budget", "n_params", "tokens",
"loss" (nats per byte) and more. Without one of your own, read lessons/8_grid.jsonl, but leave out
its lines with "budget": 2.7e12, since those are what is to be predicted.

Once PREDICTION is written, make the run yourself. The choice of d_model is yours too: 48 is 96
thousand parameters, 64 is 164, 80 is 252, 112 is 632 thousand. It takes some minutes:

    python -m lessons.scaling_runs --budget=2.7e12 --d_model=WIDTH

Your run counts only beside your own whole grid (python -m lessons.scaling_runs); after --short skip
it, the stored runs are used. Use NumPy as you like, and none of the project's own modules.
"""


def isoflop_optimum(sizes, losses):
    """(size, loss) at the minimum of one IsoFLOP curve, two floats.

    sizes, losses: lists of three or more numbers, one entry a run; the sizes are parameters, in
    any order. Fit a parabola in the logarithm of the size to the losses, by least squares, and
    return its lowest point. If the parabola has no lowest point, since it opens downwards, return
    None.
    """
    raise NotImplementedError


def fit_power_law(budgets, optima):
    """(k, a), two floats, of the power law  optimum = k * budget ** a.

    budgets, optima: lists of two or more positive numbers. The law minimizes the squares of the
    differences between the logarithms of k * budget ** a and of the optima.
    """
    raise NotImplementedError


# For 2.7e12 FLOPs: the size of the best model; its loss on the held-out files, in nats per byte;
# and how far off the loss may be, up or down. Several ways to extrapolate disagree by more than the
# noise of a seed: take the whole spread between them, at most 0.1 nats. They share the same runs
# and err together, so the truth may well lie outside of all of them.
PREDICTION = {"n_params": None, "loss": None, "band": None}
