"""How fast text was generated, and what share of the memory bandwidth that used.

    GB/s = (bytes of weights x steps + bytes of adapters, cached keys and values read) / seconds

Decoding reads all weights and the whole cache in each step, so this figure, beside the bandwidth of
the device, says how much faster decoding could be. The bandwidth of a GPU is that of its datasheet
(devices.py); the bandwidth of a CPU is measured.
"""

import math
import time
from dataclasses import dataclass

import torch

import devices
from planning import decode_time
from serving.decoder import Decoder


@dataclass
class Speed:
    """Totals of all texts. The first new token of a prompt counts as part of its prefill."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    steps: int = 0
    tokens: int = 0  # new ones, of texts that had not ended
    seconds: float = 0.0  # of the steps
    cached_tokens: int = 0  # in the cache, padding included, summed over rows and steps
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
        """The bytes that all steps read: weights in each step, adapters, what the cache held."""
        weights = decode_time.weight_bytes(decoder.cfg, decoder.dtype.itemsize)
        per_token = decode_time.kv_bytes_per_token(decoder.cfg, decoder.cache_dtype.itemsize)
        return self.steps * weights + self.adapter_bytes + self.cached_tokens * per_token


def share_of_bandwidth(gbs: float, device: torch.device) -> str:
    """`gbs` GB/s as a share of the memory bandwidth of `device`, in words."""
    if device.type == "cpu":
        bandwidth = measure_bandwidth()
        source = "this CPU's, measured by reading"
    else:
        known = devices.identify(device)
        if not known or not known.bandwidth_gbs:  # not in the table, or only its peak is known
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
