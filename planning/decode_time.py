"""Decoding: one new token for each sequence at a time, which is mostly reading from memory, in closed form.

    milliseconds per token = (bytes of weights + batch x context x KV bytes per token) / memory bandwidth
    KV bytes per token     = 2 x n_layers x n_kv_heads x head_dim x bytes of a number      2: a key and a value

Every weight is read once a step, whatever the batch is, and does 2 FLOPs for each sequence. So up to a batch of

    peak FLOP/s x bytes of a weight / (2 x memory bandwidth)

more sequences cost no time but that of their cache; beyond it the matmuls take longer than the reading. These are lower
bounds, of one device at its datasheet's bandwidth: launches of kernels and sampling come on top.

Run `python -m planning.decode_time configs/mpt7b.py --device=mi250 --batch=8`. Read next: planning/calibrate.py.
"""

from dataclasses import dataclass

import config
import devices
import flops
from config import MPTConfig, require


@dataclass
class DecodeTimeArgs:
    """Which device, and what it holds."""

    device: str = "auto"  # one torch device: mi250, h100-nvl, ... (python devices.py lists them)
    batch: int = 1  # sequences at once
    context: int = 0  # tokens of each that are in the cache (0 = max_seq_len)

    def check(self) -> None:
        fine = 0 < self.batch < 10**9
        require(fine, f"batch must be from 1 to a billion, not {config.shown(self.batch)}")
        require(self.context >= 0, f"context must be 0 or more, not {self.context}")


def kv_bytes_per_token(m: MPTConfig, width: int = 2) -> int:
    """Bytes of the keys and values of one token in all layers (vLLM, 2309.06180, section 3: 800 KB for OPT-13B).

    width: bytes of a number, 2 for bf16.
    """
    return 2 * m.n_layers * m.n_kv_heads * m.head_dim * width


def weight_bytes(m: MPTConfig, width: int = 2) -> int:
    """Bytes of the weights that a step reads: all but the tables in which it looks up a row for each sequence."""
    parts = flops.params_by_part(m)
    tables = parts["wpe"] + (0 if m.tie_word_embeddings else parts["wte"])
    return width * (flops.n_params(m) - tables)


def ms_per_token(
    m: MPTConfig, batch: int, context: int, bandwidth_gbs: float, width: int = 2
) -> float:
    """Milliseconds of a step, which gives each of `batch` sequences of `context` tokens one more, while reading is what
    takes the time (Pope et al., 2211.05102, section 2). bandwidth_gbs: GB/s."""
    return (
        (weight_bytes(m, width) + batch * context * kv_bytes_per_token(m, width))
        / bandwidth_gbs
        / 1e6
    )


def compute_bound_batch(peak_tflops: float, bandwidth_gbs: float, width: int = 2) -> float:
    """The batch at which the matmuls with weights take as long as reading these: the roofline's ridge, where a weight
    of `width` bytes has 2 x batch FLOPs (Williams et al., 2009)."""
    return peak_tflops * 1e12 * width / (2 * bandwidth_gbs * 1e9)


def table(m: MPTConfig, args: DecodeTimeArgs) -> str:
    """Bytes, and on a device milliseconds, in bf16. A config file's `device = "cpu"` names no accelerator."""
    context, kv = args.context or m.max_seq_len, kv_bytes_per_token(m)
    fits = not m.learned_positions or context <= m.max_seq_len
    require(
        fits,
        f"context {context} is beyond max_seq_len {m.max_seq_len}, where learned positions end",
    )
    read = {"weights": weight_bytes(m), "keys and values": args.batch * context * kv}
    read["all"] = sum(read.values())
    cached = f"{args.batch} x {context} tokens of {kv:,} bytes in the cache"
    lines = [f"{flops.n_params(m):,} parameters, bf16, {cached}", ""]
    if args.device in ("auto", "cpu", "cuda", "mps"):
        lines += [f"{'read for a token':<20}{'GB':>10}"] + [
            f"  {name:<18}{n / 1e9:>10.3f}" for name, n in read.items()
        ]
        return "\n".join([*lines, "", "milliseconds: set --device=mi250 (for one)"])
    device = devices.by_name(args.device)
    lines += [
        f"{'read for a token':<20}{'GB':>10}{'ms':>10}  {device.name}, {device.bandwidth_gbs:g} GB/s"
    ]
    lines += [
        f"  {name:<18}{n / 1e9:>10.3f}{n / device.bandwidth_gbs / 1e6:>10.3f}"
        for name, n in read.items()
    ]
    ms = ms_per_token(m, args.batch, context, device.bandwidth_gbs)
    lines += [
        "",
        f"at most {1e3 / ms:,.1f} tokens/s of a sequence, {args.batch * 1e3 / ms:,.1f} of all",
    ]
    if read["all"] > device.memory_gb * 2**30:
        lines += [
            f"does not fit: {read['all'] / 2**30:.1f} GiB, the device has {device.memory_gb:g}"
        ]
    if device.bf16_tflops:
        limit = compute_bound_batch(device.bf16_tflops, device.bandwidth_gbs)
        lines += [f"from a batch of {limit:.0f} the matmuls take longer than reading the weights"]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    print(table(*config.load(argv, MPTConfig, DecodeTimeArgs)))


if __name__ == "__main__":
    config.run(main)
