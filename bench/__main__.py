"""Runs a benchmark by its name: `python -m bench NAME`. `python -m bench --help` lists the names.

    python -m bench train configs/mpt1b.py          bench/train.py
    torchrun --nproc_per_node 4 -m bench machine    bench/machine.py, on four devices
    python -m bench NAME --help                     what a benchmark does, and its settings

Only the named benchmark is imported. bench/results/ keeps results, with device, versions, date and
command. `python data.py` and `python generate.py` print the speed of reading and of decoding.
"""

import program

if __name__ == "__main__":  # before PyTorch is imported, as fsdp_train.py does
    program.sleep_while_waiting()

import difflib
import importlib
import sys
from pathlib import Path

from program import require

# In reading order. A benchmark is bench/NAME.py with a function main(argv).
NAMES = "train compare machine attention serve beside".split()
# These are started and ended by processes.run, all others by program.run.
OF_MANY_RANKS = ("train", "machine", "attention")
# Names of earlier versions, and what one types now.
MOVED = {
    "first_night": "bash slurm/first_night.sh",
    "generate": "python -m bench serve --shapes=512x8,768x12",
}


def main(argv: list[str]) -> None:
    """Run the benchmark that argv names. UserError, with the nearest name, if there is none."""
    if program.wants_help(argv[:1]):
        program.show_help(listing())
    list_hint = "python -m bench --help lists the names"
    require(argv, f"usage: python -m bench NAME [config] [--key=value] ({list_hint})")
    name, *arguments = argv
    require(name not in MOVED, f"{name} has moved: {MOVED.get(name)}")
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean {near[0]}?" if near else list_hint
    require(name in NAMES, f"no benchmark {program.quote(name)}, {hint}")

    benchmark = importlib.import_module(f"bench.{name}")
    # --help and usage lines come from the docstring and the name of the main module.
    sys.modules["__main__"] = benchmark
    benchmark.main(arguments)


def listing() -> str:
    """The names, each with the first line of its file's docstring."""
    lines = ["benchmarks:"]
    for name in NAMES:
        with open(Path(__file__).with_name(f"{name}.py"), encoding="utf-8") as file:
            first_line = file.readline().strip('"\n')
        lines.append(f"  {name:<13} {first_line}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in OF_MANY_RANKS:
        import processes  # and torch with it

        processes.run(main)
    else:
        program.run(main)
