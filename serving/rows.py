"""Keys and values of a batch whose rows change, and of beginnings that prompts share.

All rows end in the same column. So a step is that of a left-padded batch, which model.py and each
kernel of attention.py know already:

    column   0 1 2 3 4 5 6 7 8 9
    row 0    . . . t t t t t t t      pad 3
    row 1    . t t t t t t t t t      pad 1, the longest text: a step reads columns 1 to 9
    row 2    . . . . . . . t t t      pad 7: a text that has just joined

With CUDA graphs (serving/step_graph.py) a step gets all columns, and sees the same part of them.

A text joins when its keys and values are copied to the right end of a row. When it leaves, the last
row takes its place. When all columns are used, the rows are shifted to the left.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass

import torch

from model import KVCache
from serving import step_graph
from serving.decoder import Decoder

SLACK = 64  # columns more than the longest text needs: rows are shifted once in so many steps
BLOCK = 32  # tokens: shared beginnings of prompts are found in steps of so many


class Rows:
    """The keys and values of running texts, one row each.

    n_rows: at most so many texts. max_tokens: of each text, prompt included.

    Before a row's text there are zeros, and with graphs after it. Attention gives hidden keys a
    weight of 0, but 0 * NaN is NaN, and NaN may be left in memory that is new, or in the row of a
    text that has failed.
    """

    def __init__(self, decoder: Decoder, n_rows: int, max_tokens: int):
        self.n_columns = max_tokens + SLACK
        self.cache = decoder.model.new_cache(n_rows, self.n_columns, decoder.cache_dtype)
        self.layers = [*self.cache.k, *self.cache.v]  # (n_rows, Hkv, n_columns, D) each
        captured = step_graph.suits(decoder)
        self.graphs = step_graph.StepGraphs(decoder, self.cache) if captured else None
        self.pads = []  # for each row in use, the columns before its text
        self.sent = []  # the padding of the last step, and the same on the device
        self.pad = None
        self.end = 0  # the column after the last one in use

    def join(self, prompt: KVCache) -> None:
        """Copy the keys and values of a prompt, (L, 1, Hkv, n, D), to the next free row."""
        n = prompt.length
        if not self.pads:
            self.end = n
        elif n > self.end:
            self.shift(n - self.end)
        row, pad = len(self.pads), self.end - n
        for layer, new in zip(self.layers, [*prompt.k, *prompt.v], strict=True):
            layer[row, :, :pad] = 0
            layer[row, :, pad : self.end] = new[0, :, :n]
            if self.graphs:
                layer[row, :, self.end :] = 0
        self.pads.append(pad)

    def leave(self, row: int) -> None:
        """Free a row. The last row takes its place, so that those in use are the first ones."""
        last = len(self.pads) - 1
        if row != last:
            for layer in self.layers:
                layer[row, :, : self.end] = layer[last, :, : self.end]
            self.pads[row] = self.pads[last]
        self.pads.pop()

    def shift(self, by: int) -> None:
        """Move all texts by so many columns to the right, or to the left if it is negative."""
        n, first = len(self.pads), min(self.pads)
        for layer in self.layers:
            texts = layer[:n, :, first : self.end].clone()
            layer[:n, :, first : first + by] = 0
            layer[:n, :, first + by : self.end + by] = texts
        self.pads = [pad + by for pad in self.pads]
        self.end += by

    def for_next_token(self) -> KVCache:
        """The rows in use, as the cache of a step that adds a token to each."""
        if self.end == self.n_columns:
            self.shift(-min(self.pads))
        n = len(self.pads)
        first = 0 if self.graphs else min(self.pads)
        k, v = self.cache.k[:, :n, :, first:], self.cache.v[:, :n, :, first:]
        pads = [pad - first for pad in self.pads]
        if pads != self.sent:
            self.sent = pads
            self.pad = torch.tensor(pads, device=k.device) if any(pads) else None
        cache = KVCache(k, v, self.end - first, self.pad)
        self.end += 1
        return cache


@dataclass
class Block:
    """Keys and values of BLOCK tokens, (L, Hkv, BLOCK, D) each, and a number of its own."""

    k: torch.Tensor
    v: torch.Tensor
    number: int

    @property
    def n_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Prefixes:
    """Keys and values of the beginnings of prompts, so that a shared one is computed once.

    A block of a prompt is found by its ids and by the block before it. The first one is found by
    `start`: what else keys and values depend on, such as the adapter.

    When max_bytes are used up, the block that was used least recently goes. Of one prompt, that is
    the last one.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self.blocks = OrderedDict()  # (start or number of the block before, ids) -> Block
        self.numbers = itertools.count()

    def copy_to(self, cache: KVCache, start: tuple, ids: list[int]) -> None:
        """Fill the empty cache of a prompt with what is known. At least one id is left to read."""
        keys = []
        before = start
        for begin in range(0, len(ids) - BLOCK, BLOCK):
            end = begin + BLOCK
            key = before, tuple(ids[begin:end])
            block = self.blocks.get(key)
            if block is None:
                break
            cache.k[:, 0, :, begin:end] = block.k
            cache.v[:, 0, :, begin:end] = block.v
            cache.length = end
            before = block.number
            keys.append(key)
        self.mark_as_used(keys)

    def keep(self, cache: KVCache, start: tuple, ids: list[int]) -> None:
        """Copy the blocks of a prompt that has been read, as far as they are not known yet."""
        block_bytes = 2 * BLOCK * cache.k[:, 0, :, 0].nbytes  # k and v
        most = self.max_bytes // block_bytes * BLOCK
        keys = []
        before = start
        for begin in range(0, min(len(ids) - BLOCK, most), BLOCK):
            end = begin + BLOCK
            key = before, tuple(ids[begin:end])
            if key not in self.blocks:
                k, v = (kv[:, 0, :, begin:end].clone() for kv in (cache.k, cache.v))
                self.add(key, Block(k, v, next(self.numbers)))
            self.blocks.move_to_end(key)
            before = self.blocks[key].number
            keys.append(key)
        self.mark_as_used(keys)

    def add(self, key: tuple, block: Block) -> None:
        """Store a block, and remove others until all fit."""
        self.n_bytes += block.n_bytes
        while self.n_bytes > self.max_bytes:
            _, removed = self.blocks.popitem(last=False)
            self.n_bytes -= removed.n_bytes
        self.blocks[key] = block

    def mark_as_used(self, keys: list[tuple]) -> None:
        """The first block most recently: without it the others would not be found."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)
