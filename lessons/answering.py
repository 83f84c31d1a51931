"""The process in which a reader's answer runs. lessons/answers.py starts it and asks it.

The answer is a module here. Whatever it does wrong, the reply is one line that names the line of
the answer; an endless loop ends with this process, which the asking side stops.
"""

import functools
import importlib.util
import linecache
import os
import pickle
import sys
import traceback
import tracemalloc
from typing import NamedTuple
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lessons import changes


class PerRank(NamedTuple):
    """An argument that differs between ranks: one value for each."""

    values: list

    def argument(self):
        """What this rank gets."""
        return self.values[dist.get_rank()]


class RandomBlocks(NamedTuple):
    """An argument: an iterator over blocks, of one array or of several, made when asked for."""

    n_blocks: int
    shapes: list[tuple]

    def argument(self):
        """The iterator."""
        for number in range(self.n_blocks):
            random = numpy.random.default_rng(number)
            arrays = [random.normal(size=shape) for shape in self.shapes]
            yield tuple(arrays) if len(arrays) > 1 else arrays[0]


class Failure(Exception):
    """What went wrong, as (kind, words): the kinds are those of `reply`."""


def start(joined: bool) -> dict:
    """Begin such a process: {path: module} of the answers that it has loaded, none so far.

    joined: it is one of several ranks, which meet through gloo.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before an answer imports triton
    changes.report_fsyncs()  # before an answer gives os.fsync another name
    if joined:
        dist.init_process_group("gloo")
    return {}


def reply(loaded: dict, path: str, do, name: str, *arguments) -> bytes:
    """(kind, words or result): "done", or "todo", "not loaded" or "wrong" and why.

    do: `value`, `call`, ... below. name: of a function of the answer. On ranks it raises Failure in
    place of "wrong": the others may wait for this one in vain, so they must be stopped.
    """
    try:
        if path not in loaded:
            loaded[path] = load(path)
        result = do(loaded[path], name, *arguments)
        return pickle.dumps(("done", without_gradients(result)))
    except BaseException as error:
        kind, words = failure(error, path)
    if path not in loaded:
        kind = "not loaded"
    if dist.is_initialized() and kind == "wrong":
        raise Failure(words)
    return pickle.dumps((kind, words))


def load(path: str):
    """The answer in a file, as a module."""
    spec = importlib.util.spec_from_file_location("answer", path)
    module = sys.modules["answer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------
# What is asked


def value(answer, name: str):
    """A constant or a function of the answer."""
    if not hasattr(answer, name):
        raise Failure("wrong", f"the answer has no {name}, which is in the stub")
    return getattr(answer, name)


def call(answer, name: str, args, keywords):
    """The result of one of its functions."""
    made = (PerRank, RandomBlocks)
    args = [arg.argument() if isinstance(arg, made) else arg for arg in args]
    return value(answer, name)(*args, **keywords)


def call_without(answer, name: str, args, keywords, missing: str):
    """The result with None in place of another of its functions."""
    with mock.patch.object(answer, missing, None):
        return call(answer, name, args, keywords)


def measure(answer, name: str, args, keywords) -> tuple:
    """(Its result, the most bytes that tensors made meanwhile held at once).

    Counted by torch's profiler from the allocator's own events.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "10")  # the profiler prints lines of its own
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as record:
        result = call(answer, name, args, keywords)
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return result, peak


def measure_arrays(answer, name: str, args, keywords) -> int:
    """The most bytes that NumPy's arrays, and all else of Python's, held at once meanwhile."""
    tracemalloc.start()
    call(answer, name, args, keywords)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def kill(answer, name: str, args, at: int | None):
    """Call it in a copy of this process that dies before its change of a file number `at`.

    Returns whether it died. With at=None: the names of the changes that it makes.
    """
    function = functools.partial(value(answer, name), *args)
    explain = functools.partial(failure, path=answer.__file__)
    died, names, failed = changes.in_a_copy(function, at, explain)
    if failed:
        raise Failure(*failed)
    return names if at is None else died


# --------------------------------------------------------------------------------------------------
# Results and errors


def without_gradients(result):
    """The same with tensors detached, also in lists and tuples."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if type(result) in (list, tuple):
        return type(result)(map(without_gradients, result))
    return result


def failure(error: BaseException, path: str) -> tuple[str, str]:
    """(kind, words) of an error: one line, with the last line of the answer that led to it."""
    if isinstance(error, Failure):
        return error.args
    if isinstance(error, SyntaxError) and error.filename == path:
        return "wrong", f"line {error.lineno}: {error.msg}"
    calls = traceback.walk_tb(error.__traceback__)
    numbers = [line for frame, line in calls if frame.f_code.co_filename == path]
    line = linecache.getline(path, numbers[-1]).strip() if numbers else ""
    if isinstance(error, NotImplementedError) and "raise NotImplementedError" in line:
        return "todo", str(error)  # torch raises it, too, in a function of its own
    words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return "wrong", f"line {numbers[-1]}: {words} ({line})" if numbers else words
