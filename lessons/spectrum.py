"""How much of its rank an update uses: the singular values of s B A, and answers with fewer ranks.

    s B A = sum of sigma_i u_i v_i^T        sigma_1 >= sigma_2 >= ... >= sigma_r

The sum of the first k terms is the nearest update of rank k (lora.factors). The program prints the
sigmas of every layer. Then it keeps the first k terms in all layers, for each k from 0, which is
the base, to r, which is what was trained, and lets each of these models answer the questions.

    python -m lessons.spectrum runs/lora-demo

Run it after `make finetune`. Lesson 7 draws the sigmas.
"""

from pathlib import Path

import torch

import checkpoint
import lora
import program
from lessons.finetuned import answers_of, is_exact, read_questions
from program import require
from storage import checkpoint_files
from text import tokenizer as tokenizers
from weights.load import load_adapted, tokenizer_file

QUESTIONS = "data/questions/held_out.jsonl"


def adapted_layers(model) -> dict[str, torch.nn.Module]:
    """The layers of a model that have adapters, by name, such as blocks.0.attn.Wqkv."""
    names = [name.removesuffix(".lora_A") for name in lora.adapters_of(model)]
    layers = {name: model.get_submodule(name) for name in names if not name.endswith(".lora_B")}
    return {name.removeprefix("transformer."): layer for name, layer in layers.items()}


@torch.no_grad()
def singular_values(layer) -> torch.Tensor:
    """The singular values of a layer's update, (r,), the largest first."""
    return torch.linalg.svdvals(lora.delta(layer))[: len(layer.lora_A)]


@torch.no_grad()
def keep(model, rank: int) -> None:
    """Replace each update of a model by the nearest one of this rank, in place. 0: by nothing."""
    for layer in adapted_layers(model).values():
        a, b = lora.factors(lora.delta(layer) / layer.lora_scale, rank)
        layer.lora_A.zero_()[:rank] = a
        layer.lora_B.zero_()[:, :rank] = b


def print_spectra(layers: dict) -> None:
    """One line a layer: the size of the update relative to the weight, and its singular values."""
    rows = []
    for name, layer in layers.items():
        values = singular_values(layer)
        share = (values.norm() / layer.weight.norm()).item()
        rows.append((name, f"{share:.1%}", " ".join(f"{value:.2f}" for value in values)))
    print(program.table(("layer", "update/weight", "singular values"), rows))


def print_exact_by_rank(found: Path, tokenizer, questions: list[dict], rank: int) -> None:
    """The share of exact answers with the first 0, 1, ... `rank` terms of each update."""
    for kept in range(rank + 1):
        model = load_adapted(found, torch.device("cpu"))
        keep(model, kept)
        lora.merge(model)
        answers = answers_of(model, tokenizer, questions)
        share = sum(map(is_exact, answers, questions)) / len(questions)
        print(f"rank {kept:2} of {rank}: {share:6.1%} exact answers", flush=True)


def main(argv) -> None:
    """Print the spectra and the accuracies of a run."""
    (run_dir,) = program.arguments(argv, "RUN")
    questions = read_questions(QUESTIONS)
    found = checkpoint.find(run_dir)
    settings = checkpoint_files.read_adapter_settings(found)
    require(settings, f"{run_dir} has no adapters: give a run with --lora_rank, as runs/lora-demo")
    name = checkpoint.read_meta(found)["tokenizer"]
    tokenizer = tokenizers.load(name, tokenizer_file(found))

    layers = adapted_layers(load_adapted(found, torch.device("cpu")))
    print_spectra(layers)
    print_exact_by_rank(found, tokenizer, questions, settings.lora_rank)


if __name__ == "__main__":
    program.run(main)
