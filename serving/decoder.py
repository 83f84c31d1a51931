"""The decoder: a model made ready to write, and the loop that draws one token after another.

A prompt goes through the model once and leaves its keys and values in a cache; then each step feeds
one token. Each step reads all weights and the whole cache, so memory bandwidth is the limit:

    seconds of a step >= (bytes of weights + bytes of keys and values) / memory bandwidth

So the weights are kept in bf16 where that is fast (`pick_dtype`), and a CPU gets them in the order
in which its kernels read them (`PackedLinear`). planning/decode_time.py predicts the time of a step.

Run `python -m serving.decoder` to see what the cache saves. Read next: serving/stream.py.
"""

import functools
import math
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import parallel
from config import MPTConfig, TrainConfig, arguments, run
from model import MPT, KVCache, init_weights
from serving.sampling import sample


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in memory in the blocks that oneDNN's CPU kernels read, put so once.

    For up to 8 rows this took 0.2 to 0.9 of the time of F.linear, on 2 cores with AVX512-BF16.
    """

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), bias

    def forward(self, x):
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(device, dtype) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Decoder:
    """A model made ready to write. `decoder(ids, cache)` gives the logits of the token after ids (B, T), (B, V) fp32.

    It takes the model over: weights become `dtype` (None: as they are), and linear layers are packed where possible.
    vocab_size: entries of the tokenizer; the rows beyond, which pad the embedding, have no logits.
    """

    @torch.no_grad()
    def __init__(self, model: MPT, vocab_size: int, dtype=None):
        self.model, self.cfg = model.to(dtype).eval(), model.cfg
        output = model.transformer.wte if self.cfg.tie_word_embeddings else model.lm_head
        self.device, self.dtype = output.weight.device, output.weight.dtype
        # On a CPU fp32: reading twice the bytes is faster there than the products of bf16.
        wide = self.device.type == "cpu" and self.dtype == torch.bfloat16
        self.cache_dtype = torch.float32 if wide else self.dtype
        weight, scale = output.weight[:vocab_size], self.cfg.logit_scale
        self.scale = (
            1 / math.sqrt(self.cfg.d_model) if scale == "inv_sqrt_d_model" else scale or 1.0
        )
        self.head = functools.partial(F.linear, weight=weight)
        if can_pack(self.device, self.dtype):
            self.head = PackedLinear(weight)
            for block in model.transformer.blocks:  # one after another: what was packed is freed
                for part in (block.attn, block.ffn):
                    for name, child in list(part.named_children()):
                        if isinstance(child, nn.Linear):
                            setattr(part, name, PackedLinear(child.weight, child.bias))

    def __call__(self, ids, cache):
        hidden = self.model.transformer(ids, cache)[
            :, -1
        ]  # (B, d_model): of the prompt, too, only the end is needed
        return self.head(hidden).float() * self.scale


@torch.inference_mode()
def generate(
    decoder, ids, max_new_tokens, *, pad=None, temperature=1.0, top_k=0, top_p=1.0, numbers=None
):
    """Yield new tokens, one (B,) int64 tensor at a time, for prompts ids (B, T). Ends early when learned positions do.

    pad: (B,) int64, how many ids at the left of each row are none; numbers: (B, max_new_tokens) in [0, 1), what the
    tokens are drawn with (None: torch's generator).
    """
    (B, T), cfg = ids.shape, decoder.cfg
    if cfg.learned_positions:
        max_new_tokens = min(max_new_tokens, cfg.max_seq_len + 1 - T)
    cache = KVCache.empty(cfg, B, T + max_new_tokens, decoder.device, decoder.cache_dtype, pad=pad)
    for i in range(max_new_tokens):
        uniform = None if numbers is None else numbers[:, i]
        token = sample(decoder(ids, cache), temperature, top_k, top_p, uniform)
        yield token
        ids = token[:, None]


def pick_dtype(precision: str, device) -> torch.dtype:
    """`auto`: bf16 on accelerators that have it, and on a CPU that has instructions for it."""
    on_cpu = "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"
    known = on_cpu if device.type == "cpu" else None
    return parallel.DTYPES[
        parallel.choose_precision(TrainConfig(precision=precision), device, known)
    ]


@torch.inference_mode()
def generate_without_cache(model: MPT, ids, max_new_tokens):
    """`generate` at temperature 0, the obvious way: each token reads the whole text again."""
    for _ in range(max_new_tokens):
        token = model(ids)[:, -1].argmax(dim=-1)
        yield token
        ids = torch.cat([ids, token[:, None]], dim=1)


def demonstrate(argv) -> None:
    """Milliseconds a token with and without a cache, of a model of random weights."""
    arguments(argv)
    model = MPT(MPTConfig(d_model=128, n_heads=4, n_layers=4, vocab_size=512, alibi=True)).eval()
    init_weights(model, seed=0)
    prompt, n = torch.arange(64)[None], 32

    def timed(name, tokens):
        begin = time.perf_counter()
        written = torch.stack(list(tokens))
        print(f"{name:32}{1e3 * (time.perf_counter() - begin) / n:6.2f} ms a token")
        return written

    obvious = timed("the whole text for each token", generate_without_cache(model, prompt, n))
    decoder = Decoder(model, vocab_size=512)  # from here on its weights are packed
    cached = timed("one token, and a cache", generate(decoder, prompt, n, temperature=0))
    print(f"equal tokens: {(obvious == cached).sum()} of {n}")


if __name__ == "__main__":
    run(demonstrate)
