"""Bytes of one training step by part, in closed form: what fits on a device, before it is launched.

    state        4 weights + 4 gradients + 8 Adam's moments = 16 bytes a parameter, over the ranks that share it
    activations  tokens x layers x what a block keeps for its backward: with bf16 and a hidden width of 4 d_model
                 32 bytes x d_model, 22 with selective activation checkpointing, 2 with full
    loss         the gradient of W in fp32, and one chunk of logits at a time (loss.py)

A step is a row of moments, each with its own sum of parts; the largest sum is the peak. Assumed are eager code, fused
attention (`sdpa` without ALiBi, `triton`) and no dropout. The allocator's gaps, the driver and the network come on top.

Run `python memory.py configs/mpt1b.py --microbatch_size=4 --activation_checkpointing=full --ranks=8`. Estimates beside
what real steps allocate: benchmarks/memory.md. Read next: launch_table.py.
"""

from dataclasses import dataclass

import config
import flops
from config import MPTConfig, TrainConfig, require

CHUNK_BYTES = 256 * 2**20  # of fp32 logits, as in loss.py


@dataclass
class MemoryArgs:
    """Of how many devices."""

    ranks: int = 1  # processes, each with one device

    def check(self) -> None:
        require(self.ranks > 0, f"ranks must be at least 1, not {self.ranks}")


def width(precision: str) -> int:
    """Bytes of a number in matmuls and residual stream."""
    return 2 if precision == "bf16" else 4


def saved_by_block(m: MPTConfig, precision: str = "bf16") -> dict[str, int]:
    """Bytes per token that a block keeps for its backward when nothing is recomputed, by tensor."""
    w, d, kv = width(precision), m.d_model, m.n_kv_heads * m.head_dim
    upcast = 4 if w == 2 and m.norm_type == "layernorm" else 0  # a norm in fp32 keeps its input in fp32
    return {
        "norm_1's input": (upcast or w) * d,
        "Wqkv's input": w * d,  # a linear layer keeps its input, for the gradient of the weight
        "Wqkv's output": w * (d + 2 * kv) * (2 if m.clip_qkv else 1),  # q, k, v are views of it; clamp makes a copy
        "normed q and k": (w + upcast) * (d + kv) if m.qk_ln else 0,
        "repeated k and v": 2 * w * d if kv < d and m.attn_impl != "triton" and not m.alibi else 0,
        "attention's output": w * d,  # out_proj's input as well
        "logsumexp": 4 * m.n_heads,
        "norm_2's input": (upcast or w) * d,
        "up_proj's input": w * d,
        "GELU's input": w * m.hidden_dim,
        "down_proj's input": w * m.hidden_dim,
        "norms' mean, 1/std": 16,
    }


def kept_by_block(m: MPTConfig, activation_checkpointing: str, precision: str = "bf16") -> int:
    """Bytes per token that a block keeps between its forward and its backward."""
    saved, x = saved_by_block(m, precision), width(precision) * m.d_model  # x: the block's input
    if activation_checkpointing == "none":
        return sum(saved.values())
    qkv = x + 2 * width(precision) * m.n_kv_heads * m.head_dim
    linears = qkv + x + saved["GELU's input"] + x  # outputs of Wqkv, out_proj, up_proj, down_proj
    selective = x + linears + saved["attention's output"] + saved["logsumexp"]
    return x if activation_checkpointing == "full" else selective


class Step:
    """The last microbatch of a step on one rank, in bytes. Raises UserError if the ranks do not fit the batch."""

    def __init__(self, m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16"):
        rows, rest = divmod(cfg.global_batch_size, ranks)
        require(rest == 0, f"global_batch_size {cfg.global_batch_size} is not a multiple of the {ranks} ranks")
        known = ranks == 1 or cfg.sharding != "HYBRID_SHARD" or cfg.shard_size
        require(known, "sharding=HYBRID_SHARD wants --shard_size here, by default the ranks of a node")
        fused = m.attn_impl not in ("reference", "blocks")
        require(fused, f"attn_impl={m.attn_impl} keeps T x T scores, not counted here: set --attn_impl=sdpa")
        self.m, self.ranks, self.w = m, ranks, width(precision)
        self.tokens = min(cfg.microbatch_size, rows) * m.max_seq_len
        self.x = self.w * self.tokens * m.d_model  # the residual stream, once
        self.shard = {"DDP": 1, "HYBRID_SHARD": cfg.shard_size}.get(cfg.sharding, ranks) if ranks > 1 else 1
        self.frees = cfg.sharding in ("FULL_SHARD", "HYBRID_SHARD")  # gathered blocks after their forward
        parts, norm_f = flops.params_by_part(m), m.d_model * (1 if m.no_bias else 2)
        self.n, self.table = flops.n_params(m), parts["wte"]  # the weight of the loss has as many as the embedding
        self.root = parts["wte"] + parts["wpe"] + parts["lm_head"] + norm_f  # what is in no block
        self.block = (self.n - self.root) // m.n_layers
        mode = cfg.activation_checkpointing
        self.again = [mode != "none" and i % cfg.checkpoint_every == 0 for i in range(m.n_layers)]  # recomputed
        self.saved = self.tokens * kept_by_block(m, "none", precision)
        self.kept = [self.tokens * kept_by_block(m, mode if again else "none", precision) for again in self.again]
        accumulates = rows > cfg.microbatch_size  # the gradients of earlier microbatches are there
        late = ranks > 1 and cfg.sharding in ("ZERO1", "DDP")  # and whole: they are reduced at the last one only
        self.held = (4 if late else 4 / self.shard) if accumulates else 0  # bytes a parameter
        self.grad_w = self.w if ranks > 1 else 4  # bytes a number: the gradient of the loss's weight has its dtype
        in_place = accumulates and ranks == 1 and not m.tie_word_embeddings  # added to .grad at once
        self.waiting = 0 if in_place else self.grad_w * self.table  # for the embedding's own, or for its reduction

    def moment(self, blocks, passed, copies, loss=0, workspace=0) -> dict[str, int]:
        """One moment's parts: the activations of `blocks` are still there, `passed` parameters have new gradients."""
        return {
            "weights, fp32": 4 * self.n // self.shard,
            "gradients, fp32": round(self.held * (self.n - passed) + 4 / self.shard * passed),
            "Adam's moments, fp32": 8 * self.n // self.shard,
            "copies of the weights": copies,
            "blocks' activations": sum(self.kept[:blocks]),
            "final norm and loss": loss,
            "backward's workspace": round(workspace),
        }

    def copies(self, blocks: int, gathered: int = 0) -> int:
        """Weights beside the fp32 ones while `blocks` blocks wait for their backward. One rank: autocast's bf16 copies,
        kept by the graph of blocks that are not recomputed. More: what FSDP has gathered, `gathered` if it frees."""
        if self.ranks > 1:
            return self.w * (self.root + self.block * (min(gathered, blocks) if self.frees else blocks))
        return 2 * self.block * self.again[:blocks].count(False) if self.w == 2 else 0

    def loss_forward(self) -> dict:
        """One chunk of logits after another, beside all that the blocks keep."""
        m, low, copies = self.m, self.w == 2, self.copies(self.m.n_layers)
        rows = max(1, CHUNK_BYTES // (4 * m.vocab_size))
        rows -= rows % 128 if rows > 128 else 0  # as in loss.py
        # bf16: logits 2, the same in fp32 4, log-probabilities 4; fp32: logits 4, log-probabilities 4
        chunks = (10 if low else 8) * m.vocab_size * min(rows, self.tokens)
        if self.shard > 1:  # the buffer of the last gather is kept until the next one
            copies += self.w * self.block
        elif self.ranks == 1 and low:  # the loss makes its own
            copies += 2 * self.table
        loss = 3 * self.x + 4 * self.table + chunks  # norm_f's input, its output, the gradient of that; that of W
        return self.moment(m.n_layers, 0, copies, loss)

    def loss_backward(self) -> dict:
        """The gradient of W, its fp32 copy if it is bf16, and that times the incoming gradient; x's beside it."""
        loss = 3 * self.x + (10 if self.grad_w == 2 else 8) * self.table
        return self.moment(self.m.n_layers, 0, self.copies(self.m.n_layers, 1), loss)

    def block_backward(self, i: int) -> dict:
        """The first matmuls, of down_proj, before its input is freed; or the reduction of the block's gradients."""
        m, w, late = self.m, self.w, 0
        early = self.x + w * m.hidden_dim * (self.tokens + m.d_model)  # gradients of x, GELU's output, down_proj
        copies = self.copies(i + 1, 2)  # the next block is gathered meanwhile
        if self.again[i]:
            early += self.saved - self.kept[i]
            copies += 2 * self.block if self.ranks == 1 and w == 2 else 0
        if self.ranks > 1:  # gradients are copied into one fp32 buffer, kept until the next block's
            early += 4 * self.block if i + 1 < m.n_layers else 0
            late = (w + 4) * self.block - self.kept[i]
        return self.moment(i + 1, self.block * (m.n_layers - 1 - i), copies, self.waiting, max(early, late))

    def embedding_backward(self) -> dict:
        """Two gradients of a tied embedding meet; with more ranks all that is in no block is then reduced."""
        workspace, copies = self.grad_w * self.table + self.x, self.copies(0)
        if self.ranks > 1:  # gradients, the fp32 buffer that is reduced, and what comes of it
            workspace = max(workspace, (self.w + 4 + 4 / self.shard) * self.root - self.waiting - copies)
        return self.moment(0, self.n - self.root, copies, self.waiting, workspace)


def bytes_by_moment(m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16") -> dict[str, dict]:
    """{moment: {part: bytes}} of one rank, in the order of the step; of the blocks' backwards the largest."""
    step = Step(m, cfg, ranks, precision)
    largest = max(range(m.n_layers), key=lambda i: sum(step.block_backward(i).values()))
    return {
        "loss forward": step.loss_forward(),
        "loss backward": step.loss_backward(),
        f"block {largest} backward": step.block_backward(largest),
        "embedding backward": step.embedding_backward(),
        "update": step.moment(0, step.n, 0),
    }


def bytes_by_part(m: MPTConfig, cfg: TrainConfig, ranks: int = 1, precision: str = "bf16") -> dict:
    """{part: bytes} of one rank at the step's peak, with their sum, "peak", and its name, "moment"."""
    moments = bytes_by_moment(m, cfg, ranks, precision)
    name = max(moments, key=lambda name: sum(moments[name].values()))
    return {**moments[name], "peak": sum(moments[name].values()), "moment": name}


def table(m: MPTConfig, cfg: TrainConfig, ranks: int, precision: str) -> str:
    """The moments side by side, in GB (10^9 bytes), as a person reads them."""
    moments, peak = bytes_by_moment(m, cfg, ranks, precision), bytes_by_part(m, cfg, ranks, precision)
    how = f"{ranks} ranks of {cfg.sharding}" if ranks > 1 else "1 rank, nothing sharded"
    lines = [f"{flops.n_params(m):,} parameters, {precision}, {how}"]
    lines += [f"microbatch {cfg.microbatch_size} x {m.max_seq_len}, checkpointing {cfg.activation_checkpointing}", ""]
    lines += ["GB of one rank".ljust(25) + "".join(name.rjust(19) for name in moments)]
    columns = [{**parts, "all": sum(parts.values())} for parts in moments.values()]
    lines += [f"  {part:<23}" + "".join(f"{column[part] / 1e9:>19.3f}" for column in columns) for part in columns[0]]
    lines += ["", f"peak {peak['peak'] / 1e9:.2f} GB = {peak['peak'] / 2**30:.2f} GiB: {peak['moment']}"]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    m, cfg, args = config.load(argv, MPTConfig, TrainConfig, MemoryArgs)
    print(table(m, cfg, args.ranks, "fp32" if cfg.precision == "fp32" else "bf16"))


if __name__ == "__main__":
    config.run(main)
