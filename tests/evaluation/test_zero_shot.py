"""evaluation/zero_shot.py, figures.py: figures beside lm-eval's, ranks, resuming."""

import contextlib
import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import refusal
from conftest import write_lines as write

import parallel
import processes
from config import MPTConfig, TrainConfig
from evaluation import figures as icl_figures
from evaluation import score as icl_score
from evaluation import tasks as icl_tasks
from evaluation import zero_shot
from evaluation.figures import PUBLISHED, SCORINGS, table
from evaluation.zero_shot import evaluate, finished
from model import MPT, init_weights
from text import tokenizer as tokenizers
from weights import hf

TINY = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=128)
BYTES = tokenizers.load("bytes")
ALONE = processes.World(0, 1, 0, 1, torch.device("cpu"))
WORDS = "river tree house blue old sings walks sees under slowly".split()


def model(**more):
    """A tiny model of random weights."""
    mpt = MPT(MPTConfig(**TINY | more))
    init_weights(mpt, seed=0)
    return mpt.eval()


def choices_of(n):
    """Questions whose choices differ in length, some with characters of several bytes."""
    rows = []
    for i in range(n):
        first = i % 7
        choices = [" ".join(WORDS[first : first + k]) + "é" * (i % 2) for k in (1, 3, 2)]
        query = f"Question: the {WORDS[i % 10]} {i}"
        rows.append({"query": query, "gold": i % 3, "choices": choices})
    return rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind, with an odd number of items."""
    folder = tmp_path_factory.mktemp("tasks")
    write(folder / "mc.jsonl", *choices_of(11))
    schema = []
    for a, b in zip(WORDS, WORDS[1:], strict=False):
        options = [f"The {a} met a {b}, and the {word}" for word in (a, b)]
        schema.append({"context_options": options, "continuation": "left.", "gold": 0})
    write(folder / "schema.jsonl", *schema)
    write(folder / "lm.jsonl", *({"context": f"The {w}", "continuation": w} for w in WORDS))
    # 400 tokens: four windows, of which the last one is shorter
    (folder / "text.txt").write_text(" ".join(WORDS * 9))
    return folder


def tasks_of(files, **more):
    """A task of each kind."""
    return icl_tasks.load("mc.jsonl,schema.jsonl,lm.jsonl,text.txt", str(files), **more)


def alone(mpt, context, continuation):
    """The log-probability of each token of a continuation, from all logits of one sequence."""
    before = torch.tensor(BYTES.encode(context).tolist())
    after = torch.tensor(BYTES.encode(continuation).tolist())
    with torch.no_grad():
        logits = mpt(torch.cat([before, after])[None, :-1])[0, len(before) - 1 :].double()
    log_probs = F.log_softmax(logits, dim=-1)
    return log_probs.gather(1, after[:, None])[:, 0]


def right_answers(mpt, task):
    """The number of right answers by each rule, from `alone`."""
    right = {"foundry": 0, "acc": 0, "acc_norm": 0}
    for item in task.items:
        pairs = zip(item.contexts, item.continuations, strict=True)
        log_probs = [alone(mpt, context, continuation) for context, continuation in pairs]
        cross_entropies = torch.stack([-x.mean() for x in log_probs])
        sums = torch.stack([x.sum() for x in log_probs])
        characters = torch.tensor([len(t.removeprefix(" ")) for t in item.continuations])
        right["foundry"] += cross_entropies.argmin().item() == item.gold
        right["acc"] += sums.argmax().item() == item.gold
        right["acc_norm"] += (sums / characters).argmax().item() == item.gold
    return right


CAPPED = {"alibi": True, "sliding_window_size": 9, "final_logit_softcapping": 0.5}


@pytest.mark.parametrize("more", [{"alibi": True}, {}, CAPPED], ids=str)
def test_figures_equal_those_of_one_request_at_a_time(files, more):
    mpt = model(**more)
    tasks = tasks_of(files)
    results = evaluate(mpt, BYTES, tasks, ALONE, batch_tokens=500)
    for task in tasks[:2]:
        n = len(task.items)
        r = results[task.name]
        for name, count in right_answers(mpt, task).items():
            assert r[name] == count / n
            outcomes = torch.tensor([1.0] * count + [0.0] * (n - count))
            stderr = outcomes.std().item() / math.sqrt(n)
            assert r[f"{name}_stderr"] == pytest.approx(stderr, abs=1e-6)
        assert (r["n"], r["contexts_cut"]) == (n, 0)
    assert results["mc"]["majority"] == 4 / 11
    assert results["mc"]["chance"] == pytest.approx(1 / 3)

    pairs = zero_shot.pairs_of(tasks[2], BYTES, 128)
    nats = -sum(alone(mpt, *pair).sum().item() for pair in pairs)
    assert results["lm"]["perplexity"] == pytest.approx(math.exp(nats / 10), rel=1e-4)
    assert not mpt.training


@pytest.mark.slow
def test_compiled_blocks_are_not_compiled_anew_for_the_many_shapes(files):
    mpt = model(alibi=True)
    compiled = []
    before = evaluate(mpt, BYTES, tasks_of(files), ALONE)

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for block in mpt.transformer.blocks:
        block.compile(backend=backend)
    after = evaluate(mpt, BYTES, tasks_of(files), ALONE)
    assert not compiled
    for name, figures in before.items():
        assert {**figures, "seconds": 0} == {**after[name], "seconds": 0}
    mpt(torch.zeros(2, 9, dtype=torch.long))
    assert compiled  # training goes on as before


def test_a_text_is_scored_once_in_windows_as_long_as_the_model(files):
    (task,) = icl_tasks.load(str(files / "text.txt"))
    mpt = model(alibi=True)
    ids = torch.tensor([256, *BYTES.encode(task.text).tolist()])
    (r,) = evaluate(mpt, BYTES, [task], ALONE).values()
    total = 0.0
    n = len(ids) - 1
    for begin in range(0, n, 128):
        end = min(begin + 128, n)
        first = max(0, end - 128)  # the last window reaches back
        with torch.no_grad():
            log_probs = F.log_softmax(mpt(ids[None, first:end])[0].double(), dim=-1)
        total -= log_probs.gather(1, ids[first + 1 : end + 1, None])[begin - first :].sum().item()
    assert r["n"] == n == len(task.text)
    assert r["nats_per_token"] == pytest.approx(total / n, rel=1e-5)
    assert r["perplexity"] == pytest.approx(math.exp(total / n), rel=1e-4)
    assert r["nats_per_byte"] == r["nats_per_token"]  # as tokens are bytes


def test_long_contexts_are_cut_on_the_left_and_counted(tmp_path):
    question = {"choices": ["sees", "old"], "gold": 0}
    rows = [question | {"query": "a" * length + " river"} for length in (400, 1)]
    (task,) = icl_tasks.load(write(tmp_path / "long.jsonl", *rows))
    mpt = model(alibi=True)
    requests, cut = zero_shot.encode(zero_shot.pairs_of(task, BYTES, 128), BYTES, "long", mpt.cfg)
    assert cut == 2 and [len(r.ids) for r in requests] == [129, 129, 12, 11]
    assert bytes(requests[0].ids.astype("uint8")).endswith(b"a river sees")
    assert requests[0].count == 5
    results = evaluate(mpt, BYTES, [task], ALONE)
    assert results["long"]["contexts_cut"] == 2
    assert "2 of 4 contexts were cut" in table(results, "tiny")


@pytest.mark.parametrize(
    "pair, ids, count",
    [
        (("", " a"), [BYTES.eot, 32, 97], 2),  # the begin of a document
        (("a ", " b"), [97, 32, 32, 98], 3),  # the space after a context is scored
    ],
)
def test_what_is_scored_of_a_pair(pair, ids, count):
    (request,), _ = zero_shot.encode([pair], BYTES, "t", MPTConfig(**TINY))
    assert (request.ids.tolist(), request.count) == (ids, count)


def test_ids_beyond_the_model_are_refused(files):
    message = refusal(evaluate, model(vocab_size=150), BYTES, tasks_of(files)[:1], ALONE)
    assert "task mc: the tokenizer gives id 195" in message and "vocab_size is 150" in message


# --------------------------------------------------------------------------------------------------
# Ranks


def figures(results):
    """The numbers of each task that do not depend on the clock."""
    return {
        name: {k: v for k, v in result.items() if k != "seconds" and not isinstance(v, str)}
        for name, result in results.items()
    }


def evaluate_on(world, files):
    """Figures of a live sharded model, as in training; and of two tasks that fit one batch, so
    that the second rank has no work.
    """
    mpt, _ = parallel.build(MPTConfig(**TINY, alibi=True), TrainConfig(), world, "fp32", seed=0)
    ids = torch.ones(1, 8, dtype=torch.long)
    mpt(ids, labels=ids).backward()
    results = evaluate(mpt.train(), BYTES, tasks_of(files), world, batch_tokens=700)
    assert mpt.training
    mpt(ids, labels=ids).backward()
    few = evaluate(model(alibi=True), BYTES, tasks_of(files)[:2], world, batch_tokens=10_000)
    return figures(results), figures(few)


def close(a, b):
    """Equal figures but for rounding."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=1e-5)


def test_two_ranks_find_what_one_finds(files, ranks):
    one = figures(evaluate(model(alibi=True), BYTES, tasks_of(files), ALONE))
    (first, first_few), (second, second_few) = ranks(2)(evaluate_on, files)
    assert first == second and first_few == second_few
    close(first, one)
    close(first_few, {name: one[name] for name in first_few})


# --------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with the run folder of an untrained model over bytes."""
    folder = tmp_path_factory.mktemp("icl")
    hf.export(model(alibi=True), folder / "theirs")
    hf.import_(folder / "theirs", folder / "run", "bytes")
    return folder


def program(world, *argv):
    """zero_shot.main in a rank, as under torchrun: what it printed."""
    environment = {
        "RANK": world.global_rank,
        "LOCAL_RANK": world.global_rank,
        "WORLD_SIZE": world.global_size,
        "LOCAL_WORLD_SIZE": world.global_size,
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        for name, value in environment.items():
            patch.setenv(name, str(value))
        zero_shot.main(list(argv))
    return printed.getvalue()


def test_program_writes_everything_and_does_not_repeat_it(run, files, ranks):
    out = run / "results.json"
    names = "mc.jsonl,schema.jsonl,text.txt"
    paths = [str(run / "run"), f"--data={files}", f"--out={out}"]
    first, silent = ranks(2)(program, *paths, f"--tasks={names}")
    assert "LLM Foundry" in first
    assert "text: " in first
    assert silent == ""
    saved = json.loads(out.read_text())
    tasks = icl_tasks.load(names, str(files))
    close(figures(saved["tasks"]), figures(evaluate(model(alibi=True), BYTES, tasks, ALONE)))
    assert saved["settings"]["model"].endswith("step-0")
    assert saved["settings"]["shots"] == 0

    second, _ = ranks(2)(program, *paths, "--tasks=mc.jsonl,lm.jsonl,text.txt")
    assert "lm: accuracy (every token" in second
    later = json.loads(out.read_text())["tasks"]
    assert list(later) == ["mc", "schema", "text", "lm"]
    assert {name: later[name] for name in saved["tasks"]} == saved["tasks"]

    ranks(2)(program, *paths, f"--tasks={names}", "--shots=2")  # other questions, the same names
    assert json.loads(out.read_text())["tasks"]["mc"]["digest"] != later["mc"]["digest"]


def test_tasks_before_one_that_cannot_be_scored_are_saved(run, files, tmp_path):
    long = write(tmp_path / "long.jsonl", {"context": "a", "continuation": "b" * 200})
    argv = [str(run / "run"), f"--data={files}", f"--out={tmp_path}/results.json"]
    message = refusal(zero_shot.main, [*argv, f"--tasks=mc.jsonl,{long},text.txt"])
    assert "task long: a continuation has 201 tokens, but max_seq_len is 128" in message
    assert list(json.loads((tmp_path / "results.json").read_text())["tasks"]) == ["mc"]


def test_results_of_another_model_are_not_mixed(tmp_path):
    out = tmp_path / "results.json"
    settings = {"weights": "abc", "precision": "fp32", "ids": "f00"}
    assert finished(str(out), settings) == finished("", settings) == {}
    out.write_text(json.dumps({"settings": settings, "tasks": {"a": {}}}))
    assert finished(str(out), settings) == {"a": {}}
    for name in ("weights", "ids"):  # of another model, of another tokenizer
        message = refusal(finished, str(out), settings | {name: "new"})
        assert f"{name} {settings[name]}, not new: choose another --out" in message


def test_program_answers_mistakes_in_one_line(run, monkeypatch):
    monkeypatch.chdir(run)
    for argv, message in (
        (["run", "--tasks=hellaswg"], "unknown task 'hellaswg', did you mean 'hellaswag'?"),
        (["run", "--shot=1"], "did you mean 'shots'"),
        (["run", "--batch_size=4"], "did you mean 'batch_tokens'"),
        (["run", "--limit=-1"], "limit must be from 0"),
        (["run", "--batch_tokens=0"], "batch_tokens must be from 1"),
        (["nowhere", "--tasks=all"], "no checkpoint in 'nowhere'"),  # the Hub is not asked
        (["run", "--out=nowhere/a.json"], "no folder for --out=nowhere/a.json"),
    ):
        assert message in refusal(zero_shot.main, argv)


def cells(line):
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_table_is_that_of_the_posts():
    values = dict(zip(icl_tasks.TABLE2, PUBLISHED["MPT-1B, published"], strict=True))
    result = {"kind": "schema", "n": 100, "majority": 0.5, "contexts_cut": 0, "requests": 200}
    keys = [key + suffix for key in SCORINGS for suffix in ("", "_stderr")]
    results = {task: result | dict.fromkeys(keys, value) for task, value in values.items()}
    rows = {}
    for line in table(results, "mine").splitlines():
        title, *figures = cells(line)
        rows[title] = figures
    assert rows[""] == "ARC-c ARC-e BoolQ HellaSwag PIQA Winograd Winogrande mean".split()
    assert rows["mine, LLM Foundry"] == rows["MPT-1B, published"]
    assert rows["mine, lm-eval acc_norm"][-1] == "0.537"
    assert rows["MPT-3B, published"][-1] == "0.578"
    assert rows["Cerebras-GPT-1.3B, published"][-1] == "0.496"

    some = table({"piqa": results["piqa"], "own": results["piqa"]}, "mine").splitlines()
    assert cells(some[0])[1:] == ["PIQA", "mean", "own"] and "0.754" in some[-1]
    assert "published" not in table({"own": results["piqa"]}, "mine")


@pytest.mark.parametrize("has_bf16, expected", [(True, "bf16"), (False, "fp32")])
def test_auto_is_fp32_on_a_cpu_and_bf16_where_a_gpu_computes_in_it(has_bf16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert zero_shot.pick_precision("auto", torch.device("cpu")) == "fp32"
    assert zero_shot.pick_precision("bf16", torch.device("cpu")) == "bf16"
    assert zero_shot.pick_precision("auto", torch.device("cuda")) == expected
    assert zero_shot.pick_precision("fp32", torch.device("cuda")) == "fp32"


# --------------------------------------------------------------------------------------------------
# lm-evaluation-harness


def words_of_bytes():
    """Our bytes tokenizer as one of Hugging Face's: the same ids."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    same = Tokenizer.from_str(BYTES.content.decode())
    return PreTrainedTokenizerFast(tokenizer_object=same, eos_token="<|endoftext|>")


@pytest.fixture
def harness(tmp_path):
    """lm-eval's backend on a transformers MPT, and our model with its weights."""
    pytest.importorskip("lm_eval", reason="pip install -r requirements-peers.txt")
    pytest.importorskip("accelerate", reason="pip install -r requirements-peers.txt")
    from lm_eval.models.huggingface import HFLM
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    MptForCausalLM(MptConfig(**TINY)).save_pretrained(tmp_path / "mpt")
    theirs = MptForCausalLM.from_pretrained(tmp_path / "mpt").eval()
    mpt = MPT(MPTConfig(**TINY, alibi=True, no_bias=True)).eval()
    weights = {k: v for k, v in theirs.state_dict().items() if k != "lm_head.weight"}  # it is tied
    mpt.load_state_dict(weights)
    options = {"max_length": 128, "batch_size": 4, "device": "cpu"}
    return HFLM(pretrained=theirs, tokenizer=words_of_bytes(), **options), mpt


def harness_task(path):
    """Our file of questions as a task of lm-eval."""
    from lm_eval.api.task import ConfigurableTask

    config = {
        "task": "mc",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    return ConfigurableTask(config=config)


def test_lm_eval_finds_the_same(harness, tmp_path):
    """lm-eval's own loop, backend and metrics beside ours."""
    import lm_eval

    backend, mpt = harness
    long = {"query": "x" * 200, "choices": ["a", "bb", "ccc"], "gold": 1}  # cut on the left
    path = write(tmp_path / "mc.jsonl", *choices_of(40), long)
    options = {"bootstrap_iters": 1, "log_samples": True}
    theirs = lm_eval.simple_evaluate(backend, tasks=[harness_task(path)], **options)

    (ours,) = icl_tasks.load(path)
    pairs = zero_shot.pairs_of(ours, BYTES, 128)
    requests, contexts_cut = zero_shot.encode(pairs, BYTES, "mc", mpt.cfg)
    assert contexts_cut == 3
    sums = icl_score.score(mpt, requests, ALONE, "fp32", 400).tolist()
    scores = dict(zip(pairs, sums, strict=True))
    for item, sample in zip(ours.items, theirs["samples"]["mc"], strict=True):
        pairs_of_item = zip(item.contexts, item.continuations, strict=True)
        for pair, (answer,) in zip(pairs_of_item, sample["resps"], strict=True):
            log_prob, greedy = scores[pair]
            assert log_prob == pytest.approx(answer[0], abs=1e-3)
            assert bool(greedy) == answer[1]

    figures = evaluate(mpt, BYTES, [ours], ALONE)["mc"]
    expected = theirs["results"]["mc"]
    for name in ("acc", "acc_norm"):
        assert figures[name] == expected[f"{name},none"] != 0
        stderr = pytest.approx(expected[f"{name}_stderr,none"], rel=1e-6)
        assert figures[f"{name}_stderr"] == stderr


def test_lm_eval_finds_the_same_for_a_text(harness, files):
    import lm_eval

    backend, mpt = harness
    text = (files / "text.txt").read_text()
    request = lm_eval.api.instance.Instance("loglikelihood_rolling", {}, (text,), 0)
    (rolling,) = backend.loglikelihood_rolling([request], disable_tqdm=True)
    (task,) = icl_tasks.load(str(files / "text.txt"))
    nats_per_token = evaluate(mpt, BYTES, [task], ALONE)["text"]["nats_per_token"]
    assert nats_per_token == pytest.approx(-rolling / len(text), rel=1e-5)


# --------------------------------------------------------------------------------------------------


def test_nats_per_byte_are_per_byte_of_the_text_whatever_the_tokens():
    """Two tokens for the five bytes of "häus"."""
    found = icl_figures.summarize_text("häus", [("", "häus")], {("", "häus"): (-10.0, 1.0, 2)})
    assert found["nats_per_byte"] == 2.0 and found["nats_per_token"] == 5.0
