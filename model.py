"""MPT: a decoder-only transformer, the architecture and the parameter names of MosaicML's models.

    x = wte[ids] (+ wpe[position])                          (B, T, d_model)
    x = x + attn(norm_1(x));  x = x + ffn(norm_2(x))        n_layers times
    logits = norm_f(x) @ wte^T                              (B, T, vocab_size)

The model does not know that it is distributed: parallel.py shards, compiles and checkpoints it from outside.
State-dict names equal Hugging Face's MPT, so real weights load without a map.

Run `python model.py` to build a small one and take one step. Read next: text/corpus.py.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attention import alibi_slopes, attention
from config import MPTConfig, arguments, require, run
from loss import autocast_dtype, linear_cross_entropy, score_labels


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose dtype under autocast is chosen: autocast's own, so that the residual stream stays in it (the
    sums are fp32 in the kernel), or fp32."""

    def __init__(self, cfg: MPTConfig, dim: int):
        super().__init__(dim, eps=1e-5, bias=not cfg.no_bias)
        self.low_precision = cfg.norm_type == "low_precision_layernorm"

    def forward(self, x):
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(x)
        dtype = autocast_dtype(x) if self.low_precision else torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            return F.layer_norm(
                x.to(dtype), self.normalized_shape, self.weight.to(dtype), bias, self.eps
            )


class Positions(NamedTuple):
    """What attention knows of positions, the same in every layer. None: not used."""

    slopes: torch.Tensor | None = None  # ALiBi, (H,)
    angles: tuple | None = None  # RoPE, cos and sin, (B or 1, 1, T, D) each
    sequence_ids: torch.Tensor | None = None  # documents, (B, Tk)


def rope_angles(cfg: MPTConfig, positions):
    """cos and sin of position * theta^(-2 i / D), i < D / 2, twice (RoFormer, 2104.09864). positions: (1 or B, T)."""
    frequencies = cfg.rope_theta ** (
        -torch.arange(0, cfg.head_dim, 2, device=positions.device) / cfg.head_dim
    )
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)  # fp32
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Turn each pair (x_i, x_{i + D/2}) of x (B, H, T, D) by its angle."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


def document_ids(input_ids, separator: int):
    """0, 1, 2 ... for the documents of each row (B, T); the id that ends a document is its last token."""
    return F.pad((input_ids == separator).cumsum(1)[:, :-1], (1, 0))


class Attention(nn.Module):
    """Fused q, k, v projection (rows: all q, all k, all v), attention, output projection."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        self.kv_dim = cfg.n_kv_heads * cfg.head_dim
        self.Wqkv = nn.Linear(cfg.d_model, cfg.d_model + 2 * self.kv_dim, bias=not cfg.no_bias)
        self.out_proj = nn.Linear(cfg.d_model, cfg.d_model, bias=not cfg.no_bias)
        if cfg.qk_ln:
            self.q_ln = LayerNorm(cfg, cfg.d_model)
            self.k_ln = LayerNorm(cfg, self.kv_dim)

    def forward(self, x, positions, cache=None, layer=0):
        cfg, (B, T, _) = self.cfg, x.shape
        qkv = self.Wqkv(x)
        if cfg.clip_qkv:
            qkv = qkv.clamp(-cfg.clip_qkv, cfg.clip_qkv)
        q, k, v = qkv.split([cfg.d_model, self.kv_dim, self.kv_dim], dim=-1)
        if cfg.qk_ln:
            q, k = self.q_ln(q).to(v.dtype), self.k_ln(k).to(v.dtype)
        q, k, v = (
            y.view(B, T, -1, cfg.head_dim).transpose(1, 2) for y in (q, k, v)
        )  # (B, H or Hkv, T, D)
        if positions.angles:
            q, k = rotate(q, *positions.angles), rotate(k, *positions.angles)
        if cache is not None:
            k, v = cache.append(layer, k, v)
            q = q.to(k.dtype)  # a cache may be wider than the weights
        dropout_p = cfg.attn_pdrop if self.training else 0.0
        where = {"alibi_slopes": positions.slopes, "sequence_ids": positions.sequence_ids}
        y = attention(
            q,
            k,
            v,
            impl=cfg.attn_impl,
            softmax_scale=cfg.softmax_scale,
            dropout_p=dropout_p,
            **where,
        )
        return self.out_proj(y.transpose(1, 2).reshape(B, T, cfg.d_model).to(qkv.dtype))


class FFN(nn.Module):
    """down_proj(gelu(up_proj(x))), the exact (erf) GELU."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.up_proj = nn.Linear(cfg.d_model, cfg.hidden_dim, bias=not cfg.no_bias)
        self.down_proj = nn.Linear(cfg.hidden_dim, cfg.d_model, bias=not cfg.no_bias)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind its norm, each added to the residual stream."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.resid_pdrop = cfg.resid_pdrop
        self.recompute = (
            None  # activation checkpointing, put on from outside: arguments of `checkpoint`
        )
        self.norm_1 = LayerNorm(cfg, cfg.d_model)
        self.attn = Attention(cfg)
        self.norm_2 = LayerNorm(cfg, cfg.d_model)
        self.ffn = FFN(cfg)

    def forward(self, x, positions, cache=None, layer=0):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.layer, x, positions, **self.recompute)
        return self.layer(x, positions, cache, layer)

    def layer(self, x, positions, cache=None, layer=0):
        x = x + F.dropout(
            self.attn(self.norm_1(x), positions, cache, layer), self.resid_pdrop, self.training
        )
        return x + F.dropout(self.ffn(self.norm_2(x)), self.resid_pdrop, self.training)


class Transformer(nn.Module):
    """Embeddings, blocks, final norm: ids (B, T) -> hidden states (B, T, d_model)."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        self.wte = nn.Embedding(cfg.vocab_size, cfg.d_model)
        if cfg.learned_positions:
            self.wpe = nn.Embedding(cfg.max_seq_len, cfg.d_model)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm_f = LayerNorm(cfg, cfg.d_model)

    def forward(self, input_ids, cache=None, sequence_ids=None):
        cfg, past = self.cfg, 0 if cache is None else cache.length
        x, end = self.wte(input_ids), past + input_ids.shape[1]
        places = torch.arange(past, end, device=x.device)[None]  # (1 or B, T)
        if cache is not None and cache.pad is not None:
            places = (places - cache.pad[:, None]).clamp(min=0)
            sequence_ids = (
                torch.arange(end, device=x.device) < cache.pad[:, None]
            ).int()  # padding: a document before
        if cfg.learned_positions:
            require(
                end <= cfg.max_seq_len,
                f"{end} tokens, but learned positions end at max_seq_len {cfg.max_seq_len} (ALiBi has no such limit)",
            )
            x = x + self.wpe(places)
        x = F.dropout(x, cfg.emb_pdrop, self.training).to(
            autocast_dtype(x)
        )  # the residual stream: bf16 under autocast
        slopes = alibi_slopes(cfg.n_heads, cfg.alibi_bias_max, x.device) if cfg.alibi else None
        positions = Positions(slopes, rope_angles(cfg, places) if cfg.rope else None, sequence_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, cache, layer)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return self.norm_f(x)


class MPT(nn.Module):
    """The language model.

    forward(input_ids) gives logits (B, T, vocab_size). forward(input_ids, labels) gives the sum of the token
    cross-entropies, a scalar, and never holds all logits; label -100 does not count; z_loss: see loss.py. With `score`
    it gives (log-probability, is it the likeliest?) of each label instead, (B, T) each. ids and labels: int64 (B, T).
    With a `KVCache` the ids continue what the cache holds.
    """

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        self.separator = (
            None  # the id that ends a document, for attn_uses_sequence_id; put on from outside
        )
        self.transformer = Transformer(cfg)
        if not cfg.tie_word_embeddings:
            self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)

    def forward(self, input_ids, labels=None, cache=None, z_loss=0.0, score=False):
        packed = self.cfg.attn_uses_sequence_id and self.separator is not None and cache is None
        documents = document_ids(input_ids, self.separator) if packed else None
        x = self.transformer(input_ids, cache, documents)
        weight = (
            self.transformer.wte.weight if self.cfg.tie_word_embeddings else self.lm_head.weight
        )  # (V, d)
        scale = self.cfg.logit_scale
        if scale == "inv_sqrt_d_model":
            scale = 1 / math.sqrt(self.cfg.d_model)
        if score:
            return score_labels(x, weight, labels, scale)
        if labels is not None:
            return linear_cross_entropy(x, weight, labels, scale, z_loss)
        logits = F.linear(x, weight)
        return logits if scale is None else logits * scale


@dataclass
class KVCache:
    """Keys and values of all layers for decoding, (L, B, Hkv, S, D) each, of which `length` positions are filled.

    pad: (B,) how many tokens at the left of each row are none, so that texts of different lengths end together.
    """

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0
    pad: torch.Tensor | None = None

    @classmethod
    def empty(cls, cfg: MPTConfig, batch_size, max_tokens, device, dtype, pad=None):
        shape = (cfg.n_layers, batch_size, cfg.n_kv_heads, max_tokens, cfg.head_dim)
        return cls(*(torch.empty(shape, device=device, dtype=dtype) for _ in range(2)), pad=pad)

    def append(self, layer, k, v):
        """Store k, v (B, Hkv, T, D) behind what is there; return all of this layer's, (B, Hkv, length + T, D)."""
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


def init_weights(model: MPT, seed: int, assign=lambda param, full: param.data.copy_(full)) -> None:
    """MPT's initial weights, the same numbers on any device and for any number of ranks.

        wte, wpe             N(0, 2 / d_model)          biases   0
        linear weights       N(0, 2 / fan_in)           norms    1
        out_proj, down_proj  the same / sqrt(2 * n_layers)

    Each tensor is drawn whole on the CPU from a generator seeded with (seed, parameter name). `assign(param, full)`
    puts it in place; parallel.py passes one that keeps a rank's shard only.
    """
    for name, param in model.named_parameters():
        assign(param, initial_weight(name, param.shape, model.cfg, seed))


def initial_weight(name, shape, cfg, seed):
    """The initial value of one parameter, fp32 on the CPU, of its full shape."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # norms
        return torch.ones(shape)
    std = math.sqrt(2 / shape[1])  # d_model for the embeddings, fan_in for a linear layer
    if "out_proj" in name or "down_proj" in name:
        std /= math.sqrt(2 * cfg.n_layers)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0, std, generator=generator)


def demonstrate(argv) -> None:
    arguments(argv)
    demo_cfg = MPTConfig(
        d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=32, alibi=True
    )
    mpt = MPT(demo_cfg)
    init_weights(mpt, seed=0)
    ids = torch.arange(33)[None] % 7  # (1, 33)
    loss = mpt(ids[:, :-1], labels=ids[:, 1:]) / 32
    loss.backward()
    print(mpt)
    print(
        f"logits {tuple(mpt(ids[:, :-1]).shape)}, loss {loss:.3f} nats a token, at random {math.log(256):.3f}"
    )


if __name__ == "__main__":
    run(demonstrate)
