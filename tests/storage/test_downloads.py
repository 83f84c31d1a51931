"""storage/downloads.py: what programs say on a machine without internet, and how soon."""

import http.server
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import GPT2_FILES, ROOT, VOCAB_BPE, rooms_on_path, slowly, write_lines

from storage import downloads

TASK = "import program; from evaluation import tasks; "
TASK += "program.run(lambda argv: tasks.load('boolq'))"
# What needs a download -> what its message names. {} is the test's folder.
COMMANDS = {
    ("-m", "text.tokenizer", "gpt2"): ["{}/tiktoken", VOCAB_BPE, "--tokenizer=bpe-4096"],
    ("-m", "text.corpus", "allenai/c4:en"): ["dataset='allenai/c4:en'", "local files"],
    ("data.py", "--dataset=allenai/c4:en", "--tokenizer=bytes", "--data_dir={}/c4"): [
        "`python data.py --dataset=allenai/c4:en",
        "copy {}/c4 from there to {}/c4 here",
    ],
    ("-c", TASK): ["task boolq", "copy the folder {}/hub", "HF_HUB_OFFLINE=1", "--data"],
}


def start(folder, words, before=(), **variables):
    """Start Python with empty caches."""
    caches = {"TIKTOKEN_CACHE_DIR": f"{folder}/tiktoken", "HF_HOME": f"{folder}/hub"}
    command = [*before, sys.executable, *(word.format(folder) for word in words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=rooms_on_path() | caches | variables, **pipes)


@pytest.mark.parametrize("how", ["no route", slowly("packets vanish"), slowly("HF_HUB_OFFLINE")])
def test_without_internet_each_download_fails_soon_in_one_line(how, tmp_path, alone):
    """All start together. Where packets vanish, the libraries by themselves take 100 s."""
    before, variables = alone(vanish=how == "packets vanish"), {}
    if how == "HF_HUB_OFFLINE":
        before, variables = alone(vanish=True), {"HF_HUB_OFFLINE": "1"}
    (tmp_path / "tiktoken").mkdir()
    (tmp_path / "tiktoken" / VOCAB_BPE).write_text("#version: 0.2\n")  # a damaged one
    begin = time.monotonic()
    started = [start(tmp_path, words, before, **variables) for words in COMMANDS]
    for process, expected in zip(started, COMMANDS.values(), strict=True):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and out == "" and err.startswith("error: "), err
        assert err.count("\n") == 1 and all(
            part.format(*[tmp_path] * 2) in err for part in expected
        )
    assert time.monotonic() - begin < 60


def test_copied_files_of_gpt2_are_used_without_internet(tmp_path, alone, gpt2):
    done = start(tmp_path, ["-m", "text.tokenizer", "gpt2"], alone(), TIKTOKEN_CACHE_DIR=GPT2_FILES)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0 and "50257 entries" in out, err


def test_a_server_that_refuses_has_answered_and_one_that_says_nothing_has_not(monkeypatch):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    downloads.require_answer(f"http://127.0.0.1:{server.server_port}/nothing")  # 501
    server.shutdown()
    server.server_close()
    monkeypatch.setattr(downloads, "SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ConnectionError, match="does not answer"):
            downloads.require_answer(f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
        downloads.require_answer(f"http://127.0.0.1:{silent.getsockname()[1]}")  # not asked


@pytest.mark.slow
def test_a_copied_cache_of_the_hub_is_used_offline(tmp_path, alone):
    """The cache is laid out as `datasets` leaves it after a download."""
    datasets = pytest.importorskip("datasets")
    row = {"goal": "boil water", "sol1": "Heat it.", "sol2": "Cool it.", "label": 0}
    rows, cache = (
        {"validation": write_lines(tmp_path / "rows.jsonl", row)},
        tmp_path / "hub/datasets",
    )
    datasets.load_dataset("json", data_files=rows, cache_dir=str(cache))
    (made,) = cache.glob("json/*/*/*/")
    there = cache / "baber___piqa" / "default" / "0.0.0" / made.name
    there.parent.mkdir(parents=True)
    made.rename(there)
    (there / "json-validation.arrow").rename(there / "piqa-validation.arrow")
    info = (there / "dataset_info.json").read_text()
    (there / "dataset_info.json").write_text(info.replace('"json"', '"piqa"'))

    words = ["-c", TASK.replace("boolq", "piqa").replace("tasks.load", "print(tasks.load") + ")"]
    out, err = start(tmp_path, words, alone(vanish=True), HF_HUB_OFFLINE="1").communicate()
    assert "Question: boil water" in out, err
