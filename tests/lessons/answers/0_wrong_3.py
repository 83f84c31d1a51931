"""Counts the rows instead of reading their steps.

Refused by check_losses_of_a_file.
"""

import json

DIVERGES = 2e-1
FINAL_LOSSES = {2e-3: 6.3, 2e-2: 6.6, 2e-1: 25.0}


def losses(path):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    return [(i, row["loss"]) for i, row in enumerate(rows) if "loss" in row]
