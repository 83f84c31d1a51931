"""Checkpoints in a store: published last, passed over when incomplete, deleted list first.

A folder is the store.
"""

import pytest
from conftest import refusal
from test_checkpoint import made_up

import checkpoint
from storage import remote_checkpoints
from storage.object_store import DamagedObject, open_store

pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}/store")


def copy(store, path) -> str:
    """Upload and publish a checkpoint. Its name there."""
    remote_checkpoints.upload(store, path, remote_checkpoints.missing(store, path))
    remote_checkpoints.publish(store, path)
    return remote_checkpoints.folder_of(path).removeprefix("checkpoints/")


def steps(store) -> list[int]:
    return [found.step for found in remote_checkpoints.published(store)]


def test_one_is_there_when_its_list_is(store, tmp_path):
    path = made_up(tmp_path / "run", 600)
    remote_checkpoints.upload(store, path, [".metadata"])
    assert remote_checkpoints.missing(store, path) == ["meta.json"] and steps(store) == []
    remote_checkpoints.upload(store, path, [".metadata", "meta.json"])
    assert remote_checkpoints.missing(store, path) == [] and steps(store) == []
    remote_checkpoints.publish(store, path)
    assert steps(store) == [600]

    (found,) = remote_checkpoints.published(store)
    assert remote_checkpoints.meta_of(store, found)["step"] == 600
    there, part = tmp_path / "b" / "step-600", tmp_path / "b" / "part"
    remote_checkpoints.download(store, found, [".metadata"], part)
    assert "lacks meta.json" in refusal(remote_checkpoints.place, found, part, there)
    remote_checkpoints.download(store, found, found.checksums, part)
    remote_checkpoints.place(found, part, there)
    assert checkpoint.verify(there) is None


@pytest.mark.parametrize("name", [".metadata", "checksums.json"])
@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_what_is_incomplete_is_passed_over(store, tmp_path, name, content):
    copy(store, made_up(tmp_path / "run", 8))
    newer = copy(store, made_up(tmp_path / "run", 12))
    store.put("checkpoints/notes/checksums.json", b"{}")
    assert steps(store) == [12, 8]
    if content is None:
        store.delete(f"checkpoints/{newer}/{name}")
    else:
        store.put(f"checkpoints/{newer}/{name}", content)
    assert steps(store) == [8]


def test_what_is_damaged_on_the_way_is_asked_for_again(store, tmp_path, monkeypatch):
    name = copy(store, made_up(tmp_path / "run", 8))
    (found,) = remote_checkpoints.published(store)
    get, asked = store.get, []

    def damaged_once(key):
        asked.append(key)
        return get(key) if len(asked) % 2 == 0 else b"{" + get(key)[1:-1]

    monkeypatch.setattr(store, "get", damaged_once)
    assert steps(store) == [8]
    assert remote_checkpoints.meta_of(store, found)["step"] == 8
    assert len(asked) == 4
    monkeypatch.undo()
    store.put(f"checkpoints/{name}/meta.json", b"{}")
    with pytest.raises(DamagedObject, match="meta.json is damaged"):
        remote_checkpoints.meta_of(store, found)


def test_old_ones_are_deleted_with_their_list_first(store, tmp_path, monkeypatch):
    """The first one that was imported stays, those of keep_every, and what is newer."""
    for step in (0, 4, 8, 10, 12, 16):
        newest = copy(store, made_up(tmp_path / "run", step))
    half = made_up(tmp_path / "run", 6), made_up(tmp_path / "run", 20)
    for path in half:
        remote_checkpoints.upload(store, path, [".metadata"])

    deleted = []
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda key: (deleted.append(key), delete(key)))
    remote_checkpoints.prune(store, newest, keep_last=2, keep_every=8)
    assert steps(store) == [16, 12, 8, 0]
    assert len(deleted) == 3 + 3 + 1  # the steps 4, 10 and the half one of 6
    ends = [key.rpartition("/")[2] for key in deleted if "step-6" not in key]
    assert ends[0] == ends[3] == "checksums.json"
    assert len([name for name in remote_checkpoints.contents(store) if "step-20" in name]) == 1


def test_those_after_a_step_are_withdrawn_and_kept(store, tmp_path):
    for step in (4, 8, 12):
        newest = copy(store, made_up(tmp_path / "run", step))
    remote_checkpoints.withdraw_newer(store, 8)
    assert steps(store) == [8, 4]
    remote_checkpoints.prune(store, newest, keep_last=1, keep_every=0)
    assert steps(store) == [8]
    assert len(store.sizes(f"checkpoints/{newest}")) == 3
