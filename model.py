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
from torch.utils.checkpoint import checkpoint

from attention import Window, alibi_slopes, attention
from config import MPTConfig
from loss import autocast_dtype, linear_cross_entropy, score_labels
from program import arguments, require, run


class LayerNorm(nn.LayerNorm):
    """LayerNorm that chooses its own dtype under autocast.

    `low_precision_layernorm` returns autocast's dtype, so the residual stream stays bf16 (the
    kernel sums in fp32 either way); `layernorm` returns fp32.
    """

    def __init__(self, cfg: MPTConfig, dim: int):
        super().__init__(dim, eps=1e-5, bias=not cfg.no_bias)
        self.low_precision = cfg.norm_type == "low_precision_layernorm"

    def forward(self, x):
        """Normalize the last dimension of x (..., dim)."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return super().forward(x)
        dtype = autocast_dtype(x) if self.low_precision else torch.float32
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            x = x.to(dtype)
            weight = self.weight.to(dtype)
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Positions(NamedTuple):
    """What attention knows about positions; the same in every layer. None: not used."""

    slopes: torch.Tensor | None = None  # ALiBi: (H,)
    angles: tuple | None = None  # RoPE: cos and sin, each (B or 1, 1, T, D)
    sequence_ids: torch.Tensor | None = None  # the document of each key: (B, Tk)
    window: Window | None = None  # the keys that a single query sees


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

    The rows of Wqkv's weight: d_model of q, then Hkv * D of k, then Hkv * D of v.
    """

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.cfg = cfg
        self.q_dim = cfg.d_model  # tensor_parallel.py makes it and kv_dim smaller
        self.kv_dim = cfg.n_kv_heads * cfg.head_dim
        self.Wqkv = nn.Linear(cfg.d_model, self.q_dim + 2 * self.kv_dim, bias=not cfg.no_bias)
        self.out_proj = nn.Linear(cfg.d_model, cfg.d_model, bias=not cfg.no_bias)
        if cfg.qk_ln:
            self.q_ln = LayerNorm(cfg, cfg.d_model)
            self.k_ln = LayerNorm(cfg, self.kv_dim)

    def forward(self, x, positions, cache=None, layer=0):
        """x (B, T, d_model) -> (B, T, d_model). With a cache, x follows its tokens."""
        qkv = self.Wqkv(x)  # (B, T, d_model + 2 * kv_dim)
        if self.cfg.clip_qkv:
            qkv = qkv.clamp(-self.cfg.clip_qkv, self.cfg.clip_qkv)
        q, k, v = self.heads(qkv)
        if positions.angles:
            q = rotate(q, *positions.angles)
            k = rotate(k, *positions.angles)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # all keys so far: Tk >= T
            q = q.to(k.dtype)  # a cache may have a wider dtype than the weights
        are_views = not (self.cfg.qk_ln or positions.angles or cache is not None)
        y = self.attend(q, k, v, positions, qkv if are_views else None)
        y = y.transpose(1, 2).flatten(2)  # heads side by side
        return self.out_proj(y.to(qkv.dtype))

    def heads(self, qkv):
        """q (B, H, T, D), k and v (B, Hkv, T, D), from the output of Wqkv."""
        B, T, _ = qkv.shape
        q, k, v = qkv.split([self.q_dim, self.kv_dim, self.kv_dim], dim=-1)
        if self.cfg.qk_ln:
            q = self.q_ln(q).to(v.dtype)
            k = self.k_ln(k).to(v.dtype)
        q, k, v = (y.view(B, T, -1, self.cfg.head_dim).transpose(1, 2) for y in (q, k, v))
        return q, k, v

    def attend(self, q, k, v, positions, fused):
        """y = softmax(q k^T * scale + bias) v, for each head on its own:

            q (B, H, T, D); k, v (B, Hkv, Tk, D); q k^T and bias (B, H, T, Tk); y (B, H, T, D)
            bias: ALiBi's -slope * (i - j) for query i and key j; -inf if j > i (causal mask)

        attention.py has this in plain PyTorch, and kernels that never store q k^T. fused: the
        tensor that q, k and v are views of, or None; `triton` writes one gradient for all of it.
        """
        cfg = self.cfg
        return attention(
            q,
            k,
            v,
            impl=cfg.attn_impl,
            alibi_slopes=positions.slopes,
            softmax_scale=cfg.softmax_scale,  # None: 1 / sqrt(D)
            dropout_p=cfg.attn_pdrop if self.training else 0.0,
            sequence_ids=positions.sequence_ids,
            window=positions.window,
            qkv=fused,
        )


class FFN(nn.Module):
    """The feed-forward network: down_proj(gelu(up_proj(x))), with the exact (erf) GELU."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.up_proj = nn.Linear(cfg.d_model, cfg.hidden_dim, bias=not cfg.no_bias)
        self.down_proj = nn.Linear(cfg.hidden_dim, cfg.d_model, bias=not cfg.no_bias)

    def forward(self, x):
        """x (B, T, d_model) -> (B, T, d_model)."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each x + f(norm(x))."""

    def __init__(self, cfg: MPTConfig):
        super().__init__()
        self.resid_pdrop = cfg.resid_pdrop
        # Activation checkpointing: None, or torch's arguments for it (parallel.recompute sets it).
        self.recompute = None
        self.norm_1 = LayerNorm(cfg, cfg.d_model)
        self.attn = Attention(cfg)
        self.norm_2 = LayerNorm(cfg, cfg.d_model)
        self.ffn = FFN(cfg)

    def forward(self, x, positions, cache=None, layer=0):
        """x (B, T, d_model) -> (B, T, d_model). `layer` is this block's index in the cache."""
        if self.recompute and torch.is_grad_enabled() and cache is None:
            return checkpoint(self.compute, x, positions, None, layer, **self.recompute)
        return self.compute(x, positions, cache, layer)

    def compute(self, x, positions, cache=None, layer=0):
        """`forward` without activation checkpointing."""
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
        self.norm_f = LayerNorm(cfg, cfg.d_model)

    def forward(self, input_ids, cache=None, sequence_ids=None, x=None):
        """Token ids (B, T) -> hidden states (B, T, d_model).

        With a cache, the ids follow the cached tokens, and the cache grows by T. sequence_ids:
        (B, T), the document of each token, or None if each row is one document. x: hidden states
        of these ids that earlier layers have computed elsewhere; None: begin with the embeddings.
        UserError for more tokens than learned positions.
        """
        cfg = self.cfg
        n_tokens = input_ids.shape[1]
        device = input_ids.device
        if cache is None:
            end = n_tokens
            token_positions = torch.arange(end, device=device)[None]  # (1 or B, T)
            window = None
        else:
            end = cache.length + n_tokens
            token_positions = cache.positions(n_tokens)
            sequence_ids = cache.sequence_ids(n_tokens)
            window = cache.window
        if cfg.learned_positions:
            require(
                end <= cfg.max_seq_len,
                f"{end} tokens, but learned positions end at max_seq_len {cfg.max_seq_len} "
                "(ALiBi has no such limit)",
            )
        if x is None:
            x = self.embed(input_ids, token_positions)

        slopes = alibi_slopes(cfg.n_heads, cfg.alibi_bias_max, device) if cfg.alibi else None
        angles = rope_angles(cfg, token_positions) if cfg.rope else None
        positions = Positions(slopes, angles, sequence_ids, window)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, cache, layer)
        if cache is not None:
            cache.length = end
        return self.norm_f(x)

    def embed(self, input_ids, token_positions):
        """The residual stream before the first block, (B, T, d_model), bf16 under autocast."""
        cfg = self.cfg
        x = self.wte(input_ids)  # (B, T, d_model)
        if cfg.learned_positions:
            x = x + self.wpe(token_positions)
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

    def forward(self, input_ids, labels=None, cache=None, z_loss=0.0, score=False, x=None):
        """The logits, the loss, or the scores of labels. ids and labels: (B, T) int64.

            model(ids)                      logits (B, T, V)
            model(ids, labels)              sum of the tokens' losses (loss.py), a scalar
            model(ids, labels, score=True)  (log-probability, is it the most likely token?) of each
                                            label, (B, T) each

        Label -100 does not count. Loss and scores never hold all logits; z_loss: see loss.py. With
        a `KVCache`, the ids follow the cached tokens. x: see `Transformer`. All three share one
        `forward`, because fully_shard gathers the weights only when forward is called.
        """
        documents = None
        if self.cfg.attn_uses_sequence_id and cache is None:
            known = self.separator is not None
            require(known or not self.training, "attn_uses_sequence_id: set model.separator")
            documents = document_ids(input_ids, self.separator) if known else None
        x = self.transformer(input_ids, cache, documents, x)  # (B, T, d_model)
        return self.output(x, labels, z_loss, score)

    def output(self, x, labels, z_loss, score):
        """What `forward` returns, from hidden states (B, T, d_model)."""
        if score:
            return self.score(x, labels)
        if labels is not None:
            return self.loss(x, labels, z_loss)
        return self.logits(x)

    def score(self, x, labels):
        """Log-probability of each label, and whether it is the most likely token, (B, T) each."""
        return score_labels(x, self.output_weight, labels, self.logit_scale)

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
        return linear_cross_entropy(x, self.output_weight, labels, self.logit_scale, z_loss)

    def logits(self, x):
        """Hidden states (B, T, d_model) -> (B, T, V)."""
        logits = F.linear(x, self.output_weight)
        return logits if self.logit_scale is None else logits * self.logit_scale

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
    window = None  # each query sees the filled positions; of serving/step_graph.py, a part of all

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
