"""Checkpoints in an object store: complete or not there, as on a disk, though nothing is renamed.

    checkpoints/step-600.1a2b3c4d/__0_0.distcp ...   the files of step-600; 1a2b3c4d is a hash of
    checkpoints/step-600.1a2b3c4d/checksums.json     this file, which is written last: published
    checkpoints/1-begins-at-400                      here the run went back, and began lineage 1:
    checkpoints/1-step-500.5e6f7a8b/...              it is newer than what came after step 400

Thanks to the hash, partial uploads of two runs never mix, a damaged list is noticed, and an upload
that was interrupted goes on: a file that is there in full is not sent again. A checkpoint is
deleted in the other order, so one that is half deleted does not count as published.

This file knows nothing of ranks and runs: see lifecycle/remote.py.
"""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from program import require
from storage import checkpoint_files, files
from storage.object_store import DamagedObject, Store

LIST = "checksums.json"
NAME = re.compile(r"(?:([1-9][0-9]{0,8})-)?step-(0|[1-9][0-9]{0,17})\.[0-9a-f]{8}")
BEGIN = re.compile(r"([1-9][0-9]{0,8})-begins-at-(0|[1-9][0-9]{0,17})")


def place_of(name: str) -> tuple[int, int]:
    """(lineage, step), by which checkpoints are ordered: 1-step-500.5e6f7a8b -> (1, 500)"""
    lineage, step = NAME.fullmatch(name).groups()
    return int(lineage or 0), int(step)


def digest(content: bytes) -> str:
    """The hash that names a checkpoint, of its checksums.json."""
    return hashlib.sha256(content).hexdigest()[:8]


# --------------------------------------------------------------------------------------------------
# What is there


def contents(store: Store) -> tuple[dict[str, dict[str, int]], dict[int, int]]:
    """The checkpoints, complete or not, newest first: name -> {file: bytes}.

    And where the run went back: lineage -> the step at which it begins.
    """
    found, begins = {}, {}
    for key, size in store.sizes("checkpoints").items():
        name, _, file = key.partition("/")
        if NAME.fullmatch(name):
            found.setdefault(name, {})[file] = size
        if begin := BEGIN.fullmatch(key):
            begins[int(begin[1])] = int(begin[2])
    return {name: found[name] for name in sorted(found, key=place_of, reverse=True)}, begins


def is_published(name: str, files_there: dict[str, int], begins: dict[int, int]) -> bool:
    """Whether a checkpoint has its list, and the run did not go back to before it."""
    lineage, step = place_of(name)
    was_left = any(step > begin for later, begin in begins.items() if later > lineage)
    return LIST in files_there and not was_left


def published(store: Store) -> dict[str, dict[str, int]]:
    """The complete checkpoints with which the run went on, newest first: name -> {file: bytes}."""
    there, begins = contents(store)
    return {name: there[name] for name in there if is_published(name, there[name], begins)}


def begin_lineage(store: Store, step: int) -> int:
    """The lineage of a run that goes on from a step: a new one if there are later checkpoints."""
    _, begins = contents(store)
    lineage = max(begins, default=0)
    if any(place_of(name)[1] > step for name in published(store)):
        lineage += 1
        store.put(f"checkpoints/{lineage}-begins-at-{step}", b"")
    return lineage


# --------------------------------------------------------------------------------------------------
# Copying


def name_for(store: Store, path: Path, lineage: int) -> str:
    """The name there of a local checkpoint. OSError if it is gone."""
    own = f"{path.name}.{digest((path / LIST).read_bytes())}"
    there = (name for name in published(store) if name.endswith(own))  # the run resumed from it
    return next(there, f"{lineage}-{own}" if lineage else own)


def upload(store: Store, path: Path, name: str):
    """Upload the files of a local checkpoint that are not there, but its list. Yields after each.

    UserError if one is damaged here, OSError if it is gone, StoreError if the store fails.
    """
    checksums = checkpoint_files.read_checksums(path)
    require(checksums, f"{path} is damaged")
    present = store.sizes(f"checkpoints/{name}")
    for file, expected in checksums.items():
        if present.get(file) != expected[0]:  # an object is whole or absent
            store.upload(path / file, f"checkpoints/{name}/{file}", expected)
            yield file


def publish(store: Store, path: Path, name: str) -> None:
    """Make an uploaded checkpoint complete."""
    store.put(f"checkpoints/{name}/{LIST}", (path / LIST).read_bytes())


def download(store: Store, name: str, folder: Path, only=None) -> None:
    """Download a checkpoint into a folder, checked: its list, and all other files or `only` these.

    What an earlier download has brought is not asked for again. DamagedObject or FileNotFoundError
    if a file is damaged or gone, StoreError if the store fails, OSError if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    where = f"checkpoints/{name}"
    contents = (store.get(f"{where}/{LIST}") for _ in range(3))  # damaged on the way, or there?
    content = next((content for content in contents if name.endswith(digest(content))), b"")
    checksums = checkpoint_files.parse_checksums(content, folder)
    fault = checkpoint_files.incomplete(checksums)
    if not fault and not any(holds(store.sizes(where), checksums) for _ in range(3)):
        fault = "it is incomplete"
    if fault:
        raise DamagedObject(f"{store.url}/{where}: {fault}")
    files.write_atomically(folder / LIST, content)

    def download_one(file):
        target = files.member(folder, file, LIST)
        if not target.exists():  # it has its name once it is right
            store.download(f"{where}/{file}", target, *checksums[file])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(download_one, only or checksums))  # raises what one of them raised


def holds(sizes: dict[str, int], checksums: dict[str, list[int]]) -> bool:
    """Whether the files that are there, {name: bytes}, are those of a list."""
    return all(sizes.get(file) == size for file, (size, _) in checksums.items())


# --------------------------------------------------------------------------------------------------
# Deleting


def prune(store: Store, newest: str, keep_last: int, keep_every: int) -> None:
    """Delete what a run does not keep: as on its disk, and half uploads from before `newest`.

    What the run went back from stays. An earlier version renamed its list.
    """
    there, begins = contents(store)
    steps = set()  # of the complete ones so far, newest first
    for name, files_there in there.items():
        if is_published(name, files_there, begins):
            _, step = place_of(name)
            steps.add(step)
            for_good = step == 0 or (keep_every and step % keep_every == 0)
            is_kept = for_good or len(steps) <= keep_last
        else:
            was_left = LIST in files_there or f"{LIST}.replaced" in files_there
            is_kept = was_left or place_of(name) > place_of(newest)
        if not is_kept:  # its list first
            for file in sorted(files_there, key=lambda file: file != LIST):
                store.delete(f"checkpoints/{name}/{file}")
