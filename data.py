"""Token shards on disk -> batches. A batch is a pure function of the seed and the step.

A data set is n windows of tokens. Row r of the batch of step s is

    sample          = s * global_batch_size + r        counted from the start of the run
    epoch, position = divmod(sample, n)
    window          = permute(position, n, seed, epoch)

`permute` is a random order of the n windows, a different one in each epoch. It is computed, not
stored. Each data-parallel rank reads its own slice of the rows. So the samples and their order
are the same on any number of ranks and for any microbatch size, and each window is read once an
epoch.

Where does a resumed run continue? No data position is saved. A checkpoint holds its step, and
`Split.batch(seed, step, ...)` returns the rows that an uninterrupted run reads at that step.

In a mixture of sources (--mix) a fixed schedule says from which source a sample is, and which of
that source's own samples it is. The latter takes the place of `sample` above, so each source has
epochs of its own: see `Mixture`.

The shards are made by text/prepare.py. Prompts and responses (data_format=chat, text/chat.py) come
as whole rows of max_seq_len tokens, one window each, of which only some tokens are learned: see
`inputs_and_labels`.

How do I add a dataset format? A new format of text (.xml, a database): a function of documents in
text/corpus.py, called by `file_documents`. Nothing in this file changes. A new format of tokens on
disk: replace `Shard` in text/shards.py, or write a class with the methods and attributes
of `Split`.

Run `python data.py --dataset='my/*.txt' --tokenizer=bpe-4096`, or with a config file, to prepare a
data set and see what it holds. `--export_mds=OUT` writes it for MosaicML's Streaming, too.
"""

import hashlib
import math
import os
import platform
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import config
import program
from config import TrainConfig
from program import require
from text import recipe
from text.shards import Shard, read_summary, shard_files


class Split:
    """One split (train or val) of a data folder, as n = len(split) windows of tokens.

    A window is seq_len + 1 tokens: the first seq_len are the inputs, the last seq_len the labels.
    It begins with the last token of the window before it. With seq_len = 3:

        shard       a0 a1 a2 b0 b1 b2 c0
        window 0    a0 a1 a2 b0              inputs a0 a1 a2, labels a1 a2 b0
        window 1             b0 b1 b2 c0     inputs b0 b1 b2, labels b1 b2 c0

    A row of a chat is a window, too. If b0 begins another chat, it must not be learned after a2: it
    is stored as ~b0, which is no label.

    `tokens`, `text_bytes` and `vocab_size` describe the whole split, and so does `learned`, the
    number of tokens that are learned. Of a chat, `text_bytes` counts the text of those alone.
    """

    def __init__(self, folder: Path, split: str, seq_len: int):
        """UserError if the folder has no shard of this split, or too few tokens for one window."""
        program.raise_file_limit()  # each shard that is mapped is an open file
        self.folder = folder
        self.seq_len = seq_len
        self.shards = [Shard(path) for path in shard_files(folder, split)]
        require(
            self.shards,
            f"no {split} shards in {folder} on {platform.node()}: every node must see this folder",
        )
        self.tokens = sum(shard.header["tokens"] for shard in self.shards)
        self.text_bytes = sum(shard.header["text_bytes"] for shard in self.shards)
        self.vocab_size = self.shards[0].header["vocab_size"]
        self.has_rows = self.shards[0].header["dtype"] == "int32"  # of prompts and responses
        self.learned = self.tokens
        if self.has_rows:
            lengths = {shard.header.get("max_seq_len", 0) for shard in self.shards}
            require(
                lengths == {seq_len},
                f"{folder} has rows made for max_seq_len {min(lengths)}, not {seq_len}: "
                "set that, or prepare the data again with another --data_dir",
            )
            self.learned = self.count("learned")

        sizes = [shard.header["tokens"] for shard in self.shards]
        windows_in_shard = [max(0, size - 1) // seq_len for size in sizes]
        self.first_window = np.cumsum([0, *windows_in_shard])  # of each shard; at the end, n

        fix = "lower --max_seq_len"
        if split == "val":
            fix += ", or raise --val_fraction and set another --data_dir"
        require(
            len(self) > 0,
            f"max_seq_len {seq_len} needs {seq_len + 1:,} tokens in one file, and the longest of "
            f"the {len(sizes)} {split} files in {folder} has {max(sizes):,}: {fix}",
        )

    def count(self, name: str) -> int:
        """The sum of a count in the headers of all shards."""
        return sum(shard.header[name] for shard in self.shards)

    def describe_rows(self) -> str:
        """How full the rows of a chat are, how much is learned, what was cut or dropped."""
        filled = self.count("filled") / (len(self) * self.seq_len)
        return (
            f"{self.count('documents'):,} examples fill {filled:.1%} of {len(self):,} rows, "
            f"{self.learned:,} tokens are learned; "
            f"{self.count('cut'):,} examples cut to {self.seq_len} tokens, "
            f"{self.count('dropped'):,} dropped, since nothing in them is learned"
        )

    def __len__(self) -> int:
        """The number of windows, n."""
        return int(self.first_window[-1])

    def windows(self, window_ids: np.ndarray) -> np.ndarray:
        """The tokens of these windows, (len(window_ids), seq_len + 1) int64.

        ~id stands for an id that is not learned: see `inputs_and_labels`.
        """
        rows = np.empty((len(window_ids), self.seq_len + 1), np.int64)
        shard_ids = np.searchsorted(self.first_window, window_ids, side="right") - 1
        begins = (window_ids - self.first_window[shard_ids]) * self.seq_len
        for row, shard_id, begin in zip(rows, shard_ids, begins, strict=True):
            row[:] = self.shards[shard_id].ids[begin : begin + self.seq_len + 1]
        require(
            not len(rows) or plain_ids(rows).max() < self.vocab_size,
            f"{self.folder} holds ids beyond its vocabulary: it is damaged, "
            "delete it and run data.py again",
        )
        return rows

    def batch(
        self, seed: int, step: int, global_batch_size: int, dp_rank: int = 0, dp_size: int = 1
    ) -> np.ndarray:
        """The rows of one data-parallel rank at one step.

        Returns (global_batch_size / dp_size, seq_len + 1) int64. A pure function of its
        arguments: nothing is remembered between calls, so a resumed run asks for its step and
        continues where it was. See the formula at the top of this file.
        """
        return self.rows(seed, samples_of(step, global_batch_size, dp_rank, dp_size))

    def rows(self, seed: int, samples: np.ndarray) -> np.ndarray:
        """The rows of these samples, (len(samples), seq_len + 1) int64."""
        epochs, positions = np.divmod(samples, len(self))

        window_ids = np.empty_like(positions)
        for epoch in np.unique(epochs):  # more than one if an epoch ends inside this batch
            in_epoch = epochs == epoch
            window_ids[in_epoch] = permute(positions[in_epoch], len(self), seed, int(epoch))
        return self.windows(window_ids)


class Mixture:
    """Several sources, each read as often as its share says.

    The schedule of `schedule` repeats: with the shares 0.5, 0.3 and 0.2,

        sample                  0  1  2  3  4  5  6  7  8  9     10 11 ...
        source                  0  1  0  2  0  1  0  1  0  2      0  1 ...
        sample of the source    0  0  1  0  2  1  3  2  4  1      5  3 ...
    """

    def __init__(self, splits: list[Split], shares: list[float]):
        self.splits = splits
        self.sources, self.numbers = schedule(shares)
        self.counts = np.bincount(self.sources)  # samples of each source in one schedule

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample, and which of that source's samples it is. Both int64."""
        schedules, places = np.divmod(samples, len(self.sources))
        sources = self.sources[places]
        return sources, schedules * self.counts[sources] + self.numbers[places]

    batch = Split.batch

    def rows(self, seed: int, samples: np.ndarray) -> np.ndarray:
        """The rows of these samples, as of `Split.rows`."""
        sources, numbers = self.locate(samples)
        rows = np.empty((len(samples), self.splits[0].seq_len + 1), np.int64)
        for index, split in enumerate(self.splits):
            own = sources == index
            rows[own] = split.rows(seed, numbers[own])
        return rows


def schedule(shares: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each sample, and the number of samples of that source before it. Both int64.

    shares: to four decimals, so after at most 10,000 samples each source has had exactly its share.

    The next sample is from the source that would otherwise be the first to fall behind its share,
    of those that are not ahead of theirs. So of the first n samples a source with the share p has
    floor(p n) or ceil(p n), and of any samples in a row less than 2 more or fewer than its share.

    Why no source falls behind: this is scheduling by the earliest deadline (Liu and Layland, 1973).
    That a source can always be within 1 sample of p n is Tijdeman's answer to the chairman
    assignment problem (1980).
    """
    parts = [round(10_000 * share) for share in shares]
    divisor = math.gcd(*parts)
    parts = [part // divisor for part in parts]
    length = sum(parts)
    counts = [0] * len(parts)
    sources = np.empty(length, np.int64)
    numbers = np.empty(length, np.int64)

    def deadline(k: int) -> int:
        """Among so many first samples, source k with the share p needs one more: n p >= count + 1.

        That is n = ceil((count + 1) / p), in whole numbers.
        """
        return -(-(counts[k] + 1) * length // parts[k])

    for n in range(length):
        not_ahead = [k for k, part in enumerate(parts) if counts[k] * length < (n + 1) * part]
        source = min(not_ahead, key=deadline)
        sources[n] = source
        numbers[n] = counts[source]
        counts[source] += 1
    return sources, numbers


def samples_of(step: int, global_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """The samples of one data-parallel rank at one step, counted from the start of the run."""
    n_rows = global_batch_size // dp_size  # of this rank
    first_sample = step * global_batch_size + dp_rank * n_rows
    return first_sample + np.arange(n_rows)


def n_evaluated(split, eval_tokens: int) -> int:
    """How many windows of a split one evaluation reads: eval_tokens at most, but one at least."""
    return max(1, min(len(split), eval_tokens // split.seq_len))


def open_folders(cfg: TrainConfig, max_seq_len: int) -> list[Path]:
    """The checked data folders of a training run: one, or that of each source of a mixture.

    Rank 0 alone calls it. See text/recipe.py, and of data in a store text/fetch.py.
    """
    if cfg.mix:
        return recipe.of_mixture(open_or_prepare, cfg, max_seq_len)
    return [open_or_prepare(cfg, max_seq_len)]


def open_or_prepare(cfg: TrainConfig, max_seq_len: int = 0, source: str = "") -> Path:
    """The checked data folder of a run; of a store, the one that `fetch.copy` fills.

    A small data set that is missing is prepared first, though not in a store. max_seq_len, source:
    see `recipe.Recipe`. Raises UserError for a large one, with the command that prepares it, and
    for a folder that is damaged, or made from something else.
    """
    wanted = recipe.Recipe(cfg, max_seq_len, source)
    if not recipe.is_ready(wanted):
        from text import prepare  # here, since most runs find their tokens

        if not wanted.store:
            prepare.require_small(wanted)
        prepare.prepare(cfg, max_seq_len=max_seq_len, source=source)
    return recipe.verify_folder(wanted)


class Part(NamedTuple):
    """A data folder as a run uses it, cut into windows of max_seq_len tokens."""

    name: str  # of the source; empty without a mixture
    share: float  # of the samples; 1 without a mixture
    folder: Path
    train: Split
    val: Split


def names_and_shares(cfg: TrainConfig | None) -> list[tuple[str, float]]:
    """The name and share of each source of a mixture; without one: no name, and all samples."""
    if cfg is None or not cfg.mix:
        return [("", 1.0)]
    from text import mixture  # here, since most runs do without

    return [(source.name, source.share) for source in mixture.sources(cfg.mix)]


class Dataset:
    """The data of a run: one prepared folder, or one for each source of a mixture."""

    def __init__(self, folders: list[Path], model_cfg: config.MPTConfig, cfg=None):
        """UserError if an id exceeds the model's vocabulary, or a split is less than one window.

        folders: what `open_folders` returned. cfg: for a mixture.
        """
        self.parts = []
        for (name, share), folder in zip(names_and_shares(cfg), folders, strict=True):
            train = Split(folder, "train", model_cfg.max_seq_len)
            val = Split(folder, "val", model_cfg.max_seq_len)
            self.parts.append(Part(name, share, folder, train, val))

        first = self.parts[0]
        fingerprints = [read_summary(folder)["fingerprint"] for folder in folders]
        self.train = first.train
        self.fingerprint = fingerprints[0]
        if first.name:  # a mixture
            shares = [part.share for part in self.parts]
            self.train = Mixture([part.train for part in self.parts], shares)
            self.fingerprint = " + ".join(map("{:g} of {}".format, shares, fingerprints))

        folder = first.folder  # all have the same tokenizer
        self.tokenizer_file = folder / "tokenizer.json"  # not there for bytes and GPT-2's
        # The id between packed documents, if the model keeps them apart.
        self.separator = None
        if model_cfg.attn_uses_sequence_id:
            from text import tokenizer  # here, since most runs do without

            name = read_summary(folder)["tokenizer"]
            self.separator = tokenizer.load(name, self.tokenizer_file).eot
        n_ids = first.train.vocab_size
        require(
            n_ids <= model_cfg.vocab_size,
            f"vocab_size {model_cfg.vocab_size} is less than the {n_ids} ids of {folder}: raise it",
        )

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch; 0 with a mixture, where each source has epochs of its own."""
        first = self.parts[0]
        is_mixture = first.name != ""
        return 0 if is_mixture else len(first.train) * first.train.seq_len

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


def permute_slowly(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """The obvious version of `permute`, which shuffles all n windows to look up a few.

    It is another random order, with the same properties: tests/test_data.py checks both.
    """
    return np.random.default_rng([seed, epoch]).permutation(n)[positions]


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a random permutation of 0..n-1 sends `positions`, int64 of the same shape.

    Each is computed on its own, so nothing of size n is stored. Only integers are used, so the
    result is the same on every machine and with every version of NumPy.

    A Feistel network of 6 rounds (Luby and Rackoff, 1988) permutes 0..4^k-1, the smallest such
    range that holds n. A result outside 0..n-1 goes through the network again until it lies
    inside (cycle walking: Black and Rogaway, 2002).
    """
    k = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits in each half
    mask = (np.uint64(1) << k) - np.uint64(1)
    digests = [
        hashlib.sha256(f"{seed}:{epoch}".encode()).digest(),
        hashlib.sha256(f"{epoch}:{seed}".encode()).digest(),
    ]
    round_keys = np.frombuffer(b"".join(digests), "<u8")[:6]

    def network(x):
        left = x >> k
        right = x & mask
        for key in round_keys:
            left, right = right, left ^ (scramble(right + key) & mask)
        return (left << k) | right

    permuted = network(positions.astype(np.uint64))
    while (outside := permuted >= n).any():
        permuted[outside] = network(permuted[outside])
    return permuted.astype(np.int64)


def scramble(x: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64, elementwise: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def plain_ids(rows: np.ndarray) -> np.ndarray:
    """The ids in rows of a shard, where ~id = -1 - id stands for one that is not learned."""
    return np.where(rows < 0, ~rows, rows)


def inputs_and_labels(rows):
    """Rows (B, T + 1) of a batch -> ids (B, T) that the model reads, labels (B, T), both int64.

    The label of a place is the next id, or IGNORE if that is not learned. In rows such an id is
    stored as ~id = -1 - id, which is negative; text has none.
    """
    import torch

    from loss import IGNORE

    ids = torch.where(rows < 0, ~rows, rows)
    labels = torch.where(rows < 0, IGNORE, rows)
    return ids[:, :-1], labels[:, 1:]


def check_packing(model_cfg: config.MPTConfig, cfg: TrainConfig) -> None:
    """UserError if examples packed into one row would see each other, or begin late in a row."""
    if cfg.data_format == "text" or not cfg.packing:
        return
    instead = "or give each example a row of its own with --packing=False"
    require(
        not model_cfg.learned_positions,
        "packing needs positions that are relative, and this model learns one for each place of a "
        f"row: set --alibi or --rope for a model that has them, {instead}",
    )
    require(
        model_cfg.attn_uses_sequence_id,
        "packed examples would see each other: set --attn_uses_sequence_id, which keeps them "
        f"apart, {instead}",
    )


def batch_hash(rows, dp_rank: int):
    """A 64-bit hash of the ids in `rows` (B, T + 1), int64 scalar on their device.

    rows: those of one data-parallel rank, dp_rank * B to dp_rank * B + B - 1 of the batch. The
    sum over these ranks (mod 2^64) is the hash of the global batch, however many ranks share it.
    Any change of an id, or of their order, changes it.
    """
    import torch

    places = torch.arange(rows.numel(), device=rows.device).view_as(rows) + dp_rank * rows.numel()
    mixed = (rows + 1) * (2 * places + 1) * 0x1E3779B97F4A7C15  # overflows on purpose
    return (mixed ^ (mixed >> 32)).sum()


class Batch(NamedTuple):
    """A rank's rows of a step, ready for training."""

    microbatches: list  # [(ids, labels), ...], both (rows, T) int64
    counts: object  # a tensor (2,): how many labels are learned, and the hash of the ids


def make_batch(rows, cfg: TrainConfig, dp_rank: int) -> Batch:
    """The batch of this rank's rows (B, T + 1), on their device.

    The sums of its counts over the data-parallel ranks are those of the global batch.
    """
    import torch

    from loss import IGNORE

    hash_of_rows = batch_hash(rows, dp_rank)
    size = microbatch_rows(len(rows), cfg)
    if cfg.compile is True:  # a compiled block takes full microbatches: fill up the last one
        missing = -len(rows) % size
        # ~0 is id 0, not learned: see `inputs_and_labels`.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing), value=~0)
    ids, labels = inputs_and_labels(rows)
    counts = torch.stack([(labels != IGNORE).sum(), hash_of_rows])
    return Batch(list(zip(ids.split(size), labels.split(size), strict=True)), counts)


def microbatch_rows(n_rows: int, cfg: TrainConfig) -> int:
    """The rows of each microbatch that a rank cuts its n_rows into: at most cfg.microbatch_size.

    Blocks are compiled for one number of rows. So compiled ones get microbatches of equal size, as
    few as otherwise: nine rows, eight at a time, are two times five.
    """
    if cfg.compile is not True:
        return cfg.microbatch_size
    n_microbatches = math.ceil(n_rows / cfg.microbatch_size)
    return math.ceil(n_rows / n_microbatches)


def prefetch(read_batch, steps, device):
    """Yield (step, read_batch(step) as a tensor on `device`), one step ahead of its use.

    read_batch: step -> array. A thread reads the next batch and copies it to the device while the
    caller works on this one.
    """
    import torch  # here, because preparing a data set needs no torch

    def load(step):
        rows = torch.from_numpy(read_batch(step))
        if device.type != "cuda":
            return rows.to(device)
        # A new thread is on device 0, where pinning memory would open a second context.
        torch.cuda.set_device(device)
        return rows.pin_memory().to(device, non_blocking=True)

    with ThreadPoolExecutor(1) as thread:
        ahead = deque()
        for step in steps:
            ahead.append((step, thread.submit(load, step)))
            if len(ahead) > 1:
                ready_step, batch = ahead.popleft()
                yield ready_step, batch.result()
        for ready_step, batch in ahead:
            yield ready_step, batch.result()


@dataclass
class DataArgs:
    """What data.py takes beside the settings of a run."""

    export_mds: str = ""  # a new folder: write the tokens there for MosaicML's Streaming, too


def main(argv) -> None:
    """Prepare a data set, then print what it holds and how fast one thread reads it."""
    from text import mixture
    from text.prepare import prepare

    model_cfg, cfg, args = config.load(argv, config.MPTConfig, TrainConfig, DataArgs)
    require(
        not args.export_mds or (cfg.data_format == "text" and not cfg.mix),
        "--export_mds takes the documents of one data set: set --data_format=text, "
        "and export the sources of a mixture one by one",
    )
    if cfg.mix:
        folders = recipe.of_mixture(prepare, cfg, os.cpu_count(), model_cfg.max_seq_len)
        for source, folder in zip(mixture.sources(cfg.mix), folders, strict=True):
            print(f"{source.name}, {source.share:g} of the samples:")
            describe(folder, cfg, model_cfg)
        return

    folder = prepare(cfg, os.cpu_count(), model_cfg.max_seq_len)
    loaded = describe(folder, cfg, model_cfg)
    if args.export_mds:
        from text import mds

        mds.export(folder, Path(args.export_mds), model_cfg.max_seq_len, loaded)


def describe(folder: Path, cfg: TrainConfig, model_cfg: config.MPTConfig):
    """Print what a data folder holds and how fast one thread reads it. Returns its tokenizer."""
    from text import tokenizer

    for name in ("train", "val"):
        split = Split(folder, name, model_cfg.max_seq_len)
        n_documents = split.count("documents")
        print(
            f"{name:5s}  {split.tokens:,} tokens  {n_documents:,} documents  "
            f"{len(split):,} windows of {split.seq_len}  "
            f"{split.text_bytes / split.learned:.2f} bytes a token"
        )
        if split.has_rows:
            print(f"       {split.describe_rows()}")

    train = Split(folder, "train", model_cfg.max_seq_len)
    steps = 50
    start = time.perf_counter()
    for step in range(steps):
        rows = train.batch(cfg.seed, step, global_batch_size=64)
    tokens_per_second = steps * rows[:, 1:].size / (time.perf_counter() - start)
    print(
        f"one thread reads {tokens_per_second / 1e6:.0f} million tokens a second; "
        f"the last row of its batch {step} begins:"
    )
    loaded = tokenizer.load(cfg.tokenizer, folder / "tokenizer.json")
    begin = rows[-1][:40]
    print("   ", repr(loaded.decode(plain_ids(begin))))
    print(folder)
    return loaded


if __name__ == "__main__":
    program.run(main)
