"""Adapters in one batch: a decode step with many of them, switching, and loading.

    python -m bench adapters                              minutes on two CPU cores, 7 GB of memory
    python -m bench adapters --resident=100 --turns=2 --d_model=512 --n_layers=8

A base of random weights, and a bank (serving/adapters.py) with `resident` adapters of its linear
layers, loaded from files: a few real ones, of which the others are links. A step continues `batch`
texts of 32 tokens. Batches with 0, 1, 8 and 32 different adapters are measured in turns; "of none"
is a step's time over that with 0 adapters, the median of the turns. Beside them stands what the
same texts cost without a bank, where each adapter has its merged model and a batch of its own: as
many steps of one row, computed from the step of one row.

A switch is `bank.use` with other adapters for all rows. Then adapters of 33.6 MB, the size of rank
8 on MPT-7B in bf16, come and go in a bank of their own: the time of a load from the page cache,
alone and while a text is written, and the time of a step meanwhile.
"""

import csv
import datetime
import io
import itertools
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import config
import devices
import processes
from config import LINEAR_LAYERS, MPTConfig, TrainConfig, require
from model import MPT, KVCache, init_weights
from serving.adapters import BASE, AdapterBank, write_random
from serving.decoder import Decoder, pick_dtype
from storage import files

PROMPT_TOKENS = 32
STEPS = 8  # of a turn
DISTINCT = (0, 1, 8, 32)  # adapters in a batch
REAL_FILES = 8  # the other adapters are links to them
COLUMNS = "adapters in the batch|ms a step|least|of none|merged, ms".split("|")


@dataclass
class AdapterArgs:
    """What to measure."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda is ROCm too
    threads: int = 0  # (0: as many as there are cores)
    d_model: int = 768  # width of the base, with heads of 64
    n_layers: int = 3  # blocks of the base
    vocab_size: int = 4096
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of the weights
    rank: int = 4  # of the resident adapters, on all linear layers
    resident: int = 10_000
    batch: int = 32  # rows of a step
    large_rank: int = 228  # of the adapters that come and go: 33.6 MB in fp32 at these sizes
    turns: int = 9
    out: str = ""  # CSV of the steps

    def check(self) -> None:
        """UserError if a setting is out of range."""
        config.check_ranges(self)
        width = self.d_model
        require(width % 64 == 0, f"d_model {width} is not a multiple of 64, the width of a head")
        ranks = {"rank": self.rank, "large_rank": self.large_rank}
        for name, rank in ranks.items():
            require(0 < rank < width, f"{name} must be above 0 and below d_model, {width}")
        sizes = min(self.vocab_size, self.resident, self.batch, self.turns)
        require(sizes > 0, "vocab_size, resident, batch and turns must be at least 1")
        require(self.threads >= 0, "threads: 0 or more")


def base_of(args: AdapterArgs, device, dtype) -> Decoder:
    """A decoder of random weights."""
    cfg = MPTConfig(
        d_model=args.d_model,
        n_heads=args.d_model // 64,
        n_layers=args.n_layers,
        vocab_size=args.vocab_size,
        alibi=True,
        no_bias=True,
    )
    model = MPT(cfg)
    init_weights(model, 0)
    return Decoder(model.to(device), args.vocab_size, dtype)


def write_files(folder: Path, cfg: MPTConfig, rank: int, n: int) -> list[str]:
    """The paths of n adapters in a folder; only the first few are not links."""
    settings = TrainConfig(init_from="any", lora_rank=rank)
    folder.mkdir()
    for number in range(n):
        path = folder / str(number)
        if number < REAL_FILES:
            write_random(path, cfg, settings, seed=number)
        else:
            path.symlink_to(folder / str(number % REAL_FILES))
    return [str(folder / str(number)) for number in range(n)]


def load_all(bank: AdapterBank, paths: list[str]) -> float:
    """Load adapters one after another. Returns the seconds."""
    begin = time.perf_counter()
    for path in paths:
        with bank.in_use([path]):
            pass
    return time.perf_counter() - begin


class Steps:
    """Decode steps of a batch, always from the same state of the cache."""

    def __init__(self, decoder: Decoder, batch: int):
        self.decoder = decoder
        generator = torch.Generator().manual_seed(0)
        vocab_size = decoder.cfg.vocab_size
        prompts = torch.randint(vocab_size, (batch, PROMPT_TOKENS), generator=generator)
        room = PROMPT_TOKENS + STEPS
        kind = (decoder.device, decoder.cache_dtype)
        self.cache = KVCache.empty(decoder.cfg, batch, room, *kind)
        self.ids = decoder(prompts.to(decoder.device), self.cache).argmax(-1)[:, None]

    def milliseconds(self, n: int = STEPS) -> float:
        """How long a step takes, mean of n."""
        self.cache.length = PROMPT_TOKENS
        begin = time.perf_counter()
        for _ in range(n):
            logits = self.decoder(self.ids, self.cache)
        logits.cpu()  # waits for the device
        return 1e3 * (time.perf_counter() - begin) / n


def measure_steps(decoder: Decoder, paths: list[str], args: AdapterArgs) -> list[list[str]]:
    """The lines of the table, one for each of DISTINCT."""
    bank = decoder.bank
    alone = Steps(decoder, 1)
    steps = Steps(decoder, args.batch)
    counts = [n for n in DISTINCT if n <= min(args.batch, len(paths))]
    spread = paths[:: max(1, len(paths) // args.batch)]  # over all slots
    ms = {n: [] for n in ["alone", *counts]}
    for turn in range(args.turns + 1):
        bank.use([BASE])
        taken = {"alone": alone.milliseconds()}
        for n in counts:
            adapters = [spread[row % n] if n else BASE for row in range(args.batch)]
            with bank.in_use(adapters):
                bank.use(adapters)
                taken[n] = steps.milliseconds()
        for n in ms if turn else ():  # the first turn warms up
            ms[n].append(taken[n])
    rows = []
    for n in counts:
        ratio = statistics.median(a / b for a, b in zip(ms[n], ms[0], strict=True))
        merged = max(n, 1) * statistics.median(ms["alone"]) if n > 1 else None
        cells = [f"{statistics.median(ms[n]):.2f}", f"{min(ms[n]):.2f}", f"{ratio:.2f}"]
        rows.append([str(n), *cells, f"{merged:.1f}" if merged else ""])
    return rows


def measure_switch(bank: AdapterBank, paths: list[str], batch: int) -> float:
    """Milliseconds in which all rows of a batch get other adapters."""
    first = list(itertools.islice(itertools.cycle(paths), batch))
    choices = [first, [*first[1:], first[0]]]
    taken = []
    with bank.in_use(first):
        for turn in range(1000):
            begin = time.perf_counter()
            bank.use(choices[turn % 2])
            taken.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(taken)


def as_csv(rows: list[list[str]]) -> bytes:
    """The table of the steps as a CSV."""
    text = io.StringIO()
    csv.writer(text).writerows([COLUMNS, *rows])
    return text.getvalue().encode()


def measure_loading(decoder: Decoder, paths: list[str], turns: int) -> dict[str, float]:
    """Milliseconds of a load alone, of a load beside steps of one row, and of these steps.

    The bank has fewer slots than there are paths, so each load is one.
    """
    bank = decoder.bank
    steps = Steps(decoder, 1)
    visitors = itertools.cycle(paths)
    load_all(bank, paths)  # into the page cache
    taken = {"load": [], "step": [], "load beside": [], "step beside": []}
    for _ in range(turns):
        taken["load"].append(1e3 * load_all(bank, [next(visitors)]))
        taken["step"].append(steps.milliseconds())
        visitor = next(visitors)
        bank.acquire(visitor)
        begin = time.perf_counter()
        while not bank.is_loaded(visitor):
            taken["step beside"].append(steps.milliseconds(1))
        taken["load beside"].append(1e3 * (time.perf_counter() - begin))
        bank.release(visitor)
    return {name: statistics.median(values) for name, values in taken.items() if values}


def report_steps(args: AdapterArgs, folder: Path, device, dtype) -> None:
    """Print what the resident adapters take, a switch, and the table of steps."""
    decoder = base_of(args, device, dtype)
    paths = write_files(folder / "small", decoder.cfg, args.rank, args.resident)
    bank = AdapterBank(decoder, args.resident, args.rank, LINEAR_LAYERS)
    weights = sum(p.numel() for p in MPT(decoder.cfg).parameters()) * decoder.dtype.itemsize
    slot, slots = f"{bank.slots[0].nbytes / 1e6:.2f} MB", f"{bank.slots.nbytes / 1e9:.2f} GB"
    print(
        f"base of {args.n_layers} layers x {args.d_model}, {weights / 1e6:.0f} MB; "
        f"{args.resident:,} adapters of rank {args.rank}, {slot} each: {slots}"
    )
    seconds = load_all(bank, paths)
    print(f"loaded in {seconds:.1f} s, {1e3 * seconds / len(paths):.2f} ms each")
    switch = measure_switch(bank, paths, args.batch)

    rows = measure_steps(decoder, paths, args)
    step = float(rows[0][1])
    print(
        f"a switch of all {args.batch} rows: {1e3 * switch:.1f} us, {switch / step:.3%} of a step\n"
    )
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")
    if args.out:
        files.write_atomically(Path(args.out), as_csv(rows))


def report_loading(args: AdapterArgs, folder: Path, device, dtype) -> None:
    """Print what loading a large adapter takes, and what it does to the steps meanwhile."""
    decoder = base_of(args, device, dtype)
    paths = write_files(folder / "large", decoder.cfg, args.large_rank, 4)
    bank = AdapterBank(decoder, 2, args.large_rank, LINEAR_LAYERS)
    size = (Path(paths[0]) / "adapter_model.safetensors").stat().st_size
    taken = measure_loading(decoder, paths, args.turns)
    print(
        f"\nan adapter of rank {args.large_rank}: {size / 1e6:.1f} MB in its file, "
        f"{bank.slots[0].nbytes / 1e6:.1f} MB in its slot"
    )
    for name, ms in taken.items():
        print(f"{name:12} {ms:8.2f} ms")


@torch.inference_mode()
def main(argv: list[str]) -> None:
    """Print the times of a switch, of steps with many adapters, and of a load."""
    (args,) = config.load(argv, AdapterArgs)
    threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    device = processes.pick_device(args.device, 0, 1, 1)
    dtype = pick_dtype(args.precision, device)

    machine = f"{devices.describe(device)}, {platform.machine()}, {threads} threads"
    kind = str(dtype).removeprefix("torch.")
    print(f"{datetime.date.today()}, {machine}, torch {torch.__version__}, {kind}")
    with tempfile.TemporaryDirectory() as folder:
        report_steps(args, Path(folder), device, dtype)
        report_loading(args, Path(folder), device, dtype)


if __name__ == "__main__":
    config.run(main)
