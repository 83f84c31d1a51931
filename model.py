"""MPT: a decoder-only transformer, with the architecture and parameter names of MosaicML's models.

    x = wte[ids] (+ wpe[position])                          (B, T, d_model)
    x = x + attn(norm_1(x));  x = x + ffn(norm_2(x))        n_layers times
    logits = norm_f(x) @ wte^T                              (B, T, vocab_size)

Shapes: B rows, T tokens, H heads of width D = d_model / H, Hkv heads of keys and values, L layers.

Nothing in here communicates: parallel.py adds activation checkpointing, compilation and sharding
from outside, tensor_parallel.py and pipeline.py cut the model. Names in the state dict are those of
Hugging Face's MPT, so its weights load as they are.

Run `python model.py` to build a small model and compute a loss and its gradients.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from attention import alibi_slopes, attention, autocast_dtype
from config import MPTConfig
from loss import linear_cross_entropy, soft_capped
from program import UserError, arguments, run


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Under autocast `low_precision_layernorm` returns its dtype, so the residual stream stays bf16
    (the kernel sums in fp32 either way); `layernorm` returns fp32.
    """

    def __init__(self, cfg: MPTConfig, dim: int):
        super().__init__(dim, eps=1e-5, bias=not cfg.no_bias)
        self.low_precision = cfg.norm_type.startswith("low_precision")

    def forward(self, x):
        """x (..., dim) -> the same shape."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)  # a CPU would spend 5 us on the context below
        dtype = norm_dtype(x, self.low_precision)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            weight = self.weight.to(dtype)
            return F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, cfg: MPTConfig, dim: int):
        super().__init__(dim, eps=1e-5)
        self.low_precision = cfg.norm_type.startswith("low_precision")

    def forward(self, x):
        """x (..., dim) -> the same shape; its dtype as LayerNorm's."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        dtype = norm_dtype(x, self.low_precision)
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)


def norm_dtype(x, low_precision: bool):
    """In which dtype a norm computes and returns, under autocast."""
    return autocast_dtype(x) if low_precision else torch.float32


def new_norm(cfg: MPTConfig, dim: int) -> nn.Module:
    """The norm that `norm_type` names."""
    return RMSNorm(cfg, dim) if cfg.norm_type.endswith("rmsnorm") else LayerNorm(cfg, dim)


class Positions(NamedTuple):
    """What attention knows about positions; the same in every layer. None: not used."""

    slopes: torch.Tensor | None = None  # ALiBi: (H,)
    angles: tuple | None = None  # RoPE: cos and sin, each (B or 1, 1, T, D)
    sequence_ids: torch.Tensor | None = None  # the document of each key: (B, Tk)
    visible: object | None = None  # of a captured step: see serving/step_graph.py


def positions_of(cfg: MPTConfig, input_ids, cache, sequence_ids):
    """The index of each token in its text, (1 or B, T), and `Positions`.

    With a cache, the ids follow its tokens, and the cache says what is padding. UserError for more
    tokens than learned positions.
    """
    device = input_ids.device
    n_tokens = input_ids.shape[1]
    end = n_tokens if cache is None else cache.length + n_tokens
    if cfg.learned_positions and end > cfg.max_seq_len:
        raise UserError(
            f"{end} tokens, but learned positions end at max_seq_len {cfg.max_seq_len} "
            "(ALiBi has no such limit)"
        )
    if cache is None:
        indices = torch.arange(n_tokens, device=device)[None]
    else:
        indices = cache.positions(n_tokens)
        sequence_ids = cache.sequence_ids(n_tokens)
    slopes = alibi_slopes(cfg.n_heads, cfg.alibi_bias_max, device) if cfg.alibi else None
    angles = rope_angles(cfg, indices) if cfg.rope else None
    visible = None if cache is None else cache.visible
    return indices, Positions(slopes, angles, sequence_ids, visible)


def rope_angles(cfg: MPTConfig, positions):
    """RoPE's cos and sin for positions (1 or B, T), each (1 or B, 1, T, D) in fp32.

    The angle of pair m < D / 2 at position t is t * theta^(-2 m / D) (RoFormer, arXiv 2104.09864).
    The D / 2 angles come twice, once for each half of a head: see `rotate`.
    """
    even = torch.arange(0, cfg.head_dim, 2, device=positions.device)  # 2 m
    frequencies = cfg.rope_theta ** (-even / cfg.head_dim)  # (D / 2,)
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Turn each pair (x_m, x_{m + D/2}) of x (B, H, T, D) by its angle; returns x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


def document_ids(input_ids, separator: int):
    """Number the documents of each row 0, 1, 2, ...: (B, T) -> (B, T).

    A document ends with its separator token, which belongs to it.
    """
    ended = (input_ids == separator).cumsum(1)  # documents that have ended, this token included
    return F.pad(ended[:, :-1], (1, 0))


class Attention(nn.Module):
    """Multi-head attention: one fused projection to q, k, v, then attention, then out_proj.

        y = softmax(q k^T * scale + bias) v, for each head on its own:

        q (B, H, T, D); k, v (B, Hkv, Tk, D); q k^T and bias (B, H, T, Tk); y (B, H, T, D)
        bias: ALiBi's -slope * (i - j) for query i and key j; -inf if j > i (causal mask)

    attention.py has this in plain PyTorch, and kernels that never store q k^T. The rows of Wqkv's
    weight: d_model of q, then Hkv * D of k, then Hkv * D of v.
    """

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        self.q_dim = cfg.d_model  # tensor_parallel.py makes it and kv_dim smaller
        self.kv_dim = cfg.n_kv_heads * cfg.head_dim
        self.Wqkv = nn.Linear(cfg.d_model, self.q_dim + 2 * self.kv_dim, bias=not cfg.no_bias)
        self.out_proj = nn.Linear(cfg.d_model, cfg.d_model, bias=not cfg.no_bias)
        if cfg.qk_ln:  # over all heads together
            self.q_ln = new_norm(cfg, cfg.d_model)
            self.k_ln = new_norm(cfg, self.kv_dim)
        if cfg.qk_gn:  # each head on its own
            self.q_ln = new_norm(cfg, cfg.head_dim)
            self.k_ln = new_norm(cfg, cfg.head_dim)

    def forward(self, x, positions, cache=None, layer=0):
        """x (B, T, d_model) -> (B, T, d_model). With a cache, x follows its tokens."""
        cfg = self.cfg
        qkv = self.Wqkv(x)  # (B, T, d_model + 2 * kv_dim)
        if cfg.clip_qkv:
            qkv = qkv.clamp(-cfg.clip_qkv, cfg.clip_qkv)
        q, k, v = self.heads(qkv)
        if positions.angles:
            q = rotate(q, *positions.angles)
            k = rotate(k, *positions.angles)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # all keys so far: Tk >= T
            q = q.to(k.dtype)  # a cache may have a wider dtype than the weights
        y = attention(
            q,
            k,
            v,
            impl=cfg.attn_impl,
            alibi_slopes=positions.slopes,
            softmax_scale=cfg.softmax_scale,  # None: 1 / sqrt(D)
            dropout_p=cfg.attn_pdrop if self.training else 0.0,
            sequence_ids=positions.sequence_ids,
            window=cfg.window,
            softcap=cfg.attn_logit_softcapping,
            visible=positions.visible,
            qkv=qkv,
        )
        y = y.transpose(1, 2).flatten(2)  # heads side by side: (B, T, d_model)
        return self.out_proj(y.to(qkv.dtype))

    def heads(self, qkv):
        """q (B, H, T, D), k and v (B, Hkv, T, D), from the output of Wqkv."""
        B, T, _ = qkv.shape
        q, k, v = qkv.split([self.q_dim, self.kv_dim, self.kv_dim], dim=-1)
        if self.cfg.qk_ln:
            q = self.q_ln(q).to(v.dtype)
            k = self.k_ln(k).to(v.dtype)
        q, k, v = (y.view(B, T, -1, self.cfg.head_dim) for y in (q, k, v))
        if self.cfg.qk_gn:
            q = self.q_ln(q).to(v.dtype)
            k = self.k_ln(k).to(v.dtype)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}  # GELU is the exact one, with erf


class FFN(nn.Module):
    """The feed-forward network: down_proj(act(up_proj(x))). act is GELU unless set otherwise."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.act = ACTIVATIONS[cfg.ffn_act_fn]
        self.up_proj = nn.Linear(cfg.d_model, cfg.hidden_dim, bias=not cfg.no_bias)
        self.down_proj = nn.Linear(cfg.hidden_dim, cfg.d_model, bias=not cfg.no_bias)

    def forward(self, x):
        """x (B, T, d_model) -> (B, T, d_model)."""
        return self.down_proj(self.act(self.up_proj(x)))


class GatedFFN(FFN):
    """down_proj(act(gate_proj(x)) * up_proj(x)): SwiGLU if act is SiLU (Shazeer, 2020)."""

    def __init__(self, cfg: MPTConfig):
        super().__init__(cfg)
        self.gate_proj = nn.Linear(cfg.d_model, cfg.hidden_dim, bias=not cfg.no_bias)

    def forward(self, x):
        """x (B, T, d_model) -> (B, T, d_model)."""
        x = x.to(autocast_dtype(x))  # a norm may return fp32: both layers read one copy in bf16
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each x + f(norm(x))."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.resid_pdrop = cfg.resid_pdrop
        self.norm_1 = new_norm(cfg, cfg.d_model)
        self.attn = Attention(cfg)
        self.norm_2 = new_norm(cfg, cfg.d_model)
        self.ffn = GatedFFN(cfg) if cfg.ffn_type == "mptglu" else FFN(cfg)

    def forward(self, x, positions, cache=None, layer=0):
        """x (B, T, d_model) -> (B, T, d_model). `layer` is this block's index in the cache."""
        attended = self.attn(self.norm_1(x), positions, cache, layer)
        x = x + F.dropout(attended, self.resid_pdrop, self.training)
        fed = self.ffn(self.norm_2(x))
        return x + F.dropout(fed, self.resid_pdrop, self.training)


class Transformer(nn.Module):
    """Embeddings, blocks, final norm."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.d_model)
        if cfg.learned_positions:
            self.wpe = nn.Embedding(cfg.max_seq_len, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm_f = new_norm(cfg, cfg.d_model)

    def forward(self, input_ids, cache=None, sequence_ids=None):
        """Token ids (B, T) -> hidden states (B, T, d_model).

        sequence_ids: (B, T), the document of each token; None: each row is one document. With a
        cache, which grows by T, the ids follow the cached tokens.
        """
        indices, positions = positions_of(self.cfg, input_ids, cache, sequence_ids)
        x = self.embed(input_ids, indices)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, cache, layer)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return self.norm_f(x)

    def embed(self, input_ids, indices):
        """The residual stream before the first block, (B, T, d_model), bf16 under autocast."""
        cfg = self.cfg
        x = self.wte(input_ids)  # (B, T, d_model)
        if cfg.learned_positions:
            x = x + self.wpe(indices)
        if cfg.embedding_fraction < 1:  # the embedding gets a part of its gradient
            x = cfg.embedding_fraction * x + (1 - cfg.embedding_fraction) * x.detach()
        x = F.dropout(x, cfg.emb_pdrop, self.training)
        return x.to(autocast_dtype(x))


class MPT(nn.Module):
    """The language model: the transformer and the output layer, which is `wte` again when tied."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        # The id that ends a document, for attn_uses_sequence_id; None: each row is one document.
        # It depends on the tokenizer, so the program that trains sets it.
        self.separator = None
        # The settings of the adapters that lora.py has put on, or None.
        self.lora = None
        self.transformer = Transformer(cfg)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)

    def forward(self, input_ids, labels=None, cache=None, z_loss=0.0, head=None):
        """The logits, the loss, or what `head` makes of the hidden states.

            model(ids)                  logits (B, T, V)
            model(ids, labels)          sum of the tokens' losses (loss.py)
            model(ids, labels, head=f)  f(model, hidden states (B, T, d_model), labels)

        ids and labels: (B, T) int64; label -100 does not count.

        With a `KVCache`, the ids follow the cached tokens. All of these happen in `forward`, since
        fully_shard gathers the weights only when forward is called.
        """
        x = self.transformer(input_ids, cache, self.documents(input_ids, cache))
        if head is not None:
            return head(self, x, labels)
        if labels is not None:
            return self.loss(x, labels, z_loss)
        return self.logits(x)

    def documents(self, input_ids, cache):
        """The document of each token, (B, T), with attn_uses_sequence_id; else None."""
        if not self.cfg.attn_uses_sequence_id or cache is not None:
            return None
        if self.separator is not None:
            return document_ids(input_ids, self.separator)
        if self.training:
            raise UserError("attn_uses_sequence_id: set model.separator")
        return None

    def loss(self, x, labels, z_loss):
        """The sum of the losses of labels (B, T), from hidden states (B, T, d_model).

        It is F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") plus the
        z-loss, without all logits in memory; loss.py begins with the formula.

        Another loss has to be a sum over counted tokens, too: train_step divides by their number.
        Compute it from self.logits(x), and it works with --tp as well.
        """
        return self.cross_entropy(x, labels, z_loss)

    def cross_entropy(self, x, labels, z_loss):
        """`linear_cross_entropy` of this model's output layer; a scalar."""
        cap = self.cfg.final_logit_softcapping
        return linear_cross_entropy(
            x, self.output_weight, labels, self.logit_scale, z_loss, softcap=cap
        )

    def logits(self, x):
        """Hidden states (B, T, d_model) -> (B, T, V)."""
        logits = F.linear(x, self.output_weight)
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        return soft_capped(logits, self.cfg.final_logit_softcapping)

    def new_cache(self, batch_size, max_tokens, dtype, pad=None):
        """An empty `KVCache` with room for `max_tokens` positions of each row."""
        blocks = list(self.transformer.blocks)  # of this stage
        n_kv_heads = blocks[0].attn.kv_dim // self.cfg.head_dim  # of this tensor rank
        shape = (len(blocks), batch_size, n_kv_heads, max_tokens, self.cfg.head_dim)
        device = next(self.parameters()).device
        k = torch.empty(shape, device=device, dtype=dtype)
        v = torch.empty(shape, device=device, dtype=dtype)
        return KVCache(k, v, pad=pad)

    @property
    def output_layer(self) -> nn.Module:
        """The module whose weight makes logits of hidden states."""
        return self.transformer.wte if self.cfg.tie_word_embeddings else self.lm_head

    @property
    def output_weight(self) -> torch.Tensor:
        """The weight of the output layer, (V, d_model)."""
        return self.output_layer.weight

    @property
    def logit_scale(self) -> float | None:
        """The factor on the logits, or None for no factor."""
        if self.cfg.logit_scale == "inv_sqrt_d_model":
            return 1 / math.sqrt(self.cfg.d_model)
        return self.cfg.logit_scale


@dataclass
class KVCache:
    """The keys and values of all layers, for decoding: (L, B, Hkv, S, D) each.

    S is the room for tokens; the first `length` positions are filled. pad: (B,) left padding, how
    many positions at the start of each row are padding, so that rows of different lengths end
    together; None for none.
    """

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0
    pad: torch.Tensor | None = None
    visible = None  # which keys a query sees: all; serving/step_graph.py sets it to fewer

    def positions(self, n_tokens):
        """Where the next tokens stand in their texts, (1 or B, n_tokens)."""
        end = self.length + n_tokens
        positions = torch.arange(self.length, end, device=self.k.device)[None]
        if self.pad is None:
            return positions
        return (positions - self.pad[:, None]).clamp(min=0)  # from a row's first real token

    def sequence_ids(self, n_tokens):
        """The document of each position up to the next tokens, (B, length + n_tokens), or None.

        The padding is its own document (id 1, the text has id 0), so real tokens never see it.
        """
        if self.pad is None:
            return None
        end = self.length + n_tokens
        return (torch.arange(end, device=self.k.device) < self.pad[:, None]).int()

    def append(self, layer, k, v):
        """Store one layer's new k, v (B, Hkv, T, D) after the filled positions.

        Returns all k and v of the layer so far, (B, Hkv, length + T, D). `length` stays as it is:
        the transformer moves it once all layers have stored theirs.
        """
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


@torch.no_grad()
def init_weights(model: MPT, seed: int) -> None:
    """MPT's initial weights: the same values on any device and for any number of global ranks.

        wte, wpe             N(0, 2 / d_model)          biases   0
        linear weights       N(0, 2 / fan_in)           norms    1
        out_proj, down_proj  the same, the standard deviation divided by sqrt(2 * n_layers)

    Each tensor is drawn whole, on the CPU, from a generator seeded with (seed, parameter name). For
    models that are cut over ranks, parallel.py does the same and keeps this rank's part.
    """
    for name, param in model.named_parameters():
        param.copy_(initial_weight(name, param.shape, model.cfg, seed))


def initial_weight(name, shape, cfg, seed):
    """The initial value of the parameter `name`, fp32 on the CPU, unsharded."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # norms
        return torch.ones(shape)
    std = math.sqrt(2 / shape[1])  # shape[1]: d_model for embeddings, fan_in for linear layers
    if "out_proj" in name or "down_proj" in name:
        std /= math.sqrt(2 * cfg.n_layers)
    return torch.empty(shape).normal_(0, std, generator=seeded(seed, name))


def seeded(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU for the values that `name` names: each name has its own."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def demonstrate(argv) -> None:
    """Print a small model, and its loss beside that of a uniform guess."""
    arguments(argv)
    cfg = MPTConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=32, alibi=True)
    model = MPT(cfg)
    init_weights(model, seed=0)
    ids = torch.arange(33)[None] % 7  # (1, 33)
    inputs = ids[:, :-1]
    labels = ids[:, 1:]
    loss = model(inputs, labels=labels) / labels.numel()
    loss.backward()
    print(model)
    print(
        f"logits {tuple(model(inputs).shape)}, loss {loss:.3f} nats per token, "
        f"uniform guess {math.log(256):.3f}"
    )


if __name__ == "__main__":
    run(demonstrate)
