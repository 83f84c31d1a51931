"""Published runs with tensor and pipeline parallelism, beside planning/step_time.py.

    python -m bench parallel_runs       the rows with their errors, in a second

bench/results/published_parallel.csv has the rows: Megatron-LM's tables and others, each with its
source. No constant is fitted to them. `set_aside` says by which rows nothing was chosen: every
third row of the first programs, and all of the programs that were found when the model was
complete. bench/planner.py makes the tables.
"""

import csv
from dataclasses import replace
from pathlib import Path

import config
import devices
import flops
from config import MPTConfig, TrainConfig
from planning import step_time
from planning.fleet import Fleet
from planning.step_time import Trainer

TABLE = Path(__file__).resolve().parent / "results/published_parallel.csv"
DEVICES = {
    "A100-80GB": devices.by_name("a100 80gb"),
    "H100-80GB": devices.by_name("h100"),
    "A800-80GB": replace(devices.by_name("a100 80gb"), link_gbs=200),
    "MI250X-GCD": devices.by_name("mi250x"),
    # A variant with slower memory, and a lower limit of power, which is not modelled.
    "H100-96GB-500W": replace(devices.by_name("h100"), memory_gb=96, bandwidth_gbs=2400),
}
# torchtitan's residual stream and gradients are like ours; its logits pass through memory in fp32,
# as LLM Foundry's do, and its checkpointing repeats a whole block.
TORCHTITAN = replace(step_time.OURS, logit_bytes=24, repeats_all=True)
# FlashAttention-2: shares of the peak from its paper (2307.08691) and the next one's (2407.08608).
FLASH2 = {"A800-80GB": 0.55, "H100-80GB": 0.35}
MEGATRON_CORE = replace(step_time.MEGATRON, score_bytes=0, score_bytes_again=0)
# Fused kernels, flash attention, bf16 sums that overlap; tensor ranks wait for each other.
INTERNLM = replace(step_time.NEMO, flash=0.0, hides_tensor=False, hides_stages=False)
PROGRAMS = {
    "Megatron-LM 2021": step_time.MEGATRON,
    "Megatron-LM 2022": step_time.MEGATRON,
    "Megatron-DeepSpeed": step_time.MEGATRON,
    "Megatron-DeepSpeed on LUMI": step_time.MEGATRON,
    "Megatron-Core": MEGATRON_CORE,
    "NeMo": step_time.NEMO,
    "InternLM": INTERNLM,
    "torchtitan": TORCHTITAN,
    "torchtitan eager": TORCHTITAN,
    "torchtitan compiled": TORCHTITAN,
    "DeepSpeed ZeRO-3": step_time.FOUNDRY,
}
# Its ZeRO-3 of 2021 gathered weights without overlap: not FSDP's way. Shown, but not counted.
NOT_OURS = "DeepSpeed ZeRO-3"


def read() -> list[dict]:
    """The rows, each with "run" = (model, config, fleet, trainer) and "measured".

    measured: tokens/s of all devices.
    """
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        m = model_of(row)
        row["run"] = m, train_of(row), fleet_of(row), trainer_of(row)
        row["measured"] = measured(row, m)
    return rows


def model_of(row: dict) -> MPTConfig:
    """The row's model. The three matrices of a SwiGLU count as two of 1.5 times the width."""
    d_model = int(row["d_model"])
    hidden = int(row["ffn_hidden"]) * (1.5 if row["swiglu"] == "1" else 1)
    return MPTConfig(
        d_model=d_model,
        n_layers=int(row["n_layers"]),
        n_heads=int(row["n_heads"]),
        kv_n_heads=int(row["n_kv_heads"]) if row["n_kv_heads"] else None,
        expansion_ratio=hidden / d_model,
        max_seq_len=int(row["seq_len"]),
        vocab_size=int(row["vocab"]),
    )


def train_of(row: dict) -> TrainConfig:
    """The row's layout."""
    return TrainConfig(
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        sharding=row["sharding"],
        microbatch_size=int(row["microbatch"]),
        global_batch_size=int(row["global_batch"]),
        activation_checkpointing=row["recompute"],
        sequence_parallel=row["sequence_parallel"] == "1",
        compile=row["program"] == "torchtitan compiled",
    )


def fleet_of(row: dict) -> Fleet:
    """The row's devices. Gb/s / 8 are GB/s."""
    network = float(row["network_gbit_per_node"]) / 8
    n, node = int(row["n_devices"]), int(row["devices_per_node"])
    split = int(row["tp"]), int(row["pp"]), int(row["interleave"])
    return Fleet(DEVICES[row["device"]], n, node, network, *split)


def trainer_of(row: dict) -> Trainer:
    """The program of the row."""
    trainer = PROGRAMS[row["program"]]
    if row["program"] == "Megatron-Core":
        return replace(trainer, flash=FLASH2[row["device"]])
    return trainer


def measured(row: dict, m: MPTConfig) -> float:
    """Tokens/s of all devices."""
    value = float(row["value"])
    if row["metric"] == "step_s":
        return int(row["global_batch"]) * m.max_seq_len / value
    if row["metric"] == "tokens_per_s_per_device":
        return value * int(row["n_devices"])
    per_token = flops.train_flops_per_token(m, "megatron_recompute")  # metric: tflops_hardware
    return value * 1e12 * int(row["n_devices"]) / per_token


def main(argv: list[str]) -> None:
    """Print every row with its error."""
    config.arguments(argv, "")
    for row in read():
        rate = step_time.tokens_per_second(*row["run"][:3], trainer=row["run"][3])
        error = f"{rate / row['measured'] - 1:+.1%}"
        print(f"{error:>8} {row['source'][:30]} {row['table']}: tp {row['tp']} x pp {row['pp']}")


if __name__ == "__main__":
    config.run(main)
