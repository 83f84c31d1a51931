"""text/stream.py: batches from an object store are those of the folder, through a bounded cache.

Against a real S3 server; where it says so a folder.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TORCHRUN, flags_for, launch, refusal, rooms_on_path, slowly, words_of
from launches import FLAGS, FOREVER, steps_of, wait_for

import data
import processes
from config import MPTConfig, TrainConfig
from lessons import finetuned
from program import RESUME_ME, StartAgain
from storage.object_store import open_store
from text import blocks, prepare, stream
from text.shards import fingerprint, is_shard, write_ids
from text.stream import StoredFolder

pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")

SEQ_LEN = 256
MODEL = MPTConfig(max_seq_len=SEQ_LEN, vocab_size=1000)


def make(folder: Path, n_shards: int, tokens: int) -> Path:
    """A prepared folder of random ids: shards of so many tokens, and one for validation."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    sizes = {f"train-{i:05d}.bin": tokens + 77 * i for i in range(n_shards)}
    for name, size in {**sizes, "val-00000.bin": 30_000}.items():
        about = {"documents": 1, "text_bytes": 4 * size, "vocab_size": 1000, "text_sha256": ""}
        write_ids(folder / name, draw.integers(0, 1000, size).astype(np.uint16), about)
    blocks.write_index(folder)
    summary = dict.fromkeys(("dataset", "tokenizer", "source"), "bytes")
    summary |= {"max_tokens": 0, "val_fraction": 0.1, "train_tokens": sum(sizes.values())}
    summary["fingerprint"] = fingerprint(folder)
    (folder / "dataset.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Six shards of 256 kB, and one for validation: 103 blocks."""
    return make(tmp_path_factory.mktemp("random") / "tokens", 6, 2**17)


def upload(folder: Path, url: str) -> None:
    """Copy the files of a prepared folder to a store."""
    there = open_store(url)
    for path in folder.iterdir():
        if path.suffix != ".lock":
            there.upload(path, path.name)


def place(url: str, folder: Path) -> StoredFolder:
    """What rank 0 finds at this address, where a copy of the folder lies."""
    return StoredFolder(url, fingerprint(folder))


def settings(cache: Path, **more) -> TrainConfig:
    usual = {"global_batch_size": 16, "eval_tokens": 5000, "data_cache_gb": 0.002}
    return TrainConfig(**(usual | {"data_cache": str(cache)} | more))


@contextlib.contextmanager
def opened(found: StoredFolder, cfg: TrainConfig, world, model=MODEL):
    """The data set in the store, as a rank sees it."""
    dataset = data.Dataset([found], model, cfg, world)
    try:
        yield dataset
    finally:
        if dataset.stream.fetcher:
            dataset.stream.close()


def alone():
    return processes.World(0, 1, 0, 1, torch.device("cpu"))


def compare(dataset, folder: Path, cfg: TrainConfig, world, steps, model=MODEL) -> None:
    """Batches and windows of the evaluation are those of the folder, bit for bit."""
    local = data.Dataset([folder], model)
    both = zip(dataset.batches(steps, cfg, world), local.batches(steps, cfg, world), strict=True)
    for (step, rows), (expected_step, expected) in both:
        assert step == expected_step and torch.equal(rows, expected)
    val, local_val = dataset.parts[0].val, local.parts[0].val
    evaluated = np.arange(data.n_evaluated(local_val, cfg.eval_tokens))
    assert np.array_equal(val.windows(evaluated), local_val.windows(evaluated))
    assert dataset.fingerprint == local.fingerprint
    assert dataset.epoch_tokens == local.epoch_tokens
    assert len(val) == len(local_val)


def compare_in_rank(world, found, folder, cfg, variables, steps):
    """The same on a rank of a pool. They leave together: the first one deletes the cache."""
    os.environ.update(variables)
    with opened(found, cfg, world) as dataset:
        compare(dataset, folder, cfg, world, steps)
        torch.distributed.barrier()


def shards_asked_for(store) -> list[str]:
    """The shards of which something was read, once for each request."""
    names = [path.partition("?")[0].rpartition("/")[2] for _, path in store.proxy.requests]
    return [name for name in names if is_shard(name)]


# --- Batches


@pytest.mark.parametrize("fits", [True, False])
def test_batches_from_a_store_are_those_of_the_folder(store, tokens, tmp_path, fits):
    """Of two ranks, some steps left out. What fits the cache is fetched once in all epochs."""
    upload(tokens, store.url)
    store.proxy.requests.clear()
    cfg = settings(tmp_path / "cache", data_cache_gb=0.002 if fits else 0.001)
    n_blocks = len(blocks.read_index(tokens / blocks.NAME))
    epoch = 6 * 2**17 // SEQ_LEN // 16
    steps = [0, 1, *range(9, 2 * epoch if fits else 40)]
    found = place(store.url, tokens)

    def read(rank):
        world = processes.World(rank, 2, rank, 2, torch.device("cpu"))
        dataset = data.Dataset([found], MODEL, cfg, world)
        compare(dataset, tokens, cfg, world, steps)
        return dataset.stream

    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(read, range(2))
    first.close()
    n_requests = len(shards_asked_for(store))
    assert n_requests <= n_blocks if fits else n_requests > n_blocks
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_the_ranks_of_a_node_fetch_once(ranks, store, tokens, tmp_path):
    """The same in processes."""
    upload(tokens, store.url)
    store.proxy.requests.clear()
    cfg = settings(tmp_path / "cache")
    arguments = (place(store.url, tokens), tokens, cfg, store.variables, range(150))
    ranks(2)(compare_in_rank, *arguments)
    assert 0 < len(shards_asked_for(store)) <= len(blocks.read_index(tokens / blocks.NAME))


def disk_use(folder: Path) -> int:
    """The bytes that the files of a folder take on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def memory_of(process: int) -> int:
    """The most memory of its own that a process has had, without mapped files: bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


@pytest.mark.slow
def test_more_data_than_the_cache_holds(store, store_port, monkeypatch, tmp_path):
    """Neither disk nor memory grow with the data, 20 MB through a cache of 2 MB."""
    folder = make(tmp_path / "tokens", 10, 10**6)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store_port}")  # without the proxy
    upload(folder, store.url)
    model = MPTConfig(max_seq_len=1024, vocab_size=1000)
    cfg = settings(tmp_path / "cache", global_batch_size=32)
    local = data.Dataset([folder], model)
    n_steps = len(local.train) // 32 + 1
    with opened(place(store.url, folder), cfg, alone(), model) as dataset:
        batches = dataset.batches(range(0, n_steps, 2), cfg, alone())
        disk, memory = [], []
        for step, rows in batches:
            expected = local.train.batch(cfg.seed, step, 32)
            assert np.array_equal(rows.numpy(), expected)
            if step % 40 == 0:
                disk.append(disk_use(tmp_path / "cache"))
                memory.append(memory_of(dataset.stream.fetcher.pid))
    assert max(disk) < 0.002 * 1e9 + 1e6  # the small files: where the blocks of each step are
    assert max(memory) < min(memory) + 30e6


# --- Damage


def flip(url: str, name: str, at: int) -> None:
    """Change one bit of an object."""
    content = bytearray(open_store(url).get(name))
    content[at] ^= 1
    open_store(url).put(name, bytes(content))


def test_a_block_damaged_on_the_way_is_fetched_again(store, tokens, tmp_path):
    upload(tokens, store.url)
    damaged = []

    def once(method, path):
        if "train-" in path and not damaged:
            damaged.append(path)
            return "corrupt"

    store.proxy.fault = once
    cfg = settings(tmp_path / "cache")
    with opened(place(store.url, tokens), cfg, alone()) as dataset:
        compare(dataset, tokens, cfg, alone(), range(20))
    assert damaged


@pytest.mark.slow
def test_an_outage_while_reading_is_waited_for(store, tokens, tmp_path, capfd):
    """Ten seconds of it, of which the client's own tries last two."""
    upload(tokens, store.url)
    cfg = settings(tmp_path / "cache")
    begin = []

    def down(method, path):
        if "train-" in path:
            begin.append(time.monotonic())
            return "503" if time.monotonic() < begin[0] + 10 else None

    store.proxy.fault = down
    with opened(place(store.url, tokens), cfg, alone()) as dataset:
        compare(dataset, tokens, cfg, alone(), range(20))
    assert time.monotonic() > begin[0] + 10
    out, err = capfd.readouterr()
    assert "Trying again" in err and "answers again" in out


CHANGES = {  # a change of the store, and what is said of the shard
    "a flipped bit": (lambda url: flip(url, "train-00001.bin", 200_000), "fetched twice"),
    "shorter": (lambda url: open_store(url).put("train-00001.bin", b"x" * 9999), "cannot be read"),
    "gone": (lambda url: open_store(url).delete("train-00001.bin"), "is gone"),
}


@pytest.mark.parametrize("change", ["a flipped bit", slowly("shorter"), "gone"])
def test_a_shard_that_is_broken_or_changed_is_named(tokens, tmp_path, change):
    """In a folder as the store."""
    url = f"file://{tmp_path}/store"
    upload(tokens, url)
    cfg = settings(tmp_path / "cache")
    damage, words = CHANGES[change]
    damage(url)
    with opened(place(url, tokens), cfg, alone()) as dataset, pytest.raises(StartAgain) as error:
        for _ in dataset.batches(range(100), cfg, alone()):
            pass
    assert f"{url}/train-00001.bin" in str(error.value) and "\n" not in str(error.value)
    assert words in str(error.value)


# --- Runs

RUN = [*FLAGS, "--run_dir=run", "--save_interval=5", "--data_cache=cache", "--max_seq_len=32"]


@pytest.fixture
def stored(store, tiny_data):
    """The flags of a run whose data set is in the store."""
    upload(tiny_data, store.url)
    return [*RUN, *flags_for(tiny_data), f"--data_dir={store.url}"]


def start(folder: Path, *flags) -> subprocess.Popen:
    command = [sys.executable, *words_of("fsdp_train.py"), *flags]
    options = {"cwd": folder, "env": rooms_on_path(), "start_new_session": True}
    with open(folder / "log", "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, **options)


def fetchers(cache: Path) -> list[int]:
    """The processes that fetch into this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = b"text.stream" in (path / "cmdline").read_bytes()
            if is_ours and any(str(cache) in os.readlink(fd) for fd in (path / "fd").iterdir()):
                found.append(int(path.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["the rank", "everything"])
def test_a_killed_run_goes_on_and_leaves_no_cache(stored, tiny_data, tmp_path, killed):
    """After the worse of both, the losses are those of an undisturbed run that reads the folder."""
    flags = [*stored, *FOREVER]
    cache = tmp_path / "cache"
    run = start(tmp_path, *flags)
    try:
        wait_for(lambda: list(tmp_path.glob("run/checkpoints/step-5*")))
        (fetcher,) = fetchers(cache)
        if killed == "everything":
            os.kill(fetcher, signal.SIGSTOP)  # it would delete the cache
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        if killed == "everything":
            assert list(cache.glob("*/cache"))
            os.kill(fetcher, signal.SIGKILL)
        else:
            wait_for(lambda: not list(cache.iterdir()), 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    wait_for(lambda: not fetchers(cache), 30)
    if killed == "the rank":
        return
    last = max(steps_of(tmp_path / "run"))
    more = ["--schedule=constant", f"--max_steps={last + 20}"]
    done = launch([], tmp_path, [*stored, *more])
    assert done.returncode == 0, done.stderr
    assert "was trained from s3://" in refusal(finetuned.text_of, str(tmp_path / "run"), 32)
    wait_for(lambda: not list(cache.iterdir()), 30)

    (tmp_path / "undisturbed").mkdir()
    plain = launch([], tmp_path / "undisturbed", [*RUN, *flags_for(tiny_data), *more])
    assert plain.returncode == 0, plain.stderr
    found, expected = steps_of(tmp_path / "run"), steps_of(tmp_path / "undisturbed/run")
    assert {step: row["loss"] for step, row in found.items()} == {
        step: row["loss"] for step, row in expected.items()
    }


@pytest.mark.slow
def test_all_ranks_end_with_75_and_one_names_the_shard(store, stored, tmp_path):
    """The objects change under a run that has begun."""
    flip(store.url, "train-00000.bin", 50_000)
    done = launch([*TORCHRUN, "2"], tmp_path, [*stored, "--max_steps=100"])
    (line,) = [line for line in done.stderr.splitlines() if "fetched twice" in line]
    assert f"{store.url}/train-00000.bin is damaged or has changed" in line
    assert f"exitcode  : {RESUME_ME}" in done.stderr
    wait_for(lambda: not list((tmp_path / "cache").iterdir()), 30)


# --- One line for each error


def cfg_for(tiny_data, **more) -> TrainConfig:
    made = json.loads((tiny_data / "dataset.json").read_text())
    same = {name: made[name] for name in ("dataset", "tokenizer", "val_fraction")}
    return TrainConfig(**(same | more))


def test_what_rank_0_refuses(store, tiny_data, tmp_path, monkeypatch):
    """Before anything starts."""

    def message(url, **more):
        return refusal(prepare.open_or_prepare, cfg_for(tiny_data, data_dir=url, **more))

    upload(tiny_data, store.url)
    assert "expected s3://bucket/path" in message("ftp://bucket/tokens")
    assert "no such bucket" in message("s3://other-bucket/tokens")
    nothing = message(f"{store.url}/nothing")
    assert "copy its files there: python data.py" in nothing and "--data_dir=data/tokens" in nothing
    assert f"{store.url} was made with --val_fraction=0.1" in message(store.url, val_fraction=0.2)
    cfg = cfg_for(tiny_data, data_dir=store.url)
    assert "copy its files there: python data.py" in refusal(prepare.prepare, cfg)
    open_store(store.url).put("dataset.json", b"{")
    assert f"{store.url}/dataset.json is damaged" in message(store.url)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "wrong secret key: set AWS_SECRET_ACCESS_KEY" in message(store.url)


def test_what_a_node_refuses(tokens, tmp_path):
    """In a folder as the store."""
    url = f"file://{tmp_path}/store"

    def message(**more):
        cfg = settings(**({"cache": tmp_path / "cache", "data_cache_gb": 0.001} | more))
        return refusal(data.Dataset, [place(url, tokens)], MODEL, cfg, alone())

    upload(tokens, url)
    too_small = message(global_batch_size=64)
    assert "--data_cache_gb=" in too_small
    enough = float(re.search(r"--data_cache_gb=([\d.]+)", too_small)[1])
    cfg = settings(tmp_path / "cache", global_batch_size=64, data_cache_gb=enough)
    with opened(place(url, tokens), cfg, alone()) as dataset:
        compare(dataset, tokens, cfg, alone(), range(30))

    (tmp_path / "file").touch()
    assert "set another --data_cache" in message(cache=tmp_path / "file")
    flip(url, blocks.NAME, 2000)
    assert f"python -m text.blocks {url}" in message()
    open_store(url).delete(blocks.NAME)
    assert f"has no blocks.crc32: python -m text.blocks {url}" in message()


def test_a_disk_without_room_for_the_cache(disk, tokens, tmp_path):
    url = f"file://{tmp_path}/store"
    folder = make(tmp_path / "tokens", 2, 7_000_000)  # 28 MB
    upload(folder, url)
    cfg = settings(disk, data_cache_gb=1.0)
    line = refusal(data.Dataset, [place(url, folder)], MODEL, cfg, alone())
    assert f"{disk} on " in line and "lower --data_cache_gb" in line


# --- blocks.crc32


def test_preparing_writes_the_checksums_and_an_older_folder_gets_them(tiny_data, tmp_path):
    written = (tiny_data / blocks.NAME).read_bytes()
    older = tmp_path / "older"
    shutil.copytree(tiny_data, older)
    (older / blocks.NAME).unlink()
    data.Dataset([older], MPTConfig(max_seq_len=32, vocab_size=260))  # a folder needs none
    url = f"file://{tmp_path}/store"
    upload(older, url)
    blocks.main([str(older)])
    assert (older / blocks.NAME).read_bytes() == written
    blocks.main([url])
    assert open_store(url).get(blocks.NAME) == written


def test_a_store_is_checked(tokens, tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    upload(tokens, url)
    stream.main([url])
    assert capsys.readouterr().out.count("intact") == 7
    flip(url, "train-00002.bin", 100_000)
    with pytest.raises(StartAgain, match="train-00002.bin is damaged"):
        stream.main([url])

    # Checksums of a folder that was prepared again.
    (tmp_path / blocks.NAME).write_bytes((tokens / blocks.NAME).read_bytes())
    line = refusal(blocks.check_index, tmp_path / blocks.NAME, "s3://b/tokens", "0123")
    assert "of other shards than dataset.json" in line
