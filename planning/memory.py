"""The memory of one training step in closed form: does a run fit before it starts?

Whatever is in memory during a step is a row: part, bytes, first moment, last moment. A moment takes
the sum of its rows, and the fullest moment is the peak. A step of two blocks, N parameters, on one
rank:

                                              loss     loss     block 1  block 0  embedding
    part         bytes                       forward backward backward backward backward update

    weights      4 N                        |----------------------------------------------------|
    moments      8 N, of Adam               |----------------------------------------------------|
    activations  32 d_model x tokens, of 1  |-------------------------|
                 and of block 0             |----------------------------------|
    copies       2 a weight, in bf16, of 1  |-------------------------|
                 and of block 0             |----------------------------------|
    loss         a chunk of logits          |-------|
                 4 W, the output's gradient |---------------------------------------------|
    workspace    of each block's backward                     |-------|--------|----------|
    gradients    4 a weight, of block 1                                |-------------------------|
                 of block 0                                             |------------------------|
                 of all other weights                                                     |------|

Ranks divide the state (16 N in all) and gather copies; tensor parallelism cuts each layer; a
pipeline gives each rank some blocks, and the activations of several microbatches. Activation
checkpointing keeps 22 d_model per token ("selective") or 2 d_model ("full") instead of 32. With
adapters (lora.py) they alone train: 2 bytes of each frozen weight of a matrix in bf16, else 4,
without gradient or moments. A frozen layer does not keep its input, but its adapter does.

The formulas assume eager code, fused attention (`sdpa` without ALiBi, `triton`), RMSNorm in one
operation, as on a GPU, and no dropout; and the loss of a GPU with Triton (fast/cross_entropy.py)
unless `device` is cpu or mps, or tensor parallelism cuts the vocabulary. Fragmentation of the
allocator, the driver and network buffers come on top.

Run `python -m planning.memory configs/mpt1b.py --microbatch_size=4 --ranks=8 --device=mi250`.
bench/results/memory.md compares these estimates with what real steps allocate.
"""

import bisect
import math
import typing
from dataclasses import dataclass, replace
from itertools import accumulate

import config
import devices
import flops
import program
from config import (
    CHUNK_BYTES,
    COLUMNS,
    GPU_ROWS,
    Checkpointing,
    Int,
    MPTConfig,
    TrainConfig,
    blocks_of,
)
from program import require, table

# The share of a device's memory that tensors may fill. The rest is for the driver and kernels
# (about 1 GB), the buffers of NCCL or RCCL, and fragmentation. By this estimate all microbatches
# of LLM Foundry's 142 published runs on 8 GPUs fit: the fullest takes 0.87.
ROOM = 0.92

FROZEN = "frozen weights"  # only with adapters
WEIGHTS = "weights, fp32"
GRADIENTS = "gradients, fp32"
MOMENTS = "Adam's moments, fp32"
COPIES = "copies of the weights"
ACTIVATIONS = "blocks' activations"
LOSS = "final norm and loss"
WORKSPACE = "backward's workspace"
PARTS = (FROZEN, WEIGHTS, GRADIENTS, MOMENTS, COPIES, ACTIVATIONS, LOSS, WORKSPACE)

Row = tuple[str, float, int, int]  # part, bytes, first moment, last moment
START = LOSS_FORWARD = 0  # the first moments; `Rank` numbers those that follow
LOSS_BACKWARD = 1


@dataclass
class MemoryArgs:
    """Which devices."""

    ranks: Int[1, 10**6] = 1  # global ranks, each with one device: data-parallel x tp x pp
    device: str = "auto"  # mi250, h100-nvl, ...: show the largest microbatch that it can hold


def width(precision: str) -> int:
    """Bytes of a number in matmuls and in the residual stream: 2 for bf16, else 4."""
    return 2 if precision == "bf16" else 4


def norm_width(m: MPTConfig, precision: str) -> int:
    """Bytes of a number in a norm's input and output: `layernorm` and `rmsnorm` compute in fp32."""
    return width(precision) if m.norm_type.startswith("low_precision") else 4


# --------------------------------------------------------------------------------------------------
# What tensor parallelism divides


class Widths(typing.NamedTuple):
    """Heads, columns of q, k and v, hidden units and rows of the vocabulary of one tensor rank.

    Where a width does not divide, those of the last rank, which has the largest part.
    """

    heads: int  # of queries
    q: int  # of all queries, and the input of out_proj
    kv: int  # of all keys, and of all values: a single head is whole on every rank
    hidden: int  # of the feed-forward network
    vocab: int


def widths(m: MPTConfig, tp: int = 1) -> Widths:
    """The widths of one of `tp` tensor ranks."""
    heads = m.n_heads // tp
    kv_heads = 1 if m.n_kv_heads == 1 else m.n_kv_heads // tp
    return Widths(
        heads,
        heads * m.head_dim,
        kv_heads * m.head_dim,
        math.ceil(m.hidden_dim / tp),
        math.ceil(m.vocab_size / tp),
    )


def adapter_ends(m: MPTConfig, tp: int = 1) -> dict[str, tuple[int, int]]:
    """{linear layer: (numbers that its A reads, numbers that its B writes)}, on one tensor rank.

    Tensor parallelism cuts one of the two.
    """
    d, part = m.d_model, widths(m, tp)
    return {
        "Wqkv": (d, part.q + 2 * part.kv),
        "out_proj": (part.q, d),
        "gate_proj": (d, part.hidden),
        "up_proj": (d, part.hidden),
        "down_proj": (part.hidden, d),
    }


# --------------------------------------------------------------------------------------------------
# Activations of a block


def saved_by_block(
    m: MPTConfig, precision: str = "bf16", tp: int = 1, sequence_parallel: bool = False
) -> dict[str, int]:
    """{tensor: bytes per token} that a block keeps for its backward if nothing is recomputed.

    For one of `tp` tensor ranks. In 16 bits, 8 d_model on every rank and 24 d_model over tp, as
    equation 2 in section 4.2.1 of Korthikanti et al. (2205.05198) without dropout and scores. With
    sequence parallelism, 4 d_model on every rank: a linear layer keeps the tokens that it has
    gathered. (Theirs keeps 1/tp of them, and gathers again in the backward.)
    """
    w = width(precision)
    d = m.d_model
    part = widths(m, tp)
    parts_of_tokens = tp if sequence_parallel else 1  # between the layers

    norm_input = norm_width(m, precision) * d // parts_of_tokens
    qkv_copies = 2 if m.clip_qkv else 1  # q, k, v are views of Wqkv's output; clamp makes a copy
    repeats_kv = part.kv < part.q and not takes_triton(m)
    # A norm keeps the mean and 1/std of what it norms, RMSNorm 1/rms alone, in fp32.
    statistics = 4 if m.norm_type.endswith("rmsnorm") else 8
    normed = 0  # q and k, and what their norms keep
    if m.qk_gn:
        whole = 4 if norm_width(m, precision) > w else 0
        heads = part.heads + part.kv // m.head_dim
        normed = part.q * (whole + w) + part.kv * (whole + (0 if repeats_kv else w))
        normed += statistics * heads
        if repeats_kv and whole:
            qkv_copies -= 1
    if m.qk_ln:
        # A norm keeps its input, which is Wqkv's output, unless that is cast to fp32. A norm over
        # several tensor ranks keeps its input less the mean, and that times 1/std, in fp32.
        whole = 4 if norm_width(m, precision) > w else 0
        of_q = 8 if tp > 1 else whole
        of_k = whole if m.n_kv_heads == 1 else of_q
        normed = part.q * (of_q + w) + part.kv * (of_k + (0 if repeats_kv else w))
        if repeats_kv and of_q and of_k:
            qkv_copies -= 1  # attention has copies of v, too: nothing needs the views
    return {
        "norm_1's input": norm_input,
        "Wqkv's input": w * d,  # a linear layer keeps its input for the gradient of its weight
        "Wqkv's output": w * (part.q + 2 * part.kv) * qkv_copies,
        "normed q and k": normed,
        "repeated k and v": 2 * w * part.q if repeats_kv else 0,
        "attention's output": w * part.q,  # also out_proj's input
        "logsumexp": 4 * part.heads,
        "norm_2's input": norm_input,
        "up_proj's input": w * d,  # and gate_proj's
        # A ReLU keeps its output instead: a factor, or down_proj's input.
        "activation's input": 0 if m.ffn_act_fn == "relu" else w * part.hidden,
        "gate and up": 2 * w * part.hidden if m.ffn_type == "mptglu" else 0,  # the two factors
        "down_proj's input": w * part.hidden,
        "norms' mean, 1/std": 2 * statistics // parts_of_tokens,
    }


def takes_triton(m: MPTConfig) -> bool:
    """Whether attention is our kernel, which needs no mask and no copies of shared keys.

    It is if attn_impl says so. `auto` takes it in 16 bits as attention.choose says, on a GPU with
    matrix instructions.
    """
    if m.attn_impl != "auto":
        return m.attn_impl == "triton"
    needs_kernel = m.alibi or m.window is not None or m.attn_logit_softcapping is not None
    return needs_kernel and m.head_dim <= 128 and m.attn_pdrop == 0


def saved_beside_adapters(
    saved: dict[str, int], adapted: list[str], input_has_gradient: bool = True
) -> dict[str, int]:
    """What of `saved_by_block` a block keeps whose own matrices are frozen.

    A linear layer with a frozen weight keeps nothing; its adapter keeps its input for A's gradient.
    adapted: layers with adapters. input_has_gradient: whether norm_1 needs one. In the first block
    with adapters it does not, so nothing is kept before the first of them.
    """
    in_attention = input_has_gradient or "Wqkv" in adapted
    after_attention = in_attention or "out_proj" in adapted
    of_up = after_attention or "up_proj" in adapted  # has up_proj's output a gradient?
    of_gate = after_attention or "gate_proj" in adapted
    is_gated = saved["gate and up"] > 0
    of_relu = of_up and not is_gated and not saved["activation's input"]
    needed = {
        "norm_1's input": input_has_gradient,
        "Wqkv's input": "Wqkv" in adapted,
        "attention's output": after_attention,
        "norm_2's input": after_attention,
        "up_proj's input": "up_proj" in adapted or "gate_proj" in adapted,
        "activation's input": of_gate if is_gated else of_up,
        "gate and up": (of_gate + of_up) / 2,  # each for the gradient of the other one
        "down_proj's input": "down_proj" in adapted or of_relu,
        "norms' mean, 1/std": (input_has_gradient + after_attention) / 2,  # of two norms
    }
    return {name: n * needed.get(name, in_attention) for name, n in saved.items()}


# --------------------------------------------------------------------------------------------------
# How ranks divide model and batch


def layout(m: MPTConfig, cfg: TrainConfig, ranks: int) -> tuple[int, int]:
    """(data-parallel ranks that share one copy of the state, rows of the batch on each rank).

    ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. Raises UserError if these do not
    divide the model or the batch, or leave a stage without an adapter.
    """
    tp, pp = cfg.tp, cfg.pp
    m.check_tensor_ranks(tp, cfg.sequence_parallel)
    m.check_stages(pp)
    flops.check_adapters(m, cfg)

    dp, rest = divmod(ranks, tp * pp)
    require(rest == 0, f"{ranks} global ranks are not a multiple of tp {tp} x pp {pp} = {tp * pp}")
    batch = cfg.global_batch_size
    rows, rest = divmod(batch, dp)
    problem = f"global_batch_size {batch} is not a multiple of the {dp} data-parallel ranks"
    below = batch - rest
    nearest = f"{below} or {below + dp}" if below else f"{dp}"
    require(rest == 0, f"{problem}: set --global_batch_size={nearest}")

    shard_ranks = cfg.shard_ranks(dp, node=0 if dp > 1 else 1)
    fix = "set --shard_size (fsdp_train.py takes the ranks of a node by default)"
    require(shard_ranks, f"sharding={cfg.sharding} needs the size of its groups: {fix}")
    divides = dp % shard_ranks == 0
    require(divides, f"shard_size {shard_ranks} does not divide the {dp} data-parallel ranks")
    return shard_ranks, rows


def microbatch_of(cfg: TrainConfig) -> int:
    """The sequences of a microbatch. UserError if they are left open."""
    is_number = cfg.microbatch_size != "auto"
    require(is_number, "microbatch_size=auto: give a number here, as --microbatch_size=4")
    return cfg.microbatch_size


# --------------------------------------------------------------------------------------------------
# One rank


class Block(typing.NamedTuple):
    """A block of this rank."""

    number: int
    backward: int  # its moment
    has_backward: bool  # False below the first adapter
    recomputed: bool
    trained: int  # parameters
    kept: int  # bytes, from its forward to its backward
    again: int  # bytes, computed again just before its backward


class Rank:
    """One rank of pipeline stage `stage`: its part of the model and of the batch.

    ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. Raises UserError if they do not
    divide the model or the batch, and for settings that have no formula here.
    """

    def __init__(self, m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", stage=0):
        self.shard_ranks, self.rows = layout(m, cfg, ranks)
        keeps_scores = m.attn_impl in ("reference", "blocks")
        why = "keeps T x T scores, not counted here" if keeps_scores else "has no formula here"
        is_fused = m.attn_impl in ("auto", "sdpa", "flex", "triton")
        require(is_fused, f"attn_impl={m.attn_impl} {why}: set --attn_impl=sdpa")

        self.m, self.cfg, self.precision, self.stage = m, cfg, precision, stage
        self.dp = ranks // (cfg.tp * cfg.pp)
        self.part = widths(m, cfg.tp)
        self.width = width(precision)
        self.is_first = stage == 0
        self.is_last = stage == cfg.pp - 1
        self.numbers = blocks_of(m.n_layers, stage, cfg.pp)  # of its blocks
        # The names of the linear layers that have adapters.
        self.adapted = m.adapted_layers(cfg.lora_targets) if cfg.lora_rank else []
        self.reduces_late = self.dp > 1 and cfg.sharding_mode.reduces_late

        self.microbatch = min(microbatch_of(cfg), self.rows)  # sequences
        self.accumulates = self.rows > self.microbatch  # over several microbatches
        self.tokens = self.microbatch * m.max_seq_len
        self.token_parts = cfg.tp if cfg.sequence_parallel else 1  # between the layers
        self.residual_bytes = self.width * self.tokens * m.d_model  # of one residual stream
        self.norm_bytes = norm_width(m, precision) * self.tokens * m.d_model  # of a norm's output
        self.head_width = self.width if self.dp > 1 else 4  # of a number of W's gradient: as W's

        self.count_parameters()
        self.blocks = self.list_blocks()
        self.n_trained = sum(block.trained for block in self.blocks) + self.trained_outside
        self.end = LOSS_BACKWARD + len(self.blocks) + 1  # of the backward: weights outside blocks
        self.tied, self.update = self.end + 1, self.end + 2
        self.moments = self.name_moments()

    def count_parameters(self) -> None:
        """Set numbers of parameters, of which some train, and the bytes of those that are frozen.

        n_embedding: of W, the weight that the loss multiplies with. n_block, n_outside: of a block,
        and outside blocks. n_adapters: of a block that has any. n_cast: of a block, which autocast
        casts to bf16. n_scaled: of adapters' B's that the graph keeps, times the scale.
        """
        m, cfg, part, d = self.m, self.cfg, self.part, self.m.d_model
        has_bias = 0 if m.no_bias else 1
        columns = part.q + 2 * part.kv + part.hidden  # of Wqkv, up_proj
        if m.ffn_type == "mptglu":
            columns += part.hidden  # of gate_proj
        rows = part.q + part.hidden  # of out_proj, down_proj, whose biases are whole on every rank
        norms = 2 * d
        if m.qk_ln:
            norms += part.q + part.kv
        if m.qk_gn:
            norms += 2 * m.head_dim
        norm_biases = 0 if m.norm_type.endswith("rmsnorm") else has_bias
        block = {
            "matrices": (columns + rows) * d,
            "norms": norms,
            "norms' biases": norms * norm_biases,
            "biases": (columns + 2 * d) * has_bias,
        }
        # The first stage has the embeddings, the last norm_f and its own copy of a tied embedding.
        self.n_embedding = part.vocab * d
        has_head = self.is_last and (cfg.pp > 1 or not m.tie_word_embeddings)
        first = self.n_embedding + flops.params_by_part(m)["wpe"]
        norm_f = d * self.is_last
        outside = {
            "matrices": first * self.is_first + self.n_embedding * has_head,
            "norms": norm_f,
            "norms' biases": norm_f * norm_biases,
        }
        self.n_block, self.n_outside = sum(block.values()), sum(outside.values())

        ends = [adapter_ends(m, cfg.tp)[name] for name in self.adapted]
        self.n_adapters = cfg.lora_rank * sum(n_in + n_out for n_in, n_out in ends)
        # Where autocast casts B times the scale, the cast copy is what the graph keeps.
        casts_b = self.width == 2 and self.dp == 1 and not self.accumulates
        self.n_scaled = 0 if casts_b else cfg.lora_rank * sum(n_out for _, n_out in ends)

        frozen = self.frozen_kinds()
        self.trained_block = sum(n for kind, n in block.items() if kind not in frozen)
        self.trained_outside = sum(n for kind, n in outside.items() if kind not in frozen)
        self.n_cast = self.n_block + self.n_adapters
        self.frozen_bytes = 0
        n_blocks = len(self.numbers)
        for kind, width in frozen.items():
            self.frozen_bytes += width * (n_blocks * block[kind] + outside.get(kind, 0))
        if "matrices" in frozen:  # bf16 already
            self.n_cast -= block["matrices"]

    def frozen_kinds(self) -> dict[str, int]:
        """{kind of parameters: bytes of each} that do not train: some of them beside adapters.

        Norms and biases stay fp32; matrices are stored as the matmuls take them.
        """
        if not self.adapted:
            return {}
        frozen = {"matrices": self.width, "norms": 4, "norms' biases": 4, "biases": 4}
        trained = self.cfg.lora_train
        if "norms" in trained:
            del frozen["norms"]
        if "biases" in trained:
            del frozen["biases"]
        if trained:
            del frozen["norms' biases"]
        return frozen

    def list_blocks(self) -> list[Block]:
        """This rank's blocks."""
        m, cfg = self.m, self.cfg
        adapted = flops.adapted_blocks(m, cfg)
        first = flops.first_backward(m, cfg)
        sizes = {}  # blocks of a kind keep the same
        blocks = []
        for number in self.numbers:
            # A later stage has a backward for the hidden states that it receives. The first block
            # with a backward passes no gradient on.
            has_backward = number >= first or not self.is_first
            passes_on = number > first or not self.is_first or flops.trains_vectors(m, cfg)
            recomputed = flops.checkpointing_of(cfg, number) != "none"
            kind = recomputed, number in adapted, passes_on
            if kind not in sizes:
                sizes[kind] = self.kept_and_again(*kind)
            kept, again = sizes[kind]
            trained = self.trained_block + self.n_adapters * (number in adapted)
            backward = LOSS_BACKWARD + self.numbers.stop - number
            sizes_of = trained, kept * has_backward, again
            blocks.append(Block(number, backward, has_backward, recomputed, *sizes_of))
        return blocks

    def kept_and_again(self, recomputed: bool, has_adapters: bool, passes_on: bool):
        """Bytes that a block keeps for its backward, and bytes computed again just before it.

        A recomputed block keeps its input; with "selective" also the outputs of its linear layers
        and of attention. Those of out_proj and down_proj are this rank's share of a sum for all
        tokens, and nothing needs down_proj's.
        """
        saved = saved_by_block(self.m, self.precision, self.cfg.tp, self.cfg.sequence_parallel)
        products = 0  # of x and A
        if self.adapted:
            layers = self.adapted if has_adapters else []
            products = self.width * self.cfg.lora_rank * len(layers)
            saved = saved_beside_adapters(saved, layers, passes_on)
        whole = self.tokens * (sum(saved.values()) + products)
        if self.m.attn_impl == "sdpa" and self.m.window is not None:
            whole += self.width * self.m.max_seq_len**2  # the mask
        if not recomputed:
            return whole, 0

        kept = self.residual_bytes // self.token_parts
        if saved["norm_1's input"] and self.norm_bytes > self.residual_bytes:
            whole += kept  # that is an fp32 copy
        if self.cfg.activation_checkpointing == "full":
            return kept, whole - kept
        part = self.part
        n_up = 2 if self.m.ffn_type == "mptglu" else 1  # up_proj, gate_proj
        columns = part.q + 2 * part.kv + n_up * part.hidden + 2 * self.m.d_model + part.q
        kept += self.tokens * (self.width * columns + 4 * part.heads + products)
        return kept, whole - kept + self.residual_bytes

    def name_moments(self) -> dict[int, str]:
        """{number: name} of the moments of this rank, in the order of the step."""
        names = {}
        if self.is_last:
            names |= {LOSS_FORWARD: "loss forward", LOSS_BACKWARD: "loss backward"}
        for block in reversed(self.blocks):
            if block.has_backward:
                names[block.backward] = f"block {block.number} backward"
        if (self.is_first or self.is_last) and not self.adapted:  # else all is frozen there
            names[self.end] = "embedding backward" if self.is_first else "head reduced"
            if self.m.tie_word_embeddings and self.cfg.pp > 1:
                names[self.tied] = "tied gradients"
        return {**names, self.update: "update"}


class Microbatch(typing.NamedTuple):
    """A microbatch whose backward runs, and what is in memory meanwhile."""

    waiting_bytes: int  # activations of other microbatches, which later stages have not sent back
    adds: bool  # earlier microbatches have left their gradients
    reduces: bool  # the data-parallel ranks reduce the gradients


def microbatches(rank: Rank) -> list[Microbatch]:
    """The microbatches in whose backward the peak of a rank may be.

    Without a pipeline, the last one. With one, stage i of p keeps p - i microbatches: in the first
    as many are in flight as ever, but there are no gradients yet. In the second there are. In the
    last, data-parallel ranks reduce them, but nothing else is in flight.
    """
    size = rank.microbatch
    n = math.ceil(rank.rows / size)
    numbers = {n - 1} if rank.cfg.pp == 1 else {0, min(1, n - 1), n - 1}
    kept = sum(block.kept for block in rank.blocks)
    found = []
    for number in sorted(numbers):
        rows_left = rank.rows - number * size
        in_flight = min((rank.cfg.pp - rank.stage) * size, rows_left)  # no more than the batch has
        waiting_bytes = kept * max(0, in_flight - size) // size
        reduces = rank.dp > 1 and (number == n - 1 or not rank.reduces_late)
        found.append(Microbatch(waiting_bytes, number > 0, reduces))
    return found


# --------------------------------------------------------------------------------------------------
# The rows of a step


def rows_of(rank: Rank, now: Microbatch) -> list[Row]:
    """Everything that is in memory while the backward of microbatch `now` runs."""
    return [
        *state(rank),
        *gradients(rank, now),
        *activations(rank, now),
        *messages(rank, now),
        *(gathered_copies(rank, now) if rank.dp > 1 else cast_copies(rank)),
        *loss(rank, now),
        *workspace(rank, now),
    ]


def state(rank: Rank) -> list[Row]:
    """4 bytes a weight and 8 for Adam's two moments, divided by the ranks that share them."""
    sizes = {WEIGHTS: 4 * rank.n_trained, MOMENTS: 8 * rank.n_trained}
    if rank.adapted:
        sizes[FROZEN] = rank.frozen_bytes
    return [(part, n // rank.shard_ranks, START, rank.update) for part, n in sizes.items()]


def gradients(rank: Rank, now: Microbatch) -> list[Row]:
    """4 bytes a weight, from its backward to the update, divided by the ranks that share it.

    ZERO1 and DDP add up whole ones, and reduce them in the last microbatch.
    """
    shard = 4 / rank.shard_ranks
    waiting = 4 if rank.reduces_late else shard
    before = waiting if now.adds else 0
    after = shard if now.reduces else waiting

    rows = [(GRADIENTS, before * rank.trained_outside, START, rank.end)]
    for block in rank.blocks:
        rows.append((GRADIENTS, before * block.trained, START, block.backward))
        rows.append((GRADIENTS, after * block.trained, block.backward + 1, rank.end))
    return [*rows, (GRADIENTS, shard * rank.n_trained, rank.tied, rank.update)]


def activations(rank: Rank, now: Microbatch) -> list[Row]:
    """What the graph of a block keeps until its backward; and other microbatches' in flight.

    Beside activations, B times the scale of its adapters.
    """
    scaled = rank.width * rank.n_scaled
    rows = [(ACTIVATIONS, now.waiting_bytes, START, rank.end)]
    for block in rank.blocks:
        rows.append((ACTIVATIONS, block.kept, START, block.backward))
        if scaled and block.has_backward:
            first = block.backward if block.recomputed else START
            rows.append((COPIES, scaled, first, block.backward))
    return rows


def messages(rank: Rank, now: Microbatch) -> list[Row]:
    """Residual streams on their way to other stages, or kept until the next ones replace them."""
    n_bytes = rank.residual_bytes // rank.token_parts
    rows = []
    if not rank.is_last:  # hidden states that went to the next stage, the gradient that came back
        rows.append((WORKSPACE, n_bytes, START, rank.end))
        rows.append((WORKSPACE, n_bytes, LOSS_BACKWARD + 2, rank.end))
    if now.adds and not rank.is_first:  # the last microbatch's gradient went to the stage before
        rows.append((WORKSPACE, n_bytes, START, rank.end))
    return rows


def gathered_copies(rank: Rank, now: Microbatch) -> list[Row]:
    """Whole weights in the dtype of the matmuls, which FSDP gathers from the shards.

    FULL_SHARD frees a block's after its forward, and gathers them again while the backward of the
    block after it runs. Other modes keep them until the block's gradients are reduced.
    """
    block_bytes = rank.width * (rank.n_block + rank.n_adapters)
    rows = [(COPIES, rank.width * rank.n_outside, START, rank.end)]
    for block in rank.blocks:
        if rank.cfg.sharding_mode.frees_weights:
            rows.append((COPIES, block_bytes, block.backward - 1, block.backward))
        else:
            last = block.backward if now.reduces else rank.end
            rows.append((COPIES, block_bytes, START, last))

    gathers = not (rank.reduces_late and now.adds)  # else an earlier microbatch has gathered
    if rank.shard_ranks > 1 and gathers:  # the last gather's buffer is kept until the next one
        rows.append((COPIES, block_bytes, LOSS_FORWARD, LOSS_FORWARD))
    return rows


def cast_copies(rank: Rank) -> list[Row]:
    """bf16 copies of the fp32 weights of blocks, which autocast makes on one data-parallel rank.

    The graph keeps them until the block's backward, or parallel.cast_weights_once until the last
    one of all microbatches. A block that is recomputed makes them again.
    """
    if rank.width == 4:
        return []
    block_bytes = 2 * rank.n_cast
    rows = []
    for block in rank.blocks:
        if block.recomputed:
            rows.append((COPIES, block_bytes, block.backward, block.backward))
        elif rank.accumulates:
            rows.append((COPIES, block_bytes, START, rank.end))
        elif block.has_backward:
            rows.append((COPIES, block_bytes, START, block.backward))
    if not rank.adapted:  # the loss makes its own copy of W
        rows.append((COPIES, 2 * rank.n_embedding, LOSS_FORWARD, LOSS_FORWARD))
    return rows


# --------------------------------------------------------------------------------------------------
# The loss


def loss(rank: Rank, now: Microbatch) -> list[Row]:
    """On the last stage: the final norm, a chunk of logits, and the gradient of W.

    Forward: norm_f's input and output, what is gathered of that, and the gradient for it; a bf16
    copy of an fp32 output; the gradient of W in fp32; and one chunk of logits after another.
    Backward: the gradient of x, then of W, times the incoming gradient. First x's: alive are both,
    and in bf16 an fp32 copy and the fp32 product. Then W's: with the product, and a bf16 copy of
    one of them if it is bf16. A frozen W has none.
    """
    if not rank.is_last:
        return []
    residual, norm = rank.residual_bytes, rank.norm_bytes
    forward = 2 * norm // rank.token_parts + residual + chunk_bytes(rank)
    if rank.cfg.sequence_parallel or norm > residual:
        forward += residual
    during_x = (5 if rank.width == 2 else 2) * residual
    during_w = 2 * residual
    returning = 0
    if norm > residual and rank.cfg.tp == 1:  # autograd casts x's gradient as x was
        returning = 2 * residual + norm
    if not rank.adapted:
        forward += 4 * rank.n_embedding
        during_x += rank.head_width * rank.n_embedding
        during_w += (10 if rank.head_width == 2 else 8) * rank.n_embedding
        returning += 2 * rank.head_width * rank.n_embedding
    backward = norm // rank.token_parts + max(during_x, during_w, returning)
    return [
        (LOSS, forward, LOSS_FORWARD, LOSS_FORWARD),
        (LOSS, backward, LOSS_BACKWARD, LOSS_BACKWARD),
        (LOSS, head_gradient(rank, now), LOSS_BACKWARD + 1, rank.end),
    ]


def chunk_bytes(rank: Rank) -> int:
    """Bytes of a chunk of logits, as many rows as in loss.py, where it takes the most."""
    on_gpu = rank.cfg.device not in ("cpu", "mps")
    vocab = rank.part.vocab
    rows = max(1, CHUNK_BYTES // (4 * vocab))
    rows -= rows % 128 if rows > 128 else 0
    rows = min(max(rows, GPU_ROWS) if on_gpu else rows, rank.tokens)
    logits = rows * vocab
    products = rows + (0 if rank.adapted else min(vocab, COLUMNS))
    products *= rank.width * rank.m.d_model
    has_softcap = rank.m.final_logit_softcapping is not None
    if on_gpu and rank.cfg.tp == 1:  # the kernel turns them into their gradient
        return rank.width * logits * (3 if has_softcap else 1)
    if has_softcap:  # in fp32 the capped logits, tanh^2 and 1 - tanh^2, which stays to the end
        return max(12 * logits, (4 + rank.width) * logits + products)

    # Logits in fp32, which become probabilities; in bf16 also as the matmul returns them. Then
    # their gradient, and its products with W and x.
    first = (6 if rank.width == 2 else 4) * logits
    return max(first, rank.width * logits + products)


def head_gradient(rank: Rank, now: Microbatch) -> int:
    """Bytes of the gradient of W in the backward of the blocks.

    It waits for the gradient of a tied embedding, or to be reduced over the ranks. On one rank
    without them it is added to .grad directly.
    """
    is_shared = rank.m.tie_word_embeddings and rank.cfg.pp == 1
    added_directly = now.adds and rank.dp == 1 and not is_shared
    waits = rank.is_last and not added_directly and not rank.adapted
    return rank.head_width * rank.n_embedding if waits else 0


# --------------------------------------------------------------------------------------------------
# The backward's workspace


def workspace(rank: Rank, now: Microbatch) -> list[Row]:
    """What the backward of a block, and of what is outside blocks, takes only while it runs.

    The most is alive in a block's first matmuls, or at the end, when its activations are gone:
    data-parallel ranks then copy its gradients into one fp32 buffer and reduce that, kept until the
    next block's. If whole fp32 ones wait already, the block's weights are freed first. Without a
    reduction the gradients become fp32 one after another, or are added to the ones that wait.
    """
    per_gradient = 0
    if now.reduces:
        per_gradient = 4 - rank.width if rank.reduces_late and now.adds else 4 + rank.width
    elif rank.dp > 1:
        per_gradient = rank.width if now.adds else 4

    rows = []
    buffer = 0
    final_norm = 0  # before the last block: norm_f's input, the gradients of its output and input
    if rank.is_last:
        whole = 2 * rank.residual_bytes if rank.cfg.sequence_parallel else rank.norm_bytes
        final_norm = 2 * rank.norm_bytes // rank.token_parts + whole  # tensor ranks sum the second
    for block in reversed(rank.blocks):
        at_first = matmul_workspace(rank, block) + buffer
        at_the_end = per_gradient * block.trained - block.kept
        most = max(at_first, at_the_end, final_norm)
        rows.append((WORKSPACE, most, block.backward, block.backward))
        final_norm = 0
        buffer = 4 * block.trained if now.reduces else 0

    if rank.end in rank.moments:
        rows.append((WORKSPACE, embedding_workspace(rank, now), rank.end, rank.end))
        # The other end's gradient of a tied embedding, to be added.
        rows.append((WORKSPACE, 4 * rank.n_embedding // rank.shard_ranks, rank.tied, rank.tied))
    return rows


def matmul_workspace(rank: Rank, block: Block) -> int:
    """Bytes in a block's first matmuls, those of down_proj, while its input is still alive.

    The gradients of x, of the activation's output and of the weight. Sequence parallelism first
    gathers that of x for all tokens: in parts, which then are joined. A frozen weight has none, but
    the activation's output has a second one, by way of the adapter. (Without an adapter, its input
    has one, and its output was not kept.) The product of a gate takes more in its own backward: its
    gradient and those of both factors, when its value is freed. So does a ReLU, whose value is not
    freed.
    """
    rows = rank.tokens if rank.adapted else rank.m.d_model
    n_bytes = rank.width * (rank.tokens + rows) * rank.part.hidden
    if rank.cfg.sequence_parallel:
        n_bytes = rank.residual_bytes + max(n_bytes, rank.residual_bytes)
    if block.recomputed and "up_proj" in rank.adapted and "down_proj" not in rank.adapted:
        n_bytes += rank.residual_bytes  # up_proj again: its product, the update and their sum
    later = 0
    is_gated = rank.m.ffn_type == "mptglu"
    if is_gated or rank.m.ffn_act_fn == "relu":
        later = 2 * rank.tokens
        if rank.adapted:  # a third one, unless down_proj's input is freed
            later += rank.tokens * (is_gated != ("down_proj" in rank.adapted))
        elif not (rank.accumulates and rank.dp == 1):
            later += rows  # the weight's gradient, not yet added to others
    n_bytes = max(n_bytes, rank.width * later * rank.part.hidden)
    return n_bytes + block.again + rank.residual_bytes // rank.token_parts


def embedding_workspace(rank: Rank, now: Microbatch) -> float:
    """Bytes while the two gradients of a tied embedding are added.

    Tensor ranks first set the gradient of tokens to 0 whose rows they do not have, which takes a
    copy. With several data-parallel ranks the gradients of all weights outside blocks are then
    reduced: gradients in the place of the weights, an fp32 buffer, and its result.
    """
    adding = 0
    if rank.is_first:
        of_tokens = rank.head_width * rank.tokens * rank.m.d_model
        adding = rank.head_width * rank.n_embedding + of_tokens
        if rank.cfg.tp > 1:
            own = of_tokens // rank.cfg.tp if rank.cfg.sequence_parallel else 0
            adding = max(adding, 2 * of_tokens + own)

    reducing = 0
    if now.reduces:
        adding += 4 * rank.n_block  # the buffer of the first block's gradients
        reducing = (4 + 4 / rank.shard_ranks) * rank.n_outside
    elif rank.dp > 1 and not now.adds:  # gradients become fp32
        reducing = (rank.width + 4) * rank.n_outside
    return max(adding, reducing - head_gradient(rank, now))


# --------------------------------------------------------------------------------------------------
# The fullest moment


def by_part(rows: list[Row], moment: int) -> dict[str, int]:
    """{part: bytes} at one moment."""
    sums = dict.fromkeys(PARTS, 0)
    for part, n_bytes, first, last in rows:
        if first <= moment <= last:
            sums[part] += n_bytes
    return {part: round(n_bytes) for part, n_bytes in sums.items() if part != FROZEN or n_bytes}


def fullest(rank: Rank) -> dict[int, tuple[float, list[Row]]]:
    """{moment: (bytes, rows)} in step order, of the microbatch in which it takes the most."""
    found = {}
    for now in microbatches(rank):
        rows = rows_of(rank, now)
        changes = [0] * (rank.update + 2)  # from the moment before
        for _, n_bytes, first, last in rows:
            changes[first] += n_bytes
            changes[last + 1] -= n_bytes
        n_bytes = list(accumulate(changes))
        for moment in rank.moments:
            if moment not in found or n_bytes[moment] > found[moment][0]:
                found[moment] = n_bytes[moment], rows
    return found


def peak_of(rank: Rank) -> dict:
    """{part: bytes} at the fullest moment, with their sum, "peak", and its name, "moment"."""
    found = fullest(rank)
    moment = max(found, key=lambda moment: found[moment][0])
    parts = by_part(found[moment][1], moment)
    return {**parts, "peak": sum(parts.values()), "moment": rank.moments[moment]}


def bytes_by_moment(rank: Rank) -> dict[str, dict[str, int]]:
    """{moment: {part: bytes}} in step order. Of the backwards of blocks, only the fullest."""
    found = fullest(rank)
    backwards = [block.backward for block in reversed(rank.blocks) if block.has_backward]
    shown = max(backwards, key=lambda moment: found[moment][0])
    return {
        rank.moments[moment]: by_part(rows, moment)
        for moment, (_, rows) in found.items()
        if moment == shown or moment not in backwards
    }


# --------------------------------------------------------------------------------------------------
# Answers. ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. Errors as of `Rank`.


def ranks_to_compare(m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16") -> list[Rank]:
    """A rank of each pipeline stage that may have the highest peak.

    Stages in the middle have no more blocks than the second, and fewer microbatches in flight.
    """
    stages = sorted({0, min(1, cfg.pp - 1), cfg.pp - 1})
    return [Rank(m, cfg, ranks, precision, stage) for stage in stages]


def bytes_by_part(m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16") -> dict:
    """`peak_of` the pipeline stage where it is the highest: {part: bytes}, "peak" and "moment"."""
    peaks = [peak_of(rank) for rank in ranks_to_compare(m, cfg, ranks, precision)]
    return max(peaks, key=lambda parts: parts["peak"])


def fits(m: MPTConfig, cfg: TrainConfig, ranks: int, room: float, precision="bf16") -> bool:
    """Is the peak of every stage at most `room` bytes?"""
    return bytes_by_part(m, cfg, ranks, precision)["peak"] <= room


def largest_microbatch(
    m: MPTConfig, cfg: TrainConfig, device_bytes: float, ranks=1, precision="bf16"
) -> int:
    """The largest microbatch, in sequences, whose peak fits into `ROOM` of a device's memory.

    At most all rows of a data-parallel rank; 0 if not even one sequence fits. cfg.microbatch_size
    is not read.
    """
    _, rows = layout(m, cfg, ranks)

    def too_large(size: int) -> bool:
        """Does the peak of this microbatch exceed the room?"""
        trial = replace(cfg, microbatch_size=size)
        return not fits(m, trial, ranks, ROOM * device_bytes, precision)

    # All rows at once may take less than rows - 1: no gradients wait for another microbatch.
    if not too_large(rows):
        return rows
    n_fitting = bisect.bisect_left(range(1, rows), True, key=too_large)  # of 1, 2, ..., rows - 1
    return n_fitting


# --------------------------------------------------------------------------------------------------
# The program


def report(m: MPTConfig, cfg: TrainConfig, args: MemoryArgs, precision: str) -> str:
    """The moments of a step side by side, in GB (10^9 bytes), and what is in the fullest."""
    ranks = ranks_to_compare(m, cfg, args.ranks, precision)
    rank = max(ranks, key=lambda rank: peak_of(rank)["peak"])
    columns = bytes_by_moment(rank)
    at_peak = peak_of(rank)
    peak, moment = at_peak["peak"], at_peak["moment"]

    rows = []
    for part in columns[moment]:
        cells = [f"{parts[part] / 1e9:.3f}" for parts in columns.values()]
        rows.append([part, *cells, f"{at_peak[part] / peak:.0%}"])
    sums = [f"{sum(parts.values()) / 1e9:.3f}" for parts in columns.values()]
    rows.append(["all", *sums, "100%"])

    split = f"dp {rank.dp} ({cfg.sharding}) x tp {cfg.tp} x pp {cfg.pp}, stage {rank.stage}"
    batch = f"microbatch {cfg.microbatch_size} x {m.max_seq_len}"
    lines = [
        f"{flops.n_params(m):,} parameters, {precision}, ranks {args.ranks} = {split}",
        f"{batch}, checkpointing {cfg.activation_checkpointing}",
        "",
        table(["GB of one rank", *columns, "of the peak"], rows),
        "",
        f"peak {peak / 1e9:.2f} GB = {peak / 2**30:.2f} GiB: {moment}",
    ]
    # `device = "cpu"` in a config file says where it trains, and names no accelerator.
    if args.device in devices.THIS_MACHINE:
        return "\n".join(lines)

    device = devices.by_name(args.device)
    device_bytes = device.memory_gb * 2**30
    largest = []
    for mode in typing.get_args(Checkpointing):
        trial = replace(cfg, activation_checkpointing=mode)
        size = largest_microbatch(m, trial, device_bytes, args.ranks, precision)
        largest.append([mode, size])
    lines += [
        f"that is {peak / device_bytes:.0%} of {device.name}'s {device.memory_gb:g} GiB",
        "",
        f"The largest microbatch in {ROOM:.0%} of it, of a rank's {rank.rows} sequences:",
        table(["checkpointing", "microbatch"], largest),
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Print the table for the config files and flags in argv."""
    m, cfg, args = config.load(flops.with_base(argv), MPTConfig, TrainConfig, MemoryArgs)
    precision = "fp32" if cfg.precision == "fp32" else "bf16"
    print(report(m, cfg, args, precision))


if __name__ == "__main__":
    program.run(main)
