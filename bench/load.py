"""Loading Hugging Face files, beside reading them: a random MPT of 1 GB, written by weights/hf.py.

    python -m bench load [FOLDER]    a minute; 1 GB in the folder (where temporary files are)

The file is read into memory that is there, and loaded into a model that is there; they take turns,
once with the file in the system's page cache and, where this process may empty that (root on
Linux), once without. Read next: bench/results/cpu.md, where these figures are.
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
CACHE = Path("/proc/sys/vm/drop_caches")


def seconds(read, cold: bool) -> float:
    """How long one read takes; cold: the page cache is emptied first."""
    if cold:
        os.sync()
        CACHE.write_text("3")
    begin = time.perf_counter()
    read()
    return time.perf_counter() - begin


def read_into(path: Path, buffer) -> None:
    """Read a file into memory that is there already."""
    with open(path, "rb") as file:
        assert file.readinto(buffer) == len(buffer)


def main(argv: list[str]) -> None:
    """Print the times of loading and of plain reading, and their ratio."""
    (where,) = config.arguments(argv, "[FOLDER]") or [None]
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder, model = Path(name), MPT(CFG)
        state = dict(model.state_dict())
        write_folder(folder, state, 5 * 10**9, lambda names: {name: state[name] for name in names})
        (path,) = folder.glob("*.safetensors")
        size = path.stat().st_size / 1e9
        buffer = memoryview(
            torch.ones(path.stat().st_size, dtype=torch.uint8).numpy()
        )  # its pages are there
        ways = {
            "reading": lambda: read_into(path, buffer),
            "loading": lambda: hf.load_into(model, folder),
        }
        for cold in (False, True) if os.access(CACHE, os.W_OK) else (False,):
            times = {way: [] for way in ways}
            for _ in range(TURNS + 1):
                for way, read in ways.items():
                    times[way].append(seconds(read, cold))
            ratio = statistics.median(b / a for a, b in list(zip(*times.values(), strict=True))[1:])
            speeds = ", ".join(
                f"{way} {size / statistics.median(t[1:]):.2f} GB/s" for way, t in times.items()
            )
            print(
                f"{size:.2f} GB, {'from the disk' if cold else 'in the page cache'}: {speeds}, ratio {ratio:.2f}"
            )


if __name__ == "__main__":
    config.run(main)
