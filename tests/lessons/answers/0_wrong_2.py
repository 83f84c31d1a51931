"""Swaps the losses of two runs.

Refused by check_losses.
"""

DIVERGES = 2e-1
FINAL_LOSSES = {2e-3: 33.6, 2e-2: 6.61, 2e-1: 6.36}


def losses(path):
    import json

    rows = map(json.loads, open(path).readlines())
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]
