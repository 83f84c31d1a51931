"""weights/hf_tokenizer.py: which tokenizer a folder has, what goes along, what ends a text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import byte_level, refusal
from random_adapters import write_random
from test_hf import LIKE_TRANSFORMERS, SMALL, build, save_composer

import generate
from config import TrainConfig
from text import tokenizer as tokenizers
from weights import hf, hf_config, hf_tokenizer, load, peft

TEXT = "In 2023\n\n  and 12345 more, größe e\u0301 日本\t  "
BPE = tokenizers.train_bpe([TEXT * 3, Path(__file__).read_text()], 300)
SHAPE = dict(d_model=64, n_heads=4, n_layers=1, max_seq_len=64, tie_word_embeddings=False)


def chained(vocab_size: int, following: dict[int, int]):
    """A model that writes after each token the one that `following` says."""
    model = build(replace(SMALL, **SHAPE, vocab_size=vocab_size, **LIKE_TRANSFORMERS))
    with torch.no_grad():
        for block in model.transformer.blocks:
            block.attn.out_proj.weight.zero_()
            block.ffn.down_proj.weight.zero_()
        model.transformer.norm_f.weight.fill_(1)
        model.lm_head.weight.zero_()
        for token, after in following.items():
            model.lm_head.weight[after] = F.layer_norm(model.transformer.wte.weight[token], (64,))
    return model


def their_tokenizer(folder: Path) -> None:
    """A tokenizer.json with its own split and special tokens, and all that belongs to it."""
    library = pytest.importorskip("tokenizers")
    split = library.pre_tokenizers.Split(library.Regex(r"\p{N}{1,3}|\s?\p{L}+|\s+|."), "isolated")
    by_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = byte_level("In", "fo")
    made.pre_tokenizer = library.pre_tokenizers.Sequence([split, by_bytes])
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "GPTNeoXTokenizer",
        "eos_token": "<|im_end|>",
        "auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def trained_here(folder: Path) -> None:
    """A bpe-N, as older exports have it."""
    BPE.save(folder / hf_tokenizer.BPE_TOKENIZER)


def pair(folder: Path) -> None:
    """vocab.json and merges.txt; transformers knows from the settings which kind it is."""
    model = json.loads(BPE.content)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *model["merges"], ""]))
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def nothing(folder: Path) -> None:
    """GPT-2's and bytes need no file."""


KINDS = {  # --tokenizer, what writes the files of the folder, the one that is loaded
    "bytes": ("bytes", nothing, ""),
    "bpe": ("bpe-300", trained_here, hf_tokenizer.BPE_TOKENIZER),
    "gpt2": ("gpt2", nothing, ""),
    "theirs": ("", their_tokenizer, "tokenizer.json"),
    "pair": ("", pair, "vocab.json"),
}
IM_END = 259


def write_folder(folder: Path, kind: str):
    """A Hugging Face folder of a kind. Its model writes "!" after "Hi", then its end.

    Returns its tokenizer.
    """
    name, write_tokenizer, file = KINDS[kind]
    folder.mkdir()
    write_tokenizer(folder)
    tokenizer = tokenizers.load(name or str(folder / file), folder / file)
    hi, mark = (int(tokenizer.encode(text)[-1]) for text in ("Hi", "!"))
    end = IM_END if kind == "theirs" else tokenizer.eot
    vocab_size = tokenizer.vocab_size + 7
    model = chained(vocab_size, {hi: mark, mark: end, end: hi})
    hf.export(model, folder.with_name("weights"))
    for path in folder.with_name("weights").iterdir():
        shutil.copy(path, folder)
    if kind == "theirs":
        generation = {"eos_token_id": [tokenizer.eot, IM_END], "max_length": 40}
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return tokenizer


def text_of(path, capsys) -> tuple[str, str]:
    """What generate.py writes after "Hi", and why it ends."""
    capsys.readouterr()
    flags = "--prompt=Hi --temperature=0 --max_new_tokens=6 --json --precision=fp32".split()
    generate.main([str(path), *flags])
    written = json.loads(capsys.readouterr().out)
    return written["text"], written["end"]


def text_there(transformers, path) -> str:
    """The same of transformers, with its tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    ids = torch.tensor([tokenizer.encode("Hi")])
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "kind", ["theirs", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "theirs")]
)
def test_an_export_is_to_transformers_what_the_run_is_here(kind, tmp_path, capsys, request):
    """Equal ids, and texts that end, at end-of-text or at what the folder names."""
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        request.getfixturevalue("gpt2")  # skips if its files are not there
    name, _, _ = KINDS[kind]
    theirs, run, back = (tmp_path / name for name in ("theirs", "run", "back"))
    ours = write_folder(theirs, kind)
    hf.import_(theirs, run, name)
    hf.export(run, back)

    there = transformers.AutoTokenizer.from_pretrained(back)
    assert there.encode(TEXT) == ours.encode(TEXT).tolist()
    assert there.decode(there.encode(TEXT)).strip() == TEXT.strip()
    assert there.eos_token == ("<|im_end|>" if kind == "theirs" else "<|endoftext|>")
    assert text_there(transformers, back) == "!"
    for path in (run, back) if name else (theirs, run, back):
        assert text_of(path, capsys) == ("!", "end of text")

    again = hf_tokenizer.name_of(back)
    assert again == (name or str(back / "tokenizer.json"))
    found = tokenizers.load(again, hf_tokenizer.file_of(back, again))
    assert found.fingerprint == ours.fingerprint
    if kind == "theirs":
        assert there.chat_template
        saved = [json.loads((p / "generation_config.json").read_text()) for p in (theirs, back)]
        assert saved[0] == saved[1]
        assert "auto_map" not in (back / "tokenizer_config.json").read_text()


@pytest.mark.slow
def test_what_ends_a_text_stays_with_the_model(tmp_path, capsys):
    """The ids of config.json serve as well. Adapters are put on, and merged."""
    folder = tmp_path / "theirs"
    ours = write_folder(folder, "theirs")
    (folder / "generation_config.json").unlink()
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": IM_END}))
    assert text_of(folder, capsys) == ("!", "end of text")
    hf.import_(folder, tmp_path / "run")
    chosen = TrainConfig(init_from="any", lora_rank=2)
    write_random(tmp_path / "adapter", hf.settings_of(folder), chosen, seed=0)
    for base in (folder, tmp_path / "run"):
        peft.import_(tmp_path / "adapter", tmp_path / f"on {base.name}", str(base))
        peft.merge(tmp_path / f"on {base.name}", tmp_path / f"merged {base.name}")
        for made in (f"on {base.name}", f"merged {base.name}"):
            assert load.generation_of(tmp_path / made) == {"eos_token_id": IM_END}
        _, tokenizer, _ = load.load_for_sampling(str(tmp_path / made), None, torch.device("cpu"))
        assert tokenizer.ends == {ours.eot, IM_END}
    hf.export(tmp_path / "merged run", tmp_path / "back")
    assert (tmp_path / "back/chat_template.jinja").exists()


def test_a_run_that_begins_with_a_folder_keeps_what_describes_its_tokenizer(tmp_path):
    folder = tmp_path / "theirs"
    write_folder(folder, "theirs")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"pad_token_id": -1}))
    hf.import_(folder, tmp_path / "run")
    for base in (folder, tmp_path / "run"):
        begun = tmp_path / f"on {base.name}"
        begun.mkdir()
        load.keep_generation(str(base), str(begun))
        kept = {path.name: path.read_text() for path in (begun / "hugging_face").iterdir()}
        for name in ("chat_template.jinja", "tokenizer_config.json"):
            assert kept[name] == (folder / name).read_text()
        assert "pad_token_id" not in json.loads(kept["generation_config.json"])


def as_in_the_hubs_cache(folder: Path, cache: Path) -> Path:
    """The folder as huggingface_hub downloads it: links to blobs. Returns the snapshot."""
    snapshot = cache / "models--their--mpt/snapshots/0123abcd"
    blobs = cache / "models--their--mpt/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_folder_of_the_hubs_cache_is_imported_as_any_other(tmp_path, capsys):
    write_folder(tmp_path / "theirs", "theirs")
    snapshot = as_in_the_hubs_cache(tmp_path / "theirs", tmp_path / "cache")
    hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "plain")])
    hf.main(["import", str(snapshot), str(tmp_path / "run")])
    for place in ("", "hugging_face"):
        plain, run = (tmp_path / name / place for name in ("plain", "run"))
        kept = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
        assert kept == {path.name: path.read_bytes() for path in plain.iterdir() if path.is_file()}
        assert not any(path.is_symlink() for path in run.iterdir())
    (tmp_path / "begun").mkdir()
    load.keep_generation(str(snapshot), str(tmp_path / "begun"))  # of --init_from
    assert (tmp_path / "begun/hugging_face/chat_template.jinja").exists()


@pytest.mark.parametrize(
    "name, leads",
    [
        ("tokenizer.json", "elsewhere"),
        ("chat_template.jinja", "to another model"),
        ("chat_template.jinja", "by its blob"),
        ("chat_template.jinja", "by its blobs"),
    ],
)
def test_a_link_out_of_the_hubs_cache_is_refused(tmp_path, name, leads):
    write_folder(tmp_path / "theirs", "theirs")
    snapshot = as_in_the_hubs_cache(tmp_path / "theirs", tmp_path / "cache")
    other = as_in_the_hubs_cache(tmp_path / "theirs", tmp_path / "other")
    link, blob = snapshot / name, (snapshot / name).resolve()
    if leads == "by its blobs":
        blob.parent.rename(tmp_path / "blobs")
        blob.parent.symlink_to(tmp_path / "blobs")
    elif leads == "by its blob":
        blob.unlink()
        blob.symlink_to(tmp_path / "theirs" / name)
    else:
        link.unlink()
        link.symlink_to((other if leads == "to another model" else tmp_path / "theirs") / name)
    assert "is a link: replace it" in refusal(hf.import_, snapshot, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "begun").mkdir()
    if name != "tokenizer.json":  # which a run has of its data
        assert "is a link" in refusal(load.keep_generation, str(snapshot), tmp_path / "begun")


def test_what_was_kept_is_not_followed_elsewhere(tmp_path):
    """A run from someone else may hold links in place of files."""
    write_folder(tmp_path / "theirs", "theirs")
    hf.import_(tmp_path / "theirs", tmp_path / "run")
    kept = tmp_path / "run/hugging_face"
    for path in (kept / "generation_config.json", kept / "tokenizer_config.json", kept):
        elsewhere = path.rename(tmp_path / path.name)
        path.symlink_to(elsewhere)
        message = refusal(hf.export, tmp_path / "run", tmp_path / "out")
        assert f"{path.name} is a link" in message
        path.unlink()
        elsewhere.rename(path)
    assert not (tmp_path / "out").exists()


GPT2 = "gpt2"
CLASS = {"tokenizer_class": "GPT2Tokenizer"}
FOLDERS = {  # files of a folder, what config.json says -> its tokenizer, or the message
    "nothing": ("", {}, GPT2),
    "class of GPT-2": ("", CLASS, GPT2),
    "named": ("", {"tokenizer_name": "bytes"}, "bytes"),
    "file": ("tokenizer.json", {"tokenizer_name": GPT2}, "{folder}/tokenizer.json"),
    "file and bytes": ("tokenizer.json", {"tokenizer_name": "bytes"}, "{folder}/tokenizer.json"),
    "pair": ("vocab.json merges.txt", {"tokenizer_name": GPT2}, "{folder}/vocab.json"),
    "unknown": ("", {"tokenizer_name": "x/y\n"}, "the tokenizer x/y"),
    "path": ("", {"tokenizer_name": "/etc/x.json"}, "the tokenizer /etc/x.json"),
    "SentencePiece": ("tokenizer.model", {"tokenizer_name": GPT2}, "in tokenizer.model, which"),
    "half a pair": ("vocab.json", {}, "in vocab.json, which cannot be read"),
    "described": ("tokenizer_config.json", {}, "tokenizer_config.json without its tokenizer"),
    "class": ("", {"tokenizer_class": "LlamaTokenizer"}, "of class 'LlamaTokenizer'"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_gpt2_is_for_a_folder_that_says_nothing_else(case, tmp_path, capsys):
    names, settings, expected = FOLDERS[case]
    for name in names.split():
        content = CLASS if name == "tokenizer_config.json" else {}
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    if " " in expected:
        message = refusal(hf_tokenizer.name_of, tmp_path)
        assert expected in message and "put its tokenizer.json there" in message
        return
    assert hf_tokenizer.name_of(tmp_path) == expected.format(folder=tmp_path)
    made_of = "made of vocab.json and merges.txt"
    assert (made_of in capsys.readouterr().err) == (case == "pair")


def test_a_composer_file_that_holds_a_tokenizer_is_not_gpt2s(tmp_path):
    path = tmp_path / "ep0-ba7-rank0.pt"
    held = {"model": {"config": {"content": hf_config.config_to(SMALL)}}}
    save_composer(path, build(SMALL), integrations={"huggingface": held})
    assert hf_tokenizer.name_of(path) == "gpt2"
    held["tokenizer"] = {"tokenizer": {"file_extension": ".json", "content": {"model": 1}}}
    save_composer(path, build(SMALL), integrations={"huggingface": held})
    assert "tokenizer that it holds" in refusal(hf_tokenizer.name_of, path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hf_tokenizer.name_of(path) == str(tmp_path / "tokenizer.json")
