"""The memory of one training step, part by part, in closed form: does a run fit before it starts?

    state        4 weights + 4 gradients + 8 Adam's moments = 16 bytes a parameter,
                 divided by the ranks that share it
    activations  tokens x layers x the bytes that a block keeps for its backward; in bf16 with
                 a hidden width of 4 d_model: 32 x d_model without activation checkpointing,
                 22 x d_model with selective, 2 x d_model with full
    loss         the gradient of the output weight W in fp32, one chunk of logits at a time
    adapters     (lora.py) 16 bytes a parameter of theirs, and for each frozen weight of a matrix 2
                 in bf16, else 4, without gradient and moments. Activations hardly shrink: a frozen
                 layer does not keep its input, but its adapter does. Blocks below the first adapter
                 keep nothing

A step passes through moments (points in time, not Adam's moments): the forward of the loss, its
backward, each block's backward, the update. Each has its own sum of parts; the largest sum is the
peak. The formulas assume eager code, fused attention (`sdpa` without ALiBi, `triton`) and no
dropout, and the loss of a GPU with Triton (gpu_kernels/cross_entropy.py) unless `device` is cpu or
mps, or tensor parallelism cuts the vocabulary. Fragmentation of the allocator, the driver and
network buffers come on top.

Run `python -m planning.memory configs/mpt1b.py --microbatch_size=4 --ranks=8 --device=mi250`.
bench/results/memory.md compares these estimates with what real steps allocate.
"""

import bisect
import itertools
import math
import typing
from dataclasses import dataclass, replace

import config
import devices
import flops
from config import Checkpointing, MPTConfig, TrainConfig, blocks_of, require
from planning import matmuls

CHUNK_BYTES = 64 * 2**20  # of fp32 logits, as in loss.py
GPU_ROWS = 4096  # of a chunk of logits, at least, on a GPU, as in loss.py
COLUMNS = 4096  # of the output weight's gradient, computed at once, as in loss.py
# The share of a device's memory that tensors may fill. The rest is for the driver and kernels
# (about 1 GB), the buffers of NCCL or RCCL, and fragmentation. By this estimate all microbatches
# of LLM Foundry's 142 published runs on 8 GPUs fit: the fullest takes 0.87.
ROOM = 0.92


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


@dataclass(frozen=True)
class Widths:
    """The widths of one tensor rank: its part of what tensor_parallel.py cuts.

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


# --------------------------------------------------------------------------------------------------
# One step on one rank


@dataclass(frozen=True)
class Turn:
    """A microbatch whose backward runs, and what is in memory meanwhile."""

    waiting_bytes: int  # activations of other microbatches, which later stages have not sent back
    adds: bool  # earlier microbatches have left their gradients
    reduces: bool  # the data-parallel ranks reduce the gradients


class StepMemory:
    """Bytes of a training step on one rank of pipeline stage `stage`.

    Without a pipeline, in the last microbatch of the step. With one, at each moment in that
    microbatch (see `turns`) which takes the most.
    ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. Raises UserError if they do not
    divide the model or the batch, and for settings that have no formula here.

    tp  As tensor_parallel.py does it: heads, hidden width and vocabulary are divided by cfg.tp.
        Norms, positions, the biases of out_proj and down_proj and the inputs of norms and linear
        layers are whole on every rank. With cfg.sequence_parallel the inputs of norms and the
        residual stream are divided, too. The chunks of the loss have about tp times as many rows.
    pp  As pipeline.py does it. The blocks of a stage are those of `config.blocks_of`. Beside the
        activations of its own microbatch it keeps those that later stages have not sent back; the
        first stage keeps cfg.pp microbatches in all. The first stage has the embeddings; the last
        has the final norm, the loss and its own copy of a tied embedding. Hidden states and
        gradients on their way to other stages take up to three residual streams.

    With several data-parallel ranks the model is under fully_shard.

    With cfg.lora_rank, lora.py's adapters train, and the model's own matrices are frozen.
    """

    def __init__(self, m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", stage=0):
        self.shard_ranks, rows = layout(m, cfg, ranks)
        require_countable(m, cfg)

        self.m = m
        self.has_adapters = cfg.lora_rank > 0
        self.adapted_layers = cfg.adapted_layers if self.has_adapters else []
        self.setup = matmuls.setup_of(cfg)
        self.dp = ranks // (cfg.tp * cfg.pp)  # data-parallel ranks
        self.tp = cfg.tp
        self.pp = cfg.pp
        self.is_sequence_parallel = cfg.sequence_parallel
        self.part = widths(m, cfg.tp)
        self.width = width(precision)
        self.on_gpu = cfg.device not in ("cpu", "mps")
        self.has_loss_kernel = self.on_gpu and cfg.tp == 1
        self.frees_weights = cfg.sharding_mode.frees_weights  # gathered ones, after a forward
        self.reduces_late = self.dp > 1 and cfg.sharding_mode.reduces_late
        self.is_first = stage == 0
        self.is_last = stage == cfg.pp - 1
        self.is_tied = m.tie_word_embeddings
        self.blocks = blocks_of(m.n_layers, stage, cfg.pp)
        self.n_layers = len(self.blocks)
        self.tokens = min(cfg.microbatch_size, rows) * m.max_seq_len
        self.residual_bytes = self.width * self.tokens * m.d_model  # of one residual stream
        self.norm_bytes = norm_width(m, precision) * self.tokens * m.d_model  # of a norm's output
        # The share of the tokens that a rank has between the layers is 1 / this.
        self.parts_of_tokens = cfg.tp if cfg.sequence_parallel else 1
        self.message_bytes = self.residual_bytes // self.parts_of_tokens  # to another stage

        self.accumulates = rows > cfg.microbatch_size  # over several microbatches
        self.count_parameters()
        self.count_trained(cfg)
        self.count_activations(cfg, precision)
        # The gradient of W has W's dtype.
        self.head_grad_width = self.width if self.dp > 1 else 4
        self.turns = self.list_turns(cfg, rows, stage)

    def count_parameters(self) -> None:
        """Set numbers of parameters on this rank: of an embedding, a block, outside blocks.

        Adapters are not among them. The embedding has the size of the weight that the loss
        multiplies with (W in loss.py).
        """
        m, part = self.m, self.part
        d = m.d_model
        has_bias = 0 if m.no_bias else 1

        self.n_embedding = part.vocab * d
        has_own_head = self.pp > 1 or not m.tie_word_embeddings
        self.n_outside = 0
        if self.is_first:
            self.n_outside += self.n_embedding + flops.params_by_part(m)["wpe"]
        if self.is_last:
            self.n_outside += (self.n_embedding if has_own_head else 0) + d * (1 + has_bias)

        columns = part.q + 2 * part.kv + part.hidden  # of Wqkv, up_proj
        rows = part.q + part.hidden  # of out_proj, down_proj
        self.norm_channels = 2 * d + (part.q + part.kv if m.qk_ln else 0)  # of a block
        self.linear_biases = (columns + 2 * d) * has_bias  # of a block
        norms = self.norm_channels * (1 + has_bias)
        self.n_block = (columns + rows) * d + self.linear_biases + norms

    def count_trained(self, cfg: TrainConfig) -> None:
        """Set what trains and what is frozen on this rank.

        trained: parameters of each block that train. trained_outside: of those outside blocks.
        n_adapters: of a block that has any. n_scaled: of B's that the graph keeps, times the scale,
        beside those. n_cast: parameters of a block that autocast casts to bf16. n_frozen,
        frozen_bytes: of all frozen weights. n_trained, n_params: in all.
        """
        self.trained = [self.n_block] * self.n_layers
        self.trained_outside = self.n_outside
        self.n_adapters = 0
        self.n_scaled = 0
        self.n_frozen, self.frozen_bytes = 0, 0
        self.n_cast = self.n_block
        if self.has_adapters:
            self.count_adapters(cfg)
        self.n_trained = self.trained_outside + sum(self.trained)
        self.n_params = self.n_trained + self.n_frozen

    def count_adapters(self, cfg: TrainConfig) -> None:
        """`count_trained` for a run with adapters."""
        d = self.m.d_model
        ends = adapter_ends(self.m, self.tp)
        n_a = cfg.lora_rank * sum(ends[name][0] for name in cfg.adapted_layers)
        n_b = cfg.lora_rank * sum(ends[name][1] for name in cfg.adapted_layers)
        self.n_adapters = n_a + n_b
        # The graph keeps B times the scale. Where autocast casts it, that is the copy of B.
        casts = self.width == 2 and self.dp == 1 and not self.accumulates
        self.n_scaled = 0 if casts else n_b
        vectors = self.trained_vectors(cfg, self.norm_channels, self.linear_biases)
        with_adapters = matmuls.adapted_blocks(self.m, self.setup)
        self.trained = [self.n_adapters * (i in with_adapters) + vectors for i in self.blocks]
        norm_f = d if self.is_last else 0
        self.trained_outside = self.trained_vectors(cfg, norm_f, 0)

        has_bias = 0 if self.m.no_bias else 1
        vectors_of_block = self.norm_channels * (1 + has_bias) + self.linear_biases
        self.n_cast = self.n_adapters + vectors_of_block
        # Norms and biases stay fp32; matrices are stored as the matmuls take them.
        n_vectors = self.n_layers * vectors_of_block + norm_f * (1 + has_bias)
        n_matrices = self.n_outside + self.n_layers * self.n_block - n_vectors
        frozen_vectors = n_vectors - self.n_layers * vectors - self.trained_outside
        self.n_frozen = n_matrices + frozen_vectors
        self.frozen_bytes = self.width * n_matrices + 4 * frozen_vectors

    def trained_vectors(self, cfg: TrainConfig, norm_channels: int, linear_biases: int) -> int:
        """Of norms with this many channels and of these biases: the parameters that train."""
        norm_biases = 0 if self.m.no_bias else norm_channels
        n = 0
        if "norms" in cfg.lora_train:
            n += norm_channels + norm_biases
        if "biases" in cfg.lora_train:
            n += linear_biases + norm_biases * ("norms" not in cfg.lora_train)
        return n

    def count_activations(self, cfg: TrainConfig, precision: str) -> None:
        """Set which blocks have a backward and which are recomputed, and the bytes that each keeps
        for its backward, and has computed again just before it."""
        mode = cfg.activation_checkpointing
        self.recomputed = [
            mode != "none" and number % cfg.recompute_every == 0 for number in self.blocks
        ]
        first = matmuls.first_backward(self.m, self.setup)
        # A later stage has a backward for the hidden states that it receives.
        self.has_backward = [number >= first or not self.is_first for number in self.blocks]
        # Of the first i blocks: how many have a backward and are not recomputed.
        both = zip(self.has_backward, self.recomputed, strict=True)
        whole = (has_backward and not again for has_backward, again in both)
        self.n_whole = list(itertools.accumulate(whole, initial=0))

        split = (precision, cfg.tp, cfg.sequence_parallel)
        small = self.tokens * kept_by_block(self.m, mode, *split)
        saved, products = self.tokens * kept_by_block(self.m, "none", *split), 0
        # With "selective", the output of down_proj is kept, but nothing needs it.
        unneeded = self.residual_bytes if mode == "selective" else 0
        self.kept_bytes = []
        self.again_bytes = []
        for i, again in enumerate(self.recomputed):
            if self.has_adapters:
                saved, products = self.saved_by_own_block(i, cfg, precision)
            kept = small + (products if mode == "selective" else 0) if again else saved
            self.kept_bytes.append(kept * self.has_backward[i])
            self.again_bytes.append(saved - kept + unneeded if again else 0)

    def saved_by_own_block(self, i: int, cfg: TrainConfig, precision: str) -> tuple[int, int]:
        """Bytes that this stage's i-th block keeps beside adapters if it is not recomputed, and how
        many of them are products with the A of adapters."""
        with_adapters = self.blocks[i] in matmuls.adapted_blocks(self.m, self.setup)
        adapted = cfg.adapted_layers if with_adapters else []
        # The first block with a backward passes no gradient on.
        passes_on = not self.is_first or True in self.has_backward[:i]
        needs_gradient = passes_on or matmuls.trains_vectors(self.m, self.setup)
        saved = saved_beside_adapters(self.m, cfg, adapted, precision, needs_gradient)
        return self.tokens * sum(saved.values()), self.tokens * saved["products with A"]

    def list_turns(self, cfg: TrainConfig, rows: int, stage: int) -> list[Turn]:
        """The microbatches in whose backward the peak of a stage may be.

        In the first, as many are in flight as ever, but there are no gradients yet. In the second
        there are. In the last, data-parallel ranks reduce them, but nothing else is in flight.
        """
        size = min(cfg.microbatch_size, rows)
        n = math.ceil(rows / size)
        numbers = {n - 1} if cfg.pp == 1 else {0, min(1, n - 1), n - 1}
        turns = []
        for number in sorted(numbers):
            rows_left = rows - number * size
            rows_in_flight = min((cfg.pp - stage) * size, rows_left)  # no more than the batch has
            other_tokens = max(0, rows_in_flight - size) * self.m.max_seq_len
            waiting_bytes = sum(self.kept_bytes) * other_tokens // self.tokens
            reduces = self.dp > 1 and (number == n - 1 or not self.reduces_late)
            turns.append(Turn(waiting_bytes, number > 0, reduces))
        return turns

    def head_grad_bytes(self, turn: Turn) -> int:
        """Bytes of the gradient of W in the backward of the blocks.

        It waits for the gradient of a tied embedding, or to be reduced over the ranks. On one rank
        without them it is added to .grad directly.
        """
        is_shared = self.is_tied and self.pp == 1
        added_directly = turn.adds and self.dp == 1 and not is_shared
        waits = self.is_last and not added_directly and not self.has_adapters
        return self.head_grad_width * self.n_embedding if waits else 0

    def messages(self, turn: Turn, receives_gradient: bool = False) -> int:
        """Bytes on their way to other stages, or kept until the next ones replace them.

        The hidden states that went to the next stage, the gradient that went to the one before for
        the last microbatch, and in blocks before the last the gradient that came from the next.
        """
        n = 0 if self.is_last else 1
        n += 1 if receives_gradient and not self.is_last else 0
        n += 1 if turn.adds and not self.is_first else 0
        return n * self.message_bytes

    def parts_at(
        self,
        turn: Turn,
        blocks_kept: int,
        params_done: int,
        copies: int,
        loss: int = 0,
        workspace: float = 0,
    ) -> dict[str, int]:
        """{part: bytes} at one moment.

        blocks_kept: how many blocks still keep their activations. params_done: how many parameters
        have the gradient of this microbatch. copies, loss, workspace: bytes of these parts.
        """
        waiting = 4 if self.reduces_late else 4 / self.shard_ranks  # whole ones, or shards
        done = 4 / self.shard_ranks if turn.reduces else waiting
        gradients = done * params_done
        gradients += waiting * (self.n_trained - params_done) if turn.adds else 0
        frozen = {"frozen weights": self.frozen_bytes // self.shard_ranks}
        return {
            **(frozen if self.has_adapters else {}),
            "weights, fp32": 4 * self.n_trained // self.shard_ranks,
            "gradients, fp32": round(gradients),
            "Adam's moments, fp32": 8 * self.n_trained // self.shard_ranks,
            "copies of the weights": copies,
            "blocks' activations": sum(self.kept_bytes[:blocks_kept]) + turn.waiting_bytes,
            "final norm and loss": loss,
            "backward's workspace": round(workspace),
        }

    def copies(self, turn: Turn, blocks_waiting: int, gathered: int = 0) -> int:
        """Bytes of weights beside the sharded fp32 ones.

        blocks_waiting: how many blocks wait for their backward. gathered: how many of them FSDP has
        gathered at this moment, if it frees blocks after use; else it has gathered them all, and
        keeps those of the other blocks, too, until the gradients are reduced.
        On one data-parallel rank: bf16 copies for blocks that are not recomputed. Autocast makes
        them, and the graph keeps them, or parallel.weights_cast_once keeps them for all
        microbatches of a step.
        """
        n_whole = self.n_whole[blocks_waiting]
        scaled = self.width * self.n_scaled * n_whole
        if self.dp > 1:
            n_gathered = blocks_waiting if turn.reduces else self.n_layers
            if self.frees_weights:
                n_gathered = min(gathered, blocks_waiting)
            whole_block = self.n_block + self.n_adapters
            return self.width * (self.n_outside + whole_block * n_gathered) + scaled
        if self.width == 2:
            with_copies = self.recomputed.count(False) if self.accumulates else n_whole
            return 2 * self.n_cast * with_copies + scaled
        return scaled

    def loss_forward(self, turn: Turn) -> dict[str, int]:
        """Bytes by part while one chunk of logits after another is computed."""
        in_bf16 = self.width == 2
        copies = self.copies(turn, self.n_layers)
        gathers = not (self.reduces_late and turn.adds)  # else an earlier microbatch has gathered
        if self.shard_ranks > 1 and gathers:  # the last one's buffer is kept until the next one
            copies += self.width * (self.n_block + self.n_adapters)
        elif self.dp == 1 and in_bf16 and not self.has_adapters:  # the loss makes its own copy of W
            copies += 2 * self.n_embedding

        # norm_f's input and output, what is gathered of that, and the gradient for it. The loss
        # makes a bf16 copy of an fp32 output.
        inputs = 2 * self.norm_bytes // self.parts_of_tokens + self.residual_bytes
        if self.is_sequence_parallel or self.norm_bytes > self.residual_bytes:
            inputs += self.residual_bytes
        # As large as the embedding: the gradient of W in fp32. A frozen W has none.
        gradient = 0 if self.has_adapters else 4 * self.n_embedding
        loss = inputs + gradient + self.chunk_bytes()
        return self.parts_at(turn, self.n_layers, 0, copies, loss, self.messages(turn))

    def chunk_rows(self) -> int:
        """Tokens in a chunk of the loss, as in loss.py."""
        rows = max(1, CHUNK_BYTES // (4 * self.part.vocab))
        rows -= rows % 128 if rows > 128 else 0
        if self.on_gpu:
            rows = max(rows, GPU_ROWS)
        return min(rows, self.tokens)

    def chunk_bytes(self) -> int:
        """Bytes of a chunk of the loss, where it takes the most."""
        rows = self.chunk_rows()
        logits = rows * self.part.vocab
        if self.has_loss_kernel:
            return self.width * logits  # the logits, which become their gradient

        # Logits in fp32, which become probabilities; in bf16 also as the matmul returns them. Then
        # their gradient, and its products with W and x.
        first = (6 if self.width == 2 else 4) * logits
        products = rows + (0 if self.has_adapters else min(self.part.vocab, COLUMNS))
        return max(first, self.width * (logits + self.m.d_model * products))

    def loss_backward(self, turn: Turn) -> dict[str, int]:
        """Bytes by part while the gradients of x and of W are multiplied by the incoming gradient.

        First x's: alive are both gradients, and in bf16 an fp32 copy and the fp32 product. Then
        W's: with the product, and a bf16 copy of one of them if it is bf16.
        """
        copies_of_x = 5 if self.width == 2 else 2
        during_x = copies_of_x * self.residual_bytes
        bytes_each = 10 if self.head_grad_width == 2 else 8
        during_w = self.residual_bytes + (self.residual_bytes if self.tp > 1 else self.norm_bytes)
        if not self.has_adapters:
            during_x += self.head_grad_width * self.n_embedding
            during_w += bytes_each * self.n_embedding
        loss = self.norm_bytes // self.parts_of_tokens + max(during_x, during_w)
        copies = self.copies(turn, self.n_layers, 1)
        return self.parts_at(turn, self.n_layers, 0, copies, loss, self.messages(turn))

    def block_backward(self, i: int, turn: Turn) -> dict[str, int]:
        """Bytes by part in the backward of this stage's i-th block.

        The workspace peaks either at the block's first matmuls, those of down_proj, while its input
        is still alive, or when the block's gradients are reduced.
        """
        # down_proj's backward: the gradients of x, of GELU's output and of the weight. Sequence
        # parallelism first gathers that of x for all tokens: in parts, which then are joined. A
        # frozen weight has none, but GELU's output has a second one, by way of the adapter.
        # (Without an adapter, GELU's input has one, and its output was not kept.)
        rows = self.tokens if self.has_adapters else self.m.d_model
        hidden_and_weight = self.width * (self.tokens + rows) * self.part.hidden
        gradient = self.residual_bytes // self.parts_of_tokens
        in_matmuls = gradient + hidden_and_weight
        if self.is_sequence_parallel:
            in_matmuls = gradient + self.residual_bytes
            in_matmuls += max(hidden_and_weight, self.residual_bytes)
        copies = self.copies(turn, i + 1, 2)  # the next block is gathered meanwhile
        if self.recomputed[i]:
            in_matmuls += self.again_bytes[i]
            if "up_proj" in self.adapted_layers and "down_proj" not in self.adapted_layers:
                # up_proj takes more while it is computed again: its product, the update, their sum.
                in_matmuls += self.residual_bytes
            copies += 2 * self.n_cast if self.dp == 1 and self.width == 2 else 0
            copies += self.width * self.n_scaled

        at_the_end = 0
        if turn.reduces:  # gradients are copied into one fp32 buffer, kept until the next block's
            in_matmuls += 4 * self.trained[i + 1] if i + 1 < self.n_layers else 0
            bytes_each = self.width + 4
            if self.reduces_late and turn.adds:  # fp32 ones already, and the weights are freed
                bytes_each = 4 - self.width
            at_the_end = bytes_each * self.trained[i] - self.kept_bytes[i]
        elif self.dp > 1:  # they stay, and become fp32 one after another
            bytes_each = self.width if turn.adds else 4
            at_the_end = bytes_each * self.trained[i] - self.kept_bytes[i]

        params_done = sum(self.trained[i + 1 :])
        final_norm = 0
        if self.is_last and i + 1 == self.n_layers:
            # norm_f's backward comes before: its input, and the gradients of its output and input.
            # With tensor parallelism all ranks sum the second, which takes a copy.
            final_norm = 2 * self.norm_bytes // self.parts_of_tokens
            final_norm += 2 * self.residual_bytes if self.is_sequence_parallel else self.norm_bytes
        workspace = max(in_matmuls, at_the_end, final_norm)
        workspace += self.messages(turn, receives_gradient=i + 1 < self.n_layers)
        head = self.head_grad_bytes(turn)
        return self.parts_at(turn, i + 1, params_done, copies, head, workspace)

    def embedding_backward(self, turn: Turn) -> dict[str, int]:
        """Bytes by part while the two gradients of a tied embedding are added.

        Tensor ranks first set the gradient of tokens to 0 whose rows they do not have, which takes
        a copy. With several data-parallel ranks the gradients of all weights outside blocks are
        then reduced.
        """
        copies = self.copies(turn, 0)
        head = self.head_grad_bytes(turn)
        workspace = 0
        if self.is_first:
            gradient = self.head_grad_width * self.tokens * self.m.d_model
            workspace = self.head_grad_width * self.n_embedding + gradient
            if self.tp > 1:
                of_own_tokens = gradient // self.tp if self.is_sequence_parallel else 0
                workspace = max(workspace, 2 * gradient + of_own_tokens)
        if turn.reduces:
            workspace += 4 * self.n_block  # the buffer of the first block's gradients
            # Gradients, the fp32 buffer that is reduced, and its result.
            bytes_each = self.width + 4 + 4 / self.shard_ranks
            reduction = bytes_each * self.n_outside - head - copies
            workspace = max(workspace, reduction)
        elif self.dp > 1 and not turn.adds:  # gradients become fp32
            workspace = max(workspace, (self.width + 4) * self.n_outside - head)
        workspace += self.messages(turn, receives_gradient=True)
        params_done = sum(self.trained)
        return self.parts_at(turn, 0, params_done, copies, head, workspace)

    def update(self, workspace: int = 0) -> dict[str, int]:
        """Bytes by part when all microbatches are done."""
        parts = self.parts_at(self.turns[-1], 0, self.n_trained, 0, workspace=workspace)
        return {**parts, "blocks' activations": 0}

    def blocks_to_compare(self) -> list[int]:
        """This stage's blocks whose backward may take the most: a few stand for all.

        From one block to the next of the same kind, the bytes of a backward grow or shrink evenly,
        so the first or the last of a kind takes the most. The very first block is a case of its
        own: nothing is gathered for a block before it. Hence the second of each kind, too.
        """
        kinds = {}
        for i, has_backward in enumerate(self.has_backward):
            if has_backward:
                next_trained = self.trained[i + 1] if i + 1 < self.n_layers else None
                kept = self.recomputed[i], self.kept_bytes[i], self.again_bytes[i]
                kinds.setdefault((*kept, self.trained[i], next_trained), []).append(i)
        return sorted({i for alike in kinds.values() for i in (*alike[:2], alike[-1])})

    def moments(self) -> dict[str, dict[str, int]]:
        """{moment: {part: bytes}} in step order, with only the largest of the block backwards."""
        moments = {}
        if self.is_last:
            moments["loss forward"] = largest(self.loss_forward(turn) for turn in self.turns)
            moments["loss backward"] = largest(self.loss_backward(turn) for turn in self.turns)

        backwards = {}
        for i in self.blocks_to_compare():
            backward = largest(self.block_backward(i, turn) for turn in self.turns)
            backwards[f"block {self.blocks[i]} backward"] = backward
        name = max(backwards, key=lambda name: sum(backwards[name].values()))
        moments[name] = backwards[name]

        is_end = (self.is_first or self.is_last) and not self.has_adapters  # else they are frozen
        if is_end:
            name = "embedding backward" if self.is_first else "head reduced"
            moments[name] = largest(self.embedding_backward(turn) for turn in self.turns)
        if is_end and self.is_tied and self.pp > 1:  # the other end's gradient is added
            gradient = 4 * self.n_embedding // self.shard_ranks
            moments["tied gradients"] = self.update(workspace=gradient)
        moments["update"] = self.update()
        return moments


def largest(moments: typing.Iterable[dict[str, int]]) -> dict[str, int]:
    """The moment, {part: bytes}, with the most bytes in all."""
    return max(moments, key=lambda parts: sum(parts.values()))


def require_countable(m: MPTConfig, cfg: TrainConfig) -> None:
    """UserError for settings whose memory has no formula here."""
    fix = "set --microbatch_size=NUMBER here"
    found_by_trying = f"microbatch_size=auto is found by trying: {fix}"
    require(cfg.microbatch_size != "auto", found_by_trying)

    fused = m.attn_impl not in ("reference", "blocks")
    scores = f"attn_impl={m.attn_impl} keeps T x T scores, not counted here: set --attn_impl=sdpa"
    require(fused, scores)


# --------------------------------------------------------------------------------------------------
# Answers


def worst_stage(
    m: MPTConfig, cfg: TrainConfig, ranks: int, precision: str
) -> tuple[int, dict[str, dict[str, int]]]:
    """The pipeline stage with the highest peak, and its `StepMemory.moments`."""
    stages = {n: StepMemory(m, cfg, ranks, precision, n).moments() for n in stages_to_compare(cfg)}
    peaks = {n: sum(largest(moments.values()).values()) for n, moments in stages.items()}
    stage = max(peaks, key=peaks.get)
    return stage, stages[stage]


def stages_to_compare(cfg: TrainConfig) -> list[int]:
    """The pipeline stages of which one has the highest peak.

    Stages in the middle have no more blocks than the second, and fewer microbatches in flight.
    """
    return sorted({0, min(1, cfg.pp - 1), cfg.pp - 1})


def fits(m: MPTConfig, cfg: TrainConfig, ranks: int, room: float, precision="bf16") -> bool:
    """Is the peak of every stage at most `room` bytes? As `bytes_by_part` says, but sooner.

    Arguments and errors as in `bytes_by_moment`.
    """
    for n in stages_to_compare(cfg):
        moments = StepMemory(m, cfg, ranks, precision, n).moments()
        if sum(largest(moments.values()).values()) > room:
            return False
    return True


def bytes_by_moment(
    m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16"
) -> dict[str, dict[str, int]]:
    """{moment: {part: bytes}} of one rank, in the order of the step.

    ranks: global ranks = data-parallel ranks x cfg.tp x cfg.pp. With a pipeline, the stage with the
    highest peak is shown. Raises UserError as `StepMemory` does.
    """
    return worst_stage(m, cfg, ranks, precision)[1]


def bytes_by_part(m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16") -> dict:
    """{part: bytes} of one rank at the step's peak, with their sum, "peak", and its name, "moment".

    Arguments and errors as in `bytes_by_moment`.
    """
    moments = bytes_by_moment(m, cfg, ranks, precision)
    name = max(moments, key=lambda name: sum(moments[name].values()))
    return {**moments[name], "peak": sum(moments[name].values()), "moment": name}


def largest_microbatch(m: MPTConfig, cfg: TrainConfig, device, ranks=1, precision="bf16") -> int:
    """The largest microbatch, in sequences, whose peak fits into `ROOM` of the device's memory.

    device: a devices.Device, or bytes. At most all rows of a data-parallel rank; 0 if not even one
    sequence fits. cfg.microbatch_size is not read. Raises UserError as `StepMemory` does.
    """
    memory = device.memory_gb * 2**30 if isinstance(device, devices.Device) else device
    require(memory > 0, "the memory of this device is not known: give its bytes")
    _, rows = layout(m, cfg, ranks)

    def too_large(size: int) -> bool:
        """Does the peak of this microbatch exceed the room?"""
        trial = replace(cfg, microbatch_size=size)
        return bytes_by_part(m, trial, ranks, precision)["peak"] > ROOM * memory

    # All rows at once may take less than rows - 1: no gradients wait for another microbatch.
    if not too_large(rows):
        return rows
    n_fitting = bisect.bisect_left(range(1, rows), True, key=too_large)  # of 1, 2, ..., rows - 1
    return n_fitting


# --------------------------------------------------------------------------------------------------
# The program


def table(m: MPTConfig, cfg: TrainConfig, args: MemoryArgs, precision: str) -> str:
    """The table of the moments side by side, in GB (10^9 bytes), as text."""
    setup = (m, cfg, args.ranks, precision)
    stage, moments = worst_stage(*setup)
    peak = bytes_by_part(*setup)

    dp = args.ranks // (cfg.tp * cfg.pp)
    split = f"{args.ranks} ranks of {cfg.sharding}" if args.ranks > 1 else "1 rank, nothing sharded"
    if dp < args.ranks:
        split += f": tp {cfg.tp} x pp {cfg.pp} x dp {dp}"
    if cfg.pp > 1:
        split += f", stage {stage} of 0 to {cfg.pp - 1}"
    batch = f"microbatch {cfg.microbatch_size} x {m.max_seq_len}"

    lines = [
        f"{flops.n_params(m):,} parameters, {precision}, {split}",
        f"{batch}, checkpointing {cfg.activation_checkpointing}",
        "",
        "GB of one rank".ljust(25) + "".join(name.rjust(19) for name in moments),
    ]
    columns = [{**parts, "all": sum(parts.values())} for parts in moments.values()]
    for part in columns[0]:
        cells = "".join(f"{column[part] / 1e9:>19.3f}" for column in columns)
        lines.append(f"  {part:<23}{cells}")

    peak_bytes = peak["peak"]
    summary = f"peak {peak_bytes / 1e9:.2f} GB = {peak_bytes / 2**30:.2f} GiB: {peak['moment']}"
    return "\n".join([*lines, "", summary, *device_lines(args, m, cfg, precision)])


def device_lines(args: MemoryArgs, m: MPTConfig, cfg: TrainConfig, precision: str) -> list[str]:
    """Does the step fit the device, and which microbatches would?

    Nothing if no accelerator is named: `device = "cpu"` in a config file says where it trains.
    """
    if args.device in devices.THIS_MACHINE:
        return []
    device = devices.by_name(args.device)
    split = (args.ranks, precision)
    peak = bytes_by_part(m, cfg, *split)["peak"] / 2**30
    _, rows = layout(m, cfg, args.ranks)
    lines = [
        f"that is {peak / device.memory_gb:.0%} of {device.name}'s {device.memory_gb:g} GiB",
        "",
        f"largest microbatch in {ROOM:.0%} of it, of a rank's {rows} sequences",
    ]
    for mode in typing.get_args(Checkpointing):
        trial = replace(cfg, activation_checkpointing=mode)
        size = largest_microbatch(m, trial, device, *split)
        lines.append(f"  checkpointing {mode:<10}{size:>6}")
    return lines


def main(argv: list[str]) -> None:
    """Print the table for the config files and flags in argv."""
    m, cfg, args = config.load(with_base(argv), MPTConfig, TrainConfig, MemoryArgs)
    precision = "fp32" if cfg.precision == "fp32" else "bf16"
    print(table(m, cfg, args, precision))


if __name__ == "__main__":
    config.run(main)
