"""Measured throughput. Each benchmark is a file of its own; this is the door to all of them.

    python -m bench train --transformers       bench/train.py: training steps, over any settings
    python -m bench attention                  bench/attention.py: our attention beside PyTorch's kernels
    python -m bench machine                    bench/machine.py: matmul, memory and links of this machine
    python -m bench scaling results.csv        bench/compare.py: what rows of `train` say of more and more nodes
    python -m bench compare a.csv b.csv        bench/compare.py: which of two machines is faster, and cheaper
    python -m bench flops configs/mpt1b.py     bench/flops.py: closed forms beside torch's count

Results that are kept stand in bench/results/, with device, versions, date and command. What concerns one file alone is
measured by that file: `python data.py` (reading), `python checkpoint.py` (saving), `python generate.py` (decoding).
"""

import config
import processes
from bench.attention import bench_attention
from bench.compare import compare, scaling
from bench.flops import main as flops
from bench.machine import bench_machine
from bench.train import bench_train
from config import require


def main(argv) -> None:
    benches = {
        "train": bench_train,
        "attention": bench_attention,
        "machine": bench_machine,
        "scaling": scaling,
        "compare": compare,
        "flops": flops,
    }
    if config.wants_help(argv[:1]):
        config.show_help()
    require(argv and argv[0] in benches, f"usage: python -m bench {'|'.join(benches)} [config] [--key=value]")
    benches[argv[0]](argv[1:])


if __name__ == "__main__":
    processes.run(main)
