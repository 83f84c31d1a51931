"""How much of its rank an update uses: the singular values of s B A, and answers with fewer ranks.

    s B A = sum of sigma_i u_i v_i^T        sigma_1 >= sigma_2 >= ... >= sigma_r

Each term reads one direction v_i of a layer's input and writes one direction u_i of its output. The
sum of the first k terms is the nearest update of rank k (lora.factors). The program prints the
sigmas of every layer. Then it keeps the first k terms in all layers, for each k from 0, which is
the base, to r, which is what was trained, and lets each of these models answer the questions.

    python -m lessons.spectrum runs/lora-demo

Run it after `make finetune`. With matplotlib, it draws spectrum.png in the run folder.
"""

from pathlib import Path

import torch

import checkpoint
import config
import lora
import program
from config import require
from lessons.finetuned import answers_of, is_exact, read_questions
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


def exact_by_rank(found: Path, tokenizer, questions: list[dict], rank: int) -> list[float]:
    """The share of exact answers with the first 0, 1, ... `rank` terms of each update."""
    shares = []
    for kept in range(rank + 1):
        model = load_adapted(found, torch.device("cpu"))
        keep(model, kept)
        lora.merge(model)
        answers = answers_of(model, tokenizer, questions)
        shares.append(sum(map(is_exact, answers, questions)) / len(questions))
        print(f"rank {kept:2} of {rank}: {shares[-1]:6.1%} exact answers", flush=True)
    return shares


def draw(layers: dict, shares: list[float], path: Path) -> None:
    """Write the picture. ModuleNotFoundError if matplotlib is not installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)

    colors = {}
    for name, layer in layers.items():
        kind = name.rpartition(".")[2]
        label = None if kind in colors else kind
        color = colors.setdefault(kind, f"C{len(colors)}")
        values = singular_values(layer).tolist()
        left.semilogy(range(1, len(values) + 1), values, "o-", color=color, label=label)
    left.set(xlabel="number of the singular value", ylabel="singular value of the update")
    left.legend(fontsize="small", frameon=False)

    right.plot(range(len(shares)), [100 * share for share in shares], "o-", color="black")
    right.set(xlabel="terms kept in each layer", ylabel="exact answers (%)", ylim=(0, 102))
    for axes in (left, right):
        axes.grid(alpha=0.3)

    figure.savefig(path, dpi=120)


def main(argv) -> None:
    """Print the spectra and the accuracies of a run, and draw both."""
    (run_dir,) = config.arguments(argv, "RUN")
    questions = read_questions(QUESTIONS)
    found = checkpoint.find(run_dir)
    settings = checkpoint.adapter_settings(found)
    require(settings, f"{run_dir} has no adapters: give a run with --lora_rank, as runs/lora-demo")
    name = checkpoint.read_meta(found)["tokenizer"]
    tokenizer = tokenizers.load(name, tokenizer_file(found))

    layers = adapted_layers(load_adapted(found, torch.device("cpu")))
    print_spectra(layers)
    shares = exact_by_rank(found, tokenizer, questions, settings.lora_rank)
    path = found.parent.parent / "spectrum.png"
    try:
        draw(layers, shares, path)
    except ModuleNotFoundError:
        print(f"no picture: it needs matplotlib: {config.EXTRA}")
    else:
        print(path)


if __name__ == "__main__":
    config.run(main)
