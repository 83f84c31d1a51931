"""text/fetch.py: a data set in an object store is copied to each node, whole, checked and once.

Against a real S3 server; where it says so a folder.
"""

import dataclasses
import functools
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import TORCHRUN, flags_for, launch, refusal
from launches import FLAGS, steps_of, train_here

import data
from config import MPTConfig, TrainConfig
from lessons import finetuned
from lifecycle.beginning import prepare_data
from program import RESUME_ME, StartAgain, UserError
from storage import object_store
from storage.object_store import open_store
from text import fetch, prepare
from text.shards import fingerprint, is_shard, shard_files, write_ids

pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")


def make(folder: Path, n_shards: int, tokens: int) -> Path:
    """A prepared folder of random ids: shards of so many tokens, and one for validation."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    sizes = {f"train-{i:05d}.bin": tokens + 77 * i for i in range(n_shards)}
    for name, size in {**sizes, "val-00000.bin": 30_000}.items():
        about = {"documents": 1, "text_bytes": 4 * size, "vocab_size": 1000, "text_sha256": ""}
        write_ids(folder / name, draw.integers(0, 1000, size).astype(np.uint16), about)
    (folder / "blocks.crc32").write_bytes(b"of an older version")
    summary = dict.fromkeys(("dataset", "tokenizer", "source"), "bytes")
    summary |= {"max_tokens": 0, "val_fraction": 0.1, "train_tokens": sum(sizes.values())}
    summary["fingerprint"] = fingerprint(folder)
    (folder / "dataset.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """Six shards of 256 kB, and one for validation."""
    return make(tmp_path_factory.mktemp("random") / "tokens", 6, 2**17)


def upload(folder: Path, url: str) -> None:
    """Copy the files of a prepared folder to a store."""
    there = open_store(url)
    for path in folder.iterdir():
        if path.suffix != ".lock":
            there.upload(path, path.name)


def copy_of(folder: Path, cache: Path) -> Path:
    """Where the copy of a prepared folder belongs."""
    return cache / fingerprint(folder)


def is_like(copy: Path, folder: Path) -> bool:
    """Does a copy hold what is read of the folder, and no more?"""
    names = {path.name for path in [*shard_files(folder), folder / "dataset.json"]}
    found = {path.name for path in copy.iterdir()} - {"copy.lock"}
    same = all((copy / name).read_bytes() == (folder / name).read_bytes() for name in names)
    return found == names and same


def shards_asked_for(store) -> list[str]:
    """The shards of which something was read, once for each request, sorted."""
    names = [path.partition("?")[0].rpartition("/")[2] for _, path in store.proxy.requests]
    return sorted(name for name in names if is_shard(name))


# --- Copies


def test_runs_of_a_node_copy_once_and_later_ones_what_is_damaged(store, tokens, tmp_path):
    upload(tokens, store.url)
    store.proxy.requests.clear()
    copy, names = copy_of(tokens, tmp_path), [path.name for path in shard_files(tokens)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: fetch.copy(store.url, copy), range(3)))
    assert shards_asked_for(store) == names and is_like(copy, tokens)

    store.proxy.requests.clear()
    flip(copy / names[1])
    os.truncate(copy / names[2], 9999)
    (copy / names[3]).unlink()
    (copy / names[4]).unlink()
    (copy / f"{names[4]}.new.part").write_bytes((tokens / names[4]).read_bytes()[:5000])
    fetch.copy(store.url, copy)
    assert shards_asked_for(store) == names[1:5] and is_like(copy, tokens)


def flip(path: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[200_000] ^= 1
    path.write_bytes(content)


def test_damage_on_the_way_and_a_refusal_cost_one_shard(store, tokens, tmp_path):
    upload(tokens, store.url)
    copy = copy_of(tokens, tmp_path)
    damaged = []

    def fault(method, path):
        if "train-00003" in path:
            return 403, "AccessDenied", "no"
        if "train-00001" in path and not damaged:
            damaged.append(path)
            return "corrupt"

    store.proxy.fault = fault
    assert "lack permission" in refusal(fetch.copy, store.url, copy)
    assert damaged and (copy / "train-00001.bin").exists()
    store.proxy.fault = lambda method, path: None
    store.proxy.requests.clear()
    fetch.copy(store.url, copy)
    assert set(shards_asked_for(store)) == {"train-00003.bin"} and is_like(copy, tokens)


@pytest.mark.slow
def test_an_outage_while_copying_is_waited_for(store, tokens, tmp_path, capfd):
    """Five seconds of it, of which the client's own tries last two."""
    upload(tokens, store.url)
    begin = []

    def down(method, path):
        if "train-" in path:
            begin.append(time.monotonic())
            return "503" if time.monotonic() < begin[0] + 5 else None

    store.proxy.fault = down
    fetch.copy(store.url, copy_of(tokens, tmp_path))
    assert time.monotonic() > begin[0] + 5 and is_like(copy_of(tokens, tmp_path), tokens)
    out, err = capfd.readouterr()
    assert "Trying again" in err and "answers again" in out


def test_after_a_longer_outage_the_same_command_goes_on(store, tokens, tmp_path, monkeypatch):
    upload(tokens, store.url)
    monkeypatch.setattr(fetch, "TRIES", 2)
    monkeypatch.setattr(object_store, "RETRIES", 0)
    store.proxy.fault = lambda method, path: "503" if "train-" in path else None
    with pytest.raises(StartAgain) as error:
        fetch.copy(store.url, copy_of(tokens, tmp_path))
    assert "fewer requests" in str(error.value) and error.value.status == RESUME_ME


CHANGES = {  # a change of the store, and what is said of it
    "a flipped bit": (
        lambda folder: flip(folder / "train-00001.bin"),
        "train-00001.bin is damaged (fetched twice)",
    ),
    "gone": (lambda folder: (folder / "train-00001.bin").unlink(), "a shard is missing in file://"),
    "of other tokens": (
        lambda folder: shutil.copy(folder / "train-00001.bin", folder / "val-00000.bin"),
        "or belongs to another data set",
    ),
    "one too many": (
        lambda folder: shutil.copy(folder / "train-00001.bin", folder / "train-00006.bin"),
        "or belongs to another data set",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong_in_the_store_is_said(tokens, tmp_path, change):
    """In a folder as the store."""
    url = f"file://{tmp_path}/store"
    upload(tokens, url)
    damage, words = CHANGES[change]
    damage(tmp_path / "store")
    message = refusal(fetch.copy, url, copy_of(tokens, tmp_path))
    assert words in message and "copy" in message and url in message
    assert not (copy_of(tokens, tmp_path) / "dataset.json").exists()

    (tmp_path / "store/train-00006.bin").unlink(missing_ok=True)
    upload(tokens, url)
    fetch.copy(url, copy_of(tokens, tmp_path))
    assert is_like(copy_of(tokens, tmp_path), tokens)


def test_a_disk_that_cannot_hold_the_copy(disk, tmp_path):
    url = f"file://{tmp_path}/store"
    folder = make(tmp_path / "tokens", 2, 7_000_000)  # 28 MB
    upload(folder, url)
    message = refusal(fetch.copy, url, copy_of(folder, disk))
    assert str(disk) in message and "has no room for 0.0281 GB" in message
    (tmp_path / "file").touch()
    message = refusal(fetch.copy, url, copy_of(folder, tmp_path / "file"))
    assert "cannot hold the tokens (Not a directory): set another --data_cache" in message


def test_a_copy_is_made_before_a_run(tokens, tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    upload(tokens, url)
    fetch.main([url, str(tmp_path / "cache")])
    copy = copy_of(tokens, tmp_path / "cache")
    assert capsys.readouterr().out.splitlines()[-1] == str(copy) and is_like(copy, tokens)
    assert "has no dataset.json" in refusal(fetch.main, [f"{url}/nothing", str(tmp_path)])


# --- Runs

RUN = [*FLAGS, "--max_seq_len=32", "--schedule=constant"]


def with_variables(variables: dict, rank: int):
    return mock.patch.dict(os.environ, variables)


@pytest.mark.slow
def test_a_run_reads_from_the_store_what_it_reads_from_the_folder(
    ranks, store, tiny_data, tmp_path
):
    """On two ranks, which copy once; a run goes on from the store. The losses are the same."""
    upload(tiny_data, store.url)
    store.proxy.requests.clear()
    prepared = functools.partial(with_variables, store.variables)
    runs = {"store": [(tiny_data, 3), (store.url, 6)], "folder": [(tiny_data, 6)]}
    for name, parts in runs.items():
        for place, n_steps in parts:
            flags = [*RUN, *flags_for(tiny_data), f"--data_dir={place}", f"--max_steps={n_steps}"]
            flags += [f"--data_cache={tmp_path}/cache", f"--run_dir={tmp_path}/{name}"]
            for status, message, _ in ranks(2)(train_here, flags, prepared):
                assert status == 0, message
    assert shards_asked_for(store) == [path.name for path in shard_files(tiny_data)]
    losses = [
        {step: row["loss"] for step, row in steps_of(tmp_path / name).items()} for name in runs
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert "was trained from s3://" in refusal(finetuned.text_of, str(tmp_path / "store"), 32)


@pytest.mark.slow
def test_all_ranks_end_with_the_line_of_one(store, tiny_data, tmp_path):
    """As users start it."""
    upload(tiny_data, store.url)
    flags = [*RUN, *flags_for(tiny_data), f"--data_dir={store.url}", "--run_dir=run"]
    flags += ["--data_cache=cache", "--max_steps=4"]
    name = "train-00000.bin"
    content = bytearray((tiny_data / name).read_bytes())
    content[5000] ^= 1
    open_store(store.url).put(name, bytes(content))
    done = launch([*TORCHRUN, "2"], tmp_path, flags)
    (line,) = [line for line in done.stderr.splitlines() if "fetched twice" in line]
    assert f"{store.url}/{name} is damaged" in line
    assert "exitcode  : 2" in done.stderr


def cfg_for(tiny_data, **more) -> TrainConfig:
    made = json.loads((tiny_data / "dataset.json").read_text())
    same = {name: made[name] for name in ("dataset", "tokenizer", "val_fraction")}
    return TrainConfig(**(same | more))


def copy_on_another_node(world, cfg):
    """`prepare_data` where rank 1 alone copies, for its node. Returns the error."""
    world = dataclasses.replace(world, local_rank=1 - world.global_rank)
    try:
        prepare_data(MPTConfig(), cfg, world)
    except UserError as error:
        return str(error), error.on_all_ranks


def test_a_node_that_cannot_copy_ends_all_ranks(ranks, tiny_data, tmp_path):
    """In a folder as the store."""
    url = f"file://{tmp_path}/store"
    upload(tiny_data, url)
    cfg = cfg_for(tiny_data, data_dir=url, data_cache=str(tmp_path / "file"))
    (tmp_path / "file").touch()
    found = ranks(2)(copy_on_another_node, cfg)
    assert found[0] == found[1] and "Not a directory" in found[0][0] and found[0][1]
    cfg = dataclasses.replace(cfg, data_cache=str(tmp_path))
    assert ranks(2)(copy_on_another_node, cfg) == [None, None]
    assert is_like(copy_of(tiny_data, tmp_path), tiny_data)


def test_what_rank_0_refuses(store, tiny_data, tmp_path, monkeypatch):
    """Before anything is copied."""

    def message(url, **more):
        return refusal(data.open_or_prepare, cfg_for(tiny_data, data_dir=url, **more))

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
