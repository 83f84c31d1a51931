"""serving/catalog.py: names of adapters that come, go, change and are broken."""

import functools
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
from conftest import PATIENCE, refusal, slowly
from hypothesis import given, settings
from hypothesis import strategies as st
from test_adapters import bank_on, write_adapter, written
from test_decoder import TINY, model

from config import MPTConfig, TrainConfig
from serving import catalog as catalogs
from serving.adapters import BASE, read_adapter
from serving.catalog import Catalog
from weights import hf, peft

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 257
CFG = MPTConfig(**TINY | {"vocab_size": VOCAB}, alibi=True)


@pytest.fixture(scope="module")
def mpt():
    return model(vocab_size=VOCAB, alibi=True).double()


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "adapters"
    path.mkdir()
    return path


@pytest.fixture
def served(mpt, folder):
    """A catalog of the folder, and a decoder whose bank loads what it names."""
    read = functools.partial(read_adapter, base="runs/base", base_fingerprint="ours")
    catalog = Catalog("base", folder, read, check=lambda *found: bank.check(*found))
    decoder, bank = bank_on(mpt, read=catalog.read)
    return catalog, decoder


@pytest.fixture
def catalog(served):
    return served[0]


def write_run(run, step, max_steps=None, fingerprint="ours"):
    """A run with adapters that has this checkpoint. max_steps: None: imported, not trained here."""
    chosen = TrainConfig(init_from="runs/base", lora_rank=2)
    with tempfile.TemporaryDirectory() as elsewhere:
        adapter = peft.read(write_adapter(f"{elsewhere}/seed", CFG, step, lora_rank=2))
        origin = {"step": step, "base": "runs/base", "base_fingerprint": fingerprint}
        meta = peft.meta_of(CFG, chosen, "elsewhere") | origin
        state = peft.state_at_start(CFG, chosen, adapter)
        written_to = Path(elsewhere, "checkpoints", f"step-{step}")
        hf.write_checkpoint(written_to, meta, state)
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        shutil.move(written_to, run / "checkpoints")
    if max_steps is not None:
        (run / "config.json").write_text(json.dumps({"max_steps": max_steps}))


def names(catalog) -> list[str]:
    return [found.name for found in catalog.listed()]


def touched(path):
    """Another content of a PEFT folder, by its times."""
    later = time.time_ns() + 10**9
    os.utime(path / peft.TENSOR_FILE, ns=(later, later))


# --- Names


def test_without_a_folder_there_is_the_base_alone():
    catalog = Catalog("base", None, read=None, check=None)
    assert catalog.find("base").key == BASE
    assert "no folder of adapters" in refusal(catalog.load, "a", "a")
    assert "is the base" in refusal(catalog.unload, "base")
    assert "is no folder" in refusal(Catalog, "base", "/nowhere", None, None)


# --- Runs


def test_a_run_appears_when_it_has_finished(catalog, folder):
    run = folder / "mine"
    write_run(run, step=5, max_steps=10)
    catalog.scan()
    assert names(catalog) == ["base"]
    write_run(run, step=10, max_steps=10)
    metadata = run / "checkpoints/step-10/.metadata"
    metadata.rename(run / "kept")  # as while it is being written
    catalog.scan()
    assert names(catalog) == ["base"]
    (run / "kept").rename(metadata)
    catalog.scan()
    first = catalog.find("mine")
    assert first.path.endswith("mine/checkpoints/step-10")
    write_run(run, step=15, max_steps=20)  # it goes on
    catalog.scan()
    assert catalog.find("mine") is first
    write_run(run, step=20, max_steps=20)
    catalog.scan()
    assert catalog.find("mine").path.endswith("step-20")
    assert catalog.find("mine").key != first.key


def test_imported_adapters_count_and_whole_models_do_not(catalog, folder, mpt):
    write_run(folder / "imported", step=0)
    meta = peft.meta_of(CFG, TrainConfig(), "elsewhere")
    (folder / "whole").mkdir()
    hf.write_checkpoint(folder / "whole/checkpoints/step-0", meta, {"model": mpt.state_dict()})
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("mine")
    catalog.scan()
    assert names(catalog) == ["base", "imported"]
    catalog.find("imported")


# --- Faults


def truncated(path):
    write_adapter(path, CFG)
    content = (path / peft.TENSOR_FILE).read_bytes()
    (path / peft.TENSOR_FILE).write_bytes(content[:-100])


def with_a_linked_file(path):
    write_adapter(path, CFG)
    outside = (path / peft.TENSOR_FILE).rename(path.parent.parent / "outside.safetensors")
    (path / peft.TENSOR_FILE).symlink_to(outside)


WIDER = MPTConfig(**TINY | {"d_model": 64}, alibi=True)
BROKEN = {  # how it is made, what is said of it
    "truncated": (truncated, "truncated or damaged"),
    "of a wider model": (lambda path: write_adapter(path, WIDER), "would fit"),
    "of too high a rank": (lambda path: write_adapter(path, CFG, lora_rank=9), "has rank 9, and"),
    "of another base": (
        lambda path: write_run(path, step=3, max_steps=3, fingerprint="theirs"),
        "whose weights are not those of runs/base",
    ),
    "a link": (
        lambda path: path.symlink_to(Path(write_adapter(path.parent.parent / "outside", CFG))),
        "is not inside",
    ),
    "with a linked file": (with_a_linked_file, "is not inside"),
}


@pytest.mark.parametrize("spoil, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_adapter_is_listed_with_its_fault_and_refused_by_name(
    spoil, words, catalog, folder
):
    write_adapter(folder / "good", CFG)
    spoil(folder / "bad")
    catalog.scan()
    message = refusal(catalog.find, "bad")
    assert message.startswith("the model 'bad' cannot be used: ") and words in message
    assert [words in (found.fault or "") for found in catalog.listed()] == [False, True, False]
    catalog.find("good")
    assert words in refusal(catalog.load, "other", "bad")
    assert names(catalog) == ["base", "bad", "good"]


def test_an_error_that_nobody_foresaw_concerns_its_adapter_alone(folder):
    def fails(path, found):
        raise RuntimeError("a surprise")

    write_adapter(folder / "a", CFG)
    catalog = Catalog("base", folder, peft.adapter_at, fails)
    catalog.scan()
    assert "RuntimeError, a surprise" in refusal(catalog.find, "a")
    catalog.find("base")


# --- Versions


def test_another_version_is_another_adapter_for_bank_and_caches(served, folder):
    catalog, decoder = served
    write_adapter(folder / "a", CFG, seed=1)
    catalog.scan()
    old = catalog.find("a")
    before = written(decoder, CFG, ["to be"], [old.key], temperature=0)
    shutil.rmtree(folder / "a")
    write_adapter(folder / "a", CFG, seed=2)
    new = catalog.find("a")
    assert new.key != old.key
    both = written(decoder, CFG, ["to be"] * 2, [old.key, new.key], temperature=0)
    assert both[0] == before[0] != both[1]  # the old one is still in its slot
    assert "have changed" in refusal(catalog.read, old.key)


# --- Loading and unloading


def test_a_name_may_mean_any_adapter_in_the_folder(catalog, folder):
    write_adapter(folder / "team/poems", CFG)
    write_run(folder / "mine", step=5, max_steps=10)
    write_run(folder / "mine", step=7, max_steps=10)
    for name, path, end in [
        ("org/poems", "team/poems", "team/poems"),
        ("team/poems", "team/poems", "team/poems"),
        ("absolute", str(folder / "team/poems"), "team/poems"),
        ("newest", "mine", "step-7"),
        ("earlier", "mine/checkpoints/step-5", "step-5"),
    ]:
        catalog.load(name, path)
        assert catalog.find(name).path.endswith(end)
    catalog.scan()
    assert names(catalog) == ["base", "absolute", "earlier", "newest", "org/poems", "team/poems"]


def test_checkpoints_of_a_run_are_models_until_they_are_gone(catalog, folder):
    write_adapter(folder / "poems", CFG)
    for step in (5, 7):
        write_run(folder / "mine", step=step, max_steps=10)
    first, other = (f"mine/checkpoints/step-{step}" for step in (5, 7))
    assert catalog.find(first).path.endswith(first)
    catalog.load("its/checkpoints/step-5", "poems")  # a name that leads elsewhere
    key = catalog.find(first).key
    catalog.scan()
    assert names(catalog) == ["base", "its/checkpoints/step-5", first, "poems"]
    assert catalog.find(first).key == key and catalog.read(key)  # a text may wait for it
    for name in (f"{first}0", "x/checkpoints/step-5"):
        assert "no model" in refusal(catalog.find, name)
    write_run(folder.parent, step=5)
    assert "no model" in refusal(catalog.find, "../checkpoints/step-5")
    shutil.rmtree(folder / "mine/checkpoints/step-5")
    catalog.scan()
    assert first not in names(catalog) and catalog.find(other)
    assert "no model" in refusal(catalog.find, first)


def test_an_adapter_that_is_gone_from_the_folder_is_forgotten(catalog, folder):
    write_adapter(folder / "a", CFG)
    catalog.scan()
    catalog.find("a")
    shutil.rmtree(folder / "a")
    assert "no model 'a'" in refusal(catalog.find, "a")
    assert names(catalog) == ["base"]
    write_adapter(folder / "a", CFG)
    catalog.scan()
    catalog.find("a")


def test_a_name_that_load_gave_stays_with_its_adapter(catalog, folder):
    write_adapter(folder / "team/a", CFG, seed=1)
    write_adapter(folder / "a", CFG, seed=2)
    chosen = catalog.load("a", "team/a")
    catalog.scan()
    touched(folder / "a")
    catalog.scan()
    shutil.rmtree(folder / "a")
    catalog.scan()
    assert catalog.find("a") is chosen


OUTSIDE = ["../outside", "a/../../outside", "/etc", "link", "link/deeper", "..", "nothing", "."]


def test_nothing_is_loaded_from_outside_of_the_folder(catalog, folder):
    write_adapter(folder.parent / "outside", CFG)
    write_adapter(folder.parent / "outside/deeper", CFG)
    (folder / "link").symlink_to(folder.parent / "outside")
    for path in OUTSIDE:
        for given_path in (path, str(folder / path)):
            refusal(catalog.load, "mine", given_path)
            refusal(catalog.find, given_path)
    refusal(catalog.load, "mine", str(folder.parent / "outside"))
    assert "mine" not in names(catalog) and len(catalog.usable()) == 1


def test_names_that_no_adapter_may_have(catalog, folder):
    write_adapter(folder / "a", CFG)
    for name in ("", "base", "a\nb", "x" * 201):
        refusal(catalog.load, name, "a")
    assert names(catalog) == ["base", "a"]


# --- Lists


def test_a_list_finds_what_is_new_once_a_second_and_leaves_out_what_is_broken(
    catalog, folder, monkeypatch
):
    monkeypatch.setattr(catalogs, "SCAN_SECONDS", PATIENCE)
    assert names(catalog) == ["base"]
    write_run(folder / "mine", step=3, max_steps=3)
    truncated(folder / "bad")
    assert catalog.find("mine")
    assert names(catalog) == ["base", "mine"]
    monkeypatch.setattr(catalogs, "SCAN_SECONDS", 0)
    assert names(catalog) == ["base", "bad", "mine"]
    assert [model.name for model in catalog.usable()] == ["base", "mine"]


def test_a_request_does_not_wait_for_adapters_before_its_own(folder):
    begun, may_end = threading.Event(), threading.Event()

    def slow_read(path):
        if path.endswith("a"):
            begun.set()
            assert may_end.wait(PATIENCE)
        return peft.adapter_at(path)

    for name in "ab":
        write_adapter(folder / name, CFG)
    catalog = Catalog("base", folder, slow_read, check=lambda path, found: None)
    thread = threading.Thread(target=catalog.usable)
    thread.start()
    assert begun.wait(PATIENCE)
    catalog.find("b")
    may_end.set()
    catalog.find("a")
    thread.join()


MOVES = ["write", "remove", "load", "unload", "scan"]


@settings(max_examples=40, deadline=None)
@given(moves=st.lists(st.sampled_from(MOVES), max_size=25))
def test_in_any_order_of_events_a_name_is_there_if_its_folder_is(moves):
    """Unless it was unloaded. Beside two booleans and a list of keys."""
    with tempfile.TemporaryDirectory() as parent:
        catalog = Catalog("base", parent, read=lambda path: None, check=lambda *found: None)
        path = Path(parent, "a")
        times = itertools.count(1)
        is_unloaded, keys = False, []
        for move in [*moves, "scan"]:
            if move == "write":  # or change
                path.mkdir(exist_ok=True)
                for name in (peft.CONFIG_FILE, peft.TENSOR_FILE):
                    (path / name).touch()
                    os.utime(path / name, (next(times),) * 2)
            elif move == "remove":
                shutil.rmtree(path, ignore_errors=True)
            elif move == "load" and path.exists():
                catalog.load("a", "a")
                is_unloaded = False
            elif move == "unload" and "a" in catalog.models:
                catalog.unload("a")
                is_unloaded = True
            elif move == "scan":
                catalog.scan()
                is_unloaded = is_unloaded and path.exists()
                assert ("a" in catalog.models) == (path.exists() and not is_unloaded)
            if path.exists() and not is_unloaded:
                key = catalog.find("a").key
                assert key == (keys or [key])[-1] or key not in keys
                keys += [key] if key not in keys else []
                assert catalog.read(key) is None
                for old in keys[:-1]:
                    assert "have changed" in refusal(catalog.read, old)


@pytest.mark.parametrize("n_adapters", [300, slowly(10_000)])
def test_thousands_of_adapters_are_listed_without_reading_them(n_adapters, folder):
    """10,000: a scan takes about a second of a processor, 0.4 s when nothing has changed."""
    for number in range(n_adapters):
        path = folder / f"adapter-{number}"
        path.mkdir()
        (path / peft.CONFIG_FILE).touch()
        (path / peft.TENSOR_FILE).touch()

    def read(path):
        raise AssertionError("a scan reads no adapter")

    catalog = Catalog("base", folder, read, check=None)
    seconds = []
    for _ in range(2):
        begin = time.thread_time()
        catalog.scan()
        seconds.append(time.thread_time() - begin)
    begin = time.thread_time()
    refusal(catalog.find, "adapter-1234567")
    seconds.append(time.thread_time() - begin)
    listed = catalog.listed()
    assert len(listed) == n_adapters + 1 and {model.fault for model in listed[1:]} == {None}
    assert max(seconds) < 10, seconds
