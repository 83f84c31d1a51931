"""lifecycle/lease.py: one run per folder, on one machine and between machines."""

import errno
import itertools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import flags_for, refusal
from launches import FLAGS, FOREVER, Job, train_in, wait_for

import fsdp_train
from lessons.elastic import steps_done
from lifecycle import lease as leases
from program import UserError


def taken(run_dir, **other) -> leases.Lease:
    """A lease that this process has taken. other: false claims, such as host="elsewhere"."""
    lease = leases.Lease(str(run_dir))
    lease.me |= other
    lease.take()
    return lease


def test_a_live_runs_folder_is_refused(ranks, tiny_data, tmp_path):
    """It names the owner in one line and does not disturb it. A killed run's folder is free."""
    run, flags = tmp_path / "run", [*FLAGS, *flags_for(tiny_data), "--run_dir=run"]
    with Job(tmp_path, 1, fsdp_train.main, [*flags, *FOREVER, "--save_interval=2"]) as first:
        wait_for(lambda: (run / "checkpoints/step-2").exists())
        ((status, message, said),) = ranks(1)(train_in, str(tmp_path), [*flags, "--max_steps=3"])
        assert status == 2 and said == "" and "\n" not in message
        assert f"run is owned by process {first.processes[0].pid} on " in message
        assert "set another --run_dir" in message
        before = steps_done(run)
        wait_for(lambda: steps_done(run) > before + 1)
        assert first.runs()
    with taken(run):  # without waiting
        pass


def test_a_lease_is_released_for_other_machines(tmp_path, capsys):
    with taken(tmp_path, host="elsewhere"):
        assert leases.read_lease(tmp_path / "lease.json")["host"] == "elsewhere"
        leases.main([str(tmp_path)])
        owned = f"{tmp_path} is owned by process {os.getpid()} on elsewhere\n"
        assert capsys.readouterr().out == owned
    begin = time.monotonic()
    with taken(tmp_path):
        assert time.monotonic() - begin < leases.BEAT  # it waits for three beats, or not at all
    leases.main([str(tmp_path)])
    assert capsys.readouterr().out == f"no run owns {tmp_path}\n"


@pytest.mark.parametrize("text", ["[]", '{"host": 1}', '{"beat": {}}', "[" * 10**5, "\xff\0", ""])
def test_a_damaged_lease_has_no_owner(tmp_path, text, capsys):
    """Damaged by a power failure, for example. While another run has the lock, it still counts."""
    path = tmp_path / "lease.json"
    path.write_text(text, encoding="latin-1")
    leases.main([str(tmp_path)])
    assert capsys.readouterr().out == f"no run owns {tmp_path}\n"
    with taken(tmp_path) as lease:
        assert leases.read_lease(path)["pid"] == os.getpid()
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match="is owned by another run: wait for that run"):
            taken(tmp_path)
        lease.check()


def lease_of(pid, job=None, beat=0):
    """The content of the lease of a process on another machine."""
    return json.dumps({"host": "elsewhere", "pid": pid, "job": job, "beat": beat})


def write(path, content):
    """In place and in one call, as a real owner does: no reader sees half of it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(file, content.ljust(400).encode(), 0)
    os.close(file)


def test_of_another_machine_the_heartbeat_decides(tmp_path, monkeypatch):
    """Even where the file system shares no locks. A thread is a live process there."""
    monkeypatch.setattr(leases, "BEAT", 0.1)
    path, closed = tmp_path / "lease.json", threading.Event()

    def beat():
        for number in itertools.count():
            write(path, lease_of(7, "42", number))
            if closed.wait(0.05):
                return

    with ThreadPoolExecutor(1) as pool:
        pool.submit(beat)
        try:
            wait_for(lambda: leases.read_lease(path))
            message = refusal(taken, tmp_path)
        finally:
            closed.set()
    assert "is owned by process 7 on elsewhere, job 42: wait for that run" in message


def test_without_locks_the_heartbeat_decides_on_this_machine_too(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(leases.fcntl, "flock", flock)
    monkeypatch.setattr(leases, "BEAT", 0.1)
    with taken(tmp_path) as lease:
        with pytest.raises(UserError, match="is owned by process"):
            taken(tmp_path)
        killed = json.dumps(lease.me)
    (tmp_path / "lease.json").write_text(killed)
    with taken(tmp_path):
        pass


def test_a_lease_without_a_heartbeat_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 0.1)
    path = tmp_path / "lease.json"
    path.write_text(lease_of(7))
    with taken(tmp_path) as lease:  # after three intervals
        assert leases.read_lease(path)["host"] == lease.me["host"]
        lease.check()
        # Another run takes over. The owner's own beat may replace the first of these.
        wait_for(lambda: write(path, lease_of(8)) or lease.lost)
        with pytest.raises(UserError, match="is now owned by process 8 on elsewhere"):
            lease.check()
    assert leases.read_lease(path)["pid"] == 8  # left as it is
