"""The seconds of one training step, part by part, in closed form: how fast will a run be?

    step = n x one microbatch on the slowest stage
           + one microbatch on each of the other stages: the bubble
           + what happens once a step

n microbatches pass through p pipeline stages. If those are equally fast, the bubble is a share of
(p - 1) / (n + p - 1) of that time. One microbatch on one stage takes

    compute   matmuls     FLOPs / (reachable peak x area / (area + tile)),
                          area = rows x columns of the product on this device
              attention   FLOPs of a causal flash kernel / (the kernels' share of the peak x peak)
              memory      bytes of norms, act, residuals, logits and FSDP's copies / bandwidth
              tensor      what tensor ranks send each other, which no computation hides
              stages      what stages send each other, which the trainer does not hide either
    traffic   FSDP's gathers and reductions, each: bytes x (n - 1) / n / bandwidth + hop x (n - 1)
    together  (compute^q + traffic^q)^(1/q): q = 1 overlaps nothing, a large q everything

A group of ranks that spans nodes gets its share of a node's network, if that is slower than the
links inside. `Constants` holds the fitted and the fixed constants; tests/planning/test_published.py
compares them with published runs, and bench/results/planner.md has the errors.

Run `python -m planning.step_time configs/mpt7b.py --device=mi250 --devices=8`.
"""

import copy
import math
from dataclasses import dataclass, replace

import config
import flops
import program
from config import MPTConfig, TrainConfig, blocks_of, stage_sizes
from devices import Device
from planning import memory
from planning.fleet import Fleet, FleetArgs, fleet_of

# MPT's usual block, to which the constants below were fitted.
USUAL = {
    "expansion_ratio": 4,
    "ffn_type": "mptmlp",
    "ffn_act_fn": "gelu",
    "kv_n_heads": None,
    "qk_ln": False,
    "qk_gn": False,
    "clip_qkv": None,
}


@dataclass(frozen=True)
class Constants:
    """What no datasheet gives. The first six were fitted, the others were fixed before the fit.

    The fit is to runs of LLM Foundry of 2023: Triton's flash attention of that year, nothing
    compiled. What was that trainer's own is in tests/planning/test_published.py.
    """

    # Share of the dense bf16 peak that flash attention reaches on compute capability 8.x, and on
    # 9.0, whose new matrix instructions that kernel did not use.
    attention_a100: float = 0.318
    attention_h100: float = 0.18
    # Memory traffic per token, layer and d_model: forward and backward, nothing recomputed. Fitted
    # were 460 for LLM Foundry's residual stream in fp32, with which a block keeps 42.25 bytes per
    # token and d_model. Traffic scales with them: in bf16 a block keeps 32.2.
    block_bytes: float = 460 * 32.2 / 42.25
    tile: float = 2.4e6  # elements of a product that is computed at half the speed of large ones
    overlap: float = 1.35  # q above
    hop: float = 5.8e-6  # seconds for each hop of a ring

    attention: float = 0.25  # the same on other devices: a guess between those two
    # Memory traffic of compiled blocks / eager ones. Set so that compiling makes torchtitan's Llama
    # of 8B 16 % faster, as published (8 and 128 H100, 2024). MPT's blocks have fewer small
    # operations to fuse, so it may gain less.
    compiled: float = 0.35
    reachable: float = 0.7  # share of the peak that large matmuls reach, if devices.py has none
    link: float = 0.7  # share of a link's or network's bandwidth that collectives reach
    copy_bytes: float = 30  # per gathered parameter and microbatch: FSDP's copies, gradients
    update_bytes: float = 30  # per parameter of an update: Adam reads 4 fp32 numbers, writes 3
    pace: float = 1.0  # measured / predicted seconds of compute, set by `--calibrate`
    reduce_bytes: int = 4  # of a gradient on the network
    # Memory traffic of the loss for each logit, beside the matmuls. fast/cross_entropy.py
    # reads a bf16 logit twice and writes its gradient over it.
    logit_bytes: int = 6
    # The same where tensor ranks share the vocabulary. tensor_parallel.py has no kernel: it reads a
    # bf16 logit and writes its gradient, and reads or writes fp32 ones 10 times in between.
    cut_logit_bytes: int = 44
    repeats_all: bool = False  # full checkpointing repeats a block's last matmul, too


class StepTime:
    """The seconds of one training step of `m` under `cfg` on `fleet`.

    stage: of the pipeline, whose microbatch the methods describe; default
    the last, which has the loss. `parts` is about all of them.
    Raises UserError if the fleet cannot split the model or the batch so.
    """

    def __init__(
        self,
        m: MPTConfig,
        cfg: TrainConfig,
        fleet: Fleet,
        c: Constants = Constants(),
        stage: int | None = None,
    ):
        fleet.check_split(cfg.tp, cfg.pp)
        cfg = with_shard_size(cfg, fleet)
        self.shard_ranks, rows = memory.layout(m, cfg, fleet.devices)
        self.m = m
        self.cfg = cfg
        self.fleet = fleet
        self.c = c

        self.dp = fleet.devices // (cfg.tp * cfg.pp)
        self.microbatches = math.ceil(rows / memory.microbatch_of(cfg))
        self.tokens = rows / self.microbatches * m.max_seq_len  # of a microbatch
        self.traffic_of_block = self.block_traffic()  # bytes per token and d_model
        self.n_params_by_part = flops.params_by_part(m)

        self.stage_sizes = stage_sizes(m.n_layers, cfg.pp)
        self.mode = cfg.sharding_mode

        # Share of the blocks whose matmuls, and whose norms and activation, are computed twice.
        share = 1 / cfg.recompute_every
        checkpointing = cfg.activation_checkpointing
        self.matmuls_again = share if checkpointing == "full" else 0.0
        self.norms_again = share if checkpointing != "none" else 0.0
        self.set_stage(cfg.pp - 1 if stage is None else stage)

    def set_stage(self, stage: int) -> None:
        """Set what depends on the stage: its blocks and its parameters."""
        m, cfg = self.m, self.cfg
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == cfg.pp - 1
        self.layers = self.stage_sizes[stage]
        self.n_params = self.params_of_stage() / cfg.tp  # of a rank, before sharding
        self.n_trained = self.n_params
        if cfg.lora_rank:
            self.n_trained = cfg.lora_rank * sum(self.adapter_widths())
            self.n_params += self.n_trained
        # Blocks of this stage with a backward: below the first adapter there is none.
        first = flops.first_backward(m, cfg)
        own = blocks_of(m.n_layers, stage, cfg.pp)
        self.backward_layers = len(range(max(first, own.start), own.stop))
        self.is_lowest_backward = first in own

    def params_of_stage(self) -> float:
        """The parameters of the stage. Both ends have a tied embedding."""
        m = self.m
        parts = dict(self.n_params_by_part)
        outside = {name: parts.pop(name) for name in ("wte", "wpe", "lm_head")}
        n = sum(parts.values()) * self.layers / m.n_layers
        if self.is_first:
            n += outside["wte"] + outside["wpe"]
        if self.is_last:
            is_copied = m.tie_word_embeddings and not self.is_first
            n += outside["wte"] if is_copied else outside["lm_head"]
        return n

    def adapter_widths(self) -> tuple[int, int]:
        """How many numbers of a token the adapters' A read on this stage, and their B write."""
        if not self.cfg.lora_rank:
            return 0, 0
        adapted = flops.adapted_blocks(self.m, self.cfg)
        own = blocks_of(self.m.n_layers, self.stage, self.cfg.pp)
        n_blocks = sum(i in adapted for i in own)
        ends = memory.adapter_ends(self.m, self.cfg.tp)
        names = self.m.adapted_layers(self.cfg.lora_targets)
        read, written = zip(*(ends[name] for name in names), strict=True)
        return n_blocks * sum(read), n_blocks * sum(written)

    # Compute of one microbatch on one stage

    def matmuls(self) -> float:
        """Linear layers and logits: three forwards each, and what is recomputed.

        A product of few elements leaves a part of the device idle at its end, as long as a tile of
        it takes. So tensor ranks lose speed where they share the features out, not where they share
        the features in. A weight's gradient has no tokens: kernels cut its sum instead. It counts
        as the mean of the forward and the input's gradient.
        """
        useful = wasted = 0.0
        for n_in, n_out, layers, again in self.linear_layers():
            useful += (3 + again) * self.tokens * n_in * n_out * layers
            wasted += self.c.tile * ((1.5 + again) * n_in + 1.5 * n_out) * layers
        device = self.fleet.device
        peak = device.bf16_tflops * 1e12 * (device.reachable or self.c.reachable)  # of large ones
        return self.matmul_flops() / peak * (useful + wasted) / useful * self.c.pace

    def matmul_flops(self) -> float:
        """The FLOPs of one rank's matmuls with weights.

        Where frozen weights have no gradient, tensor ranks share all evenly.
        """
        per_token = 0.0
        if not self.cfg.lora_rank:
            for n_in, n_out, layers, again in self.linear_layers():
                per_token += 2 * n_in * n_out * layers * (3 + again)
            return self.tokens * per_token

        if self.is_last:
            per_token += 2 * 2 * self.m.vocab_size * self.m.d_model
        for i in blocks_of(self.m.n_layers, self.stage, self.cfg.pp):
            for part, passes in flops.block_by_pass(self.m, self.cfg, i).items():
                if part not in flops.ATTENTION:
                    per_token += sum(passes.values())
        return self.tokens * per_token / self.cfg.tp

    def linear_layers(self) -> list[tuple[int, int, int, float]]:
        """[(features in, features out, how many, forwards again)] of one tensor rank.

        Activation checkpointing ends before a block's last matmul, whose output no backward needs,
        unless the trainer repeats all.
        """
        d = self.m.d_model
        part = memory.widths(self.m, self.cfg.tp)
        again = self.matmuls_again
        n_up = 2 if self.m.ffn_type == "mptglu" else 1  # up_proj, gate_proj
        layers = [
            (d, part.q + 2 * part.kv, self.layers, again),
            (part.q, d, self.layers, again),
            (d, part.hidden, n_up * self.layers, again),
            (part.hidden, d, self.layers, again * self.c.repeats_all),
        ]
        return [*layers, (d, part.vocab, 1, 0.0)] if self.is_last else layers

    def attention(self) -> float:
        """A causal flash kernel: 2 S d FLOPs a token forward, and 2.5 times that backward.

        It skips what is hidden. Of a window of k keys the first queries see fewer, on average
        k - k^2 / 2 S; without a window that is S / 2.
        """
        m, device = self.m, self.fleet.device
        forwards = self.layers + (2.5 + self.matmuls_again) * self.backward_layers
        seen = m.keys_seen * (1 - m.keys_seen / (2 * m.max_seq_len))
        work = 4 * seen * m.d_model * forwards * self.tokens / self.cfg.tp
        share = device.attention or attention_share(device, self.c)
        return work / (device.bf16_tflops * 1e12 * share) * self.c.pace

    def memory(self) -> float:
        """Everything that reads and writes more than it computes.

        A third of a block's traffic is norms and residuals, which tensor parallelism divides only
        if it is sequence parallel.
        """
        m, c, tp = self.m, self.c, self.cfg.tp
        traffic = self.traffic_of_block * (1 + self.norms_again / 3)
        share = 1 / tp if self.cfg.sequence_parallel else 1 / 3 + 2 / 3 / tp
        layers = self.backward_layers + (self.layers - self.backward_layers) / 3  # forward alone
        blocks = layers * m.d_model * traffic * share
        # fsdp_train.py compiles nothing with tp or pp.
        if self.cfg.compile is True and tp * self.cfg.pp == 1:
            blocks *= c.compiled
        logit_bytes = self.c.cut_logit_bytes if tp > 1 else self.c.logit_bytes
        logits = memory.widths(m, tp).vocab * logit_bytes if self.is_last else 0

        gathers = not self.mode.reduces_late and self.shard_ranks > 1
        copies = c.copy_bytes * (2 / 3 * self.n_params * gathers + self.n_trained / 3)  # gradients
        bandwidth = self.fleet.device.bandwidth_gbs * 1e9
        of_tokens = blocks + logits + self.adapter_bytes()
        return (self.tokens * of_tokens + copies) / bandwidth * c.pace

    def block_traffic(self) -> float:
        """Memory traffic of a block per token and d_model, if nothing is recomputed.

        For other blocks than the usual one, traffic grows with the activations that a block keeps.
        """
        m = self.m
        if all(getattr(m, name) == value for name, value in USUAL.items()):
            return self.c.block_bytes
        kept = sum(memory.saved_by_block(m).values())
        usual = sum(memory.saved_by_block(replace(m, **USUAL)).values())
        return self.c.block_bytes * (kept / usual)

    def adapter_bytes(self) -> float:
        """Memory traffic of the adapters of this stage per token, as counted on real operations.

        Forward: A reads the layer's input; B writes its product, which is added to the layer's
        output. Backward: the gradient of the output is read twice, and the input once; the gradient
        of the input is written, and added. Numbers of 2 bytes; the rank is small beside them.
        """
        read, written = self.adapter_widths()
        forward, backward = read + 4 * written, 5 * read + 2 * written
        again = self.matmuls_again * read + self.norms_again * 4 * written
        return 2 * (forward + backward + again)

    def tensor(self) -> float:
        """What the tensor ranks that share a layer send each other."""
        traffic = self.tensor_traffic().items()
        return sum(calls * self.ring(size, self.cfg.tp, 1, 1) for size, calls in traffic)

    def tensor_traffic(self) -> dict[float, float]:
        """{bytes: how many all-gathers and reduce-scatters of this size in all}.

        An all-reduce counts as two of them. The residual stream goes around in bf16: in each layer
        two all-reduces forward and two backward, and one each for the embedding and the loss. With
        sequence parallelism, gathers and scatters of the same size take their place. A recomputed
        block repeats its forward up to down_proj's input, or all of it. qk_ln sums the mean and the
        variance, or with RMSNorm the squares alone. No gradient goes below the first adapter. Left
        out, as they are small: the statistics of the loss, the gradients of norms, what adapters
        send, the gradient of a tied embedding between the first stage and the last.
        """
        stream = 2 * self.tokens * self.m.d_model
        again = 3 if self.cfg.sequence_parallel else 2
        if self.c.repeats_all:
            again = 4
        calls = 4 * self.layers + (4 + again * self.norms_again) * self.backward_layers
        if self.cfg.lora_rank and self.is_lowest_backward:
            calls -= 2
        calls += 2 if self.is_last else 0  # the loss
        if self.is_first:
            # The embedding; one data-parallel rank alone has its rows in fp32, if they train.
            calls += 2 if self.dp > 1 or self.cfg.lora_rank else 4
        traffic = {stream: calls}
        if self.m.qk_ln:
            norms = 1 if self.m.n_kv_heads == 1 else 2  # a single head of keys is not cut
            passes = self.layers + (1 + self.norms_again) * self.backward_layers
            statistics = 1 if self.m.norm_type.endswith("rmsnorm") else 2
            traffic[4 * self.tokens] = 2 * statistics * norms * passes
        return traffic

    def stages(self) -> float:
        """Messages to and from the stages before and after, which go both ways at the same time."""
        tp, pp = self.cfg.tp, self.cfg.pp
        if pp == 1:
            return 0.0
        bandwidth = self.fleet.bandwidth(pp, tp * self.dp) * self.c.link
        return self.bytes_to_stages() / bandwidth

    def bytes_to_stages(self) -> float:
        """Bytes that a rank sends other stages: hidden states to the next, gradients back, in bf16.

        It receives as many. Every tensor rank sends those of all tokens, or with sequence
        parallelism of its own.
        """
        tokens = self.tokens / (self.cfg.tp if self.cfg.sequence_parallel else 1)
        messages = 2 - self.is_first - self.is_last
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
        tp = self.cfg.tp
        gathers = 2 if self.mode.frees_weights else 1  # again for the backward
        calls = self.layers + 1
        gather = self.ring(2 * self.n_params, self.shard_ranks, tp, calls)
        reduced = self.c.reduce_bytes * self.n_trained
        return gathers * gather + self.ring(reduced, self.shard_ranks, tp, calls)

    def once(self) -> float:
        """What a step sends once, at its last microbatch."""
        tp, dp = self.cfg.tp, self.dp
        calls = self.layers + 1
        gradients = self.c.reduce_bytes * self.n_trained
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
        """[(a stage, how many are like it), ...]."""
        ends = (0, self.cfg.pp - 1)
        kinds = {}  # {(blocks, the end that it is): numbers of these stages}
        for number, size in enumerate(self.stage_sizes):
            kinds.setdefault((size, number if number in ends else None), []).append(number)
        found = []
        for numbers in kinds.values():
            stage = copy.copy(self)
            stage.set_stage(numbers[0])
            found.append((stage, len(numbers)))
        return found

    def parts(self) -> dict[str, float]:
        """{part: seconds}; "step" is their sum. Work is that of the slowest stage."""
        kinds = [(stage.microbatch(), stage, n) for stage, n in self.kinds_of_stages()]
        kinds.sort(key=lambda kind: -sum(kind[0].values()))
        microbatch, slowest, _ = kinds[0]
        parts = {name: self.microbatches * seconds for name, seconds in microbatch.items()}

        # What is sent once is sent beside the last microbatch.
        compute = sum(microbatch.values()) - microbatch["exposed traffic"]
        with_sums = slowest.exposed(compute, slowest.traffic() + slowest.once())
        parts["exposed traffic"] += with_sums - microbatch["exposed traffic"]

        on_all = sum(sum(seconds.values()) * n for seconds, _, n in kinds)
        parts["bubble"] = on_all - sum(microbatch.values())
        update_bytes = self.c.update_bytes * slowest.n_trained / self.shard_ranks
        parts["optimizer"] = update_bytes / (self.fleet.device.bandwidth_gbs * 1e9)
        return {**parts, "step": sum(parts.values())}


def attention_share(device: Device, c: Constants) -> float:
    """The share of the bf16 peak that attention kernels reach, if nobody has measured it."""
    generation = device.arch.split(".")[0]  # of CUDA's compute capability
    known = {"8": c.attention_a100, "9": c.attention_h100}
    return known.get(generation, c.attention)


def with_shard_size(cfg: TrainConfig, fleet: Fleet) -> TrainConfig:
    """cfg with its shard_size filled in: of HYBRID_SHARD a node's ranks unless set, else 0."""
    size = 0
    if cfg.sharding_mode.over == "group":
        of_node = max(1, fleet.node_size // cfg.tp)
        size = cfg.shard_size or min(of_node, fleet.devices // (cfg.tp * cfg.pp))
    return cfg if size == cfg.shard_size else replace(cfg, shard_size=size)


def tokens_per_second(
    m: MPTConfig, cfg: TrainConfig, fleet: Fleet, c: Constants = Constants()
) -> float:
    """Tokens/s of all devices together. Arguments and errors as in `StepTime`."""
    seconds = StepTime(m, cfg, fleet, c).parts()["step"]
    return cfg.global_batch_size * m.max_seq_len / seconds


# --------------------------------------------------------------------------------------------------
# The program


def main(argv: list[str]) -> None:
    """Print the seconds of a step by part for the config files and flags in argv."""
    m, cfg, args = config.load(flops.with_base(argv), MPTConfig, TrainConfig, FleetArgs)
    fleet = fleet_of(args)
    parts = StepTime(m, cfg, fleet).parts()
    on = f"{args.devices} x {fleet.device.name}"
    print(f"{flops.n_params(m):,} parameters, {on}, {cfg.sharding}")
    rows = [
        (name, f"{1e3 * seconds:,.1f}", f"{seconds / parts['step']:.1%}")
        for name, seconds in parts.items()
    ]
    print(program.table(["", "ms", "share"], rows))
    print(f"{cfg.global_batch_size * m.max_seq_len / parts['step']:,.0f} tokens/s")


if __name__ == "__main__":
    program.run(main)
