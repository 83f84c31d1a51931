"""Checkpoints in a store: published last, passed over when incomplete, deleted list first.

A folder is the store.
"""

import pytest
from store_server import copy, steps, upload
from test_checkpoint import made_up

import checkpoint
from storage import remote_checkpoints
from storage.object_store import DamagedObject, open_store

pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")


@pytest.fixture
def store(tmp_path):
    return open_store(f"file://{tmp_path}/store")


def test_one_is_there_when_its_list_is(store, tmp_path, monkeypatch):
    """What has been copied before is not copied again, in both directions."""
    path = made_up(tmp_path / "run", 600)
    name = upload(store, path)
    assert sorted(store.sizes(f"checkpoints/{name}")) == [".metadata", "meta.json"]
    assert steps(store) == []
    assert not list(remote_checkpoints.upload(store, path, name))
    remote_checkpoints.publish(store, path, name)
    assert steps(store) == [600]

    part = tmp_path / "b/part"
    remote_checkpoints.download(store, name, part, ["meta.json"])
    assert sorted(part.iterdir()) == [part / "checksums.json", part / "meta.json"]
    asked, download = [], store.download
    monkeypatch.setattr(store, "download", lambda *args: (asked.append(args[0]), download(*args)))
    remote_checkpoints.download(store, name, part)
    assert asked == [f"checkpoints/{name}/.metadata"]
    assert checkpoint.verify(part.rename(part.with_name("step-600"))) is None


@pytest.mark.parametrize("name", [".metadata", "checksums.json"])
@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_what_is_incomplete_is_refused(store, tmp_path, name, content):
    older = copy(store, made_up(tmp_path / "run", 8))
    newer = copy(store, made_up(tmp_path / "run", 12))
    store.put("checkpoints/notes/checksums.json", b"{}")
    assert steps(store) == [12, 8]
    if content is None:
        store.delete(f"checkpoints/{newer}/{name}")
    else:
        store.put(f"checkpoints/{newer}/{name}", content)
    with pytest.raises((DamagedObject, FileNotFoundError)):
        remote_checkpoints.download(store, newer, tmp_path / "newer")
    if content is None and name == "checksums.json":
        assert steps(store) == [8]
    remote_checkpoints.download(store, older, tmp_path / "older")


def test_what_is_damaged_on_the_way_is_asked_for_again(store, tmp_path, monkeypatch):
    name = copy(store, made_up(tmp_path / "run", 8))
    get, asked = store.get, []

    def damaged_once(key):
        asked.append(key)
        return get(key) if len(asked) % 2 == 0 else b"{" + get(key)[1:-1]

    monkeypatch.setattr(store, "get", damaged_once)
    remote_checkpoints.download(store, name, tmp_path / "part")
    assert len(asked) == 2


def test_old_ones_are_deleted_with_their_list_first(store, tmp_path, monkeypatch):
    """The first one that was imported stays, those of keep_every, and what is newer."""
    for step in (0, 4, 8, 10, 12, 16):
        newest = copy(store, made_up(tmp_path / "run", step))
    for step in (6, 20):  # half ones
        upload(store, made_up(tmp_path / "run", step))

    deleted = []
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda key: (deleted.append(key), delete(key)))
    remote_checkpoints.prune(store, newest, keep_last=2, keep_every=8)
    assert steps(store) == [16, 12, 8, 0]
    assert len(deleted) == 3 + 3 + 2  # the steps 4, 10 and the half one of 6
    ends = [key.rpartition("/")[2] for key in deleted if "step-6" not in key]
    assert ends[0] == ends[3] == "checksums.json"
    assert any("step-20" in key for key in store.sizes("checkpoints"))


def test_a_run_that_went_back_is_newer_than_what_it_left(store, tmp_path):
    """What it left stays, also where an earlier version has left it."""
    names = {step: copy(store, made_up(tmp_path / "run", step)) for step in (4, 8, 12)}
    assert remote_checkpoints.begin_lineage(store, 12) == 0
    for _ in range(2):  # killed before it has saved, it goes back to the same step once more
        assert remote_checkpoints.begin_lineage(store, 8) == 1
        assert steps(store) == [8, 4]
    newest = copy(store, made_up(tmp_path / "again", 10), 1)
    assert newest.startswith("1-step-10.") and steps(store) == [10, 8, 4]

    for _ in range(2):
        assert remote_checkpoints.begin_lineage(store, 8) == 2
        assert steps(store) == [8, 4]
    newest = copy(store, made_up(tmp_path / "third", 10), 2)
    assert newest.startswith("2-step-10.") and steps(store) == [10, 8, 4]

    where = f"checkpoints/{names[4]}/checksums.json"
    store.put(f"{where}.replaced", store.get(where))
    store.delete(where)
    remote_checkpoints.prune(store, newest, keep_last=1, keep_every=0)
    assert steps(store) == [10]
    assert len(store.sizes(f"checkpoints/{names[12]}")) == 3
    assert len(store.sizes(f"checkpoints/{names[4]}")) == 3
    assert not store.sizes(f"checkpoints/{names[8]}")
