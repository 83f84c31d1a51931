"""Checkpoints in an object store: complete or not there, as on a disk, though nothing is renamed.

    checkpoints/step-600.1a2b3c4d/__0_0.distcp ...   the files of step-600; 1a2b3c4d is a hash of
    checkpoints/step-600.1a2b3c4d/checksums.json     this file, which is written last: published

By the hash, the half uploads of two runs never mix, a damaged list is noticed, and an upload that
was interrupted goes on: a file that is there in its size needs not be sent again. A checkpoint is
deleted in the other order, so what is half deleted is not published.

This file knows nothing of ranks: lifecycle/remote.py says which of them copies which files.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from program import UserError
from storage import checkpoint_files, files
from storage.object_store import Store

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
    store.put(f"{folder_of(path)}/{LIST}", (path / LIST).read_bytes())


# --------------------------------------------------------------------------------------------------
# What is there


def names_in(store: Store) -> list[str]:
    """The folders of checkpoints, complete or not, newest first."""
    names = [name for name in store.folders("checkpoints") if NAME.fullmatch(name)]
    return sorted(names, key=step_of, reverse=True)


def published(store: Store) -> list[Published]:
    """The complete checkpoints, newest first."""
    found = [read(store, name) for name in names_in(store)]
    return list(filter(None, found))


def read(store: Store, name: str) -> Published | None:
    """A checkpoint in a store; None if it is not complete, or its list is damaged."""
    folder = f"checkpoints/{name}"
    sizes = store.sizes(folder)
    if LIST not in sizes:
        return None
    for _ in range(3):  # it may have been damaged on the way
        try:
            content = store.get(f"{folder}/{LIST}")
        except FileNotFoundError:  # being deleted
            return None
        if digest(content) == name[-8:]:
            break
    else:
        return None
    checksums = checkpoint_files.parse_checksums(content, Path(folder))
    if checkpoint_files.incomplete(checksums):
        return None
    is_whole = all(sizes.get(name) == size for name, (size, _) in checksums.items())
    return Published(name, content, checksums) if is_whole else None


def meta_of(store: Store, found: Published) -> dict:
    """The content of meta.json. UserError if it is damaged, FileNotFoundError if it is gone."""
    where = f"checkpoints/{found.name}/meta.json"
    return files.parse_json(store.get(where), f"{store.url}/{where}")


# --------------------------------------------------------------------------------------------------
# Downloading


def download(store: Store, found: Published, names, folder: Path) -> None:
    """Download these files into a folder, checked. An earlier download is continued.

    StoreError or FileNotFoundError if one is damaged or gone, OSError if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        size, crc = found.checksums[name]
        target = files.member(folder, name, LIST)
        if not target.exists():  # it has its name once it is right
            store.download(f"checkpoints/{found.name}/{name}", target, size, crc)


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
    steps = []  # of the complete ones, newest first
    for name in names_in(store):
        sizes = store.sizes(f"checkpoints/{name}")
        step = step_of(name)
        if f"{LIST}.replaced" in sizes:
            continue
        if LIST not in sizes:
            if step <= step_of(newest) and name != newest:
                remove(store, name)
            continue
        steps.append(step)
        for_good = step == 0 or (keep_every and step % keep_every == 0)
        if len(set(steps)) > keep_last and not for_good:
            remove(store, name)


def withdraw_newer(store: Store, step: int) -> None:
    """Unpublish the checkpoints after a step, with which a run did not go on. They stay there."""
    for name in names_in(store):
        where = f"checkpoints/{name}/{LIST}"
        if step_of(name) <= step or LIST not in store.sizes(f"checkpoints/{name}"):
            continue
        store.put(f"{where}.replaced", store.get(where))
        store.delete(where)
