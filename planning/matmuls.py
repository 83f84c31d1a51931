"""The FLOPs of training on one token, matmul by matmul: which part of the model, in which pass.

    y = x W            forward, 2 FLOPs per weight and token    a weight of d x 4d: 8 d^2
    dx = dy W^T        gradient of the input, as many           unless nothing below it trains
    dW = x^T dy        gradient of the weight, as many          unless the weight is frozen

Attention has two matmuls without a weight, q k^T and p v, of 2 d FLOPs for each query and key. The
backward has two for each of them. So training costs as much as three forwards; if the weights are
frozen, the linear layers cost two forwards, attention still three. Low-rank adapters (lora.py),
A (r x in) and B (out x r) beside a frozen weight, cost three forwards of their own; a block below
the first adapter costs its forward alone.

The matmuls are all that is counted: exactly what torch's FlopCounterMode counts
(tests/planning/test_matmuls.py), with the whole square of scores.

Run `python -m planning.matmuls configs/mpt7b.py --lora_rank=16`.
"""

import config
import flops
import program
from config import MPTConfig, TrainConfig
from flops import PASSES, flops_by_pass, total


def table(by_pass: dict[str, dict[str, int]]) -> str:
    """MFLOP per token by part and pass, as text."""
    sums = {name: sum(passes[name] for passes in by_pass.values()) for name in PASSES}
    rows = []
    for part, passes in [*by_pass.items(), ("all", sums)]:
        n = sum(passes.values())
        cells = [f"{passes[name] / 1e6:,.1f}" for name in PASSES]
        rows.append([part, *cells, f"{n / 1e6:,.1f}", f"{n / total(by_pass):.2%}"])
    return program.table(["MFLOP a token", *PASSES, "all", "share"], rows)


def main(argv: list[str]) -> None:
    """Print the table for the config files and flags in argv."""
    print(table(flops_by_pass(*config.load(flops.with_base(argv), MPTConfig, TrainConfig))))


if __name__ == "__main__":
    program.run(main)
