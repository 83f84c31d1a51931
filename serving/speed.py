"""How fast text was generated, and what share of the memory bandwidth that used.

    GB/s = (bytes of weights x steps + bytes of adapters, cached keys and values read) / seconds

Decoding reads all weights and the whole cache in each step, so this figure, beside the bandwidth of
the device, says how much faster decoding could be. The bandwidth of a GPU is that of its datasheet
(devices.py); the bandwidth of a CPU is measured.

    ms of a step           = (bytes of weights + batch x context x KV bytes per token) / bandwidth
    KV bytes per token     = 2 x n_layers x n_kv_heads x head_dim x bytes of a number
                             (2: a key and a value)

A step gives every sequence of the batch one more token, and reads every weight once, whatever the
batch is. So another sequence costs only the reading of its cache, until the matmuls take longer
than the reading.
"""

import math
import time
from dataclasses import dataclass

import torch

import devices
import flops
from config import MPTConfig
from serving.decoder import Decoder


def kv_bytes_per_token(m: MPTConfig, width: int = 2, tp: int = 1) -> int:
    """Bytes of one token's keys and values in all layers. width: bytes of a number, 2 for bf16.

    tp: of one of so many tensor ranks, each of which has a single head of keys and values whole.
    vLLM (2309.06180, section 3) has an example: 800 KB for OPT-13B.
    """
    n_heads = max(1, m.n_kv_heads // tp)
    return 2 * m.n_layers * n_heads * m.head_dim * width


def tokens_read(m: MPTConfig, n_cached: int) -> int:
    """Of how many cached tokens a step reads keys and values: all, or those of the window."""
    return n_cached if m.window is None else min(n_cached, m.window + 1)


def weight_bytes(m: MPTConfig, width: int = 2) -> int:
    """Bytes of the weights that a step reads. width: bytes of a number, 2 for bf16.

    That is all of them except the tables in which it looks up one row for each sequence.
    """
    parts = flops.params_by_part(m)
    tables = parts["wpe"] + (0 if m.tie_word_embeddings else parts["wte"])
    return width * (flops.n_params(m) - tables)


def ms_per_token(
    m: MPTConfig, batch: int, context: int, bandwidth_gbs: float, width: int = 2
) -> float:
    """The least milliseconds of a step for `batch` sequences, `context` tokens each in the cache.

    As long as reading takes longer than computing (Pope et al., 2211.05102, section 2).
    bandwidth_gbs: GB/s. width: bytes of a number.
    """
    cache_bytes = batch * tokens_read(m, context) * kv_bytes_per_token(m, width)
    return (weight_bytes(m, width) + cache_bytes) / bandwidth_gbs / 1e6


@dataclass
class Speed:
    """Totals of all texts. The first new token of a prompt counts as part of its prefill."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0  # new ones, of texts that had not ended
    seconds: float = 0.0  # of the steps
    cached_tokens: int = 0  # that were read, padding included, summed over rows and steps
    adapter_bytes: int = 0  # that the steps have read
    prompts: int = 0  # that were read to their ends
    prefix_tokens: int = 0  # of prompts, whose keys and values were known and not computed

    def report(self, decoder: Decoder) -> str:
        """Prefill, decoding, bandwidth in one line. Measuring a CPU's bandwidth takes 0.2 s."""
        prompt_rate = self.prompt_tokens / (self.prompt_seconds or 1)
        prompts = f"prompts: {self.prompt_tokens} tokens, {prompt_rate:,.0f} tokens/s"
        if not self.steps:
            return prompts

        rate = self.tokens / self.seconds
        step_ms = 1e3 * self.seconds / self.steps
        bytes_read = self.bytes_read(decoder)
        gbs = bytes_read / self.seconds / 1e9
        return (
            f"{prompts}; new: {self.tokens} tokens, {rate:,.0f} tokens/s, "
            f"{self.steps} steps of {step_ms:.2f} ms, "
            f"in which {bytes_read / self.steps / 1e6:,.1f} MB are read: "
            f"{gbs:.1f} GB/s, {share_of_bandwidth(gbs, decoder.device)}"
        )

    def bytes_read(self, decoder: Decoder) -> int:
        """The bytes that all steps read on a device: weights in each, adapters, what was cached."""
        tp = decoder.n_ranks
        weights = weight_bytes(decoder.cfg, decoder.dtype.itemsize) // tp
        per_token = kv_bytes_per_token(decoder.cfg, decoder.cache_dtype.itemsize, tp)
        return self.steps * weights + self.adapter_bytes + self.cached_tokens * per_token


def share_of_bandwidth(gbs: float, device: torch.device) -> str:
    """`gbs` GB/s as a share of the memory bandwidth of `device`, in words."""
    if device.type == "cpu":
        bandwidth = measure_bandwidth()
        source = "this CPU's, measured by reading"
    else:
        known = devices.identify(device)
        if not known:  # not in the table
            return "share of the bandwidth n/a"
        bandwidth = known.bandwidth_gbs
        source = known.name
    return f"{gbs / bandwidth:.0%} of {bandwidth:,.0f} ({source})"


def measure_bandwidth(megabytes: int = 256) -> float:
    """GB/s at which PyTorch's threads read memory that is in no cache of this CPU. Takes 0.2 s."""
    array = torch.ones(megabytes * 2**18)  # fp32
    fastest = math.inf  # seconds
    start = time.perf_counter()
    while time.perf_counter() - start < 0.2:
        begin = time.perf_counter()
        array.sum()
        fastest = min(fastest, time.perf_counter() - begin)
    return array.nbytes / fastest / 1e9
