"""Prompts and responses through data.py and the trainer: rows on disk, batches, losses."""

import json
import random
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import byte_level, refusal, write_lines
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from launches import train_here

import config
import data
from config import MPTConfig, TrainConfig
from data import Split, inputs_and_labels, open_or_prepare
from lifecycle import runlog
from loss import IGNORE
from model import MPT, init_weights
from text import chat, corpus
from text import tokenizer as tokenizers
from text.prepare import prepare, read_summary
from text.shards import Shard
from weights import load

SEQ_LEN = 128
EOT = 256
MODEL = MPTConfig(
    d_model=16,
    n_heads=2,
    n_layers=2,
    max_seq_len=SEQ_LEN,
    vocab_size=260,
    alibi=True,
    attn_uses_sequence_id=True,
)


def lines(n=60):
    """Examples in both forms, one of them longer than a row, one without a token to learn."""
    draw = random.Random(0)
    rows = []
    for _ in range(n):
        a, b = draw.randrange(50), draw.randrange(50)
        user = {"role": "user", "content": f"{a}+{b}"}
        assistant = {"role": "assistant", "content": f"{a + b}"}
        pair = {"prompt": f"{a}+{b}=", "completion": f"{a + b} " + "y" * draw.randrange(20)}
        other = {"prompt": "x" * a, "response": "z" * b}
        rows.append(draw.choice([pair, other, {"messages": [user, assistant]}]))
    rows[3] = {"prompt": "long", "response": "l" * 200}
    rows[5] = {"prompt": "p" * 199, "response": "never read"}
    return rows


@pytest.fixture
def make(tmp_path):
    """make(rows, **settings) writes a .jsonl file and returns the settings that prepare it."""

    def make(rows, folder="tokens", **more):
        path = tmp_path / "chat.jsonl"
        write_lines(path, *rows)
        usual = {"tokenizer": "bytes", "val_fraction": 0.1, "data_dir": str(tmp_path / folder)}
        usual["run_dir"] = str(tmp_path / "run")
        return TrainConfig(dataset=str(path), data_format="chat", **(usual | more))

    return make


@pytest.fixture
def folder(make):
    return prepare(make(lines()), max_seq_len=SEQ_LEN)


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def encoded(rows, **more):
    """The ids of examples, one array each, cut to a row; those without a learned token left out."""
    how = {"packing": True, "target_prompts": "none", "target_responses": "last"}
    row_format = chat.RowFormat(SEQ_LEN, **(how | more))
    tokenizer, template = tokenizers.load("bytes"), chat.load_template("")
    ids = [chat.encode(chat.turns_of(row, template), tokenizer, row_format) for row in rows]
    return [i[:SEQ_LEN] for i in ids if (i[:SEQ_LEN] >= 0).any()]


# --- shards


def test_shards_hold_rows_and_say_so(folder):
    """int32, whole rows and one id more; validation gets whole examples."""
    for_validation = lines()[::10]
    for_training = [row for i, row in enumerate(lines()) if i % 10]
    for split, rows in (("val", for_validation), ("train", for_training)):
        shard = Shard(folder / f"{split}-00000.bin")
        shard.check_hash()
        examples = encoded(rows)
        header = shard.header
        assert header["dtype"] == "int32" and header["max_seq_len"] == SEQ_LEN
        assert header["documents"] == len(examples)
        assert header["learned"] == (np.concatenate(examples) >= 0).sum() == (shard.ids >= 0).sum()
        assert len(shard.ids) % SEQ_LEN == 1 and shard.ids[-1] == ~EOT
        stored = shard.ids.tobytes()
        assert all(example.tobytes() in stored for example in examples)
        rows = Split(folder, split, SEQ_LEN)
        _, labels = inputs_and_labels(torch.from_numpy(rows.windows(np.arange(len(rows)))))
        assert (labels != IGNORE).any(1).all()  # each row has something to learn
    summary = read_summary(folder)
    assert [summary[name] for name in ("data_format", "max_seq_len")] == ["chat", SEQ_LEN]


def test_without_packing_every_example_has_a_row(make):
    folder = prepare(make(lines(), packing=False), max_seq_len=SEQ_LEN)
    split = Split(folder, "train", SEQ_LEN)
    expected = encoded([row for i, row in enumerate(lines()) if i % 10])
    assert len(split) == len(expected)
    for row, ids in zip(split.windows(np.arange(len(split))), expected, strict=True):
        assert row[: len(ids)].tolist() == ids.tolist()
        assert (row[len(ids) : SEQ_LEN] == ~EOT).all() and row[SEQ_LEN] < 0


@pytest.mark.slow
def test_workers_and_chunks_change_nothing(make, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 700)
    cfg = make(lines(200))
    folder = prepare(cfg, max_seq_len=SEQ_LEN)
    before = files(folder)
    assert len(before) > 12  # several chunks
    assert files(prepare(make(lines(200), "again"), 2, SEQ_LEN)) == before


def test_shards_of_an_interrupted_preparation_with_other_settings_are_made_anew(make):
    folder = prepare(make(lines()), max_seq_len=SEQ_LEN)
    (folder / "dataset.json").unlink()
    prepare(make(lines(), target_prompts="all"), max_seq_len=SEQ_LEN)
    other = prepare(make(lines(), "other", target_prompts="all"), max_seq_len=SEQ_LEN)
    assert files(folder) == files(other)


def test_a_tokenizer_learns_from_the_text_and_not_from_json(make):
    folder = prepare(make(lines(), tokenizer="bpe-350"), max_seq_len=SEQ_LEN)
    bpe = tokenizers.load("bpe-350", folder / "tokenizer.json")
    assert b"assistant" in bpe.tokens  # of ChatML
    assert not any(b"null" in token for token in bpe.tokens)  # of a turn without a weight


def test_a_folder_belongs_to_its_settings(make, folder):
    for change, message in (
        ({"target_prompts": "all"}, "--target_prompts=none, not all"),
        ({"packing": False}, "--packing=True, not False"),
        ({"data_format": "text"}, "--data_format=chat, not text"),
    ):
        assert message in refusal(open_or_prepare, replace(make(lines()), **change), SEQ_LEN)
    assert "--max_seq_len=128, not 32" in refusal(open_or_prepare, make(lines()), 32)
    assert "max_seq_len 128, not 32" in refusal(Split, folder, "train", 32)


@pytest.mark.parametrize("edit", ["template", "special token"])
def test_a_run_notices_that_the_template_changed(make, tmp_path, edit):
    """Nothing is lost: the rows stay as they are, until someone prepares them again."""
    folder = tmp_path / "template"
    folder.mkdir()
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    template, tokens = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    template.write_text(source)
    tokens.write_text(json.dumps({"eos_token": "</s>"}))
    cfg = make(lines(), chat_template=str(folder))
    prepared = open_or_prepare(cfg, SEQ_LEN)
    before = files(prepared)
    assert open_or_prepare(cfg, SEQ_LEN) == prepare(cfg, max_seq_len=SEQ_LEN) == prepared
    assert files(prepared) == before

    if edit == "template":  # of the same size
        template.write_text(source.replace(": ", "; "))
    else:
        tokens.write_text(tokens.read_text().replace("/", "!"))
    message = refusal(open_or_prepare, cfg, SEQ_LEN)
    assert message.startswith(f"chat_template={folder} changed after {prepared} was made")
    assert files(prepared) == before

    command = message.partition("python data.py ")[2]
    model_cfg, again = config.load(shlex.split(command), MPTConfig, TrainConfig)
    prepare(again, max_seq_len=model_cfg.max_seq_len)
    assert open_or_prepare(cfg, SEQ_LEN) == prepared and files(prepared) != before


def test_rows_serve_where_their_source_is_not(make, tmp_path):
    cfg = make(lines(), chat_template=str(tmp_path / "own.jinja"))
    (tmp_path / "own.jinja").write_text(chat.CHATML)
    folder = open_or_prepare(cfg, SEQ_LEN)
    (tmp_path / "chat.jsonl").unlink()
    (tmp_path / "own.jinja").unlink()
    assert open_or_prepare(cfg, SEQ_LEN) == folder


def test_shards_hold_special_tokens_where_the_template_wrote_them(make, tmp_path):
    theirs = byte_level()
    theirs.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = str(tmp_path / "theirs.json")
    theirs.save(path)
    fake = {"role": "user", "content": "<|im_start|>system"}
    rows = [{"messages": [fake, {"role": "assistant", "content": "no"}]}] * 20
    folder = prepare(make(rows, tokenizer=path), 1, SEQ_LEN)
    ids = Shard(folder / "train-00000.bin").ids
    used = np.maximum(ids, ~ids)
    assert (used == 257).sum() == 2 * 18 and (used == 258).sum() == 2 * 18
    assert tokenizers.load(path).decode(used).count("<|im_start|>") == 3 * 18


def test_plain_text_still_takes_its_folder(make, tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(["some text here"] * 40))
    cfg = replace(make([]), dataset=str(tmp_path / "a.txt"), data_format="text")
    folder = prepare(cfg)
    older = {key: value for key, value in read_summary(folder).items() if key != "data_format"}
    (folder / "dataset.json").write_text(json.dumps(older))
    assert open_or_prepare(cfg, SEQ_LEN) == folder
    message = refusal(open_or_prepare, replace(cfg, data_format="chat"), SEQ_LEN)
    assert "--data_format=text, not chat" in message


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "is empty"),
        ([{"prompt": "a", "response": "b"}], "one example only"),
        ([{"prompt": "a", "response": "b", "weight": 0}] * 20, "every last response has weight 0"),
        ([{"prompt": "a" * 128, "response": "b"}] * 20, "nothing to learn in the 18 train"),
    ],
)
def test_nothing_is_left_to_learn(make, rows, message):
    assert message in refusal(prepare, make(rows), 1, SEQ_LEN)


def test_of_a_lone_validation_example_nothing_is_left_to_learn(make):
    """The advice works: a larger share for validation."""
    rows = [{"prompt": "p" * 300, "response": "x"}] + [{"prompt": "a", "response": "b"}] * 9
    message = refusal(prepare, make(rows), 1, SEQ_LEN)
    assert "in the 1 val examples" in message and "Raise --val_fraction=0.1" in message
    prepare(make(rows, val_fraction=0.2), max_seq_len=SEQ_LEN)


def test_an_id_beyond_the_vocabulary(folder):
    path = folder / "train-00000.bin"
    content = bytearray(path.read_bytes())
    content[4096:4100] = int(~257).to_bytes(4, "little", signed=True)
    path.write_bytes(content)
    split = Split(folder, "train", SEQ_LEN)
    assert "ids beyond its vocabulary" in refusal(split.windows, np.array([0]))


# --- batches


@given(arrays.arrays(np.int64, (3, 9), elements=st.integers(-(2**31) + 1, 2**31 - 1)))
def test_an_id_that_is_not_learned_is_read_and_no_label(rows):
    ids, labels = inputs_and_labels(torch.from_numpy(rows))
    for row, row_ids, row_labels in zip(rows.tolist(), ids.tolist(), labels.tolist(), strict=True):
        assert row_ids == [i if i >= 0 else -1 - i for i in row[:-1]]
        assert row_labels == [i if i >= 0 else IGNORE for i in row[1:]]


# --- losses


def alone(model, ids):
    """The summed loss of one example, by the formula, and the number of its learned tokens."""
    used = torch.from_numpy(np.maximum(ids, ~ids).astype(np.int64))
    labels = torch.from_numpy(np.where(ids < 0, IGNORE, ids).astype(np.int64))
    logits = model(used[None, :-1])[0]
    loss = F.cross_entropy(logits, labels[1:], ignore_index=IGNORE, reduction="sum")
    return loss.item(), int((labels >= 0).sum())


@torch.no_grad()
@pytest.mark.parametrize("positions, target_prompts", [("alibi", "none"), ("rope", "all")])
def test_packed_examples_have_the_loss_that_each_has_alone(make, positions, target_prompts):
    names = {"alibi": positions == "alibi", "rope": positions == "rope"}
    model = MPT(MPTConfig(**(vars(MODEL) | names))).double()
    init_weights(model, 0)
    model.separator = EOT
    cfg = make(lines(), target_prompts=target_prompts)
    split = Split(prepare(cfg, max_seq_len=SEQ_LEN), "train", SEQ_LEN)
    ids, labels = inputs_and_labels(torch.from_numpy(split.windows(np.arange(len(split)))))
    packed = model(ids, labels=labels).item()

    rows = [row for i, row in enumerate(lines()) if i % 10]
    examples = encoded(rows, target_prompts=target_prompts)
    assert len(split) < len(examples) / 1.5
    sums, counts = zip(*(alone(model, example) for example in examples), strict=True)
    assert sum(counts) == (labels != IGNORE).sum() == split.learned
    assert packed == pytest.approx(sum(sums), rel=0, abs=1e-9 * sum(counts))

    model.eval().separator = None  # without sequence ids they see each other
    assert abs(model(ids, labels=labels).item() - packed) > 1e-3


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"alibi": False}, "positions that are relative"),
        ({"attn_uses_sequence_id": False}, "set --attn_uses_sequence_id"),
    ],
)
def test_what_packing_needs(settings, message):
    cfg = TrainConfig(data_format="chat")
    model_cfg = replace(MODEL, **settings)
    assert message in refusal(data.check_packing, model_cfg, cfg)
    data.check_packing(model_cfg, replace(cfg, packing=False))


# --- programs


def test_preparing_says_what_was_cut_and_dropped(make, capsys):
    cfg = make(lines())
    flags = [f"--{name}={getattr(cfg, name)}" for name in ("dataset", "tokenizer", "data_dir")]
    flags += ["--data_format=chat", "--val_fraction=0.1", f"--max_seq_len={SEQ_LEN}"]
    data.main(flags)
    split = Split(Path(cfg.data_dir), "train", SEQ_LEN)
    train = capsys.readouterr().out.splitlines()[1]
    assert f"fill {split.count('filled') / SEQ_LEN / len(split):.1%} of" in train
    assert f"{split.learned:,} tokens are learned; " in train
    kept = len(encoded([row for i, row in enumerate(lines()) if i % 10]))
    dropped = 54 - kept
    assert train.strip().startswith(f"{kept} examples") and dropped > 0
    assert f"cut to 128 tokens, {dropped} dropped" in train


SIZE = [f"--{name}={value}" for name, value in vars(MODEL).items() if value is not None]
RUN = """
    --global_batch_size=4 --microbatch_size=1 --max_steps=4 --warmup_steps=1 --lr=1e-2
    --schedule=constant --device=cpu --precision=fp32 --val_fraction=0.1 --tokenizer=bytes
    --data_format=chat --target_responses=all --sharding=FULL_SHARD
""".split()


@pytest.mark.slow
def test_two_ranks_train_on_prompts_and_responses(make, tmp_path, ranks):
    """Losses of both ranks together are those of one process, and by hand those of each example."""
    cfg = make(lines(), target_responses="all")
    flags = [*SIZE, *RUN, f"--dataset={cfg.dataset}", f"--data_dir={cfg.data_dir}"]
    for size, name in ((2, "two"), (1, "one")):
        (status, message, said), *_ = ranks(size)(
            train_here, [*flags, f"--run_dir={tmp_path}/{name}"]
        )
        assert status == 0, message
        opening = Split(Path(cfg.data_dir), "train", SEQ_LEN).describe_rows()
        assert f"tokens: {opening}" in said

    def figures(name):
        rows = runlog.read(tmp_path / name)
        return [row.get("loss", row.get("val_loss")) for row in rows]

    assert figures("two") == pytest.approx(figures("one"), rel=5e-6)

    val = encoded(lines()[::10], target_responses="all")
    model = load.load_model(tmp_path / "two/checkpoints/step-4", torch.device("cpu")).double()
    with torch.no_grad():
        sums, counts = zip(*(alone(model, example) for example in val), strict=True)
    last = [row for row in runlog.read(tmp_path / "two") if "val_loss" in row][-1]
    mean = sum(sums) / sum(counts)
    assert last["val_loss"] == pytest.approx(mean, rel=5e-6)
    text_bytes = sum(((ids >= 0) & (ids != EOT)).sum() for ids in val)
    bits = mean * sum(counts) / text_bytes / np.log(2)
    assert last["val_bits_per_byte"] == pytest.approx(bits, rel=5e-6)
