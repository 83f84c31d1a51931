"""Watchdog: finds the rank that hangs, stops all ranks when one fails, and times stragglers.

When collectives hang, ranks cannot talk through collectives. So each rank has a thread beside its
training loop, and rank 0 serves a small key-value store (PyTorch's TCPStore) to these threads:

    no step for --timeout_minutes    each thread publishes the line that its main thread is at. The
                                     ranks that do not reply, or that do not wait for others, are
                                     named, and all ranks exit with 75: resume me
    a process or machine is gone     its thread no longer counts up in the store. After 30 seconds
                                     rank 0 names it, or all others name rank 0, and all exit with
                                     75. NCCL itself would wait for ever; with gloo a collective
                                     fails at once, and then 5 seconds are enough
    one rank fails                   it publishes its exit status; the others exit with it instead
                                     of waiting for the failed rank in a collective
    out of memory                    all exit with 75, and the next start halves the microbatch

Run `torchrun --nproc_per_node 2 -m lifecycle.watchdog` to see it name a rank that sleeps.
"""

import contextlib
import gc
import os
import sys
import threading
import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import parallel
import processes
import program
from processes import REPLY_TIMEOUT, SHOWN, SignsOfLife
from program import RESUME_ME, UserError, out_of_memory, whoami

ROOT = Path(__file__).parent.parent
TORCH = Path(torch.__file__).parent
SILENCE = 30  # seconds without a sign of life after which a rank counts as gone
SHORT_SILENCE = 5  # the same, once a collective has failed on some rank
LEFT = -(2**40)  # makes a rank's count negative: it has left the training loop
WAITS = "waits"
WAITING = ("distributed", "cuda", "autograd")  # folders of torch in which a main thread waits
# Errors of the store: rank 0 is gone, or so stuck that its server does not reply.
STORE_LOST = (RuntimeError, futures.TimeoutError)


def collect_garbage(steps_since_start: int, interval: int = 50) -> None:
    """Every `interval` steps of this launch, on all ranks at the same time; never in between.

    Otherwise Python's garbage collector would stop one rank now and then, and the others wait.
    """
    if steps_since_start % interval == 0:
        gc.disable()
        gc.collect()


class StragglerTimer:
    """How long this rank spends outside collectives, step by step: the slowest is the straggler.

    It times the wait for the batch, and the final norm, logits and loss of the forward passes. In
    all other parts of a step ranks wait for one another, so all seem equally slow. With tensor
    parallelism they wait in the loss, too, and only the last stage of a pipeline has a loss. There
    it times attention in each layer, from q, k and v to out_proj. Stages may have different numbers
    of layers, so their seconds are scaled to the mean number.
    """

    def __init__(self, model, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.reading_seconds = 0.0  # of this step's wait for the batch
        self.marks = []  # begin, end, begin, end, ... of this step's timed forward passes
        self.scale = 1.0
        is_stage = hasattr(model, "pipe")
        if not parallel.is_cut(model) and not is_stage:
            model.transformer.norm_f.register_forward_pre_hook(self.mark)
            model.register_forward_hook(self.mark, prepend=True)
            return
        blocks = model.transformer.blocks
        if is_stage:
            self.scale = model.cfg.n_layers / model.pipe.size / len(blocks)
        for block in blocks:
            # qk_ln waits for the sums of all tensor ranks.
            ready = block.attn.k_ln if model.cfg.qk_ln else block.attn.Wqkv
            ready.register_forward_hook(self.mark)
            block.attn.out_proj.register_forward_pre_hook(self.mark)

    def mark(self, module, *_) -> None:
        """A hook that records the time; on a GPU as an event, since the host runs ahead of it."""
        if not module.training:
            return
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            self.marks.append(torch.cuda.current_stream().record_event(event))
        else:
            self.marks.append(time.perf_counter())

    def take(self):
        """A function for the seconds of the step just queued. Call it when that step is done."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        reading_seconds, self.marks = self.reading_seconds, []

        def seconds() -> float:
            of_pairs = [a.elapsed_time(b) / 1000 if self.on_gpu else b - a for a, b in pairs]
            return reading_seconds + self.scale * sum(of_pairs)

        return seconds


class Watchdog:
    """A context around the training loop, on every rank.

    minutes: how long a step may take. last_good(): a sentence that names the newest checkpoint.
    halve(step): records half of the microbatch for the next start, and returns it. patience: after
    how many seconds without a sign of life a rank counts as gone.
    """

    def __init__(self, world, minutes: float, last_good, halve, first_step=0, patience=SILENCE):
        self.world, self.minutes, self.last_good, self.halve = world, minutes, last_good, halve
        self.step, self.patience = first_step, patience
        self.leaving = False  # the main thread is past the training loop
        self.closed = threading.Event()
        self.reports = False  # the thread says why the run ends, and ends this rank
        self.known_peer_status = None
        self.hang_reported = False  # by any rank
        self.store, self.connected = open_store(world), True
        self.query_thread = futures.ThreadPoolExecutor(1)
        self.file_thread = futures.ThreadPoolExecutor(1)
        stage = f"stage {world.pp_rank}, " if world.pp_size > 1 else ""
        self.name = stage + whoami(world.global_rank)
        # All keys that others read, so that reading them never blocks.
        rank = world.global_rank
        values = {f"name {rank}": self.name, f"count {rank}": "0", f"line {rank}": ""}
        if rank == 0:
            values |= {"status": "", "hang": "", "lost": ""}
        for key, value in values.items():
            self.store.set(key, value)
        dist.barrier()
        self.name_of_rank_0 = self.store.get("name 0").decode()

    def __enter__(self):
        self.heartbeat()
        self.signs_of_life = SignsOfLife(self.world.global_rank, self.world.global_size)
        threading.Thread(target=self.run, daemon=True).start()
        processes.end_roll_call()
        return self

    def heartbeat(self) -> None:
        """The training loop has finished a step."""
        self.last_heartbeat = time.monotonic()

    def run(self) -> None:
        """The thread: every second, has another rank failed, is one gone, is a step overdue?"""
        while not self.closed.wait(1):
            self.exchange()
            if self.leaving:  # only count up, until the others know with which status
                continue
            if self.known_peer_status is not None:
                # The main thread may notice by itself, and the failing rank wants to print why.
                time.sleep(REPLY_TIMEOUT + 3)
                self.wait_for_readers(REPLY_TIMEOUT)
                end(self.known_peer_status)
            if gone := self.signs_of_life.gone(self.patience):
                self.report_gone(gone)
            is_overdue = time.monotonic() - self.last_heartbeat > 60 * self.minutes
            if is_overdue or self.hang_reported:
                self.report_hang()
        while not self.others_left():
            time.sleep(1)  # this thread keeps rank 0's server alive

    # --- The store

    def query(self, function):
        """`function()`, which uses the store. Raises STORE_LOST where the store would block."""
        if not self.connected:
            raise dist.DistNetworkError("the connection to the store is broken")
        try:
            return self.query_thread.submit(function).result(REPLY_TIMEOUT)
        except dist.DistNetworkError:
            # It never connects again, and would print a C++ traceback each time.
            self.connected = False
            raise

    def read(self, *names: str) -> list[str]:
        """What is published under these keys: in one message, however many there are."""
        return [value.decode() for value in self.query(lambda: self.store.multi_get(list(names)))]

    def exchange(self) -> None:
        """Give a sign of life; note the signs of others, and what they have published.

        Two requests of each rank a second: with 1,000 ranks 6 % of a core of an EPYC, clients and
        rank 0's server together.
        """
        counts = None
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.add(f"count {self.world.global_rank}", 1))
            ranks = list(self.signs_of_life.counts)
            status, hang, lost, *found = self.read("status", "hang", "lost", *keys("count", ranks))
            counts = dict(zip(ranks, map(int, found), strict=True))
            self.hang_reported = bool(hang)
            if lost:
                self.patience = min(self.patience, SHORT_SILENCE)
            self.note_status(status)
        self.signs_of_life.look(counts, time.monotonic())

    def publish(self, key: str, value: str) -> None:
        """Set a key in the store, if it replies."""
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.set(key, value))

    def note_status(self, status: str) -> None:
        """The exit status that a failing rank has published, "" if no rank has failed."""
        if status and self.known_peer_status is None:
            self.known_peer_status = int(status)
            self.leave_store()

    def peer_exit_status(self) -> int | None:
        """The exit status that a failing rank has published; None if no rank has failed."""
        with contextlib.suppress(*STORE_LOST):  # the collectives will fail as well
            self.note_status(*self.read("status"))
        return self.known_peer_status

    def wait_for_status(self, seconds: float) -> int | None:
        """`peer_exit_status`, once there is one, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while self.peer_exit_status() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.known_peer_status

    def leave_store(self) -> None:
        """Let rank 0, which serves the store, end without waiting for this rank."""
        with contextlib.suppress(*STORE_LOST):  # rank 0 may be gone already
            self.query(lambda: self.store.add(f"count {self.world.global_rank}", LEFT))

    def others_left(self, gone=()) -> bool:
        """On rank 0: are the other ranks past the training loop, or know that they have to end?
        Then none needs the store. gone: ranks that do not count."""
        if self.world.global_rank > 0 or self.world.global_size == 1:
            return True
        others = [rank for rank in self.signs_of_life.counts if rank not in gone]
        with contextlib.suppress(*STORE_LOST):
            return all(int(count) < 0 for count in self.read(*keys("count", others)))
        return True

    def wait_for_readers(self, seconds: float, gone=()) -> None:
        """Keep rank 0 alive until the others have read from its store, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.others_left(gone) and time.monotonic() < deadline:
            time.sleep(0.1)

    # --- Another rank is gone, or hangs: the thread ends this one

    def report_gone(self, ranks: list[int]) -> None:
        """Name the ranks that give no sign of life, and end this one and the others."""
        if self.world.global_rank > 0:  # it looks at rank 0 alone, which serves the store
            self.connected = False
            names = [self.name_of_rank_0]
        else:
            names = [f"rank {rank}" for rank in ranks[:SHOWN]]
            with contextlib.suppress(*STORE_LOST):
                names = self.read(*keys("name", ranks[:SHOWN]))
        self.report(processes.silence_of(names, len(ranks), self.patience), gone=ranks)

    def report_hang(self) -> None:
        """Name the ranks that the others wait for, and end this one.

        All ranks reply, also those whose own step is not overdue yet: they have seen "hang".
        """
        self.reports = True  # from now on, since the others take time to reply
        ranks = range(self.world.global_size)
        silent = []
        try:
            line = current_line()
            self.query(lambda: self.store.set("hang", "reported"))
            self.query(lambda: self.store.set(f"line {self.world.global_rank}", line))
            lines, names = self.lines(), self.read(*keys("name", ranks))
        except STORE_LOST:
            problems = [f"{self.name_of_rank_0} does not reply"]
        else:
            problems = hang_problems(names, lines)
            silent = [rank for rank in ranks if not lines[rank]]
        self.report(f"no step for {self.minutes:g} minutes: {'; '.join(problems)}", gone=silent)

    def lines(self) -> list[str]:
        """The line that each rank is at; "" of those that do not reply within some seconds."""
        of_ranks = keys("line", range(self.world.global_size))
        deadline = time.monotonic() + 2 * REPLY_TIMEOUT
        while "" in (found := self.read(*of_ranks)) and time.monotonic() < deadline:
            if self.peer_exit_status() is not None:
                break  # some rank has said why already
            time.sleep(0.2)
        return found

    def report(self, problem: str, gone: list[int]) -> None:
        """Say why the run ends, unless another rank does, and end this one.

        gone: ranks for which rank 0 need not wait.
        """
        self.reports = True
        if self.is_first_to_report():
            with contextlib.suppress(*STORE_LOST, OSError):  # the file system may be what hangs
                last_good = self.file_thread.submit(self.last_good).result(REPLY_TIMEOUT)
                problem = f"{problem}. {last_good}"
            program.print_error(problem)
            self.publish("status", str(RESUME_ME))
        else:
            # When a rank ends, its launcher may end all others.
            self.wait_for_status(3 * REPLY_TIMEOUT)
        self.wait_for_readers(SILENCE, gone)
        end(RESUME_ME)

    def is_first_to_report(self) -> bool:
        """Whether no other rank says why the run ends. Of two such reports the second is wrong: it
        names ranks that no longer reply because of the first."""
        with contextlib.suppress(*STORE_LOST):
            return self.query(lambda: self.store.add("reports", 1)) == 1
        return True

    # --- This rank ends

    def __exit__(self, kind, error, trace) -> None:
        """If this rank fails alone, publish its exit status: collectives with it would hang."""
        if error and processes.is_lost(error) and self.world.global_size > 1:
            self.look_for_lost_rank()
        self.leaving = True
        try:
            self.tell_others(error)
        finally:
            self.leave_store()
            self.closed.set()

    def look_for_lost_rank(self) -> None:
        """Give the threads time to name the rank that is gone, with which a collective failed."""
        self.patience = min(self.patience, SHORT_SILENCE)
        self.publish("lost", "yes")
        self.wait_for_status(3 * SHORT_SILENCE)

    def tell_others(self, error: BaseException | None) -> None:
        """Publish the exit status for what this rank failed with. Raises SystemExit if others need
        nothing but to start again."""
        if error is None:
            return
        if isinstance(error, SystemExit) or getattr(error, "on_all_ranks", False):
            self.wait_for_readers(REPLY_TIMEOUT)  # the others leave at the same step
            return
        if self.reports:
            time.sleep(10 * REPLY_TIMEOUT)  # the thread will end this rank
        if out_of_memory(error):
            problem = f"is out of memory, so the next start uses microbatches of {self.halved()}"
        elif processes.is_lost(error):
            problem = f"lost another rank: {program.one_line(error)}"
        else:
            mistake = program.user_error(error)
            self.publish_exit_status(getattr(mistake, "status", 2) if mistake else 1)
            return  # processes.run prints the error
        status = self.peer_exit_status()
        if status is None:  # this rank is the first to fail
            status = RESUME_ME
            if self.is_first_to_report():
                program.print_error(f"{self.name} {problem}. {self.last_good()}")
            self.publish_exit_status(status)
        else:
            self.wait_for_readers(REPLY_TIMEOUT)
        raise SystemExit(status) from error

    def halved(self) -> int:
        """Record half of the microbatch, and return it."""
        try:
            return self.halve(self.step + 1)
        except (UserError, OSError):  # it is 1 already, or the record cannot be written
            self.publish_exit_status(2)
            raise

    def publish_exit_status(self, status: int) -> None:
        """Tell the other ranks to exit with `status`, and give them time to read it."""
        self.publish("status", str(status))
        self.wait_for_readers(REPLY_TIMEOUT)


def keys(name: str, ranks) -> list[str]:
    """Under which keys these ranks publish what has this name."""
    return [f"{name} {rank}" for rank in ranks]


def hang_problems(names: list[str], lines: list[str]) -> list[str]:
    """What to report of the ranks with these names, whose main threads are at these lines.

    A line is "" of a rank that does not reply, and WAITS of one that waits for others.
    """
    found = list(zip(names, lines, strict=True))
    silent = [f"{name} does not reply" for name, line in found if not line]
    hanging = [f"{name} hangs at {line}" for name, line in found if line != WAITS]
    return silent or hanging or ["all ranks wait for each other, so a device or the network hangs"]


def open_store(world) -> dist.Store:
    """A key-value store for all ranks, whose server is in rank 0."""
    if world.global_size == 1:
        return dist.HashStore()
    host = os.environ.get("MASTER_ADDR", "localhost")
    options = {"timeout": timedelta(seconds=REPLY_TIMEOUT), "wait_for_workers": False}
    server = None
    if world.global_rank == 0:
        server = dist.TCPStore(host, 0, is_master=True, **options)  # at any free port
    port = processes.rank_zero_decides(lambda: server.port)
    return server or dist.TCPStore(host, port, is_master=False, **options)


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


def end(status: int) -> None:
    """End this process from any thread."""
    if status == 2:
        program.end_torchrun()
    os._exit(program.flushed(status))


def demonstrate(argv) -> None:
    """The last rank sleeps; the watchdog names it and ends all ranks."""
    program.arguments(argv)
    world = processes.start("cpu")
    with Watchdog(world, 0.05, lambda: "This was a demonstration", halve=None):
        if world.global_rank == world.global_size - 1:
            time.sleep(600)
        dist.barrier()


if __name__ == "__main__":
    processes.run(demonstrate)
