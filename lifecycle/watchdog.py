"""Watchdog: finds the rank that hangs, stops all ranks when one fails, and times stragglers.

When collectives hang, ranks cannot talk through collectives. So each rank has a thread beside its
training loop, and rank 0 serves a small key-value store (PyTorch's TCPStore) to these threads:

    no step for --timeout_minutes    each thread publishes the line that its main thread is at, and
                                     how many collectives it has started. The ranks that do not
                                     reply, or that the others wait for, are named, and all ranks
                                     exit with 75: resume me
    a process or machine is gone     its thread no longer counts up in the store. After 30 seconds
                                     rank 0 names it, or all others name rank 0, and all exit with
                                     75. NCCL itself would wait for ever; with gloo a collective
                                     fails at once, and whoever notices names it
    one rank fails                   it publishes its exit status; the others exit with it instead
                                     of waiting for the failed rank in a collective
    out of memory                    all exit with 75, and the next start halves the microbatch

`Guard` is the one context around the training loop: signals, lease, watchdog, straggler timer.

Run `torchrun --nproc_per_node 2 -m lifecycle.watchdog` to see it name a rank that sleeps.
"""

import contextlib
import json
import os
import sys
import threading
import time
from concurrent import futures
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pipeline
import processes
import program
import tensor_parallel
from processes import REPLY_TIMEOUT, SHOWN, SignsOfLife
from program import RESUME_ME, UserError, out_of_memory, whoami

ROOT = Path(__file__).parent.parent
TORCH = Path(torch.__file__).parent
SILENCE = 30  # seconds without a sign of life after which a rank counts as gone
SIGN = 2.5  # seconds in which a living rank counts up: it does so every second
LEFT = -(2**40)  # makes a rank's count negative: it has left the training loop
WAITS = "waits"
WAITS_FOR_STAGE = "waits for a stage"
WAITING = ("distributed", "cuda", "autograd")  # folders of torch in which a main thread waits
# Errors of the store: rank 0 is gone, or so stuck that its server does not reply.
STORE_LOST = (RuntimeError, futures.TimeoutError)


class Guard:
    """Protects the training loop on one rank: signals, lease, watchdog and straggler timer."""

    def __init__(self, signals, lease, watchdog: "Watchdog", straggler_timer: "StragglerTimer"):
        self.signals, self.lease = signals, lease
        self.watchdog, self.straggler_timer = watchdog, straggler_timer
        self.contexts = contextlib.ExitStack()

    def __enter__(self):
        self.signals.nothing_to_save = False
        self.contexts.enter_context(self.lease)
        self.contexts.enter_context(self.watchdog)
        return self

    def __exit__(self, *error):
        return self.contexts.__exit__(*error)

    def watch(self, batches):
        """Yield the same (step, rows); time the wait for each, and record a heartbeat after it."""
        for step, rows in self.straggler_timer.time_reading(batches):
            self.watchdog.step = step
            yield step, rows
            self.watchdog.heartbeat()


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
        self.reading_seconds = 0.0
        self.marks = []  # begin, end, begin, end, ... of this step's timed forward passes
        self.scale = 1.0
        is_stage = isinstance(model, pipeline.Stage)
        if is_stage:
            mean_layers = model.cfg.n_layers / model.pipe.size
            self.scale = mean_layers / len(model.transformer.blocks)
        if tensor_parallel.layout_of(model).size == 1 and not is_stage:
            model.transformer.norm_f.register_forward_pre_hook(self.mark)
            model.register_forward_hook(self.mark, prepend=True)
            return
        for block in model.transformer.blocks:
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

    def time_reading(self, batches):
        """The same batches; notes how long each one was waited for."""
        batches = iter(batches)
        begin = time.perf_counter()
        for batch in batches:
            self.reading_seconds = time.perf_counter() - begin
            yield batch
            begin = time.perf_counter()

    def take(self):
        """A function for the seconds of the step just queued. Call it when that step is done."""
        marks, self.marks = self.marks, []
        reading_seconds = self.reading_seconds

        def seconds() -> float:
            pairs = zip(marks[::2], marks[1::2], strict=True)
            if self.on_gpu:
                computing_seconds = sum(a.elapsed_time(b) / 1000 for a, b in pairs)
            else:
                computing_seconds = sum(b - a for a, b in pairs)
            return reading_seconds + self.scale * computing_seconds

        return seconds


class Watchdog:
    """A context around the training loop, on every rank.

    minutes: how long a step may take. last_good(): a sentence that names the newest checkpoint.
    halve(step): records half of the microbatch for the next start, and returns it. patience: after
    how many seconds without a sign of life a rank counts as gone.
    """

    def __init__(
        self,
        world,
        minutes: float,
        last_good,
        halve,
        first_step: int = 0,
        patience: float = SILENCE,
    ):
        self.world, self.minutes, self.last_good, self.halve = world, minutes, last_good, halve
        self.step, self.patience = first_step, patience
        self.leaving = False  # the main thread is past the training loop
        self.closed = threading.Event()
        self.reports = False
        self.known_peer_status = None
        self.hang_reported = False  # by any rank
        self.store, self.connected = open_store(world), True
        self.query_thread = futures.ThreadPoolExecutor(1)
        self.file_thread = futures.ThreadPoolExecutor(1)
        stage = f"stage {world.pp_rank}, " if world.pp_size > 1 else ""
        self.name = stage + whoami(world.global_rank)
        self.publish_first_values()
        dist.barrier()
        self.name_of_rank_0 = self.store.get("name 0").decode()

    def publish_first_values(self) -> None:
        """All keys that others read, so that reading them never blocks."""
        rank = self.world.global_rank
        self.store.set(f"name {rank}", self.name)
        self.store.set(f"count {rank}", "0")
        self.store.set(f"reply {rank}", "")
        if rank == 0:
            self.store.set("status", "")
            self.store.set("hang", "")

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

    def read(self, *keys: str) -> list[str]:
        """What is published under each key: in one message, however many there are."""
        return [value.decode() for value in self.query(lambda: self.store.multi_get(list(keys)))]

    def exchange(self) -> None:
        """Give a sign of life; note the signs of others, and the status that they have published.

        Two requests of each rank a second: with 1,000 ranks 6 % of a core of an EPYC, clients and
        rank 0's server together.
        """
        counts = None
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.add(f"count {self.world.global_rank}", 1))
            ranks = list(self.signs_of_life.counts)
            status, hang, *read = self.read("status", "hang", *(f"count {rank}" for rank in ranks))
            counts = dict(zip(ranks, map(int, read), strict=True))
            self.hang_reported = bool(hang)
            self.note_status(status)
        self.signs_of_life.look(counts, time.monotonic())

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

    def is_first_to_report(self) -> bool:
        """Whether no other rank says why the run ends. Of two such reports the second is wrong: it
        names ranks that no longer reply because of the first."""
        with contextlib.suppress(*STORE_LOST):
            return self.query(lambda: self.store.add("reports", 1)) == 1
        return True

    def report_gone(self, ranks: list[int]) -> None:
        """Name the ranks that give no sign of life, and end this one and the others."""
        self.reports = True
        if self.world.global_rank > 0:
            missed = f"no sign of life for {self.patience:g} s"
            self.print_problem(f"{missed}: {self.name_of_rank_0} does not reply")
            end(RESUME_ME)
        if self.is_first_to_report():
            shown = ranks[:SHOWN]
            names = [f"rank {rank}" for rank in shown]
            with contextlib.suppress(*STORE_LOST):
                names = self.read(*(f"name {rank}" for rank in shown))
            self.print_problem(processes.silence_of(names, len(ranks), self.patience))
        self.publish_exit_status(RESUME_ME, SILENCE, gone=ranks)
        end(RESUME_ME)

    def report_hang(self) -> None:
        """Name the ranks that the others wait for, and end this one.

        All ranks reply, also those whose own step is not overdue yet: they have seen "hang".
        """
        self.reports = True
        reply = json.dumps([current_line(), collectives_started()])
        ranks = range(self.world.global_size)
        silent = []
        try:
            self.query(lambda: self.store.set("hang", "reported"))
            self.query(lambda: self.store.set(f"reply {self.world.global_rank}", reply))
            replies = self.replies()
            names = self.read(*(f"name {rank}" for rank in ranks))
        except STORE_LOST:  # rank 0 serves the store
            problems, is_reporter = [f"{self.name_of_rank_0} does not reply"], True
        else:
            problems = hang_problems(names, [reply and json.loads(reply) for reply in replies])
            silent = [rank for rank in ranks if not replies[rank]]
            lowest = min(rank for rank in ranks if replies[rank])
            is_reporter = lowest == self.world.global_rank and self.is_first_to_report()
        if is_reporter:
            self.print_problem(f"no step for {self.minutes:g} minutes: {'; '.join(problems)}")
            self.publish_exit_status(RESUME_ME, SILENCE, gone=silent)
        else:
            self.wait_for_status()
        end(RESUME_ME)

    def replies(self) -> list[str]:
        """What each rank replies to "hang"; "" of those that do not within some seconds."""
        keys = [f"reply {rank}" for rank in range(self.world.global_size)]
        deadline = time.monotonic() + 2 * REPLY_TIMEOUT
        while "" in (found := self.read(*keys)) and time.monotonic() < deadline:
            if self.peer_exit_status() is not None:
                break  # some rank has said why already
            time.sleep(0.2)
        return found

    def wait_for_status(self) -> None:
        """Give the rank that reports why the run ends some seconds to do so, and to publish the
        exit status: when a rank ends, its launcher may end all others."""
        deadline = time.monotonic() + 3 * REPLY_TIMEOUT
        while self.peer_exit_status() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        self.wait_for_readers(REPLY_TIMEOUT)

    def print_problem(self, problem: str) -> None:
        """Print why the run ends, and which checkpoint is the last good one."""
        with contextlib.suppress(*STORE_LOST, OSError):  # the file system may be what hangs
            problem = f"{problem}. {self.file_thread.submit(self.last_good).result(REPLY_TIMEOUT)}"
        program.print_error(problem)

    def __exit__(self, kind, error, trace) -> None:
        """If this rank fails alone, publish its exit status: collectives with it would hang."""
        self.leaving = True
        try:
            self.tell_others(error)
        finally:
            self.leave_store()
            self.closed.set()

    def leave_store(self) -> None:
        """Let rank 0, which serves the store, end without waiting for this rank."""
        with contextlib.suppress(*STORE_LOST):  # rank 0 may be gone already
            self.query(lambda: self.store.add(f"count {self.world.global_rank}", LEFT))

    def tell_others(self, error: BaseException | None) -> None:
        """Publish the exit status for what this rank failed with. Raises SystemExit if others need
        nothing but to start again."""
        if error is None:
            return
        if isinstance(error, SystemExit) or getattr(error, "on_all_ranks", False):
            deadline = time.monotonic() + REPLY_TIMEOUT
            while not self.others_left() and time.monotonic() < deadline:
                time.sleep(0.1)  # they leave at the same step
            return
        if self.reports:
            time.sleep(10 * REPLY_TIMEOUT)  # the thread will end this rank
        if out_of_memory(error):
            problem = f"is out of memory, so the next start uses microbatches of {self.halved()}"
        elif processes.is_lost(error):
            problem = f"lost another rank: {program.one_line(error)}"
            if self.peer_exit_status() is None:
                problem += self.silence()
        else:
            self.publish_exit_status(2 if processes.user_error(error) else 1)
            return  # processes.run prints the error
        status = self.peer_exit_status()
        if status is None:  # this rank is the first to fail
            status = RESUME_ME
            if self.is_first_to_report():
                program.print_error(f"{self.name} {problem}. {self.last_good()}")
            self.publish_exit_status(status, wait=2 if processes.is_lost(error) else REPLY_TIMEOUT)
        else:
            self.wait_for_readers(REPLY_TIMEOUT)
        raise SystemExit(status) from error

    def silence(self) -> str:
        """A sentence that names the ranks without a sign of life in the next seconds, if any.

        One of the ranks that lost another one looks, and the others wait for what it publishes:
        with 1,000 ranks the store could not answer all of them.
        """
        keys = [f"count {rank}" for rank in range(self.world.global_size)]
        try:
            if self.query(lambda: self.store.add("looking", 1)) > 1:
                deadline = time.monotonic() + 4 * SIGN
                while self.peer_exit_status() is None and time.monotonic() < deadline:
                    time.sleep(0.5)
                return ""
            before = self.read(*keys)
            time.sleep(SIGN)
            now = self.read(*keys)
            counts = zip(map(int, before), map(int, now), strict=True)
            silent = [rank for rank, (old, new) in enumerate(counts) if 0 <= new == old]
            names = self.read(*(f"name {rank}" for rank in silent[:8])) if silent else []
        except STORE_LOST:
            names = [self.name_of_rank_0]
        return f". No sign of life from {', '.join(names)}" if names else ""

    def halved(self) -> int:
        """Record half of the microbatch, and return it."""
        try:
            return self.halve(self.step + 1)
        except (UserError, OSError):  # it is 1 already, or the record cannot be written
            self.publish_exit_status(2)
            raise

    def publish_exit_status(self, status: int, wait: float = REPLY_TIMEOUT, gone=()) -> None:
        """Tell the other ranks to exit with `status`. wait: seconds for them to read it; those that
        are gone will not."""
        with contextlib.suppress(*STORE_LOST):
            self.query(lambda: self.store.set("status", str(status)))
        self.wait_for_readers(wait, gone)

    def others_left(self, gone=()) -> bool:
        """On rank 0: are the other ranks past the training loop, or know that they have to end?
        Then none needs the store. gone: ranks that do not count."""
        if self.world.global_rank > 0 or self.world.global_size == 1:
            return True
        others = [rank for rank in self.signs_of_life.counts if rank not in gone]
        with contextlib.suppress(*STORE_LOST):
            counts = self.read(*(f"count {rank}" for rank in others)) if others else []
            return all(int(count) < 0 for count in counts)
        return True

    def wait_for_readers(self, seconds: float, gone=()) -> None:
        """Keep rank 0 alive until the others have read from its store, at most so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.others_left(gone) and time.monotonic() < deadline:
            time.sleep(0.1)


def hang_problems(names: list[str], replies: list) -> list[str]:
    """What to report of the ranks with these names.

    replies: of each rank None, or the line that its main thread is at and `collectives_started`.
    """
    silent = [rank for rank, reply in enumerate(replies) if not reply]
    if silent:
        return [f"{names[rank]} does not reply" for rank in silent]
    behind = ranks_behind([started for _, started in replies])
    for rank, (line, _) in enumerate(replies):
        if line == WAITS_FOR_STAGE:  # so it is not the cause, though others may wait for it
            behind.pop(rank, None)
    problems = []
    for rank, (line, _) in enumerate(replies):
        facts = []
        if line not in (WAITS, WAITS_FOR_STAGE):
            facts.append(f"hangs at {line}")
        if rank in behind:
            plural = "s" * (behind[rank] > 1)
            facts.append(f"has started {behind[rank]} collective{plural} fewer than the others")
        if rank in behind or facts and not behind:
            problems.append(f"{names[rank]} {' and '.join(facts)}")
    return problems or ["all ranks wait for each other, so a device or the network hangs"]


def ranks_behind(started: list[dict[str, int]]) -> dict[int, int]:
    """The ranks that others wait for and that wait for nobody: how many collectives they lack.

    started: `collectives_started` of each rank. In a group the ranks that have started more
    collectives wait for those that have started fewer. A rank may lag in one group because it waits
    in another: it is not the cause.
    """
    fewer, waiting = {}, set()
    for group in {group for of_rank in started for group in of_rank}:
        counts = {rank: of_rank[group] for rank, of_rank in enumerate(started) if group in of_rank}
        lowest, highest = min(counts.values()), max(counts.values())
        for rank, count in counts.items():
            if count > lowest:
                waiting.add(rank)
            if count < highest:
                fewer[rank] = max(highest - count, fewer.get(rank, 0))
    return {rank: count for rank, count in fewer.items() if rank not in waiting}


def collectives_started() -> dict[str, int]:
    """How many collectives this rank has started in each group that its main thread uses.

    Started is not finished: NCCL only puts them into a queue. Empty if PyTorch does not tell.
    """
    found = {}
    with contextlib.suppress(AttributeError, RuntimeError):  # PyTorch calls both names its own
        for group, ranks in list(dist.distributed_c10d._world.pg_group_ranks.items()):
            if group == dist.GroupMember.NON_GROUP_MEMBER:  # of a group without this rank
                continue
            # In a background group the ranks wait in another thread. Stages send unequally often.
            if group.group_desc in (processes.BACKGROUND, processes.STAGES):
                continue
            for backend in map(group._get_backend, group._device_types):  # gloo, nccl
                key = f"{backend.name()} group {group.group_name} of {len(ranks)} from {min(ranks)}"
                found[key] = backend._get_sequence_number_for_group()
    return found


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
    for its device or for autograd, and WAITS_FOR_STAGE for a neighbour in the pipeline."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame:
        if frame.f_code is pipeline.Pipe.transfer.__code__:  # waits in C++
            return WAITS_FOR_STAGE
        path = Path(frame.f_code.co_filename)
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
