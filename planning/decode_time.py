"""Decoding in closed form: the time of one new token, which is mostly spent reading from memory.

    milliseconds per token = (bytes of weights + batch x context x KV bytes per token) / bandwidth
    KV bytes per token     = 2 x n_layers x n_kv_heads x head_dim x bytes of a number
                             (2: a key and a value)

A decoding step gives every sequence of the batch one more token. Every weight is read once a step,
whatever the batch is, and does 2 FLOPs for each sequence. So up to a batch of

    peak FLOP/s x bytes of a weight / (2 x memory bandwidth)

another sequence costs only the reading of its cache. Beyond that the matmuls take longer than the
reading. These are lower bounds for one device at the bandwidth of its datasheet: kernel launches
and sampling come on top.

Run `python -m planning.decode_time configs/mpt7b.py --device=mi250 --batch=8`.
"""

from dataclasses import dataclass

import config
import devices
import flops
import program
from config import MPTConfig


@dataclass
class DecodeTimeArgs:
    """Which device, and what it holds."""

    device: str = "auto"  # one torch device: mi250, h100-nvl, ... (python devices.py lists them)
    batch: int = 1  # sequences at a time
    context: int = 0  # tokens of each that are in the cache (0 = max_seq_len)


def kv_bytes_per_token(m: MPTConfig, width: int = 2) -> int:
    """Bytes of one token's keys and values in all layers. width: bytes of a number, 2 for bf16.

    vLLM (2309.06180, section 3) has an example: 800 KB for OPT-13B.
    """
    return 2 * m.n_layers * m.n_kv_heads * m.head_dim * width


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
    """Milliseconds of a step for `batch` sequences with `context` tokens each in the cache.

    As long as reading takes longer than computing (Pope et al., 2211.05102, section 2).
    bandwidth_gbs: GB/s. width: bytes of a number.
    """
    cache_bytes = batch * context * kv_bytes_per_token(m, width)
    return (weight_bytes(m, width) + cache_bytes) / bandwidth_gbs / 1e6


def compute_bound_batch(peak_tflops: float, bandwidth_gbs: float, width: int = 2) -> float:
    """The batch at which the matmuls with weights take as long as reading the weights.

    This is the roofline's ridge (Williams et al., 2009): a weight of `width` bytes does 2 x batch
    FLOPs. bandwidth_gbs: GB/s.
    """
    return peak_tflops * 1e12 * width / (2 * bandwidth_gbs * 1e9)


# --------------------------------------------------------------------------------------------------
# The program


def report(m: MPTConfig, args: DecodeTimeArgs) -> str:
    """Bytes in bf16 and, on a named device, milliseconds and limits.

    `device = "cpu"` in a config file says where it trains, and names no accelerator.
    """
    context = args.context or m.max_seq_len
    n_bytes = {
        "weights": weight_bytes(m),
        "keys and values": args.batch * context * kv_bytes_per_token(m),
    }
    n_bytes["all"] = sum(n_bytes.values())
    heading = f"{flops.n_params(m):,} parameters in bf16, {args.batch} x {context} tokens cached"
    if args.device in devices.THIS_MACHINE:
        rows = [(name, f"{n / 1e9:.3f}") for name, n in n_bytes.items()]
        table = program.table(("read for a token", "GB"), rows)
        return f"{heading}\n\n{table}\n\nfor milliseconds, set --device=mi250 (for example)"

    device = devices.by_name(args.device)
    rows = []
    for name, n in n_bytes.items():
        rows.append((name, f"{n / 1e9:.3f}", f"{n / device.bandwidth_gbs / 1e6:.3f}"))
    table = program.table(("read for a token", "GB", "ms"), rows)
    rate = device.bandwidth_gbs * 1e9 / n_bytes["all"]
    speed = f"at most {rate:,.1f} tokens/s per sequence, {args.batch * rate:,.1f} in all"
    memory = f"{n_bytes['all'] / 2**30:.1f} of {device.memory_gb:g} GiB"
    if device.bf16_tflops:
        ridge = compute_bound_batch(device.bf16_tflops, device.bandwidth_gbs)
        memory += f"; from a batch of {ridge:.0f} the matmuls take longer than reading the weights"
    on = f"{device.name}, {device.bandwidth_gbs:g} GB/s"
    return f"{heading}\n{on}\n\n{table}\n\n{speed}\n{memory}"


def main(argv: list[str]) -> None:
    """Print the report for the config files and flags in argv."""
    print(report(*config.load(argv, MPTConfig, DecodeTimeArgs)))


if __name__ == "__main__":
    program.run(main)
