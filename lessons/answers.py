"""A reader's answer, as a checker sees it: functions that run in a process of their own.

    python -m lessons check 3

A checker is a file lessons/checkers/N_name.py. Each of its functions `check_...(answer)` is one
part of the exercise, and the first line of its docstring is the part's title. It calls the answer
and asserts what must come. The message of an assertion says which input it was, what was expected,
what came, and what to think about:

    def check_slopes(answer):
        \"\"\"ALiBi's slopes\"\"\"
        for n_heads in (1, 2, 8, 12):
            slopes = answer.call("alibi_slopes", n_heads)
            close(f"alibi_slopes({n_heads})", slopes, attention.alibi_slopes(n_heads), 1e-6)

It begins with the smallest case, so that the first failure is the easiest one to think about. What
it does not expect, such as None in place of a pair, needs no assertion: any error of the checker
makes the part wrong, too.
"""

import inspect
import math
import pickle
from pathlib import Path

import numpy as np
import torch

from config import UserError
from lessons import answering
from processes import Pool, PoolError

STARTING = 120  # seconds until a process answers for the first time
SECONDS = 30  # for one call


class ToDo(Exception):
    """The answer, or this part of it, is not written yet."""


class Skipped(Exception):
    """This part cannot be checked here. The message says why."""


class Answer:
    """The file of an answer, and the processes that run it. Use it in a `with` statement.

    A call raises AssertionError if the answer fails or takes too long, ToDo if it is not written.
    """

    def __init__(self, path: Path, pools: dict | None = None):
        self.path = Path(path).resolve()
        self.pools = {} if pools is None else pools  # number of ranks (0: not joined): processes
        self.not_run = ""  # why the parts that follow are skipped

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pool in self.pools.values():
            pool.stop()
        self.pools.clear()

    def value(self, name: str):
        """The constant of this name."""
        return self.ask(0, name, answering.value, name)[0]

    def call(self, function: str, *args, **keywords):
        """What the function returns."""
        shown = call_of(function, args, keywords)
        return self.ask(0, shown, answering.call, function, args, keywords)[0]

    def call_without(self, missing: str, function: str, *args):
        """What the function returns if another one, which it should call, is None."""
        shown = call_of(function, args)
        return self.ask(0, shown, answering.call_without, function, args, {}, missing)[0]

    def measure(self, function: str, *args) -> tuple:
        """(What it returns, the most bytes that tensors made by it held at once)."""
        return self.ask(0, call_of(function, args), answering.measure, function, args, {})[0]

    def measure_arrays(self, function: str, *args) -> int:
        """The most bytes that NumPy's arrays held at once."""
        return self.ask(0, call_of(function, args), answering.measure_arrays, function, args, {})[0]

    def kill(self, function: str, *args, at: int | None):
        """Call it in a process that dies before change `at` of a file. Returns whether it died.

        With at=None: the names of the changes that it makes.
        """
        return self.ask(0, call_of(function, args), answering.kill, function, args, at)[0]

    def call_on_ranks(self, size: int, function: str, *args) -> list:
        """What it returns on each of `size` ranks. An argument `PerRank` differs between them."""
        shown = f"{call_of(function, args)} on {size} rank{'s' * (size > 1)}"
        return self.ask(size, shown, answering.call, function, args, {})

    def ask(self, ranks: int, shown: str, *request) -> list:
        """The replies of all processes to a request of answering.py."""
        if self.not_run:
            raise Skipped(f"not run: {self.not_run}")
        patience = SECONDS
        if ranks not in self.pools:
            self.pools[ranks] = Pool(max(1, ranks), answering.start, ranks > 0)
            patience = STARTING
        request = (answering.reply, str(self.path), *request)
        try:
            replies = self.pools[ranks](*request, patience=patience)
        except PoolError as error:
            del self.pools[ranks]  # it has ended: the next call gets a new one
            _, failed, words = error.details.partition("answering.Failure: ")
            if failed:
                raise AssertionError(f"{shown}: {words.strip()}") from None
            self.not_run = "a call did not end, see above"
            raise AssertionError(f"{shown}: {error}. Does it end?") from None
        results = []
        for kind, result in map(pickle.loads, replies):
            if kind == "not loaded":
                self.not_run = "the file cannot be loaded, see above"
                raise AssertionError(f"{self.path}, {result}")
            if kind == "todo":
                raise ToDo(result)
            assert kind == "done", f"{shown}: {result}"
            results.append(result)
        return results


# --------------------------------------------------------------------------------------------------
# Comparisons


def close(what: str, got, expected, tolerance: float = 0.0, hint: str = "") -> None:
    """`got` must be a number, array or tensor like `expected`, at most `tolerance` from it.

    hint: what to think about if it is not.
    """
    hint = f"\n{hint}" if hint else ""
    assert form(got) == form(expected), f"{what}: expected {form(expected)}, got {form(got)}{hint}"
    got, expected = (np.asarray(detached(x), np.float64) for x in (got, expected))
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


def detached(value):
    """The same, a tensor as an array."""
    return value.detach().double().numpy() if isinstance(value, torch.Tensor) else value


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
