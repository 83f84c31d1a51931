"""Text -> token shards on disk, once for each data set.

Documents come from text/corpus.py in a fixed order. They are grouped into chunks, and each chunk is
encoded into two files of raw tokens after a JSON header: one for training, one for validation.
Every `1 / val_fraction`-th document goes to validation, whole. Each file is written under a
temporary name and renamed, so a file that exists is complete. A chunk that is already on disk is
skipped, so an interrupted preparation resumes.

    data/stdlib-bpe-4096/   dataset.json  tokenizer.json  train-00000.bin ...  val-00000.bin ...

dataset.json says what the tokens were made from: see text/recipe.py.

Runs that start together prepare once: one holds prepare.lock, the others wait, on other nodes too.
On a file system without locks each makes the same files, under temporary names of its own (with
--max_tokens, run data.py first there).

Run `python data.py --dataset='my/*.txt' --tokenizer=bpe-4096`, or with a config file.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import program
from config import TrainConfig
from program import UserError, require
from storage import files
from text import corpus, sources
from text import tokenizer as tokenizers
from text.recipe import Recipe, has_enough
from text.shards import (
    Shard,
    fingerprint,
    read_summary,
    require_shard,
    shard_files,
    truncate_shard,
    write_ids,
)

BPE_CHARACTERS = 16 * 2**20  # the amount of text from which a BPE is trained

# fsdp_train.py prepares a missing data set itself if it is within one of these limits.
SMALL_TOKENS = 100_000_000
SMALL_BYTES = 2**29
FIRST_SLICE = 20_000_000  # tokens: a first look at a data set of the Hub
FIRST_SLICE_COST = "40 MB on disk, about a minute on two cores"


def require_small(recipe: Recipe) -> None:
    """UserError, with the command that prepares the data set, if it is too large to prepare now."""
    cfg, summary = recipe.cfg, recipe.summary()
    paths = sources.files(cfg.dataset)
    few_tokens = 0 < cfg.max_tokens <= SMALL_TOKENS
    few_bytes = paths and sum(map(os.path.getsize, paths)) <= SMALL_BYTES

    found = f"only {summary['train_tokens']:,} tokens are" if summary else "no data set is"
    now = ["--dataset=stdlib --tokenizer=bpe-4096 (Python's own source)"] * (not cfg.mix)
    if not paths or cfg.mix:  # it is on the Hub
        now.append(f"--max_tokens={FIRST_SLICE} (a first slice: {FIRST_SLICE_COST})")
    require(
        few_tokens or few_bytes,
        f"{found} in {recipe.folder}, and all of it is too much, or of unknown size, to prepare "
        "while a run starts. "
        f"To begin now, add to your command {', or '.join(now)}. "
        f"For all of it, first run: {recipe.command()}",
    )


# --------------------------------------------------------------------------------------------------
# Making


def prepare(cfg: TrainConfig, workers: int = 1, max_seq_len: int = 0, source: str = "") -> Path:
    """Make the token shards of `cfg.dataset` unless they are complete. Returns their folder.

    workers: processes that encode, which change no file. max_seq_len, source: see `Recipe`. If
    another process prepares the folder, this one waits for it. Raises UserError if the data set
    cannot be read or holds too little text, or if the folder was made with other settings.
    """
    recipe = Recipe(cfg, max_seq_len, source)
    folder = recipe.folder
    require(
        not recipe.store,
        f"{folder} lacks what is asked for, and a store cannot be written to: prepare a folder and "
        f"copy its files there: {recipe.command()}",
    )
    if is_made(recipe, read_summary(folder)):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / "prepare.lock", f"{folder} is being prepared") as is_alone:
        summary = read_summary(folder)  # of the process that this one has waited for
        if not is_made(recipe, summary):
            try:
                make_shards(recipe, summary, workers, is_alone)
            except corpus.NoHub as error:
                raise UserError(
                    f"cannot reach the Hub for dataset={cfg.dataset!r}: run this where there is "
                    f"internet, `{recipe.command()}`, and copy {folder} from there to {folder} here"
                ) from error
    return folder


def is_made(recipe: Recipe, summary: dict | None) -> bool:
    """Does the folder hold what is asked for? UserError if it was made with other settings."""
    if not summary:
        return False
    recipe.require_settings(summary)
    shards_are_same = fingerprint(recipe.folder) == summary["fingerprint"]
    has_all = shards_are_same and has_enough(summary, recipe.cfg.max_tokens)
    return has_all and not recipe.changed_files(summary)


def make_shards(recipe: Recipe, summary: dict | None, workers: int, is_alone: bool) -> None:
    """Make the shards of a folder that are missing or wrong, then its dataset.json.

    summary: what dataset.json held. is_alone: no other process makes shards here now, so temporary
    files are those of crashes.
    """
    cfg, folder = recipe.cfg, recipe.folder
    # Before the text is read: an edit from now on is a change.
    hashes = {"source": recipe.source_hash()}
    if recipe.row_format:
        hashes["template"] = recipe.template_hash()
    if summary:
        if summary["tokenizer"].startswith("bpe") and recipe.changed_files(summary):
            (folder / "tokenizer.json").unlink(missing_ok=True)  # it learned from other text
        (folder / "dataset.json").unlink(missing_ok=True)
    if ignored := sources.left_out(cfg.dataset):
        print(f"dataset={cfg.dataset}{ignored}", file=sys.stderr, flush=True)
    tokenizer = make_tokenizer(recipe)
    n_chunks, train_tokens = encode_dataset(recipe, tokenizer, workers)
    remove_what_is_left(folder, n_chunks, is_alone)
    require(n_chunks > 0, f"dataset={cfg.dataset!r} is empty: no document has any text")
    if recipe.row_format:
        require_learned_tokens(recipe)
    require(
        train_tokens > 0,
        f"dataset={cfg.dataset!r} has one document only, and validation gets that one: "
        "split it into several documents",
    )
    summary = {
        **recipe.settings(),
        **hashes,
        "vocab_size": tokenizer.vocab_size,
        "max_tokens": cfg.max_tokens,
        "train_tokens": train_tokens,
        "fingerprint": fingerprint(folder),
    }
    files.write_atomically(folder / "dataset.json", json.dumps(summary, indent=2).encode())


def make_tokenizer(recipe: Recipe):
    """The tokenizer of a data folder. Its file, if it has one, is put into the folder first.

    A `bpe-N` is that of the run to start from (init_from), or trained on the first documents of the
    data set, unless the folder has one already. Of a mixture, the first source has it.
    """
    cfg = recipe.cfg
    name = sources.canonical(cfg.tokenizer)
    path = recipe.folder / "tokenizer.json"

    if name.endswith(".json") and (os.path.exists(name) or not path.exists()):
        tokenizers.load(name)  # an error names this file, not its copy
    given = recipe.given_tokenizer()
    if given is None and not path.exists():
        of_base = file_of_base(cfg, name)
        given = of_base and files.read_bytes(of_base)
    if given:
        files.write_atomically(path, given)  # later runs read this copy: the original may be moved

    if name.startswith("bpe") and not path.exists():
        print(f"training a tokenizer ({name}) on {cfg.dataset} ...", file=sys.stderr, flush=True)
        vocab_size = int(name.split("-")[1])
        tokenizers.train_bpe(first_texts(cfg, BPE_CHARACTERS), vocab_size).save(path)

    return tokenizers.load(name, path)


def file_of_base(cfg: TrainConfig, name: str) -> Path | None:
    """The file of the `bpe-N` of the run, or checkpoint, at init_from; None if it has another."""
    if not (cfg.init_from and name.startswith("bpe")):
        return None
    given = Path(cfg.init_from)
    for folder in (given, given.parent.parent):
        file = folder / "tokenizer.json"
        if file.exists() and files.read_json(file).get("name") == name:
            return file
    return None


def documents_of(cfg: TrainConfig, tokenizer=None):
    """The documents of a data set, or the examples of a chat: see `chat.examples`.

    tokenizer: what will encode them; None: they are plain text, to train a tokenizer.
    """
    if cfg.data_format == "text":
        return corpus.documents(cfg.dataset, tokenizer)
    from text import chat

    reserved = tokenizer.special_tokens if tokenizer else None
    examples = chat.examples(cfg.dataset, chat.load_template(cfg.chat_template, reserved))
    return examples if tokenizer else map(chat.plain_text, examples)


def first_texts(cfg: TrainConfig, n_characters: int) -> list[str]:
    """The first documents of a data set, until they have more than `n_characters`, and of each at
    most as many.
    """
    texts = []
    total = 0
    for text in documents_of(cfg):
        require(
            isinstance(text, str),
            f"dataset={cfg.dataset!r} holds ids already: set --tokenizer to the one that made "
            "them, gpt2 or its tokenizer.json",
        )
        texts.append(text[:n_characters])
        total += len(text)
        if total > n_characters:
            break
    return texts


def encode_dataset(recipe: Recipe, tokenizer, workers: int) -> tuple[int, int]:
    """Encode the chunks of a data set into shards. Returns (chunks, training tokens)."""
    cfg, row_format = recipe.cfg, recipe.row_format
    # A row has examples of one chunk: the more there are to choose from, the fuller it gets.
    first_characters = corpus.CHUNK_CHARACTERS if row_format else corpus.FIRST_CHUNK_CHARACTERS
    chunks = corpus.chunks(documents_of(cfg, tokenizer), first_characters)
    val_every = max(2, round(1 / cfg.val_fraction))  # 0.02: every 50th document
    # A worker process loads the tokenizer by its name: tiktoken's encodings cannot be pickled.
    encode = functools.partial(encode_chunk, recipe.folder, tokenizer.name, val_every, row_format)
    style = {"unit": " tokens", "unit_scale": True, "delay": 2}  # drawn if it takes 2 seconds
    with tqdm(desc="tokens", total=cfg.max_tokens or None, **style) as bar:
        if workers <= 1:
            return collect(map(encode, chunks), cfg.max_tokens, bar)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=program.end_with_parent) as pool:
            results = bounded_map(pool, encode, chunks, depth=2 * workers)
            return collect(results, cfg.max_tokens, bar)


def bounded_map(pool, function, items, depth: int):
    """Like `pool.map`, which reads all items first, but at most `depth` of them are in flight."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def collect(results, max_tokens: int, bar) -> tuple[int, int]:
    """Count the tokens of finished chunks, and stop at exactly `max_tokens` (0: never).

    results: (path of the training shard, its tokens) of each chunk, in order. The last one is cut
    off where the limit is reached. Returns (chunks, training tokens).
    """
    n_chunks = total = 0
    for path, tokens in results:
        n_chunks += 1
        total += tokens
        bar.update(tokens)
        if 0 < max_tokens <= total:
            if total > max_tokens:
                truncate_shard(path, tokens - (total - max_tokens))
            return n_chunks, max_tokens
    return n_chunks, total


def remove_what_is_left(folder: Path, n_chunks: int, is_alone: bool) -> None:
    """Remove shards that workers encoded beyond max_tokens, of the chunks `n_chunks` and later.

    is_alone: remove temporary files of preparations that were killed, too.
    """
    for path in shard_files(folder):
        if int(path.stem.split("-")[1]) >= n_chunks:
            require_shard(path)
            path.unlink()

    ours = re.compile(r"((train|val)-[0-9]+\.bin|(dataset|tokenizer)\.json)\.")
    for path in folder.glob("*.tmp") if is_alone else ():
        if ours.match(path.name):
            path.unlink(missing_ok=True)


def encode_chunk(folder: Path, tokenizer_name: str, val_every: int, row_format, chunk):
    """Encode one chunk into train-N.bin and val-N.bin, unless these are already right.

    chunk: as of `corpus.chunks`. val_every: of so many documents, one is for validation.
    row_format: see `Recipe`. Returns the path of the training shard and its tokens.
    """
    number, first_document, documents = chunk
    tokenizer = tokenizers.load(tokenizer_name, folder / "tokenizer.json")

    of_split = {"train": [], "val": []}
    for index, document in enumerate(documents, first_document):
        of_split["val" if index % val_every == 0 else "train"].append(document)

    for split, some in of_split.items():
        path = folder / f"{split}-{number:05d}.bin"
        made_from = [tokenizer.fingerprint, some]
        if row_format:
            made_from.append(str(row_format))
        shard_key = hashlib.sha256(json.dumps(made_from, default=hash_of).encode()).hexdigest()
        if some and is_finished(path, shard_key):
            continue
        if row_format:
            from text import chat

            ids, about = chat.make_rows(some, tokenizer, row_format)
        else:
            ids, about = make_ids(some, tokenizer)
        write_ids(path, ids, about | {"text_sha256": shard_key})

    path = folder / f"train-{number:05d}.bin"
    return path, Shard(path).header["tokens"]


def hash_of(ids: np.ndarray) -> str:
    """What `json.dumps` writes in place of ids."""
    return hashlib.sha256(ids).hexdigest()


def is_finished(path: Path, shard_key: str) -> bool:
    """Is this shard intact, and made from this? UserError for a file of another program."""
    require_shard(path)
    try:
        shard = Shard(path)
        shard.check_hash()
    except (UserError, OSError):
        return False
    return shard.header["text_sha256"] == shard_key


def make_ids(documents: list, tokenizer) -> tuple[np.ndarray, dict]:
    """Documents -> the ids of a shard, (n,) of the tokenizer's dtype, and what its header says.

    Behind the ids of a text comes end-of-text. A document of ids stays as it is. `text_bytes` is
    the length of all text in UTF-8, without end-of-text.
    """
    end = np.array([tokenizer.eot], tokenizer.dtype)
    parts = [np.empty(0, tokenizer.dtype)]
    n_bytes = 0
    for document in documents:
        if isinstance(document, str):
            n_bytes += len(document.encode("utf-8", "replace"))
            parts += [tokenizer.encode(document), end]
        else:
            n_bytes += max(1, len(tokenizer.decode_bytes(document[document != tokenizer.eot])))
            parts.append(document)
    about = {
        "documents": len(documents),
        "text_bytes": n_bytes,
        "vocab_size": tokenizer.vocab_size,
    }
    return np.concatenate(parts), about


def require_learned_tokens(recipe: Recipe) -> None:
    """UserError if no example for training, or none for validation, has a token to learn."""
    cfg = recipe.cfg
    which = "last " if cfg.target_responses == "last" else ""
    fixes = {
        "train": "Remove some of these weights, or raise max_seq_len",
        "val": f"Raise --val_fraction={cfg.val_fraction}, so that validation gets other examples",
    }
    for split, fix in fixes.items():
        headers = [Shard(path).header for path in shard_files(recipe.folder, split)]
        n_examples = sum(header["documents"] + header["dropped"] for header in headers)
        require(n_examples > 0, f"dataset={cfg.dataset!r} has one example only: add others")
        require(
            any(header["learned"] for header in headers),
            f"nothing to learn in the {n_examples:,} {split} examples: every {which}response has "
            f"weight 0, or lies beyond --max_seq_len={recipe.max_seq_len}. {fix}",
        )
