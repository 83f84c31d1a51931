r"""Tensor parallelism: the weights of each layer are cut over a team of ranks, which compute it.

Attention and feed-forward are each two matmuls, with something in between that treats heads or
features separately. The first weight W is cut by its output features, the second one, U, by its
input features. So each of n ranks computes its share from one end to the other, and the shares are
added up once. For n = 2, with Y_i what comes out of the heads, or of GELU (act, if set otherwise):

    column   X [W_1 W_2]           = [X W_1, X W_2]            Wqkv (whole heads), gate_ and up_proj
    row      [Y_1 Y_2] [U_1; U_2]  = Y_1 U_1 + Y_2 U_2         out_proj, down_proj

               rank 0:  X W_1 -> heads or GELU -> Y_1 U_1 \
    X, copied                                              sum (all-reduce) -> residual stream
               rank 1:  X W_2 -> heads or GELU -> Y_2 U_2 /

In the backward pass the arrows are reversed: where X was copied, its gradients are added up, and
where the shares were added up, the gradient is copied. So a block needs four all-reduces: one
forward and one backward for attention, and the same for feed-forward. (qk_ln needs more, and
activation checkpointing repeats forward ones. PyTorch stores weights as (out, in): a column of W is
a row of `weight`.)

The embedding and the output layer are cut by vocabulary (`chunk_loss`). Norms and the biases of
out_proj and down_proj are whole on every rank, and get equal gradients there.

With sequence parallelism, norms, dropout and residual sums work on 1/n of the tokens on each rank.
An all-gather of the tokens replaces the copy, and a reduce-scatter the all-reduce: the same number
of bytes, and 1/n of the memory for activations between these pairs of matmuls. Whole weights then
see only some of the tokens, so their gradients are added up at the end (`sum_partial_gradients`).
Evaluation does not use it: the number of its tokens need not be a multiple of n.

Below, first the two cut layers, then the collectives around them, the rest of the model and its
loss. Where a rank's part lies in the whole tensor is said in one place: `Layout.spans`. Initial
weights, checkpoints, the gradient norm and the weights of other projects all follow it.

Not here: the loss kernel of fast/, which turns logits into their gradient at once, while here the
ranks must first add up each row's sum of exponentials; compiled blocks, which the collectives would
break apart; communication that overlaps with computation. Not yet run on GPUs.

Megatron-LM: arXiv 1909.08053 (tensor), 2205.05198 (sequence parallelism).

Run `torchrun --nproc_per_node 2 tensor_parallel.py` to see two ranks compute what one does.
"""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import processes
from attention import autocast_dtype
from config import MPTConfig
from loss import (
    IGNORE,
    add_products,
    at_least_fp32,
    capped_with_slope,
    chunk_rows,
    linear_cross_entropy,
    loss_rows,
    soft_capped,
)
from model import MPT, Attention, GatedFFN, LayerNorm, RMSNorm, init_weights, norm_dtype
from program import UserError, arguments, require

# --------------------------------------------------------------------------------------------------
# The two cut layers. `cut` changes a layer's class: it keeps its name and its part of the weights,
# and gets this forward.


class ColumnLinear(nn.Linear):
    """X W_i: the output features of this rank."""

    def forward(self, x):
        """x (B, T, in), or this rank's tokens of it -> (B, T, out / n)."""
        return self.share(enter(x.to(autocast_dtype(x)), self))  # norms may return fp32

    def share(self, x):
        """X W_i and this rank's biases: x (B, T, in) -> (B, T, out / n)."""
        return F.linear(x, self.weight, self.bias)


class RowLinear(nn.Linear):
    """The sum of Y_i U_i, and the bias once."""

    def forward(self, y):
        """y (B, T, in / n) -> (B, T, out), or this rank's tokens of it."""
        z = leave(self.share(y), self)
        return z if self.bias is None else z + self.bias.to(z.dtype)

    def share(self, y):
        """Y_i U_i: y (B, T, in / n) -> (B, T, out)."""
        return F.linear(y, self.weight)


# --------------------------------------------------------------------------------------------------
# Collectives. torch 2.13 has new names for two collectives, and warns of the old.


@dataclass(frozen=True)
class Team:
    """The tensor ranks that compute one model together, as one of them sees them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool = False


def all_reduce(x, team: Team, operation=dist.ReduceOp.SUM):
    """The sum of x over the team, or the largest or least of each element, as a new tensor.

    x stays as it is: selective activation checkpointing may have saved it for the backward.
    """
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, operation, team.group)
    return x


def pass_on(x, team: Team):
    """x itself: the other ranks have the same."""
    return x.view_as(x)


def gather_tokens(x, team: Team):
    """The tokens of all ranks, in order of ranks: (B, T / n, D) -> (B, T, D)."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    parts = x.new_empty(team.size * x.shape[0], *x.shape[1:])
    all_gather(parts, x.contiguous(), team.group)
    return torch.cat(parts.chunk(team.size), dim=1)


def sum_and_scatter_tokens(x, team: Team):
    """The sum over the team, of which each rank gets its own tokens: (B, T, D) -> (B, T / n, D)."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    parts = torch.cat(x.chunk(team.size, dim=1))  # (n * B, T / n, D)
    out = x.new_empty(x.shape[0], x.shape[1] // team.size, *x.shape[2:])
    reduce_scatter(out, parts, group=team.group)
    return out


class Exchange(torch.autograd.Function):
    """Forward: there(x, team). Backward: back(gradient, team)."""

    @staticmethod
    def forward(ctx, x, team, there, back):
        """x: any tensor of this rank; there, back: two of the functions above."""
        ctx.team, ctx.back = team, back
        return there(x, team)

    @staticmethod
    def backward(ctx, grad):
        """The gradient of x."""
        return ctx.back(grad, ctx.team), None, None, None


def splits_tokens(module) -> bool:
    """Whether each rank has its own tokens between the layers, as sequence parallelism trains."""
    return module.team.sequence_parallel and module.training


def enter(x, module):
    """The input of a column-parallel layer: all tokens on every rank, (B, T, D)."""
    there, back = pass_on, all_reduce
    if splits_tokens(module):
        there, back = gather_tokens, sum_and_scatter_tokens
    return Exchange.apply(x, module.team, there, back)


def leave(x, module):
    """The output of a row-parallel layer: the shares (B, T, D), summed.

    With sequence parallelism only this rank's tokens of the sum, (B, T / n, D).
    """
    there, back = all_reduce, pass_on
    if splits_tokens(module):
        there, back = sum_and_scatter_tokens, gather_tokens
    return Exchange.apply(x, module.team, there, back)


def sum_both_ways(x, team: Team):
    """The sum over the ranks. Each uses it for its own features, so backward is a sum, too."""
    return Exchange.apply(x, team, all_reduce, all_reduce)


# --------------------------------------------------------------------------------------------------
# The other cut layers, and the model


class SplitAttention(Attention):
    """Attention for this rank's heads."""

    def forward(self, x, positions, cache=None, layer=0):
        """x (B, T, d_model) -> (B, T, d_model), with the ALiBi slopes of this rank's heads."""
        if positions.slopes is not None:
            n_heads = self.q_dim // self.cfg.head_dim
            first = self.team.rank * n_heads
            positions = positions._replace(slopes=positions.slopes[first : first + n_heads])
        if not (self.training and self.cfg.attn_pdrop):
            return super().forward(x, positions, cache, layer)
        # Each rank has its own heads, so its own masks. All other dropout needs equal masks on all
        # ranks, without sequence parallelism. So the common generator gives one number here, and
        # the masks come from a generator that is seeded with it and the rank.
        seed = int(torch.randint(2**62, ())) + self.team.rank
        devices = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            return super().forward(x, positions, cache, layer)


class SplitNorm(LayerNorm):
    """qk_ln: mean and variance over the features of all ranks."""

    def forward(self, x):
        """x (B, T, D / n) -> the same shape, in the dtype that LayerNorm would have."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = norm_dtype(x, self.low_precision)
        n_features = self.n_features
        x = x.to(at_least_fp32(x))
        x = x - sum_both_ways(x.sum(-1, keepdim=True), self.team) / n_features
        squares = x.square().sum(-1, keepdim=True)
        variance = sum_both_ways(squares, self.team) / n_features
        y = x * (variance + self.eps).rsqrt() * self.weight
        return (y if self.bias is None else y + self.bias).to(dtype)


class SplitRMSNorm(RMSNorm):
    """qk_ln with RMSNorm: the mean of the squares over the features of all ranks."""

    def forward(self, x):
        """x (B, T, D / n) -> the same shape, in the dtype that RMSNorm would have."""
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = norm_dtype(x, self.low_precision)
        x = x.to(at_least_fp32(x))
        squares = x.square().sum(-1, keepdim=True)
        mean = sum_both_ways(squares, self.team) / self.n_features
        return (x * (mean + self.eps).rsqrt() * self.weight).to(dtype)


class SplitGatedFFN(GatedFFN):
    """A gated feed-forward for this rank's features: its two first layers share one input."""

    def forward(self, x):
        """x (B, T, d_model), or this rank's tokens of it -> the same shape."""
        x = enter(x.to(autocast_dtype(x)), self)
        return self.down_proj(self.act(self.gate_proj.share(x)) * self.up_proj.share(x))


class SplitEmbedding(nn.Embedding):
    """The rows of this rank's part of the vocabulary."""

    def forward(self, ids):
        """ids (B, T) -> (B, T, D), or this rank's tokens of it. Other ranks' ids give zeros."""
        ids = ids - self.first_id
        is_mine = (ids >= 0) & (ids < len(self.weight))
        rows = F.embedding(ids.where(is_mine, 0), self.weight)
        return leave(rows * is_mine[..., None], self)


class SplitPositions(nn.Embedding):
    """Learned positions, whole on every rank; with sequence parallelism for its own tokens."""

    def forward(self, positions):
        """positions (1 or B, T) -> (1 or B, T or T / n, D)."""
        if splits_tokens(self):
            positions = positions.chunk(self.team.size, dim=1)[self.team.rank]
        return super().forward(positions)


class SplitMPT(MPT):
    """A model whose output layer is cut by vocabulary. `layout`: see `Layout`."""

    @property
    def output_weight(self):
        """Refused: a rank has only a part of it, and a loss of one's own may want the whole."""
        raise UserError(
            "with --tp a rank has only a part of the output weight: compute another loss from "
            "self.logits(x), or set --tp=1",
            on_all_ranks=True,
        )

    def cross_entropy(self, x, labels, z_loss):
        """The sum of the token cross-entropies. It is NaN if a label is beyond the vocabulary."""
        x = enter(x.to(autocast_dtype(x)), self)
        weight, scale = self.output_layer.weight, self.logit_scale
        loss_of = functools.partial(chunk_loss, team=self.team, first_id=self.first_id)
        rows = loss_rows(self.widest_part, x.device)
        softcap = self.cfg.final_logit_softcapping
        loss = linear_cross_entropy(x, weight, labels, scale, z_loss, softcap, loss_of, rows)
        is_beyond = (labels >= self.cfg.vocab_size) | ((labels < 0) & (labels != IGNORE))
        return loss * torch.where(is_beyond.any(), torch.nan, 1.0)

    @property
    def widest_part(self) -> int:
        """The length of the largest part of the vocabulary. Equal chunks on all ranks need it."""
        return -(-self.cfg.vocab_size // self.team.size)

    @torch.no_grad()
    def score(self, x, labels):
        """Log-probability of each label, and whether it is the most likely token.

        x (N, D) and labels (N,) -> (N,) each.
        """
        log_probs, greedy = [], []
        weight = self.output_layer.weight.to(autocast_dtype(x))
        rows = chunk_rows(self.widest_part)
        for x_chunk, label in zip(x.split(rows), labels.split(rows), strict=True):
            logits = F.linear(x_chunk, weight).to(at_least_fp32(x))
            if self.logit_scale is not None:
                logits.mul_(self.logit_scale)
            logits = soft_capped(logits, self.cfg.final_logit_softcapping)
            greedy.append(self.most_likely(logits) == label)
            _, _, log_prob = softmax_(logits, label - self.first_id, self.team)
            log_probs.append(log_prob[:, 0])
        log_probs = torch.cat(log_probs)
        in_vocabulary = (labels >= 0) & (labels < self.cfg.vocab_size)
        log_probs = log_probs.masked_fill(~in_vocabulary, torch.nan)
        log_probs = log_probs.masked_fill(labels == IGNORE, 0)
        return log_probs, torch.cat(greedy)

    def most_likely(self, logits):
        """The id of the largest logit of each row over all ranks, (rows,); of equal ones the first.

        logits: (rows, V / n), this rank's.
        """
        largest, index = logits.max(-1)
        over_all = all_reduce(largest, self.team, dist.ReduceOp.MAX)
        nowhere = torch.full_like(index, self.cfg.vocab_size)
        candidate = torch.where(largest == over_all, index + self.first_id, nowhere)
        return all_reduce(candidate, self.team, dist.ReduceOp.MIN)

    def logits(self, x):
        """Hidden states (B, T, d_model) -> (B, T, V): all ranks have those of the vocabulary."""
        own = F.linear(enter(x, self), self.output_layer.weight)  # (B, T, V / n)
        if self.logit_scale is not None:
            own = own * self.logit_scale
        own = soft_capped(own, self.cfg.final_logit_softcapping)
        return Exchange.apply(own, self.team, self.gather_vocabulary, self.take_own_ids)

    def gather_vocabulary(self, own, team: Team):
        """The logits of all ranks, in order of ids: (B, T, V / n) -> (B, T, V)."""
        padded = F.pad(own, (0, self.widest_part - own.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(team.size)]
        dist.all_gather(parts, padded, team.group)
        for rank in range(team.size):
            _, ((begin, end),) = Layout(self.cfg, rank, team.size).spans("wte.weight")
            parts[rank] = parts[rank][..., : end - begin]
        return torch.cat(parts, dim=-1)

    def take_own_ids(self, grad, team: Team):
        """The gradient of this rank's logits: all ranks have the whole one, (B, T, V)."""
        return grad[..., self.first_id : self.first_id + len(self.output_layer.weight)]


# --------------------------------------------------------------------------------------------------
# The loss


def softmax_(logits, labels, team: Team):
    """Softmax over the vocabulary of all ranks, in place. Returns three tensors:

        (rows, V / n)   this rank's probabilities
        (rows, 1)       log_z, the logarithm of the sum of all exp(logit)
        (rows, 1)       the log-probability of the label

    logits: (rows, V / n), this rank's; labels: (rows,), relative to its first id. One all-reduce
    finds the largest logit m; a second one sums exp(logit - m), and the label's logit, which only
    one rank has.
    """
    labels = labels[:, None]
    is_mine = (labels >= 0) & (labels < logits.shape[1])
    own = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)) * is_mine
    largest = all_reduce(logits.amax(1, keepdim=True), team, dist.ReduceOp.MAX)
    exp = logits.sub_(largest).exp_()
    exp_sum, own = all_reduce(torch.cat([exp.sum(1, keepdim=True), own], 1), team).split(1, dim=1)
    log_sum = exp_sum.log()
    # own - log_z would lose digits when the logits are large.
    return exp.div_(exp_sum), largest + log_sum, (own - largest) - log_sum


def chunk_loss(
    x, weight, labels, scale, z_loss, softcap, grad_x, grad_w, team: Team, first_id: int
):
    """The loss of one chunk, with the vocabulary cut over the team: see loss.chunk_loss.

    weight: (V / n, D), from the id first_id on. x is the same on all ranks; grad_x is this rank's
    part of a sum, grad_w is complete, since each row of the weight belongs to one rank.
    """
    exact = at_least_fp32(x)
    counted = (labels != IGNORE)[:, None]
    labels = labels - first_id
    logits = (x @ weight.T).to(exact)
    if scale != 1:
        logits.mul_(scale)
    if softcap is not None:
        logits, slope = capped_with_slope(logits, softcap)
    probs, log_z, log_prob = softmax_(logits, labels, team)
    del logits
    loss = ((z_loss * log_z.square() - log_prob) * counted).sum()
    if grad_x is None and grad_w is None:
        return loss

    if z_loss:
        probs.mul_(1 + 2 * z_loss * log_z)
    is_mine = (labels >= 0) & (labels < len(weight))
    minus_one = -is_mine[:, None].to(exact)
    probs.scatter_add_(1, labels.clamp(0, len(weight) - 1)[:, None], minus_one)
    if softcap is not None:
        probs.mul_(slope)
    grad = probs.to(x.dtype)
    del probs
    add_products(grad, x, weight, counted, grad_x, grad_w)
    return loss


# --------------------------------------------------------------------------------------------------
# Where a rank's part lies


@dataclass(frozen=True)
class Layout:
    """Which part of each tensor of a model the tensor rank `rank` of `size` has."""

    cfg: MPTConfig
    rank: int = 0
    size: int = 1

    def spans(self, name: str) -> tuple[int, list[tuple[int, int]]] | None:
        """(dim, [(begin, end), ...]): this rank's rows (dim 0) or columns (dim 1) of the whole.

        None: every rank has the whole tensor. name: of a parameter. For 4 heads of 8 channels, the
        rows of ...attn.Wqkv.weight are 0..31 of q, 32..63 of k, 64..95 of v. Rank 1 of 2 has heads
        2 and 3 of each:

            (0, [(16, 32), (48, 64), (80, 96)])
        """
        if self.size == 1:
            return None
        cfg, n = self.cfg, self.size
        kv_dim = cfg.n_kv_heads * cfg.head_dim
        n_kv = 1 if self.shares_kv else n
        rows = {  # sections of the rows, in order: (length, parts it is cut into)
            "wte": [(cfg.vocab_size, n)],
            "lm_head": [(cfg.vocab_size, n)],
            "Wqkv": [(cfg.d_model, n), (kv_dim, n_kv), (kv_dim, n_kv)],
            "gate_proj": [(cfg.hidden_dim, n)],
            "up_proj": [(cfg.hidden_dim, n)],
        }
        if cfg.qk_ln:  # the norms of qk_gn are of one head: each rank has them
            rows |= {"q_ln": [(cfg.d_model, n)], "k_ln": [(kv_dim, n_kv)]}
        columns = {"out_proj": [(cfg.d_model, n)], "down_proj": [(cfg.hidden_dim, n)]}
        *_, module, leaf = name.split(".")
        if module in rows and leaf != "lora_A":
            return 0, self.parts_of(rows[module])
        if module in columns and leaf in ("weight", "lora_A"):
            return 1, self.parts_of(columns[module])
        return None

    def parts_of(self, sections: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """This rank's part of each section. A section of one part is whole on every rank."""
        spans, start = [], 0
        for length, n_parts in sections:
            part = self.rank if n_parts > 1 else 0
            begin = start + length * part // n_parts
            end = start + length * (part + 1) // n_parts
            spans.append((begin, end))
            start += length
        return spans

    @property
    def shares_kv(self) -> bool:
        """Whether all ranks have the same keys and values: of a single head (MQA)."""
        return self.cfg.n_kv_heads == 1

    def is_shared(self, name: str, corner: tuple[int, ...]) -> bool:
        """Whether every rank has the piece that begins at `corner`."""
        if self.spans(name) is None:
            return True
        module = name.split(".")[-2]
        of_kv = module == "k_ln" or (module == "Wqkv" and corner[0] >= self.cfg.d_model)
        return self.shares_kv and of_kv

    def whole_shape(self, name: str, shape) -> torch.Size:
        """The shape of the whole tensor of which a part has this shape."""
        shape = list(shape)
        if found := self.spans(name):
            dim, _ = found
            shape[dim] = self.whole_length(name)
        return torch.Size(shape)

    def whole_length(self, name: str) -> int:
        """The length of a whole tensor along the dimension that is cut."""
        last_rank = Layout(self.cfg, self.size - 1, self.size)
        _, spans = last_rank.spans(name)
        return spans[-1][1]

    def first_row(self, name: str) -> int:
        """Which row of the whole tensor is the first of this rank's part."""
        _, spans = self.spans(name)
        begin, _ = spans[0]
        return begin

    def fits(self, name: str, part) -> bool:
        """Whether a tensor has the length that this rank's part of the whole has."""
        dim, spans = self.spans(name)
        return part.dim() > dim and part.shape[dim] == sum(end - begin for begin, end in spans)

    def take(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        found = self.spans(name)
        if not found:
            return whole
        dim, spans = found
        return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in spans], dim)

    def pieces(self, name: str, value: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """[(corner in the whole tensor, view of this rank's memory), ...].

        value: this rank's part, a plain tensor or a DTensor whose rows FSDP has sharded.
        """
        local, first_row = value, 0
        if isinstance(value, DTensor):
            local = value.to_local()
            chunks = value.__create_chunk_list__()
            first_row = chunks[0].offsets[0] if chunks else 0
        found = self.spans(name)
        if not found:
            return [((first_row, *[0] * (local.dim() - 1)), local)] if local.numel() else []
        dim, spans = found
        if dim == 1:
            return [((first_row, spans[0][0]), local)] if local.numel() else []

        pieces, place = [], 0  # place: of the span in this tensor rank's part
        for begin, end in spans:
            first = max(place, first_row)
            last = min(place + end - begin, first_row + len(local))
            if first < last:
                corner = (begin + first - place, *[0] * (local.dim() - 1))
                pieces.append((corner, local[first - first_row : last - first_row]))
            place += end - begin
        return pieces

    def copy_part(self, name: str, param: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill a parameter, sharded by FSDP or not, with this rank's part of the whole tensor."""
        for corner, piece in self.pieces(name, param):
            place = [slice(begin, begin + n) for begin, n in zip(corner, piece.shape, strict=True)]
            piece.copy_(whole[tuple(place)])

    def counted_parts(self, name: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's part. Together, the tensor ranks' views have each value once."""
        if self.rank > 0 and self.spans(name) is None:
            return []
        if self.rank > 0 and self.shares_kv:
            pieces = self.pieces(name, value)
            return [view for corner, view in pieces if not self.is_shared(name, corner)]
        return [value.to_local() if isinstance(value, DTensor) else value]


WHOLE = Layout(MPTConfig())  # of any model that is not cut


def layout_of(model: MPT) -> Layout:
    """How a model is cut over the tensor ranks."""
    return model.layout if isinstance(model, SplitMPT) else WHOLE


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is the A or B of an adapter (lora.py)."""
    return name.endswith((".lora_A", ".lora_B"))


# --------------------------------------------------------------------------------------------------
# Putting it on a model

# What each rank gets in place of a module of this name. See also `Layout.spans`.
CUT = {
    "Wqkv": ColumnLinear,
    "gate_proj": ColumnLinear,
    "up_proj": ColumnLinear,
    "out_proj": RowLinear,
    "down_proj": RowLinear,
    "q_ln": SplitNorm,
    "k_ln": SplitNorm,
    "attn": SplitAttention,
    "ffn": SplitGatedFFN,  # a plain one stays as it is
    "wte": SplitEmbedding,
    "wpe": SplitPositions,
    "": SplitMPT,
}
UNCHANGED = ("norm_1", "norm_2", "norm_f", "lm_head")  # their class computes the same on a part


def team_of(world: processes.World, sequence_parallel: bool = False) -> Team | None:
    """The tensor ranks that this rank belongs to; None without tensor parallelism."""
    if world.tp_size == 1:
        return None
    return Team(world.tp_group, world.tp_rank, world.tp_size, sequence_parallel)


def cut(model: MPT, team: Team) -> None:
    """Keep this rank's part of a model, on the meta device or any other.

    UserError if a module with weights has a name or is of a class that is not known here.
    """
    layout = Layout(model.cfg, team.rank, team.size)
    for name, module in model.named_modules():
        weights = list(module.named_parameters(recurse=False))
        for leaf, param in weights:
            part = layout.take(f"{name}.{leaf}", param.detach())
            setattr(module, leaf, nn.Parameter(part))
        kind = name.rpartition(".")[2]
        known = not weights or kind in CUT or kind in UNCHANGED
        require(known, f"tp does not know how to cut {name}: add it to tensor_parallel.CUT")
        norms_heads = kind in ("q_ln", "k_ln") and model.cfg.qk_gn
        norms_shared_head = kind == "k_ln" and layout.shares_kv
        is_plain = kind == "ffn" and not isinstance(module, GatedFFN)
        if kind not in CUT or norms_heads or norms_shared_head or is_plain:
            continue
        split = SplitRMSNorm if isinstance(module, RMSNorm) else CUT[kind]
        fits = issubclass(split, type(module))
        require(fits, f"tp cannot cut {name}, a {type(module).__name__}: set --tp=1")
        # The module stays the same object, with its weights, and computes by another forward. A new
        # object would have to be built by each class's own constructor, which draws whole weights.
        module.__class__ = split
        module.team = team
        if kind in ("q_ln", "k_ln"):
            module.n_features = layout.whole_length(f"{name}.weight")
        if kind == "attn":
            module.q_dim //= team.size
            module.kv_dim //= 1 if layout.shares_kv else team.size
    model.first_id = model.transformer.wte.first_id = layout.first_row("wte.weight")
    model.layout = layout


def sum_partial_gradients(model: MPT) -> None:
    """Sum over the team the gradients of which each rank has a part. A collective.

    With sequence parallelism norms, biases of row-parallel layers and learned positions have seen
    only a rank's own tokens. A single head of keys and values has seen only a rank's own queries,
    the norms of qk_gn only its own heads, and the whole factor of an adapter (lora.py) only a
    rank's own part of its layer.
    """
    layout, grads = model.layout, []
    for name, param in model.named_parameters():
        is_partial = model.team.sequence_parallel or layout.spans(name) or is_adapter(name)
        is_partial = is_partial or is_norm_of_heads(name)
        if param.grad is None or not is_partial:
            continue
        pieces = layout.pieces(name, param.grad)
        grads += [view for corner, view in pieces if layout.is_shared(name, corner)]
    if not grads:
        return
    together = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(together, group=model.team.group)
    for grad, part in zip(grads, together.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def is_norm_of_heads(name: str) -> bool:
    """Whether a parameter is one of q_ln and k_ln."""
    return name.split(".")[-2] in ("q_ln", "k_ln")


def demonstrate(argv) -> None:
    """Print loss and a gradient of a small model that is cut over the ranks, and of a whole one."""
    arguments(argv)
    world = processes.start("cpu")
    alone = "one process has no team: torchrun --nproc_per_node 2 tensor_parallel.py"
    require(world.global_size > 1, alone)
    cfg = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=250, max_seq_len=32, alibi=True)
    cfg.check_tensor_ranks(world.global_size, sequence_parallel=False)
    ids = torch.randint(250, (2, 33), generator=torch.Generator().manual_seed(0))
    whole = MPT(cfg).double()
    init_weights(whole, seed=0)
    part = MPT(cfg).double()
    team = Team(dist.group.WORLD, world.global_rank, world.global_size)
    cut(part, team)
    with torch.no_grad():
        for name, param in part.named_parameters():
            param.copy_(part.layout.take(name, whole.get_parameter(name)))
    losses = []
    for model in (whole, part):
        loss = model(ids[:, :-1], labels=ids[:, 1:])
        loss.backward()
        losses.append(loss.item())
    name = "transformer.blocks.0.attn.Wqkv.weight"
    expected = part.layout.take(name, whole.get_parameter(name).grad)
    error = (part.get_parameter(name).grad - expected).abs().max()
    print(
        f"rank {world.global_rank}: loss {losses[1]:.12f}, of the whole model {losses[0]:.12f}; "
        f"gradient of {len(expected)} rows of Wqkv: largest difference {error:.0e}",
        flush=True,
    )
    assert error < 1e-9


if __name__ == "__main__":
    processes.run(demonstrate)
