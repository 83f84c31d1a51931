"""Bytes of one training step by part, in closed form: what fits on a device, before it is launched.

    state        4 weights + 4 gradients + 8 Adam's moments = 16 bytes a parameter, over the ranks that share it
    activations  tokens x layers x what a block keeps for its backward: with bf16 and a hidden width of 4 d_model
                 32 bytes x d_model, 22 with selective activation checkpointing, 2 with full
    loss         the gradient of W in fp32, and one chunk of logits at a time (loss.py)

A step is a row of moments, each with its own sum of parts; the largest sum is the peak. Assumed are eager code, fused
attention (`sdpa` without ALiBi, `triton`) and no dropout. The allocator's gaps, the driver and the network come on top.
Tensor and pipeline parallelism (`Step` says how they are counted) are not in our training code: nothing there is
measured.

Run `python -m planning.memory configs/mpt1b.py --microbatch_size=4 --ranks=8 --device=mi250`.
Estimates beside what real steps allocate: bench/results/memory.md. Read next: planning/step_time.py.
"""

import bisect
import typing
from dataclasses import dataclass, replace

import config
import devices
import flops
from config import Checkpointing, MPTConfig, TrainConfig, require

CHUNK_BYTES = 256 * 2**20  # of fp32 logits, as in loss.py
# Of a device's memory, for tensors. The rest: driver and kernels (about 1 GB), buffers of NCCL or RCCL, the allocator's
# gaps. LLM Foundry's 142 published microbatches on 8 GPUs fit, by this estimate: the fullest takes 0.87.
ROOM = 0.92


@dataclass
class MemoryArgs:
    """Which devices, and how they divide the model."""

    ranks: int = 1  # processes, each with one device
    tp: int = 1  # of these share every layer (tensor parallelism)
    pp: int = 1  # groups of layers, one after another (pipeline parallelism)
    device: str = "auto"  # mi250, h100-nvl, ...: show the largest microbatch that it can hold


def width(precision: str) -> int:
    """Bytes of a number in matmuls and residual stream."""
    return 2 if precision == "bf16" else 4


def saved_by_block(m: MPTConfig, precision: str = "bf16", tp: int = 1) -> dict[str, int]:
    """Bytes per token that a block keeps on one of `tp` ranks if nothing is recomputed, by tensor: Korthikanti et al.
    (2205.05198), section 4.2.1, equation 2, without dropout and scores: 8 d_model whole, 24 d_model over tp."""
    w, d, kv = width(precision), m.d_model, m.n_kv_heads * m.head_dim
    upcast = (
        4 if w == 2 and m.norm_type == "layernorm" else 0
    )  # a norm in fp32 keeps its input in fp32
    return {
        "norm_1's input": (upcast or w) * d,
        "Wqkv's input": w * d,  # a linear layer keeps its input, for the gradient of the weight
        "Wqkv's output": w
        * (d + 2 * kv)
        // tp
        * (2 if m.clip_qkv else 1),  # q, k, v are views; clamp makes a copy
        "normed q and k": (w + upcast) * (d + kv) // tp if m.qk_ln else 0,
        "repeated k and v": 2 * w * d // tp
        if kv < d and m.attn_impl != "triton" and not m.alibi
        else 0,
        "attention's output": w * d // tp,  # out_proj's input as well
        "logsumexp": 4 * m.n_heads // tp,
        "norm_2's input": (upcast or w) * d,
        "up_proj's input": w * d,
        "GELU's input": w * m.hidden_dim // tp,
        "down_proj's input": w * m.hidden_dim // tp,
        "norms' mean, 1/std": 16,
    }


def kept_by_block(
    m: MPTConfig, activation_checkpointing: str, precision: str = "bf16", tp: int = 1
) -> int:
    """Bytes per token that a block keeps on one of `tp` ranks between its forward and its backward."""
    saved, x = (
        saved_by_block(m, precision, tp),
        width(precision) * m.d_model,
    )  # x: the block's input
    if activation_checkpointing == "none":
        return sum(saved.values())
    qkv = width(precision) * (m.n_heads + 2 * m.n_kv_heads) * m.head_dim // tp
    linears = qkv + x + saved["GELU's input"] + x  # outputs of Wqkv, out_proj, up_proj, down_proj
    selective = x + linears + saved["attention's output"] + saved["logsumexp"]
    return x if activation_checkpointing == "full" else selective


def layout(m: MPTConfig, cfg: TrainConfig, ranks: int, tp: int, pp: int) -> tuple[int, int]:
    """(ranks that share one copy of a state, rows of a batch on each), or UserError if it does not multiply out."""
    for name, n in {"ranks": ranks, "tp": tp, "pp": pp}.items():
        require(n > 0, f"{name} must be at least 1, not {n}")
    sizes = {
        "n_heads": m.n_heads,
        "kv_n_heads": m.n_kv_heads,
        "hidden width": m.hidden_dim,
        "vocab_size": m.vocab_size,
    }
    for name, n in sizes.items():
        require(n % tp == 0, f"{name} {n} is not a multiple of tp {tp}")
    require(m.n_layers % pp == 0, f"n_layers {m.n_layers} is not a multiple of pp {pp}")
    dp, rest = divmod(ranks, tp * pp)
    require(rest == 0, f"{ranks} ranks are not a multiple of tp {tp} x pp {pp} = {tp * pp}")
    rows, rest = divmod(cfg.global_batch_size, dp)
    of = "ranks" if tp * pp == 1 else f"data-parallel ranks: {ranks} / (tp {tp} x pp {pp})"
    require(
        rest == 0, f"global_batch_size {cfg.global_batch_size} is not a multiple of the {dp} {of}"
    )
    shard = cfg.shard_ranks(dp, node=0) if dp > 1 else 1
    unknown = f"sharding={cfg.sharding} wants --shard_size here, by default the ranks of a node"
    require(shard, unknown)
    require(dp % shard == 0, f"shard_size {shard} does not divide the {dp} {of}")
    return shard, rows


class Step:
    """One microbatch of a step on one rank of a pipeline's `stage`, in bytes: the last one, or with a pipeline one from
    its middle. ranks = dp x tp x pp. Raises UserError if they do not fit the model or the batch.

    tp  as in Megatron (1909.08053, section 3): heads, hidden width and vocabulary are divided by tp; norms, positions,
        biases of out_proj and down_proj, and the inputs of norms and linear layers are whole: no sequence parallelism.
        The loss has chunks of as many rows as without.
    pp  1F1B (PipeDream-flush, 2006.09503; 2104.04473, section 2.2): a stage has n_layers / pp blocks, and beside its
        microbatch those that later stages have not sent back, pp in all on the first. That has the embeddings; the
        last has final norm and loss, with a copy of a tied embedding.
    Several ranks run under fully_shard, also where dp is 1. Gradients that wait for the last microbatch (ZERO1, DDP)
    are counted beside a full pipeline, a little too much.
    """

    def __init__(
        self, m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", tp=1, pp=1, stage=0
    ):
        self.shard, rows = layout(m, cfg, ranks, tp, pp)
        auto = "microbatch_size=auto is found by trying: set --microbatch_size=NUMBER here, or ask largest_microbatch"
        require(cfg.microbatch_size != "auto", auto)
        fused = m.attn_impl not in ("reference", "blocks")
        require(
            fused,
            f"attn_impl={m.attn_impl} keeps T x T scores, not counted here: set --attn_impl=sdpa",
        )
        self.m, self.ranks, self.w, self.tp = m, ranks, width(precision), tp
        self.first, self.last, self.layers = stage == 0, stage == pp - 1, m.n_layers // pp
        self.tokens = min(cfg.microbatch_size, rows) * m.max_seq_len
        self.x = self.w * self.tokens * m.d_model  # the residual stream, once
        self.frees = cfg.sharding_mode.frees_weights  # gathered blocks after their forward
        self.table, self.root, self.block = self.params(pp)
        self.n = self.root + self.layers * self.block
        mode, blocks = (
            cfg.activation_checkpointing,
            range(stage * self.layers, (stage + 1) * self.layers),
        )
        self.again = [mode != "none" and i % cfg.recompute_every == 0 for i in blocks]  # recomputed
        self.saved = self.tokens * kept_by_block(m, "none", precision, tp)
        recomputed = self.tokens * kept_by_block(m, mode, precision, tp)
        self.kept = [recomputed if again else self.saved for again in self.again]
        in_flight = (
            min((pp - stage) * cfg.microbatch_size, rows) * m.max_seq_len
        )  # tokens, as many as the batch has
        self.others = (
            sum(self.kept) * (in_flight - self.tokens) // self.tokens
        )  # what their blocks keep
        accumulates = rows > cfg.microbatch_size  # the gradients of earlier microbatches are there
        late = ranks > 1 and cfg.sharding_mode.reduces_late  # and whole until they are reduced
        self.held = (4 if late else 4 / self.shard) if accumulates else 0  # bytes a parameter
        self.grad_w = (
            self.w if ranks > 1 else 4
        )  # bytes a number: the gradient of the loss's weight has its dtype
        in_place = (
            accumulates and ranks == 1 and not m.tie_word_embeddings
        )  # added to .grad at once
        # for the embedding's own, or for its reduction
        self.waiting = self.grad_w * self.table if self.last and not in_place else 0

    def params(self, pp: int) -> tuple[int, int, int]:
        """Parameters on this rank: of the embedding (and of the loss's weight), of all that is in no block, and of a
        block."""
        m, parts, both = self.m, flops.params_by_part(self.m), 1 if self.m.no_bias else 2
        table = parts["wte"] // self.tp
        head = table if pp > 1 or not m.tie_word_embeddings else 0
        root = (table + parts["wpe"] if self.first else 0) + (
            head + m.d_model * both if self.last else 0
        )
        qk_ln = (m.n_heads + m.n_kv_heads) * m.head_dim if m.qk_ln else 0
        whole = (2 * m.d_model + qk_ln) * both + (
            both - 1
        ) * 2 * m.d_model  # norms, biases of out_proj and down_proj
        outside = parts["wte"] + parts["wpe"] + parts["lm_head"] + m.d_model * both
        block = (flops.n_params(m) - outside) // m.n_layers
        return table, root, whole + (block - whole) // self.tp

    def moment(self, blocks, passed, copies, loss=0, workspace=0) -> dict[str, int]:
        """One moment's parts: the activations of `blocks` are still there, `passed` parameters have new gradients."""
        return {
            "weights, fp32": 4 * self.n // self.shard,
            "gradients, fp32": round(self.held * (self.n - passed) + 4 / self.shard * passed),
            "Adam's moments, fp32": 8 * self.n // self.shard,
            "copies of the weights": copies,
            "blocks' activations": sum(self.kept[:blocks]) + self.others,
            "final norm and loss": loss,
            "backward's workspace": round(workspace),
        }

    def copies(self, blocks: int, gathered: int = 0) -> int:
        """Weights beside the fp32 ones while `blocks` blocks wait for their backward. One rank: autocast's bf16 copies,
        kept by the graph of blocks that are not recomputed. More: what FSDP has gathered, `gathered` if it frees."""
        if self.ranks > 1:
            return self.w * (
                self.root + self.block * (min(gathered, blocks) if self.frees else blocks)
            )
        return 2 * self.block * self.again[:blocks].count(False) if self.w == 2 else 0

    def loss_forward(self) -> dict:
        """One chunk of logits after another, beside all that the blocks keep."""
        m, low, copies = self.m, self.w == 2, self.copies(self.layers)
        rows = max(1, CHUNK_BYTES // (4 * m.vocab_size))
        rows -= rows % 128 if rows > 128 else 0  # as in loss.py
        # bf16: logits 2, the same in fp32 4, log-probabilities 4; fp32: logits 4, log-probabilities 4
        chunks = (10 if low else 8) * m.vocab_size // self.tp * min(rows, self.tokens)
        if self.shard > 1:  # the buffer of the last gather is kept until the next one
            copies += self.w * self.block
        elif self.ranks == 1 and low:  # the loss makes its own
            copies += 2 * self.table
        loss = (
            3 * self.x + 4 * self.table + chunks
        )  # norm_f's input, its output, the gradient of that; that of W
        return self.moment(self.layers, 0, copies, loss)

    def loss_backward(self) -> dict:
        """The gradient of W, its fp32 copy if it is bf16, and that times the incoming gradient; x's beside it."""
        loss = 3 * self.x + (10 if self.grad_w == 2 else 8) * self.table
        return self.moment(self.layers, 0, self.copies(self.layers, 1), loss)

    def block_backward(self, i: int) -> dict:
        """The first matmuls, of down_proj, before its input is freed; or the reduction of the block's gradients."""
        m, w, late = self.m, self.w, 0
        early = (
            self.x + w * (self.tokens + m.d_model) * m.hidden_dim // self.tp
        )  # gradients of x, GELU's output, W
        copies = self.copies(i + 1, 2)  # the next block is gathered meanwhile
        if self.again[i]:
            early += self.saved - self.kept[i]
            copies += 2 * self.block if self.ranks == 1 and w == 2 else 0
        if self.ranks > 1:  # gradients are copied into one fp32 buffer, kept until the next block's
            early += 4 * self.block if i + 1 < self.layers else 0
            late = (w + 4) * self.block - self.kept[i]
        return self.moment(
            i + 1, self.block * (self.layers - 1 - i), copies, self.waiting, max(early, late)
        )

    def embedding_backward(self) -> dict:
        """Two gradients of a tied embedding meet; with more ranks all that is in no block is then reduced."""
        workspace, copies = self.grad_w * self.table + self.x if self.first else 0, self.copies(0)
        if self.ranks > 1:  # gradients, the fp32 buffer that is reduced, and what comes of it
            workspace = max(
                workspace, (self.w + 4 + 4 / self.shard) * self.root - self.waiting - copies
            )
        return self.moment(0, self.n - self.root, copies, self.waiting, workspace)

    def moments(self) -> dict[str, dict]:
        """{moment: {part: bytes}} in the order of the step; of the blocks' backwards the largest."""
        backwards = {f"block {i} backward": self.block_backward(i) for i in range(self.layers)}
        largest = max(backwards, key=lambda name: sum(backwards[name].values()))
        loss = (
            {"loss forward": self.loss_forward(), "loss backward": self.loss_backward()}
            if self.last
            else {}
        )
        end = "embedding backward" if self.first else "head reduced"
        end = {end: self.embedding_backward()} if self.first or self.last else {}
        update = {**self.moment(0, self.n, 0), "blocks' activations": 0}  # of no microbatch
        return {**loss, largest: backwards[largest], **end, "update": update}


def worst_stage(
    m: MPTConfig, cfg: TrainConfig, ranks: int, precision: str, tp: int, pp: int
) -> tuple[int, dict]:
    """The stage of the pipeline with the highest peak, and its moments."""
    stages = [Step(m, cfg, ranks, precision, tp, pp, stage).moments() for stage in range(pp)]
    peaks = [max(sum(parts.values()) for parts in moments.values()) for moments in stages]
    stage = peaks.index(max(peaks))
    return stage, stages[stage]


def bytes_by_moment(
    m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", tp=1, pp=1
) -> dict[str, dict]:
    """{moment: {part: bytes}} of one of `ranks` = dp x tp x pp, in the order of the step; of a pipeline's stages that
    with the highest peak. Raises UserError as `Step` does."""
    return worst_stage(m, cfg, ranks, precision, tp, pp)[1]


def bytes_by_part(m: MPTConfig, cfg: TrainConfig, ranks=1, precision="bf16", tp=1, pp=1) -> dict:
    """{part: bytes} of one rank at the step's peak, with their sum, "peak", and its name, "moment"."""
    moments = bytes_by_moment(m, cfg, ranks, precision, tp, pp)
    name = max(moments, key=lambda name: sum(moments[name].values()))
    return {**moments[name], "peak": sum(moments[name].values()), "moment": name}


def largest_microbatch(
    m: MPTConfig, cfg: TrainConfig, device, ranks=1, precision="bf16", tp=1, pp=1
) -> int:
    """The most sequences of a microbatch whose peak fits into ROOM of `device`, a devices.Device or bytes; at most all
    rows of a data-parallel rank, 0 if one does not fit. Raises UserError as `Step` does, microbatch_size is not read.
    """
    memory = device.memory_gb * 2**30 if isinstance(device, devices.Device) else device
    require(memory > 0, "the memory of this device is not known: give its bytes")
    _, rows = layout(m, cfg, ranks, tp, pp)

    def too_much(size: int) -> bool:
        return (
            bytes_by_part(m, replace(cfg, microbatch_size=size), ranks, precision, tp, pp)["peak"]
            > ROOM * memory
        )

    if not too_much(rows):  # may take less than rows - 1: no gradients wait for another microbatch
        return rows
    return bisect.bisect_left(range(1, rows), True, key=too_much)


def table(m: MPTConfig, cfg: TrainConfig, args: MemoryArgs, precision: str) -> str:
    """The moments side by side, in GB (10^9 bytes), as a person reads them."""
    of = (m, cfg, args.ranks, precision, args.tp, args.pp)
    (stage, moments), peak, dp = (
        worst_stage(*of),
        bytes_by_part(*of),
        args.ranks // (args.tp * args.pp),
    )
    how = f"{args.ranks} ranks of {cfg.sharding}" if args.ranks > 1 else "1 rank, nothing sharded"
    how += f": tp {args.tp} x pp {args.pp} x dp {dp}" if dp < args.ranks else ""
    how += f", stage {stage} of 0 to {args.pp - 1}" if args.pp > 1 else ""
    lines = [f"{flops.n_params(m):,} parameters, {precision}, {how}"]
    lines += [
        f"microbatch {cfg.microbatch_size} x {m.max_seq_len}, checkpointing {cfg.activation_checkpointing}",
        "",
    ]
    lines += ["GB of one rank".ljust(25) + "".join(name.rjust(19) for name in moments)]
    columns = [{**parts, "all": sum(parts.values())} for parts in moments.values()]
    lines += [
        f"  {part:<23}" + "".join(f"{column[part] / 1e9:>19.3f}" for column in columns)
        for part in columns[0]
    ]
    lines += [
        "",
        f"peak {peak['peak'] / 1e9:.2f} GB = {peak['peak'] / 2**30:.2f} GiB: {peak['moment']}",
    ]
    return "\n".join(lines + device_lines(args.device, *of))


def device_lines(name: str, m: MPTConfig, cfg: TrainConfig, ranks: int, *how) -> list[str]:
    """Whether that fits and what would. A config file's `device = "cpu"` names no accelerator."""
    if name in ("auto", "cpu", "cuda", "mps"):
        return []
    device, peak = devices.by_name(name), bytes_by_part(m, cfg, ranks, *how)["peak"] / 2**30
    lines = [
        f"that is {peak / device.memory_gb:.0%} of {device.name}'s {device.memory_gb:g} GiB",
        "",
    ]
    _, rows = layout(m, cfg, ranks, *how[1:])
    lines += [f"largest microbatch in {ROOM:.0%} of it, of a rank's {rows} sequences"]
    for mode in typing.get_args(Checkpointing):
        size = largest_microbatch(
            m, replace(cfg, activation_checkpointing=mode), device, ranks, *how
        )
        lines += [f"  checkpointing {mode:<10}{size:>6}"]
    return lines


def main(argv: list[str]) -> None:
    m, cfg, args = config.load(argv, MPTConfig, TrainConfig, MemoryArgs)
    print(table(m, cfg, args, "fp32" if cfg.precision == "fp32" else "bf16"))


if __name__ == "__main__":
    config.run(main)
