"""The decoder: a model ready for inference, and the loop that draws one token after another.

Prefill: the prompt goes through the model once and leaves its keys and values in a cache. Decoding:
each step feeds one token. It reads all weights and the whole cache, so memory bandwidth limits it:

    seconds of a step >= (bytes of weights + bytes of keys and values) / memory bandwidth

So the weights become bf16 where that is fast (`pick_dtype`), and on a CPU they are packed as its
kernels read them (`PackedLinear`). On a GPU, starting the kernels of a step from Python
would take longer than the step, so it is captured (serving/step_graph.py).
serving/speed.py predicts the time of a step.

Run `python -m serving.decoder` to see what the cache saves.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import devices
from config import MPTConfig
from loss import soft_capped
from model import MPT, KVCache, init_weights
from program import arguments, run
from serving import step_graph
from serving.sampling import sample
from tensor_parallel import SplitMPT


class Decoder:
    """A model ready for inference. `decoder(ids, cache)` gives the logits of the next token.

    It changes the model in place: the weights become `dtype` (None: unchanged) and are packed where
    the CPU allows it. vocab_size: the entries of the tokenizer. The rows of the embedding beyond it
    are padding and get no logits.
    """

    @torch.no_grad()
    def __init__(self, model: MPT, vocab_size: int, dtype=None):
        self.model = model.to(dtype).eval()
        self.cfg = model.cfg
        self.vocab_size = vocab_size
        self.team = model.team if isinstance(model, SplitMPT) else None  # of tensor ranks
        self.bank = None  # of adapters: serving/adapters.py puts one on
        self.graphs = None  # of steps, which `generate` keeps for the next call
        output_weight = model.output_layer.weight  # of a tensor rank: its part of the vocabulary
        self.device = output_weight.device
        self.dtype = output_weight.dtype

        # On a CPU, bf16 weights get an fp32 cache: reading twice the bytes is faster there than
        # multiplying keys and values in bf16.
        bf16_on_cpu = self.device.type == "cpu" and self.dtype == torch.bfloat16
        self.cache_dtype = torch.float32 if bf16_on_cpu else self.dtype

        self.logit_scale = model.logit_scale or 1.0
        if self.team is None:
            output_weight = output_weight[:vocab_size]
        if self.team is None and can_pack(self.device, self.dtype):
            self.output_layer = PackedLinear(output_weight)
            for block in model.transformer.blocks:
                pack_linear_layers(block.attn)
                pack_linear_layers(block.ffn)
        else:
            self.output_layer = lambda hidden: F.linear(hidden, output_weight)

    @property
    def n_ranks(self) -> int:
        """Over how many tensor ranks the model is cut."""
        return self.team.size if self.team else 1

    def __call__(self, ids, cache: KVCache):
        """ids (B, T), which continue `cache` -> logits (B, vocab_size) fp32 of the token after."""
        hidden = self.model.transformer(ids, cache)
        return self.logits(hidden[:, -1])  # in a prompt, too, only the last position is needed

    def at_all_positions(self, ids, cache: KVCache):
        """The same with the logits after each of the ids: (B, T, vocab_size)."""
        return self.logits(self.model.transformer(ids, cache))

    def logits(self, hidden):
        """Hidden states (..., d_model) -> (..., vocab_size) fp32, on each tensor rank."""
        logits = self.output_layer(hidden).float() * self.logit_scale
        logits = soft_capped(logits, self.cfg.final_logit_softcapping)
        if self.team:
            logits = self.model.gather_vocabulary(logits, self.team)
        return logits[..., : self.vocab_size]


@torch.inference_mode()
def generate(
    decoder, ids, max_new_tokens, *, pad=None, temperature=1.0, top_k=0, top_p=1.0, uniforms=None
):
    """Yield the new tokens of prompts `ids` (B, T), one (B,) int64 tensor at a time.

    pad: (B,) int64, the left padding of each row. uniforms: (B, max_new_tokens) in [0, 1), which
    draw the tokens (None: torch's generator). Ends early where learned positions end.
    """
    cfg = decoder.cfg
    B, T = ids.shape
    if cfg.learned_positions:
        max_new_tokens = min(max_new_tokens, cfg.max_seq_len + 1 - T)
    graphs = step_graph.borrow(decoder, B, T + max_new_tokens)
    if graphs:
        cache = graphs.empty(B, pad)
    else:
        cache = decoder.model.new_cache(B, T + max_new_tokens, decoder.cache_dtype, pad)

    try:
        for step in range(max_new_tokens):
            decode = graphs if graphs and step > 0 else decoder  # step 0 is the prefill
            logits = decode(ids, cache)
            uniform = None if uniforms is None else uniforms[:, step]
            token = sample(logits, temperature, top_k, top_p, uniform)
            yield token
            ids = token[:, None]
    finally:
        decoder.graphs = graphs


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of the weights: fp32, bf16, or for `auto` bf16 where the device computes in it.

    `auto` gives bf16 on CPUs with AVX512-BF16, and on all accelerators except old GPUs.
    """
    if precision != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    if device.type == "cpu":
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    else:
        has_bf16 = devices.computes_in_bf16(device)
    return torch.bfloat16 if has_bf16 else torch.float32


@torch.inference_mode()
def generate_without_cache(model: MPT, ids, max_new_tokens):
    """The obvious version of `generate` at temperature 0: each step reads the whole text again."""
    for _ in range(max_new_tokens):
        logits = model(ids)[:, -1]
        token = logits.argmax(dim=-1)
        yield token
        ids = torch.cat([ids, token[:, None]], dim=1)


# --------------------------------------------------------------------------------------------------
# Packed weights: linear layers in the memory layout that oneDNN's CPU kernels read
#
# PyTorch keeps a weight row by row; oneDNN's kernels read it block by block. Decoding multiplies
# only a few rows of activations by each weight, so the time of a step is the time of reading the
# weights. A `PackedLinear` brings its weight into these blocks once. One step of a model of 512 x 8
# layers and 50,368 ids took, on one core of an AMD EPYC with AVX512-BF16, torch 2.13:
#
#     ms                packed    F.linear
#     fp32, batch 1       12.8        19.9
#     fp32, batch 8       18.4        37.6
#     bf16, batch 1        6.4        11.6
#
# The operators that pack and multiply are private to PyTorch (their names begin with `_`). They can
# be neither compiled nor differentiated. Where `can_pack` is false, nn.Linear stays.


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for weights of this dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


class PackedLinear(nn.Module):
    """F.linear(x, weight, bias) with a weight that is packed once. For inference on a CPU."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, x):
        """x (..., in_features) -> (..., out_features)."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linear_layers(module: nn.Module) -> None:
    """Replace each nn.Linear that is a child of `module` by a packed one, and free the original."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child.weight, child.bias))


def demonstrate(argv) -> None:
    """Print milliseconds per token with and without a cache, for a model of random weights."""
    arguments(argv)
    model = MPT(MPTConfig(d_model=128, n_heads=4, n_layers=4, vocab_size=512, alibi=True)).eval()
    init_weights(model, seed=0)
    prompt = torch.arange(64)[None]
    n = 32

    def timed(name, tokens):
        begin = time.perf_counter()
        tokens = torch.stack(list(tokens))
        ms = 1e3 * (time.perf_counter() - begin) / n
        print(f"{name:32}{ms:6.2f} ms per token")
        return tokens

    obvious = timed("the whole text for each token", generate_without_cache(model, prompt, n))
    decoder = Decoder(model, vocab_size=512)  # takes the model over and packs its weights
    cached = timed("one token, and a cache", generate(decoder, prompt, n, temperature=0))
    print(f"equal tokens: {(obvious == cached).sum()} of {n}")


if __name__ == "__main__":
    run(demonstrate)
