"""Training from an object store: --data_dir=s3://bucket/tokens, also gs://, az:// and file:///.

The store holds the files of a folder that data.py has made. Before a run begins, one rank of each
node copies them to its disk. From then on they are a folder like any other:

    DATA_CACHE/FINGERPRINT/    dataset.json  tokenizer.json  train-00000.bin ...  val-00000.bin ...

A shard gets its name there once its hash is right. So what is there was checked, a copy that was
interrupted goes on, and a later start copies only what is missing or damaged. Runs that start
together copy once: one holds copy.lock, the others wait. The copy stays for the next runs.

Run `python -m text.fetch s3://bucket/tokens /scratch/tokens` to copy before a run begins.
"""

import functools
import os
import platform
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

import program
from program import StartAgain, UserError, require
from storage import files
from storage.object_store import Store, StoreError, open_store
from text.shards import HASH_BYTES, SUMMARY, Shard, fingerprint, is_shard, shard_files

STREAMS = 8  # shards that are copied at a time
TRIES = 35  # of a request while the store is down: for ten minutes


def read_summary(store: Store) -> dict | None:
    """dataset.json of a data set in a store, or None if there is none. UserError if damaged."""
    try:
        content = store.get("dataset.json")
    except FileNotFoundError:
        return None
    where = f"{store.url}/dataset.json"
    return files.parse_json(content, where, dict, SUMMARY, "copy it there again")


def folder_of(summary: dict, data_cache: str) -> Path:
    """Where the copy of a data set lies, on each node. summary: its dataset.json."""
    cache = data_cache or f"{tempfile.gettempdir()}/mpt-tokens-{os.getuid()}"
    return files.member(Path(cache).absolute(), summary["fingerprint"], "dataset.json")


def copy(url: str, folder: Path) -> None:
    """Copy what is missing of a data set to `folder`, whose name is its fingerprint.

    UserError if the disk cannot hold it, or the store holds something else; StartAgain if the store
    does not answer for ten minutes.
    """
    cache = f"{folder.parent} on {platform.node()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with files.locked(folder / "copy.lock", f"{folder} is being copied") as is_alone:
            fix = "set --data_cache to a folder on a disk of the node"
            require(is_alone, f"{cache} is on a file system without locks: {fix}")
            copy_what_is_missing(open_store(url, TRIES), folder)
    except StoreError as error:
        if error.passes:
            raise StartAgain(f"{error}. What was copied stays: start again") from error
        raise
    except OSError as error:
        fix = "set another --data_cache"
        raise UserError(f"{cache} cannot hold the tokens ({error.strerror}): {fix}") from error


def copy_what_is_missing(store: Store, folder: Path) -> None:
    """Copy shards that are not there, or are damaged, and the small files."""
    there = store.sizes()
    sizes = {name: size for name, size in sorted(there.items()) if is_shard(name)}
    is_small = sum(sizes.values()) <= HASH_BYTES
    missing = {
        name: size for name, size in sizes.items() if not is_sound(folder / name, size, is_small)
    }
    for path in shard_files(folder):
        if path.name not in sizes:
            path.unlink()  # it has gone from the store
    if missing:
        copy_shards(store, folder, missing)
    require(
        fingerprint(folder) == folder.name,
        f"a shard is missing in {store.url}, or belongs to another data set than its dataset.json: "
        f"copy the folder there again, and delete {folder}",
    )
    for name in ("tokenizer.json", "dataset.json"):
        if name in there:
            files.write_atomically(folder / name, store.get(name))


def copy_shards(store: Store, folder: Path, sizes: dict[str, int]) -> None:
    """Copy these shards, several at a time. sizes: name -> bytes."""
    total = sum(sizes.values())
    there = sum(path.stat().st_size for path in folder.glob("*.part"))  # of an interrupted copy
    where = f"{folder} on {platform.node()}"
    require(
        total - there < shutil.disk_usage(folder).free,
        f"{where} has no room for {total / 1e9:.3g} GB of tokens: "
        "set --data_cache to a folder on another disk",
    )
    print(f"copying {total / 1e9:.3g} GB of tokens from {store.url} to {where}", flush=True)
    style = {"unit": "B", "unit_scale": True, "delay": 2}  # drawn if it takes 2 seconds
    with tqdm(desc="copied", total=total, **style) as bar, ThreadPoolExecutor(STREAMS) as pool:
        copy_one = functools.partial(copy_shard, store, folder)
        try:
            for n_bytes in pool.map(copy_one, sizes, sizes.values()):
                bar.update(n_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def copy_shard(store: Store, folder: Path, name: str, size: int) -> int:
    """Copy a shard; once more if it is damaged. Returns its bytes."""
    new = folder / f"{name}.new"
    for _ in range(2):
        try:
            store.download(name, new, size)  # goes on with what an earlier start has left
        except FileNotFoundError as error:
            raise UserError(f"{store.url}/{name} is gone: copy it there again") from error
        if is_sound(new, size):
            os.replace(new, folder / name)
            return size
    raise UserError(
        f"{store.url}/{name} is damaged (fetched twice): "
        "copy it there again from the folder that data.py made"
    )


def is_sound(path: Path, size: int, check_hash: bool = True) -> bool:
    """Is a shard of so many bytes there, as it was written?"""
    try:
        if os.path.getsize(path) != size:
            return False
        shard = Shard(path)
        if check_hash:
            shard.check_hash()
    except (UserError, OSError):
        return False
    return True


def main(argv) -> None:
    """Copy a data set from a store, and print its folder: give the parent as --data_cache."""
    url, data_cache = program.arguments(argv, "s3://BUCKET/FOLDER DATA_CACHE")
    summary = read_summary(open_store(url))
    require(summary, f"{url} has no dataset.json: copy a folder there that data.py has made")
    folder = folder_of(summary, data_cache)
    copy(url, folder)
    print(folder)


if __name__ == "__main__":
    program.run(main)
