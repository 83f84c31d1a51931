"""Writing text: the cache, batches of different lengths, how a text ends, and the program."""

import copy
import io
import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, clean_environment, flags_for, launch

import generate as program
from config import MPTConfig, UserError
from model import MPT, KVCache, init_weights
from serving.decoder import Decoder, PackedLinear, can_pack, generate
from serving.stream import Speed, Text, write
from text import tokenizer as tokenizers
from weights import hf

TINY = dict(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=24)
KINDS = {
    "alibi": {"alibi": True},
    "learned": {},
    "rope": {"rope": True},
    "gqa": {"alibi": True, "kv_n_heads": 2},
    "rope, multi-query": {"rope": True, "kv_n_heads": 1},
    "scaled, untied": {"alibi": True, "logit_scale": "inv_sqrt_d_model", "tie_word_embeddings": False},
}
every_kind = pytest.mark.parametrize("more", KINDS.values(), ids=KINDS)
BYTES = tokenizers.load("bytes")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two threads would wait for each other in products that take a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(**more):
    mpt = MPT(MPTConfig(**TINY | more)).eval()
    init_weights(mpt, seed=0)
    return mpt


def decoder(mpt, vocab_size=64, dtype=None):
    return Decoder(copy.deepcopy(mpt), vocab_size, dtype)  # it packs the weights of the model that it takes


@every_kind
def test_cached_logits_equal_those_of_the_whole_sequence(more):
    mpt, ids = model(**more), torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    decode, cache = decoder(mpt), KVCache.empty(mpt.cfg, 2, 20, "cpu", torch.float32)
    with torch.inference_mode():
        whole = mpt(ids)
        for begin, end in [(0, 7), (7, 8), (8, 13), *((i, i + 1) for i in range(13, 20))]:
            torch.testing.assert_close(decode(ids[:, begin:end], cache), whole[:, end - 1], atol=1e-5, rtol=0)


@every_kind
def test_batched_logits_equal_one_at_a_time(more):
    mpt, lengths = model(**more), (3, 11, 7)
    rows = [torch.randint(64, (n + 5,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    pad = torch.tensor([11 - n for n in lengths])
    padded = torch.stack([torch.nn.functional.pad(row, (p, 0)) for row, p in zip(rows, pad.tolist(), strict=True)])
    decode, cache = decoder(mpt), KVCache.empty(mpt.cfg, 3, 16, "cpu", torch.float32, pad=pad)
    with torch.inference_mode():
        for begin, end in [(0, 11), *((i, i + 1) for i in range(11, 16))]:
            together = decode(padded[:, begin:end], cache)
            for row, p, logits in zip(rows, pad.tolist(), together, strict=True):
                torch.testing.assert_close(logits, mpt(row[None, : end - p])[0, -1], atol=1e-5, rtol=0)


@every_kind
def test_greedy_sampling_equals_the_argmax_of_the_whole_sequence(more):
    mpt = model(**more)
    ids = torch.arange(6).view(2, 3)
    for token in list(generate(decoder(mpt), ids, 12, temperature=0)):
        with torch.no_grad():
            assert torch.equal(token, mpt(ids)[:, -1].argmax(-1))
        ids = torch.cat([ids, token[:, None]], dim=1)
    assert ids.shape == (2, 15)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float64, 1e-12)])
def test_packed_weights_are_the_same_weights(dtype, tolerance):
    mpt = model(alibi=True).to(dtype)
    decode, ids = decoder(mpt, vocab_size=61), torch.arange(10)[None]
    packed = sum(isinstance(module, PackedLinear) for module in [decode.head, *decode.model.modules()])
    assert packed == (4 * 2 + 1 if can_pack(torch.device("cpu"), dtype) else 0)
    with torch.inference_mode():
        logits = decode(ids, KVCache.empty(mpt.cfg, 1, 10, "cpu", dtype))
        torch.testing.assert_close(logits, mpt(ids)[:, -1, :61].float(), atol=tolerance, rtol=tolerance)


def test_learned_positions_end_and_the_others_go_on():
    ids = torch.zeros(1, 20, dtype=torch.long)
    assert len(list(generate(decoder(model()), ids, 100))) == 24 - 20 + 1
    for more in ({"alibi": True}, {"rope": True}):
        assert len(list(generate(decoder(model(**more)), ids, 100))) == 100


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    tokens = generate(decoder(model(alibi=True), 5), torch.zeros(64, 1, dtype=torch.long), 8, temperature=5.0)
    assert torch.stack(list(tokens)).max() < 5


def texts(cfg, prompts, n=40, stops=(), seed=1):
    return [Text(prompt, BYTES, cfg, n, stops, seed) for prompt in prompts]


def result(text):
    return text.ids, text.text, text.end


@pytest.mark.parametrize("more", [{"alibi": True}, {}, {"rope": True}, {"alibi": True, "kv_n_heads": 2}], ids=str)
def test_texts_do_not_depend_on_those_beside_them(more):
    """Sampled, ending at different places: stop strings, end of text, the last token, the last learned position."""
    mpt = model(vocab_size=257, **more)
    decode, how = decoder(mpt, 257), {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
    prompts, stops = ["a", "the river ran", "", "of the water", "to be", "x" * 20], ("e", "\x00", "\x07")
    together = texts(mpt.cfg, prompts, stops=stops)
    pieces = {text: "" for text in together}
    for text, piece in write(decode, together, Speed(), **how):
        pieces[text] += piece
    alone = texts(mpt.cfg, prompts, stops=stops)
    for text in alone:
        list(write(decode, [text], Speed(), **how))
    assert [result(text) for text in together] == [result(text) for text in alone]
    assert list(pieces.values()) == [text.text for text in together]
    assert len({text.new_tokens for text in together}) > 2 and len({text.end for text in together}) > 1
    if not more:
        assert {len(text.ids) for text in together if text.end == "max_seq_len"} == {25}


def test_the_seed_decides_the_text():
    mpt = model(alibi=True, vocab_size=257)
    decode = decoder(mpt, 257)

    def written(**how):
        (text,) = texts(mpt.cfg, ["river"], **how)
        list(write(decode, [text], Speed(), temperature=1.0))
        return text.ids

    assert written(seed=3) == written(seed=3) != written(seed=4)
    assert written(seed=3, n=60)[:45] == written(seed=3)


def added(text, new):
    return [text.add(token) for token in new]


def test_a_stop_string_may_span_tokens():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], stops=["END", "]]>"])
    assert added(text, b"aENbE]N") == ["a", "", "", "ENb", "", "E", "]N"] and text.end is None
    assert added(text, b"END") == ["", "", ""] and (text.text, text.end) == ("aENbE]N", "stop string")


def test_the_first_of_two_stop_strings_counts():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], stops=["bcd", "c"])
    text.tokenizer = tokenizers.Tokenizer("bytes", [b"ab", b"cd"])  # one token completes both
    assert added(text, [0, 1]) == ["a", ""] and text.text == "a"


def test_held_back_characters_come_when_the_text_ends():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], n=3, stops=["yes!"])
    assert added(text, b"yes") == ["", "", "yes"] and text.end == "max_new_tokens"
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"], stops=["yes!"])
    assert added(text, [*b"ye", BYTES.eot]) == ["", "", "ye"] and text.end == "end of text" and text.new_tokens == 2


def test_a_character_is_shown_when_it_is_whole():
    (text,) = texts(MPTConfig(**TINY, alibi=True), ["?"])
    shown = added(text, "é€😀".encode())
    assert shown == ["", "é", "", "", "€", "", "", "", "😀"]
    assert added(text, [0xC3, ord("a")]) == ["", "\ufffda"]  # no character begins so


def test_speed_is_bytes_over_seconds():
    mpt = model(alibi=True, kv_n_heads=2)
    weights = sum(p.numel() for p in mpt.parameters()) * 4
    line = Speed(10, 0.5, steps=4, tokens=8, seconds=2.0, cached=300).report(decoder(mpt))
    read = (4 * weights + 300 * 2 * 2 * 2 * 8 * 4) / 4  # bytes a step: 2 layers, k and v, 2 heads of 8 numbers
    assert "10 tokens, 20 tokens/s" in line and "8 tokens, 4 tokens/s, 4 steps of 500.00 ms" in line
    assert f"{read / 1e6:,.1f} MB" in line and re.search(r"\d+% of \d+ \(this CPU's", line)


def test_steps_are_counted():
    mpt, speed = model(alibi=True, vocab_size=257), Speed()
    list(write(decoder(mpt, 257), texts(mpt.cfg, ["abc", "a"], n=5), speed, temperature=0))
    assert (speed.prompt_tokens, speed.steps, speed.tokens) == (4, 4, 8)
    assert speed.cached == 2 * (4 + 5 + 6 + 7)  # 3 tokens of the longer prompt, and the step's own


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    """A run folder of two steps over bytes."""
    folder = tmp_path_factory.mktemp("sampling")
    flags = [f"--{k}={v}" for k, v in (TINY | {"vocab_size": 320}).items()]
    flags += ["--alibi", *flags_for(tiny_data), "--global_batch_size=4"]
    flags += ["--max_steps=2", "--warmup_steps=1", "--save_interval=1", "--run_dir=run", "--eval_tokens=100"]
    done = launch([], folder, flags)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def said(run, capsys):
    """`said(*args)`: what the program prints for the run, with 20 new tokens."""

    def say(*args, run=run):
        program.main([str(run), "--max_new_tokens=20", *map(str, args)])
        return capsys.readouterr().out

    return say


def test_program_is_deterministic_and_knows_the_steps(said, run):
    first = said("--prompt=the river")
    assert first.startswith(f"--- {run}/checkpoints/step-2 ---\nthe river") and len(first.split("\n", 1)[1]) > 15
    assert said("--prompt=the river") == first != said("--prompt=the river", "--seed=2")
    assert "before training" in said("--step=0") and "step-1" in said("--step=1")
    assert said("--prompt=the river", "--precision=fp32").startswith(first[:9])


def test_program_takes_many_prompts(said, tmp_path):
    (tmp_path / "prompts.txt").write_text("the river\n\nä tree\n")
    flags = ["--prompt=a", "--prompt=a", f"--prompts={tmp_path}/prompts.txt", "--json", "--precision=fp32"]
    lines = [json.loads(line) for line in said(*flags, "--batch_size=3").splitlines()]
    assert [line["prompt"] for line in lines] == ["a", "a", "the river", "ä tree"]
    assert lines[0]["text"] != lines[1]["text"]  # the next seed
    assert {line["tokens"] for line in lines} == {20} and {line["end"] for line in lines} == {"max_new_tokens"}
    shown = said("--prompt=the river", "--precision=fp32").split("\n", 1)[1]
    assert shown.rstrip("\n") == "the river" + lines[2]["text"].rstrip("\n")
    both = said(*flags[:2], "--precision=fp32")
    assert f"--- 1, max_new_tokens ---\na{lines[0]['text']}\n" in both and f"\na{lines[1]['text']}\n" in both


def test_program_answers_mistakes_in_one_line(run, tmp_path):
    (tmp_path / "empty").write_text("\n\n")
    for args, words in (
        ([run, "--step=9"], "no checkpoint of step 9 in .*step-1, step-2, and 0 is untrained"),
        ([run, "--top_p=0"], r"top_p is in \(0, 1\]"),
        ([run, "--top_k=-1"], "top_k are 0 or more"),
        ([run, "--temperature=nan"], "temperature and top_k are 0 or more"),
        ([run, "--seed=-1"], "seed is 0 or more"),
        ([run, "--max_new_tokens=0"], "max_new_tokens is 1 or more"),
        ([run, "--max_new_tokens=many"], "invalid int value: 'many'"),
        ([run, "--stop="], "a stop string is empty"),
        ([run, "--interactive", "--json"], "leave out --prompt, --prompts and --json"),
        ([run, f"--prompts={tmp_path}/empty"], "no prompt in .*empty: it wants one per line"),
        ([tmp_path], "no checkpoint in"),
        ([], "the following arguments are required: run"),
    ):
        with pytest.raises(UserError, match=words) as wrong:
            program.main([str(arg) for arg in args])
        assert "\n" not in str(wrong.value)
    wrong = launch([], tmp_path, ["nothing", "--prompt=x"], program="generate.py")
    assert wrong.returncode == 2 and "no checkpoint in 'nothing'" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_a_prompt_beyond_learned_positions_is_refused_before_anything_is_written():
    (fits,) = texts(MPTConfig(**TINY), ["x" * 24])
    assert fits.n_prompt == 24
    with pytest.raises(UserError, match="has 25 tokens, but learned positions end at max_seq_len 24: shorten it"):
        texts(MPTConfig(**TINY), ["x" * 25])
    texts(MPTConfig(**TINY, alibi=True), ["x" * 25])
    texts(MPTConfig(**TINY, rope=True), ["x" * 25])


def test_interactive_goes_line_by_line(said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the river\nblue\nthe river\n\nnever read\n"))
    shown = said("--interactive")
    once = said("--prompt=the river").split("\n", 1)[1]
    assert shown.startswith(once) and "\nblue" in shown and shown.count("the river") >= 2 and "never" not in shown


def test_control_c_stops_the_text_and_not_the_program(run):
    command = [sys.executable, str(ROOT / "generate.py"), str(run), "--interactive", "--max_new_tokens=1000000"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(command, env=clean_environment(), **pipes)
    try:
        process.stdin.write(b"river\n")
        process.stdin.flush()
        assert process.stdout.read(40).startswith(b"river")  # it is writing
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"\n", timeout=60)
        assert process.returncode == 0 and out.endswith(b"\n") and b"tokens/s" in err and b"Traceback" not in err
    finally:
        process.kill()


def test_a_hugging_face_folder(said, run, tmp_path, monkeypatch):
    hf.export(str(run), str(tmp_path / "theirs"))
    flags = ["--prompt=the river", "--precision=fp32"]
    for more in ([], ["--tokenizer=bytes"]):  # its config.json says so
        theirs = said(*flags, *more, run=tmp_path / "theirs")
        assert theirs.splitlines()[1:] == said(*flags).splitlines()[1:]
    with pytest.raises(UserError, match="has no steps: leave out --step"):
        said(*flags, "--step=3", run=tmp_path / "theirs")
    with pytest.raises(UserError, match="is a run of ours, which has its tokenizer: leave out --tokenizer"):
        said(*flags, "--tokenizer=bytes")
    settings = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings | {"tokenizer_name": "EleutherAI/gpt-neox-20b"}))
    with pytest.raises(UserError, match="wants the tokenizer EleutherAI/gpt-neox-20b"):  # not gpt2's ids instead
        said(*flags, run=tmp_path / "theirs")
    (tmp_path / "theirs/config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(tokenizers, "load", lambda *_: tokenizers.Tokenizer("bytes", [b"x"] * 400))
    with pytest.raises(UserError, match="bytes has ids up to 400, but the vocabulary of .* ends at 319: set the --tok"):
        said(*flags, run=tmp_path / "theirs")
