"""Exercise of lesson 0: three learning rates.

Part 1. Before you run anything: one of these three learning rates diverges, that is, its loss ends
        above where it began. Write it down.
Part 2. Run all three. Write down the validation loss at which each ends, from its last lines or
        from metrics.jsonl. On two CPU cores that nothing else uses, a run takes half a minute.

    alias short="python fsdp_train.py configs/demo.py --max_steps=60 --warmup_steps=10"
    short --lr=2e-3 --run_dir=runs/lessons/0-low
    short --lr=2e-2 --run_dir=runs/lessons/0-middle
    short --lr=2e-1 --run_dir=runs/lessons/0-high

Part 3. Write `losses`.

Check with `python -m lessons check 0`.
"""

import json

# --- in the stub: DIVERGES = None  # 2e-3, 2e-2 or 2e-1: predict first
# Adam moves each weight by about lr in a step, whatever the gradient's size. Weights of the demo
# begin at about 0.08: a step of 0.2 throws all of them away, again and again.
DIVERGES = 2e-1
# ---
# --- in the stub: FINAL_LOSSES = {2e-3: None, 2e-2: None, 2e-1: None}  # validation, nats per token
# Of runs on two CPU cores; yours differ a little.
FINAL_LOSSES = {2e-3: 6.36, 2e-2: 6.61, 2e-1: 33.6}
# ---


def losses(path: str) -> list[tuple[int, float]]:
    """The training losses of a run.

    path: of a metrics.jsonl. Each of its lines is a row as JSON. Only the rows of training steps
    have a key "loss"; others hold a validation, for instance.

    Returns [(step, loss), ...] in the order of the file.
    """
    # --- in the stub: raise NotImplementedError
    found = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            if "loss" in row:
                found.append((row["step"], row["loss"]))
    return found
    # ---
