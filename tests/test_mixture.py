"""--mix: each source has its share of any samples in a row, and epochs of its own.

And a validation loss and a folder of its own, so one source can be made again without the others.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import train_here

import config
import data
from config import MPTConfig, TrainConfig, load
from data import Dataset, Mixture, Split
from lessons import finetuned
from lifecycle import runlog
from text.mixture import Source, sources
from text.prepare import SMALL_BYTES, prepare
from text.recipe import each_source, of_mixture
from text.shards import read_summary

SEQ_LEN = 8
MODEL = MPTConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=SEQ_LEN)
TEXTS = {
    "long": [f"long document {i}, which goes on for a while. " * 5 for i in range(60)],
    "short": [f"SHORT {i}!" for i in range(20)],
    "odd": [f"one = {i}, two: {i * i}; " * 2 for i in range(30)],
}
FILES = {"long": "long.txt", "short": "short @0.5.jsonl", "odd": "a=b,c:d@0.3.txt"}
SHARES = {"long": 0.5, "short": 0.2, "odd": 0.3}


def write(folder, name, texts):
    path = folder / FILES[name]
    if path.suffix == ".jsonl":
        return write_lines(path, *({"text": text} for text in texts))
    path.write_text("<|endoftext|>".join(texts))
    return str(path)


@pytest.fixture
def make(tmp_path):
    """make(**settings): the settings of a mixture of three sources of text, beside each other."""
    for name, texts in TEXTS.items():
        write(tmp_path, name, texts)

    def make(shares=SHARES, **settings):
        mix = [f"{name} {share} {tmp_path / FILES[name]}" for name, share in shares.items()]
        usual = {"tokenizer": "bytes", "val_fraction": 0.1, "data_dir": str(tmp_path / "tokens")}
        usual["run_dir"] = str(tmp_path / "run")
        return TrainConfig(mix=mix, **(usual | settings))

    return make


def opened(cfg) -> Dataset:
    return Dataset(data.open_folders(cfg, SEQ_LEN), MODEL, cfg)


def content(folder) -> dict:
    """Name -> content and time of change of the shards and the description of a data folder."""
    paths = [*Path(folder).glob("*.bin"), *Path(folder).glob("*.json")]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(paths)}


# --- the schedule

PARTS = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def shares_of(parts) -> list[float]:
    """Shares to four decimals that add up to 1, in proportion to `parts` or nearly so."""
    shares = [max(1, 10_000 * part // sum(parts)) for part in parts]
    shares[0] += 10_000 - sum(shares)
    return [share / 10_000 for share in shares]


@settings(max_examples=12, deadline=None)
@given(PARTS, st.integers(0, 10**12), st.integers(1, 1000))
def test_any_samples_in_a_row_hold_each_source_within_2_of_its_share(parts, first, length):
    shares = shares_of(parts)
    mixture = Mixture([], shares)
    for begin, n in ((first, 1000), (first, length), (0, length)):
        sources, _ = mixture.locate(begin + np.arange(n))
        counts = np.bincount(sources, minlength=len(shares))
        allowed = 2 if begin else 1  # from the start of the run the counts are closer still
        assert (abs(counts - n * np.array(shares)) < allowed).all()


@settings(max_examples=8, deadline=None)
@given(PARTS, st.integers(1, 5000))
def test_of_each_source_every_sample_comes_once_and_in_order(parts, n):
    """Over more than one schedule; and one sample at a time gives the same."""
    shares = shares_of(parts)
    mixture = Mixture([], shares)
    samples = np.arange(20_000 - n, 20_000 + n)
    sources, numbers = mixture.locate(samples)
    for source, share in enumerate(shares):
        own = numbers[sources == source]
        before = round(10_000 * share) * 2 - (samples < 20_000)[sources == source].sum()
        assert np.array_equal(own, before + np.arange(len(own)))
    assert mixture.locate(samples[:1])[1] == numbers[0]


def test_known_schedules():
    """Pinned: a change here reorders the data of every run that will be resumed."""
    assert data.schedule([0.5, 0.3, 0.2])[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    assert data.schedule([0.75, 0.25])[0].tolist() == [0, 0, 0, 1]
    sources, numbers = data.schedule([0.3333, 0.3333, 0.3334])
    assert len(sources) == 10_000 and sources[:6].tolist() == [2, 0, 1, 2, 0, 1]
    assert numbers[-3:].tolist() == [3332, 3332, 3333]


# --- batches


def test_batches_are_the_same_for_any_number_of_ranks_and_after_a_move(make):
    """Exact counts, too: 10 steps of 20 samples are 20 schedules."""
    train, again = opened(make()).train, opened(make()).train
    assert np.bincount(train.locate(np.arange(200))[0]).tolist() == [100, 40, 60]
    for step in (0, 1, 26, 10**9):
        whole = train.batch(1, step, 20)
        for dp_size in (1, 2, 4):
            parts = [again.batch(1, step, 20, rank, dp_size) for rank in range(dp_size)]
            assert {len(rows) for rows in parts} == {20 // dp_size}
            assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(train.batch(2, 0, 20), train.batch(1, 0, 20))


def test_a_small_source_repeats_in_another_order_each_epoch(make):
    """While the large one has not been read once. Both as in a run on this source alone."""
    dataset = opened(make())
    stream = np.concatenate([dataset.train.batch(1, step, 10) for step in range(100)])
    sources, _ = dataset.train.locate(np.arange(1000))
    for k, part in enumerate(dataset.parts):
        own = stream[sources == k]
        assert np.array_equal(own, part.train.batch(1, 0, len(own)))
    short = stream[sources == 1]
    n = len(dataset.parts[1].train)
    epochs = [short[first : first + n] for first in range(0, len(short) - n, n)]
    assert len(epochs) > 5 and len(dataset.parts[0].train) > 500
    windows = dataset.parts[1].train.windows(np.arange(n)).tolist()
    assert all(sorted(epoch.tolist()) == sorted(windows) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_one_source_alone_is_the_same_as_no_mixture(make):
    cfg = make({"long": 1})
    plain = replace(cfg, mix=[], dataset=cfg.mix[0].split(None, 2)[2], data_dir="")
    plain.data_dir = cfg.data_dir + "/long"
    mixed, alone = opened(cfg), opened(plain)
    assert isinstance(alone.train, Split) and alone.epoch_tokens == 8 * len(alone.train)
    for step in (0, 7, 10**6):
        assert np.array_equal(mixed.train.batch(3, step, 16), alone.train.batch(3, step, 16))


# --- what cannot be

BAD = {
    "c4": "mix takes NAME SHARE DATASET, as --mix='c4 0.7 allenai/c4:en', not 'c4'",
    "a/b 0.5 x.txt": "'a/b': name it with up to 40 letters, digits, _ and -",
    ".. 0.5 x.txt": "name it with",
    "a half x.txt": "'a' with the share 'half': write a number from 0.0001 to 1",
    "a 0.33333 x.txt": "at most four decimals",
    "a 0.000 x.txt": "'a' with the share '0.000': write a number from 0.0001",
    "Web 0.5 x.txt | web 0.5 y.txt": "one name, Web and web: rename one of them",
    "a 0.5 x.txt | b 0.5 x.txt": "'x.txt' twice, as a and b: name it once, with both shares",
    "a 0.5 x.txt | b 0.4 y.txt": "add up to 0.9, not 1: change them",
}


def test_a_mixture_that_cannot_be_is_one_line_that_names_the_fix():
    for lines, message in BAD.items():
        mix = [line.strip() for line in lines.split(" | ")]
        assert message in refusal(sources, mix), lines
    assert "mix takes NAME SHARE DATASET" in refusal(of_mixture, prepare, TrainConfig(mix=["c4"]))


def test_a_data_set_may_have_any_name():
    for name in ("allenai/c4:en", "my, own=x@0.3/*.txt", "--mix=a 0.5 b", "a  b\tc#'\""):
        assert sources([f"a 1 {name}"]) == [Source("a", 1.0, name)]
    (source,) = sources(["a 1.0 ~/text"])
    assert source.dataset == str(Path.home() / "text")


def test_of_dataset_and_mix_the_later_one_counts(tmp_path):
    """A config file's data set, then a mixture on the command line, and the other way round."""
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("dataset = 'allenai/c4:en'\n")
    two.write_text("mix = ['a 0.5 x.txt', 'b 0.5 y.txt']\n")
    mix = ["--mix=a 0.25 x.txt", "--mix", "b 0.75 y.txt"]

    def chosen(*argv):
        (cfg,) = load([*map(str, argv)], TrainConfig)
        assert config.from_dict(TrainConfig, json.loads(config.to_json(cfg))) == cfg
        return cfg.dataset, [source.share for source in sources(cfg.mix)]

    assert chosen(one, *mix) == ("stdlib", [0.25, 0.75])
    assert chosen(one, two) == ("stdlib", [0.5, 0.5])
    nothing = tmp_path / "none.py"
    nothing.write_text("mix = []\n")
    assert chosen(one, nothing) == ("allenai/c4:en", [])
    assert chosen(two, *mix) == ("stdlib", [0.25, 0.75])
    assert chosen(two, "--dataset=z.txt") == chosen(two, one, "--dataset=z.txt") == ("z.txt", [])
    assert "remove one of them" in refusal(load, ["--dataset=z.txt", *mix], TrainConfig)


def test_a_source_that_holds_too_little_is_named(make, tmp_path):
    cfg = make()
    path = write(tmp_path, "short", ["one"])
    message = refusal(open_all, cfg)
    assert message.startswith("source short of the mixture: dataset=") and path in message


def test_a_mixture_is_not_read_from_a_store(make):
    cfg = make(data_dir="s3://bucket/tokens")
    message = refusal(open_all, cfg)
    assert "from folders of this machine, not from s3://bucket/tokens: set --data_dir" in message
    flags = [f"--mix={line}" for line in cfg.mix]
    assert refusal(data.main, [*flags, f"--data_dir={cfg.data_dir}"]) == message


def open_all(cfg):
    return data.open_folders(cfg, SEQ_LEN)


# --- folders


def test_each_source_has_a_folder_of_its_own(make, tmp_path, monkeypatch):
    """And --max_tokens limits each."""
    limited = open_all(make(max_tokens=150, data_dir=str(tmp_path / "limited")))
    assert [read_summary(folder)["train_tokens"] for folder in limited] == [150, 150, 150]
    folders = open_all(make())
    assert folders == [tmp_path / "tokens" / name for name in SHARES]
    for folder, (cfg, _) in zip(folders, each_source(make()), strict=True):
        alone = prepare(replace(cfg, mix=[], data_dir=f"{folder}-alone"))
        assert [text for text, _ in content(alone).values()] == [
            text for text, _ in content(folder).values()
        ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("one<|endoftext|>two<|endoftext|>three")
    (tmp_path / "y.txt").write_text("four<|endoftext|>five<|endoftext|>six")
    near = TrainConfig(tokenizer="bytes", mix=["a 0.5 x.txt", "b 0.5 y.txt"], val_fraction=0.3)
    alone = prepare(replace(near, mix=[], dataset="x.txt"))  # serves both
    before = content(alone)
    assert open_all(near) == [alone, Path("data/y.txt-bytes")] and content(alone) == before
    of_bpe = [f.name for f in open_all(replace(near, tokenizer="bpe-260"))]
    assert of_bpe == ["x.txt-bpe-260", "y.txt-bpe-260-of-x.txt"]


def test_one_source_is_replaced_without_the_others(make, tmp_path):
    """A run on the old one is not begun; the command in the message makes this source again."""
    cfg = make(tokenizer="bpe-300")
    folders = open_all(cfg)
    before = [content(folder) for folder in folders]
    write(tmp_path, "odd", [text * 2 for text in TEXTS["odd"]])
    message = refusal(open_all, cfg)
    assert "source odd of the mixture" in message and "changed after" in message
    run_command(message)
    assert open_all(cfg) == folders
    after = [content(folder) for folder in folders]
    assert after[:2] == before[:2] and after[2] != before[2]

    more = make({"long": 0.4, "short": 0.6}, tokenizer="bpe-300")  # other shares, fewer sources
    assert open_all(more) == folders[:2] and [content(f) for f in folders] == after
    other = replace(cfg, mix=[f"long 1 {tmp_path / FILES['odd']}"])
    message = refusal(open_all, other)
    assert "delete that folder if no run needs it, or set another --data_dir" in message


def run_command(message):
    """What `python data.py`, the command that a message ends with, does."""
    return of_mixture(prepare, settings_in(message))


def settings_in(message) -> TrainConfig:
    """Those of the command with which a message ends."""
    words = shlex.split(message.partition("python data.py ")[2])
    return load(words, MPTConfig, TrainConfig)[1]


def test_all_sources_have_the_tokenizer_of_the_first(make, tmp_path):
    """Also after that one has learned from other text."""
    cfg = make(tokenizer="bpe-300")
    folders = open_all(cfg)

    def learned():
        (only,) = {(folder / "tokenizer.json").read_bytes() for folder in folders}
        return only

    first = learned()
    write(tmp_path, "long", ["zebra quiz " * 50] * 9)
    message = refusal(open_all, cfg)
    assert "source long of the mixture" in message
    prepare(replace(each_source(cfg)[0][0]), source="long")  # the first one alone
    message = refusal(open_all, cfg)
    assert "source short of the mixture: tokenizer=bpe-300 changed after" in message
    run_command(message)
    assert open_all(cfg) == folders and learned() != first
    fresh = make(tokenizer="bpe-300", data_dir=str(tmp_path / "fresh"))
    assert opened(fresh).fingerprint == opened(cfg).fingerprint


def test_a_large_source_is_not_prepared_by_a_training_run(make, tmp_path, monkeypatch):
    """The message holds the command that prepares the mixture, and a setting to begin with."""
    with open(tmp_path / FILES["odd"], "wb") as large:
        large.truncate(SMALL_BYTES + 1)
    cfg = make()
    message = refusal(open_all, cfg)
    assert "--dataset=" not in message and "--max_tokens=20000000" in message
    again = settings_in(message)
    assert again == replace(cfg, run_dir=again.run_dir)


def test_prompts_and_responses_can_be_mixed(tmp_path):
    names = {"sums": "What is 2+{}?", "words": "Say {}!"}
    for name, prompt in names.items():
        rows = [{"prompt": prompt.format(i), "response": f"{i + 2}"} for i in range(40)]
        write_lines(tmp_path / f"{name}.jsonl", *rows)
    mix = [f"{name} 0.5 {tmp_path}/{name}.jsonl" for name in names]
    more = {"data_format": "chat", "packing": False, "val_fraction": 0.1, "tokenizer": "bytes"}
    cfg = TrainConfig(mix=mix, data_dir=str(tmp_path / "tokens"), **more)
    model_cfg = replace(MODEL, max_seq_len=96)
    dataset = Dataset(data.open_folders(cfg, 96), model_cfg, cfg)
    rows = dataset.train.batch(1, 0, 10)
    assert rows.shape == (10, 97) and (rows < 0).any()
    assert dataset.train.locate(np.arange(10))[0].tolist() == [0, 1] * 5


def test_preparing_describes_each_source(make, capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no workers, which take seconds to start
    cfg = make()
    mix = [f"--mix={line}" for line in cfg.mix]
    flags = ["--tokenizer=bytes", f"--data_dir={cfg.data_dir}", "--max_seq_len=8"]
    data.main([*mix, *flags, "--val_fraction=0.1"])
    said = capsys.readouterr().out
    for name, share in SHARES.items():
        assert f"{name}, {share} of the samples:\ntrain  " in said
        assert f"{cfg.data_dir}/{name}\n" in said


# --- runs

RUN = """
    --d_model=32 --n_heads=4 --n_layers=2 --vocab_size=320 --max_seq_len=8 --global_batch_size=16
    --microbatch_size=2 --warmup_steps=2 --schedule=constant --lr=2e-3 --eval_interval=3
    --eval_tokens=400 --save_interval=3 --keep_last=9 --device=cpu --precision=fp32
""".split()


def flags_of(cfg, run_dir) -> list[str]:
    names = ("tokenizer", "val_fraction", "data_dir")
    flags = [f"--{name}={getattr(cfg, name)}" for name in names]
    source = [f"--mix={line}" for line in cfg.mix] or [f"--dataset={cfg.dataset}"]
    return [*RUN, *source, *flags, f"--run_dir={run_dir}"]


def trained(pool, flags):
    (status, message, said), *_ = pool(train_here, flags)
    assert status == 0, message
    return said


@pytest.mark.slow
def test_a_run_on_a_mixture_moves_between_ranks_and_goes_on_as_it_was(make, ranks, tmp_path):
    cfg = make(tokenizer="bpe-300")
    said = trained(ranks(1), [*flags_of(cfg, tmp_path / "one"), "--max_steps=9"])
    assert "short, 0.2 of the samples, " in said and "epochs" in said
    moved = flags_of(cfg, tmp_path / "moved")
    for size, last in ((2, 6), (1, 9)):
        trained(ranks(size), [*moved, f"--max_steps={last}"])

    ours, theirs = runlog.read(tmp_path / "moved"), runlog.read(tmp_path / "one")
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, wanted in zip(ours, theirs, strict=True):
        assert row.keys() == wanted.keys() and row.get("batch_hash") == wanted.get("batch_hash")
        for name in ("loss", "val_loss", "val_bits_per_byte", "val_loss_by_source"):
            assert row.get(name, 0) == pytest.approx(wanted.get(name, 0), rel=1e-5)

    validations = [row for row in theirs if "val_loss" in row]
    assert [row["step"] for row in validations] == [0, 3, 6, 9]
    for row in validations:
        losses = row["val_loss_by_source"]
        assert list(losses) == list(SHARES)
        mean = sum(SHARES[name] * loss for name, loss in losses.items())
        assert row["val_loss"] == pytest.approx(mean, rel=1e-12)
        assert row["val_bits_per_byte"] == pytest.approx(bits_by_hand(cfg, losses), rel=1e-9)
    assert runlog.line(validations[-1], 9).count("long") == 1
    assert runlog.read_launches(tmp_path / "one")[0]["epoch_tokens"] == 0

    other = make({"long": 0.6, "short": 0.2, "odd": 0.2}, tokenizer="bpe-300")
    (status, message, _), *_ = ranks(1)(train_here, [*flags_of(other, tmp_path / "one")])
    assert status == 2 and "0.5 of " in message and "(here 0.6 of " in message
    assert "trained on a mixture" in refusal(finetuned.text_of, str(tmp_path / "one"), SEQ_LEN)


def bits_by_hand(cfg, losses) -> float:
    """Nats of a token of the mixture / its bytes of text, in bits."""
    nats = n_bytes = 0
    for part in opened(cfg).parts:
        nats += SHARES[part.name] * losses[part.name]
        n_bytes += SHARES[part.name] * part.val.text_bytes / part.val.tokens
    return nats / n_bytes / np.log(2)
