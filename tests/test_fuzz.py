"""Readers of files get damaged and malicious ones: a result, or one line that names the file.

Of files that others write, and of what a run writes: its data, its metrics, its checkpoints.

A reader may raise UserError or OSError and nothing else. It may take 10 s and 1.5 GB more memory.
One process imports everything once and forks a child for each reader. A child that hangs or dies
costs one case: the next child continues with the following one.

Run `python tests/test_fuzz.py NAME` to see what one reader answers to each case; `--cases=400` sets
how many there are.
"""

import functools
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # when it runs by itself

from conftest import json_lines  # noqa: E402

SECONDS = 10  # of CPU time, for one case
BYTES = 1.5e9  # of memory, for one case
PATIENCE = 120  # seconds of wall time for one case: waiting for a pipe takes no CPU time
CASES = 36  # of each reader; in the long tier 400, more than ten thousand in all
TEXT = "A river under the old house.\n\nA blue tree sings, and walks slowly.\n\n" * 40
OLD = Path(__file__).parent / "old_runs"
SIZES = {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 16, "vocab_size": 257}


# --------------------------------------------------------------------------------------------------
# Good files. Each maker writes what its reader needs into a folder, and returns the file that will
# be damaged.


def prepared(pattern):
    """A maker of a prepared data set, of which the first file of this pattern is damaged."""

    def make(folder):
        from text.prepare import prepare

        (folder / "text.txt").write_text(TEXT.replace("\n\n", "<|endoftext|>"))
        return min(prepare(train_config(folder)).glob(pattern))

    return make


def train_config(folder):
    from config import TrainConfig

    names = {"dataset": f"{folder}/text.txt", "tokenizer": "bytes", "data_dir": f"{folder}/tokens"}
    return TrainConfig(**names, val_fraction=0.1, run_dir=str(folder))


def chat_file(name):
    """A maker of a chat with its template, of which the file `name` is damaged."""

    def make(folder):
        (folder / "template").mkdir()
        template = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "</s>"}}
        (folder / "template/tokenizer_config.json").write_text(json.dumps(template))
        (folder / "chat.jsonl").write_text(json_lines(*CHAT * 10))
        return folder / name

    return make


def mds_file(source, name):
    """A maker of a folder of MDS shards, without their hashes, of which the file `name` is damaged.

    source: a folder that MosaicML's package wrote.
    """

    def make(folder):
        shutil.copytree(Path(__file__).parent / "text/mds" / source, folder / "mds")
        path = folder / "mds/index.json"
        index = json.loads(path.read_text())
        for about in index["shards"]:
            for file in filter(None, (about["raw_data"], about["zip_data"])):
                file["hashes"] = {}
        path.write_text(json.dumps(index))
        return folder / "mds" / name

    return make


def written(name, content):
    """A maker of a single file."""

    def make(folder):
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def of_old_run(name):
    """A maker of a run folder of an earlier version, of which the file `name` is damaged."""

    def make(folder):
        for file in (OLD / "run").iterdir():
            shutil.copy(file, folder)
        return folder / name

    return make


def tiny_model():
    import torch

    from config import MPTConfig
    from model import MPT, init_weights

    torch.manual_seed(0)
    model = MPT(MPTConfig(**SIZES))
    init_weights(model, 0)
    return model


def checkpoint_file(name):
    """A maker of a run with one checkpoint, of which the file `name` is damaged."""

    def make(folder):
        from weights import hf

        hf.export(tiny_model(), folder / "theirs")
        hf.import_(folder / "theirs", folder / "run", "bytes")
        return folder / "run/checkpoints/step-0" / name

    return make


def hugging_face(name):
    """A maker of a Hugging Face folder in shards, of which the file `name` is damaged."""

    def make(folder):
        from weights import hf

        max_bytes = 10**9 if name == "model.safetensors" else 9000
        hf.export(tiny_model(), folder / "theirs", max_bytes=max_bytes)
        return folder / "theirs" / name

    return make


def pickled(name):
    """A maker of pytorch_model.bin, or of a Composer checkpoint with its settings."""

    def make(folder):
        import torch

        from weights import hf

        model = tiny_model()
        weights, settings = model.state_dict(), hf.config_to(model.cfg)
        if name == "composer.pt":
            weights = {f"model.{key}": tensor for key, tensor in weights.items()}
            held = {"huggingface": {"model": {"config": {"content": settings}}}}
            weights = {"state": {"model": weights, "integrations": held}}
        else:
            (folder / "config.json").write_text(json.dumps(settings))
        torch.save(weights, folder / name)
        return folder / name

    return make


def adapter(name):
    """A maker of a PEFT folder, of which the file `name` is damaged."""

    def make(folder):
        from random_adapters import write_random

        from config import MPTConfig, TrainConfig

        chosen = TrainConfig(init_from="any", lora_rank=2)
        write_random(folder / "theirs", MPTConfig(**SIZES), chosen, seed=0)
        return folder / "theirs" / name

    return make


def their_tokenizer(folder):
    from conftest import byte_level

    byte_level("th").save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def their_pair(folder):
    """GPT-2's older pair of files."""
    model = json.loads(their_tokenizer(folder).read_text())["model"]
    (folder / "merges.txt").write_text("t h")
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    return folder / "vocab.json"


def our_tokenizer(folder):
    from text import tokenizer

    tokenizer.train_bpe([TEXT], 270).save(str(folder / "bpe_tokenizer.json"))
    return folder / "bpe_tokenizer.json"


def parquet(folder):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": TEXT.split("\n\n")})
    pyarrow.parquet.write_table(table, folder / "text.parquet")
    return folder / "text.parquet"


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}
CHAT = [{"prompt": "2+2=", "response": "4"}, {"messages": [USER, ANSWER, USER, ANSWER]}]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = [{"text": "one"}, {"text": "two", "x": 1}]
MACHINE = {
    "device": "AMD Instinct MI250X",
    "ranks": 8,
    "nodes": 1,
    "memory_gbs": 1300.0,
    "matmul_tflops": {"bf16": {"4096": 120.0}},
    "collectives_gbs": {"all": {"all_gather": {"1": 40.0}, "all_reduce": {"1": 30.0}}},
    "latency_us": {"all": 50.0},
}
FIGURES = {"kind": "text", "digest": "0", "n": 1, "contexts_cut": 0, "requests": 1}
FIGURES |= {"nats_per_token": 2.0, "nats_per_byte": 1.0, "perplexity": 3.0}
SETTINGS = {"weights": "a", "precision": "fp32", "ids": "b"}
RESULTS = {"settings": SETTINGS, "tasks": {"a": FIGURES}}


# --------------------------------------------------------------------------------------------------
# Readers. Each gets the damaged file and the folder.


def read_data(path, folder):
    """Gives the tokens that the good file had, the first case, or refuses."""
    import numpy as np

    import data
    from data import open_or_prepare

    open_or_prepare(train_config(folder))
    tokens = data.Split(folder / "tokens", "train", 16).windows(np.arange(20))
    if not (folder / "right.npy").exists():
        np.save(folder / "right.npy", tokens)
    assert np.array_equal(tokens, np.load(folder / "right.npy"))


def read_chat(path, folder):
    from text import chat

    template = chat.load_template(str(folder / "template"))
    for example in chat.examples(str(folder / "chat.jsonl"), template):
        assert chat.turns_from(example)


def read_run(path, folder):
    """As its reader, and as a run that goes on."""
    from config import MPTConfig
    from lifecycle import plot, runlog

    run = plot.read(str(folder))
    plot.in_terminal([run])
    runlog.summary(str(folder))
    cfg = train_config(folder)
    runlog.RunLog(cfg, 0).start(MPTConfig(), cfg, {"ranks": 1}, folder / "tokenizer.json", 8)


def read_checkpoint(path, folder):
    """With the right checksum of the changed file, as an attacker would write it."""
    import torch

    from weights import load

    table = path.parent / "checksums.json"
    if path != table and path.is_file():
        content = path.read_bytes()
        sums = json.loads(table.read_text()) | {path.name: [len(content), zlib.crc32(content)]}
        table.write_text(json.dumps(sums))
    load.load_for_sampling(str(folder / "run"), None, torch.device("cpu"))


def read_weights(path, folder):
    from weights import hf

    source = path if path.suffix == ".pt" else path.parent
    hf.import_(source, folder / f"run-{os.urandom(4).hex()}", "bytes")


def read_adapter(path, folder):
    from weights import peft

    peft.read(path.parent)


def read_generation(path, folder):
    from weights import hf_tokenizer

    (folder / "config.json").write_text("{}")
    hf_tokenizer.end_ids(hf_tokenizer.generation_of(folder))


def read_tokenizer(path, folder):
    from text import tokenizer

    name = "bpe-270" if path.name == "bpe_tokenizer.json" else str(path)
    loaded = tokenizer.load(name, str(path))
    loaded.decode(loaded.encode(TEXT))


def read_task(path, folder):
    from evaluation import tasks as icl_tasks

    icl_tasks.load(str(path))


def read_results(path, folder):
    from evaluation import zero_shot

    results = zero_shot.finished(str(path), SETTINGS)
    complete = {name: result for name, result in results.items() if "digest" in result}
    zero_shot.table(complete, "model")


def read_corpus(path, folder):
    from text import corpus

    for text in corpus.documents(str(path)):
        assert isinstance(text, str)


def read_mds(path, folder):
    from text import corpus, tokenizer

    for document in corpus.documents(str(path.parent), tokenizer.load("bytes")):
        assert len(document)


def read_machine(path, folder):
    from planning import calibrate
    from planning.fleet import FleetArgs

    calibrate.from_files([str(path)], FleetArgs(device="mi250"))


def read_table(path, folder):
    from bench import compare

    rows = compare.read(path)
    compare.tables(rows, str(path))
    compare.scalings(compare.measured(rows, str(path)))


def read_config(path, folder):
    import config

    config.load([str(path)], config.MPTConfig, config.TrainConfig)


CONFIG = "_n = 4\nd_model = 16 * _n\nn_heads = 2\nlr = 1e-3\n"
TABLE = 'id,text\n1,"one, two"\n2,größe\n3,"a ""word"" and\na line"\n' * 9
GENERATION = json.dumps({"eos_token_id": [0, 2], "pad_token_id": 1, "top_k": 5})
READERS = {  # name -> (maker, reader)
    "dataset.json": (prepared("dataset.json"), read_data),
    "shard": (prepared("train-*.bin"), read_data),
    "chat.jsonl": (chat_file("chat.jsonl"), read_chat),
    "tokenizer_config.json": (chat_file("template/tokenizer_config.json"), read_chat),
    "metrics.jsonl": (of_old_run("metrics.jsonl"), read_run),
    "launches.jsonl": (of_old_run("launches.jsonl"), read_run),
    "config.json of a run": (of_old_run("config.json"), read_run),
    "meta.json": (checkpoint_file("meta.json"), read_checkpoint),
    "checksums.json": (checkpoint_file("checksums.json"), read_checkpoint),
    ".metadata": (checkpoint_file(".metadata"), read_checkpoint),
    "weights of a checkpoint": (checkpoint_file("__0_0.distcp"), read_checkpoint),
    "config.json": (hugging_face("config.json"), read_weights),
    "model.safetensors": (hugging_face("model.safetensors"), read_weights),
    "index.json": (hugging_face("model.safetensors.index.json"), read_weights),
    "pytorch_model.bin": (pickled("pytorch_model.bin"), read_weights),
    "composer.pt": (pickled("composer.pt"), read_weights),
    "adapter_config.json": (adapter("adapter_config.json"), read_adapter),
    "adapter_model.safetensors": (adapter("adapter_model.safetensors"), read_adapter),
    "generation_config.json": (written("generation_config.json", GENERATION), read_generation),
    "tokenizer.json": (their_tokenizer, read_tokenizer),
    "vocab.json": (their_pair, read_tokenizer),
    "bpe_tokenizer.json": (our_tokenizer, read_tokenizer),
    "task.jsonl": (written("task.jsonl", (OLD / "questions.jsonl").read_bytes()), read_task),
    "results.json": (written("results.json", json.dumps(RESULTS)), read_results),
    "text.jsonl": (written("text.jsonl", json_lines(*TEXTS)), read_corpus),
    "text.parquet": (parquet, read_corpus),
    "text.txt": (written("text.txt", TEXT), read_corpus),
    "text.py": (written("text.py", TEXT), read_corpus),
    "text.csv": (written("text.csv", TABLE), read_corpus),
    "text.tsv": (written("text.tsv", TABLE.replace(",", "\t")), read_corpus),
    "index.json of MDS": (mds_file("text", "index.json"), read_mds),
    "shard.mds": (mds_file("documents", "shard.00000.mds"), read_mds),
    "shard.mds of bytes": (mds_file("bytes-int32", "shard.00000.mds"), read_mds),
    "shard.mds.snappy": (mds_file("snappy", "shard.00000.mds.snappy"), read_mds),
    "shard.mds.zstd": (mds_file("text", "shard.00000.mds.zstd"), read_mds),
    "machine.json": (written("machine.json", json.dumps(MACHINE)), read_machine),
    "bench.csv": (written("bench.csv", (OLD / "bench.csv").read_bytes()), read_table),
    "config.py": (written("config.py", CONFIG), read_config),
}
# A setting out of range is reported without the file that sets it.
NEED_NOT_NAME_THE_FILE = {"config.py"}


# --------------------------------------------------------------------------------------------------
# Damage

DEEP = "[" * 900 + "]" * 900
ODD = "null true false 0 -1 1e400 -1e400 NaN Infinity 0.5 {} [] [1] [[]] [null] 1e18 -0".split()
ODD += ['""', '"x"', '"../x"', '"\\ud800"', '"a\\nb"', '{"a": 1}']
ODD += [str(2**63), str(10**30), "1" + "0" * 400, "9" * 5000]
ODD += [DEEP, json.dumps("x" * 10**6), "[" * 10**5]


def damages(good: bytes, draw, n_cases: int):
    """Yields (what was done, content) of `n_cases` damaged versions.

    The contents "pipe" and "folder" stand for such a thing in place of the file.
    """
    yield "empty", b""
    yield "half", good[: len(good) // 2]
    yield "one byte less", good[:-1]
    yield "one byte more", good + b"\xff"
    yield "zeros", bytes(len(good))
    yield "noise", draw.randbytes(2000)
    yield "not UTF-8", b"\xff\xfe" + good
    yield "deep list", b"[" * 200_000
    yield "deep object", b'{"a":' * 100_000
    yield "null", b"null"
    yield "a list", b"[]"
    yield "a number", b"5"
    yield "a pipe", "pipe"
    yield "a folder", "folder"
    for number in range(n_cases - 14):
        changed = json_changed(good, draw) if number % 3 else None
        if changed:
            yield "JSON", changed
        else:
            yield "bytes", bytes_changed(good, draw)


def bytes_changed(good: bytes, draw) -> bytes:
    """The file with 1 to 30 random bytes."""
    changed = bytearray(good)
    for _ in range(draw.choice([1, 1, 3, 30])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def json_changed(good: bytes, draw) -> bytes | None:
    """The file with one value or key of its JSON changed, or None if it has no JSON.

    The JSON is the whole file, one of its lines, or its header.
    """
    is_safetensors = good[8:9] == b"{" and good[:1] not in b"{["  # after 8 bytes of length
    text = good.decode("latin-1")
    starts = [8]
    if not is_safetensors:
        starts = [match.start() for match in re.finditer(r"(?m)^[{\[]", text)]
    try:
        start = draw.choice(starts)
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, IndexError):
        return None
    new = changed_value(value, draw).encode("latin-1", "replace")
    if is_safetensors:
        return struct.pack("<Q", len(new)) + new + good[end:]
    rest = good[end:]
    if rest.startswith(b" " * 50):  # a shard: its header has a fixed size
        rest = rest[max(0, len(new) - (end - start)) :]
        new = new.ljust(end - start)
    return good[:start] + new + rest


def changed_value(value, draw) -> str:
    """JSON of `value` with an odd value, or with a key missing, renamed or there twice."""
    places = []
    for holder in containers(value):
        keys = holder if isinstance(holder, dict) else range(len(holder))
        places += [(holder, key) for key in keys]
    if not places:
        return draw.choice(ODD)
    holder, key = draw.choice(places)
    change = draw.randrange(8)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, dict):
        holder[draw.choice([key + "x", "", "__proto__", "../x"])] = holder.pop(key)
    elif change == 2 and isinstance(holder, dict):
        item = f"{json.dumps(key)}: {json.dumps(holder[key])}"
        twice = f"{json.dumps(key)}: {draw.choice(ODD)}, {item}"
        return json.dumps(value).replace(item, twice, 1)
    else:
        holder[key] = "\0"
        return json.dumps(value).replace('"\\u0000"', draw.choice(ODD), 1)
    return json.dumps(value)


def containers(value):
    """Yields all dicts and lists in a value that are not empty, itself included."""
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from containers(inner)


def put(path: Path, content) -> None:
    """Write a damaged version over the file, or a pipe or folder in its place."""
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.write_bytes(content)


# --------------------------------------------------------------------------------------------------
# Processes


def judge(name: str, path: Path, folder: Path) -> str:
    """What is wrong with the answer of a reader; "" if nothing."""
    from program import UserError

    try:
        READERS[name][1](path, folder)
    except (UserError, OSError) as error:
        text = str(error)
        if "\n" in text or len(text) > 3000:  # it may name 20 lines of a file, with their paths
            return f"not one line: {text[:300]!r}"
        if "weights_only=False" in text:
            return f"advises to run it: {text[:300]!r}"
        named = path.name in text or str(path.parent) in text or name in NEED_NOT_NAME_THE_FILE
        return "" if named else f"does not name the file: {text[:300]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def try_all(name: str, folder: Path, n_cases: int, first: int, out) -> None:
    """Try the cases after number `first`; -1 is the good file.

    `out` gets a case's number before the reader runs, and what is wrong with its answer after.
    """
    path = READERS[name][0](folder)
    good = path.read_bytes()
    others = {p: p.read_bytes() for p in path.parent.iterdir() if p.is_file() and p != path}
    limit_memory()
    cases = [("the good file", good), *damages(good, random.Random(name), n_cases)]
    for number, (what, content) in list(enumerate(cases, -1))[first + 1 :]:
        for other, its_content in others.items():
            other.write_bytes(its_content)
        put(path, content)
        print(number, what, sep="\t", end="\t", file=out, flush=True)

        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(PATIENCE)
        fault = judge(name, path, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(fault, file=out, flush=True)


def limit_memory() -> None:
    """Let this process have BYTES more than it has now."""
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (int(used + BYTES), int(used + BYTES)))


def fuzz(name: str, folder: Path, n_cases: int) -> list[list[str]]:
    """[number, what was done, what is wrong] of each case of a reader."""
    answers = []
    while len(answers) <= n_cases:
        attempt = folder / f"{len(answers)}"
        (attempt / "files").mkdir(parents=True)
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            with open(attempt / "log", "w") as out:
                try_all(name, attempt / "files", n_cases, len(answers) - 1, out)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        log = (attempt / "log").read_text()
        assert log, f"{name}: the good file could not be made"
        answers += [line.split("\t") for line in log.splitlines()]
        if status:
            answers[-1][2] = f"killed by signal {status & 127}: it hung, or crashed"
    return answers


def main(argv) -> None:
    """Fuzz all readers, or those named; one line of JSON for each."""
    n_cases = next((int(word[8:]) for word in argv if word.startswith("--cases=")), CASES)
    names = [word for word in argv if not word.startswith("--")]
    modules = """
        bench.compare planning.calibrate weights.load weights.hf weights.peft evaluation.zero_shot
        lifecycle.plot lifecycle.stopping pyarrow.parquet torch._dynamo
    """
    for module in modules.split():
        importlib.import_module(module)  # before the forks, not in each
    with tempfile.TemporaryDirectory() as folder:
        for name in names or READERS:
            answers = fuzz(name, Path(folder, re.sub(r"\W", "-", name)), n_cases)
            print(json.dumps({name: answers}), flush=True)


@functools.cache
def answers_of_all(n_cases: int) -> dict:
    """Reader -> its answers."""
    command = [sys.executable, __file__, f"--cases={n_cases}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480 + 20 * n_cases)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = {}
    for line in done.stdout.splitlines():
        answers |= json.loads(line)
    return answers


def check(name, n_cases) -> None:
    """Each damaged version of a reader's file is read, or refused in one line."""
    answers = answers_of_all(n_cases)[name]
    wrong = [f"{what}: {fault}" for _, what, fault in answers if fault]
    assert not wrong, f"{name}:\n" + "\n".join(wrong)
    assert len(answers) == n_cases + 1 > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_in_one_line(name):
    check(name, CASES)


@pytest.mark.long
def test_ten_thousand_damaged_files():
    for name in READERS:
        check(name, 400)


if __name__ == "__main__":
    main(sys.argv[1:])
