"""What the devices hold of running texts: rows whose number changes, and shared beginnings.

All rows end in the same column. So a step is that of a left-padded batch, which model.py and each
kernel of attention.py know already:

    column   0 1 2 3 4 5 6 7 8 9
    row 0    . . . t t t t t t t      pad 3
    row 1    . t t t t t t t t t      pad 1, the longest text: a step reads columns 1 to 9
    row 2    . . . . . . . t t t      pad 7: a text that has just joined

With CUDA graphs (serving/step_graph.py) a step gets all columns, and sees the same part of them.

A text joins when its keys and values are copied to the right end of a row. When it leaves, the last
row takes its place. When all columns are used, the rows are shifted to the left.

A model that is cut over tensor ranks has such a batch on each of them, with the keys and values of
its own heads. Rank 0 has the engine (serving/engine.py), and tells the others what it calls:

    rank 0    batch.leave(3)   batch.decode(ids, slots)      one message: two calls
    rank 1    batch.leave(3)   batch.decode(ids, slots)      both compute; logits meet on each rank
"""

import contextlib
import datetime
import itertools
import os
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.distributed as dist

import processes
import program
import tensor_parallel
from config import MPTConfig
from model import KVCache
from program import require
from serving import step_graph
from serving.decoder import Decoder
from serving.speed import kv_bytes_per_token
from tensor_parallel import Team

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


class Prefixes:
    """Keys and values of the beginnings of prompts, so that a shared one is computed once.

    A block of a prompt is found by its ids and by the block before it. The first one is found by
    `start`: what else keys and values depend on, such as the adapter.

    When there are most_blocks, the block that was used least recently goes. Of one prompt, that is
    the last one.
    """

    def __init__(self, most_blocks: int):
        self.most_blocks = most_blocks
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
        most = self.most_blocks * BLOCK
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
        if len(self.blocks) == self.most_blocks:
            self.blocks.popitem(last=False)
        self.blocks[key] = block

    def mark_as_used(self, keys: list[tuple]) -> None:
        """The first block most recently: without it the others would not be found."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)


# --------------------------------------------------------------------------------------------------
# The batch


class Batch:
    """The rows, the prompt that is being read, and the shared beginnings, on one device.

    prefix_bytes: room for shared beginnings. slots: the slot of each row's adapter
    (serving/adapters.py), None without a bank. Tokens are lists of ids.
    """

    lost = None  # see `SharedBatch`

    def __init__(self, decoder: Decoder, n_rows: int, max_tokens: int, prefix_bytes: int):
        self.decoder = decoder
        self.rows = Rows(decoder, n_rows, max_tokens)
        width = decoder.cache_dtype.itemsize
        token_bytes = kv_bytes_per_token(decoder.cfg, width, decoder.n_ranks)
        self.prefixes = Prefixes(prefix_bytes // (BLOCK * token_bytes))
        self.prompt = None  # its cache
        self.ids = []  # of the prompt
        self.n_columns = 0  # of the cache, that the last step has seen

    def begin(self, ids, start: tuple | None) -> int:
        """Make the cache of a prompt. Returns how many of its tokens are known already.

        start: what keys and values depend on beside the ids; None: no beginning is shared.
        """
        self.ids = ids
        self.prompt = self.decoder.model.new_cache(1, len(ids), self.decoder.cache_dtype)
        if start is not None:
            self.prefixes.copy_to(self.prompt, start, ids)
        return self.prompt.length

    def read(self, n: int, slots, at_all_positions: bool = False):
        """Read n more tokens of the prompt: the logits after the last one, (1, V), or (1, n, V)."""
        ids = self.ids[self.prompt.length : self.prompt.length + n]
        decode = self.decoder.at_all_positions if at_all_positions else self.decoder
        return self.logits([ids], self.prompt, slots, decode)

    def join(self) -> None:
        """The prompt has been read: its text gets a row."""
        self.rows.join(self.prompt)

    def end_prompt(self, start: tuple | None) -> None:
        """Free the cache of the prompt. start: as for `begin`, to keep what others may share."""
        if start is not None:
            self.prefixes.keep(self.prompt, start, self.ids)
        self.prompt = None

    def leave(self, row: int) -> None:
        """A text has ended. The last row takes its place."""
        self.rows.leave(row)

    def decode(self, ids, slots):
        """The next step of all rows: their newest tokens (n) -> logits (n, V)."""
        cache = self.rows.for_next_token()
        self.n_columns = self.rows.end - min(self.rows.pads)
        return self.logits([[i] for i in ids], cache, slots, self.rows.graphs or self.decoder)

    def fill(self, slot: int, rows: list[torch.Tensor]) -> None:
        """Put an adapter into a slot of the bank: `AdapterBank.fill`."""
        self.decoder.bank.fill(slot, rows)

    def logits(self, ids, cache: KVCache, slots, decode):
        """decode(ids (n, T), cache), with the adapters in these slots."""
        if slots is not None:
            self.decoder.bank.use_slots(slots)
        return decode(torch.tensor(ids, device=self.decoder.device), cache)


CALLS = ("begin", "read", "join", "end_prompt", "leave", "decode", "fill")
COMPUTE = ("read", "decode", "fill", "new")  # those for which the others are needed at once


class SharedBatch:
    """A batch on rank 0 whose calls are made on all tensor ranks: see `follow`.

    lost: the error of a call, or None. It has left the ranks at different places, so the program
    has to end.
    """

    def __init__(self, decoder: Decoder, *sizes):
        self.team = decoder.team
        self.untold = []
        self.lost = None
        self.tell("new", sizes)
        self.batch = Batch(decoder, *sizes)

    def __getattr__(self, name: str):
        """A call of `Batch` that is made here and there, or what the batch here has."""
        if name not in CALLS:
            return getattr(self.batch, name)

        def call(*given):
            try:
                self.tell(name, given)
                return getattr(self.batch, name)(*given)
            except Exception as error:
                self.lost = self.lost or error
                raise

        return call

    def tell(self, name: str, given: tuple) -> None:
        """Note a call for the other ranks. Those that compute are told at once, with the rest."""
        self.untold.append((name, given))
        if name in COMPUTE:
            send(self.untold, self.team)
            self.untold = []


def start_ranks(model_cfg: MPTConfig, tp: int) -> tuple[torch.device, Team | None]:
    """Join the other tensor ranks. Returns this rank's device and its team, None if it is alone.

    UserError unless torchrun has started exactly tp ranks, and the model can be cut so.
    """
    is_rank = "RANK" in os.environ  # torchrun's: tasks of srun alone are replicas
    _, size, _, _ = program.read_launcher() if is_rank else (0, 1, 0, 1)
    started = f"{size} ranks" if is_rank else "none"
    start = f"start torchrun --nproc_per_node={tp}" if tp > 1 else "start it without torchrun"
    require(size == tp, f"--tp={tp}, but torchrun has started {started}: {start}")
    if tp == 1:
        return processes.pick_device("auto", 0, 1, 1), None
    model_cfg.check_tensor_ranks(tp, sequence_parallel=False)
    # A server may be idle for long, and the heartbeats notice a rank that is gone.
    world = processes.start(timeout=datetime.timedelta(days=365), tp=tp)
    return world.device, tensor_parallel.team_of(world)


def send(calls: list | None, team: Team) -> list:
    """Give the calls of rank 0 to all ranks of a team, and return them. A collective."""
    message = [calls]
    source = dist.get_global_rank(team.group, 0)
    dist.broadcast_object_list(message, source, team.group, torch.device("cpu"))
    return message[0]


@contextlib.contextmanager
def leading(decoder: Decoder | None):
    """What rank 0 does while the others follow it. Without others, nothing is different."""
    if decoder is None or decoder.team is None:
        yield
        return
    with processes.acting_alone():
        yield
    send([("end", ())], decoder.team)


@torch.inference_mode()
def follow(decoder: Decoder) -> None:
    """Make the calls of rank 0 on this rank, until it ends."""
    batch = None
    while True:
        for name, given in send(None, decoder.team):
            if name == "end":
                return
            if name == "new":
                batch = Batch(decoder, *given)
            else:
                getattr(batch, name)(*given)
