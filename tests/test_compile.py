"""Compilation: when it is on, what happens where it fails, and how much there is to compile.

One graph a direction (forward, backward) serves all layers, microbatches and steps; evaluation adds
none. What is compiled here runs as PyTorch traced it, without code generation, which takes minutes
on a CPU. bench/results/h200.md has an H200's speed with it.
"""

import contextlib
import functools
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from functorch.compile import make_boxed_func
from test_parallel import MODEL, RUN, global_rows
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from tracing.gpu_runs import Windows

import config
import data
import fsdp_train
import parallel
from config import MPTConfig, TrainConfig
from lifecycle import compiling
from loss import IGNORE
from model import MPT, Block
from processes import World
from program import UserError

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
A_GPU = World(0, 1, 0, 1, torch.device("cuda", 99))  # no machine has that many


@contextlib.contextmanager
def counting_graphs(**options):
    """Blocks are traced, forward and backward, but not translated. Yields how many graphs of each.

    options: of torch.compile.
    """
    graphs = Counter()

    def count(direction):
        def compiler(graph, inputs):
            graphs[direction] += 1
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=count("forward"),
        bw_compiler=count("backward"),
        inference_compiler=count("inference"),
    )
    compile_block = functools.partialmethod(torch.nn.Module.compile, backend=backend, **options)
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Block, "compile", compile_block)
        yield graphs
    torch.compiler.reset()


# -------------------------------------------------------------------------------------------------
# How much there is to compile


def figures(world, cfg) -> list:
    """Loss and norm of three steps, an evaluation after the second."""
    model, optimizer = parallel.build(MODEL, cfg, world, "fp32", 0)
    val = Windows(5, MODEL.max_seq_len)  # with three at a time, the last pass has two
    found = []
    for step in range(3):
        rows = global_rows(step, cfg)[world.dp_rank :: world.dp_size]
        loss, norm, _ = fsdp_train.train_step(model, optimizer, rows, step, cfg, world, "fp32")
        found += [loss.item(), norm.item()]
        if step == 1:
            found.append(fsdp_train.evaluate(model, val, cfg, world, "fp32"))
    return found


def compiled_figures(world, cfg) -> tuple:
    """The same with compiled blocks, and the graphs that were compiled."""
    with counting_graphs() as graphs:
        return figures(world, replace(cfg, compile=True)), graphs


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_layers_microbatches_and_evaluation_share_one_graph(ranks, checkpointing):
    """Three rows at a time, of a number that three does not divide."""
    cfg = replace(RUN, global_batch_size=14, microbatch_size=3)
    cfg = replace(cfg, activation_checkpointing=checkpointing)
    eager = ranks(2)(figures, cfg)[0]
    for found, graphs in ranks(2)(compiled_figures, cfg):
        assert graphs == {"forward": 1, "backward": 1}
        assert found == pytest.approx(eager, rel=1e-4)


@pytest.mark.parametrize(
    "n_rows, at_most, sizes",
    [(8, 4, [4, 4]), (9, 8, [5, 5]), (12, 8, [6, 6]), (3, 8, [3]), (7, 2, [2, 2, 2, 2])],
)
def test_compiled_microbatches_have_one_size_and_no_more_work_than_needed(n_rows, at_most, sizes):
    rows = torch.arange(n_rows * 5).view(n_rows, 5) + 1
    ids, labels = rows[:, :-1], rows[:, 1:]
    cfg = TrainConfig(microbatch_size=at_most, compile=True)
    parts, (n_tokens, _) = data.make_batch(rows, cfg, 0)
    assert [len(part) for part, _ in parts] == sizes
    all_ids, all_labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert torch.equal(all_ids[:n_rows], ids) and torch.equal(all_labels[:n_rows], labels)
    assert (all_labels[n_rows:] == IGNORE).all() and n_tokens == labels.numel()

    uncompiled, _ = data.make_batch(rows, replace(cfg, compile=False), 0)
    assert [len(part) for part, _ in uncompiled][:-1] == [at_most] * ((n_rows - 1) // at_most)
    assert torch.equal(torch.cat([part for part, _ in uncompiled]), ids)


RECIPES = {  # one of each kind
    "mpt125m": "learned positions",
    "lora_mpt7b": "ALiBi, documents, activation checkpointing and adapters",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_traced_without_a_break_and_once_for_all_layers(name, monkeypatch):
    """On fake tensors, which have shapes but no memory; with the attention that a GPU runs.

    Two layers: the second one shows whether each is compiled anew. All else is as configured.
    """
    m, cfg = config.load([str(ROOT / f"configs/{name}.py")], MPTConfig, TrainConfig)
    cpu = torch.device("cpu")
    impl = "triton" if m.alibi else "sdpa"  # what attn_impl=auto means on a GPU, in bf16
    m, cfg = replace(m, n_layers=2, attn_impl=impl), replace(cfg, compile=True)
    if impl == "triton":  # its operator would refuse tensors on a CPU, of which it sees the shapes
        from fast import flash_attention

        monkeypatch.setattr(flash_attention, "INTERPRETED", SimpleNamespace(value=True))
    # Not fake: the state of the generator, which recomputation keeps.
    with FakeTensorMode(allow_non_fake_inputs=True), counting_graphs(fullgraph=True) as graphs:
        model = parallel.parallelize(MPT(m), None, cfg, "bf16")
        model.separator = 0
        ids = torch.zeros(cfg.microbatch_size, m.max_seq_len, dtype=torch.long)
        for _ in range(2):
            with parallel.autocast(cpu, "bf16"):
                loss = model(ids, labels=ids)
            loss.backward()
        assert graphs == {"forward": 1, "backward": 1}
        model.eval()
        with torch.no_grad(), parallel.autocast(cpu, "bf16"):
            model(ids, labels=ids)
            assert graphs == {"forward": 1, "backward": 1, "inference": 1}
            with parallel.run_uncompiled(model):
                model(ids[:1], labels=ids[:1])
    assert graphs.total() == 3


# -------------------------------------------------------------------------------------------------
# On or off


def test_the_setting_is_a_switch_with_a_third_position():
    flags = {"--compile": True, "--compile=true": True, "--compile=False": False}
    for flag, value in {**flags, "--compile=AUTO": "auto"}.items():
        assert config.load([flag], TrainConfig)[0].compile == value
        assert config.load(["RUN", flag], TrainConfig, takes="RUN")[1].compile == value
    assert config.load(["--compile", "RUN"], TrainConfig, takes="RUN")[1].compile is True
    assert config.from_dict(TrainConfig, {"compile": False}).compile is False
    with pytest.raises(UserError, match="expected true or false or one of: auto"):
        config.load(["--compile=maybe"], TrainConfig)


def chosen(world, setting, failing_rank=None):
    """What `compiling.choose` says on each rank, and which graphs it made; or its error."""
    with counting_graphs() as graphs, pytest.MonkeyPatch.context() as patch:
        if world.global_rank == failing_rank:
            patch.setattr(Block, "forward", fail)
        try:
            compiles = compiling.choose(MODEL, replace(RUN, compile=setting), world, "bf16")
        except UserError as error:
            return str(error), error.on_all_ranks
        return compiles, graphs


def fail(*args):
    raise RuntimeError("the compiler\nis broken")


def test_auto_is_off_on_a_cpu_and_nothing_is_tried(ranks):
    assert TrainConfig().compile == "auto"
    assert chosen(ALONE, "auto") == (False, {})
    assert chosen(A_GPU, False) == (False, {})


def test_auto_goes_on_without_compiling_where_that_fails(capsys):
    """On a GPU that is not there: not even the weights of a block can be made."""
    assert chosen(A_GPU, "auto") == (False, {})
    line = capsys.readouterr().out
    assert line.startswith("nothing is compiled: compiling a block fails on rank 0: ")
    assert re.search("CUDA|NVIDIA|HIP", line) and len(line.splitlines()) == 1


@pytest.mark.parametrize("name", ["tp", "pp"])
def test_auto_goes_on_without_compiling_a_model_that_is_cut(capsys, name):
    """And says so once, without trying."""
    assert not compiling.choose(MODEL, replace(RUN, **{name: 2}), A_GPU, "bf16")
    line = "nothing is compiled: that does not work with tp or pp\n"
    assert capsys.readouterr().out == line


@pytest.mark.gpu
def test_auto_compiles_on_a_gpu():
    model_cfg = replace(MODEL, d_model=96, attn_impl="auto")
    world = replace(ALONE, device=torch.device("cuda", 0))
    assert compiling.choose(model_cfg, RUN, world, "bf16")


@pytest.mark.slow
def test_it_is_tried_with_one_block_and_all_ranks_agree(ranks):
    assert ranks(2)(chosen, True) == [(True, {"forward": 1, "backward": 1})] * 2
    line = "compiling a block fails on rank 1: the compiler is broken (set --compile=False)"
    assert ranks(2)(chosen, True, 1) == [(line, True)] * 2


def test_an_unresolved_auto_compiles_nothing():
    with torch.device("meta"), counting_graphs():
        model = parallel.parallelize(MPT(MODEL), None, TrainConfig(), "fp32")
    assert all(block._compiled_call_impl is None for block in model.transformer.blocks)
