"""Text -> token shards on disk -> batches. A batch is a pure function of the seed and the step.

Preparing a data set, once. Documents come from text/corpus.py in a fixed order. They are grouped
into chunks, and each chunk is encoded into two files of raw tokens after a JSON header: one for
training, one for validation. Every `1 / val_fraction`-th document goes to validation, whole. Each
file is written under a temporary name and renamed, so a file that exists is complete. A chunk
that is already on disk is skipped, so an interrupted preparation resumes.

    data/stdlib-bpe-4096/   dataset.json  tokenizer.json  train-00000.bin ...  val-00000.bin ...

Runs that start together prepare once: one holds prepare.lock, the others wait, on other nodes too.
On a file system without locks each makes the same files, under temporary names of its own (with
--max_tokens, run data.py first there). dataset.json says what the tokens were made from. A run that
begins refuses them if that has changed.

Batches, at every step. A data set is n windows of tokens. Row r of the batch of step s is

    sample          = s * global_batch_size + r        counted from the start of the run
    epoch, position = divmod(sample, n)
    window          = permute(position, n, seed, epoch)

`permute` is a random order of the n windows, a different one in each epoch. It is computed, not
stored. Each data-parallel rank reads its own slice of the rows. So the samples and their order
are the same on any number of ranks and for any microbatch size, and each window is read once an
epoch.

Where does a resumed run continue? No data position is saved. A checkpoint holds its step, and
`Split.batch(seed, step, ...)` returns the rows that an uninterrupted run reads at that step.

Prompts and responses (data_format=chat, text/chat.py) are prepared as whole rows of max_seq_len
tokens, one window each, of which only some tokens are learned: see `inputs_and_labels`.

How do I add a dataset format? A new format of text (.xml, a database): a function of documents in
text/corpus.py, called by `file_documents`. Nothing in this file changes. A new format of tokens on
disk: replace `Shard` in text/shards.py, or write a class with the methods and attributes
of `Split`.

Run `python data.py --dataset='my/*.txt' --tokenizer=bpe-4096`, or with a config file.
"""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import config
import program
from config import TrainConfig, UserError, require
from storage import files
from text import corpus
from text import tokenizer as tokenizers
from text.shards import (
    Shard,
    fingerprint,
    raise_file_limit,
    read_summary,
    require_shard,
    shard_files,
    truncate_shard,
    write_ids,
)

BPE_CHARACTERS = 16 * 2**20  # the amount of text from which a BPE is trained
HASH_BYTES = 2**30  # texts, and shards, up to this size are hashed whenever a run starts

# fsdp_train.py prepares a missing data set itself if it is within one of these limits.
SMALL_TOKENS = 100_000_000
SMALL_BYTES = 2**29
FIRST_SLICE = 20_000_000  # tokens: a first look at a data set of the Hub
FIRST_SLICE_COST = "40 MB on disk, about a minute on two cores"

REDRAW_SECONDS = 2.0  # of the progress bar

# --------------------------------------------------------------------------------------------------
# Preparing: documents -> shards


def data_dir(cfg: TrainConfig) -> Path:
    """The folder of the shards: `--data_dir`, or data/DATASET-TOKENIZER."""
    if cfg.data_dir:
        return Path(cfg.data_dir)
    names = [cfg.dataset, tokenizers.canonical(cfg.tokenizer)]
    plain_names = [re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") for name in names]
    return Path("data") / "-".join(plain_names)


def prepare(cfg: TrainConfig, workers: int = 1, max_seq_len: int = 0) -> Path:
    """Make the token shards of `cfg.dataset` unless they are complete. Returns their folder.

    workers: processes that encode. The files do not depend on it.
    max_seq_len: tokens of a row of prompts and responses (data_format=chat). Text needs none.
    If another process prepares the folder, this one waits for it.
    Raises UserError if the data set cannot be read or holds too little text, or if the folder
    belongs to another data set, tokenizer, validation fraction or data format.
    """
    folder = data_dir(cfg)
    row_format = row_format_of(cfg, max_seq_len)
    if is_prepared(cfg, read_summary(folder), folder, row_format):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / "prepare.lock", f"{folder} is being prepared") as is_alone:
        summary = read_summary(folder)  # of the process that this one has waited for
        if not is_prepared(cfg, summary, folder, row_format):
            make_shards(cfg, summary, folder, workers, row_format, is_alone)
    return folder


def make_shards(
    cfg: TrainConfig, summary: dict | None, folder: Path, workers: int, row_format, is_alone: bool
) -> None:
    """Make the shards of a folder that are missing or wrong, then its dataset.json.

    summary: what dataset.json held. is_alone: no other process makes shards here now, so temporary
    files are those of crashes.
    """
    source = source_state(cfg)  # of the text before it is read: an edit from now on is a change
    if summary:
        make_unfinished(summary, folder, source)
    if ignored := corpus.left_out(cfg.dataset):
        print(f"dataset={cfg.dataset}{ignored}", file=sys.stderr, flush=True)
    tokenizer = make_tokenizer(cfg, folder)
    with progress(cfg.max_tokens) as bar:  # which an error clears, so that its line stands alone
        n_chunks, train_tokens = encode_dataset(cfg, folder, tokenizer, workers, row_format, bar)
        remove_shards_from(folder, n_chunks)
        require(n_chunks > 0, f"dataset={cfg.dataset!r} is empty: no document has any text")
        if row_format:
            require_learned_tokens(cfg, folder, row_format.max_seq_len)
        require(
            train_tokens > 0,
            f"dataset={cfg.dataset!r} has one document only, and validation gets that one: "
            "split it into several documents",
        )
    if is_alone:
        remove_leftovers(folder)

    summary = {
        "dataset": cfg.dataset,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        **source,
        "max_tokens": cfg.max_tokens,
        "val_fraction": cfg.val_fraction,
        "train_tokens": train_tokens,
        "fingerprint": fingerprint(folder),
        **chat_settings(cfg, row_format),
    }
    files.write_atomically(folder / "dataset.json", json.dumps(summary, indent=2).encode())


def make_unfinished(summary: dict, folder: Path, source: dict[str, str]) -> None:
    """Remove the summary of a folder in which more tokens are wanted, the text has changed, or a
    shard is missing. Shards that are still right are kept.

    A `bpe-N` that was trained on other text goes, too.
    """
    of_other_text = not is_older(summary) and not source.items() <= summary.items()
    if of_other_text and summary["tokenizer"].startswith("bpe"):
        (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "dataset.json").unlink(missing_ok=True)


def is_prepared(cfg: TrainConfig, summary: dict | None, folder: Path, row_format) -> bool:
    """Does a folder hold what `cfg` asks for? UserError if it belongs to something else."""
    if not summary:
        return False
    check_made_for(cfg, summary, folder, row_format)
    return is_current(cfg, summary, folder)


def is_current(cfg: TrainConfig, summary: dict, folder: Path) -> bool:
    """Does a prepared folder hold what `cfg` asks for, made from the text as it is now?"""
    older = is_older(summary)
    source = {"source": corpus.sizes_hash(cfg.dataset)} if older else source_state(cfg)
    source_is_same = source.items() <= summary.items()
    shards_are_same = fingerprint(folder) == summary["fingerprint"]
    has_all = source_is_same and shards_are_same and has_enough(summary, cfg.max_tokens)
    return has_all and not tokenizer_changed(cfg, folder)


def source_state(cfg: TrainConfig) -> dict[str, str]:
    """Short hashes that change with the files of the data set, and with the chat template."""
    source = {"source": text_state(cfg)}
    if cfg.data_format == "text":
        return source
    from text import chat

    return source | {"template": chat.load_template(cfg.chat_template).fingerprint}


def text_state(cfg: TrainConfig) -> str:
    """A short hash that changes with the files of the data set.

    Of a chat, every byte counts, however large it is: people correct it by hand.
    """
    if cfg.data_format == "chat":
        return corpus.content_hash(cfg.dataset)
    return corpus.source_state(cfg.dataset, HASH_BYTES)


def is_older(summary: dict) -> bool:
    """Does a summary know its text by names and sizes alone, as those of older versions do?"""
    is_text = "data_format" not in summary
    return is_text and " " not in summary["source"]  # "content 3f...": see `corpus.source_state`


def tokenizer_changed(cfg: TrainConfig, folder: Path) -> bool:
    """Is a tokenizer.json that the settings name another one than its copy in the folder?"""
    name = cfg.tokenizer
    if not (name.endswith(".json") and os.path.exists(name)):
        return False
    if not (folder / "tokenizer.json").exists():
        return True
    copy = files.read_bytes(folder / "tokenizer.json")
    # The second question is for a vocab.json, from which a tokenizer.json is made.
    return files.read_bytes(name) != copy and tokenizers.load(name).content != copy


def check_source(cfg: TrainConfig, summary: dict, folder: Path, row_format) -> None:
    """UserError if the text, chat template or tokenizer changed after a folder was prepared.

    A run that has begun goes on with its tokens, and says so; so does one on a folder that an older
    version made. What is not on this machine is not checked: shards may have been copied without
    it.
    """
    changed = changed_sources(cfg, summary, folder, row_format)
    if not changed:
        return
    since = f"{' and '.join(changed)} changed after {folder} was made"
    if has_begun(cfg) or is_older(summary):
        print(f"note: {since}: this run takes the old tokens", file=sys.stderr, flush=True)
        return
    # Not prepared again here: a run that was trained on the old rows may want to go on with them.
    command = prepare_command(cfg, folder, row_format)
    raise UserError(
        f"{since}: set another --data_dir, or make "
        f"it again if no run on the old data has to resume: {command}"
    )


def changed_sources(cfg: TrainConfig, summary: dict, folder: Path, row_format) -> list[str]:
    """The settings whose files are not those from which a folder was made."""
    changed = []
    if corpus.is_here(cfg.dataset):
        now = corpus.sizes_hash(cfg.dataset) if is_older(summary) else text_state(cfg)
        if now != summary["source"]:
            known_by = "" if now.startswith("content") or row_format else "sizes or times of "
            changed.append(f"{known_by}dataset={cfg.dataset}")
    if row_format and (not cfg.chat_template or Path(cfg.chat_template).exists()):
        from text import chat

        template = chat.load_template(cfg.chat_template)
        if template.fingerprint != summary.get("template"):
            changed.append(f"chat_template={cfg.chat_template}")
    if tokenizer_changed(cfg, folder):
        changed.append(f"tokenizer={cfg.tokenizer}")
    return changed


def has_begun(cfg: TrainConfig) -> bool:
    """Does a run have a checkpoint to go on from, or name one?"""
    names = [path.name for path in Path(cfg.run_dir).glob("checkpoints/step-[1-9]*")]
    steps = [int(name[5:]) for name in names if name[5:].isdecimal()]
    if cfg.resume == "again" and max(steps, default=0) >= cfg.max_steps:
        return False  # a finished run, which will be put aside
    return bool(names) or cfg.resume not in ("auto", "again", "never")


def row_format_of(cfg: TrainConfig, max_seq_len: int):
    """The `chat.RowFormat` of prompts and responses, None for text."""
    if cfg.data_format == "text":
        return None
    from text import chat  # here, since most runs do without

    return chat.RowFormat.of(cfg, max_seq_len)


def chat_settings(cfg: TrainConfig, row_format) -> dict:
    """The settings on which rows of prompts and responses depend. Empty for text."""
    if not row_format:
        return {}
    of_messages = {"data_format": cfg.data_format, "chat_template": cfg.chat_template}
    return of_messages | dataclasses.asdict(row_format)


def has_enough(summary: dict, max_tokens: int) -> bool:
    """Does a prepared folder hold `max_tokens` training tokens? 0 asks for the whole data set."""
    was_unlimited = summary["max_tokens"] == 0
    ran_out_of_text = summary["train_tokens"] < summary["max_tokens"]
    if was_unlimited or ran_out_of_text:
        return True  # it holds the whole data set
    return 0 < max_tokens <= summary["max_tokens"]


def check_made_for(cfg: TrainConfig, summary: dict, folder: Path, row_format) -> None:
    """UserError if a folder belongs to another data set, tokenizer, validation fraction or data
    format. Rows of prompts and responses belong to their other settings as well.
    """
    made_with = {"data_format": "text"} | summary  # older summaries do not say it
    wanted = {
        "dataset": cfg.dataset,
        "tokenizer": tokenizers.canonical(cfg.tokenizer),
        "val_fraction": cfg.val_fraction,
        "data_format": cfg.data_format,
        **chat_settings(cfg, row_format),
    }
    for key, value in wanted.items():
        saved = made_with.get(key)
        fix = f"set {config.shell(f'--{key}={config.one_line(saved)}')}, or another --data_dir"
        problem = f"{folder} was made with --{key}={config.one_line(saved)}, not {value}"
        require(saved == value, f"{problem}: {fix}")


def make_tokenizer(cfg: TrainConfig, folder: Path):
    """The tokenizer of a data folder. Its file, if it has one, is put into the folder first.

    A `bpe-N` is that of the run to start from (init_from), or trained on the first documents of the
    data set, unless the folder has one already.
    """
    name = tokenizers.canonical(cfg.tokenizer)
    path = folder / "tokenizer.json"

    if name.endswith(".json") and (os.path.exists(name) or not path.exists()):
        # Later runs read this copy: the original may be moved.
        files.write_atomically(path, tokenizers.load(name).content)

    of_base = file_of_base(cfg, name)
    if of_base and not path.exists():
        files.write_atomically(path, files.read_bytes(of_base))

    if name.startswith("bpe") and not path.exists():
        print(f"training a tokenizer ({name}) on {cfg.dataset} ...", file=sys.stderr, flush=True)
        vocab_size = int(name.split("-")[1])
        tokenizers.train_bpe(first_texts(cfg, BPE_CHARACTERS), vocab_size).save(path)

    return tokenizers.load(name, path)


def file_of_base(cfg: TrainConfig, name: str) -> Path | None:
    """The file of the `bpe-N` with which the run at init_from was trained; None if it has another.

    init_from: a run, or one of its checkpoints.
    """
    if not (cfg.init_from and name.startswith("bpe")):
        return None
    given = Path(cfg.init_from)
    for folder in (given, given.parent.parent):
        file = folder / "tokenizer.json"
        if file.exists() and files.read_json(file).get("name") == name:
            return file
    return None


def documents_of(cfg: TrainConfig, tokenizer=None):
    """The documents of a data set. An example of a chat is one, too: see `chat.examples`.

    tokenizer: what will encode them. Without it they are plain text, from which a tokenizer can be
    trained.
    """
    if cfg.data_format == "text":
        return corpus.documents(cfg.dataset)
    from text import chat

    reserved = tokenizer.special_tokens if tokenizer else None
    examples = chat.examples(cfg.dataset, chat.load_template(cfg.chat_template, reserved))
    return examples if tokenizer else map(chat.plain_text, examples)


def first_texts(cfg: TrainConfig, n_characters: int) -> list[str]:
    """The first documents of a data set, until they have more than `n_characters` in all.

    Of a longer document only the first `n_characters` are taken.
    """
    texts = []
    total = 0
    for text in documents_of(cfg):
        texts.append(text[:n_characters])
        total += len(text)
        if total > n_characters:
            break
    return texts


def encode_dataset(
    cfg: TrainConfig, folder: Path, tokenizer, workers: int, row_format, bar
) -> tuple[int, int]:
    """Encode the chunks of a data set into shards. Returns (chunks, training tokens).

    bar: shows the tokens so far, see `progress`.
    """
    val_every = max(2, round(1 / cfg.val_fraction))  # 0.02: every 50th document
    # A row has examples of one chunk: the more there are to choose from, the fuller it gets.
    first_characters = corpus.CHUNK_CHARACTERS if row_format else corpus.FIRST_CHUNK_CHARACTERS
    chunks = counted(corpus.chunks(documents_of(cfg, tokenizer), first_characters), bar)
    jobs = (
        Job(folder, number, first_document, documents, val_every, tokenizer.name, row_format)
        for number, first_document, documents in chunks
    )
    if workers <= 1:
        return collect(map(encode_chunk, jobs), cfg.max_tokens, bar)

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=program.end_with_parent) as pool:
        results = bounded_map(pool, encode_chunk, jobs, depth=2 * workers)
        return collect(results, cfg.max_tokens, bar)


def bounded_map(pool, function, items, depth: int):
    """Like `pool.map`, but at most `depth` items are in flight.

    `pool.map` reads all items first. A data set streamed from the Hub would not fit into memory.
    """
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= depth:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextlib.contextmanager
def progress(max_tokens: int):
    """A progress bar that counts tokens.

    A thread redraws it, so that its clock runs while a chunk is encoded: one document may take
    minutes.
    """
    finished = threading.Event()
    total = max_tokens or None
    style = {"unit": " tokens", "unit_scale": True, "mininterval": 1, "delay": REDRAW_SECONDS}
    with tqdm(desc="tokens", total=total, **style) as bar:  # drawn when it has taken so long

        def redraw():
            while not finished.wait(REDRAW_SECONDS):
                bar.refresh()
                bar.delay = 0  # something is drawn, so that closing must clear it or end its line

        thread = threading.Thread(target=redraw, daemon=True)
        thread.start()
        try:
            yield bar
            bar.delay = 0
        except BaseException:
            bar.leave = False  # so that the line of the error stands alone
            raise
        finally:
            finished.set()
            thread.join()


def counted(chunks, bar):
    """Pass chunks on unchanged, and show on the bar how much text was read so far."""
    n_characters = 0
    for number, first_document, documents in chunks:
        n_characters += sum(map(len, documents))
        bar.set_postfix_str(f"{n_characters / 1e6:,.1f} M characters read", refresh=False)
        yield number, first_document, documents


def collect(results, max_tokens: int, bar) -> tuple[int, int]:
    """Count the tokens of finished chunks, and stop at exactly `max_tokens` (0: never).

    results: (path of the training shard, its tokens) of each chunk, in order. The last one is cut
    off where the limit is reached. Returns (chunks, training tokens).
    """
    n_chunks = 0
    total = 0
    for path, tokens in results:
        n_chunks += 1
        total += tokens
        bar.update(tokens)
        if max_tokens and total >= max_tokens:
            excess = total - max_tokens
            if excess:
                truncate_shard(path, tokens - excess)
            return n_chunks, max_tokens
    return n_chunks, total


def remove_shards_from(folder: Path, n_chunks: int) -> None:
    """Remove shards of the chunks `n_chunks` and later, which workers encoded beyond max_tokens."""
    for path in shard_files(folder):
        number = int(path.stem.split("-")[1])
        if number >= n_chunks:
            require_shard(path)
            path.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed preparations left."""
    for path in folder.glob("*.tmp"):
        if re.match(r"((train|val)-[0-9]+\.bin|(dataset|tokenizer)\.json)\.", path.name):
            path.unlink(missing_ok=True)


@dataclasses.dataclass
class Job:
    """A chunk of documents, and how to encode it into two shards.

    The tokenizer goes to a worker process by its name, since tiktoken's encodings cannot be
    pickled.
    """

    folder: Path
    number: int  # of the chunk
    first_document: int  # its number in the data set
    documents: list[str]
    val_every: int  # of so many documents, one is for validation
    tokenizer_name: str
    row_format: object  # `chat.RowFormat` of prompts and responses, None for text


def encode_chunk(job: Job) -> tuple[Path, int]:
    """Encode one chunk into train-N.bin and val-N.bin, unless these are already right.

    Returns the path of the training shard and its tokens.
    """
    row_format = job.row_format
    tokenizer = tokenizers.load(job.tokenizer_name, job.folder / "tokenizer.json")

    texts = {"train": [], "val": []}
    for index, text in enumerate(job.documents, job.first_document):
        split = "val" if index % job.val_every == 0 else "train"
        texts[split].append(text)

    for split in ("train", "val"):
        path = job.folder / f"{split}-{job.number:05d}.bin"
        made_from = [tokenizer.fingerprint, texts[split]]
        if row_format:
            made_from.append(str(row_format))
        text_hash = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        if texts[split] and is_finished(path, text_hash):
            continue
        if row_format:
            write_rows(path, texts[split], tokenizer, text_hash, row_format)
        else:
            write_shard(path, texts[split], tokenizer, text_hash)

    path = job.folder / f"train-{job.number:05d}.bin"
    return path, Shard(path).header["tokens"]


def is_finished(path: Path, text_hash: str) -> bool:
    """Does this shard exist, intact, made from this text by this tokenizer?

    UserError if another program's file has its name.
    """
    require_shard(path)
    try:
        shard = Shard(path)
        shard.check_hash()
    except (UserError, OSError):
        return False
    return shard.header["text_sha256"] == text_hash


def write_shard(path: Path, documents: list[str], tokenizer, text_hash: str) -> None:
    """Write documents as one shard: the ids of each, then end-of-text.

    The ids are uint16, or uint32 if the vocabulary has more than 65,536 entries.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    parts = [np.append(tokenizer.encode(text), tokenizer.eot).astype(dtype) for text in documents]
    ids = np.concatenate(parts) if parts else np.empty(0, dtype)
    about = {
        "documents": len(documents),
        "text_bytes": sum(len(text.encode("utf-8", "replace")) for text in documents),
        "vocab_size": tokenizer.vocab_size,
        "text_sha256": text_hash,
    }
    write_ids(path, ids, about)


def write_rows(path: Path, examples: list[str], tokenizer, text_hash: str, row_format) -> None:
    """Write examples of a chat as one shard: whole rows of ids, int32. See `chat.make_rows`."""
    from text import chat

    ids, about = chat.make_rows(examples, tokenizer, row_format)
    write_ids(path, ids, about | {"text_sha256": text_hash})


def require_learned_tokens(cfg: TrainConfig, folder: Path, max_seq_len: int) -> None:
    """UserError if no example for training, or none for validation, has a token to learn."""
    for name in ("train", "val"):
        headers = [Shard(path).header for path in shard_files(folder, name)]
        n_examples = sum(header["documents"] + header["dropped"] for header in headers)
        learned = sum(header["learned"] for header in headers)
        single = f"dataset={cfg.dataset!r} has one example only, and validation gets that one"
        require(n_examples > 0, f"{single}: add others")

        which = "last " if cfg.target_responses == "last" else ""
        cause = f"every {which}response has weight 0, or lies beyond --max_seq_len={max_seq_len}"
        fix = "Remove some of these weights, or raise max_seq_len"
        if name == "val":  # training has something to learn
            fix = f"Raise --val_fraction={cfg.val_fraction}, so that validation gets other examples"
        problem = f"nothing to learn in the {n_examples:,} {name} examples: {cause}"
        require(learned > 0, f"{problem}. {fix}")


# --------------------------------------------------------------------------------------------------
# Reading: shards -> batches


class Split:
    """One split (train or val) of a data folder, as n = len(split) windows of tokens.

    A window is seq_len + 1 tokens: the first seq_len are the inputs, the last seq_len the labels.
    It begins with the last token of the window before it, which was only a label there. A row of a
    chat is a window, too. The shared token is the first of its own row, and the row before ignores
    it as a label, since a first id is never learned. So a shard of n * seq_len + 1 ids has n rows.

    `tokens`, `text_bytes` and `vocab_size` describe the whole split, and so does `learned`, the
    number of tokens that are learned. Of a chat, `text_bytes` counts the text of those alone.
    """

    def __init__(self, folder: Path, split: str, seq_len: int):
        """UserError if the folder has no shard of this split, or too few tokens for one window."""
        raise_file_limit()
        self.folder = folder
        self.seq_len = seq_len
        self.shards = [Shard(path) for path in shard_files(folder, split)]
        require(
            self.shards,
            f"no {split} shards in {folder} on {platform.node()}: every node must see this folder",
        )
        self.tokens = sum(shard.header["tokens"] for shard in self.shards)
        self.text_bytes = sum(shard.header["text_bytes"] for shard in self.shards)
        self.vocab_size = self.shards[0].header["vocab_size"]
        self.has_rows = self.shards[0].has_rows  # of prompts and responses
        self.learned = self.tokens
        if self.has_rows:
            self.check_rows()
            self.learned = self.count("learned")

        sizes = [shard.header["tokens"] for shard in self.shards]
        windows_in_shard = [max(0, size - 1) // seq_len for size in sizes]
        self.first_window = np.cumsum([0, *windows_in_shard])  # of each shard; at the end, n

        fix = "lower --max_seq_len"
        if split == "val":
            fix += ", or raise --val_fraction and set another --data_dir"
        require(
            len(self) > 0,
            f"max_seq_len {seq_len} needs {seq_len + 1:,} tokens in one file, and the longest of "
            f"the {len(sizes)} {split} files in {folder} has {max(sizes):,}: {fix}",
        )

    def count(self, name: str) -> int:
        """The sum of a count in the headers of all shards."""
        return sum(shard.header[name] for shard in self.shards)

    def describe_rows(self) -> str:
        """How full the rows of a chat are, how much is learned, what was cut or dropped."""
        filled = self.count("filled") / (len(self) * self.seq_len)
        return (
            f"{self.count('documents'):,} examples fill {filled:.1%} of {len(self):,} rows, "
            f"{self.learned:,} tokens are learned; "
            f"{self.count('cut'):,} examples cut to {self.seq_len} tokens, "
            f"{self.count('dropped'):,} dropped, since nothing in them is learned"
        )

    def check_rows(self) -> None:
        """UserError unless the rows have as many ids as a window has inputs."""
        lengths = {shard.header.get("max_seq_len") for shard in self.shards}
        fix = "set that, or prepare the data again with another --data_dir"
        problem = f"{self.folder} has rows made for max_seq_len {sorted(map(str, lengths))[0]}"
        require(lengths == {self.seq_len}, f"{problem}, not {self.seq_len}: {fix}")

    def __len__(self) -> int:
        """The number of windows, n."""
        return int(self.first_window[-1])

    def windows(self, window_ids: np.ndarray) -> np.ndarray:
        """The tokens of these windows, (len(window_ids), seq_len + 1) int64.

        ~id stands for an id that is not learned: see `inputs_and_labels`.
        """
        rows = np.empty((len(window_ids), self.seq_len + 1), np.int64)
        shard_ids = np.searchsorted(self.first_window, window_ids, side="right") - 1
        for row, shard_id, window_id in zip(rows, shard_ids, window_ids, strict=True):
            begin = (window_id - self.first_window[shard_id]) * self.seq_len
            row[:] = self.shards[shard_id].ids[begin : begin + self.seq_len + 1]
        require(
            not len(rows) or plain_ids(rows).max() < self.vocab_size,
            f"{self.folder} holds ids beyond its vocabulary: it is damaged, "
            "delete it and run data.py again",
        )
        return rows

    def batch(
        self, seed: int, step: int, global_batch_size: int, dp_rank: int = 0, dp_size: int = 1
    ) -> np.ndarray:
        """The rows of one data-parallel rank at one step.

        Returns (global_batch_size / dp_size, seq_len + 1) int64. A pure function of its
        arguments: nothing is remembered between calls, so a resumed run asks for its step and
        continues where it was. See the formula at the top of this file.
        """
        n_rows = global_batch_size // dp_size  # of this rank
        first_sample = step * global_batch_size + dp_rank * n_rows
        samples = first_sample + np.arange(n_rows)  # counted from the start of the run
        epochs, positions = np.divmod(samples, len(self))

        window_ids = np.empty_like(positions)
        for epoch in np.unique(epochs):  # more than one if an epoch ends inside this batch
            in_epoch = epochs == epoch
            window_ids[in_epoch] = permute(positions[in_epoch], len(self), seed, int(epoch))
        return self.windows(window_ids)


def n_evaluated(split, eval_tokens: int) -> int:
    """How many windows of a split one evaluation reads: eval_tokens at most, but one at least."""
    return max(1, min(len(split), eval_tokens // split.seq_len))


class Dataset:
    """A prepared data set as a run uses it: both splits, cut into windows of max_seq_len tokens."""

    def __init__(self, folder: Path, model_cfg: config.MPTConfig):
        """UserError if an id exceeds the model's vocabulary, or a split is less than one window."""
        self.folder = folder
        self.train = Split(folder, "train", model_cfg.max_seq_len)
        self.val = Split(folder, "val", model_cfg.max_seq_len)
        self.fingerprint = read_summary(folder)["fingerprint"]
        self.tokenizer_file = folder / "tokenizer.json"  # not there for bytes and GPT-2's
        # The id between packed documents, if the model keeps them apart.
        self.separator = None
        if model_cfg.attn_uses_sequence_id:
            name = read_summary(folder)["tokenizer"]
            self.separator = tokenizers.load(name, self.tokenizer_file).eot
        n_ids = self.train.vocab_size
        problem = f"vocab_size {model_cfg.vocab_size} is less than the {n_ids} ids of {folder}"
        require(n_ids <= model_cfg.vocab_size, f"{problem}: raise it")

    @property
    def epoch_tokens(self) -> int:
        """Tokens of an epoch."""
        return len(self.train) * self.train.seq_len

    def batches(self, steps, cfg: TrainConfig, world):
        """Yield (step, rows), rows (B, T + 1) on this rank's device, for each of the `steps`.

        The rows depend on (seed, step) alone, and B = global_batch_size / data-parallel ranks. A
        thread reads the next ones while this rank trains.
        """

        def read(step: int) -> np.ndarray:
            return self.train.batch(
                cfg.seed, step, cfg.global_batch_size, world.dp_rank, world.dp_size
            )

        return prefetch(read, steps, world.device)


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a random permutation of 0..n-1 sends `positions`, int64 of the same shape.

    Each is computed on its own, so nothing of size n is stored. Only integers are used, so the
    result is the same on every machine.

    A Feistel network of 6 rounds (Luby and Rackoff, 1988) permutes 0..4^k-1, the smallest such
    range that holds n. A result outside 0..n-1 goes through the network again until it lies
    inside (cycle walking: Black and Rogaway, 2002).
    """
    k = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))  # bits in each half
    mask = (np.uint64(1) << k) - np.uint64(1)
    digests = [
        hashlib.sha256(f"{seed}:{epoch}".encode()).digest(),
        hashlib.sha256(f"{epoch}:{seed}".encode()).digest(),
    ]
    round_keys = np.frombuffer(b"".join(digests), "<u8")[:6]

    def network(x):
        left = x >> k
        right = x & mask
        for key in round_keys:
            left, right = right, left ^ (mix(right + key) & mask)
        return (left << k) | right

    permuted = network(positions.astype(np.uint64))
    while (outside := permuted >= n).any():
        permuted[outside] = network(permuted[outside])
    return permuted.astype(np.int64)


def mix(x: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64, elementwise: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def plain_ids(rows: np.ndarray) -> np.ndarray:
    """The ids in rows of a shard, where ~id = -1 - id stands for one that is not learned."""
    return np.where(rows < 0, ~rows, rows)


def inputs_and_labels(rows):
    """Rows (B, T + 1) of a batch -> ids (B, T) that the model reads, labels (B, T), both int64.

    The label of a place is the next id, or IGNORE if that is not learned. In rows such an id is
    stored as ~id = -1 - id, which is negative; text has none.
    """
    import torch

    from loss import IGNORE

    ids = torch.where(rows < 0, ~rows, rows)
    labels = torch.where(rows < 0, IGNORE, rows)
    return ids[:, :-1], labels[:, 1:]


def check_packing(model_cfg: config.MPTConfig, cfg: TrainConfig) -> None:
    """UserError if examples packed into one row would see each other, or begin late in a row."""
    if cfg.data_format == "text" or not cfg.packing:
        return
    instead = "or give each example a row of its own with --packing=False"
    require(
        not model_cfg.learned_positions,
        "packing needs positions that are relative, and this model learns one for each place of a "
        f"row: set --alibi or --rope for a model that has them, {instead}",
    )
    require(
        model_cfg.attn_uses_sequence_id,
        "packed examples would see each other: set --attn_uses_sequence_id, which keeps them "
        f"apart, {instead}",
    )


def batch_hash(rows, dp_rank: int):
    """A 64-bit hash of the ids in `rows` (B, T + 1), int64 scalar on their device.

    rows: those of one data-parallel rank, dp_rank * B to dp_rank * B + B - 1 of the batch. The
    sum over these ranks (mod 2^64) is the hash of the global batch, however many ranks share it.
    Any change of an id, or of their order, changes it.
    """
    import torch

    places = torch.arange(rows.numel(), device=rows.device).view_as(rows) + dp_rank * rows.numel()
    mixed = (rows + 1) * (2 * places + 1) * 0x1E3779B97F4A7C15  # overflows on purpose
    return (mixed ^ (mixed >> 32)).sum()


def open_or_prepare(cfg: TrainConfig, max_seq_len: int = 0) -> Path:
    """The checked data folder of a training run. One process calls it (global rank 0).

    A small data set that is missing is prepared first. max_seq_len: as for `prepare`.
    Raises UserError for a large one, with the command that prepares it, and for a damaged folder or
    one made with other settings.
    """
    folder = data_dir(cfg)
    row_format = row_format_of(cfg, max_seq_len)
    summary = read_summary(folder)
    if summary:
        check_made_for(cfg, summary, folder, row_format)
        check_source(cfg, summary, folder, row_format)
        check_max_tokens(cfg, summary, folder, row_format)
    if not summary or not has_enough(summary, cfg.max_tokens):
        require_small(cfg, summary, folder, row_format)
        prepare(cfg, max_seq_len=max_seq_len)
        summary = read_summary(folder)
    require(
        fingerprint(folder) == summary["fingerprint"],
        f"a shard is missing in {folder}: {prepare_command(cfg, folder, row_format)} makes it",
    )
    shards = [Shard(path) for path in shard_files(folder)]  # checks headers and sizes
    if sum(shard.ids.nbytes for shard in shards) <= HASH_BYTES:
        for shard in shards:
            shard.check_hash()
    return folder


def check_max_tokens(cfg: TrainConfig, summary: dict, folder: Path, row_format) -> None:
    """UserError if all tokens are wanted and a folder holds only the first ones. A note if it holds
    more than are wanted: one folder serves runs of different length.
    """
    n_tokens = summary["train_tokens"]
    command = prepare_command(cfg, folder, row_format)
    require(
        cfg.max_tokens or has_enough(summary, 0) or has_begun(cfg),
        f"{folder} holds only the first {n_tokens:,} training tokens: set --max_tokens={n_tokens}, "
        f"or make the rest if no run on these has to resume: {command}",
    )
    if 0 < cfg.max_tokens < n_tokens:
        more = f"{folder} holds {n_tokens:,} training tokens, more than --max_tokens"
        print(f"note: {more}: this run reads all of them", file=sys.stderr, flush=True)


def require_small(cfg: TrainConfig, summary: dict | None, folder: Path, row_format) -> None:
    """UserError, with the command that prepares the data set, if it is too large to prepare now."""
    paths = corpus.files(cfg.dataset)
    few_tokens = 0 < cfg.max_tokens <= SMALL_TOKENS
    few_bytes = paths and sum(map(os.path.getsize, paths)) <= SMALL_BYTES

    command = prepare_command(cfg, folder, row_format)
    state = f"no data set is in {folder} yet"
    if summary:
        state = f"only {summary['train_tokens']:,} tokens are in {folder}"
    now = "--dataset=stdlib --tokenizer=bpe-4096 (Python's own source)"
    if not paths:  # it is on the Hub
        now += f", or --max_tokens={FIRST_SLICE} (a first slice: {FIRST_SLICE_COST})"
    require(
        few_tokens or few_bytes,
        f"{state}, and all of it is too much, or of unknown size, to prepare while a run starts. "
        f"To begin now, add to your command {now}. For all of it, first run: {command}",
    )


def prepare_command(cfg: TrainConfig, folder: Path, row_format) -> str:
    """The command that prepares the data set of a run."""
    names = ("dataset", "tokenizer", "max_tokens", "val_fraction")
    flags = [f"--{name}={getattr(cfg, name)}" for name in names]
    flags += [f"--{name}={value}" for name, value in chat_settings(cfg, row_format).items()]
    if cfg.init_from:  # which may have the tokenizer
        flags.append(f"--init_from={cfg.init_from}")
    flags.append(f"--data_dir={folder}")
    return f"python data.py {config.shell(*flags)}"


def prefetch(read_batch, steps, device):
    """Yield (step, read_batch(step) as a tensor on `device`), one step ahead of its use.

    read_batch: step -> array. A thread reads the next batch and copies it to the device while the
    caller works on this one.
    """
    import torch  # here, because preparing a data set needs no torch

    def load(step):
        rows = torch.from_numpy(read_batch(step))
        if device.type != "cuda":
            return rows.to(device)
        # A new thread is on device 0, where pinning memory would open a second context.
        torch.cuda.set_device(device)
        return rows.pin_memory().to(device, non_blocking=True)

    with ThreadPoolExecutor(1) as thread:
        ahead = deque()
        for step in steps:
            ahead.append((step, thread.submit(load, step)))
            if len(ahead) > 1:
                ready_step, batch = ahead.popleft()
                yield ready_step, batch.result()
        for ready_step, batch in ahead:
            yield ready_step, batch.result()


def main(argv) -> None:
    """Prepare a data set, then print what it holds and how fast one thread reads it."""
    model_cfg, cfg = config.load(argv, config.MPTConfig, TrainConfig)
    folder = prepare(cfg, os.cpu_count(), model_cfg.max_seq_len)
    for name in ("train", "val"):
        split = Split(folder, name, model_cfg.max_seq_len)
        n_documents = split.count("documents")
        print(
            f"{name:5s}  {split.tokens:,} tokens  {n_documents:,} documents  "
            f"{len(split):,} windows of {split.seq_len}  "
            f"{split.text_bytes / split.learned:.2f} bytes a token"
        )
        if split.has_rows:
            print(f"       {split.describe_rows()}")

    train = Split(folder, "train", model_cfg.max_seq_len)
    steps = 50
    start = time.perf_counter()
    for step in range(steps):
        rows = train.batch(cfg.seed, step, global_batch_size=64)
    tokens_per_second = steps * rows[:, 1:].size / (time.perf_counter() - start)
    print(
        f"one thread reads {tokens_per_second / 1e6:.0f} million tokens a second; "
        f"the last row of its batch {step} begins:"
    )
    tokenizer = tokenizers.load(cfg.tokenizer, folder / "tokenizer.json")
    begin = rows[-1][:40]
    print("   ", repr(tokenizer.decode(plain_ids(begin))))
    print(folder)


if __name__ == "__main__":
    config.run(main)
