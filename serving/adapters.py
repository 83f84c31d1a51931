r"""A bank of adapters: one model in memory, and for each row of a batch an update of its own.

    y = W x + b + B_s A_s x        s: the slot of the row. Slot 0 is the model itself: A = B = 0

                block 0, Wqkv                     block 0, out_proj     ...   last block, down_proj
    slot 0    | 0                               | 0                   | ... | 0
    slot 1    | A (r, in) beside B^T (r, out)   | A beside B^T        | ... | A beside B^T
    slot 2    | ...

An adapter (lora.py) of rank 8 on all linear layers of MPT-7B takes 33.6 MB in bf16, a merged model
13.3 GB. So many finetuned models fit beside one base, and texts of different ones share a batch: a
step reads the weights of the base, which limit its speed, once for all of them.

Each slot is one row of a single matrix, and each layer owns some of its columns. Loading writes one
row; switching writes one index per text. B is stored with its scale. An adapter of lower rank, or
of fewer layers, leaves the rest of its slot at zero.

The slots are a cache of files on disk. A thread loads the adapter of a new text while the other
texts are being decoded: into a free slot, or into the one that was used least recently. An adapter
in use stays.
For each text, a server does this:

    bank.acquire(adapter)      takes a slot; the thread begins to load
    bank.is_loaded(adapter)    asked between steps; the text begins once it is true
    bank.use(adapters)         one for each row: before the first step, and when rows change
    bank.release(adapter)      when the text has ended

An adapter is named by its path: a PEFT folder (weights/peft.py), or a run with --lora_rank.
"""

import contextlib
import functools
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

import checkpoint
import lora
import program
from model import MPT
from program import UserError, require
from serving.decoder import Decoder, PackedLinear
from storage import checkpoint_files
from tensor_parallel import ColumnLinear, Layout, RowLinear
from weights import load, peft
from weights.peft import Adapter

BASE = "none"  # as the name of an adapter: the model itself

# --------------------------------------------------------------------------------------------------
# Layers


class BankedLinear(nn.Linear):
    """W x + b + B A x. A and B are those of each row's slot."""

    def forward(self, x):
        """x (rows, T, in) -> (rows, T, out)."""
        return with_update(self, x, super().forward(x))


class BankedPackedLinear(PackedLinear):
    """The same for packed weights."""

    def forward(self, x):
        """x (rows, T, in) -> (rows, T, out)."""
        return with_update(self, x, super().forward(x))


class BankedColumnLinear(ColumnLinear):
    """W_i x + B_i A x, of which each tensor rank has its own features."""

    def share(self, x):
        """x (rows, T, in) -> (rows, T, out / n)."""
        return with_update(self, x, super().share(x))


class BankedRowLinear(RowLinear):
    """The sum of (W_i + B A_i) x_i over the tensor ranks, and the bias once."""

    def share(self, x):
        """x (rows, T, in / n) -> (rows, T, out), this rank's share of the sum."""
        return with_update(self, x, super().share(x))


def with_update(layer, x, y):
    """y + B A x, for the slots that the bank has set: x (rows, T, in), y (rows, T, out)."""
    rows = layer.bank.rows
    if rows is None:
        return y
    wide = x.to(layer.factors.dtype)
    widths = [x.shape[-1], y.shape[-1]]
    if isinstance(rows, int):  # all rows have one slot
        A, B = layer.factors[rows].split(widths, dim=-1)  # (r, in), (r, out)
        updated = y + (wide @ A.T) @ B
    else:
        # One slot for each row, or (in a captured step) one for all: (rows or 1, r, in or out)
        slots = layer.factors.index_select(0, rows).expand(len(x), -1, -1)
        A, B = slots.split(widths, dim=-1)
        low = torch.bmm(wide, A.mT)  # (rows, T, r)
        updated = torch.baddbmm(y.to(wide.dtype), low, B)
    return updated.to(y.dtype)


WITH_BANK = {
    nn.Linear: BankedLinear,
    PackedLinear: BankedPackedLinear,
    ColumnLinear: BankedColumnLinear,
    RowLinear: BankedRowLinear,
}


class Place(NamedTuple):
    """Where the bank has one layer's adapters, and the widths of the layer."""

    columns: slice
    in_features: int
    out_features: int


def places_of(model: MPT, rank: int, layers, layout: Layout) -> dict[str, Place]:
    """The place of each layer, by its name, such as transformer.blocks.0.attn.Wqkv.

    layout: of a tensor rank, which has a part of A or B.
    """
    shapes = model.cfg.linear_layers()
    places = {}
    begin = 0
    for name, _ in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in layers:
            n_out, n_in = shapes[kind]
            A = torch.empty(rank, n_in, device="meta")
            B = torch.empty(n_out, rank, device="meta")
            in_features = layout.take(f"{name}.lora_A", A).shape[1]
            out_features = layout.take(f"{name}.lora_B", B).shape[0]
            end = begin + rank * (in_features + out_features)
            places[name] = Place(slice(begin, end), in_features, out_features)
            begin = end
    return places


# --------------------------------------------------------------------------------------------------
# The bank


@dataclass
class Resident:
    """An adapter that has a slot."""

    slot: int
    users: int = 0  # texts that have acquired it and not yet released it
    loading: Future | None = None
    version: int = 0  # each load has another one


class AdapterBank:
    """Slots for adapters, put on the layers of a decoder's model.

    n_slots: for adapters; the base needs none. rank: the highest of an adapter. layers: which
    layers of a block adapters may change (see MPTConfig.linear_layers). read: path -> Adapter,
    called in a thread.

    All methods are to be called by the thread that also calls the decoder.
    """

    def __init__(self, decoder: Decoder, n_slots: int, rank: int, layers, read=peft.adapter_at):
        self.rank = rank
        self.read = read
        # Slots of the batch: (rows,) int64, an int if all agree, None for the base.
        self.rows = None
        self.used = None  # the same as a list: nothing is sent to the device if it stays
        self.residents = OrderedDict()  # path -> Resident, the least recently used first
        self.loaded = {BASE: 0}  # path -> slot, of those that rows may use
        self.free_slots = list(range(n_slots, 0, -1))
        # One thread: a slot that changes hands twice is filled in that order.
        self.loader = ThreadPoolExecutor(1, "adapters")
        self.n_loads = 0
        self.fill_on_all_ranks = self.fill  # the engine of several tensor ranks sets another one

        self.cfg = decoder.cfg
        self.layouts = [Layout(self.cfg, i, decoder.n_ranks) for i in range(decoder.n_ranks)]
        places = [places_of(decoder.model, rank, layers, layout) for layout in self.layouts]
        self.places_of_ranks = places
        self.tensor_rank = decoder.team.rank if decoder.team else 0
        self.places = places[self.tensor_rank]
        n_columns = columns_of(self.places)
        self.device = decoder.device
        # As for its cache, the decoder multiplies bf16 on a CPU faster in fp32.
        options = {"device": self.device, "dtype": decoder.cache_dtype}
        self.slots = torch.zeros(n_slots + 1, n_columns, **options)
        for name, place in self.places.items():
            layer = decoder.model.get_submodule(name)
            layer.__class__ = WITH_BANK[type(layer)]
            layer.factors = self.slots[:, place.columns].view(n_slots + 1, rank, -1)
            layer.bank = self
        decoder.bank = self

    # ----------------------------------------------------------------------------------------------
    # Which adapters have slots

    def acquire(self, adapter: str) -> None:
        """Give an adapter a slot until it is released, and begin to load it if it has none yet.

        UserError if each slot holds an adapter in use: try again when a text has ended.
        """
        if adapter == BASE:
            return
        if adapter not in self.residents:
            self.residents[adapter] = Resident(self.take_slot())
        self.residents.move_to_end(adapter)
        resident = self.residents[adapter]
        resident.users += 1
        if resident.loading is None or (resident.loading.done() and resident.loading.exception()):
            resident.loading = self.loader.submit(self.load, adapter)
            self.n_loads += 1
            resident.version = self.n_loads

    def take_slot(self) -> int:
        """A free slot, or that of the adapter without users that was used least recently."""
        if self.free_slots:
            return self.free_slots.pop()
        unused = [path for path, resident in self.residents.items() if not resident.users]
        full = f"all {len(self.residents)} slots hold adapters that are in use"
        require(unused, f"{full}: wait until a text has ended, or make the bank larger")
        resident = self.residents.pop(unused[0])
        self.loaded.pop(unused[0], None)
        resident.loading.cancel()  # if it has not begun
        return resident.slot

    def release(self, adapter: str) -> None:
        """End one use of an adapter. It keeps its slot until another one needs it."""
        if adapter == BASE:
            return
        self.residents[adapter].users -= 1
        self.residents.move_to_end(adapter)

    def version(self, adapter: str) -> int:
        """Which load filled the slot of an adapter in use: a file may change between two loads."""
        return 0 if adapter == BASE else self.residents[adapter].version

    def is_loaded(self, adapter: str) -> bool:
        """Whether rows may use an adapter that was acquired. Raises what `wait` raises."""
        if adapter not in self.loaded and self.residents[adapter].loading.done():
            self.wait(adapter)
        return adapter in self.loaded

    def wait(self, adapter: str) -> None:
        """Wait until an adapter that was acquired is loaded.

        UserError for a file that is damaged or does not fit this model, OSError for one that cannot
        be read: the adapter has to be released then, too, and may be acquired again.
        """
        if adapter not in self.loaded:
            resident = self.residents[adapter]
            rows = resident.loading.result()
            self.fill_on_all_ranks(resident.slot, rows)
            rows.clear()
            self.loaded[adapter] = resident.slot

    @contextlib.contextmanager
    def in_use(self, adapters):
        """Acquire adapters and wait for them. In the end release them; the rows are the base's."""
        with contextlib.ExitStack() as acquired:
            acquired.callback(self.use, [BASE])
            for adapter in adapters:
                self.acquire(adapter)
                acquired.callback(self.release, adapter)
            for adapter in adapters:
                self.wait(adapter)
            yield

    def use(self, adapters) -> None:
        """Set the adapter of each row, for all steps from now on. KeyError if one is not loaded."""
        self.use_slots(self.slots_of(adapters))

    def slots_of(self, adapters) -> list[int]:
        """The slots of adapters. KeyError if one is not loaded."""
        return [self.loaded[path] for path in adapters]

    def use_slots(self, slots: list[int]) -> None:
        """Set the slot of each row, for all steps from now on."""
        if slots == self.used:
            return
        self.used = slots
        if len(set(slots)) > 1:
            self.rows = torch.tensor(slots, device=self.device)
        else:
            self.rows = slots[0] or None

    @property
    def bytes_per_step(self) -> int:
        """The bytes of adapters that a step reads: one slot a row, or one if all rows agree."""
        if self.rows is None:
            return 0
        n_slots = 1 if isinstance(self.rows, int) else len(self.rows)
        return n_slots * self.slots[0].nbytes

    # ----------------------------------------------------------------------------------------------
    # Loading

    @torch.inference_mode()  # the bank may have been made in it
    def load(self, adapter: str) -> list[torch.Tensor]:
        """What each tensor rank has in its slot for an adapter, on the CPU. Runs in the thread."""
        found = self.read(adapter)
        self.check(adapter, found)
        rows = []
        for layout, places in zip(self.layouts, self.places_of_ranks, strict=True):
            row = torch.zeros(columns_of(places), dtype=self.slots.dtype)
            for name in layers_of(found):
                A = layout.take(f"{name}.lora_A", found.tensors[f"{name}.lora_A"])  # (r, in)
                B = layout.take(f"{name}.lora_B", found.tensors[f"{name}.lora_B"])  # (out, r)
                place = places[name]
                factors = row[place.columns].view(self.rank, -1)[: len(A)]
                wide = torch.promote_types(B.dtype, row.dtype)
                factors[:, : place.in_features].copy_(A)
                factors[:, place.in_features :].copy_(B.T.to(wide) * found.scale)
            checkpoint_files.require_finite(f"{adapter}, in {row.dtype},", row)
            rows.append(row)
        return rows

    def fill(self, slot: int, rows: list[torch.Tensor]) -> None:
        """Fill a slot with what `load` returned. On a GPU the copy queues behind earlier steps."""
        self.slots[slot].copy_(rows[self.tensor_rank])

    def check(self, adapter: str, found: Adapter) -> None:
        """UserError unless an adapter fits this model and this bank."""
        extra = f"{adapter} has trained more than adapters (lora_train={found.settings.lora_train})"
        words = program.shell(adapter)
        fix = f"merge it: python -m weights.peft merge {words} MERGED"
        require(not found.settings.lora_train, f"{extra}: {fix}")
        try:
            peft.check_fits(found, self.cfg, "this model")
        except UserError as error:
            raise UserError(f"{adapter}: {error}") from error
        too_high = f"{adapter} has rank {found.rank}, and the bank has room for {self.rank}"
        require(found.rank <= self.rank, f"{too_high}: serve it with --max_lora_rank={found.rank}")
        for name in layers_of(found):
            missing = f"{adapter} changes {name}, for which the bank has no room"
            require(name in self.places, f"{missing}: make the bank with this layer")


def columns_of(places: dict[str, Place]) -> int:
    """How many columns a slot has. 0: the adapters are of another model, and are refused."""
    return max((place.columns.stop for place in places.values()), default=0)


def layers_of(adapter: Adapter) -> list[str]:
    """The names of the layers that an adapter changes."""
    names = [name for name in adapter.tensors if lora.is_adapter(name)]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


# --------------------------------------------------------------------------------------------------
# Files


def read_adapter(path: str, base: str, base_fingerprint: str) -> Adapter:
    """The adapter at a path. UserError if it is known to belong to another base.

    Only runs know: a PEFT folder holds a name of its base, which may be written in many ways.
    base: its name, for messages. base_fingerprint: see weights/load.fingerprint_of.
    """
    found = peft.adapter_at(path)
    if load.is_run(Path(path)):
        meta = checkpoint.read_meta(checkpoint.find(path))
        other = f"{path} belongs to {meta.get('base')}, whose weights are not those of {base}"
        is_same = meta.get("base_fingerprint") == base_fingerprint
        require(is_same, f"{other}: use it with its base")
    return found


def bank_for(decoder: Decoder, paths: list[str], n_slots: int, base: str) -> AdapterBank:
    """A bank with as much room as these adapters need. UserError if one does not fit the model.

    base: the path of the decoder's weights.
    """
    found = Path(base)
    is_run = load.is_run(found)
    has_its_own = is_run and checkpoint_files.read_adapter_settings(checkpoint.find(base))
    twice = f"{base} has adapters already; --adapter needs their base"
    require(not has_its_own, f"{twice}: give that, or merge it first")
    has_runs = any(load.is_run(Path(path)) for path in paths)
    fingerprint = load.fingerprint_of(found) if has_runs and found.exists() else ""
    read = functools.partial(read_adapter, base=base, base_fingerprint=fingerprint)
    adapters = {path: read(path) for path in paths}
    names = [name for adapter in adapters.values() for name in layers_of(adapter)]
    layers = {name.rpartition(".")[2] for name in names}
    rank = max(adapter.rank for adapter in adapters.values())
    bank = AdapterBank(decoder, n_slots, rank, layers, read)
    for path, adapter in adapters.items():
        bank.check(path, adapter)
    return bank
