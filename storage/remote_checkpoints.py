"""Checkpoints in an object store: complete or not there, as on a disk, though nothing is renamed.

    checkpoints/step-600.1a2b3c4d/__0_0.distcp ...   the files of step-600; 1a2b3c4d is a hash of
    checkpoints/step-600.1a2b3c4d/checksums.json     this file, which is written last: published

Thanks to the hash, partial uploads of two runs never mix, a damaged list is noticed, and an upload
that was interrupted goes on: a file that is there in full is not sent again. A checkpoint is
deleted in the other order, so one that is half deleted does not count as published.

This file knows nothing of ranks: lifecycle/remote.py says which of them copies which files.
"""

import contextlib
import hashlib
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from program import UserError
from storage import checkpoint_files, files
from storage.object_store import DamagedObject, Store

LIST = "checksums.json"
NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})\.[0-9a-f]{8}")


@dataclass
class Published:
    """A complete checkpoint in a store."""

    name: str  # step-600.1a2b3c4d
    content: bytes  # of checksums.json
    checksums: dict  # file name -> (bytes, crc32)

    @property
    def step(self) -> int:
        return step_of(self.name)

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(size for size, _ in self.checksums.values())


def step_of(name: str) -> int:
    """step-600.1a2b3c4d -> 600"""
    return int(name.removeprefix("step-").partition(".")[0])


def digest(content: bytes) -> str:
    """The hash that names a checkpoint, of its checksums.json."""
    return hashlib.sha256(content).hexdigest()[:8]


def folder_of(path: Path) -> str:
    """Where a local checkpoint is in a store. OSError if it is not there any more."""
    return f"checkpoints/{path.name}.{digest((path / LIST).read_bytes())}"


# --------------------------------------------------------------------------------------------------
# Uploading


def upload(store: Store, path: Path, names) -> None:
    """Upload these files of a local checkpoint, unless they are there.

    UserError if one is damaged here, OSError if it is gone, StoreError if the store fails.
    """
    checksums = checkpoint_files.read_checksums(path) or {}
    folder = folder_of(path)
    present = store.sizes(folder)
    for name in names:
        if present.get(name) != checksums[name][0]:  # an object is whole or absent
            store.upload(path / name, f"{folder}/{name}", checksums[name])


def missing(store: Store, path: Path) -> list[str]:
    """The files of a local checkpoint that the store lacks."""
    checksums = checkpoint_files.read_checksums(path) or {}
    present = store.sizes(folder_of(path))
    return [name for name, (size, _) in checksums.items() if present.get(name) != size]


def publish(store: Store, path: Path) -> None:
    """Make a checkpoint complete, all of whose other files are there."""
    where = f"{folder_of(path)}/{LIST}"
    store.put(where, (path / LIST).read_bytes())
    store.delete(f"{where}.replaced")  # if it was withdrawn before


def is_published(store: Store, path: Path) -> bool:
    """Whether a local checkpoint is complete in the store."""
    return LIST in store.sizes(folder_of(path))


# --------------------------------------------------------------------------------------------------
# What is there


def contents(store: Store) -> dict[str, dict[str, int]]:
    """The checkpoints, complete or not, newest first: name -> {file: bytes}."""
    found = {}
    for path, size in store.sizes("checkpoints").items():
        name, _, file = path.partition("/")
        if NAME.fullmatch(name):
            found.setdefault(name, {})[file] = size
    return {name: found[name] for name in sorted(found, key=step_of, reverse=True)}


def published(store: Store) -> list[Published]:
    """The complete checkpoints, newest first."""
    found = [read(store, name, sizes) for name, sizes in contents(store).items()]
    return list(filter(None, found))


def read(store: Store, name: str, sizes: dict[str, int]) -> Published | None:
    """A checkpoint in a store; None if it is not complete, or its list is damaged."""
    content = get_list(store, name) if LIST in sizes else None
    checksums = content and checkpoint_files.parse_checksums(content, Path(name))
    if checkpoint_files.incomplete(checksums):
        return None
    is_whole = all(sizes.get(name) == size for name, (size, _) in checksums.items())
    return Published(name, content, checksums) if is_whole else None


def get_list(store: Store, name: str) -> bytes | None:
    """checksums.json of a checkpoint; None if its hash is not that in the name, or it is gone."""
    where = f"checkpoints/{name}/{LIST}"
    with contextlib.suppress(FileNotFoundError):  # it is being deleted
        return get_right(store, where, lambda content: digest(content) == name[-8:])


def get_right(store: Store, where: str, is_right) -> bytes | None:
    """The content of an object, which may be damaged on the way; None if it is damaged there."""
    contents = (store.get(where) for _ in range(3))
    return next(filter(is_right, contents), None)


def meta_of(store: Store, found: Published) -> dict:
    """The content of meta.json. DamagedObject or FileNotFoundError if it is damaged or gone."""
    where = f"checkpoints/{found.name}/meta.json"
    listed = found.checksums["meta.json"]
    content = get_right(store, where, lambda content: (len(content), zlib.crc32(content)) == listed)
    if content is None:
        raise DamagedObject(f"{store.url}/{where} is damaged")
    return files.parse_json(content, f"{store.url}/{where}")


# --------------------------------------------------------------------------------------------------
# Downloading


def download(store: Store, found: Published, names, folder: Path) -> None:
    """Download these files into a folder, checked. An earlier download is continued.

    StoreError or FileNotFoundError if one is damaged or gone, OSError if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def download_one(name):
        size, crc = found.checksums[name]
        target = files.member(folder, name, LIST)
        if not target.exists():  # it has its name once it is right
            store.download(f"checkpoints/{found.name}/{name}", target, size, crc)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(download_one, names))  # raises what one of them raised


def place(found: Published, folder: Path, path: Path) -> None:
    """Give downloaded files the name of a checkpoint. UserError if this machine lacks some."""
    for name, (size, _) in found.checksums.items():
        there = (folder / name).exists() and os.path.getsize(folder / name) == size
        if not there:
            raise UserError(f"{folder} lacks {name}: all nodes must see the run folder")
    files.write_atomically(folder / LIST, found.content)
    folder.rename(path)


# --------------------------------------------------------------------------------------------------
# Deleting


def remove(store: Store, name: str) -> None:
    """Delete a checkpoint, its list first."""
    folder = f"checkpoints/{name}"
    for file in sorted(store.sizes(folder), key=lambda file: file != LIST):
        store.delete(f"{folder}/{file}")


def prune(store: Store, newest: str, keep_last: int, keep_every: int) -> None:
    """Delete what a run does not keep: as on its disk, and half uploads from before `newest`."""
    steps = set()  # of the complete ones so far, newest first
    for name, files_there in contents(store).items():
        step = step_of(name)
        if f"{LIST}.replaced" in files_there and LIST not in files_there:
            continue
        if LIST in files_there:
            steps.add(step)
            for_good = step == 0 or (keep_every and step % keep_every == 0)
            is_kept = for_good or len(steps) <= keep_last
        else:
            is_kept = step > step_of(newest)
        if not is_kept:
            remove(store, name)


def withdraw_newer(store: Store, step: int) -> None:
    """Unpublish the checkpoints after a step, with which a run did not go on. They stay there."""
    for name, files_there in contents(store).items():
        if step_of(name) > step and LIST in files_there:
            where = f"checkpoints/{name}/{LIST}"
            store.put(f"{where}.replaced", store.get(where))
            store.delete(where)
