"""What finetuning brought and what it cost: exact answers, and the loss on the base's own text.

    python -m lessons.finetuned runs/demo runs/lora-demo

Each model, the base first, answers the same questions, always with its likeliest token. An answer
counts if it equals the expected one in every character, and ends there. Then each model reads the
validation text of the base. If its loss has grown, the model has forgotten some of what the base
could do: nothing in the questions asks for it.

Run it as above after `make finetune`. Questions of your own: --questions=my/held_out.jsonl, with
lines of {"prompt": ..., "response": ...} (see lessons/questions.py).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import config
import data
import processes
import program
from config import TrainConfig
from fsdp_train import evaluate
from program import require
from serving.decoder import Decoder
from serving.engine import Engine, Request
from serving.sampling import Sampling
from serving.stream import Text
from storage import files
from text.recipe import Recipe
from weights.load import load_for_sampling

BATCH = 64  # questions that are answered at the same time
SHOWN = 3  # of which the answers are printed


@dataclass
class FinetunedArgs:
    """What to ask."""

    questions: str = "data/questions/held_out.jsonl"  # lines of prompt and response


def read_questions(path: str) -> list[dict]:
    """The lines of a .jsonl file with "prompt" and "response". UserError if one has not both."""
    require(Path(path).exists(), f"{path} does not exist: run python -m lessons.questions")
    rows, faults = files.read_json_lines(path, {"prompt": str, "response": str})
    require(rows and not faults, f"{path}: {faults[0] if faults else 'it has no line'}")
    return rows


def answers_of(model, tokenizer, questions: list[dict]) -> list[Text]:
    """What the model writes after each prompt. The model is a Decoder's from then on."""
    decoder = Decoder(model, tokenizer.vocab_size)
    # One token more than any answer has: it must be end-of-text.
    n = max(len(tokenizer.encode(row["response"])) for row in questions) + 1
    answers = [Text(row["prompt"], tokenizer, model.cfg, n) for row in questions]
    engine = Engine(decoder, BATCH, max(answer.max_length for answer in answers))
    for _ in engine.run([Request(answer, Sampling(temperature=0)) for answer in answers]):
        pass
    return answers


def is_exact(answer: Text, question: dict) -> bool:
    """Is an answer what was expected, with nothing behind it?"""
    return answer.end == "end of text" and answer.text == question["response"]


def text_of(run: str, max_seq_len: int) -> tuple[data.Split, TrainConfig]:
    """The validation text of a run, and the settings that say how much of it is read.

    UserError if the run is no run of this project, or its data are not there.
    """
    meta = checkpoint.read_meta(checkpoint.find(run))
    fix = "give a BASE that was trained on one data set"
    require(not meta.get("mix"), f"{run} was trained on a mixture: {fix}")
    names = ("dataset", "tokenizer", "data_dir", "eval_tokens", "microbatch_size")
    fix = "give a BASE that was trained from a folder"
    require("://" not in meta["data_dir"], f"{run} was trained from {meta['data_dir']}: {fix}")
    cfg = config.from_dict(TrainConfig, {name: meta[name] for name in names}, run)
    folder = Recipe(cfg).folder
    require(folder.exists(), f"the data of {run} are not in {folder}: run its command again")
    return data.Split(folder, "val", max_seq_len), cfg


def main(argv) -> None:
    """Ask each model, let it read, and print one line for each."""
    runs, args = config.load(argv, FinetunedArgs, takes="BASE RUN ...")
    questions = read_questions(args.questions)
    device = torch.device("cpu")
    world = processes.World(0, 1, 0, 1, device)
    table = []
    for run in runs:
        model, tokenizer, _ = load_for_sampling(run, None, device)
        text, cfg = text_of(runs[0], model.cfg.max_seq_len)
        loss = evaluate(model, text, cfg, world, "fp32")
        answers = answers_of(model, tokenizer, questions)
        exact = sum(map(is_exact, answers, questions)) / len(questions)
        print(run)
        for question, answer in zip(questions[:SHOWN], answers, strict=False):
            print(f"    {question['prompt'].strip():50} {answer.text.strip()!r}")
        table.append((run, f"{exact:.1%}", f"{loss:.3f}"))
    print(f"\n{len(questions)} questions held out")
    print(program.table(("run", "exact answers", "loss on the base's text"), table))


if __name__ == "__main__":
    program.run(main)
