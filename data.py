"""Text -> token shards on disk -> batches that depend on nothing but (seed, step).

Preparing. Documents are read in order, cut into chunks, and each chunk is encoded into one file of raw tokens behind
a JSON header. Every `1 / val_fraction`-th document goes to validation, whole. A file is written under another name
and renamed, so what is there is complete; a chunk that is already there is skipped, so an interrupted preparation
goes on. The documents come from text/corpus.py.

    data/stdlib-bpe-4096/   dataset.json  tokenizer.json  train-00000.bin ...  val-00000.bin ...

Batches. Sample number g = step * global_batch_size + j is window perm(seed, epoch, g mod n) of epoch g div n, where
perm is a seeded permutation of the n windows, computed, never stored. A rank takes its slice of j. So any number of
ranks and microbatches sees the same samples in the same order, each once an epoch, and to resume is to know the step.

Run `python data.py --dataset='my/*.txt' --tokenizer=bpe-4096`, or with a config file. Read next: optim.py.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import config
import program
from config import TrainConfig, UserError, require
from storage import files
from text import corpus
from text import tokenizer as tokenizers
from text.shards import (
    Shard,
    cut,
    fingerprint,
    raise_file_limit,
    read_summary,
    shard_files,
    write_ids,
)

BPE_BYTES = 16 * 2**20  # of text from which a BPE is trained
HASH_BYTES = (
    2**30
)  # data sets up to this size are hashed at every start; larger ones have their sizes checked
SMALL_TOKENS, SMALL_BYTES = 100_000_000, 2**29  # what fsdp_train.py prepares by itself
TICK = 2.0  # seconds after which the bar is drawn again

# ---------------------------------------------------------------------------------------------------------------
# Preparing: documents -> shards


def data_dir(cfg: TrainConfig) -> Path:
    """Where the shards are: `--data_dir`, or a name made of data set and tokenizer."""
    names = (
        re.sub(r"[^A-Za-z0-9.]+", "-", x).strip("-.")
        for x in (cfg.dataset, tokenizers.canonical(cfg.tokenizer))
    )
    return Path(cfg.data_dir or f"data/{'-'.join(names)}")


def prepare(cfg: TrainConfig, workers: int = 1) -> Path:
    """Make the token shards of `cfg.dataset` unless they are complete; returns their folder."""
    folder = data_dir(cfg)
    done = read_summary(folder)
    if done:
        check_made_for(cfg, done, folder)
        now = corpus.source_state(cfg.dataset), fingerprint(folder)
        if enough(done, cfg.max_tokens) and now == (done["source"], done["fingerprint"]):
            return folder
        (
            folder / "dataset.json"
        ).unlink()  # more tokens are wanted, the text has changed, a shard is missing: go on
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(cfg, folder)
    stride = max(2, round(1 / cfg.val_fraction))
    with progress(cfg.max_tokens) as bar:
        read = counted(corpus.chunks(cfg.dataset), bar)
        jobs = ((folder, i, first, docs, stride, tokenizer.name) for i, first, docs in read)
        if workers > 1:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(workers, context, initializer=program.end_with_parent) as pool:
                results = bounded_map(pool, encode_chunk, jobs, 2 * workers)
                kept, tokens = collect(results, cfg.max_tokens, bar)
        else:
            kept, tokens = collect(map(encode_chunk, jobs), cfg.max_tokens, bar)
    for path in shard_files(folder):
        if int(path.stem.split("-")[1]) >= kept:  # encoded ahead, beyond max_tokens
            path.unlink()
    require(kept > 0, f"dataset={cfg.dataset!r} is empty: no document has any text")
    require(
        tokens > 0,
        f"dataset={cfg.dataset!r} has one document only, which validation takes: split it into several",
    )
    summary = {
        "dataset": cfg.dataset,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "source": corpus.source_state(cfg.dataset),
        "max_tokens": cfg.max_tokens,
        "val_fraction": cfg.val_fraction,
        "train_tokens": tokens,
        "fingerprint": fingerprint(folder),
    }
    files.write_atomically(folder / "dataset.json", json.dumps(summary, indent=2).encode())
    return folder


def enough(done: dict, max_tokens: int) -> bool:
    """Does a finished preparation hold what is asked for? (0 means all there is.)"""
    everything = done["max_tokens"] == 0 or done["train_tokens"] < done["max_tokens"]
    return everything or (0 < max_tokens <= done["max_tokens"])


def check_made_for(cfg: TrainConfig, done: dict, folder: Path) -> None:
    """UserError if the folder holds another data set, another tokenizer's ids or another share for validation."""
    wanted = {"dataset": cfg.dataset, "tokenizer": tokenizers.canonical(cfg.tokenizer)}
    for key, value in (wanted | {"val_fraction": cfg.val_fraction}).items():
        made = f"{folder} was made with --{key}={done[key]}, not {value}"
        require(done[key] == value, f"{made}: set that, or another --data_dir")


def make_tokenizer(cfg: TrainConfig, folder: Path):
    """Load the tokenizer; a BPE is trained on the first documents, once."""
    path = folder / "tokenizer.json"
    name = tokenizers.canonical(cfg.tokenizer)
    if name.endswith(".json") and not path.exists():
        tokenizers.load(name)  # is it one?
        shutil.copy(name, path)  # data and runs do not depend on the place of somebody else's file
    if not name.startswith("bpe") or path.exists():
        return tokenizers.load(name, path)
    print(f"training a tokenizer ({name}) on {cfg.dataset} ...", file=sys.stderr, flush=True)
    texts, size = [], 0
    for text in corpus.documents(cfg.dataset):
        texts.append(text[:BPE_BYTES])
        size += len(text)
        if size > BPE_BYTES:
            break
    tokenizer = tokenizers.train_bpe(texts, int(name.split("-")[1]))
    tokenizer.save(path)
    return tokenizers.load(name, path)


def bounded_map(pool, function, items, depth):
    """Results in order, with at most `depth` items in flight: a stream from the Hub must not pile up in memory."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextlib.contextmanager
def progress(max_tokens: int):
    """A bar that counts tokens. Its clock goes on while a chunk is encoded: one document may take minutes."""
    ended = threading.Event()
    with tqdm(
        desc="tokens", unit=" tokens", unit_scale=True, total=max_tokens or None, mininterval=1
    ) as bar:

        def tick():
            while not ended.wait(TICK):
                bar.refresh()

        clock = threading.Thread(target=tick, daemon=True)
        clock.start()
        try:
            yield bar
        finally:
            ended.set()
            clock.join()


def counted(chunks, bar):
    """The same chunks; the bar says how much text they hold."""
    read = 0
    for number, first, docs in chunks:
        read += sum(map(len, docs))
        bar.set_postfix_str(f"{read / 1e6:,.1f} M characters read")
        yield number, first, docs


def collect(results, max_tokens: int, bar) -> tuple[int, int]:
    """Count tokens as chunks finish, stop at max_tokens and cut the last chunk there. Returns (chunks, tokens)."""
    kept = total = 0
    for path, tokens in results:
        kept += 1
        total += tokens
        bar.update(tokens)
        if max_tokens and total >= max_tokens:
            if total > max_tokens:
                cut(path, tokens - (total - max_tokens))
            return kept, max_tokens
    return kept, total


def encode_chunk(job) -> tuple[Path, int]:
    """Encode one chunk into train-N.bin and val-N.bin, unless they are there. Returns train's path and tokens.

    Runs in a worker process, which loads the tokenizer anew: encodings do not pickle.
    """
    folder, number, first, docs, stride, name = job
    tokenizer = tokenizers.load(name, folder / "tokenizer.json")
    for split in ("train", "val"):
        mine = [d for i, d in enumerate(docs, first) if (i % stride == 0) == (split == "val")]
        path = folder / f"{split}-{number:05d}.bin"
        text_hash = hashlib.sha256(json.dumps([tokenizer.fingerprint, mine]).encode()).hexdigest()
        if not (mine and is_finished(path, text_hash)):
            write_shard(path, mine, tokenizer, text_hash)
    path = folder / f"train-{number:05d}.bin"
    return path, Shard(path).header["tokens"]


def is_finished(path: Path, text_hash: str) -> bool:
    """Is this shard there, whole, and made from this text by this tokenizer?"""
    try:
        shard = Shard(path)
        shard.check_hash()
    except (UserError, OSError):
        return False
    return shard.header["text_sha256"] == text_hash


def write_shard(path: Path, docs: list[str], tokenizer, text_hash: str) -> None:
    """Each document's ids, then end-of-text, as uint16 (uint32 for vocabularies above 65,536)."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    parts = [np.append(tokenizer.encode(d), tokenizer.eot).astype(dtype) for d in docs]
    ids = np.concatenate(parts) if parts else np.empty(0, dtype)
    header = {
        "documents": len(docs),
        "text_bytes": sum(len(d.encode("utf-8", "replace")) for d in docs),
        "vocab_size": tokenizer.vocab_size,
        "text_sha256": text_hash,
    }
    write_ids(path, ids, header)


# ---------------------------------------------------------------------------------------------------------------
# Reading: shards -> batches


class Split:
    """One split (train or val) as n windows of seq_len + 1 tokens, each beginning where the last input ended."""

    def __init__(self, folder: Path, split: str, seq_len: int):
        raise_file_limit()
        self.seq_len, self.folder = seq_len, folder
        self.shards = [Shard(path) for path in shard_files(folder, split)]
        require(
            self.shards,
            f"no {split} shards in {folder} on {platform.node()}: every node must see this folder",
        )
        self.tokens = sum(s.header["tokens"] for s in self.shards)
        self.text_bytes = sum(s.header["text_bytes"] for s in self.shards)
        self.vocab_size = self.shards[0].header["vocab_size"]
        windows = [max(0, s.header["tokens"] - 1) // seq_len for s in self.shards]
        self.first = np.cumsum([0, *windows])  # number of each shard's first window
        what = "lower --max_seq_len"
        if split == "val":
            what += ", or raise --val_fraction and set another --data_dir"
        require(
            len(self) > 0,
            f"max_seq_len {seq_len} is longer than the {split} data in {folder} ({self.tokens:,} tokens): {what}",
        )

    def __len__(self) -> int:
        return int(self.first[-1])

    def windows(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of the windows with these numbers, (len(numbers), seq_len + 1) int64."""
        out = np.empty((len(numbers), self.seq_len + 1), np.int64)
        shards = np.searchsorted(self.first, numbers, side="right") - 1
        for row, shard, number in zip(out, shards, numbers, strict=True):
            begin = (number - self.first[shard]) * self.seq_len
            row[:] = self.shards[shard].ids[begin : begin + self.seq_len + 1]
        require(
            not len(out) or out.max() < self.vocab_size,
            f"{self.folder} holds ids beyond its vocabulary: it is damaged, delete it and run data.py again",
        )
        return out

    def batch(
        self, seed: int, step: int, global_batch_size: int, rank: int = 0, ranks: int = 1
    ) -> np.ndarray:
        """The rows of one rank at one step, (global_batch_size / ranks, seq_len + 1) int64."""
        rows = global_batch_size // ranks
        samples = step * global_batch_size + rank * rows + np.arange(rows)
        epochs, places = np.divmod(samples, len(self))
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs):
            numbers[epochs == epoch] = permute(places[epochs == epoch], len(self), seed, int(epoch))
        return self.windows(numbers)


class Dataset:
    """A prepared data set as a run uses it: both splits, cut into windows of max_seq_len tokens."""

    def __init__(self, folder: Path, model_cfg: config.MPTConfig):
        """UserError if the folder holds larger ids than the model's vocabulary, or too few."""
        self.folder = folder
        self.train = Split(folder, "train", model_cfg.max_seq_len)
        self.val = Split(folder, "val", model_cfg.max_seq_len)
        self.fingerprint = read_summary(folder)["fingerprint"]
        self.tokenizer_file = folder / "tokenizer.json"  # not there for bytes and GPT-2's
        n_ids = self.train.vocab_size
        problem = f"vocab_size {model_cfg.vocab_size} is less than the {n_ids} ids of {folder}"
        require(n_ids <= model_cfg.vocab_size, f"{problem}: raise it")

    def batches(self, steps, cfg: TrainConfig, world):
        """Yield (step, rows), rows (B, T + 1) on this rank's device, for each of the `steps`.

        The rows depend on (seed, step) alone, and B = global_batch_size / data-parallel ranks. A
        thread reads the next ones while this rank trains.
        """

        def read(step: int) -> np.ndarray:
            return self.train.batch(
                cfg.seed, step, cfg.global_batch_size, world.dp_rank, world.dp_size
            )

        return prefetch(read, steps, world.device)


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a random permutation of 0..n-1 sends `places`. Integers only: the same on every machine.

    A Feistel network of 6 rounds (Luby and Rackoff, 1988) permutes 0..4^k-1, the smallest such range that holds n;
    what lands outside 0..n-1 is sent on until it lands inside (cycle walking: Black and Rogaway, 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # k
    mask = (np.uint64(1) << half) - np.uint64(1)
    digest = (
        hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
        + hashlib.sha256(f"{epoch}:{seed}".encode()).digest()
    )
    keys = np.frombuffer(digest, "<u8")[:6]

    def network(x):
        left, right = x >> half, x & mask
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
        return (left << half) | right

    out = network(places.astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """A good hash of 64-bit integers (the finalizer of SplitMix64: Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def batch_hash(rows, rank: int):
    """A 64-bit number for the ids in `rows` (B, T + 1), the rows rank * B to rank * B + B - 1 of a batch, int64 scalar.

    Added up over the ranks (mod 2^64) it is the whole batch's, however that was cut: any other id or order changes it.
    """
    import torch

    places = torch.arange(rows.numel(), device=rows.device).view_as(rows) + rank * rows.numel()
    mixed = (rows + 1) * (2 * places + 1) * 0x1E3779B97F4A7C15  # overflows, on purpose
    return (mixed ^ (mixed >> 32)).sum()


def open_or_prepare(cfg: TrainConfig) -> Path:
    """The folder of a checked data set; it is prepared first when it is missing and small. For one process to call."""
    folder = data_dir(cfg)
    done = read_summary(folder)
    if done:
        check_made_for(cfg, done, folder)
    if not done or (cfg.max_tokens and not enough(done, cfg.max_tokens)):
        paths = corpus.files(cfg.dataset)
        small = 0 < cfg.max_tokens <= SMALL_TOKENS or (
            paths and sum(map(os.path.getsize, paths)) <= SMALL_BYTES
        )
        names = ("dataset", "tokenizer", "max_tokens", "val_fraction")
        flags = [f"--{name}={getattr(cfg, name)}" for name in names] + [f"--data_dir={folder}"]
        have = (
            f"only {done['train_tokens']:,} tokens are in {folder}"
            if done
            else f"no data set is in {folder} yet"
        )
        require(
            small,
            f"{have}, and it is not small, so prepare it first: python data.py {shlex.join(flags)}",
        )
        prepare(cfg)
        done = read_summary(folder)
    require(
        fingerprint(folder) == done["fingerprint"],
        f"{folder} lacks a shard: run data.py again, which makes it",
    )
    shards = [Shard(path) for path in shard_files(folder)]
    if sum(s.ids.nbytes for s in shards) <= HASH_BYTES:
        for shard in shards:
            shard.check_hash()
    return folder


def prefetch(make, steps, device):
    """Yield (step, make(step) as a tensor on `device`), the next one being read and copied by a thread meanwhile."""
    import torch  # here, so that preparing needs no torch

    def load(step):
        rows = torch.from_numpy(make(step))
        if device.type != "cuda":
            return rows.to(device)
        torch.cuda.set_device(
            device
        )  # a new thread is on device 0, where pinning would open a second context
        return rows.pin_memory().to(device, non_blocking=True)

    with ThreadPoolExecutor(1) as thread:
        ahead = deque()
        for step in steps:
            ahead.append((step, thread.submit(load, step)))
            if len(ahead) > 1:
                ready, future = ahead.popleft()
                yield ready, future.result()
        for ready, future in ahead:
            yield ready, future.result()


def main(argv) -> None:
    """Prepare a data set, then say what is in it and how fast one thread reads it."""
    model_cfg, cfg = config.load(argv, config.MPTConfig, TrainConfig)
    folder = prepare(cfg, workers=os.cpu_count())
    tokenizer = tokenizers.load(cfg.tokenizer, folder / "tokenizer.json")
    for name in ("train", "val"):
        split = Split(folder, name, model_cfg.max_seq_len)
        n_docs = sum(s.header["documents"] for s in split.shards)
        print(
            f"{name:5s}  {split.tokens:,} tokens  {n_docs:,} documents  {len(split):,} windows of {split.seq_len}  "
            f"{split.text_bytes / split.tokens:.2f} bytes a token"
        )
    train, begin, steps = Split(folder, "train", model_cfg.max_seq_len), time.perf_counter(), 50
    for step in range(steps):
        rows = train.batch(cfg.seed, step, 64)
    rate = steps * rows[:, 1:].size / (time.perf_counter() - begin)
    print(
        f"one thread reads {rate / 1e6:.0f} million tokens a second; the last row of its batch {step} begins:"
    )
    print("   ", repr(tokenizer.decode(rows[-1][:40])))
    print(folder)


if __name__ == "__main__":
    config.run(main)
