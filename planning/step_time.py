"""The seconds of one training step, part by part, in closed form: how fast will a run be?

    step = n x one microbatch on the slowest stage
           + one microbatch on each of the other stages: the bubble
           + what happens once a step

n microbatches pass through p pipeline stages. If those are equally fast, the bubble is a share of
(p - 1) / (n + p - 1) of that time. (With v = `interleave` pieces of the model on each stage it is
1 / v of it: arXiv 2104.04473, section 2.2. The trainer has no interleaved stages; planning only.)
One microbatch on one stage takes

    compute   matmuls     FLOPs / (reachable peak x area / (area + tile)),
                          area = tokens x width on this device
              attention   FLOPs of a causal flash kernel / (the kernels' share of the peak x peak)
              memory      bytes of norms, GELU, residuals, logits and FSDP's copies / bandwidth
              tensor      what tensor ranks send each other, which no computation hides
              stages      what stages send each other, which the trainer does not hide either
    traffic   FSDP's gathers and reductions, each: bytes x (n - 1) / n / bandwidth + hop x (n - 1)
    together  (compute^q + traffic^q)^(1/q): q = 1 overlaps nothing, a large q everything

A group of ranks that spans nodes gets its share of a node's network, if that is slower than the
links inside. `Constants` holds the fitted and the fixed constants. bench/planner.py fits them;
bench/results/planner.md has the errors.

Run `python -m planning.step_time configs/mpt7b.py --device=mi250 --devices=8`.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import config
import devices
import flops
from config import MPTConfig, TrainConfig, require, stage_sizes
from devices import Device
from planning import memory

UNKNOWN_LINK = 32.0  # GB/s each way: PCIe 4
# Bytes per token and d_model that a block keeps, by the bytes of a number in the residual stream.
# Memory traffic scales with it.
KEPT = {2: 32.2, 4: 42.25}


@dataclass(frozen=True)
class Constants:
    """What no datasheet gives. The first six were fitted, the others were fixed before the fit."""

    # Share of the dense bf16 peak that flash attention reaches on compute capability 8.x, and on
    # 9.0, whose new matrix instructions that kernel did not use.
    attention_a100: float = 0.318
    attention_h100: float = 0.18
    # Memory traffic per token, layer and d_model: forward and backward, nothing recomputed.
    block_bytes: float = 460
    tile: float = 1.7e6  # tokens x width at which matmuls reach half the speed of large ones
    overlap: float = 1.35  # q above
    hop: float = 4.5e-6  # seconds for each hop of a ring

    attention: float = 0.25  # the same on other devices: a guess between those two
    reachable: float = 0.7  # share of the peak that large matmuls reach, if devices.py has none
    link: float = 0.7  # share of a link's or network's bandwidth that collectives reach
    copy_bytes: float = 30  # per gathered parameter and microbatch: FSDP's copies, gradients
    update_bytes: float = 30  # per parameter of an update: Adam reads 4 fp32 numbers, writes 3
    pace: float = 1.0  # measured / predicted seconds of compute, set by `--calibrate`


@dataclass(frozen=True)
class Trainer:
    """What differs between training programs."""

    reduce_bytes: int = 4  # of a gradient on the network
    residual_bytes: int = 2  # of a number in the residual stream
    # Memory traffic of the loss for each logit, beside the matmuls. gpu_kernels/cross_entropy.py
    # reads a bf16 logit twice and writes its gradient over it.
    logit_bytes: int = 6
    # The same where tensor ranks share the vocabulary. tensor_parallel.py has no kernel: it reads a
    # bf16 logit and writes its gradient, and reads or writes fp32 ones 10 times in between.
    cut_logit_bytes: int = 44


OURS = Trainer()
# LLM Foundry: amp_bf16, FSDP's PURE; logits in bf16 and fp32, in both passes.
FOUNDRY = Trainer(reduce_bytes=2, residual_bytes=4, logit_bytes=24, cut_logit_bytes=24)


@dataclass(frozen=True)
class Fleet:
    """Equal devices in equal nodes, and how they share the model.

    Tensor-parallel ranks are neighbours, data-parallel ranks come next, pipeline stages are
    farthest apart. Raises UserError if the split is impossible.
    """

    device: Device
    devices: int = 1  # torch devices in all, one global rank each
    node_size: int = 8  # torch devices of a node
    network_gbs: float = 100.0  # of a node, each way, GB/s
    tp: int = 1  # tensor-parallel ranks: they share every matmul
    pp: int = 1  # pipeline stages
    interleave: int = 1  # pieces of the model on each stage; the trainer has one

    def __post_init__(self):
        for name in ("devices", "node_size", "network_gbs", "tp", "pp", "interleave"):
            value = getattr(self, name)
            require(value > 0, f"{name} must be more than 0, not {value}")

        replica = self.tp * self.pp  # ranks that hold one copy of the model
        split = f"tp {self.tp} x pp {self.pp} = {replica}"
        divides = self.devices % replica == 0
        require(divides, f"devices {self.devices} is not a multiple of {split}")
        in_node = self.tp <= self.node_size
        require(in_node, f"tp {self.tp} is more than the {self.node_size} devices of a node")
        no_peak = f"no bf16 peak known for {self.device.name}: there is nothing to plan with"
        require(self.device.bf16_tflops, no_peak)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.devices // (self.tp * self.pp)

    def bandwidth(self, n: int, stride: int) -> float:
        """Bytes/s of a ring of n ranks whose global ranks are `stride` apart.

        All rings that leave a node share its network.
        """
        ranks_in_node = max(1, min(n, self.node_size // stride))  # of this ring
        gbs = self.device.link_gbs or UNKNOWN_LINK
        if ranks_in_node < n:
            ranks_on_network = min(self.node_size, self.devices)
            gbs = min(gbs, self.network_gbs * ranks_in_node / ranks_on_network)
        return gbs * 1e9


class StepTime:
    """The seconds of one training step of `m` under `cfg` on `fleet`.

    c: default `Constants()`. stage: of the pipeline, whose microbatch the methods describe; default
    the last, which has the loss. `parts` is about all of them.
    Raises UserError if the fleet cannot split the model or the batch so.
    """

    def __init__(
        self,
        m: MPTConfig,
        cfg: TrainConfig,
        fleet: Fleet,
        c=None,
        trainer: Trainer = OURS,
        stage: int | None = None,
    ):
        rows = rows_per_rank(m, cfg, fleet)
        self.m = m
        self.cfg = cfg
        self.fleet = fleet
        self.c = c or Constants()
        self.trainer = trainer

        self.microbatches = math.ceil(rows / cfg.microbatch_size)
        self.tokens = rows / self.microbatches * m.max_seq_len  # of a microbatch

        self.stage_sizes = stage_sizes(m.n_layers, fleet.pp)
        self.stage = fleet.pp - 1 if stage is None else stage
        self.is_first = self.stage == 0
        self.is_last = self.stage == fleet.pp - 1
        self.layers = self.stage_sizes[self.stage]
        self.n_params = self.params_of_stage() / fleet.tp  # of a rank, before sharding

        self.mode = cfg.sharding_mode
        dp_ranks_per_node = max(1, fleet.node_size // fleet.tp)
        self.shard_ranks = min(fleet.dp, cfg.shard_ranks(fleet.dp, dp_ranks_per_node))

        # Share of the blocks whose matmuls, and whose norms and GELU, are computed twice.
        share = 1 / cfg.recompute_every
        checkpointing = cfg.activation_checkpointing
        self.matmuls_again = share if checkpointing == "full" else 0.0
        self.norms_again = share if checkpointing != "none" else 0.0

    def params_of_stage(self) -> float:
        """The parameters of the stage. Both ends have a tied embedding."""
        m = self.m
        parts = flops.params_by_part(m)
        outside = {name: parts.pop(name) for name in ("wte", "wpe", "lm_head")}
        n = sum(parts.values()) * self.layers / m.n_layers
        if self.is_first:
            n += outside["wte"] + outside["wpe"]
        if self.is_last:
            is_copied = m.tie_word_embeddings and not self.is_first
            n += outside["wte"] if is_copied else outside["lm_head"]
        return n

    # Compute of one microbatch on one stage

    def matmuls(self) -> float:
        """Linear layers and logits: three forwards each, and what is recomputed."""
        return self.matmul_flops() / self.matmul_rate() * self.c.pace

    def matmul_flops(self) -> float:
        """The FLOPs of one rank's matmuls with weights."""
        d = self.m.d_model
        part = memory.widths(self.m, self.fleet.tp)
        block = d * (2 * part.q + 2 * part.kv + 2 * part.hidden)
        weights = (3 + self.matmuls_again) * self.layers * block
        weights += 3 * part.vocab * d if self.is_last else 0
        return 2 * self.tokens * weights

    def matmul_rate(self) -> float:
        """The FLOP/s that matmuls reach on one device."""
        device = self.fleet.device
        reachable = device.bf16_tflops * 1e12 * (device.reachable or self.c.reachable)
        area = self.tokens * self.m.d_model / self.fleet.tp
        return reachable * area / (area + self.c.tile)

    def attention(self) -> float:
        """A causal flash kernel: 2 S d FLOPs a token forward, and 2.5 times that backward."""
        m = self.m
        forwards = 3.5 + self.matmuls_again
        forward = 2 * m.max_seq_len * m.d_model
        work = forward * forwards * self.layers * self.tokens / self.fleet.tp
        return work / self.attention_rate() * self.c.pace

    def attention_rate(self) -> float:
        """The FLOP/s that attention kernels reach on one device."""
        device = self.fleet.device
        generation = device.arch.split(".")[0]  # of CUDA's compute capability
        known = {"8": self.c.attention_a100, "9": self.c.attention_h100}
        return device.bf16_tflops * 1e12 * known.get(generation, self.c.attention)

    def memory(self) -> float:
        """Everything that reads and writes more than it computes.

        A third of a block's traffic is norms and residuals, which tensor parallelism divides only
        if it is sequence parallel. The constants were fitted to MPT's usual shape; for other
        shapes, traffic grows with the activations that a block keeps.
        """
        m, c, tp = self.m, self.c, self.fleet.tp
        usual = replace(m, expansion_ratio=4, kv_n_heads=None, qk_ln=False, clip_qkv=None)
        shape = sum(memory.saved_by_block(m).values()) / sum(memory.saved_by_block(usual).values())
        residual = KEPT[self.trainer.residual_bytes]
        traffic = c.block_bytes * shape * residual / KEPT[4] * (1 + self.norms_again / 3)
        share = 1 / tp if self.cfg.sequence_parallel else 1 / 3 + 2 / 3 / tp
        blocks = self.layers * m.d_model * traffic * share
        logit_bytes = self.trainer.cut_logit_bytes if tp > 1 else self.trainer.logit_bytes
        logits = memory.widths(m, tp).vocab * logit_bytes if self.is_last else 0

        gathers = not self.mode.reduces_late and self.shard_ranks > 1
        copies = c.copy_bytes * self.n_params * (1 if gathers else 1 / 3)  # else gradients only
        bandwidth = self.fleet.device.bandwidth_gbs * 1e9
        return (self.tokens * (blocks + logits) + copies) / bandwidth * c.pace

    def tensor(self) -> float:
        """What the tensor ranks that share a layer send each other."""
        seconds = 0.0
        for size, calls in self.tensor_traffic().items():
            seconds += calls * self.ring(size, self.fleet.tp, 1, 1)
        return seconds

    def tensor_traffic(self) -> dict[float, float]:
        """{bytes: how many all-gathers and reduce-scatters of this size in all}.

        An all-reduce counts as two of them. The residual stream goes around in bf16: in each layer
        two all-reduces forward and two backward, and one each for the embedding and the loss. With
        sequence parallelism, gathers and scatters of the same size take their place. A recomputed
        block repeats its forward up to down_proj's input. qk_ln sums the mean and the variance.
        Left out, since they are small: the statistics of the loss, the gradients of norms.
        """
        stream = 2 * self.tokens * self.m.d_model
        again = 3 if self.cfg.sequence_parallel else 2
        calls = (8 + again * self.norms_again) * self.layers
        calls += 2 if self.is_last else 0  # the loss
        if self.is_first:
            # The embedding; one data-parallel rank alone has its rows in fp32.
            calls += 2 if self.fleet.dp > 1 else 4
        traffic = {stream: calls}
        if self.m.qk_ln:
            norms = 1 if self.m.n_kv_heads == 1 else 2  # a single head of keys is not cut
            traffic[4 * self.tokens] = 4 * norms * (2 + self.norms_again) * self.layers
        return traffic

    def stages(self) -> float:
        """Messages to and from the stages before and after, which go both ways at the same time."""
        tp, pp = self.fleet.tp, self.fleet.pp
        if pp == 1:
            return 0.0
        bandwidth = self.fleet.bandwidth(pp, tp * self.fleet.dp) * self.c.link
        return self.bytes_to_stages() / bandwidth

    def bytes_to_stages(self) -> float:
        """Bytes that a rank sends other stages: hidden states to the next, gradients back, in bf16.

        It receives as many. Every tensor rank sends those of all tokens, or with sequence
        parallelism of its own. Interleaved, all pieces but the ends of the model send both.
        """
        tokens = self.tokens / (self.fleet.tp if self.cfg.sequence_parallel else 1)
        pieces = self.fleet.interleave
        messages = 2 * pieces - self.is_first - self.is_last
        return messages * 2 * tokens * self.m.d_model

    # Traffic

    def ring(self, size: float, n: int, stride: int, calls: int) -> float:
        """Seconds of `calls` all-gathers or reduce-scatters of `size` bytes in total.

        n, stride: as in `Fleet.bandwidth`. An all-reduce costs two of them.
        """
        if n == 1:
            return 0.0
        bandwidth = self.fleet.bandwidth(n, stride) * self.c.link
        return size * (n - 1) / n / bandwidth + calls * self.c.hop * (n - 1)

    def traffic(self) -> float:
        """What each microbatch sends: FSDP's gathers and reductions."""
        if self.mode.reduces_late:
            return 0.0
        tp = self.fleet.tp
        gathers = 2 if self.mode.frees_weights else 1  # again for the backward
        calls = self.layers + 1
        gather = self.ring(2 * self.n_params, self.shard_ranks, tp, calls)
        reduced = self.trainer.reduce_bytes * self.n_params
        return gathers * gather + self.ring(reduced, self.shard_ranks, tp, calls)

    def once(self) -> float:
        """What a step sends once, at its last microbatch."""
        tp, dp = self.fleet.tp, self.fleet.dp
        calls = self.layers + 1
        gradients = self.trainer.reduce_bytes * self.n_params
        if self.mode.reduces_late and self.mode.over == "all":  # ZERO1
            gathered = 2 * self.n_params
            return self.ring(gradients, dp, tp, calls) + self.ring(gathered, dp, tp, calls)

        # DDP and HYBRID_SHARD: several ranks hold the same weights, or the same shard of them.
        copies = dp // self.shard_ranks
        shard = gradients / self.shard_ranks
        return 2 * self.ring(shard, copies, tp * self.shard_ranks, calls)

    def exposed(self, compute: float, traffic: float) -> float:
        """Seconds that `traffic` adds to `compute`: what does not overlap."""
        q = self.c.overlap
        return (compute**q + traffic**q) ** (1 / q) - compute

    # The step

    def microbatch(self) -> dict[str, float]:
        """{part: seconds} of one microbatch on this stage."""
        parts = {
            "matmuls": self.matmuls(),
            "attention": self.attention(),
            "memory-bound": self.memory(),
            "tensor parallel": self.tensor(),
            "between stages": self.stages(),
        }
        parts["exposed traffic"] = self.exposed(sum(parts.values()), self.traffic())
        return parts

    def kinds_of_stages(self) -> list[tuple["StepTime", int]]:
        """[(a stage, how many are like it), ...], the slowest first."""
        ends = (0, self.fleet.pp - 1)
        numbers = {}  # {(blocks, the end that it is): the first such stage}
        counts = Counter()
        for number, size in enumerate(self.stage_sizes):
            kind = size, number if number in ends else None
            numbers.setdefault(kind, number)
            counts[kind] += 1

        kinds = []
        for kind, number in numbers.items():
            stage = StepTime(self.m, self.cfg, self.fleet, self.c, self.trainer, number)
            kinds.append((stage, counts[kind]))
        return sorted(kinds, key=lambda kind: -sum(kind[0].microbatch().values()))

    def parts(self) -> dict[str, float]:
        """{part: seconds}; "step" is their sum. Work is that of the slowest stage."""
        kinds = self.kinds_of_stages()
        slowest = kinds[0][0]
        microbatch = slowest.microbatch()
        parts = {name: self.microbatches * seconds for name, seconds in microbatch.items()}

        compute = sum(microbatch.values()) - microbatch["exposed traffic"]
        exposed_last = self.exposed(compute, slowest.traffic() + slowest.once())
        parts["exposed traffic"] += exposed_last - microbatch["exposed traffic"]

        on_all = sum(sum(stage.microbatch().values()) * n for stage, n in kinds)
        parts["bubble"] = (on_all - sum(microbatch.values())) / self.fleet.interleave
        update_bytes = self.c.update_bytes * slowest.n_params / self.shard_ranks
        parts["optimizer"] = update_bytes / (self.fleet.device.bandwidth_gbs * 1e9)
        return {**parts, "step": sum(parts.values())}


def rows_per_rank(m: MPTConfig, cfg: TrainConfig, fleet: Fleet) -> int:
    """Sequences of a batch on each data-parallel rank.

    Raises UserError if the fleet cannot split the model or the batch.
    """
    fix = "set --microbatch_size=NUMBER"
    require(cfg.microbatch_size != "auto", f"microbatch_size=auto is found by trying: {fix}")

    batch = cfg.global_batch_size
    rows, rest = divmod(batch, fleet.dp)
    dp_ranks = f"{fleet.dp} data-parallel ranks"
    require(rest == 0, f"global_batch_size {batch} is not a multiple of the {dp_ranks}")

    m.check_stages(fleet.pp)
    pieces = fleet.pp * fleet.interleave
    divides = fleet.interleave == 1 or m.n_layers % pieces == 0
    require(divides, f"n_layers {m.n_layers} is not a multiple of pp x interleave = {pieces}")
    m.check_tensor_ranks(fleet.tp, cfg.sequence_parallel)
    return rows


def tokens_per_second(
    m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c=None, trainer: Trainer = OURS
) -> float:
    """Tokens/s of all devices together. Arguments and errors as in `StepTime`."""
    seconds = StepTime(m, cfg, fleet, c, trainer).parts()["step"]
    return cfg.global_batch_size * m.max_seq_len / seconds


# --------------------------------------------------------------------------------------------------
# The program


@dataclass
class FleetArgs:
    """The devices."""

    device: str = "auto"  # mi250, h100, ...
    devices: int = 8  # torch devices in all
    node_size: int = 8  # torch devices of a node
    network: float = 100.0  # GB/s of a node, each way


@dataclass
class SplitArgs:
    """How the model is split over devices, beside tp and pp."""

    interleave: int = 1  # pieces of the model on each stage; the trainer has one


def main(argv: list[str]) -> None:
    """Print the seconds of a step by part for the config files and flags in argv."""
    m, cfg, args, split = config.load(argv, MPTConfig, TrainConfig, FleetArgs, SplitArgs)
    device = devices.by_name(args.device)
    fleet = Fleet(
        device, args.devices, args.node_size, args.network, cfg.tp, cfg.pp, split.interleave
    )
    parts = StepTime(m, cfg, fleet).parts()
    print(f"{flops.n_params(m):,} parameters, {args.devices} x {device.name}, {cfg.sharding}")
    for name, seconds in parts.items():
        print(f"  {name:<18}{1e3 * seconds:>12,.1f} ms {seconds / parts['step']:>8.1%}")
    print(f"{cfg.global_batch_size * m.max_seq_len / parts['step']:,.0f} tokens/s")


if __name__ == "__main__":
    config.run(main)
