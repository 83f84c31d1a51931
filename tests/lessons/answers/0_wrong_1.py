"""Predicts that ten times the usual rate diverges.

Refused by check_prediction.
"""

DIVERGES = 2e-2
FINAL_LOSSES = {2e-3: 6.3, 2e-2: 6.6, 2e-1: 25.0}


def losses(path):
    import json

    rows = map(json.loads, open(path).readlines())
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]
