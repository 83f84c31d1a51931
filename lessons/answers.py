"""A reader's answer, as a checker sees it: functions that run in a process of their own.

    python -m lessons check 3

A checker is a file lessons/checkers/N_name.py. Each of its functions `check_...(answer)` is one
part of the exercise, and the first line of its docstring is the part's title. It calls the answer,
and compares what comes with what it knows:

    def check_slopes(answer):
        \"\"\"ALiBi's slopes\"\"\"
        for n_heads in (1, 2, 8, 12):
            slopes = answer.call("alibi_slopes", n_heads)
            close("alibi_slopes", slopes, attention.alibi_slopes(n_heads), 1e-6, f"{n_heads=}")

It begins with the smallest case, so that the first failure is the easiest one to think about.
Whatever the answer does wrong becomes a `Wrong`; its message says what was expected and what came.
"""

import inspect
import math
import multiprocessing.connection
import pickle
import signal
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy
import torch

import config
from lessons import answering

SECONDS = 20  # of the processor, for one call
STARTING = 120  # seconds of the clock until a process answers for the first time
PATIENCE = 30  # the same later on


class Wrong(Exception):
    """The answer is wrong. The message says what was expected, what came, and in which case."""


class ToDo(Exception):
    """The answer, or this part of it, is not written yet."""


class Skipped(Exception):
    """This part cannot be checked here. The message says why."""


class PerRank(NamedTuple):
    """An argument that differs between ranks: one value for each."""

    values: list


class Answer:
    """The file of an answer, and the processes that run it. Use it in a `with` statement."""

    def __init__(self, path: Path):
        self.path = Path(path).resolve()
        self.alone = None  # the process, from the first call on
        self.ranks = {}  # number of ranks: their processes
        self.not_run = ""  # why the parts that follow are skipped
        self.too_slow = 0  # calls that did not return in time
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in [self.alone, *(p for pool in self.ranks.values() for p in pool)]:
            if process is not None:
                process.stop()
        self.folder.cleanup()

    def value(self, name: str):
        """The constant of this name."""
        return self.ask(name, SECONDS, "value", name)

    def call(self, function: str, *args, seconds: float = SECONDS, **keywords):
        """What the function returns, within so many seconds of the processor.

        Raises Wrong if it fails or takes longer, ToDo if it is not written yet.
        """
        shown = f"{function}({describe(args, keywords)})"
        return self.ask(shown, seconds, "call", function, args, keywords)

    def measure(self, function: str, *args, seconds: float = SECONDS, **keywords) -> tuple:
        """(What it returns, the most bytes that tensors made by it held at once)."""
        shown = f"{function}({describe(args, keywords)})"
        return self.ask(shown, seconds, "measure", function, args, keywords)

    def call_spoiled(self, function: str, *args, seconds: float = SECONDS) -> tuple:
        """(What it returns if all that its Triton kernels write is overwritten; how many tensors
        those have written)."""
        shown = f"{function}({describe(args, {})})"
        return self.ask(shown, seconds, "spoil", function, args, {})

    def call_until_killed(self, function: str, *args, at: int | None, seconds: float = SECONDS):
        """Call it in a process that kills itself just before its change of a file number `at`.

        Returns whether that came to pass. With at=None: the names of the changes that it makes.
        """
        shown = f"{function}({describe(args, {})})"
        return self.ask(shown, seconds, "kill", function, args, {}, at)

    def call_on_ranks(self, size: int, function: str, *args, seconds: float = SECONDS) -> list:
        """What it returns on each of `size` ranks. An argument `PerRank` differs between them."""
        self.skip_if_hopeless()
        if size not in self.ranks:
            self.ranks[size] = self.started(size)
            store = f"{self.folder.name}/{uuid.uuid4()}"  # gloo makes this file
            for rank, process in enumerate(self.ranks[size]):
                process.send(SECONDS, "join", rank, size, store)
            for process in self.ranks[size]:
                process.receive("joining the other ranks", SECONDS)
        asked = []
        for rank, process in enumerate(self.ranks[size]):
            own = [arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args]
            process.send(seconds, "call", function, own, {})
            asked.append(f"{function}({describe(own, {})}) on rank {rank} of {size}")
        try:
            return received(self.ranks[size], asked, seconds)
        except (Wrong, ToDo) as error:
            for process in self.ranks.pop(size):  # they may be in different collectives
                process.stop()
            self.count_if_slow(error)
            raise

    def ask(self, shown: str, seconds: float, *request):
        """The answer's reply to one request of answering.py."""
        self.skip_if_hopeless()
        if self.alone is None:
            (self.alone,) = self.started(1)
        try:
            self.alone.send(seconds, *request)
            return self.alone.receive(shown, seconds)
        except Died as error:
            self.alone.stop()
            self.alone = None  # the next call gets a new one
            self.count_if_slow(error)
            raise

    def started(self, size: int) -> list:
        """So many processes that have loaded the answer. If it cannot be loaded, that is said once.

        Raises Wrong or ToDo then, and later parts are skipped.
        """
        processes = [Process(self.path) for _ in range(size)]
        is_inside = self.path.is_relative_to(answering.ROOT)
        name = self.path.relative_to(answering.ROOT) if is_inside else self.path
        try:
            for process in processes:
                process.send(SECONDS, "load")
            for process in processes:
                process.receive(f"loading {name}", SECONDS)
        except NotLoaded as error:
            self.not_run = "the file cannot be loaded, see above"
            raise Wrong(f"{name}, {error}") from None
        except (Wrong, ToDo):
            self.not_run = "the file cannot be loaded, see above"
            raise
        finally:
            if self.not_run:
                for process in processes:
                    process.stop()
        return processes

    def skip_if_hopeless(self) -> None:
        """Raise Skipped if an earlier part has shown why this one need not be tried."""
        if self.not_run:
            raise Skipped(f"not run: {self.not_run}")

    def count_if_slow(self, error: Exception) -> None:
        """The second call that takes too long is the last one."""
        self.too_slow += isinstance(error, TooSlow)
        if self.too_slow == 2:
            self.not_run = "two calls took too long, see above"


def received(processes: list, asked: list[str], seconds: float) -> list:
    """What each process returns. The first failure counts: others may wait for that one in vain.

    If several fail at a time, a process that ended comes first: the others failed because of it.
    """
    results = {}
    while len(results) < len(processes):
        waiting = {p.pipe: rank for rank, p in enumerate(processes) if rank not in results}
        limit = max(p.patience for p in processes) + 5 * seconds
        ready = multiprocessing.connection.wait(list(waiting), limit)
        if not ready:
            first = min(waiting.values())
            raise TooSlow(f"{asked[first]} did not return in {limit:.0f} s")
        failures = []
        for pipe in ready:
            rank = waiting[pipe]
            try:
                results[rank] = processes[rank].receive(asked[rank], seconds)
            except (Wrong, ToDo) as error:
                failures.append(error)
        if failures:
            raise next((error for error in failures if isinstance(error, Died)), failures[0])
    return [results[rank] for rank in range(len(processes))]


class Died(Wrong):
    """The process of the answer ended, or was too slow."""


class TooSlow(Died):
    """The answer did not return in time."""


class NotLoaded(Wrong):
    """The file of the answer cannot be loaded. The message is "line 3: invalid syntax"."""


class Process:
    """One process that runs an answer."""

    def __init__(self, path: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])  # once, for all answers
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=answering.serve, args=(theirs, str(path)), daemon=True
        )
        self.process.start()
        theirs.close()
        self.patience = STARTING  # seconds of the clock beyond those of the processor

    def send(self, *request) -> None:
        """Ask for something: (processor seconds, kind, what `answering` needs for it)."""
        try:
            self.pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise Died("the process that ran the answer is gone") from error

    def receive(self, shown: str, seconds: float):
        """The result of what was asked last. `shown` says in a message what that was."""
        try:
            if not self.pipe.poll(self.patience + 5 * seconds):
                raise TooSlow(f"{shown} did not return in {self.patience + 5 * seconds:.0f} s")
            kind, result = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self.death(shown, seconds) from error
        except (AttributeError, ImportError) as error:
            raise Wrong(f"{shown} returned something that cannot be read here: {error}") from error
        self.patience = PATIENCE
        if kind == "todo":
            raise ToDo(result)
        if kind == "not loaded":
            raise NotLoaded(result)
        if kind == "wrong":
            raise Wrong(f"{shown}: {result}")
        return result

    def death(self, shown: str, seconds: float) -> Died:
        """How the process ended."""
        self.process.join(5)
        code = self.process.exitcode
        if code == -signal.SIGXCPU:
            limit = f"{seconds:g} s of the processor"
            return TooSlow(f"{shown} was still computing after {limit}: does it end?")
        return Died(f"{shown} ended the process (exit code {code})")

    def stop(self) -> None:
        """End it."""
        self.pipe.close()  # a process that waits for work exits now
        self.process.join(0.2)
        self.process.kill()
        self.process.join()


# --------------------------------------------------------------------------------------------------
# Comparisons


def need(condition: bool, message: str) -> None:
    """Raise Wrong with this message unless the condition holds."""
    if not condition:
        raise Wrong(message)


def equal(what: str, got, expected, case: str = "") -> None:
    """`got` must be of the kind of `expected`, and equal to it."""
    of_case = f", for {case}" if case else ""
    if isinstance(expected, int) and isinstance(got, numpy.integer):
        got = int(got)
    same_kind = isinstance(got, type(expected)) or isinstance(expected, type(got))
    expectation = f"{what}: expected {expected!r}{of_case}"
    need(same_kind and got == expected, f"{expectation}, but got {shortened(got)}")


def is_number(value) -> bool:
    """Whether it is a number of Python or of NumPy, and no bool."""
    return isinstance(value, int | float | numpy.number) and not isinstance(value, bool)


def close(what: str, got, expected, tolerance: float, case: str = "") -> None:
    """`got` must be a number, array or tensor like `expected`, at most `tolerance` from it.

    An array must have its shape and dtype, and no NaN. A tensor is not accepted for an array.
    """
    of_case = f", for {case}" if case else ""
    if isinstance(expected, int | float):
        need(is_number(got), f"{what}: expected a number{of_case}, but got {shortened(got)}")
    else:
        kind = type(expected).__name__
        came = describe_value(got)
        need(isinstance(got, type(expected)), f"{what}: expected a {kind}{of_case}, got {came}")
        expectation = describe_value(expected)
        need(came == expectation, f"{what}: expected {expectation}{of_case}, got {came}")
    got, expected = doubles(got), doubles(expected)
    n_nan = numpy.isnan(got).sum()
    values = "1 value is" if n_nan == 1 else f"{n_nan} values are"
    need(n_nan == 0, f"{what}: {values} NaN{of_case}")
    with numpy.errstate(invalid="ignore"):  # inf - inf
        apart = numpy.where(got == expected, 0, numpy.abs(got - expected))
    if not (apart <= tolerance).all():
        place = numpy.unravel_index(numpy.argmax(apart), apart.shape)
        at = f" at {[int(i) for i in place]}" if place else ""
        raise Wrong(
            f"{what}: expected {expected[place]:.7g}{at}{of_case}, but got {got[place]:.7g}; "
            f"they may be {tolerance:.1g} apart"
        )


def doubles(value) -> numpy.ndarray:
    """A number, array or tensor as an array of float64."""
    if isinstance(value, torch.Tensor):
        value = value.detach().double().numpy()
    return numpy.asarray(value, dtype=numpy.float64)


def describe(args, keywords: dict) -> str:
    """The arguments of a call, in a few words."""
    named = [f"{name}={describe_value(value)}" for name, value in keywords.items()]
    return ", ".join([*map(describe_value, args), *named])


def describe_value(value) -> str:
    """A value in a few words: of arrays and tensors the dtype and the shape."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype} {value.shape}"
    return shortened(value)


def shortened(value) -> str:
    """At most 60 characters of its repr."""
    if isinstance(value, torch.Tensor | numpy.ndarray) and math.prod(value.shape) > 4:
        return describe_value(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def parts(checker) -> list[tuple[str, object]]:
    """[(title, function)] of a checker's parts, in the order of the file."""
    functions = [value for name, value in vars(checker).items() if name.startswith("check_")]
    return [(inspect.getdoc(function).splitlines()[0], function) for function in functions]


def main(argv: list[str]) -> None:
    """Say what this file is for."""
    config.arguments(argv)
    print(__doc__)


if __name__ == "__main__":
    config.run(main)
