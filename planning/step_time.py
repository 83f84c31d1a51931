"""Seconds of one training step by part, in closed form: how fast a run will be, before it is launched.

    step = (m + (p - 1) / v) x one microbatch + what happens once a step

m microbatches go through p pipeline stages; (p - 1) / v of their times is the bubble, with v pieces a stage (Megatron's
interleaving, arXiv 2104.04473, section 2.2). One microbatch on one stage is

    compute   matmuls      FLOPs / (reachable peak x area / (area + tile)),  area = tokens x width on this device
              attention    FLOPs of a causal flash kernel / (share of the peak that such kernels reach x peak)
              memory       bytes of norms, GELU, residuals, logits, and of FSDP's copies / bandwidth
              tensor       all-reduces of tensor parallelism, which nothing hides
    traffic   gathers and reductions of FSDP: bytes x (n - 1) / n / bandwidth + hop x (n - 1) for each of them
    together  (compute^q + traffic^q)^(1/q): q = 1 hides nothing, a large q all that fits

A group that spans nodes has its share of a node's network, if that is slower than the links inside. `Constants` holds
what was fitted, and what was fixed before; bench/planner.py fits it, bench/results/planner.md has the errors.

Run `python -m planning.step_time configs/mpt7b.py --device=mi250 --devices=8`. Read next: planning/decode_time.py.
"""

import math
from dataclasses import dataclass, replace

import config
import devices
import flops
from config import MPTConfig, TrainConfig, require
from devices import Device
from planning import memory


@dataclass(frozen=True)
class Constants:
    """What no datasheet tells. The first six were fitted, those below were fixed before."""

    attention_a100: float = (
        0.318  # share of the dense bf16 peak that flash attention reaches on compute capability 8.x
    )
    attention_h100: float = (
        0.18  # and on 9.0, whose new matrix instructions that kernel did not use
    )
    block_bytes: float = (
        460  # of memory traffic per token, layer and d_model: forward and backward, not recomputed
    )
    tile: float = 1.7e6  # tokens x width at which matmuls reach half of what large ones do
    overlap: float = 1.35  # q above
    hop: float = 4.5e-6  # seconds a hop of a ring
    attention: float = 0.25  # share of the peak on any other device: between the two, not measured
    reachable: float = (
        0.7  # share of the peak of large matmuls where devices.py has none: not measured
    )
    link: float = 0.7  # share of a link's or network's bandwidth that collectives reach
    vocab_bytes: float = (
        24  # of traffic per token and entry of the vocabulary: logits in bf16 and fp32, both passes
    )
    copy_bytes: float = (
        30  # of traffic per gathered parameter and microbatch: FSDP's copies in and out, gradients
    )
    update_bytes: float = (
        30  # of traffic per parameter of an optimizer step: Adam reads and writes 4 fp32 numbers
    )
    pace: float = 1.0  # measured / predicted seconds of compute, by `--calibrate`


@dataclass(frozen=True)
class Trainer:
    """What differs between training loops."""

    reduce_bytes: int = 4  # of a gradient on the network
    residual_bytes: int = 2  # of a number in the residual stream


UNKNOWN_LINK = 32.0  # GB/s each way: PCIe 4
OURS, FOUNDRY = (
    Trainer(),
    Trainer(reduce_bytes=2, residual_bytes=4),
)  # LLM Foundry under amp_bf16, PURE
KEPT = {
    2: 32.2,
    4: 42.25,
}  # bytes per token and d_model that a block keeps, by bytes of the residual: as its traffic


@dataclass(frozen=True)
class Fleet:
    """Equal devices in equal nodes. Neighbours share tensors, then data; pipeline stages are farthest apart."""

    device: Device
    devices: int = 1  # torch devices in all
    node_size: int = 8  # torch devices of a node
    network_gbs: float = 100.0  # of a node, each way, GB/s
    tp: int = 1  # ranks that share every matmul
    pp: int = 1  # pipeline stages
    interleave: int = 1  # pieces of the model on each stage

    def __post_init__(self):
        for name in ("devices", "node_size", "network_gbs", "tp", "pp", "interleave"):
            require(
                getattr(self, name) > 0, f"{name} must be more than 0, not {getattr(self, name)}"
            )
        replica = self.tp * self.pp
        fits = self.devices % replica == 0
        require(
            fits,
            f"devices {self.devices} is not a multiple of tp {self.tp} x pp {self.pp} = {replica}",
        )
        require(
            self.tp <= self.node_size,
            f"tp {self.tp} is more than the {self.node_size} devices of a node",
        )
        require(
            self.device.bf16_tflops,
            f"no bf16 peak known for {self.device.name}: there is nothing to plan with",
        )

    @property
    def dp(self) -> int:
        return self.devices // (self.tp * self.pp)

    def bandwidth(self, n: int, stride: int) -> float:
        """Bytes/s of a ring of n ranks, `stride` apart: a node's network is shared by all rings that leave it."""
        inside = max(1, min(n, self.node_size // stride))  # ranks of one ring in a node
        gbs = self.device.link_gbs or UNKNOWN_LINK
        if inside < n:
            gbs = min(gbs, self.network_gbs * inside / min(self.node_size, self.devices))
        return gbs * 1e9


class Step:
    """One training step of `m` under `cfg` on `fleet`, in seconds. UserError if it cannot be split so."""

    def __init__(
        self, m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c=None, trainer: Trainer = OURS
    ):
        self.m, self.cfg, self.fleet, self.c, self.trainer = (
            m,
            cfg,
            fleet,
            c or Constants(),
            trainer,
        )
        require(
            cfg.microbatch_size != "auto",
            "microbatch_size=auto is found by trying: set --microbatch_size=NUMBER",
        )
        rows, rest = divmod(cfg.global_batch_size, fleet.dp)
        require(
            rest == 0,
            f"global_batch_size {cfg.global_batch_size} is not a multiple of the {fleet.dp} data ranks",
        )
        stages = fleet.pp * fleet.interleave
        require(
            m.n_layers % stages == 0,
            f"n_layers {m.n_layers} is not a multiple of pp x interleave = {stages}",
        )
        heads = m.n_heads % fleet.tp == 0
        require(heads, f"n_heads {m.n_heads} is not a multiple of tp {fleet.tp}")
        self.microbatches = math.ceil(rows / cfg.microbatch_size)
        self.tokens = rows / self.microbatches * m.max_seq_len  # of a microbatch
        self.layers = m.n_layers // fleet.pp  # of a stage
        self.n = flops.n_params(m) / (fleet.tp * fleet.pp)  # parameters of a device before sharding
        self.mode = cfg.sharding_mode
        self.shard = min(fleet.dp, cfg.shard_ranks(fleet.dp, max(1, fleet.node_size // fleet.tp)))
        mode, every = cfg.activation_checkpointing, cfg.recompute_every
        self.again = {"none": 0.0, "selective": 0.0, "full": 1 / every}[
            mode
        ]  # forwards of blocks done twice
        self.redone = (
            self.again if mode != "selective" else 1 / every
        )  # norms and GELU of blocks, too

    # Compute of one microbatch on one stage --------------------------------------------------------------------------

    def matmuls(self) -> float:
        m, parts, d = self.m, flops.params_by_part(self.m), self.fleet.device
        blocks = (
            sum(parts[name] for name in ("Wqkv", "out_proj", "up_proj", "down_proj"))
            / self.fleet.pp
        )
        work = (
            2
            * self.tokens
            * ((3 + self.again) * blocks + 3 * m.vocab_size * m.d_model)
            / self.fleet.tp
        )
        area = self.tokens * m.d_model / self.fleet.tp
        reach = d.bf16_tflops * 1e12 * (d.reachable or self.c.reachable)
        return work / reach * (area + self.c.tile) / area * self.c.pace

    def attention(self) -> float:
        """A causal kernel: 2 S d FLOPs forward, and 2.5 times that backward."""
        m, d, c = self.m, self.fleet.device, self.c
        share = {"8": c.attention_a100, "9": c.attention_h100}.get(
            d.arch.split(".")[0], c.attention
        )
        work = (
            2
            * m.max_seq_len
            * m.d_model
            * (3.5 + self.again)
            * self.layers
            * self.tokens
            / self.fleet.tp
        )
        return work / (d.bf16_tflops * 1e12 * share) * c.pace

    def memory(self) -> float:
        """Of a block's traffic a third is norms and residuals, which tensor parallelism does not divide."""
        m, c, tp = self.m, self.c, self.fleet.tp
        usual = replace(
            m, expansion_ratio=4, kv_n_heads=None, qk_ln=False, clip_qkv=None
        )  # what was fitted
        shape = sum(memory.saved_by_block(m).values()) / sum(memory.saved_by_block(usual).values())
        traffic = (
            c.block_bytes
            * shape
            * KEPT[self.trainer.residual_bytes]
            / KEPT[4]
            * (1 + self.redone / 3)
        )
        blocks = self.layers * m.d_model * traffic * (1 / 3 + 2 / 3 / tp)
        gathers = not self.mode.reduces_late and self.shard > 1
        copies = c.copy_bytes * self.n * (1 if gathers else 1 / 3)  # else gradients only
        bandwidth = self.fleet.device.bandwidth_gbs * 1e9
        return (
            (self.tokens * (blocks + m.vocab_size * c.vocab_bytes / tp) + copies)
            / bandwidth
            * c.pace
        )

    def tensor(self) -> float:
        """Two all-reduces a layer, forward and backward each, of the residual stream in bf16."""
        calls = 2 * (2 + self.again) * self.layers
        return calls * 2 * self.ring(2 * self.tokens * self.m.d_model, self.fleet.tp, 1, 1)

    # Traffic ---------------------------------------------------------------------------------------------------------

    def ring(self, size: float, n: int, stride: int, calls: int) -> float:
        """Seconds of `calls` all-gathers or reduce-scatters of `size` bytes in all. An all-reduce is two."""
        if n == 1:
            return 0.0
        return size * (n - 1) / n / (
            self.fleet.bandwidth(n, stride) * self.c.link
        ) + calls * self.c.hop * (n - 1)

    def traffic(self) -> float:
        """What each microbatch sends: FSDP's gathers in bf16 and reductions, and activations to the next stage."""
        again = 2 if self.mode.frees_weights else 1  # for the backward, too
        gathers = 0 if self.mode.reduces_late else again
        calls, tp = self.layers + 1, self.fleet.tp
        seconds = gathers * self.ring(2 * self.n, self.shard, tp, calls)
        seconds += (
            self.ring(self.trainer.reduce_bytes * self.n, self.shard, tp, calls) if gathers else 0
        )
        if self.fleet.pp == 1:
            return seconds
        size = (
            2 * 2 * self.tokens * self.m.d_model * self.fleet.interleave
        )  # to the next, and a gradient back
        return seconds + size / (
            self.fleet.bandwidth(self.fleet.pp, tp * self.fleet.dp) * self.c.link
        )

    def once(self) -> float:
        """What a step sends once, at its last microbatch."""
        size, tp, calls, dp = (
            self.trainer.reduce_bytes * self.n,
            self.fleet.tp,
            self.layers + 1,
            self.fleet.dp,
        )
        if self.mode.reduces_late and self.mode.over == "all":  # ZERO1
            return self.ring(size, dp, tp, calls) + self.ring(2 * self.n, dp, tp, calls)
        copies = (
            dp // self.shard
        )  # DDP, HYBRID_SHARD: each holds the whole, or a shard of it, several times
        return 2 * self.ring(size / self.shard, copies, tp * self.shard, calls)

    def hidden(self, compute: float, traffic: float) -> float:
        """Seconds that `traffic` adds to `compute`."""
        q = self.c.overlap
        return (compute**q + traffic**q) ** (1 / q) - compute

    # The step --------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, float]:
        """Seconds by part; "step" is their sum."""
        m, fleet = self.microbatches, self.fleet
        one = {
            "matmuls": self.matmuls(),
            "attention": self.attention(),
            "memory-bound": self.memory(),
        }
        one["tensor parallel"] = self.tensor()
        compute = sum(one.values())
        one["exposed traffic"] = self.hidden(compute, self.traffic())
        slot = sum(one.values())
        parts = {name: m * seconds for name, seconds in one.items()}
        last = self.hidden(compute, self.traffic() + self.once())
        parts["exposed traffic"] += last - one["exposed traffic"]
        parts["bubble"] = (fleet.pp - 1) / fleet.interleave * slot
        parts["optimizer"] = (
            self.c.update_bytes * self.n / self.shard / (fleet.device.bandwidth_gbs * 1e9)
        )
        return {**parts, "step": sum(parts.values())}


def tokens_per_second(
    m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c=None, trainer: Trainer = OURS
) -> float:
    """Of all devices together."""
    return cfg.global_batch_size * m.max_seq_len / Step(m, cfg, fleet, c, trainer).parts()["step"]


@dataclass
class FleetArgs:
    """The fleet."""

    device: str = "auto"  # mi250, h100, ...
    devices: int = 8  # torch devices in all
    node_size: int = 8  # torch devices of a node
    network: float = 100.0  # GB/s of a node, each way


@dataclass
class SplitArgs:
    """How the model is split over devices."""

    tp: int = 1  # tensor parallelism
    pp: int = 1  # pipeline stages
    interleave: int = 1  # pieces of the model on each stage


def main(argv: list[str]) -> None:
    m, cfg, a, split = config.load(argv, MPTConfig, TrainConfig, FleetArgs, SplitArgs)
    place = (devices.by_name(a.device), a.devices, a.node_size, a.network)
    fleet = Fleet(*place, split.tp, split.pp, split.interleave)
    parts = Step(m, cfg, fleet).parts()
    print(f"{flops.n_params(m):,} parameters, {a.devices} x {fleet.device.name}, {cfg.sharding}")
    for name, seconds in parts.items():
        print(f"  {name:<18}{1e3 * seconds:>12,.1f} ms {seconds / parts['step']:>8.1%}")
    print(f"{cfg.global_batch_size * m.max_seq_len / parts['step']:,.0f} tokens/s")


if __name__ == "__main__":
    config.run(main)
