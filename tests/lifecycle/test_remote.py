"""--remote: a run whose only memory is an object store, under kills, cuts and lost answers.

Against a real S3 server; where that adds nothing, a folder is the store.

    .venv/bin/python -m pytest tests/lifecycle/test_remote.py -m long      ten kills
"""

import contextlib
import functools
import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import store_server
from conftest import flags_for, refusal, slowly
from launches import FLAGS, FOREVER, Job, steps_of, train_in, wait_for
from store_server import copy, steps
from test_checkpoint import made_up
from test_scenarios import before_step, blame_the_data

import checkpoint
import fsdp_train
from config import MPTConfig, TrainConfig
from launch.heartbeat import Heartbeat
from lessons.elastic import steps_done
from lifecycle import lease as leases
from lifecycle import remote
from lifecycle.lease import StoreLease
from program import RESUME_ME, UserError
from storage import object_store, remote_checkpoints
from storage.object_store import open_store

pytest.importorskip("obstore", reason="object stores need obstore: see requirements-extra.txt")

INTERVAL = 4
SAVES = [*FLAGS, f"--save_interval={INTERVAL}", "--keep_last=2"]


@contextlib.contextmanager
def in_a_hurry(variables, rank=0):
    """Seconds become tenths; and these environment variables are set."""
    shorter = {
        leases: {"BEAT": 0.3},
        remote: {"PAUSE": 0.2, "MINUTE": 1},
        object_store: {"PAUSE": 0.05, "RETRIES": 1},
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        for module, values in shorter.items():
            stack.enter_context(mock.patch.multiple(module, **values))
        yield


@pytest.fixture
def there(tmp_path):
    """A folder that is a store, where seconds are tenths."""
    with in_a_hurry({}):
        yield open_store(f"file://{tmp_path}/there")


def names_of(url) -> list[int]:
    """The steps of the complete checkpoints, newest first, each of which is sound."""
    store = open_store(url)
    found = remote_checkpoints.published(store)
    for name in found:
        with tempfile.TemporaryDirectory() as folder:
            remote_checkpoints.download(store, name, Path(folder))
    return [remote_checkpoints.place_of(name)[1] for name in found]


# --------------------------------------------------------------------------------------------------
# The lease


def test_a_remote_has_one_owner(there):
    first = StoreLease(there, "a")
    first.take()
    message = refusal(StoreLease(there, "b").take)
    assert f"is owned by process {os.getpid()} on " in message and "another --remote" in message
    fall_silent(first)
    second = StoreLease(there, "b")
    second.take()
    assert second.version == first.version + 1
    first.beat()
    assert "is now owned by" in first.lost
    second.__exit__()
    begin = time.monotonic()
    with StoreLease(there, "c") as third:
        third.take()
        fall_silent(third)
        for _ in range(leases.KEPT + 3):
            again = StoreLease(there, "c")  # the same folder, after a kill
            again.take()
            fall_silent(again)
    assert time.monotonic() - begin < 3 * leases.BEAT
    assert len(there.sizes("lease")) == leases.KEPT


def fall_silent(lease) -> None:
    """It writes no heartbeat any more."""
    lease.released.set()
    lease.heartbeat.join()


def test_of_two_who_want_a_remote_the_slower_is_refused(there):
    """It saw no owner either. That one of many wins is in test_object_store.py."""
    create = there.create

    def create_after_another(key, content):
        create(key, b"{}")
        return create(key, content)

    there.create = create_after_another
    assert "is owned by another run" in refusal(StoreLease(there, "b").take)


def test_a_store_that_ignores_the_condition_is_refused(there):
    put = there.client.put
    there.client = mock.Mock(wraps=there.client)
    there.client.put = lambda key, content, **more: put(key, content)
    assert "ignores conditional writes" in refusal(StoreLease(there, "a").take)


@pytest.mark.parametrize("content", [b"[]", b'{"token": 1}', b"\xff"])
def test_a_damaged_lease_has_no_owner(there, content):
    there.put("lease/00000007.json", content)
    there.put("lease/notes", b"")
    lease = StoreLease(there, "a")
    lease.take()
    assert lease.version == 8


def test_a_folder_on_another_machine_is_the_same_run_with_another_token(tmp_path, monkeypatch):
    cfg = TrainConfig(run_dir=str(tmp_path), remote="file:///there")
    mine = remote.identity(cfg)
    (tmp_path / "remote.json").write_text(json.dumps(mine))
    assert remote.identity(cfg) == mine
    monkeypatch.setattr(remote.platform, "node", lambda: "elsewhere")
    copy = remote.identity(cfg)
    assert copy["run"] == mine["run"] and copy["token"] != mine["token"]


def mirror_of(folder, store) -> remote.Mirror:
    """The mirror of a run folder on rank 0, with a lease."""
    folder.mkdir(exist_ok=True)
    cfg = TrainConfig(run_dir=str(folder), remote=store.url)
    with mock.patch.object(remote.Mirror, "bring"):
        return remote.open_mirror(MPTConfig(), cfg)


def test_a_store_with_another_run_is_refused(tmp_path, there):
    mirror_of(tmp_path / "a", there).lease.__exit__()
    made_up(tmp_path / "b", 4)
    message = refusal(lambda: mirror_of(tmp_path / "b", there))
    assert "holds another run than" in message and "set another --remote" in message
    mirror_of(tmp_path / "c", there)  # it has nothing of its own yet, and goes on with that run


def test_who_has_lost_the_remote_changes_nothing_there(tmp_path, there):
    first = mirror_of(tmp_path / "a", there)
    first.first_step = 4
    fall_silent(first.lease)
    second = mirror_of(tmp_path / "b", there)
    copy(there, made_up(tmp_path / "b", 8))
    before = there.sizes()
    assert "is now owned by" in refusal(first.copy_record)
    assert there.sizes().keys() == before.keys() and steps(there) == [8]
    second.first_step = 4
    second.copy_record()
    assert steps(there) == [] and second.lineage == 1
    copy(there, made_up(tmp_path / "b", 6), 1)
    assert steps(there) == [6]


@pytest.mark.parametrize("resume", ["auto", "again"])
def test_what_a_run_says_of_a_last_checkpoint_that_is_not_there(tmp_path, there, resume, capfd):
    """It is an error, but for a run that was stopped: that keeps its exit status."""
    mirror = mirror_of(tmp_path / "a", there)
    mirror.cfg.resume = resume
    made_up(tmp_path / "a", 4)
    mirror.last_seconds = 0.2
    with mock.patch.object(
        remote_checkpoints, "publish", side_effect=object_store.StoreError("x", True)
    ):
        mirror.__exit__(SystemExit)
    said = capfd.readouterr().err
    assert "remote: step-4 is not in file://" in said
    assert ("the same command with --resume=auto copies the rest" in said) == (resume != "auto")

    mirror = mirror_of(tmp_path / "a", there)
    mirror.last_seconds = 2
    mirror.lease.lost = "it is now owned by another run"
    with pytest.raises(
        UserError, match="step-4 is not in .* it is now owned by another run"
    ) as lost:
        mirror.__exit__()
    assert lost.value.status == 2

    mirror = mirror_of(tmp_path / "a", there)
    mirror.last_seconds = 60
    mirror.__exit__()
    assert steps(there) == [4]


# --------------------------------------------------------------------------------------------------
# Runs


class Cluster:
    """Machines with a folder of their own, which share nothing with others but a store."""

    def __init__(self, tmp_path, tiny_data, url, variables=None):
        self.tmp_path, self.url = tmp_path, url
        self.variables = variables or {}
        self.flags = [*SAVES, *flags_for(tiny_data), f"--remote={url}", "--run_dir=run"]
        self.count = 0

    def folder(self) -> Path:
        """A new one."""
        self.count += 1
        folder = self.tmp_path / f"cluster-{self.count}"
        folder.mkdir()
        return folder

    def job(self, size: int, folder: Path, fault=None) -> Job:
        """A run without end."""
        fault = fault or functools.partial(in_a_hurry, self.variables)
        return Job(folder, size, fsdp_train.main, [*self.flags, *FOREVER], fault=fault)

    def train(self, ranks, *flags, folder=None, fault=None) -> tuple[int, str, str]:
        """A run to its end: status and message of rank 0, output of all."""
        where = folder or self.folder()
        fault = fault or functools.partial(in_a_hurry, self.variables)
        results = ranks(train_in, str(where), [*self.flags, *flags], fault)
        return results[0][0], results[0][1], "".join(out for _, _, out in results)


def rows_of(folder) -> dict:
    """step -> loss and hash."""
    rows = steps_of(folder / "run")
    return {step: (row["loss"], row["batch_hash"]) for step, row in rows.items()}


@pytest.fixture
def in_folder(tmp_path, tiny_data):
    return Cluster(tmp_path, tiny_data, f"file://{tmp_path}/there")


@pytest.fixture
def in_store(tmp_path, tiny_data, store):
    return Cluster(tmp_path, tiny_data, store.url, store.variables)


def test_a_run_goes_on_where_nothing_but_the_store_is_known(ranks, in_folder):
    """Its record is there, too."""
    status, message, out = in_folder.train(ranks(2), "--max_steps=6")
    assert status == 0 and "downloading" not in out, message
    assert names_of(in_folder.url)[0] == 6  # some of those in between are left out

    folder = in_folder.folder()
    status, message, out = in_folder.train(ranks(2), "--max_steps=10", folder=folder)
    assert status == 0 and "downloading step-6" in out, message
    assert [*rows_of(folder)] == [*range(1, 11)]
    assert names_of(in_folder.url)[0] == 10 and len(names_of(in_folder.url)) <= 2
    launches = (folder / "run/launches.jsonl").read_text().splitlines()
    assert [json.loads(line)["first_step"] for line in launches] == [0, 6]


def test_what_trackers_have_been_sent_is_known_there(tmp_path, there):
    """But not their own files."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "trackers/wandb").mkdir(parents=True)
    (here / "trackers/wandb.json").write_text('{"step": 6}')
    (here / "trackers/wandb/large").write_text("x")
    mirror = mirror_of(here, there)
    mirror.first_step = 0
    mirror.copy_record()
    (elsewhere / "trackers").mkdir(parents=True)
    (elsewhere / "trackers/wandb.json.part").write_text('{"step": 5')  # of an earlier version
    remote.Mirror(TrainConfig(run_dir=str(elsewhere), remote=there.url)).bring_record()
    files = [path for path in elsewhere.rglob("*") if path.is_file()]
    assert [path.relative_to(elsewhere).as_posix() for path in files] == ["trackers/wandb.json"]
    assert files[0].read_text() == '{"step": 6}'


@pytest.mark.slow
def test_the_machine_of_before_goes_on(ranks, in_folder):
    """It downloads what is newer, and nothing else. A finished run says so."""
    a, b = in_folder.folder(), in_folder.folder()
    in_folder.train(ranks(1), "--max_steps=6", folder=a)
    in_folder.train(ranks(1), "--max_steps=10", folder=b)
    status, _, out = in_folder.train(ranks(1), "--max_steps=10", folder=a)
    assert status == 0 and "downloading step-10" in out and "finished" in out
    status, _, out = in_folder.train(ranks(1), "--max_steps=12", folder=a)
    assert status == 0 and "downloading" not in out
    assert "resuming from run/checkpoints/step-10" in out
    assert [*rows_of(a)] == [*range(1, 13)]
    assert StoreLease(open_store(in_folder.url), "").read()[1]["released"]


@pytest.mark.slow
def test_weights_that_a_run_began_with_need_not_be_on_another_machine(ranks, in_folder, tmp_path):
    in_folder.train(ranks(1), "--max_steps=4", folder=tmp_path)
    first = [f"--init_from={tmp_path}/run", f"--remote=file://{tmp_path}/other"]
    assert in_folder.train(ranks(1), *first, "--max_steps=4")[0] == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    status, message, out = in_folder.train(ranks(1), *first, "--max_steps=8")
    assert status == 0 and "downloading step-4" in out, message
    message = in_folder.train(ranks(1), *first, f"--remote=file://{tmp_path}/new")[1]
    assert "does not exist" in message


@pytest.mark.slow
def test_what_is_half_deleted_or_damaged_is_passed_over(ranks, in_folder):
    folder = in_folder.folder()
    for last in (4, 8, 12):
        done = in_folder.train(ranks(1), f"--max_steps={last}", "--keep_last=3", folder=folder)
        assert done[0] == 0
    store = open_store(in_folder.url)
    assert names_of(in_folder.url) == [12, 8, 4]
    newest, middle, oldest = remote_checkpoints.published(store)
    store.delete(f"checkpoints/{newest}/.metadata")
    damaged = f"checkpoints/{middle}/__0_0.distcp"
    store.put(damaged, store_server.flipped(store.get(damaged)))

    folder = in_folder.folder()
    status, message, out = in_folder.train(ranks(2), "--max_steps=12", folder=folder)
    assert status == 0, message
    assert "step-8 in file://" in out and "is passed over" in out
    assert "resuming from run/checkpoints/step-4" in out
    assert names_of(in_folder.url)[0] == 12
    assert [*rows_of(folder)] == [*range(1, 13)]


@pytest.mark.slow
def test_here_or_there_the_newest_sound_one_wins(ranks, in_folder):
    """A damaged one here is put aside; steps that are skipped now count as unfit, there as well."""
    a = in_folder.folder()
    assert in_folder.train(ranks(1), "--max_steps=12", folder=a)[0] == 0
    target = a / "run/checkpoints/step-12/__0_0.distcp"
    target.write_bytes(store_server.flipped(target.read_bytes()))
    status, _, out = in_folder.train(ranks(1), "--max_steps=14", folder=a)
    assert status == 0 and "downloading step-12" in out
    assert (a / "run/checkpoints/step-12.damaged").exists()

    assert names_of(in_folder.url)[:2] == [14, 12]
    before = set(remote_checkpoints.published(open_store(in_folder.url)))
    flags = ["--max_steps=14", "--skip_steps=13:14"]
    status, message, out = in_folder.train(ranks(1), *flags)
    assert status == 0 and "resuming from run/checkpoints/step-12" in out, message
    store = open_store(in_folder.url)
    assert steps(store)[:2] == [14, 12]
    newest, *others = remote_checkpoints.published(store)
    assert newest.startswith("1-step-14.") and set(others) <= before
    assert len([*(in_folder.tmp_path / "there/checkpoints").glob("step-14.*")]) == 1  # it stays


@pytest.mark.slow
def test_a_store_that_is_down_delays_nothing(ranks, in_store, store):
    """The run says so once, goes on, and catches up."""
    folder, seen = in_store.folder(), store.proxy.requests
    store.proxy.fault = lambda method, path: "refuse" if 40 < len(seen) < 100 else None
    status, message, out = in_store.train(ranks(1), "--max_steps=40", folder=folder)
    assert status == 0, message
    assert out.count("The run goes on, and copies later") == 1
    assert out.count("answers again") == 1
    assert names_of(store.url)[0] == 40
    stored = open_store(store.url).get("metrics.jsonl")
    assert stored == (folder / "run/metrics.jsonl").read_bytes()


EXPIRED = 400, "ExpiredToken", "The provided token has expired."
UNCOPIED = {  # the fault of the n-th request, whether it is waited for, what the run says, status
    "it does not answer": (
        lambda n, path: "refuse" if "distcp" in path else None,
        True,
        ["is not in s3://", "the same command copies the rest"],
        75,
    ),
    "credentials expire": (
        lambda n, path: EXPIRED if n > 15 else None,
        False,
        ["step-8 is not copied", "credentials have expired"],
        2,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNCOPIED)
def test_what_is_not_in_the_store_at_the_end_the_same_command_copies(ranks, in_store, store, name):
    """The run ends with its checkpoints here, in bounded time, but not with status 0."""
    fault, is_waited_for, words, expected = UNCOPIED[name]
    store.proxy.fault = lambda method, path: fault(len(store.proxy.requests), path)
    prepare = functools.partial(impatient, store.variables)
    folder = in_store.folder()
    flags = {"folder": folder, "fault": prepare}
    status, message, out = in_store.train(ranks(2), "--max_steps=8", **flags)
    assert status == expected and all(each in message + out for each in words), message
    assert ("waiting at most 1 s" in out) == is_waited_for
    store.proxy.fault = lambda method, path: None
    assert in_store.train(ranks(2), "--max_steps=8", folder=folder)[0] == 0  # finished, but copies
    assert names_of(store.url)[0] == 8


@contextlib.contextmanager
def impatient(variables, rank):
    with in_a_hurry(variables), mock.patch.object(remote, "WAIT", 1):
        yield


@contextlib.contextmanager
def failing_in_threads(place, name, rank):
    """In all threads but the main one this function has a bug."""
    function = getattr(place, name)

    def fails(*args):
        if threading.current_thread() is threading.main_thread():
            return function(*args)
        raise RuntimeError(f"a bug in {name}")

    with in_a_hurry({}), mock.patch.object(place, name, fails):
        yield


@pytest.mark.parametrize(
    "size, place, name",
    [
        (1, StoreLease, "write"),
        slowly(1, leases.Lease, "write"),
        slowly(1, remote.Mirror, "copy_record"),
        slowly(2, remote.Mirror, "copy_checkpoint"),
        slowly(1, Heartbeat, "exchange"),
    ],
)
def test_a_thread_that_dies_ends_the_run(in_folder, size, place, name):
    """It would only seem to go on: without heartbeats another run takes over, without copies..."""
    fault = functools.partial(failing_in_threads, place, name)
    with in_folder.job(size, in_folder.folder(), fault) as job:
        first, *others = job.wait()
        assert first == 1 and set(others) <= {1, RESUME_ME}, job.log()[-3000:]
        assert f"RuntimeError: a bug in {name}" in job.log()


@contextlib.contextmanager
def mistaken(victim, rank):
    """This rank alone has a mistake, after it has saved."""
    with in_a_hurry({}), before_step(victim, blame_the_data, rank):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_mistake_of_one_rank_is_one_line_and_ends_all_with_its_status(in_folder, victim):
    """A copy at the end is waited for together, and so only if all ranks end for one reason."""
    with in_folder.job(2, in_folder.folder(), functools.partial(mistaken, victim)) as job:
        assert job.wait() == [2, 2], job.log()[-3000:]
        (line,) = job.errors()
        assert "my shard is damaged" in line


@pytest.mark.slow
def test_a_conflict_loses_nothing(ranks, in_store, store):
    """Two of each kind of request: of the lease, of a file, of the list of a checkpoint."""
    kinds = ["lease/", "run.json", "distcp", "checksums.json", "metrics.jsonl"]
    faults = [store_server.ABORTED, store_server.CONFLICT]
    left = [(kind, fault) for kind in kinds for fault in faults]

    def once(method, path):
        for kind, fault in left:
            if method == "PUT" and kind in path:
                left.remove((kind, fault))
                return fault

    store.proxy.fault = once
    status, message, out = in_store.train(ranks(1), "--max_steps=8")
    assert status == 0 and "goes on" not in out, message
    assert not left and names_of(store.url)[0] == 8


def test_a_remote_of_another_model_is_refused_before_anything_comes_down(ranks, in_folder):
    assert in_folder.train(ranks(1), "--max_steps=4")[0] == 0
    other = in_folder.folder()
    status, message, out = in_folder.train(ranks(1), "--max_steps=4", "--d_model=64", folder=other)
    assert status == 2 and "another --remote" in message and "downloading" not in out
    assert f"{in_folder.url}/checkpoints/step-4." in message and "d_model 32 (here 64)" in message
    assert not (other / "run/checkpoints").exists()
    elsewhere = f"--remote={in_folder.url}-2"  # what the line advises
    flags = ["--max_steps=4", "--d_model=64", elsewhere]
    assert in_folder.train(ranks(1), *flags, folder=other)[0] == 0


@contextlib.contextmanager
def small_files(rank):
    """No file may grow beyond 40 kB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_is_one_line(ranks, in_folder):
    assert in_folder.train(ranks(1), "--max_steps=4")[0] == 0
    status, message, _ = in_folder.train(ranks(1), "--max_steps=8", fault=small_files)
    assert status == 2 and "\n" not in message
    assert "File too large" in message and "step-4" in message


@pytest.mark.slow
def test_two_clusters_cannot_own_a_run(ranks, in_store, store):
    """The second one refuses. If it takes over while the first is suspended, the first stops."""
    with in_store.job(1, in_store.folder()) as first:
        wait_for(lambda: names_of(store.url) or not first.runs())
        status, message, _ = in_store.train(ranks(1), "--max_steps=40")
        assert status == 2 and "is owned by process" in message
        first.send(signal.SIGSTOP, 0)
        newest = names_of(store.url)[0]
        status, message, _ = in_store.train(ranks(1), f"--max_steps={newest + 20}")
        assert status == 0, message
        first.send(signal.SIGCONT, 0)
        assert first.wait() == [2]
        (line,) = first.errors()
        assert "is now owned by" in line


# --------------------------------------------------------------------------------------------------
# Kills


@pytest.mark.parametrize("kills", [slowly(2), pytest.param(10, marks=pytest.mark.long)])
def test_kills_with_the_store_as_the_only_memory(in_store, tiny_data, store, ranks, kills):
    """A run on 2 ranks that is killed again and again; each time other machines go on.

    Every tenth request fails in some way. At the end its curve is that of a calm run, bit by bit.
    """
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 10**6))
    print(f"\nSOAK_SEED={seed}")
    chance = random.Random(seed)
    faults = ["503", "refuse", "cut", "corrupt", "lose", 0.2]
    faults += [store_server.ABORTED, store_server.CONFLICT]
    store.proxy.fault = lambda method, path: chance.choice(faults + 72 * [None])
    newest = 0
    for number in range(kills):
        folder = in_store.folder()
        with in_store.job(2, folder) as job:
            kill(job, store, newest, chance)
        last, before = steps_done(folder / "run"), newest
        newest = names_of(store.url)[0]
        assert newest >= before
        assert f"downloading step-{before} " in job.log() or not number
        print(f"killed at step {last}, the store has {names_of(store.url)}", flush=True)

    end = ["--schedule=constant", f"--max_steps={newest + 6}"]
    folder, calm = in_store.folder(), in_store.folder()
    status, message, out = in_store.train(ranks(2), *end, folder=folder)
    assert status == 0 and f"downloading step-{newest} " in out, message
    flags = [*SAVES, *flags_for(tiny_data), "--run_dir=run", *end]
    assert ranks(2)(train_in, str(calm), flags)[0][0] == 0
    assert rows_of(folder) == rows_of(calm)


def kill(job, store, newest: int, chance) -> None:
    """Wait until the store has a newer checkpoint, then for a random moment; kill -9 some ranks."""
    seen = store.proxy.requests
    wait_for(lambda: published_after(store.url, newest) or not job.runs())
    if chance.random() < 0.6:  # in the middle of an upload
        wait_for(lambda: "distcp" in seen[-1][1] and seen[-1][0] == "PUT" or not job.runs())
    time.sleep(chance.uniform(0, 0.2))
    assert job.runs(), job.log()[-3000:]
    for rank in chance.choice([[0], [1], [0, 1]]):
        job.send(signal.SIGKILL, rank)


def published_after(url, step: int) -> bool:
    """Has the store a complete checkpoint after this step?"""
    with contextlib.suppress(UserError):
        return max(steps(open_store(url)), default=0) > step
    return False


@pytest.mark.slow
def test_after_a_kill_no_more_than_an_interval_is_lost(in_store, store):
    """If the last checkpoint was uploaded: those steps, and those taken while the next is saved."""
    folder = in_store.folder()

    def is_copied():
        newest = checkpoint.latest(folder / "run")
        return newest and published_after(store.url, checkpoint.number(newest) - 1)

    with in_store.job(2, folder, functools.partial(slow_steps, store.variables)) as job:
        wait_for(lambda: is_copied() or not job.runs())
        for rank in (0, 1):
            job.send(signal.SIGKILL, rank)
        job.wait()
        assert steps_done(folder / "run") - names_of(store.url)[0] <= 2 * INTERVAL


@contextlib.contextmanager
def slow_steps(variables, rank):
    take = fsdp_train.train_step

    def train_step(*args):
        time.sleep(0.2)
        return take(*args)

    with in_a_hurry(variables), mock.patch.object(fsdp_train, "train_step", train_step):
        yield
