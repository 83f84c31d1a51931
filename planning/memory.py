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

The formulas assume eager code, fused attention (`sdpa` without ALiBi, `triton`) and no dropout, and
the loss of a GPU with Triton (gpu_kernels/cross_entropy.py) unless `device` is cpu or mps, or
tensor parallelism cuts the vocabulary. Fragmentation of the allocator, the driver and network
buffers come on top.

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
from config import Checkpointing, MPTConfig, TrainConfig, blocks_of, require
from planning import matmuls
from program import table

CHUNK_BYTES = 64 * 2**20  # of fp32 logits, as in loss.py
GPU_ROWS = 4096  # of a chunk of logits, at least, on a GPU, as in loss.py
COLUMNS = 4096  # of the output weight's gradient, computed at once, as in loss.py
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

LOSS_FORWARD, LOSS_BACKWARD = 0, 1  # the first moments; `Rank` numbers those that follow
Row = tuple[str, float, int, int]  # part, bytes, first moment, last moment


@dataclass
class MemoryArgs:
    """Which devices."""

    ranks: int = 1  # global ranks, each with one device: data-parallel x tp x pp
    device: str = "auto"  # mi250, h100-nvl, ...: show the largest microbatch that it can hold


def with_base(argv: list[str]) -> list[str]:
    """argv with a base for the adapters that it asks for: a run needs one, no plan reads it."""
    asks_for_adapters = any(word.startswith("--lora_rank=") for word in argv)
    return ["--init_from=any", *argv] if asks_for_adapters else argv


def width(precision: str) -> int:
    """Bytes of a number in matmuls and in the residual stream: 2 for bf16, else 4."""
    return 2 if precision == "bf16" else 4


def norm_width(m: MPTConfig, precision: str) -> int:
    """Bytes of a number in a norm's input and output: `layernorm` computes in fp32."""
    return 4 if m.norm_type == "layernorm" else width(precision)


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
    repeats_kv = part.kv < part.q and m.attn_impl != "triton" and not m.alibi
    if repeats_kv and m.qk_ln and norms_copy_qk(m, precision, tp):
        qkv_copies -= 1  # attention has copies of v, too: nothing needs the views
    return {
        "norm_1's input": norm_input,
        "Wqkv's input": w * d,  # a linear layer keeps its input for the gradient of its weight
        "Wqkv's output": w * (part.q + 2 * part.kv) * qkv_copies,
        "normed q and k": normed_qk(m, precision, tp, repeats_kv) if m.qk_ln else 0,
        "repeated k and v": 2 * w * part.q if repeats_kv else 0,
        "attention's output": w * part.q,  # also out_proj's input
        "logsumexp": 4 * part.heads,
        "norm_2's input": norm_input,
        "up_proj's input": w * d,
        "GELU's input": w * part.hidden,
        "down_proj's input": w * part.hidden,
        "norms' mean, 1/std": 16 // parts_of_tokens,
    }


def normed_qk(m: MPTConfig, precision: str, tp: int, repeats_kv: bool) -> int:
    """Bytes per token of what qk_ln's norms keep, and of what attention keeps of their outputs.

    A norm over several tensor ranks keeps its input less the mean, and that times 1/std, in fp32.
    """
    w = width(precision)
    part = widths(m, tp)
    whole = 4 if norm_width(m, precision) > w else 0  # else its input, which is Wqkv's output
    of_q = 8 if tp > 1 else whole
    of_k = whole if m.n_kv_heads == 1 else of_q
    return part.q * (of_q + w) + part.kv * (of_k + (0 if repeats_kv else w))


def norms_copy_qk(m: MPTConfig, precision: str, tp: int) -> bool:
    """Whether neither of qk_ln's norms keeps its input as it is."""
    both_are_cut = tp > 1 and m.n_kv_heads > 1
    return both_are_cut or norm_width(m, precision) > width(precision)


def saved_beside_adapters(
    m: MPTConfig,
    cfg: TrainConfig,
    adapted: list[str],
    precision: str = "bf16",
    input_has_gradient: bool = True,
) -> dict[str, int]:
    """`saved_by_block` for a block whose own matrices are frozen. adapted: layers with adapters.

    A linear layer with a frozen weight keeps nothing. Its adapter keeps its input for A's gradient,
    and the product of both for B's. input_has_gradient: whether norm_1 needs one. In the first
    block with adapters it does not, so nothing is kept before the first of them.
    """
    saved = saved_by_block(m, precision, cfg.tp, cfg.sequence_parallel)
    in_attention = input_has_gradient or "Wqkv" in adapted
    after_attention = in_attention or "out_proj" in adapted
    needed = {
        "norm_1's input": input_has_gradient,
        "Wqkv's input": "Wqkv" in adapted,
        "attention's output": after_attention,
        "norm_2's input": after_attention,
        "up_proj's input": "up_proj" in adapted,
        "GELU's input": after_attention or "up_proj" in adapted,
        "down_proj's input": "down_proj" in adapted,
    }
    kept = {name: n * needed.get(name, in_attention) for name, n in saved.items()}
    of_a_norm = saved["norms' mean, 1/std"] // 2
    kept["norms' mean, 1/std"] = of_a_norm * (input_has_gradient + after_attention)
    kept["products with A"] = width(precision) * cfg.lora_rank * len(adapted)
    return kept


def kept_by_block(
    m: MPTConfig,
    activation_checkpointing: str,
    precision: str = "bf16",
    tp: int = 1,
    sequence_parallel: bool = False,
) -> int:
    """Bytes per token that a block keeps from its forward to its backward, on one of `tp` ranks.

    With "full" only the block's input; with "selective" also the outputs of its linear layers and
    of attention. Those of out_proj and down_proj are this rank's share of a sum for all tokens.
    """
    saved = saved_by_block(m, precision, tp, sequence_parallel)
    if activation_checkpointing == "none":
        return sum(saved.values())

    w = width(precision)
    block_input = w * m.d_model // (tp if sequence_parallel else 1)
    if activation_checkpointing == "full":
        return block_input

    part = widths(m, tp)
    wqkv_output = w * (part.q + 2 * part.kv)
    up_proj_output = saved["GELU's input"]
    out_proj_output = down_proj_output = w * m.d_model  # as wide as the residual stream
    linears = wqkv_output + out_proj_output + up_proj_output + down_proj_output
    return block_input + linears + saved["attention's output"] + saved["logsumexp"]


# --------------------------------------------------------------------------------------------------
# How ranks divide model and batch


def layout(m: MPTConfig, cfg: TrainConfig, ranks: int) -> tuple[int, int]:
    """(data-parallel ranks that share one copy of the state, rows of the batch on each rank).

    ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. Raises UserError if these do not
    divide the model or the batch, or leave a stage without an adapter.
    """
    tp, pp = cfg.tp, cfg.pp
    for name, n in {"ranks": ranks, "tp": tp, "pp": pp}.items():
        require(n > 0, f"{name} must be at least 1, not {n}")
    m.check_tensor_ranks(tp, cfg.sequence_parallel)
    m.check_stages(pp)
    m.check_adapters_fit(cfg)

    dp, rest = divmod(ranks, tp * pp)
    require(rest == 0, f"{ranks} global ranks are not a multiple of tp {tp} x pp {pp} = {tp * pp}")
    dp_ranks = "data-parallel ranks"
    if tp * pp > 1:
        dp_ranks += f" ({ranks} / (tp {tp} x pp {pp}))"

    batch = cfg.global_batch_size
    rows, rest = divmod(batch, dp)
    problem = f"global_batch_size {batch} is not a multiple of the {dp} {dp_ranks}"
    require(rest == 0, f"{problem}: {nearest_batches(batch, {dp})}")

    shard_ranks = cfg.shard_ranks(dp, node=0) if dp > 1 else 1
    fix = "set --shard_size (fsdp_train.py takes the ranks of a node by default)"
    require(shard_ranks, f"sharding={cfg.sharding} needs the size of its groups: {fix}")
    divides = dp % shard_ranks == 0
    require(divides, f"shard_size {shard_ranks} does not divide the {dp} {dp_ranks}")
    return shard_ranks, rows


def nearest_batches(batch: int, possible_dp: set[int]) -> str:
    """The fix for a batch that none of these numbers of data-parallel ranks divides."""
    below = max(batch // dp * dp for dp in possible_dp)
    above = min(math.ceil(batch / dp) * dp for dp in possible_dp)
    nearest = f"{below} or {above}" if below else f"{above}"
    return f"set --global_batch_size={nearest}"


def require_countable(m: MPTConfig, cfg: TrainConfig) -> None:
    """UserError for settings whose memory has no formula here."""
    fix = "set --microbatch_size=NUMBER here"
    found_by_trying = f"microbatch_size=auto is found by trying: {fix}"
    require(cfg.microbatch_size != "auto", found_by_trying)

    fused = m.attn_impl not in ("reference", "blocks")
    scores = f"attn_impl={m.attn_impl} keeps T x T scores, not counted here: set --attn_impl=sdpa"
    require(fused, scores)


# --------------------------------------------------------------------------------------------------
# One rank


class Rank:
    """One rank of pipeline stage `stage`: its part of the model, of the batch and of the step.

    ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. With several data-parallel ranks
    the model is under fully_shard. Raises UserError if the ranks do not divide the model or the
    batch, and for settings that have no formula here.

    tp  As tensor_parallel.py does it: heads, hidden width and vocabulary are divided by cfg.tp.
        Norms, positions, the biases of out_proj and down_proj and the inputs of norms and linear
        layers are whole on every rank. With cfg.sequence_parallel the inputs of norms and the
        residual stream are divided, too.
    pp  As pipeline.py does it: the first stage has the embeddings; the last has the final norm, the
        loss and its own copy of a tied embedding.
    """

    def __init__(self, m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", stage=0):
        self.shard_ranks, self.rows = layout(m, cfg, ranks)
        require_countable(m, cfg)

        self.m, self.cfg, self.precision, self.stage = m, cfg, precision, stage
        self.dp = ranks // (cfg.tp * cfg.pp)
        self.part = widths(m, cfg.tp)
        self.width = width(precision)
        self.is_first = stage == 0
        self.is_last = stage == cfg.pp - 1
        self.blocks = blocks_of(m.n_layers, stage, cfg.pp)
        self.has_adapters = cfg.lora_rank > 0
        self.frees_weights = cfg.sharding_mode.frees_weights  # gathered ones, after a forward
        self.reduces_late = self.dp > 1 and cfg.sharding_mode.reduces_late

        self.microbatch = min(cfg.microbatch_size, self.rows)  # sequences
        self.accumulates = self.rows > self.microbatch  # over several microbatches
        self.tokens = self.microbatch * m.max_seq_len
        self.parts_of_tokens = cfg.tp if cfg.sequence_parallel else 1  # between the layers
        self.residual_bytes = self.width * self.tokens * m.d_model  # of one residual stream
        self.norm_bytes = norm_width(m, precision) * self.tokens * m.d_model  # of a norm's output
        # The gradient of the output weight W has W's dtype.
        self.head_grad_width = self.width if self.dp > 1 else 4

        self.count_parameters()
        self.count_activations()
        self.number_moments()

    def count_parameters(self) -> None:
        """Set how many parameters this rank has, which of them train, and the frozen ones' bytes.

        n_embedding: of W, the weight that the loss multiplies with. n_block, n_outside: of a block,
        and outside blocks. trained: of each block. n_cast: of a block, cast to bf16 by autocast.
        """
        m, part, d = self.m, self.part, self.m.d_model
        has_bias = 0 if m.no_bias else 1

        self.n_embedding = part.vocab * d
        has_own_head = self.cfg.pp > 1 or not m.tie_word_embeddings
        embeddings = 0
        if self.is_first:
            embeddings += self.n_embedding + flops.params_by_part(m)["wpe"]
        if self.is_last:
            embeddings += self.n_embedding * has_own_head

        columns = part.q + 2 * part.kv + part.hidden  # of Wqkv, up_proj
        rows = part.q + part.hidden  # of out_proj, down_proj
        matrices = (columns + rows) * d
        # Weights of norms, their biases, and biases of linear layers.
        norms = 2 * d + (part.q + part.kv if m.qk_ln else 0)
        of_block = norms, norms * has_bias, (columns + 2 * d) * has_bias
        norm_f = d * self.is_last, d * self.is_last * has_bias, 0

        self.n_block = self.n_cast = matrices + sum(of_block)
        self.n_outside = self.trained_outside = embeddings + sum(norm_f)
        self.trained = [self.n_block] * len(self.blocks)
        self.n_adapters = self.n_scaled = self.frozen_bytes = 0
        if self.has_adapters:
            self.count_adapters(embeddings, matrices, of_block, norm_f)
        self.n_trained = self.trained_outside + sum(self.trained)

    def count_adapters(self, embeddings, matrices, of_block, norm_f) -> None:
        """What trains is A and B of the adapters, and norms and biases if cfg.lora_train says so.

        n_adapters: of a block that has any. n_scaled: of B's that the graph keeps, times the scale.
        of_block, norm_f: (norms' weights, norms' biases, other biases).
        """
        cfg = self.cfg
        ends = [adapter_ends(self.m, cfg.tp)[name] for name in cfg.adapted_layers]
        n_b = cfg.lora_rank * sum(written for _, written in ends)
        self.n_adapters = cfg.lora_rank * sum(read for read, _ in ends) + n_b
        # Where autocast casts B times the scale, the copy is what the graph keeps.
        casts = self.width == 2 and self.dp == 1 and not self.accumulates
        self.n_scaled = 0 if casts else n_b

        vectors = trained_vectors(cfg.lora_train, *of_block)
        adapted = matmuls.adapted_blocks(self.m, matmuls.setup_of(cfg))
        self.trained = [self.n_adapters * (i in adapted) + vectors for i in self.blocks]
        self.trained_outside = trained_vectors(cfg.lora_train, *norm_f)

        # Norms and biases stay fp32; matrices are stored as the matmuls take them.
        self.n_cast = self.n_adapters + sum(of_block)
        n_blocks = len(self.blocks)
        frozen_matrices = embeddings + n_blocks * matrices
        frozen_vectors = n_blocks * (sum(of_block) - vectors) + sum(norm_f) - self.trained_outside
        self.frozen_bytes = self.width * frozen_matrices + 4 * frozen_vectors

    def count_activations(self) -> None:
        """Set which of this rank's blocks have a backward and which are recomputed.

        And the bytes that each keeps for its backward, and has computed again just before it.
        """
        m, cfg = self.m, self.cfg
        setup = matmuls.setup_of(cfg)
        first = matmuls.first_backward(m, setup)
        adapted = matmuls.adapted_blocks(m, setup)
        vectors_train = matmuls.trains_vectors(m, setup)
        mode, every = cfg.activation_checkpointing, cfg.recompute_every

        self.has_backward, self.recomputed, self.kept, self.again = [], [], [], []
        known = {}  # blocks of a kind keep the same
        for number in self.blocks:
            # A later stage has a backward for the hidden states that it receives.
            has_backward = number >= first or not self.is_first
            # The first block with a backward passes no gradient on.
            input_has_gradient = number > first or not self.is_first or vectors_train
            recomputed = mode != "none" and number % every == 0
            kind = recomputed, number in adapted, input_has_gradient
            if kind not in known:
                known[kind] = self.kept_and_again(*kind)
            kept, again = known[kind]
            self.has_backward.append(has_backward)
            self.recomputed.append(recomputed)
            self.kept.append(kept * has_backward)
            self.again.append(again)

    def kept_and_again(
        self, recomputed: bool, adapted: bool, input_has_gradient: bool
    ) -> tuple[int, int]:
        """Bytes that a block keeps for its backward, and has computed again just before it."""
        m, cfg, precision = self.m, self.cfg, self.precision
        mode = cfg.activation_checkpointing
        split = precision, cfg.tp, cfg.sequence_parallel
        if self.has_adapters:
            layers = cfg.adapted_layers if adapted else []
            saved = saved_beside_adapters(m, cfg, layers, precision, input_has_gradient)
        else:
            saved = saved_by_block(m, *split)
        whole = self.tokens * sum(saved.values())
        if not recomputed:
            return whole, 0

        kept = self.tokens * kept_by_block(m, mode, *split)
        if mode == "full":
            return kept, whole - kept
        # With "selective", the output of down_proj is kept, but nothing needs it.
        kept += self.tokens * saved.get("products with A", 0)
        return kept, whole - kept + self.residual_bytes

    def number_moments(self) -> None:
        """Set the numbers of the moments after those of the loss, and {number: name} of all that
        happen on this rank, in the order of the step."""
        n = len(self.blocks)
        self.backward = [LOSS_BACKWARD + n - i for i in range(n)]  # of each block
        self.end = n + 2  # of the backward: embeddings, and what else is outside blocks
        self.tied, self.update = n + 3, n + 4

        self.moments = {}
        if self.is_last:
            self.moments |= {LOSS_FORWARD: "loss forward", LOSS_BACKWARD: "loss backward"}
        for i, number in reversed(list(enumerate(self.blocks))):
            if self.has_backward[i]:
                self.moments[self.backward[i]] = f"block {number} backward"
        if (self.is_first or self.is_last) and not self.has_adapters:  # else all is frozen there
            self.moments[self.end] = "embedding backward" if self.is_first else "head reduced"
            if self.m.tie_word_embeddings and self.cfg.pp > 1:
                self.moments[self.tied] = "tied gradients"
        self.moments[self.update] = "update"


def trained_vectors(lora_train: str, norms: int, norm_biases: int, linear_biases: int) -> int:
    """How many of these train beside adapters: "norms" with their biases, "biases" of all."""
    n = 0
    if "norms" in lora_train:
        n += norms
    if "biases" in lora_train:
        n += linear_biases
    if lora_train:
        n += norm_biases
    return n


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
    found = []
    for number in sorted(numbers):
        rows_left = rank.rows - number * size
        in_flight = min((rank.cfg.pp - rank.stage) * size, rows_left)  # no more than the batch has
        waiting_bytes = sum(rank.kept) * max(0, in_flight - size) // size
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
        *(gathered_copies(rank, now) if rank.dp > 1 else cast_copies(rank)),
        *scaled_adapters(rank),
        *loss(rank, now),
        *messages(rank, now),
        *workspace(rank, now),
    ]


def state(rank: Rank) -> list[Row]:
    """4 bytes a weight and 8 for Adam's two moments, divided by the ranks that share them."""
    weights = 4 * rank.n_trained // rank.shard_ranks
    moments = 8 * rank.n_trained // rank.shard_ranks
    rows = [
        (WEIGHTS, weights, LOSS_FORWARD, rank.update),
        (MOMENTS, moments, LOSS_FORWARD, rank.update),
    ]
    if rank.has_adapters:
        frozen = rank.frozen_bytes // rank.shard_ranks
        rows.append((FROZEN, frozen, LOSS_FORWARD, rank.update))
    return rows


def gradients(rank: Rank, now: Microbatch) -> list[Row]:
    """4 bytes a weight, from its backward to the update, divided by the ranks that share it.

    ZERO1 and DDP add up whole ones, and reduce them in the last microbatch.
    """
    shard = 4 / rank.shard_ranks
    waiting = 4 if rank.reduces_late else shard
    before = waiting if now.adds else 0
    after = shard if now.reduces else waiting

    rows = [(GRADIENTS, before * rank.trained_outside, LOSS_FORWARD, rank.end)]
    for backward, n in zip(rank.backward, rank.trained, strict=True):
        rows.append((GRADIENTS, before * n, LOSS_FORWARD, backward))
        rows.append((GRADIENTS, after * n, backward + 1, rank.end))
    return [*rows, (GRADIENTS, shard * rank.n_trained, rank.tied, rank.update)]


def activations(rank: Rank, now: Microbatch) -> list[Row]:
    """What a block keeps, until its backward; and other microbatches' that are in flight."""
    rows = [(ACTIVATIONS, now.waiting_bytes, LOSS_FORWARD, rank.end)]
    for backward, n_bytes in zip(rank.backward, rank.kept, strict=True):
        rows.append((ACTIVATIONS, n_bytes, LOSS_FORWARD, backward))
    return rows


def gathered_copies(rank: Rank, now: Microbatch) -> list[Row]:
    """Whole weights in the dtype of the matmuls, which FSDP gathers from the shards.

    FULL_SHARD frees a block's after its forward, and gathers them again while the backward of the
    block after it runs. Other modes keep them until the block's gradients are reduced.
    """
    block_bytes = rank.width * (rank.n_block + rank.n_adapters)
    rows = [(COPIES, rank.width * rank.n_outside, LOSS_FORWARD, rank.end)]
    for backward in rank.backward:
        if rank.frees_weights:
            rows.append((COPIES, block_bytes, backward - 1, backward))
        else:
            last = backward if now.reduces else rank.end
            rows.append((COPIES, block_bytes, LOSS_FORWARD, last))

    gathers = not (rank.reduces_late and now.adds)  # else an earlier microbatch has gathered
    if rank.shard_ranks > 1 and gathers:  # the last gather's buffer is kept until the next one
        rows.append((COPIES, block_bytes, LOSS_FORWARD, LOSS_FORWARD))
    return rows


def cast_copies(rank: Rank) -> list[Row]:
    """bf16 copies of the fp32 weights of blocks, which autocast makes on one data-parallel rank.

    The graph keeps them until the block's backward, or parallel.weights_cast_once until the last
    one of all microbatches. A block that is recomputed makes them again.
    """
    if rank.width == 4:
        return []
    rows = []
    for i, backward in enumerate(rank.backward):
        if rank.recomputed[i]:
            rows.append((COPIES, 2 * rank.n_cast, backward, backward))
        elif rank.accumulates:
            rows.append((COPIES, 2 * rank.n_cast, LOSS_FORWARD, rank.end))
        elif rank.has_backward[i]:
            rows.append((COPIES, 2 * rank.n_cast, LOSS_FORWARD, backward))
    if not rank.has_adapters:  # the loss makes its own copy of W
        rows.append((COPIES, 2 * rank.n_embedding, LOSS_FORWARD, LOSS_FORWARD))
    return rows


def scaled_adapters(rank: Rank) -> list[Row]:
    """B times the adapter's scale, which the graph keeps for the gradient of A's product."""
    rows = []
    for i, backward in enumerate(rank.backward):
        if rank.n_scaled and rank.has_backward[i]:
            first = backward if rank.recomputed[i] else LOSS_FORWARD
            rows.append((COPIES, rank.width * rank.n_scaled, first, backward))
    return rows


def messages(rank: Rank, now: Microbatch) -> list[Row]:
    """Residual streams on their way to other stages, or kept until the next ones replace them."""
    n_bytes = rank.residual_bytes // rank.parts_of_tokens
    rows = []
    if not rank.is_last:  # hidden states that went to the next stage, the gradient that came back
        after_last_block = LOSS_BACKWARD + 2
        rows.append((WORKSPACE, n_bytes, LOSS_FORWARD, rank.end))
        rows.append((WORKSPACE, n_bytes, after_last_block, rank.end))
    if now.adds and not rank.is_first:  # the last microbatch's gradient went to the stage before
        rows.append((WORKSPACE, n_bytes, LOSS_FORWARD, rank.end))
    return rows


# --------------------------------------------------------------------------------------------------
# The loss


def loss(rank: Rank, now: Microbatch) -> list[Row]:
    """On the last stage: the final norm, a chunk of logits, and the gradient of W."""
    if not rank.is_last:
        return []
    return [
        (LOSS, loss_forward(rank), LOSS_FORWARD, LOSS_FORWARD),
        (LOSS, loss_backward(rank), LOSS_BACKWARD, LOSS_BACKWARD),
        (LOSS, head_gradient(rank, now), LOSS_BACKWARD + 1, rank.end),
    ]


def loss_forward(rank: Rank) -> int:
    """Bytes while one chunk of logits after another is computed.

    norm_f's input and output, what is gathered of that, and the gradient for it. The loss makes a
    bf16 copy of an fp32 output. Then the gradient of W in fp32 (a frozen W has none), and a chunk.
    """
    inputs = 2 * rank.norm_bytes // rank.parts_of_tokens + rank.residual_bytes
    if rank.cfg.sequence_parallel or rank.norm_bytes > rank.residual_bytes:
        inputs += rank.residual_bytes
    gradient = 0 if rank.has_adapters else 4 * rank.n_embedding
    return inputs + gradient + chunk_bytes(rank)


def chunk_bytes(rank: Rank) -> int:
    """Bytes of a chunk of logits, as many rows as in loss.py, where it takes the most."""
    on_gpu = rank.cfg.device not in ("cpu", "mps")
    vocab = rank.part.vocab
    rows = max(1, CHUNK_BYTES // (4 * vocab))
    rows -= rows % 128 if rows > 128 else 0
    if on_gpu:
        rows = max(rows, GPU_ROWS)
    rows = min(rows, rank.tokens)
    logits = rows * vocab
    if on_gpu and rank.cfg.tp == 1:
        return rank.width * logits  # the kernel turns them into their gradient

    # Logits in fp32, which become probabilities; in bf16 also as the matmul returns them. Then
    # their gradient, and its products with W and x.
    first = (6 if rank.width == 2 else 4) * logits
    products = rows + (0 if rank.has_adapters else min(vocab, COLUMNS))
    return max(first, rank.width * (logits + rank.m.d_model * products))


def loss_backward(rank: Rank) -> int:
    """Bytes while the gradients of x and of W are multiplied by the incoming gradient.

    First x's: alive are both gradients, and in bf16 an fp32 copy and the fp32 product. Then W's:
    with the product, and a bf16 copy of one of them if it is bf16.
    """
    during_x = (5 if rank.width == 2 else 2) * rank.residual_bytes
    during_w = rank.residual_bytes + (rank.residual_bytes if rank.cfg.tp > 1 else rank.norm_bytes)
    if not rank.has_adapters:
        during_x += rank.head_grad_width * rank.n_embedding
        during_w += (10 if rank.head_grad_width == 2 else 8) * rank.n_embedding
    return rank.norm_bytes // rank.parts_of_tokens + max(during_x, during_w)


def head_gradient(rank: Rank, now: Microbatch) -> int:
    """Bytes of the gradient of W in the backward of the blocks.

    It waits for the gradient of a tied embedding, or to be reduced over the ranks. On one rank
    without them it is added to .grad directly.
    """
    is_shared = rank.m.tie_word_embeddings and rank.cfg.pp == 1
    added_directly = now.adds and rank.dp == 1 and not is_shared
    waits = rank.is_last and not added_directly and not rank.has_adapters
    return rank.head_grad_width * rank.n_embedding if waits else 0


# --------------------------------------------------------------------------------------------------
# The backward's workspace


def workspace(rank: Rank, now: Microbatch) -> list[Row]:
    """What each backward has in memory only while it runs."""
    matmuls = matmul_workspace(rank)
    per_gradient = bytes_to_reduce(rank, now)
    rows = []
    for i, backward in enumerate(rank.backward):
        at_first = matmuls + rank.again[i]
        if rank.recomputed[i]:
            at_first += update_of_up_proj(rank)
        is_last = i + 1 == len(rank.blocks)
        if now.reduces and not is_last:  # the fp32 buffer of the block before this one is kept
            at_first += 4 * rank.trained[i + 1]
        at_the_end = per_gradient * rank.trained[i] - rank.kept[i]  # activations are gone
        final_norm = norm_f_workspace(rank) if rank.is_last and is_last else 0
        rows.append((WORKSPACE, max(at_first, at_the_end, final_norm), backward, backward))

    if rank.end in rank.moments:
        rows.append((WORKSPACE, embedding_workspace(rank, now), rank.end, rank.end))
        # The other end's gradient of a tied embedding, to be added.
        rows.append((WORKSPACE, 4 * rank.n_embedding // rank.shard_ranks, rank.tied, rank.tied))
    return rows


def matmul_workspace(rank: Rank) -> int:
    """Bytes in a block's first matmuls, those of down_proj, while its input is still alive.

    The gradients of x, of GELU's output and of the weight. Sequence parallelism first gathers that
    of x for all tokens: in parts, which then are joined. A frozen weight has none, but GELU's
    output has a second one, by way of the adapter. (Without an adapter, GELU's input has one, and
    its output was not kept.)
    """
    rows = rank.tokens if rank.has_adapters else rank.m.d_model
    hidden_and_weight = rank.width * (rank.tokens + rows) * rank.part.hidden
    gradient = rank.residual_bytes // rank.parts_of_tokens
    if not rank.cfg.sequence_parallel:
        return gradient + hidden_and_weight
    return gradient + rank.residual_bytes + max(hidden_and_weight, rank.residual_bytes)


def update_of_up_proj(rank: Rank) -> int:
    """Bytes that an adapted up_proj takes when computed again: its product, the update, the sum."""
    adapted = rank.cfg.adapted_layers if rank.has_adapters else []
    most = "up_proj" in adapted and "down_proj" not in adapted
    return rank.residual_bytes if most else 0


def bytes_to_reduce(rank: Rank, now: Microbatch) -> int:
    """Bytes per parameter of a block at the end of its backward, beside its whole weights.

    Data-parallel ranks copy the gradients into one fp32 buffer and reduce that, kept until the next
    block's. If fp32 ones wait already, the weights are freed. Without a reduction the gradients
    become fp32 one after another, or are added to the ones that wait.
    """
    if rank.dp == 1:
        return 0
    if not now.reduces:
        return rank.width if now.adds else 4
    added_to_fp32 = rank.reduces_late and now.adds
    return 4 - rank.width if added_to_fp32 else rank.width + 4


def norm_f_workspace(rank: Rank) -> int:
    """Bytes of the final norm's backward: its input, and the gradients of its output and input.

    With tensor parallelism all ranks sum the second, which takes a copy.
    """
    whole = 2 * rank.residual_bytes if rank.cfg.sequence_parallel else rank.norm_bytes
    return 2 * rank.norm_bytes // rank.parts_of_tokens + whole


def embedding_workspace(rank: Rank, now: Microbatch) -> float:
    """Bytes while the two gradients of a tied embedding are added.

    Tensor ranks first set the gradient of tokens to 0 whose rows they do not have, which takes a
    copy. With several data-parallel ranks the gradients of all weights outside blocks are then
    reduced.
    """
    adding = 0
    if rank.is_first:
        of_tokens = rank.head_grad_width * rank.tokens * rank.m.d_model
        adding = rank.head_grad_width * rank.n_embedding + of_tokens
        if rank.cfg.tp > 1:
            own = of_tokens // rank.cfg.tp if rank.cfg.sequence_parallel else 0
            adding = max(adding, 2 * of_tokens + own)

    head = head_gradient(rank, now)
    if now.reduces:
        adding += 4 * rank.n_block  # the buffer of the first block's gradients
        # Gradients in the place of the weights, the fp32 buffer that is reduced, and its result.
        reduction = (4 + 4 / rank.shard_ranks) * rank.n_outside - head
        return max(adding, reduction)
    if rank.dp > 1 and not now.adds:  # gradients become fp32
        return max(adding, (rank.width + 4) * rank.n_outside - head)
    return adding


# --------------------------------------------------------------------------------------------------
# The fullest moment


class Timeline(typing.NamedTuple):
    """The sums of the rows of one microbatch at each moment, by the moment's number."""

    by_part: dict[str, list[float]]
    totals: list[float]


def timelines(rank: Rank) -> list[Timeline]:
    """One for each microbatch in whose backward the peak may be."""
    n_moments = rank.update + 1
    found = []
    for now in microbatches(rank):
        changes = {part: [0] * (n_moments + 1) for part in PARTS}
        for part, n_bytes, first, last in rows_of(rank, now):
            changes[part][first] += n_bytes
            changes[part][last + 1] -= n_bytes
        by_part = {part: list(accumulate(change)) for part, change in changes.items()}
        totals = [sum(amounts) for amounts in zip(*by_part.values(), strict=True)]
        found.append(Timeline(by_part, totals))
    return found


def fullest(
    rank: Rank, found: list[Timeline], moments: typing.Iterable[int]
) -> tuple[int, dict[str, int]]:
    """The fullest of these moments in any microbatch: its number, and {part: bytes}."""
    candidates = [(line.totals[moment], moment, line) for line in found for moment in moments]
    _, moment, line = max(candidates, key=lambda candidate: candidate[0])
    parts = PARTS if rank.has_adapters else PARTS[1:]
    return moment, {part: round(line.by_part[part][moment]) for part in parts}


# --------------------------------------------------------------------------------------------------
# Answers. With a pipeline, of one stage, or (None) of the stage with the highest peak. ranks: global
# ranks = data-parallel ranks x cfg.tp x cfg.pp. Errors are those of `Rank`.


def bytes_by_part(
    m: MPTConfig,
    cfg: TrainConfig,
    ranks: int = 1,
    precision: str = "bf16",
    stage: int | None = None,
) -> dict:
    """{part: bytes} of one rank at the step's peak, with their sum, "peak", and its name, "moment"."""
    if stage is None:
        stage = fullest_stage(m, cfg, ranks, precision)
    rank = Rank(m, cfg, ranks, precision, stage)
    moment, parts = fullest(rank, timelines(rank), rank.moments)
    return {**parts, "peak": sum(parts.values()), "moment": rank.moments[moment]}


def bytes_by_moment(
    m: MPTConfig,
    cfg: TrainConfig,
    ranks: int = 1,
    precision: str = "bf16",
    stage: int | None = None,
) -> dict[str, dict[str, int]]:
    """{moment: {part: bytes}} of one rank in step order, with the fullest of the blocks' backwards."""
    if stage is None:
        stage = fullest_stage(m, cfg, ranks, precision)
    rank = Rank(m, cfg, ranks, precision, stage)
    found = timelines(rank)
    block, _ = fullest(rank, found, [i for i in rank.backward if i in rank.moments])
    shown = [i for i in rank.moments if i == block or i not in rank.backward]
    return {rank.moments[i]: fullest(rank, found, [i])[1] for i in shown}


def stages_to_compare(cfg: TrainConfig) -> list[int]:
    """The pipeline stages of which one has the highest peak.

    Stages in the middle have no more blocks than the second, and fewer microbatches in flight.
    """
    return sorted({0, min(1, cfg.pp - 1), cfg.pp - 1})


def fullest_stage(m: MPTConfig, cfg: TrainConfig, ranks: int, precision: str = "bf16") -> int:
    """The pipeline stage with the highest peak."""
    split = ranks, precision
    stages = stages_to_compare(cfg)
    if len(stages) == 1:
        return 0
    return max(stages, key=lambda stage: bytes_by_part(m, cfg, *split, stage)["peak"])


def fits(m: MPTConfig, cfg: TrainConfig, ranks: int, room: float, precision="bf16") -> bool:
    """Is the peak of every stage at most `room` bytes?"""
    split = ranks, precision
    stages = stages_to_compare(cfg)
    return all(bytes_by_part(m, cfg, *split, stage)["peak"] <= room for stage in stages)


def largest_microbatch(
    m: MPTConfig, cfg: TrainConfig, device_bytes: float, ranks: int = 1, precision: str = "bf16"
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


def answer(m: MPTConfig, cfg: TrainConfig, args: MemoryArgs, precision: str) -> str:
    """The moments of a step side by side, in GB (10^9 bytes), and what is in the fullest."""
    setup = m, cfg, args.ranks, precision
    stage = fullest_stage(*setup)
    moments = bytes_by_moment(*setup, stage)
    peak = bytes_by_part(*setup, stage)

    dp = args.ranks // (cfg.tp * cfg.pp)
    split = f"{args.ranks} ranks of {cfg.sharding}" if args.ranks > 1 else "1 rank, nothing sharded"
    if dp < args.ranks:
        split += f": tp {cfg.tp} x pp {cfg.pp} x dp {dp}"
    if cfg.pp > 1:
        split += f", stage {stage} of 0 to {cfg.pp - 1}"

    columns = [*moments.values(), peak]
    rows = []
    for part in moments["update"]:
        gigabytes = [f"{parts[part] / 1e9:.3f}" for parts in moments.values()]
        rows.append([part, *gigabytes, f"{peak[part] / peak['peak']:.0%}"])
    sums = [f"{sum(parts.values()) / 1e9:.3f}" for parts in moments.values()]
    rows.append(["all", *sums, "100%"])

    n_bytes = peak["peak"]
    lines = [
        f"{flops.n_params(m):,} parameters, {precision}, {split}",
        f"microbatch {cfg.microbatch_size} x {m.max_seq_len}, "
        f"checkpointing {cfg.activation_checkpointing}",
        "",
        table(["GB of one rank", *moments, "of the peak"], rows),
        "",
        f"peak {n_bytes / 1e9:.2f} GB = {n_bytes / 2**30:.2f} GiB: {peak['moment']}",
    ]
    # `device = "cpu"` in a config file says where it trains, and names no accelerator.
    if args.device not in devices.THIS_MACHINE:
        lines.append(on_device(m, cfg, args, precision, n_bytes))
    return "\n".join(lines)


def on_device(m: MPTConfig, cfg: TrainConfig, args: MemoryArgs, precision: str, peak: int) -> str:
    """Does the step fit the device, and which microbatches would?"""
    device = devices.by_name(args.device)
    device_bytes = device.memory_gb * 2**30
    _, rows = layout(m, cfg, args.ranks)
    sizes = []
    for mode in typing.get_args(Checkpointing):
        trial = replace(cfg, activation_checkpointing=mode)
        size = largest_microbatch(m, trial, device_bytes, args.ranks, precision)
        sizes.append([mode, size])
    heads = [
        "checkpointing",
        f"largest microbatch in {ROOM:.0%} of it, of a rank's {rows} sequences",
    ]
    share = f"that is {peak / device_bytes:.0%} of {device.name}'s {device.memory_gb:g} GiB"
    return "\n".join([share, "", table(heads, sizes)])


def main(argv: list[str]) -> None:
    """Print the table for the config files and flags in argv."""
    m, cfg, args = config.load(with_base(argv), MPTConfig, TrainConfig, MemoryArgs)
    precision = "fp32" if cfg.precision == "fp32" else "bf16"
    print(answer(m, cfg, args, precision))


if __name__ == "__main__":
    config.run(main)
