"""The walks of CONTRIBUTING.md, each taken in a copy of the project, by the programs of the copy.

A walk is {file: [(what stands there, what takes its place), ...]}: all that a fork edits.
"""

import json
import re
import shutil
from dataclasses import fields

import pytest
from conftest import ROOT, flags_for, slowly
from launches import SIZE, load, steps_of
from test_structure import ROOMS

from config import MPTConfig, TrainConfig
from lifecycle import resume

DILATED = '''
def dilated_attention(q, k, v, rule):
    """The reference, but a query sees only every fourth key before it."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    bias = attention_bias(n_queries, n_keys, rule, q.device)
    i = torch.arange(n_keys - n_queries, n_keys)[:, None]
    bias = bias.masked_fill((i - torch.arange(n_keys)) % 4 != 0, -math.inf)
    return torch.softmax((q * rule.scale) @ k.transpose(-2, -1) + bias, dim=-1) @ v


VARIANTS = {"dilated": Variant(dilated_attention, stays_compiled=False)}
'''

LION = '''
class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., arXiv 2302.06675)."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p -= group["lr"] * torch.sign(mean.lerp(p.grad, 0.1))
                    mean.lerp_(p.grad, 0.01)


def build_optimizer(named_params, cfg: TrainConfig) -> torch.optim.Optimizer:
    """Lion, slower for the embedding."""
    named = dict(named_params)
    embedding = named.pop("transformer.wte.weight")
    slow = {"params": [embedding], "lr": cfg.lr / 4, "peak_lr": cfg.lr / 4}
    return Lion([{"params": named.values()}, slow], {"lr": cfg.lr})


def clip_gradients('''

XML = """    if suffix == ".xml":
        yield from re.findall("(?s)<doc>(.*?)</doc>", read_text(path))
    elif suffix == ".parquet":
"""

LOSS = "        return self.cross_entropy(x, labels, z_loss)\n"
SMOOTHED = """        flat = {logits}.flatten(0, -2).float()
        of_labels = labels.flatten()
        return F.cross_entropy(flat, of_labels, reduction="sum", label_smoothing=0.1)
"""

BY_LOGITS = SMOOTHED.format(logits="self.logits(x)")
BY_WEIGHT = SMOOTHED.format(logits="F.linear(x, self.output_weight)")
KEYS = "lambda cfg: cfg.keys_seen)"  # of a query

WALKS = {
    "Another attention": {
        "config.py": [("AttentionImpl = Literal[", 'AttentionImpl = Literal["dilated", ')],
        "attention.py": [("\nVARIANTS = {}\n", DILATED)],
        "flops.py": [(KEYS, KEYS + ' | {"dilated": lambda cfg: cfg.max_seq_len // 4}')],
    },
    "Another optimizer": {"optim.py": [("\ndef clip_gradients(", LION)]},
    "Another loss": {"model.py": [(LOSS, BY_LOGITS)]},
    "Another data format": {
        "text/sources.py": [
            ('SUFFIXES = (".txt", ', 'SUFFIXES = (".xml", ".txt", '),
            (".html .xml", ".html"),
        ],
        "text/corpus.py": [('    if suffix == ".parquet":\n', XML)],
    },
}


def take_walk(edits, folder):
    """A copy of the project's code in `folder`, with these edits."""
    for path in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    for room in [*ROOMS, "tests"]:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name, replaced in edits.items():
        text = (folder / name).read_text(encoding="utf-8")
        for before, after in replaced:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def fork(request, forks, tmp_path, tiny_data):
    """The project after a walk: see `Fork`."""
    return Fork(forks, take_walk(WALKS[request.param], tmp_path), tiny_data)


class Fork:
    """A copy of the project: `fork(*words)` is what a program says, `fork.train(run)` trains."""

    def __init__(self, forks, folder, data):
        self.forks, self.folder, self.data = forks, folder, data

    def __call__(self, *words, status=0, ranks=1, folder=None) -> str:
        """The output of a program that ends with this status: of an error, its line."""
        found, out, err = self.forks(list(words), folder or self.folder, ranks=ranks)
        assert found == status, out[-2000:] + err[-2000:]
        return err if status else out

    def train(self, run, *flags, status=0, ranks=1) -> str:
        """Two steps of a tiny model."""
        words = [*SIZE, "--alibi", "--device=cpu", "--precision=fp32", "--global_batch_size=4"]
        words += ["--microbatch_size=2", "--warmup_steps=1", "--max_steps=2", "--eval_tokens=100"]
        words += [*flags_for(self.data), f"--run_dir={run}", "--keep_last=9", "--lr=1e-3", *flags]
        return self("fsdp_train.py", *words, status=status, ranks=ranks)


def walk(name):
    return pytest.mark.parametrize("fork", [slowly(name)], indirect=True)


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_names_each_file_that_it_edits(name):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"(?ms)^### {name}$.*?(?=^##)", page)
    for file in WALKS[name]:
        assert f"`{file}::" in section, file


@walk("Another attention")
def test_a_dilated_attention(fork):
    """Trained, resumed, counted; refused by the planner, in export, and by code that lacks it."""
    tests = ("-n", "0", "-k", "dilated", "tests/test_another_attention.py")
    assert "2 passed" in fork("-m", "pytest", *tests)
    assert "dilated attention" in fork.train("run", "--attn_impl=dilated", ranks=2)
    refused = fork.train("run", "--max_steps=3", status=2)
    assert "another model: attn_impl dilated (here auto)" in refused
    fork.train("run", "--attn_impl=dilated", "--max_steps=3", ranks=2)
    from_it = ("new", "--init_from=run")
    assert "attn_impl dilated (here auto)" in fork.train(*from_it, status=2)

    counted = ("flops.py", *SIZE, "--json")
    whole, dilated = (json.loads(fork(*counted, *more))["flops_per_token"] for more in FLOPS)
    assert whole - dilated == 12 * 2 * 32 * (32 - 8)  # 12 L d (S - S / 4)
    assert "does not know attn_impl=dilated" in fork("plan.py", "--attn_impl=dilated", status=2)
    assert "attn_impl=dilated" in fork("-m", "planning.memory", "--attn_impl=dilated", status=2)

    export = ("-m", "weights.hf", "export", str(fork.folder / "run"), str(fork.folder / "theirs"))
    assert "does not compute MPT's attention" in fork(*export, status=2)
    assert not (fork.folder / "theirs").exists()
    generate = ("generate.py", str(fork.folder / "run"), "--max_new_tokens=8", "--prompt=the")
    fork(*generate)
    for words in (export, generate):
        assert "is 'dilated', expected one of" in fork(*words, folder=ROOT, status=2)


FLOPS = [], ["--attn_impl=dilated"]


@walk("Another optimizer")
def test_lion(fork):
    """It says once that each step waits; it resumes, and AdamW does not go on from it."""
    tests = ("-n", "0", "-k", "bad_step and ours or gives_all and ours")
    assert "3 passed" in fork("-m", "pytest", *tests, "tests/test_another_optimizer.py")
    for more in (), ("--max_steps=3",):
        assert fork.train("run", *more, ranks=2).count("each step waits for the device") == 1
    before, after = (load(fork.folder / "run/checkpoints" / name) for name in ("step-2", "step-3"))
    largest = {name: (after[name] - before[name]).abs().max().item() for name in after}
    embedding = largest.pop("transformer.wte.weight")
    assert max(largest.values()) == pytest.approx(4 * embedding, rel=1e-3)  # the peak of its group
    shutil.copy(ROOT / "optim.py", fork.folder)
    refused = fork.train("run", "--max_steps=4", status=2)
    assert "optimizer Lion (mean), here it is AdamW (exp_avg" in refused
    assert "waits for the device" not in fork.train("new")


def curve(fork, run):
    """Loss and gradient norm of each step, in one list."""
    rows = steps_of(fork.folder / run).values()
    return [row[column] for row in rows for column in ("loss", "grad_norm")]


LAYOUTS = {"tp": ("--tp=2",), "sp": ("--tp=2", "--sequence_parallel"), "pp": ("--pp=2",)}


@walk("Another loss")
def test_a_smoothed_loss(fork):
    """It is trained in every layout of ranks, or refused there."""
    fork.train("alone")
    for name, layout in LAYOUTS.items():
        fork.train(name, *layout, ranks=2)
        assert curve(fork, name) == pytest.approx(curve(fork, "alone"), rel=1e-5)

    model = fork.folder / "model.py"
    model.write_text(model.read_text().replace(BY_LOGITS, BY_WEIGHT))
    fork.train("by weight")
    assert curve(fork, "by weight") == curve(fork, "alone")
    assert "only a part of the output weight" in fork.train("no", "--tp=2", status=2, ranks=2)


@walk("Another data format")
def test_a_file_of_xml(fork, tiny_text):
    text = "<|endoftext|>".join(path.read_text() for path in tiny_text.glob("*.txt"))
    documents = [f"<doc>{document}</doc>\n" for document in text.split("<|endoftext|>")]
    (fork.folder / "my.xml").write_text("".join(documents))
    assert "40 documents" in fork("-m", "text.corpus", "my.xml")
    own = ("--data_dir=tokens", "--dataset=my.xml", "--tokenizer=bytes", "--val_fraction=0.1")
    assert "step 2/2" in fork.train("run", *own)


# --- Settings that a fork adds

# With another value, weights and losses stay what they are, up to the order of sums.
NO_OTHER_TRAINING = """
    device sharding tp sequence_parallel pp shard_size activation_checkpointing recompute_every
    compile microbatch_size peak_tflops
    eval_interval eval_tokens icl_interval icl_tasks icl_limit expect
    run_dir save_interval save_minutes keep_last keep_every remote track resume timeout_minutes
    """
# These have a check of their own: the fingerprint of the data, or the steps of a checkpoint.
CHECKED_ELSEWHERE = """
    dataset mix tokenizer data_dir data_cache max_tokens val_fraction data_format chat_template
    target_prompts target_responses packing skip_steps max_bad_steps
    """


def test_each_setting_of_a_run_says_whether_it_makes_another_training():
    """Of a new one, say so in lifecycle/resume.py::SAME_TRAINING, or above."""
    compared = [*resume.SAME_RUN, *resume.SAME_ADAPTERS, *resume.SAME_TRAINING]
    known = [*compared, *NO_OTHER_TRAINING.split(), *CHECKED_ELSEWHERE.split()]
    of_model = {field.name for field in fields(MPTConfig)}  # other ones are another model
    assert set(known) - of_model == {field.name for field in fields(TrainConfig)}
