"""Loading Hugging Face files, beside reading them: a random MPT of 1 GB, written by weights/hf.py.

    python -m bench load [FOLDER]    takes a minute, and 1 GB in the folder (default: temporary)

The file is read into memory that is allocated already, and loaded into a model that exists already.
Both take turns: first with the file in the system's page cache, then without, if this process may
empty the cache (root on Linux). bench/results/cpu.md has figures.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import config
from config import MPTConfig
from model import MPT
from weights import hf
from weights.tensor_files import write_folder

CFG = MPTConfig(
    d_model=1024,
    n_heads=16,
    n_layers=16,
    vocab_size=50368,
    max_seq_len=2048,
    alibi=True,
    no_bias=True,
)
TURNS = 5
PAGE_CACHE = Path("/proc/sys/vm/drop_caches")


def seconds(read, cold: bool) -> float:
    """How long one call of `read` takes. cold: the page cache is emptied first."""
    if cold:
        os.sync()
        PAGE_CACHE.write_text("3")
    begin = time.perf_counter()
    read()
    return time.perf_counter() - begin


def read_into(path: Path, buffer) -> None:
    """Read a whole file into memory that is allocated already."""
    with open(path, "rb") as file:
        assert file.readinto(buffer) == len(buffer)


def compare(ways: dict, cold: bool, gigabytes: float) -> str:
    """Time both ways of reading in turns; a line with their speeds and the ratio of their times."""
    times = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, read in ways.items():
            duration = seconds(read, cold)
            if turn > 0:  # the first turn warms up
                times[name].append(duration)

    reading, loading = times.values()
    ratio = statistics.median(b / a for a, b in zip(reading, loading, strict=True))
    speeds = [f"{name} {gigabytes / statistics.median(t):.2f} GB/s" for name, t in times.items()]
    place = "from the disk" if cold else "in the page cache"
    return f"{gigabytes:.2f} GB, {place}: {', '.join(speeds)}, ratio {ratio:.2f}"


def main(argv: list[str]) -> None:
    """Print the times of loading and of plain reading, and their ratio."""
    (parent,) = config.arguments(argv, "[FOLDER]") or [None]
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        model = MPT(CFG)
        state = dict(model.state_dict())
        write_folder(folder, state, 5 * 10**9, lambda names: {name: state[name] for name in names})
        (path,) = folder.glob("*.safetensors")
        size = path.stat().st_size
        pages = torch.ones(size, dtype=torch.uint8)  # written, so that the memory really exists
        buffer = memoryview(pages.numpy())
        ways = {
            "reading": lambda: read_into(path, buffer),
            "loading": lambda: hf.load_into(model, folder),
        }
        print(compare(ways, False, size / 1e9))
        if os.access(PAGE_CACHE, os.W_OK):
            print(compare(ways, True, size / 1e9))


if __name__ == "__main__":
    config.run(main)
