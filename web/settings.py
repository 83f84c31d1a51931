"""What a job trains: its lines, its tokens, and the settings of its training.

The worker asks for them when a job begins. Before that, `preview` says what a job would be. The
same functions compute it, in a process of its own:

    echo '["JOBS/jobs/.preview"]' | python -m web.settings 300
"""

import contextlib
import math
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np

import config
import program
from config import MPTConfig, TrainConfig
from lifecycle.resume import SAME_ADAPTERS
from program import UserError, one_line, require
from storage import checkpoint_files, files
from text import corpus
from text import tokenizer as tokenizers
from text.prepare import prepare
from text.shards import Shard, shard_files
from web.jobs import Job
from weights import load, peft

LORA_RANK = 8
LR = 1e-3  # for models up to LR_WIDTH; wider ones take less
LR_WIDTH = 256
LONGEST_ROW = 2048  # tokens
BATCH_ROWS = 8
AUTO_STEPS = 100  # that `auto` epochs should give, within AUTO_EPOCHS
AUTO_EPOCHS = (2, 10)
MOST_STEPS = 100_000
EVAL_TOKENS = 200_000
SAVE_MINUTES = 10.0
LINES_SHOWN = 20  # numbers of lines that are held out, in an event


def write_settings(job: Job, nproc: int) -> str:
    """Bring a job's lines into shape, encode them, and write the settings of its training.

    Returns what they come to, in words. UserError or OSError if its data or its base cannot be
    used.
    """
    values, plan, held_out = settings_of(job, nproc)
    job.write_state(hyperparameters=plan["hyperparameters"])  # settings.py comes last
    lines = [f"# {job.id}: start it by hand with python fsdp_train.py {job.settings}\n"]
    lines += [f"{name} = {value!r}\n" for name, value in values.items()]
    files.write_atomically(job.settings, "".join(lines).encode())
    return (
        f"{plan['examples']} examples to learn, {plan['held_out']} held out, "
        f"{held_out}; {plan['steps']} steps of {plan['rows']} rows of "
        f"{plan['row_tokens']} tokens; {plan['cut']} examples are longer and were cut, "
        f"{plan['dropped']} have nothing to learn within a row"
    )


def settings_of(job: Job, nproc: int) -> tuple[dict, dict, str]:
    """The settings of a job's training, what they come to, and which lines are held out.

    Writes the job's lines and tokens into its folder. UserError or OSError as above.
    """
    asked = job.asked
    data = job.folder / "data.jsonl"
    val_every, held_out = write_lines(job, data)
    base = Path(asked["base"])
    require(base.exists(), f"the base of {asked['model']} is gone from {base}: put it there again")
    values = model_settings(base) | {
        "init_from": str(base),
        "dataset": str(data),
        "data_dir": str(job.folder / "tokens"),
        "data_format": "chat",
        "chat_template": asked["chat_template"],
        "tokenizer": tokenizer_name(base),
        "val_fraction": 1 / val_every,
        "seed": asked["seed"],
        "run_dir": str(job.run_dir),
        "microbatch_size": "auto",
        "eval_tokens": EVAL_TOKENS,
        "save_minutes": SAVE_MINUTES,
    }
    model_cfg = config.from_dict(MPTConfig, values)
    values |= adapter_settings(job, base, model_cfg)
    folder = prepare(config.from_dict(TrainConfig, values), max_seq_len=model_cfg.max_seq_len)
    train, val = (
        [Shard(path).header for path in shard_files(folder, split)] for split in ("train", "val")
    )
    of_batch, taken = batch_settings(asked["hyperparameters"], train, model_cfg, nproc)
    values |= of_batch
    config.from_dict(TrainConfig, values)  # UserError for what cannot be
    plan = {
        "examples": total(train, "documents"),
        "held_out": total(val, "documents"),
        "tokens": total(train, "filled"),  # of an epoch
        "cut": total([*train, *val], "cut"),
        "dropped": total([*train, *val], "dropped"),
        "steps": values["max_steps"],
        "rows": values["global_batch_size"],
        "row_tokens": model_cfg.max_seq_len,
        "hyperparameters": taken,
    }
    return values, plan, held_out


def adapter_settings(job: Job, base: Path, cfg: MPTConfig) -> dict:
    """The settings of a job's adapter: a new one, or that of the model that it goes on from.

    That one is copied as a run that has not begun, from which the training resumes. UserError if it
    is gone, or is none that a run can train.
    """
    source = job.asked.get("start")  # none in jobs of earlier versions
    if not source:
        return {"lora_rank": min(LORA_RANK, max(1, cfg.d_model // 4))}
    copy = job.folder / "start"
    if not copy.exists():
        gone = f"the model {job.asked['model']} was deleted: begin with another one"
        require(Path(source).exists(), gone)
        peft.write_start(peft.adapter_at(source), source, copy, str(base))
    checkpoint = copy / "checkpoints" / "step-0"
    found = checkpoint_files.read_adapter_settings(checkpoint)
    kept = {name: getattr(found, name) for name in (*SAME_ADAPTERS, "lora_dropout")}
    return kept | {"resume": str(checkpoint)}


def total(headers: list[dict], name: str) -> int:
    """A count of shards, added up."""
    return sum(header[name] for header in headers)


def model_settings(base: Path) -> dict:
    """The settings of the base that are not as by default, as a finetuning run has them."""
    cfg = load.settings_of(load.find(str(base)))
    values = {
        field.name: getattr(cfg, field.name)
        for field in fields(MPTConfig)
        if field.name != "attn_impl" and getattr(cfg, field.name) != field.default
    }
    values["attn_uses_sequence_id"] = True  # keeps the examples of a row apart
    if not cfg.learned_positions:
        values["max_seq_len"] = min(cfg.max_seq_len, LONGEST_ROW)
    return values


def tokenizer_name(base: Path) -> str:
    """The tokenizer of the base, as --tokenizer takes it."""
    name, file = load.tokenizer_of(load.find(str(base)))
    return str(Path(file).absolute()) if file and name.endswith(".json") else name


def batch_settings(
    asked: dict, headers: list[dict], cfg: MPTConfig, nproc: int
) -> tuple[dict, dict]:
    """Batch, steps and learning rate of a training, and the numbers taken for what was asked.

    asked: hyperparameters, each a number or "auto". headers: of the shards for training.
    """
    n_examples = total(headers, "documents")
    n_rows = sum(header["tokens"] // header["max_seq_len"] for header in headers)
    batch = asked["batch_size"]
    rows = batch * n_rows / n_examples if batch != "auto" else min(BATCH_ROWS, n_rows / 10)
    rows = max(1, round(min(rows, n_rows) / nproc)) * nproc
    steps_of_epoch = n_rows / rows
    epochs = asked["n_epochs"]
    if epochs == "auto":
        fewest, most = AUTO_EPOCHS
        epochs = min(most, max(fewest, math.ceil(AUTO_STEPS / steps_of_epoch)))
    steps = max(1, math.ceil(epochs * steps_of_epoch))
    fix = "set a larger batch_size, or lower n_epochs"
    require(steps <= MOST_STEPS, f"{steps:,} steps are more than {MOST_STEPS:,}: {fix}")
    given = asked["learning_rate_multiplier"]
    multiplier = 1.0 if given == "auto" else given
    taken = {
        "n_epochs": epochs,
        "batch_size": max(1, round(rows * n_examples / n_rows)) if batch == "auto" else batch,
        "learning_rate_multiplier": multiplier,
    }
    values = {
        "global_batch_size": rows,
        "max_steps": steps,
        "warmup_steps": min(20, steps // 10),
        "lr": multiplier * LR * min(1, math.sqrt(LR_WIDTH / cfg.d_model)),
        "eval_interval": max(1, steps // 10),
        "save_interval": max(1, steps // 10),
        "keep_every": max(1, steps // 10),  # so the best one of those is there in the end
    }
    return values, taken


def write_lines(job: Job, path: Path) -> tuple[int, str]:
    """Write the lines of a job into one file, of which every n-th is held out.

    text/prepare.py holds out the first line of that file and every n-th from there. Without a
    validation file these places get every n-th line of the upload and its last one, so never its
    first. Of a validation file, so many lines are used as there are places for them: at most as
    many as for training. Returns (n, which lines are held out, in words).
    """
    learned = lines_of(job, job.asked["training_file"])
    if job.asked["validation_file"]:
        given = lines_of(job, job.asked["validation_file"])
        val_every = max(2, math.ceil((len(learned) + len(given)) / len(given)))
        held_out = given[: math.ceil(len(learned) / (val_every - 1))]
    else:
        val_every = min(50, max(10, len(learned) // 20))
        chosen = [*range(val_every - 1, len(learned), val_every)]
        if len(learned) % val_every:
            chosen.append(len(learned) - 1)
        held_out = [learned[place] for place in chosen]
        chosen = set(chosen)
        learned = [line for place, line in enumerate(learned) if place not in chosen]
    with path.open("wb") as out:
        for n, line in enumerate(held_out):
            between = learned[n * (val_every - 1) : (n + 1) * (val_every - 1)]
            out.writelines(content for _, content in [line, *between])
    numbers = [number for number, _ in held_out]
    shown = ", ".join(map(str, numbers[:LINES_SHOWN]))
    rest = f", ..., {numbers[-1]}" if len(numbers) > LINES_SHOWN else ""
    where = " of the validation file" if job.asked["validation_file"] else ""
    return val_every, f"line{'s' * (len(numbers) > 1)} {shown}{rest}{where}"


def lines_of(job: Job, file_id: str) -> list[tuple[int, bytes]]:
    """The lines of an upload that are not blank, with their numbers; each ends with a line break.

    UserError if there is none.
    """
    path = files.member(job.folder.parent.parent / "files", file_id, "job.json") / "data.jsonl"
    require(path.exists(), f"the file {file_id} was deleted: upload it again")
    found = [
        (number, line.rstrip(b"\r\n") + b"\n")
        for number, line in enumerate(corpus.raw_lines(str(path)), 1)
        if line.decode(errors="replace").strip()
    ]
    require(found, f"{file_id} has no line")
    return found


# --------------------------------------------------------------------------------------------------
# A job that may be


def preview(folder: str) -> dict:
    """What a job comes to, for one process; {"problem": "..."} if it cannot be done.

    folder: of a job that no worker sees. Its lines and tokens are written there.
    """
    job = Job(Path(folder))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the answer goes to standard output
            values, plan, held_out = settings_of(job, nproc=1)
    except (UserError, OSError) as error:
        return {"problem": one_line(error)}
    tokens = Path(values["data_dir"])
    eot = tokenizers.load(values["tokenizer"], tokens / "tokenizer.json").eot
    longest = max(longest_in(Shard(path), eot) for path in shard_files(tokens))
    return plan | {"longest": longest, "held_out_lines": held_out}


def longest_in(shard: Shard, eot: int) -> int:
    """The tokens of the longest example in a shard, as far as it fits into a row."""
    ids = np.where(shard.ids < 0, ~shard.ids, shard.ids)
    is_end = ids == eot
    row = shard.header["max_seq_len"]
    is_end[row - 1 :: row] = True
    return int(np.diff(np.flatnonzero(is_end), prepend=-1).max(initial=0))


if __name__ == "__main__":
    program.answer(preview)
