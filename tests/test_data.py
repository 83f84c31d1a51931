"""data.py: shards are complete or not there, and a batch depends on the seed and the step alone."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PATIENCE, ROOT, byte_level, refusal, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from config import TrainConfig, load
from data import Split, open_or_prepare, permute, permute_slowly, prefetch
from program import UserError
from text import shards, sources
from text import tokenizer as tokenizers
from text.prepare import (
    FIRST_SLICE,
    SMALL_BYTES,
    SMALL_TOKENS,
    Recipe,
    prepare,
    read_summary,
)
from text.shards import HEADER_BYTES, Shard

EOT = 256  # of the bytes tokenizer
ABOUT = {"documents": 1, "text_bytes": 9, "vocab_size": 257, "text_sha256": ""}  # of a shard


@pytest.fixture
def make(tmp_path):
    """make(texts, **settings) writes a .jsonl file of documents.

    Returns the settings that prepare it with the bytes tokenizer.
    """

    def make(texts, folder="tokens", **settings):
        path = tmp_path / "docs.jsonl"
        write_lines(path, *({"text": text} for text in texts))
        usual = {"tokenizer": "bytes", "val_fraction": 0.1, "data_dir": str(tmp_path / folder)}
        usual["run_dir"] = str(tmp_path / "run")
        return TrainConfig(dataset=str(path), **(usual | settings))

    return make


@pytest.fixture(scope="session")
def large_text(tmp_path_factory):
    """A file of 13 MB in 650 documents: four chunks."""
    path = tmp_path_factory.mktemp("large") / "text.txt"
    documents = [f"document {i} " + f"{i * 7919} words " * 1500 for i in range(650)]
    path.write_text("<|endoftext|>".join(documents))
    return path


@pytest.fixture(scope="session")
def undisturbed(large_text):
    """The shards of that file, prepared by one process without interruption: name -> content."""
    folder = large_text.parent / "undisturbed"
    return files(prepare(settings_for(large_text, folder)))


def settings_for(path, folder, **more):
    usual = {"dataset": str(path), "tokenizer": "bytes", "data_dir": str(folder)}
    return TrainConfig(**(usual | more))


def files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir())}


def documents_of(folder, split):
    """The documents of a split, decoded from its shards."""
    ids = np.concatenate([Shard(p).ids for p in sorted(Path(folder).glob(f"{split}-*.bin"))])
    assert len(ids) == 0 or ids[-1] == EOT
    ends = np.flatnonzero(ids == EOT)
    documents = np.split(ids, ends + 1)[:-1]
    return [bytes(ids[ids != EOT].astype(np.uint8)).decode() for ids in documents]


TEXTS = [f"Document number {i}: " + "größe, ünd so weiter. " * (i % 5) for i in range(95)]

# --- shards


def test_a_shard_is_a_header_and_raw_tokens(make):
    folder = prepare(make(TEXTS))
    raw = (folder / "train-00000.bin").read_bytes()
    header, body = json.loads(raw[:HEADER_BYTES]), raw[HEADER_BYTES:]
    train = [t for i, t in enumerate(TEXTS) if i % 10]
    expected = b"".join(np.array([*t.encode(), EOT], "<u2").tobytes() for t in train)
    assert body == expected
    about = {name: value for name, value in header.items() if name != "sha256"}
    hashed = json.dumps(about, sort_keys=True).encode() + expected
    assert header["sha256"] == hashlib.sha256(hashed).hexdigest()
    assert (header["format"], header["dtype"]) == ("mpt-tokens-1", "uint16")
    assert header["vocab_size"] == 257
    assert (header["tokens"], header["documents"]) == (len(expected) // 2, len(train))
    assert header["text_bytes"] == sum(len(t.encode()) for t in train)
    summary = read_summary(folder)
    assert (summary["tokenizer"], summary["train_tokens"]) == ("bytes", header["tokens"])


@pytest.mark.parametrize("fraction, every", [(0.02, 50), (0.25, 4)])
def test_validation_takes_whole_documents(make, fraction, every):
    folder = prepare(make(TEXTS, val_fraction=fraction))
    # The first document is always in it, so it is never empty.
    assert documents_of(folder, "val") == TEXTS[::every]
    assert documents_of(folder, "train") == [t for i, t in enumerate(TEXTS) if i % every]


def test_a_trained_tokenizer_comes_with_the_data(make):
    folder = prepare(make(TEXTS, tokenizer="bpe-300"))
    bpe = tokenizers.load("bpe-300", folder / "tokenizer.json")
    text = bpe.decode(Shard(folder / "train-00000.bin").ids)
    assert text == "".join(t + "<|endoftext|>" for i, t in enumerate(TEXTS) if i % 10)
    assert Split(folder, "train", 8).vocab_size == bpe.vocab_size > 257


def test_finetuning_takes_the_bpe_of_its_base(make, tmp_path):
    """From a run or one of its checkpoints. One of another size is trained on the new text."""
    base = tmp_path / "runs/base"
    (base / "checkpoints/step-1").mkdir(parents=True)
    theirs = prepare(make(TEXTS, tokenizer="bpe-300")) / "tokenizer.json"
    shutil.copy(theirs, base)

    def made(name, init_from):
        folder = f"{name}-{len(str(init_from))}"
        cfg = make(["zebra quiz " * 50] * 3, folder, tokenizer=name, init_from=str(init_from))
        return (prepare(cfg) / "tokenizer.json").read_bytes()

    assert made("bpe-300", base) == theirs.read_bytes()
    assert made("bpe-300", base / "checkpoints/step-1") == theirs.read_bytes()
    assert made("bpe-300", "") != theirs.read_bytes()
    assert made("bpe-280", base) == made("bpe-280", "")


def test_too_little_text(make):
    for texts, message in (([], "is empty"), (["", ""], "is empty"), (["one"], "one document")):
        assert message in refusal(prepare, make(texts))


def test_ids_beyond_16_bits(tmp_path):
    ids = np.array([1, 70_000, 2, 3, 99_999], np.uint32)
    shards.write_ids(tmp_path / "train-00000.bin", ids, ABOUT | {"vocab_size": 100_000})
    split = Split(tmp_path, "train", 2)
    assert split.windows(np.array([0, 1])).tolist() == [[1, 70_000, 2], [2, 3, 99_999]]


# --- max_tokens


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_max_tokens_is_exact(large_text, undisturbed, tmp_path, workers):
    """The limit lies inside the second of four chunks; the first chunk is not changed by it."""
    folder = prepare(settings_for(large_text, tmp_path / "t", max_tokens=5_000_000), workers)
    assert Split(folder, "train", 64).tokens == read_summary(folder)["train_tokens"] == 5_000_000
    prepared = files(folder)
    bins = {"train-00000.bin", "train-00001.bin", "val-00000.bin", "val-00001.bin"}
    assert {name for name in prepared if name.endswith(".bin")} == bins
    assert prepared["train-00000.bin"] == undisturbed["train-00000.bin"]
    second = prepared["train-00001.bin"][HEADER_BYTES:]
    assert undisturbed["train-00001.bin"][HEADER_BYTES:].startswith(second)


def test_more_tokens_later_equal_more_tokens_at_once(make):
    """One more is more."""
    limits = (1000, 1001, 3000, 0)
    steps = [files(open_or_prepare(make(TEXTS, max_tokens=n))) for n in limits[:3]]
    steps.append(files(prepare(make(TEXTS))))
    fresh = [files(prepare(make(TEXTS, f"fresh{n}", max_tokens=n))) for n in limits]
    assert steps == fresh and steps[0] != steps[1] != steps[2] != steps[3]


def test_fewer_tokens_later_change_nothing_and_a_run_says_so(make, capsys):
    assert files(prepare(make(TEXTS))) == files(prepare(make(TEXTS, max_tokens=1000)))
    open_or_prepare(make(TEXTS, max_tokens=1000))
    assert "more than --max_tokens" in capsys.readouterr().err


def test_a_run_that_asks_for_all_tokens_does_not_take_the_first_ones(make):
    """Nor does it make the rest: a run on these tokens may have to resume. Both fixes work."""
    folder = prepare(make(TEXTS, max_tokens=1000))
    before = files(folder)
    message = refusal(open_or_prepare, make(TEXTS))
    assert "only the first 1,000" in message and "max_tokens=1000," in message
    assert open_or_prepare(make(TEXTS, max_tokens=1000)) == folder and files(folder) == before
    run_command(message)
    assert open_or_prepare(make(TEXTS)) == folder
    assert files(folder) == files(prepare(make(TEXTS, "fresh")))


@pytest.mark.parametrize("later", [0, 3000], ids=["all", "more"])
def test_a_run_that_has_begun_goes_on_with_the_first_tokens(make, tmp_path, capsys, later):
    """It would be refused on others. Half of a first checkpoint does not count."""
    cfg = replace(make(TEXTS, max_tokens=1000), run_dir=str(tmp_path / "run"))
    folder = open_or_prepare(cfg)
    before = files(folder)
    (tmp_path / "run/checkpoints/step-5.tmp").mkdir(parents=True)
    if not later:
        assert "only the first 1,000" in refusal(open_or_prepare, replace(cfg, max_tokens=later))
    (tmp_path / "run/checkpoints/step-5").mkdir()
    capsys.readouterr()
    assert open_or_prepare(replace(cfg, max_tokens=later)) == folder and files(folder) == before
    assert "goes on with them" in capsys.readouterr().err


def test_the_command_that_makes_the_data_fits_the_run(make):
    """Windows of the run's length: the default is longer than this text."""
    folder = open_or_prepare(make(TEXTS), 32)
    (folder / "train-00000.bin").unlink()
    message = refusal(open_or_prepare, make(TEXTS), 32)
    data.main(shlex.split(message.partition("python data.py ")[2].removesuffix(" makes it")))
    assert open_or_prepare(make(TEXTS), 32) == folder


def run_command(message):
    """What `python data.py`, the command that a message ends with, does."""
    (cfg,) = load(shlex.split(message.partition("python data.py ")[2]), TrainConfig)
    return prepare(cfg)


# --- long documents


def test_words_without_end_do_not_keep_a_tokenizer_from_being_learned(make):
    """A megabyte without a space, as base64 is: learning from it took 30 minutes."""
    chance = random.Random(0)
    blob = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=10**6))
    begin = time.process_time()
    folder = prepare(make(["the river and the tree " * 50, blob, "the tree"], tokenizer="bpe-280"))
    assert time.process_time() - begin < 30
    known = tokenizers.load("bpe-280", folder / "tokenizer.json").tokens
    assert b" the" in known and len(known) <= 279


# --- interrupted, in parallel, damaged


@pytest.fixture
def begun(large_text, tmp_path):
    """`python data.py`, running, with its first shard on disk: (process, command, folder)."""
    folder = tmp_path / "tokens"
    flags = [f"--dataset={large_text}", "--tokenizer=bytes", "--max_seq_len=64"]
    flags.append(f"--data_dir={folder}")
    command = [sys.executable, str(ROOT / "data.py"), *flags]
    process = subprocess.Popen(
        ["nice", *command],  # so that this process sees the first shard before the last is made
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (folder / "train-00000.bin").exists() and process.poll() is None:
        time.sleep(0.001)
    yield process, command, folder
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.slow
def test_a_killed_preparation_goes_on_where_it_was(begun, undisturbed):
    """kill -9 after the first shard; another one, which waits, makes the rest, byte for byte.

    The workers of the first one end, too: otherwise they would write to the folder of the next.
    """
    process, command, folder = begun
    process.send_signal(signal.SIGSTOP)
    first = folder / "train-00000.bin"
    assert first.exists() and not (folder / "dataset.json").exists(), "stopped too late"
    before = first.stat()
    waiting = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    owner = f"process {process.pid} on {platform.node()}"
    assert waiting.stderr.readline() == f"{folder} is being prepared by {owner}: waiting\n"
    process.kill()
    process.communicate(timeout=PATIENCE)  # returns when the last that holds the output has ended

    output, errors = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 0, errors
    assert files(folder) == undisturbed  # and no .tmp file is left
    after = first.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)  # made once
    tokens = Split(folder, "train", 64).tokens
    line = rf"^train  {tokens:,} tokens  646 documents  .* windows of 64  "
    assert re.search(line, output, re.MULTILINE)


@pytest.mark.parametrize("locks", [True, False])
def test_runs_that_start_together_share_one_preparation(make, monkeypatch, locks):
    """Each gets whole shards. Without locks of the file system, too."""
    if not locks:

        def no_locks(file, operation):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", no_locks)
    alone = files(prepare(make(TEXTS, "alone", tokenizer="bpe-300")))
    cfg = make(TEXTS, "shared", tokenizer="bpe-300")
    start = threading.Barrier(4)

    def prepare_one():
        start.wait()
        return Split(open_or_prepare(cfg), "train", 16).tokens

    with ThreadPoolExecutor(4) as runs:
        results = [runs.submit(prepare_one) for _ in range(4)]
        assert len({result.result() for result in results}) == 1
    assert files(cfg.data_dir) == alone


DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one token": lambda path: path.write_bytes(path.read_bytes()[:-2] + b"\7\0"),
}


@pytest.mark.parametrize(
    "damage, split", [("deleted", "train"), ("truncated", "train"), ("one token", "val")]
)
def test_a_bad_shard_is_named_by_a_run_and_made_anew(make, damage, split):
    """The advice of the message works. So does an interrupted preparation, which checks all.

    test_fuzz.py damages shards in other ways.
    """
    folder = prepare(make(TEXTS))
    before = files(folder)
    path = folder / f"{split}-00000.bin"
    DAMAGE[damage](path)
    message = refusal(open_or_prepare, make(TEXTS))
    assert str(folder if damage == "deleted" else path) in message and "data.py" in message
    path.unlink(missing_ok=True)
    assert files(prepare(make(TEXTS))) == before

    (folder / "dataset.json").unlink()  # it is written last
    DAMAGE[damage](path)
    path.with_suffix(".bin.tmp").write_bytes(b"half a shard")
    assert files(prepare(make(TEXTS))) == before


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00007.bin"])
def test_shards_of_another_program_are_left_as_they_are(make, tmp_path, name):
    """They may have the same names, as the tokens of a large data set do."""
    cfg = replace(make(TEXTS), data_dir=str(tmp_path / "theirs"))
    (tmp_path / "theirs").mkdir()
    theirs = np.arange(600, dtype=np.uint16).tobytes()
    (tmp_path / "theirs" / name).write_bytes(theirs)
    assert f"{name} is not a shard" in refusal(prepare, cfg)
    assert (tmp_path / "theirs" / name).read_bytes() == theirs


def test_a_header_that_cannot_be_is_named(tmp_path):
    """test_fuzz.py damages shards in other ways."""
    path = tmp_path / "train-00000.bin"
    shards.write_ids(path, np.arange(10, dtype=np.uint16), ABOUT)
    raw = path.read_bytes()
    header = json.loads(raw[:HEADER_BYTES])
    for name, value in (
        ("dtype", "O"),
        ("dtype", ">u2"),
        ("tokens", 2**62),
        ("tokens", 10**4000),
        ("vocab_size", "257"),
        ("text_bytes", 0),
        ("format", "other"),
    ):
        changed = json.dumps(header | {name: value}).encode()
        path.write_bytes(changed.ljust(HEADER_BYTES)[:HEADER_BYTES] + raw[HEADER_BYTES:])
        message = refusal(Shard, path)
        assert message.startswith(f"{path} is damaged") and len(message) < 400


def test_other_files_in_the_folder_are_left_alone_and_never_read(make):
    folder = prepare(make(TEXTS, max_tokens=1000))
    assert not list(folder.glob("*.tmp"))
    names = ("._train-00000.bin", "my-notes.bin", "train-x.bin", "val.bin", "train-00001.bin.tmp")
    others = [folder / name for name in names]
    for path in others:
        path.write_text("mine")
    assert Split(open_or_prepare(make(TEXTS, max_tokens=1000)), "train", 16).tokens == 1000
    assert open_or_prepare(make(TEXTS, max_tokens=2000)) == folder
    assert Split(folder, "train", 16).tokens == 2000
    assert all(path.read_text() == "mine" for path in others[:-1])


# --- the folder holds something else


@pytest.mark.parametrize("function", [prepare, open_or_prepare])
def test_a_folder_of_something_else_is_refused(make, tmp_path, function):
    """And the advice works: another folder, or the setting that it was made with."""
    folder = prepare(make(TEXTS))
    message = refusal(function, make(TEXTS, tokenizer="bpe-300"))
    assert str(folder) in message and "--tokenizer=bytes, not bpe-300" in message
    message = refusal(function, make(TEXTS, val_fraction=0.25))
    assert "--val_fraction=0.1, not 0.25: set --val_fraction=0.1" in message
    assert function(make(TEXTS, val_fraction=0.1)) == folder
    other = function(make(TEXTS, "other", val_fraction=0.25))
    assert documents_of(other, "val") == TEXTS[::4] and documents_of(folder, "val") == TEXTS[::10]
    (tmp_path / "other.txt").write_text("another<|endoftext|>text")
    assert str(folder) in refusal(function, settings_for(tmp_path / "other.txt", folder))


@pytest.mark.parametrize("change", ["same time", "json", "bpe"])
def test_a_run_does_not_begin_on_tokens_of_something_else(make, tmp_path, capsys, change):
    """It is refused, the advice works, and a run that began before goes on as it was."""
    name = "bpe-300" if change == "bpe" else "bytes"
    changed = tmp_path / "docs.jsonl"
    if change == "json":
        changed = tmp_path / "own.json"
        name = str(changed)
        byte_level("or").save(name)
    cfg = make(TEXTS, tokenizer=name)
    folder = open_or_prepare(cfg)
    before, time_before = files(folder), changed.stat().st_mtime_ns
    if change == "json":
        byte_level("en").save(name)
    elif change == "bpe":
        write_lines(changed, *[{"text": "zebra quiz " * 50}] * 3)
    else:
        changed.write_bytes(changed.read_bytes().replace(b"number", b"Nummer"))
        os.utime(changed, ns=(time_before, time_before))

    setting = f"tokenizer={name}" if change == "json" else f"dataset={cfg.dataset}"
    message = refusal(open_or_prepare, cfg)
    assert message.startswith(f"{setting} changed after {folder} was made: ")
    assert files(folder) == before
    (tmp_path / "run/checkpoints/step-2").mkdir(parents=True)
    assert open_or_prepare(cfg) == folder and files(folder) == before
    assert f"note: {setting} changed" in capsys.readouterr().err

    shutil.rmtree(tmp_path / "run")
    run_command(message)
    assert open_or_prepare(cfg) == folder
    fresh = replace(cfg, data_dir=str(tmp_path / "fresh"))
    assert files(folder) == files(prepare(fresh)) != before


def test_of_a_large_text_a_run_reads_sizes_and_times(make, monkeypatch):
    """A copy of it looks like a change; data.py then finds that all shards are right."""
    monkeypatch.setattr("text.recipe.HASH_BYTES", 0)
    cfg = make(TEXTS)
    folder = open_or_prepare(cfg)
    before = files(folder)
    os.utime(cfg.dataset, (1, 1))
    message = refusal(open_or_prepare, cfg)
    assert message.startswith("sizes or times of dataset=")
    run_command(message)
    assert open_or_prepare(cfg) == folder
    after = files(folder)
    assert after.pop("dataset.json") != before.pop("dataset.json") and after == before
    monkeypatch.setattr(sources, "content_hash", None)  # so that nothing can read it
    assert open_or_prepare(cfg) == folder


def test_prepared_tokens_need_no_text_and_may_be_old(make, tmp_path, capsys):
    """Older folders know names and sizes alone."""
    cfg = make(TEXTS)
    folder = open_or_prepare(cfg)
    older = read_summary(folder) | {"source": sources.sizes_hash(cfg.dataset)}
    (folder / "dataset.json").write_text(json.dumps(older))
    before = files(folder)
    capsys.readouterr()
    assert open_or_prepare(cfg) == prepare(cfg) == folder and files(folder) == before
    assert capsys.readouterr().err == ""
    cfg = make(TEXTS * 2)
    assert "changed after" in refusal(open_or_prepare, cfg)
    (tmp_path / "docs.jsonl").unlink()
    assert open_or_prepare(cfg) == folder and capsys.readouterr().err == ""
    cfg = make(TEXTS * 2)
    assert files(prepare(cfg)) == files(prepare(make(TEXTS * 2, "fresh"))) != before


@pytest.mark.parametrize("dataset, on_the_hub", [("allenai/c4:en", True), ("large", False)])
def test_a_large_data_set_is_not_prepared_by_a_training_run(tmp_path, dataset, on_the_hub):
    """The message holds the command that prepares it, and settings to begin with at once."""
    if not on_the_hub:
        with open(tmp_path / "large.txt", "wb") as large:
            large.truncate(SMALL_BYTES + 1)
        dataset = str(tmp_path / "large.txt")
    cfg = settings_for(dataset, tmp_path / "my data", val_fraction=0.1)
    message = refusal(open_or_prepare, cfg)
    assert not (tmp_path / "my data").exists()
    assert "--dataset=stdlib --tokenizer=bpe-4096" in message
    assert (f"--max_tokens={FIRST_SLICE}" in message) == on_the_hub
    assert FIRST_SLICE <= SMALL_TOKENS  # so a run makes it itself
    command = message.partition("python data.py ")[2]
    assert load(shlex.split(command), TrainConfig) == [cfg]


@pytest.mark.parametrize(
    "dataset, tokenizer, folder",
    [
        ("stdlib", "bytes", "data/stdlib-bytes"),
        ("allenai/c4:en", "gpt2", "data/allenai-c4-en-gpt2"),
        ("my/*.txt", "bpe-512", "data/my-.txt-bpe-512"),
    ],
)
def test_the_folders_name_tells_data_set_and_tokenizer(dataset, tokenizer, folder):
    assert Recipe(TrainConfig(dataset=dataset, tokenizer=tokenizer)).folder == Path(folder)


# --- batches

SEQ_LEN = 4
SIZES = (401, 8, 3, 1203, 90)  # tokens of the shards: 100 + 1 + 0 + 300 + 22 windows
N_WINDOWS = 423


def first_tokens():
    """The first token of each window in `split`."""
    tokens = []
    shard_start = 0
    for size in SIZES:
        n_windows = (size - 1) // SEQ_LEN
        tokens += [shard_start + i * SEQ_LEN for i in range(n_windows)]
        shard_start += size
    return tokens


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Shards whose tokens count 0, 1, 2, ... throughout: a window's first token identifies it."""
    folder = tmp_path_factory.mktemp("counting")
    ids = np.split(np.arange(sum(SIZES), dtype=np.uint16), np.cumsum(SIZES)[:-1])
    for number, part in enumerate(ids):
        shards.write_ids(folder / f"train-{number:05d}.bin", part, ABOUT | {"vocab_size": 5000})
    return Split(folder, "train", SEQ_LEN)


def test_windows_follow_each_other_and_stay_in_their_shard(split):
    starts = np.array(first_tokens())
    assert len(split) == len(starts) == N_WINDOWS
    rows = split.windows(np.arange(N_WINDOWS))
    assert rows.dtype == np.int64
    assert np.array_equal(rows, starts[:, None] + np.arange(SEQ_LEN + 1))


def test_every_window_once_an_epoch_and_another_order_in_the_next(split):
    """Batches of 16 do not divide 423: one holds the end of an epoch and the start of the next."""
    batches = [split.batch(seed=1, step=step, global_batch_size=16) for step in range(80)]
    stream = np.concatenate([rows[:, 0] for rows in batches])
    first_epoch = stream[:N_WINDOWS]
    second_epoch = stream[N_WINDOWS : 2 * N_WINDOWS]
    assert sorted(first_epoch) == sorted(second_epoch) == first_tokens()
    assert (first_epoch == second_epoch).mean() < 0.05
    assert (first_epoch == np.array(first_tokens())).mean() < 0.05


def test_any_number_of_ranks_sees_the_same_rows_in_the_same_order(split):
    """An epoch ends inside step 26. The order depends on the seed and nothing else."""
    again = Split(split.folder, "train", SEQ_LEN)
    for step, dp_size in itertools.product((0, 26, 10**9), (2, 8)):
        parts = [split.batch(1, step, 16, dp_rank, dp_size) for dp_rank in range(dp_size)]
        assert {len(rows) for rows in parts} == {16 // dp_size}
        assert np.array_equal(np.concatenate(parts), again.batch(1, step, 16))
        assert not np.array_equal(split.batch(2, step, 16), again.batch(1, step, 16))


def test_a_sequence_longer_than_the_data(make):
    folder = prepare(make(TEXTS))
    for name in ("train", "val"):
        longest = Shard(folder / f"{name}-00000.bin").header["tokens"]
        for max_seq_len in (longest, 100_000):  # a window has one token more
            message = refusal(Split, folder, name, max_seq_len)
            assert f"max_seq_len {max_seq_len} needs {max_seq_len + 1:,} tokens" in message
            assert f"has {longest:,}" in message
            assert ("another --data_dir" in message) == (name == "val")
        assert len(Split(folder, name, longest - 1)) == 1
    shards.write_ids(folder / "val-00001.bin", np.arange(20, dtype=np.uint16), ABOUT)
    assert f"the 2 val files in {folder} has {longest:,}" in refusal(Split, folder, "val", longest)


# --- the permutation


BOTH = pytest.mark.parametrize("permute", [permute, permute_slowly])


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 3000) | st.sampled_from([4**5, 4**5 + 1, 4**6 - 1, 2**16]),
    seed=st.integers(0, 2**40),
)
def test_a_permutation_of_any_number_is_one(permute, n, seed):
    orders = [permute(np.arange(n), n, seed, epoch) for epoch in (0, 7)]
    for order, epoch in zip(orders, (0, 7), strict=True):
        assert np.array_equal(np.sort(order), np.arange(n))
        half = np.arange(n // 2, n)  # on another rank
        assert np.array_equal(permute(half, n, seed, epoch), order[half])
    assert n < 20 or not np.array_equal(*orders)


def test_known_values():
    """Pinned: a change here reorders the data of every run that will be resumed."""
    first_8 = np.arange(8)
    epoch_0 = [856, 368, 409, 102, 229, 692, 177, 505]
    epoch_1 = [22, 127, 326, 119, 194, 285, 782, 27]
    assert permute(first_8, 1000, seed=1337, epoch=0).tolist() == epoch_0
    assert permute(first_8, 1000, seed=1337, epoch=1).tolist() == epoch_1
    far_apart = permute(np.array([0, 1, 10**12 - 1]), 10**12, seed=0, epoch=3)
    assert far_apart.tolist() == [891628714229, 543546693989, 29106836283]


@BOTH
def test_it_shuffles_as_well_as_chance(permute):
    """Batch means spread as those of random samples do, and neighbours are uncorrelated.

    The correlation of neighbours in a linear congruential generator is -0.42.
    """
    n = 2**17 + 333
    rows = 64  # of a batch
    order = permute(np.arange(n), n, seed=1337, epoch=1).astype(float)
    n_batches = n // rows  # 2,053, so the error of the spread is 1.6 %
    means = order[: n_batches * rows].reshape(n_batches, rows).mean(1)
    assert means.std() == pytest.approx(n / np.sqrt(12 * rows), rel=0.07)
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 4 / np.sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 4 / np.sqrt(n)


# --- prefetching


def test_prefetch_reads_the_next_step_meanwhile_and_no_more():
    begun = {step: threading.Event() for step in range(5)}

    def make(step):
        begun[step].set()
        return np.zeros(1)

    batches = prefetch(make, range(5), torch.device("cpu"))
    next(batches)
    assert begun[1].wait(PATIENCE) and not begun[2].is_set()
    batches.close()


def test_an_error_while_reading_surfaces_at_its_step():
    def make(step):
        if step == 2:
            raise UserError("the disk is gone")
        return np.zeros(1)

    seen = []
    with pytest.raises(UserError, match="the disk is gone"):
        for step, _ in prefetch(make, range(5), torch.device("cpu")):
            seen.append(step)
    assert seen == [0, 1]
