"""A step of the decoder as a CUDA graph: recorded once, then started by a single call.

A step launches some twelve kernels a layer from Python, about 10 us each. On a large GPU that takes
many times longer than the kernels themselves. A CUDA graph records the kernels with all their
arguments, and `replay` starts all of them at once. So nothing may differ between two replays but
what lies in memory that the graph reads:

    ids (n, 1)   the newest token of each row
    pad (n,)     the columns before its text
    end (1,)     the column of the new tokens, the same for all rows
    slots (n,)   whose adapter each row has (serving/adapters.py)

Shapes are fixed, too. So a graph is for 1, 2, 4, 8, ... rows, and for 256, 512, 1,024, ... columns
of the cache. The next larger one serves what lies between. Rows that are left over read some token,
which sees only itself, and their logits are dropped.

The graph ends with the logits. Tokens are drawn outside, by `sampling.sample` as everywhere: the
host launches its few kernels while the graph still runs, so they cost no time; and constraints,
log-probabilities and mixed settings need no second way.

    graphs = StepGraphs(decoder, memory)          memory: a KVCache for all rows
    logits = graphs(ids, cache)                   instead of decoder(ids, cache)
"""

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass

import torch

import attention
from config import function_of
from model import KVCache
from program import one_line

MOST_GRAPHS = 64  # the one that was used least recently goes
FEWEST_COLUMNS = 256


class VisibleKeys:
    """The keys first <= j < last of n_keys that one query sees; its own key is the last of them.

    first, last: (B,) int64 on the device. So shapes and the host's part do not depend on where a
    text begins and ends, and one captured CUDA graph serves many steps. What the kernels read is
    computed once, for all layers.
    """

    def __init__(self, first, last, n_keys: int):
        self.first = first
        self.last = last
        self.n_keys = n_keys
        self.shared_bounds = None
        self.shared_bias = None

    def attention(self, q, k, v, impl, rule):
        """One query, q (B, H, 1, D), and all k and v, (B, Hkv, n_keys, D). rule: a `ScoreRule`."""
        if takes_kernel(impl, q.device, q.dtype, q.shape[-1], rule.softcap):
            from fast.flash_attention import forward_operator

            bounds = self.bounds(rule.window)
            settings = rule.slopes, bounds, True, rule.scale, rule.softcap
            return forward_operator(q, k, v, *settings)[0]
        return attention.grouped_attention(q, k, v, self.bias(rule, q.dtype), rule.scale)

    def within(self, window: int | None):
        """The first key that is seen within a sliding window, (B,)."""
        return self.first if window is None else self.first.maximum(self.last - 1 - window)

    def bounds(self, window):
        """As flash_attention.document_bounds, (B, 2, n_keys) int32, for the last position alone.

        The kernel takes the query to stand there. It skips blocks of keys that are not visible.
        ALiBi's distances are then too large, by the same number for all keys of a row, which
        changes no softmax.
        """
        if self.shared_bounds is None:
            shape = len(self.first), 2, self.n_keys
            self.shared_bounds = self.first.new_empty(shape, dtype=torch.int32)
            self.shared_bounds[:, :, -1] = torch.stack([self.within(window), self.last], dim=1)
        return self.shared_bounds

    def bias(self, rule, dtype):
        """What is added to the scores, (B, H or 1, 1, n_keys)."""
        if self.shared_bias is None:
            j = torch.arange(self.n_keys, device=self.first.device)
            distance = self.last[:, None] - 1 - j  # (B, n_keys)
            hidden = (distance < 0) | (j < self.within(rule.window)[:, None])
            if rule.slopes is None:
                bias = torch.zeros(hidden.shape, device=hidden.device)[:, None, None]
            else:
                bias = -rule.slopes[:, None, None] * distance[:, None, None]
            self.shared_bias = bias.masked_fill(hidden[:, None, None], -math.inf).to(dtype)
        return self.shared_bias


def takes_kernel(impl, device, dtype, head_dim, softcap=None) -> bool:
    """Whether a captured step takes this project's kernel, and not SDPA with a mask.

    `auto` takes it with and without ALiBi: a mask would make SDPA read all of the cache.
    """
    case = device, dtype, head_dim, True, 0.0, softcap
    way = attention.choose(impl, *case, one_query=True)
    return way == "triton"


@dataclass
class StepCache(KVCache):
    """The cache of a step of one token a row, whose place is known on the device alone.

    k and v have all columns. end: (1,) int64, the column of the new tokens. Of hidden columns, too,
    keys and values must be finite: attention gives them a weight of 0, but 0 * NaN is NaN.
    """

    end: torch.Tensor | None = None

    def __post_init__(self):
        self.pad = torch.minimum(self.pad, self.end)  # a row that is left over begins at the end
        self.visible = VisibleKeys(self.pad, (self.end + 1).expand_as(self.pad), self.k.shape[3])

    def positions(self, n_tokens):
        return (self.end - self.pad)[:, None]

    def sequence_ids(self, n_tokens):
        return None

    def append(self, layer, k, v):
        """As KVCache.append, in place of what is in the column. Returns all columns."""
        self.k[layer].index_copy_(2, self.end, k.to(self.k.dtype))
        self.v[layer].index_copy_(2, self.end, v.to(self.v.dtype))
        return self.k[layer], self.v[layer]


def suits(decoder) -> bool:
    """Whether steps of this decoder are captured: on a GPU, if attention takes `VisibleKeys`.

    With ALiBi in 16 bits only the kernel does: SDPA would round the bias to 16 bits. Nor has it a
    softcap. Tensor ranks would have to capture their collectives, all at the same step.
    """
    cfg, dtype = decoder.cfg, decoder.cache_dtype
    if decoder.team:
        return False
    if decoder.device.type != "cuda" or function_of(cfg.attn_impl) != "auto":
        return False
    softcap = cfg.attn_logit_softcapping
    if softcap is None and (not cfg.alibi or dtype.itemsize > 2):
        return True
    return takes_kernel(cfg.attn_impl, decoder.device, dtype, cfg.head_dim, softcap)


class StepGraphs:
    """The graphs of a decoder over one memory, which they fill and read.

    memory: a KVCache of all rows and columns. It is cleared.
    """

    def __init__(self, decoder, memory: KVCache):
        self.decoder = decoder
        self.memory = memory
        memory.k.zero_()
        memory.v.zero_()
        n_rows = memory.k.shape[1]
        self.ids, self.pad, self.end, self.slots = (
            torch.zeros(shape, dtype=torch.int64, device=decoder.device)
            for shape in ((n_rows, 1), n_rows, 1, n_rows)
        )
        self.pad_of = None  # what `pad` was filled from
        self.graphs = OrderedDict()  # (rows, columns, slots) -> (graph, logits), latest last
        self.pool = None  # of memory, which all graphs share: one runs at a time
        self.has_failed = False

    def has_room(self, n_rows: int, n_columns: int) -> bool:
        """Whether the memory has so many rows and columns."""
        return n_rows <= self.memory.k.shape[1] and n_columns <= self.memory.k.shape[3]

    def empty(self, n_rows: int, pad=None) -> KVCache:
        """A cache of the first rows, to read prompts into. pad: (n_rows,) or None."""
        self.memory.k[:, :n_rows].zero_()
        self.memory.v[:, :n_rows].zero_()
        return KVCache(self.memory.k[:, :n_rows], self.memory.v[:, :n_rows], pad=pad)

    def __call__(self, ids, cache: KVCache):
        """As `decoder(ids, cache)` for one token a row: ids (n, 1) -> logits (n, vocab_size) fp32.

        cache: the first n rows of the memory, from column 0. Its `pad` may not be changed in place:
        it is sent again only if it is another tensor. The logits hold until the next call.
        """
        n = len(ids)
        if self.has_failed:
            return self.decoder(ids, cache)
        key = self.key(n, cache.length + 1)
        self.fill(ids, cache, *key)
        if key not in self.graphs:
            try:
                self.graphs[key] = self.capture(*key)
            except Exception as error:  # drivers and libraries report with many types
                self.has_failed = True
                slow = "each step is launched from Python, since no CUDA graph can be captured"
                print(f"{slow}: {one_line(error) or type(error).__name__}", file=sys.stderr)
                return self.decoder(ids, cache)
            if len(self.graphs) > MOST_GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph, logits = self.graphs[key]
        graph.replay()
        cache.length += 1
        return logits[:n]

    def key(self, n: int, n_columns: int) -> tuple[int, int, int]:
        """Which graph serves n rows: (rows, columns, slots that it reads: 0, 1 or one a row)."""
        most_rows, most_columns = self.memory.k.shape[1], self.memory.k.shape[3]
        n_rows = min(power_of_two(n), most_rows)
        columns = min(max(power_of_two(n_columns), FEWEST_COLUMNS), most_columns)
        rows = self.decoder.bank and self.decoder.bank.rows
        if rows is None:
            return n_rows, columns, 0
        return n_rows, columns, 1 if isinstance(rows, int) else n_rows

    def fill(self, ids, cache: KVCache, n_rows: int, n_columns: int, n_slots: int) -> None:
        """Write what the graph reads."""
        n = len(ids)
        self.ids[:n] = ids
        self.end.fill_(cache.length)
        pad_of = n, cache.pad
        if self.pad_of is None or n != self.pad_of[0] or cache.pad is not self.pad_of[1]:
            self.pad.fill_(self.memory.k.shape[3])  # beyond the end
            self.pad[:n] = 0 if cache.pad is None else cache.pad
            self.pad_of = pad_of
        if n_slots:
            self.slots[: min(n, n_slots)] = self.decoder.bank.rows

    def step(self, n_rows: int, n_columns: int, n_slots: int):
        """What is captured. Returns the logits, (n_rows, vocab_size)."""
        k, v = (kv[:, :n_rows, :, :n_columns] for kv in (self.memory.k, self.memory.v))
        cache = StepCache(k, v, pad=self.pad[:n_rows], end=self.end)
        return self.decoder(self.ids[:n_rows], cache)

    def capture(self, *key):
        """(the graph of a step, its logits)."""
        bank = self.decoder.bank
        rows = bank and bank.rows
        try:
            if rows is not None:
                bank.rows = self.slots[: key[2]]
            self.step(*key)  # compiles kernels and makes libraries ready, which no graph can hold
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread may load an adapter meanwhile
            captured = torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local")
            # A capture that fails leaves the thread on its own stream: `stream` brings it back.
            with torch.cuda.stream(torch.cuda.current_stream()), captured:
                logits = self.step(*key)
        finally:
            if rows is not None:
                bank.rows = rows
        self.pool = self.pool or graph.pool()
        return graph, logits


def borrow(decoder, n_rows: int, n_columns: int) -> StepGraphs | None:
    """Graphs for one text after another, None where steps are not captured.

    Captured graphs are worth keeping, with their memory: the caller gives them back, to
    `decoder.graphs`. Meanwhile another caller gets others.
    """
    if not suits(decoder):
        return None
    graphs, decoder.graphs = decoder.graphs, None
    if graphs and graphs.has_room(n_rows, n_columns):
        return graphs
    del graphs  # before there is memory for others
    return StepGraphs(decoder, decoder.model.new_cache(n_rows, n_columns, decoder.cache_dtype))


def power_of_two(n: int) -> int:
    """The least power of two that is n or more."""
    return 2 ** math.ceil(math.log2(n))
