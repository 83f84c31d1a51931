"""text/packing.py: every example is in one row, rows are full, the fast way is the obvious one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text import packing

LENGTHS = st.lists(st.integers(1, 30), max_size=60)


@given(LENGTHS, st.integers(30, 100))
def test_every_example_is_in_one_row_and_no_row_is_too_long(lengths, room):
    rows = packing.pack(lengths, room)
    assert rows == packing.pack_slowly(lengths, room)  # the obvious way
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    used = [sum(lengths[example] for example in row) for row in rows]
    assert all(0 < places <= room for places in used)
    # At most one row is half empty: what it holds would have fitted into another one.
    assert sum(places * 2 <= room for places in used) <= 1


def test_rows_of_instructions_are_full_and_the_first_hold_examples_of_every_length():
    """Lengths as instructions have them, log-normal around 150 tokens, in rows of 2,048.

    An evaluation that reads a quarter of the rows measures what all of them hold.
    """
    drawn = np.random.default_rng(0).lognormal(np.log(150), 0.8, 20_000)
    lengths = np.clip(drawn.astype(int), 1, 2048)
    rows = packing.pack(lengths.tolist(), 2048)
    assert lengths.sum() / (2048 * len(rows)) > 0.999
    first = sum(rows[: len(rows) // 4], [])
    assert lengths[first].mean() == pytest.approx(lengths.mean(), rel=0.05)
