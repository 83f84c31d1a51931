"""The memory of one training step, part by part, in closed form: does a run fit before it starts?

    state        4 weights + 4 gradients + 8 Adam's moments = 16 bytes a parameter,
                 divided by the ranks that share it
    activations  tokens x layers x the bytes that a block keeps for its backward; in bf16 with
                 a hidden width of 4 d_model: 32 x d_model without activation checkpointing,
                 22 x d_model with selective, 2 x d_model with full
    loss         the gradient of the output weight W in fp32, one chunk of logits at a time

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
import math
import typing
from dataclasses import dataclass, replace

import config
import devices
import flops
from config import Checkpointing, MPTConfig, TrainConfig, blocks_of, require

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
    divide the model or the batch.
    """
    tp, pp = cfg.tp, cfg.pp
    for name, n in {"ranks": ranks, "tp": tp, "pp": pp}.items():
        require(n > 0, f"{name} must be at least 1, not {n}")
    m.check_tensor_ranks(tp, cfg.sequence_parallel)
    m.check_stages(pp)

    dp, rest = divmod(ranks, tp * pp)
    require(rest == 0, f"{ranks} global ranks are not a multiple of tp {tp} x pp {pp} = {tp * pp}")
    dp_ranks = "data-parallel ranks"
    if tp * pp > 1:
        dp_ranks += f": {ranks} / (tp {tp} x pp {pp})"

    batch = cfg.global_batch_size
    rows, rest = divmod(batch, dp)
    require(rest == 0, f"global_batch_size {batch} is not a multiple of the {dp} {dp_ranks}")

    shard_ranks = cfg.shard_ranks(dp, node=0) if dp > 1 else 1
    fix = "set --shard_size (fsdp_train.py takes the ranks of a node by default)"
    require(shard_ranks, f"sharding={cfg.sharding} needs the size of its groups: {fix}")
    divides = dp % shard_ranks == 0
    require(divides, f"shard_size {shard_ranks} does not divide the {dp} {dp_ranks}")
    return shard_ranks, rows


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
    """

    def __init__(self, m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", stage=0):
        self.shard_ranks, rows = layout(m, cfg, ranks)
        require_countable(m, cfg)

        self.m = m
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

        self.count_parameters()
        self.count_activations(cfg, precision)
        self.accumulates = rows > cfg.microbatch_size  # over several microbatches
        # The gradient of W has W's dtype.
        self.head_grad_width = self.width if self.dp > 1 else 4
        self.turns = self.list_turns(cfg, rows, stage)

    def count_parameters(self) -> None:
        """Set numbers of parameters on this rank: of an embedding, a block, outside blocks, in all.

        The embedding has the size of the weight that the loss multiplies with (W in loss.py).
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

        columns = (part.q + 2 * part.kv + part.hidden) * (d + has_bias)  # Wqkv, up_proj
        rows = (part.q + part.hidden) * d + 2 * d * has_bias  # out_proj, down_proj
        norms = (2 * d + (part.q + part.kv if m.qk_ln else 0)) * (1 + has_bias)
        self.n_block = columns + rows + norms

        self.n_params = self.n_outside + self.n_layers * self.n_block

    def count_activations(self, cfg: TrainConfig, precision: str) -> None:
        """Set which blocks are recomputed, and the bytes that each keeps for its backward."""
        mode = cfg.activation_checkpointing
        self.recomputed = [
            mode != "none" and number % cfg.recompute_every == 0 for number in self.blocks
        ]

        split = (precision, cfg.tp, cfg.sequence_parallel)
        self.saved_bytes = self.tokens * kept_by_block(self.m, "none", *split)
        small = self.tokens * kept_by_block(self.m, mode, *split)
        self.kept_bytes = [small if again else self.saved_bytes for again in self.recomputed]
        # What a block has computed again, just before its backward. With "selective", the output of
        # down_proj is kept, but nothing needs it.
        self.again_bytes = self.saved_bytes - small
        self.again_bytes += self.residual_bytes if mode == "selective" else 0

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
        waits = self.is_last and not added_directly
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
        gradients += waiting * (self.n_params - params_done) if turn.adds else 0
        return {
            "weights, fp32": 4 * self.n_params // self.shard_ranks,
            "gradients, fp32": round(gradients),
            "Adam's moments, fp32": 8 * self.n_params // self.shard_ranks,
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
        if self.dp > 1:
            n_gathered = blocks_waiting if turn.reduces else self.n_layers
            if self.frees_weights:
                n_gathered = min(gathered, blocks_waiting)
            return self.width * (self.n_outside + self.n_block * n_gathered)
        if self.width == 2:
            with_copies = self.recomputed if self.accumulates else self.recomputed[:blocks_waiting]
            return 2 * self.n_block * with_copies.count(False)
        return 0

    def loss_forward(self, turn: Turn) -> dict[str, int]:
        """Bytes by part while one chunk of logits after another is computed."""
        in_bf16 = self.width == 2
        copies = self.copies(turn, self.n_layers)
        gathers = not (self.reduces_late and turn.adds)  # else an earlier microbatch has gathered
        if self.shard_ranks > 1 and gathers:  # the last one's buffer is kept until the next one
            copies += self.width * self.n_block
        elif self.dp == 1 and in_bf16:  # the loss makes its own copy of W
            copies += 2 * self.n_embedding

        # norm_f's input and output, what is gathered of that, and the gradient for it. The loss
        # makes a bf16 copy of an fp32 output.
        inputs = 2 * self.norm_bytes // self.parts_of_tokens + self.residual_bytes
        if self.is_sequence_parallel or self.norm_bytes > self.residual_bytes:
            inputs += self.residual_bytes
        # As large as the embedding: the gradient of W in fp32.
        loss = inputs + 4 * self.n_embedding + self.chunk_bytes()
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
        products = rows + min(self.part.vocab, COLUMNS)
        return max(first, self.width * (logits + self.m.d_model * products))

    def loss_backward(self, turn: Turn) -> dict[str, int]:
        """Bytes by part while the gradients of x and of W are multiplied by the incoming gradient.

        First x's: alive are both gradients, and in bf16 an fp32 copy and the fp32 product. Then
        W's: with the product, and a bf16 copy of one of them if it is bf16.
        """
        copies_of_x = 5 if self.width == 2 else 2
        during_x = copies_of_x * self.residual_bytes + self.head_grad_width * self.n_embedding
        bytes_each = 10 if self.head_grad_width == 2 else 8
        both_of_x = self.residual_bytes + (self.residual_bytes if self.tp > 1 else self.norm_bytes)
        during_w = both_of_x + bytes_each * self.n_embedding
        loss = self.norm_bytes // self.parts_of_tokens + max(during_x, during_w)
        copies = self.copies(turn, self.n_layers, 1)
        return self.parts_at(turn, self.n_layers, 0, copies, loss, self.messages(turn))

    def block_backward(self, i: int, turn: Turn) -> dict[str, int]:
        """Bytes by part in the backward of this stage's i-th block.

        The workspace peaks either at the block's first matmuls, those of down_proj, while its input
        is still alive, or when the block's gradients are reduced.
        """
        # down_proj's backward: the gradients of x, of GELU's output and of the weight. Sequence
        # parallelism first gathers that of x for all tokens: in parts, which then are joined.
        hidden_and_weight = self.width * (self.tokens + self.m.d_model) * self.part.hidden
        gradient = self.residual_bytes // self.parts_of_tokens
        matmuls = gradient + hidden_and_weight
        if self.is_sequence_parallel:
            matmuls = gradient + self.residual_bytes + max(hidden_and_weight, self.residual_bytes)
        copies = self.copies(turn, i + 1, 2)  # the next block is gathered meanwhile
        if self.recomputed[i]:
            matmuls += self.again_bytes
            copies += 2 * self.n_block if self.dp == 1 and self.width == 2 else 0

        at_the_end = 0
        if turn.reduces:  # gradients are copied into one fp32 buffer, kept until the next block's
            matmuls += 4 * self.n_block if i + 1 < self.n_layers else 0
            bytes_each = self.width + 4
            if self.reduces_late and turn.adds:  # fp32 ones already, and the weights are freed
                bytes_each = 4 - self.width
            at_the_end = bytes_each * self.n_block - self.kept_bytes[i]
        elif self.dp > 1:  # they stay, and become fp32 one after another
            bytes_each = self.width if turn.adds else 4
            at_the_end = bytes_each * self.n_block - self.kept_bytes[i]

        params_done = self.n_block * (self.n_layers - 1 - i)
        final_norm = 0
        if self.is_last and i + 1 == self.n_layers:
            # norm_f's backward comes before: its input, and the gradients of its output and input.
            # With tensor parallelism all ranks sum the second, which takes a copy.
            final_norm = 2 * self.norm_bytes // self.parts_of_tokens
            final_norm += 2 * self.residual_bytes if self.is_sequence_parallel else self.norm_bytes
        workspace = max(matmuls, at_the_end, final_norm)
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
        params_done = self.n_params - self.n_outside
        return self.parts_at(turn, 0, params_done, copies, head, workspace)

    def update(self, workspace: int = 0) -> dict[str, int]:
        """Bytes by part when all microbatches are done."""
        parts = self.parts_at(self.turns[-1], 0, self.n_params, 0, workspace=workspace)
        return {**parts, "blocks' activations": 0}

    def moments(self) -> dict[str, dict[str, int]]:
        """{moment: {part: bytes}} in step order, with only the largest of the block backwards."""
        moments = {}
        if self.is_last:
            moments["loss forward"] = largest(self.loss_forward(turn) for turn in self.turns)
            moments["loss backward"] = largest(self.loss_backward(turn) for turn in self.turns)

        backwards = {}
        for i, number in enumerate(self.blocks):
            backward = largest(self.block_backward(i, turn) for turn in self.turns)
            backwards[f"block {number} backward"] = backward
        name = max(backwards, key=lambda name: sum(backwards[name].values()))
        moments[name] = backwards[name]

        is_end = self.is_first or self.is_last
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
    """The pipeline stage with the highest peak, and its `StepMemory.moments`.

    Stages in the middle have no more blocks than the second, and fewer microbatches in flight.
    """
    numbers = sorted({0, min(1, cfg.pp - 1), cfg.pp - 1})
    stages = {n: StepMemory(m, cfg, ranks, precision, n).moments() for n in numbers}
    peaks = {n: sum(largest(moments.values()).values()) for n, moments in stages.items()}
    stage = max(peaks, key=peaks.get)
    return stage, stages[stage]


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
    m, cfg, args = config.load(argv, MPTConfig, TrainConfig, MemoryArgs)
    precision = "fp32" if cfg.precision == "fp32" else "bf16"
    print(table(m, cfg, args, precision))


if __name__ == "__main__":
    config.run(main)
