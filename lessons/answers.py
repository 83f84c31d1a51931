"""A reader's answer, as a checker sees it.

    python -m lessons check 3

A checker is a file lessons/checkers/N_name.py. Each of its functions `check_...(answer)` is one
part of the exercise, and the first line of its docstring is the part's title. It calls the answer
and asserts what must come, the smallest case first: it is the easiest one to think about. What it
does not expect, such as None in place of a pair, needs no assertion: any error of the checker makes
the part wrong, too.
"""

import contextlib
import copy
import importlib.util
import inspect
import linecache
import math
import os
import signal
import sys
import traceback
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_map_only

from launch.pool import Pool, PoolError
from lessons import changes
from program import UserError

SECONDS = 30  # for one call
STARTING = 120  # until ranks answer for the first time
HANGS = """. Does it end?
Is a collective inside `if rank == 0`, or are they in another order on a rank?"""


class ToDo(Exception):
    """The answer, or this part of it, is not written yet."""


class Skipped(Exception):
    """This part cannot be checked here. The message says why."""


class PerRank(NamedTuple):
    """An argument that differs between ranks: one value for each."""

    values: list


class Answer:
    """The answer in a file, as a module.

    Loading and calling it raise AssertionError, with one line that names the line of the answer, if
    it fails or takes too long; ToDo if it is not written.
    """

    def __init__(self, path: Path):
        self.path = str(Path(path).resolve())
        self.pools = {}  # number of ranks: processes
        self.hangs = False  # whether ranks did not end
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before an answer imports triton
        changes.report_fsyncs()  # before an answer gives os.fsync another name
        spec = importlib.util.spec_from_file_location("answer", self.path)
        self.module = sys.modules["answer"] = importlib.util.module_from_spec(spec)
        with self.explained(self.path):
            spec.loader.exec_module(self.module)

    def stop(self) -> None:
        """End its ranks."""
        for pool in self.pools.values():
            pool.stop()
        self.pools.clear()

    def value(self, name: str):
        """The constant or the function of this name."""
        assert hasattr(self.module, name), f"the answer has no {name}, which is in the stub"
        return getattr(self.module, name)

    def call(self, function: str, *args, **keywords):
        """What the function returns, tensors detached. It gets copies of the arguments."""
        called = self.value(function)
        with self.explained(call_of(function, args, keywords)):
            result = called(*copy.deepcopy(args), **keywords)
            return tree_map_only(torch.Tensor, torch.Tensor.detach, result)

    def measure(self, function: str, *args) -> tuple:
        """(What it returns, the most bytes that tensors made by it held at once)."""
        called = self.value(function)
        with self.explained(call_of(function, args)):
            return measured(called, *args)

    def measure_arrays(self, function: str, *args) -> int:
        """The most bytes that NumPy's arrays, and all else of Python's, held at once."""
        called = self.value(function)
        tracemalloc.start()
        try:
            with self.explained(call_of(function, args)):
                called(*args)
            _, peak = tracemalloc.get_traced_memory()
            return peak
        finally:
            tracemalloc.stop()

    def kill(self, function: str, *args, at: int | None):
        """Call it in a copy of this process that dies before its change of a file number `at`.

        Returns whether it died. With at=None: the names of the changes that it makes.
        """
        died, names, error = changes.in_a_copy(lambda: self.call(function, *args), at)
        if error:
            raise error
        return names if at is None else died

    def call_on_ranks(self, size: int, function: str, *args) -> list:
        """What it returns on each of `size` ranks. An argument `PerRank` differs between them."""
        if self.hangs:
            raise Skipped("not run: a call did not end, see above")
        patience = SECONDS + 5  # so that a rank's own limit, which names the line, comes first
        if size not in self.pools:
            self.pools[size] = Pool(size, start_rank)
            patience = STARTING
        request = call_on_rank, self.path, function, args
        try:
            results = self.pools[size](*request, patience=patience)
        except PoolError as error:
            del self.pools[size]  # it has ended: the next call gets a new one
            _, failed, words = error.details.partition("AssertionError: ")
            self.hangs = str(error).startswith("no answer in")
            why = words.strip() if failed else f"{function}: {error}"
            raise AssertionError(f"on {size} ranks, {why}{HANGS * self.hangs}") from None
        for result in results:
            if isinstance(result, ToDo):
                raise result
        return results

    @contextlib.contextmanager
    def explained(self, shown: str):
        """Let an error of the answer be an AssertionError of one line, or ToDo. A time limit."""

        def too_long(*_):
            raise TimeoutError(f"not done after {SECONDS} s. Does it end?")

        handler = signal.signal(signal.SIGALRM, too_long)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            yield
        except (Exception, SystemExit) as error:
            raise explanation(error, self.path, shown) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)


def explanation(error: BaseException, path: str, shown: str) -> Exception:
    """An error of the answer in one line, with the last line of the answer that led to it."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return AssertionError(f"{shown}: line {error.lineno}: {error.msg}")
    calls = traceback.walk_tb(error.__traceback__)
    numbers = [line for frame, line in calls if frame.f_code.co_filename == path]
    line = linecache.getline(path, numbers[-1]).strip() if numbers else ""
    if isinstance(error, NotImplementedError) and "raise NotImplementedError" in line:
        return ToDo(str(error))  # torch raises it, too, in a function of its own
    words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return AssertionError(f"{shown}: line {numbers[-1]}: {words} ({line})" if numbers else words)


def start_rank() -> dict:
    """Begin a rank: {path: Answer} of the answers that it has loaded, none so far."""
    dist.init_process_group("gloo")
    return {}


def call_on_rank(loaded: dict, path: str, function: str, args):
    """One rank's result of a call, or ToDo. If it fails, all ranks end: they may wait for it."""
    if path not in loaded:
        loaded[path] = Answer(path)
    args = [arg.values[dist.get_rank()] if isinstance(arg, PerRank) else arg for arg in args]
    try:
        return loaded[path].call(function, *args)
    except ToDo as error:
        return error


def measured(function, *args, **keywords) -> tuple:
    """(What it returns, the most bytes that tensors made by it held at once).

    Counted by torch's profiler from the allocator's own events.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "10")  # the profiler prints lines of its own
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as record:
        result = function(*args, **keywords)
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, peak


# --------------------------------------------------------------------------------------------------
# Comparisons


def close(what: str, got, expected, tolerance: float = 0.0, hint: str = "") -> None:
    """`got` must be a number, array or tensor like `expected`, at most `tolerance` from it.

    hint: what to think about if it is not.
    """
    hint = f"\n{hint}" if hint else ""
    assert form(got) == form(expected), f"{what}: expected {form(expected)}, got {form(got)}{hint}"
    tensors = (x.detach().double() if isinstance(x, torch.Tensor) else x for x in (got, expected))
    got, expected = (np.asarray(x, np.float64) for x in tensors)
    n_nan = np.isnan(got).sum()
    assert n_nan == 0, f"{what}: {n_nan} of {got.size} numbers are NaN{hint}"
    with np.errstate(invalid="ignore"):  # inf - inf
        apart = np.where(got == expected, 0, np.abs(got - expected))
    place = np.unravel_index(np.argmax(apart), apart.shape) if apart.size else ()
    at = f" at {[int(i) for i in place]}" if place else ""
    assert (apart <= tolerance).all(), (
        f"{what}: expected {expected[place]:.7g}{at}, but got {got[place]:.7g}; "
        f"they may be {tolerance:.1g} apart{hint}"
    )


def is_number(value) -> bool:
    """Whether it is a number of Python or of NumPy, and no bool."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def form(value) -> str:
    """A number, or an array or a tensor with dtype and shape; of anything else the value."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype} {value.shape}"
    return "a number" if is_number(value) else shown(value)


def shown(value) -> str:
    """At most 60 characters of a value; of larger arrays and tensors dtype and shape."""
    if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) > 4:
        return form(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def call_of(function: str, args, keywords=None) -> str:
    """A call in a few words: step(a tensor float32 (3, 4), 0.1, lr=2)."""
    named = [f"{name}={shown(value)}" for name, value in (keywords or {}).items()]
    return f"{function}({', '.join([*map(shown, args), *named])})"


# --------------------------------------------------------------------------------------------------
# Parts


def parts(checker) -> list[tuple[str, object]]:
    """[(title, function)] of a checker's parts, in the order of the file."""
    functions = [value for name, value in vars(checker).items() if name.startswith("check_")]
    return [(inspect.getdoc(function).splitlines()[0], function) for function in functions]


def judged(part, answer: Answer) -> tuple[str, str]:
    """(result, message) of one part: "right", "wrong", "not written yet" or "skipped"."""
    try:
        return "right", part(answer) or ""
    except AssertionError as error:
        return "wrong", str(error)
    except ToDo as error:
        return "not written yet", str(error)
    except Skipped as error:
        return "skipped", str(error)
    except UserError:  # such as a damaged file of the reader's own runs
        raise
    except Exception as error:
        # The checker did not expect a value of this kind: the answer's fault, not a crash of ours.
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return "wrong", f"what came could not be compared: {words}"
