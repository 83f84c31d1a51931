"""Measured throughput. Each benchmark is a file of its own; this is the door to all of them.

    python bench.py train --transformers       bench_train.py: training steps, over any settings
    python bench.py attention                  bench_attention.py: our attention beside PyTorch's kernels
    python bench.py machine                    bench_machine.py: matmul, memory and links of this machine
    python bench.py scaling results.csv        bench_compare.py: what rows of `train` say of more and more nodes
    python bench.py compare a.csv b.csv        bench_compare.py: which of two machines is faster, and cheaper

Results that are kept stand in benchmarks/, with device, versions, date and command. What concerns one file alone is
measured by that file: `python data.py` (reading), `python checkpoint.py` (saving), `python generate.py` (decoding).
"""

import config
import parallel
from bench_attention import bench_attention
from bench_compare import compare, scaling
from bench_machine import bench_machine
from bench_train import bench_train
from config import require


def main(argv) -> None:
    benches = {
        "train": bench_train,
        "attention": bench_attention,
        "machine": bench_machine,
        "scaling": scaling,
        "compare": compare,
    }
    if config.wants_help(argv[:1]):
        config.show_help()
    require(argv and argv[0] in benches, f"usage: python bench.py {'|'.join(benches)} [config] [--key=value]")
    benches[argv[0]](argv[1:])


if __name__ == "__main__":
    parallel.run(main)
