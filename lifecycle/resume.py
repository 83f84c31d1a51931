"""Where a run begins: at the newest checkpoint that is sound and fits it, or at step 0.

    runs/demo/checkpoints/step-600             sound: the run resumes here
    runs/demo/checkpoints/step-800.damaged     a file is missing, or its checksum differs
    runs/demo/checkpoints/step-1000.replaced   trained on steps that are now in --skip_steps

A checkpoint that cannot be used is renamed, so that its step can be saved again. It is never
deleted. All ranks find the same checkpoint.

The same command always goes on: --resume=CHECKPOINT begins there unless this run has saved a
checkpoint since it did. A finished run says so and changes nothing; --resume=again moves it aside.

Run `python -m lifecycle.resume runs/demo` to check all checkpoints of a run.
"""

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

import config
import optim
import processes
import program
from checkpoint import find, latest, number, numbered, verify
from config import MPTConfig, TrainConfig, step_ranges
from lifecycle import runlog
from program import UserError, require
from storage import checkpoint_files
from storage.checkpoint_files import (
    SAME_MODEL,
    comparable,
    different_functions,
    differing,
    read_meta,
)

# What must not change when a run is resumed, beside the model: the order of the data.
SAME_RUN = ["seed", "global_batch_size"]
SAME_ADAPTERS = "lora_rank lora_alpha rslora lora_targets lora_last_blocks lora_train".split()
# What may change when a run is resumed, but would have made another run of a finished one. A
# resumed run says what has changed of the first ones.
OPTIMIZER_SETTINGS = [
    *optim.RATE_SETTINGS,
    *"beta1 beta2 adam_eps decoupled_weight_decay grad_clip z_loss".split(),
]
SAME_TRAINING = [
    *OPTIMIZER_SETTINGS,
    *"init_from precision emb_pdrop attn_pdrop resid_pdrop lora_dropout".split(),
]


@dataclass
class Start:
    """Where a run begins: in a checkpoint, or anew, perhaps with the weights of --init_from."""

    checkpoint: Path | None
    meta: dict  # meta.json of the checkpoint: its settings; empty if there is none
    init_from: str

    @property
    def step(self) -> int:
        """The first step to run, counted from 0: this is also how many are done already."""
        return self.meta.get("step", 0)

    @property
    def precision(self) -> str | None:
        """What the checkpoint was trained in."""
        return self.meta.get("precision")

    @property
    def skip_steps(self) -> str:
        """The --skip_steps that the checkpoint was trained with."""
        return self.meta.get("skip_steps", "")

    def seed_to_draw(self, cfg: TrainConfig) -> int | None:
        """The seed of new weights, or None if weights will be loaded."""
        return None if self.checkpoint or self.init_from else cfg.seed


def find_start(model_cfg: MPTConfig, cfg: TrainConfig, data_fingerprint: str) -> Start:
    """Choose the checkpoint to resume from, if any; check that it is this run's. A collective.

    UserError if it is of another model or data, or if none can be chosen: see `choose`.
    """
    path = choose(cfg)
    if path is None:
        return Start(None, {}, cfg.init_from)
    meta = read_meta(path)
    check_same(path, meta, model_cfg, cfg, data_fingerprint)
    return Start(path, meta, cfg.init_from)


def choose(cfg: TrainConfig) -> Path | None:
    """The newest checkpoint that is fit for use, or None to start a new run. A collective.

    Newer ones that are unfit are renamed. A finished run is moved aside if cfg.resume is "again".
    UserError if cfg.resume names an unfit checkpoint, or is "never" and there is one.
    """
    decides = processes.rank_zero_decides
    is_named = cfg.resume not in ("auto", "again", "never")
    asked = cfg
    if decides(lambda: has_gone_on(cfg)):
        cfg = replace(cfg, resume="auto")
    elif is_named:
        return named_checkpoint(cfg)
    chosen, unfit = newest_fit(cfg)
    asks_again = chosen and cfg.resume == "again"
    begins_again = asks_again and decides(lambda: read_meta(chosen)["step"]) >= cfg.max_steps
    if begins_again:
        decides(functools.partial(require_not_imported, cfg.run_dir))
    is_damaged = any(kind == "damaged" for _, kind, _ in unfit)
    if is_damaged and not chosen and was_restarted():
        path, _, reason = unfit[0]
        raise UserError(
            f"{cfg.run_dir} has no sound checkpoint any more ({path} {reason}), and an automatic "
            "restart does not begin a new run: put a sound one there, or give the command again by "
            "hand to start at step 0",
            on_all_ranks=True,
        )
    lines = []
    for path, kind, reason in unfit:
        new_name = decides(functools.partial(checkpoint_files.put_aside, path, kind))
        lines.append(f"{path} {reason}: it is kept as {new_name}")
    if is_named and not chosen:
        chosen = named_checkpoint(asked)
    if begins_again:
        moved_to = decides(lambda: runlog.put_aside(cfg.run_dir))
        lines.append(f"the finished run is kept in {moved_to}")
        chosen = None
    if dist.get_rank() == 0:
        action = f"resuming from {chosen.name}" if chosen else "starting a new run"
        for line in lines:
            print(f"{line}, {action}", flush=True)
    return chosen


def newest_fit(cfg: TrainConfig) -> tuple[Path | None, list[tuple[Path, str, str]]]:
    """The newest checkpoint that is fit, and (path, kind, reason) of the newer ones. A collective.

    UserError if there is any checkpoint and cfg.resume is "never".
    """
    unfit = []
    folder = Path(cfg.run_dir) / "checkpoints"
    for path in processes.rank_zero_decides(lambda: numbered(folder)[::-1]):
        require(
            cfg.resume != "never",
            f"{cfg.run_dir} holds {path}: set --resume=auto to resume it, or another --run_dir",
        )
        kind, reason = why_unfit(path, cfg)
        if not kind:
            return path, unfit
        unfit.append((path, kind, reason))
    return None, unfit


def require_not_imported(run_dir: str) -> None:
    """UserError if a run began from an imported step-0, which a new run there would not have."""
    imported = Path(run_dir) / "checkpoints" / "step-0"
    require(
        not imported.exists(),
        f"{run_dir} began from weights that were imported, which a new run would lose: "
        "import them again into another --run_dir",
    )


def was_restarted() -> bool:
    """Did torchrun or SLURM start this program before, with the same command?"""
    counts = [program.read_number(f"{by}_RESTART_COUNT", 0) for by in ("TORCHELASTIC", "SLURM")]
    return any(counts)


def has_gone_on(cfg: TrainConfig) -> bool:
    """Has the run saved a checkpoint since a start did what cfg.resume asks for?

    Then the same command, given again, means: go on.
    """
    newest = latest(cfg.run_dir)
    if not newest:
        return False
    if cfg.resume in ("auto", "again", "never"):
        return was_restarted()
    # Earlier versions did not record what was asked for.
    launches = runlog.read_launches(cfg.run_dir)
    firsts = [row.get("first_step", 0) for row in launches if row.get("resume") == cfg.resume]
    if was_restarted() and not firsts:
        firsts = [number(find(cfg.resume))]
    return any(number(newest) > first for first in firsts)


def named_checkpoint(cfg: TrainConfig) -> Path:
    """The checkpoint that cfg.resume names. A collective.

    UserError if it is unfit, or the run holds a later one.
    """

    def find_it():
        chosen = find(cfg.resume)
        newest = next(reversed(numbered(Path(cfg.run_dir) / "checkpoints")), None)
        is_later = newest and number(newest) > read_meta(chosen)["step"]
        require(
            not is_later,
            f"{cfg.run_dir} holds {newest}, which is later than {chosen}: set --resume=auto to go "
            f"on from there, or another --run_dir{' and another --remote' * bool(cfg.remote)}",
        )
        return chosen

    path = processes.rank_zero_decides(find_it)
    _, reason = why_unfit(path, cfg)
    require(not reason, f"{path} {reason}: set --resume to another one")
    return path


def why_unfit(path: Path, cfg: TrainConfig) -> tuple[str, str]:
    """Why a checkpoint cannot be used: the ending of its new name, and the reason in words.

    Both are empty if it can be used. A collective.
    """
    if damage := verify(path):
        return "damaged", f"is damaged ({damage})"
    if processes.rank_zero_decides(lambda: has_trained_on(read_meta(path), cfg.skip_steps)):
        return "replaced", f"was trained on steps that --skip_steps={cfg.skip_steps} now skips"
    return "", ""


def has_trained_on(meta: dict, skip_steps: str) -> bool:
    """Was a checkpoint trained on any of the steps `skip_steps`? meta: its meta.json."""
    skipped_then = step_ranges(meta.get("skip_steps", ""))
    for skipped_now in step_ranges(skip_steps):
        for step in range(skipped_now.start, min(skipped_now.stop, meta["step"])):
            if not any(step in r for r in skipped_then):
                return True
    return False


def check_same(
    path, meta: dict, model_cfg: MPTConfig, cfg: TrainConfig, data_fingerprint: str
) -> None:
    """UserError unless the checkpoint is of this model, this data and this order of the data.

    path: where it is, on this disk or in a store.
    """
    # A setting that did not exist when the checkpoint was saved has its default.
    saved_cfg = config.from_dict(MPTConfig, meta, f"{path}/meta.json")
    saved = comparable(asdict(TrainConfig()) | asdict(saved_cfg) | meta)
    ours = comparable(asdict(model_cfg) | asdict(cfg))
    fix = f"Use the same settings, or another --run_dir{' and another --remote' * bool(cfg.remote)}"

    fingerprint = saved["data_fingerprint"]
    is_imported = str(fingerprint).startswith("imported from")
    if is_imported:  # not trained yet: rows may be packed, or have another length
        differences = different_functions(saved_cfg, model_cfg)
    else:
        differences = differing(SAME_MODEL, saved, ours)
    require(not differences, f"{path} is of another model: {', '.join(differences)}. {fix}")

    holds_adapters = bool(meta.get("lora_rank"))
    base = program.shell(f"--init_from={Path(path).parent.parent}")
    require(
        holds_adapters or not is_imported,
        f"{path} was {fingerprint}, not trained here: begin with {base} and another --run_dir",
    )

    for settings in (saved, ours):
        settings["lora_targets"] = model_cfg.adapted_layers(settings["lora_targets"])
    both = saved["lora_rank"] and ours["lora_rank"]
    differences = differing(SAME_ADAPTERS if both else ["lora_rank"], saved, ours)
    require(
        not differences,
        f"{path} was trained with other adapters: {', '.join(differences)}. {fix}",
    )
    if is_imported:
        return  # adapters begin at step 0, on any data

    differences = differing(SAME_RUN, saved, ours)
    if fingerprint != data_fingerprint:
        differences.append(f"data {fingerprint} (here {data_fingerprint})")
    require(
        not differences,
        f"{path} was trained on other data or in another order: {', '.join(differences)}. {fix}",
    )


def finished(start: Start, model_cfg: MPTConfig, cfg: TrainConfig) -> str:
    """What to say of a run that has all its steps. UserError if cfg would have made another one."""
    anew = "set --resume=again, which keeps that run, or another --run_dir"
    saved = asdict(model_cfg) | asdict(TrainConfig()) | start.meta
    ours = asdict(model_cfg) | asdict(cfg)
    if cfg.precision == "auto":
        ours["precision"] = saved["precision"]
    if cfg.lora_rank:  # its base may have moved: `load.base_of` has compared the weights
        ours["init_from"] = saved["init_from"]
    differences = differing(SAME_TRAINING, saved, ours)
    if differences:
        raise UserError(
            f"{start.checkpoint} is of another run: {', '.join(differences)}. To train anew {anew}",
            on_all_ranks=True,
        )
    return (
        f"{cfg.run_dir}: finished, {start.checkpoint} has all {cfg.max_steps} steps. For more of "
        f"them raise --max_steps; to train anew {anew}"
    )


def demonstrate(argv) -> None:
    """Check every checkpoint of a run folder; under torchrun the ranks share the reading.

    Exit status: 0 if all are sound, 1 if one is not, 2 if there is none.
    """
    program.arguments(argv, "RUN_DIR")
    world = processes.start("cpu")
    paths = processes.rank_zero_decides(lambda: numbered(Path(argv[0]) / "checkpoints"))
    require(paths, f"no checkpoint in {argv[0]!r}: give a run folder, such as runs/demo")
    states = []
    for path in paths:
        try:
            states.append(verify(path) or "sound")
        except (UserError, OSError) as error:
            states.append(str(error))
        if world.global_rank == 0:
            print(f"{path}: {states[-1]}", flush=True)
    dist.barrier()
    if set(states) != {"sound"}:
        raise SystemExit(1)


if __name__ == "__main__":
    processes.run(demonstrate)
