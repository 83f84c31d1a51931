"""One thread on each rank, from the meeting to the end: it ends the run when a rank fails or hangs.

When collectives hang, ranks cannot talk through collectives. So rank 0 serves a small key-value
store (PyTorch's TCPStore) to these threads. Every second each writes a row into it. Rank 0 reads
all rows, and it alone decides what ends the run:

    a rank fails                 its row has an exit status, and words that rank 0 prints
    a process or host is gone    its row no longer changes. After `patience` seconds rank 0 names
                                 it. NCCL itself would wait for ever; with gloo a collective fails
                                 at once, and then 5 seconds are enough
    something is overdue         connecting to each other, or a step: a row says so. The ranks that
                                 do not reply, or that do not wait for others, are named

Rank 0 prints one line and publishes the exit status, with which all ranks end. The others look at
rank 0: if its row no longer changes, or the store does not reply, they name it and end.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import program
from program import RESUME_ME, whoami

ROOT = Path(__file__).parent.parent
TORCH = Path(torch.__file__).parent
REPLY_TIMEOUT = 5  # seconds in which a thread of a living rank replies
SHORT_SILENCE = 5  # seconds after which a rank counts as gone, once a collective has failed
READING = 30  # seconds for which rank 0 waits until the others have read its verdict
CONNECTING = 125  # seconds in which ranks connect: longer than a silence may last
SHOWN = 8  # of many silent ranks, as many as a node has are named
WAITS = "waits"
WAITING = ("distributed", "cuda", "autograd")  # folders of torch in which a main thread waits
# Errors of the store: rank 0 is gone, or so stuck that its server does not reply.
STORE_LOST = (RuntimeError, futures.TimeoutError)


class SignsOfLife:
    """How long this rank has seen no change in the counts of others.

    Each rank counts, every second. A count, not a time of day: machines' clocks differ. Rank 0
    looks at all others and these look at rank 0, so the work of a rank stays small.
    """

    def __init__(self, global_rank: int, global_size: int):
        ranks = range(1, global_size) if global_rank == 0 else [0]
        self.counts = dict.fromkeys(ranks, 0)
        self.silence = dict.fromkeys(ranks, 0.0)  # seconds
        self.last_look = time.monotonic()

    def look(self, counts: dict[int, int] | None, now: float) -> None:
        """Note the counts of the others, None if the store does not reply. now: monotonic.

        A negative count: that rank has left, and is silent for good.
        """
        # If more time has passed than that, this rank itself was held up, and perhaps the store.
        longest = 1 + (REPLY_TIMEOUT if counts is None else 1)
        seconds = min(now - self.last_look, longest)
        self.last_look = now
        before, self.counts = self.counts, counts or self.counts
        for rank, count in self.counts.items():
            alive = count != before[rank] or count < 0
            self.silence[rank] = 0.0 if alive else self.silence[rank] + seconds

    def gone(self, patience: float) -> list[int]:
        """The ranks without a sign of life for so many seconds."""
        return [rank for rank, seconds in self.silence.items() if seconds >= patience]


@dataclass
class Row:
    """What a rank publishes of itself."""

    name: str
    count: int = 0  # one more every second
    line: str = ""  # at which its main thread is
    overdue: str = ""  # what it has waited for too long, in words
    lost_another: bool = False  # one of its collectives has failed
    status: int | None = None  # it fails, and this is its exit status
    words: str = ""  # why, if rank 0 shall print that
    head: str = "error"  # before these words
    has_left: bool = False  # it ends, or knows that it has to: it needs the store no more


class Heartbeat(threading.Thread):
    """The thread of one rank. patience: after how many silent seconds a rank counts as gone.

    Its main thread says what it waits for (`within`, `expect`), and how it ends (`end_with`).
    """

    def __init__(self, rank: int, size: int, patience: float):
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.size, self.patience = rank, size, patience
        self.row = Row(whoami(rank))
        self.rows = {}  # rank -> Row, as last read: of all ranks on rank 0, of rank 0 on the others
        self.task = "", math.inf  # what to say if the main thread is not done by this time
        self.last_good = None  # a function: a sentence that names the newest checkpoint
        self.verdict = None  # the exit status with which the run ends
        self.gone = ()  # ranks that will not read it
        self.leaving = threading.Event()  # the main thread ends this rank, or its part in the run
        self.store, self.connected = None, True
        self.store_thread = futures.ThreadPoolExecutor(1)

    def connect(self, tell) -> None:
        """Open the store. tell(port): the port of rank 0's server, on all ranks.

        All keys are there before any rank can read them, so that reading never blocks.
        """
        self.signs = SignsOfLife(self.rank, self.size)
        host = os.environ.get("MASTER_ADDR", "localhost")
        options = {"timeout": timedelta(seconds=self.patience), "wait_for_workers": False}
        if self.size == 1:
            store = dist.HashStore()
        elif self.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, **options)  # at any free port
        if self.rank == 0:
            store.set("end", "")
            for rank in range(self.size):
                store.set(f"row {rank}", as_text(Row(f"rank {rank}")))
        if self.size > 1:
            port = tell(store.port if self.rank == 0 else 0)
        if self.rank > 0:
            store = dist.TCPStore(host, port, is_master=False, **options)
        store.set_timeout(timedelta(seconds=REPLY_TIMEOUT))
        self.store = store
        self.publish()

    def run(self) -> None:
        """The thread."""
        while not self.leaving.wait(1):
            self.beat()
        while not self.others_left():  # this thread keeps rank 0's server alive
            self.beat()
            time.sleep(1)

    def beat(self) -> None:
        """Give a sign of life. Has a rank failed, is one gone, is something overdue?"""
        words, deadline = self.task
        self.row.overdue = words if time.monotonic() > deadline else ""
        if self.store is None:
            if self.row.overdue:
                program.end(f"{self.row.name} {words}: a rank or the network is gone")
            return
        self.exchange()
        if self.verdict is None and self.rank == 0:
            self.judge()
        elif self.verdict is None:
            self.judge_rank_0()
        if self.verdict is not None and not self.leaving.is_set():
            self.obey()

    # --- The store

    def query(self, function):
        """`function()`, which uses the store. Raises STORE_LOST where the store would block."""
        if self.store is None or not self.connected:
            raise dist.DistNetworkError("there is no connection to the store")
        try:
            return self.store_thread.submit(function).result(REPLY_TIMEOUT)
        except dist.DistNetworkError:
            # It never connects again, and would print a C++ traceback each time.
            self.connected = False
            raise

    def publish(self) -> None:
        """Write this rank's row into the store, if it replies."""
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.set(f"row {self.rank}", as_text(self.row)))

    def read(self) -> None:
        """Read the verdict and the rows, in one message. Raises STORE_LOST."""
        ranks = range(self.size) if self.rank == 0 else [0]
        names = ["end", *(f"row {rank}" for rank in ranks)]
        end, *rows = self.query(lambda: self.store.multi_get(names))
        self.rows = {rank: Row(**json.loads(row)) for rank, row in zip(ranks, rows, strict=True)}
        if end and self.verdict is None:
            self.verdict = int(end)

    def exchange(self) -> None:
        """Publish this rank's row, read the others', and note their signs of life.

        Two requests of each rank a second. Of 1,000 ranks, rank 0 spends 1 % of a core on them.
        """
        self.row.count += 1
        self.row.line = current_line()
        self.publish()
        counts = None
        with contextlib.suppress(*STORE_LOST):
            self.read()
            others = [rank for rank in self.rows if rank != self.rank]
            rows = self.rows
            counts = {rank: -1 if rows[rank].has_left else rows[rank].count for rank in others}
        self.signs.look(counts, time.monotonic())
        if any(row.lost_another for row in (self.row, *self.rows.values())):
            self.patience = min(self.patience, SHORT_SILENCE)

    def others_left(self) -> bool:
        """On rank 0: have the other ranks left, or do they know that they have to end?"""
        if self.rank > 0 or self.size == 1:
            return True
        with contextlib.suppress(*STORE_LOST):
            self.read()
            rows = [row for rank, row in self.rows.items() if rank not in (0, *self.gone)]
            return all(row.has_left for row in rows)
        return True

    def wait_for_readers(self, seconds: float) -> None:
        """Keep rank 0 alive until the others have left, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.others_left() and time.monotonic() < deadline:
            time.sleep(0.1)

    # --- What ends the run

    def judge(self) -> None:
        """On rank 0: decide whether the run ends."""
        failed = [row for row in self.rows.values() if row.status is not None]
        if failed:
            self.end_all(failed[0].status, failed[0].words, failed[0].head)
        elif gone := self.signs.gone(self.patience):
            names = [self.rows[rank].name for rank in gone[:SHOWN] if rank in self.rows]
            self.gone = gone
            words = silence_of(names, len(gone), self.patience)
            self.end_all(RESUME_ME, self.with_last_good(words))
        elif overdue := [row.overdue for row in self.rows.values() if row.overdue]:
            self.judge_hang(overdue[0])

    def judge_hang(self, overdue: str) -> None:
        """Name the ranks that the others wait for, once it is clear which of them reply."""
        silent = self.signs.gone(2 * REPLY_TIMEOUT)
        if len(silent) < len(self.signs.gone(3)):
            return
        self.gone = silent
        present = {rank: row for rank, row in self.rows.items() if not row.has_left}
        lines = ["" if rank in silent else row.line for rank, row in present.items()]
        problems = hang_problems([row.name for row in present.values()], lines)
        self.end_all(RESUME_ME, self.with_last_good(f"{overdue}: {'; '.join(problems)}"))

    def end_all(self, status: int, words: str, head: str = "error") -> None:
        """On rank 0: say why the run ends, and tell all ranks to exit with this status."""
        if words:
            program.print_error(words, head)
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.set("end", str(status)))
        self.verdict = status

    def judge_rank_0(self) -> None:
        """On the other ranks: is rank 0 gone, or does it hang with its server?"""
        name = self.rows[0].name if self.rows else "rank 0"
        if self.signs.gone(self.patience):
            words = silence_of([name], 1, self.patience)
        elif self.row.overdue and self.signs.gone(2 * REPLY_TIMEOUT):
            words = f"{self.row.overdue}: {name} does not reply"
        else:
            return
        is_first = True
        with contextlib.suppress(*STORE_LOST):  # its server may reply
            is_first = self.query(lambda: self.store.add("reports", 1)) == 1
        if is_first:
            program.print_error(self.with_last_good(words))
        self.verdict = RESUME_ME

    def with_last_good(self, words: str) -> str:
        """These words, and which checkpoint is the newest: the file system may be what hangs."""
        with contextlib.suppress(futures.TimeoutError, OSError):
            if self.last_good:
                thread = futures.ThreadPoolExecutor(1)
                return f"{words}. {thread.submit(self.last_good).result(REPLY_TIMEOUT)}"
        return words

    def obey(self) -> None:
        """End this rank, unless its main thread does so."""
        self.row.has_left = True
        self.publish()
        # The main thread may notice by itself. When a rank ends, its launcher may end all others.
        time.sleep(REPLY_TIMEOUT + 3)
        self.wait_for_readers(READING)
        if not self.leaving.is_set():
            if self.verdict == 2:
                program.end_torchrun()
            os._exit(program.flush(self.verdict))

    # --- What the main thread says

    def expect(self, words: str, seconds: float) -> None:
        """End the run, with these words, unless this is called again within so many seconds."""
        self.task = words, time.monotonic() + seconds

    def end_with(self, error: BaseException | None, problem: str = "") -> None:
        """This rank ends, with an error or without: collectives with it would hang.

        Raises SystemExit once rank 0 has said why. A bug is left to whoever prints its traceback;
        so is an error of a process without others. problem: what to say in place of the error, if
        others need nothing but to start again.
        """
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            self.leave()
            return
        if getattr(error, "on_all_ranks", False):
            self.leave()  # all print or end at this moment
            return
        status, head = RESUME_ME, "error"
        if not problem and is_lost(error):
            problem = f"lost another rank: {program.one_line(error)}"
            if self.size > 1 and self.verdict is None:
                self.row.lost_another = True
                self.publish()
                self.wait_for_verdict(3 * SHORT_SILENCE)  # which names that rank
        if problem:
            words = self.with_last_good(f"{self.row.name} {problem}")
        else:
            mistake = program.user_error(error)
            status = getattr(mistake, "status", 2) if mistake else 1
            is_told = self.size > 1 and not isinstance(error, BrokenPipeError)
            words = str(mistake) if mistake and is_told else ""
            head = f"error on rank {self.rank}" if self.rank else "error"
        status = self.fail(status, words, head)
        if words:
            raise SystemExit(status) from error

    def fail(self, status: int, words: str, head: str) -> int:
        """Tell rank 0, which ends all. Returns the exit status of the run."""
        if self.rank:
            time.sleep(1)  # if rank 0 fails as well, its line is enough
        self.row.words, self.row.head = words, head
        self.row.status = status  # after what rank 0 prints with it
        self.publish()
        if self.store:
            self.wait_for_verdict(3 * REPLY_TIMEOUT)
        if self.verdict is None and words:  # rank 0 does not reply
            program.print_error(words, head)
        self.leave()
        return status if self.verdict is None else self.verdict

    def wait_for_verdict(self, seconds: float) -> None:
        """Until the thread knows with which status the run ends, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while self.verdict is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def leave(self) -> None:
        """From now on the others do not look at this rank. Rank 0 waits for them to leave."""
        self.row.has_left = True
        self.leaving.set()
        self.publish()
        self.wait_for_readers(REPLY_TIMEOUT)


def running() -> Heartbeat | None:
    """The heartbeat of this process, if it has one that has not left."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, Heartbeat)]
    return next((thread for thread in threads if not thread.leaving.is_set()), None)


@contextlib.contextmanager
def within(what: str, seconds: float = CONNECTING):
    """Give the ranks this long to do something together. After that the run ends.

    Otherwise a rank would wait for the address of a dead one until the timeout of a collective.
    """
    heartbeat = running()
    if heartbeat is None:
        yield
        return
    before = heartbeat.task
    heartbeat.expect(f"could not {what} in {seconds:g} s", seconds)
    try:
        yield
    finally:
        heartbeat.task = before


@contextlib.contextmanager
def ending_with_others():
    """The block is what this rank does in the run: see `Heartbeat.end_with`."""
    failure = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        if heartbeat := running():
            heartbeat.end_with(failure)


def as_text(row: Row) -> str:
    """A row as the store holds it."""
    return json.dumps(vars(row))


def silence_of(names: list[str], number: int, patience: float) -> str:
    """What to say of `number` silent ranks. names: of the first SHOWN."""
    more = f" and {number - SHOWN} more ranks" * (number > SHOWN)
    silent = ", ".join(names) + more
    return f"no sign of life for {patience:g} s: {silent} died, stopped, or cannot be reached"


def hang_problems(names: list[str], lines: list[str]) -> list[str]:
    """What to report of the ranks with these names, whose main threads are at these lines.

    A line is "" of a rank that does not reply, and WAITS of one that waits for others.
    """
    found = list(zip(names, lines, strict=True))
    silent = [f"{name} does not reply" for name, line in found if not line]
    hanging = [f"{name} hangs at {line}" for name, line in found if line != WAITS]
    return silent or hanging or ["all ranks wait for each other, so a device or the network hangs"]


def current_line() -> str:
    """The line of this project that the main thread is at; WAITS if it waits there for other ranks,
    for its device or for autograd."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame:
        path = Path(frame.f_code.co_filename)
        if (path.name, frame.f_code.co_name) == ("pipeline.py", "transfer"):
            return WAITS  # in C++, for another stage
        if ROOT in (path.parent, path.parent.parent):  # in the root or a folder; .venv is deeper
            return f"{path.relative_to(ROOT)}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        # Collectives; a GPU; on a GPU, the thread in which autograd runs the backward pass.
        if path.parent.is_relative_to(TORCH) and path.relative_to(TORCH).parts[0] in WAITING:
            return WAITS
        frame = frame.f_back
    return "the end of the program"


def is_lost(error: BaseException) -> bool:
    """Did a collective fail because another rank has gone?"""
    if program.user_error(error):  # NCCL reports a lack of memory by the same class
        return False
    # gloo has no class of its own: its errors begin with the path of its source
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


def quiet_nccl(timeout: timedelta) -> None:
    """Let the heartbeat decide what follows when a collective of NCCL fails.

    NCCL reads these variables when a group is made. What the user has set stays. timeout: of one
    collective.
    """
    env = os.environ
    # Otherwise NCCL's watchdog aborts this process (SIGABRT, 134) as soon as the connection to a
    # lost rank breaks, before ours can say which rank that is.
    if "NCCL_ASYNC_ERROR_HANDLING" not in env:  # its older name
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # It also aborts when its own thread stands still, such as in a driver that hangs: later than
    # ours would.
    env.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(int(timeout.total_seconds())))
