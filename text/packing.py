"""Packing: examples of different lengths share rows of one length, so that few places stay empty.

    one row each      AAAAAAAA............    packed, best fit, longest first
                      BBBBB...............        DDDDDDDDDDDDAAAAAAAA
                      CCC.................        EEEEEEEEEEEBBBBBCCC.
                      DDDDDDDDDDDD........
                      EEEEEEEEEEE.........

Best-fit decreasing: take the examples from the longest to the shortest, and put each into the
fullest row that still has room for it, or into a new row. It needs at most 11/9 of the fewest
possible rows, plus a few (Johnson, 1973); with many short examples, hardly more than the fewest.

Nothing is random: rows depend on the lengths and their order alone.
"""

import bisect

import numpy as np


def pack(lengths: list[int], room: int) -> list[list[int]]:
    """The examples of each row: indices into `lengths`, in the order in which they were placed.

    lengths: of each example, from 1 to `room`. Rows are in the order of their longest examples in
    the data, not in which they were begun, from the longest to the shortest: an evaluation that
    reads only the first rows would measure the longest examples alone.
    """
    rows = []
    open_rows = []  # (free places, row) of the rows that are not full, sorted
    for example in longest_first(lengths):
        length = lengths[example]
        place = bisect.bisect_left(open_rows, (length, -1))  # the fewest free places that suffice
        if place < len(open_rows):
            free, row = open_rows.pop(place)
            rows[row].append(example)
        else:
            free, row = room, len(rows)
            rows.append([example])
        if free > length:
            bisect.insort(open_rows, (free - length, row))
    return sorted(rows)  # by their first examples, which are their longest


def pack_slowly(lengths: list[int], room: int) -> list[list[int]]:
    """The obvious version of `pack`: look at every row for every example."""
    rows = []
    free = []  # places in each row
    for example in longest_first(lengths):
        length = lengths[example]
        fitting = [row for row in range(len(rows)) if free[row] >= length]
        if not fitting:
            rows.append([])
            free.append(room)
            fitting = [len(rows) - 1]
        row = min(fitting, key=lambda row: free[row])
        rows[row].append(example)
        free[row] -= length
    return sorted(rows)


def longest_first(lengths: list[int]) -> list[int]:
    """The examples by falling length. Of equal ones, the earlier comes first."""
    return sorted(range(len(lengths)), key=lambda example: -lengths[example])


def fill_rows(examples: list[np.ndarray], rows: list[list[int]], room: int, filler: int):
    """Write packed examples one behind the other: (len(rows) * room + 1,) of their dtype.

    Places that stay empty hold `filler`, and so does one more at the end: the label of the last
    place.
    """
    ids = np.full(len(rows) * room + 1, filler, examples[0].dtype)
    for number, members in enumerate(rows):
        row = np.concatenate([examples[example] for example in members])
        begin = number * room
        ids[begin : begin + len(row)] = row
    return ids
