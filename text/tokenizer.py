"""Text to ids: GPT-2's tokens, raw bytes, or a byte-pair encoding (BPE) trained here.

A model reads whole numbers. Bytes are the plainest choice: 256 ids, but a long sequence. BPE shortens it by learning:

    start with one id per byte
    repeat: find the pair of neighbours that is most frequent in the corpus, give the pair an id of its own
            l o w   l o w e r   ->   lo w   lo w e r   ->   low   low e r

The tokens in order of birth are the whole tokenizer, since encoding replays it: within a piece of text, join the
neighbours whose union was born first, until none is left. The pieces come from a fixed split into words, numbers,
punctuation and spaces (GPT-2's), so a token never spans two words. All kinds work on the bytes of UTF-8: no character
is unknown, and `decode(encode(text)) == text`. One more id, the last, is end-of-text: it stands between documents, and
no text encodes to it.

`python -m text.tokenizer` trains 512 entries on a part of Python's standard library and cuts a sentence; so does any
other name: `python -m text.tokenizer gpt2` (which also fetches GPT-2's files into TIKTOKEN_CACHE_DIR).
Read next: text/shards.py.

Sources: Sennrich et al. 2016 (arXiv 1508.07909), algorithm 1; Radford et al. 2019 (GPT-2), section 2.2.
"""

import collections
import difflib
import hashlib
import heapq
import itertools
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken: Python's own re does not know \p{L}
import tiktoken

from config import UserError, arguments, one_line, require, run
from storage import files

END_OF_TEXT = "<|endoftext|>"
# GPT-2's split with possessive quantifiers (++): the same pieces, but a million spaces do not exhaust the stack.
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# The 256 single bytes in GPT-2's order: the printable ones first. Hugging Face's trainer numbers them so, too.
BYTES = sorted(
    (bytes([b]) for b in range(256)), key=lambda b: not chr(b[0]).isprintable() or b == b" "
)
PRINTABLE = 188  # of these
LONGEST = 1000  # characters of a word that a BPE learns from: a join costs its length, and no language has longer ones

# A tokenizer.json may hold regular expressions and replacements, which take minutes a line if somebody wants it. So it
# first encodes some text in a process of its own. 11,000 characters: words, runs of one kind, spaces, lines.
PROBE = """
import resource, sys, tokenizers
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
words = "The quick brown fox, aged 42, doesn't jump over größe 世界 <|endoftext|>\\n\\t"
runs = "".join(c * 300 for c in "aA1 .\\n\\t_-世") + "ab1 " * 100
library = tokenizers.Tokenizer.from_file(sys.argv[1])
library.no_padding()
library.encode(words * 100 + runs, add_special_tokens=False)
"""
PROBE_SECONDS = 15  # a usual tokenizer takes 0.02, and Python's start up to a second


class Tokenizer:
    """Ids of a text, text of ids.

    name: `gpt2`, `bytes` or `bpe-N`; tokens: the bytes of each id, in order. `eot` is the id of end-of-text, the last;
    `vocab_size` counts all of them. Equal `fingerprint`s mean equal ids for every text. Do not pickle a tokenizer (not
    every tiktoken can): a worker process gets its name and path and calls `load`, which takes milliseconds.
    """

    def __init__(self, name: str, tokens: list[bytes]):
        self.name = name
        self.tokens = tokens
        self.eot = len(tokens)
        self.vocab_size = len(tokens) + 1
        self.dtype = np.uint16 if self.vocab_size <= 65536 else np.uint32
        self.bytes_of = dict(enumerate([*tokens, END_OF_TEXT.encode()]))
        split, self.encoding = "", None  # raw bytes need neither
        if name != "bytes":
            split, ranks = SPLIT, {token: i for i, token in enumerate(tokens)}
            special = {END_OF_TEXT: self.eot}
            self.encoding = tiktoken.Encoding(
                name, pat_str=split, mergeable_ranks=ranks, special_tokens=special
            )
        self.fingerprint = fingerprint(split, tokens)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) uint16, or uint32 above 65,536 ids. `<|endoftext|>` in it is text like any other."""
        try:
            return self._encode(text)
        except (
            UnicodeEncodeError
        ):  # half a surrogate pair, which JSON can carry and UTF-8 cannot: becomes U+FFFD
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def _encode(self, text: str) -> np.ndarray:
        if self.encoding is None:
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`. An id without a token (the vocabulary of a model is padded) becomes U+FFFD."""
        return b"".join(self.bytes_of.get(i, "\ufffd".encode()) for i in np.asarray(ids).tolist())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def save(self, path: str) -> None:
        """Write the tokens to `path` as JSON, at once or not at all: a reader never sees half a file."""
        words = [token.decode("latin-1") for token in self.tokens]  # one character a byte
        saved = {"name": self.name, "fingerprint": self.fingerprint, "tokens": words}
        files.write_atomically(path, json.dumps(saved).encode(), writer=os.getpid())


class HuggingFace:
    """The same for a `tokenizer.json` that came with a model, as far as it cuts text into bytes (MPT's, GPT-NeoX's).

    name: the path that it had; path: of the file or of a copy, which Hugging Face's `tokenizers` reads. Here `eot` need
    not be the last id.
    """

    def __init__(self, name: str, path: str):
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(
                f"{path} is read by Hugging Face's: pip install -r requirements-extra.txt"
            ) from error
        content = read(path)
        try:
            described = json.loads(content)
            bytewise = "ByteLevel" in json.dumps(described["decoder"])
            probe(
                path, json.dumps(described)
            )  # written anew: in the file itself a name may be spelled with \\u0067
            self.library = tokenizers.Tokenizer.from_str(content.decode())
        except (KeyboardInterrupt, SystemExit, UserError):
            raise
        except (
            BaseException
        ) as error:  # the library's errors have no class of their own, its panics are no Exception
            damaged = f"{path} is not Hugging Face's tokenizer.json, or is damaged"
            raise UserError(f"{damaged}: {one_line(error)}") from error
        require(
            bytewise,
            f"{path} does not cut text into bytes: only byte-level tokenizers are read here",
        )
        self.library.encode_special_tokens = (
            True  # `<|endoftext|>` in a text is text like any other
        )
        self.library.no_padding()
        self.library.no_truncation()
        spelled = {i: word for word, i in self.library.get_vocab().items()}
        self.name, self.path, self.vocab_size = name, path, 1 + max(spelled, default=0)
        self.eot = self.library.token_to_id(END_OF_TEXT)
        require(self.eot is not None, f"{path} has no {END_OF_TEXT}, which ends a document here")
        self.dtype = np.uint16 if self.vocab_size <= 65536 else np.uint32
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        letters = {
            chr(b[0]) if i < PRINTABLE else chr(256 + i - PRINTABLE): b for i, b in enumerate(BYTES)
        }
        self.bytes_of = {
            i: b"".join(letters.get(c, c.encode()) for c in word) for i, word in spelled.items()
        }

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`. UserError if the library gives up, as on a regular expression that never ends."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        try:
            return np.array(
                self.library.encode(text, add_special_tokens=False).ids, dtype=self.dtype
            )
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise UserError(
                f"{self.path} cannot encode {text[:20]!r}: {one_line(error)}"
            ) from error

    decode_bytes, decode = Tokenizer.decode_bytes, Tokenizer.decode


def read(path) -> bytes:
    """A tokenizer's file. UserError if it cannot be read."""
    try:
        return files.read_bytes(path, files.MAX_JSON)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer file {path}: {error.strerror}") from error


def probe(path: str, content: str) -> None:
    """UserError if a tokenizer.json with patterns of its own does not encode some text within seconds and 4 GB."""
    if not any(word in content for word in ("Regex", "Replace", "Prepend")):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, path], capture_output=True, timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{path} needs more than {PROBE_SECONDS} s for some lines of text: not taken"
        ) from error
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    require(done.returncode == 0, f"{path} cannot encode some lines of text: {said[:200]}")


def fingerprint(split: str, tokens: list[bytes]) -> str:
    """16 hexadecimal digits of the sha256 of everything that decides the ids."""
    return hashlib.sha256(repr((split, tokens, END_OF_TEXT)).encode()).hexdigest()[:16]


def canonical(name: str) -> str:
    """`name` as this project writes it (`bpe` is `bpe-4096`); UserError if there is no such tokenizer."""
    if name in ("gpt2", "bytes") or name.endswith(".json"):
        return name
    size = (
        4096 if name == "bpe" else int(name[4:]) if re.fullmatch(r"bpe-[0-9]{1,9}", name) else None
    )
    if size is None:
        near = difflib.get_close_matches(name, ["gpt2", "bytes", "bpe-4096"], n=1)
        hint = f", did you mean {near[0]!r}?" if near else ";"
        raise UserError(
            f"unknown tokenizer {name!r}{hint} choices: gpt2, bytes, bpe-N (as in bpe-4096), a tokenizer.json"
        )
    require(
        size > 256, f"bpe-{size} has no room for 256 bytes and end-of-text: the smallest is bpe-257"
    )
    return f"bpe-{size}"


def load(name: str, path: str | None = None) -> Tokenizer | HuggingFace:
    """The tokenizer `name`; a `bpe-N` is read from the file `path` that `save` wrote, a tokenizer.json from its copy at
    `path`, or without a `path` from `name`. UserError if it is not there.

    A stranger's run may name any file: its name is a name, and what is read is the copy.
    """
    name = canonical(name)
    if name.endswith(".json"):
        return HuggingFace(name, name if path is None else path)
    if name == "bytes":
        return Tokenizer(name, [bytes([b]) for b in range(256)])
    return load_gpt2() if name == "gpt2" else load_bpe(name, path)


def load_gpt2() -> Tokenizer:
    """GPT-2's 50,257 entries: tiktoken downloads two files once (and deletes a cached file that is damaged)."""
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (
        OSError,
        ValueError,
    ) as error:  # no network, or a cache that cannot be written; a damaged download
        raise UserError(
            f"GPT-2's tokenizer files are not in tiktoken's cache and cannot be fetched ({type(error).__name__}): set "
            "TIKTOKEN_CACHE_DIR to a folder that holds them (where there is a network, `TIKTOKEN_CACHE_DIR=folder "
            "python -m text.tokenizer gpt2` fills it), or take --tokenizer=bpe-4096 or --tokenizer=bytes: no download"
        ) from error
    return Tokenizer(
        "gpt2", [encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)]
    )


def load_bpe(name: str, path: str | None) -> Tokenizer:
    """A BPE that was trained here, from its JSON file."""
    require(path is not None, f"{name} is trained here, so load it with the path of its file")
    fix = "remove it and train again"
    saved = files.parse_json(
        read(path), str(path), dict, {"name": str, "fingerprint": str, "tokens": list}, fix
    )
    words = saved["tokens"]
    texts = all(isinstance(word, str) and max(word, default="") < "\u0100" for word in words)
    tokens = [word.encode("latin-1") for word in words] if texts else []
    sound = len(set(tokens)) == len(tokens) and set(BYTES) <= set(tokens)
    sound = sound and saved["fingerprint"] == fingerprint(SPLIT, tokens)
    require(sound, f"{path} is not a tokenizer file, or is damaged: {fix}")
    require(saved["name"] == name, f"{path} holds {one_line(saved['name'])}, not {name}")
    return Tokenizer(name, tokens)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of `vocab_size` entries, the 256 bytes and end-of-text among them: `vocab_size - 257` learned pairs.

    A small corpus has fewer: learning ends when no pair occurs twice, the name still says `vocab_size`, and the
    tokenizer's own `vocab_size` says how many entries there are. 10 MB of text is plenty, and takes seconds.
    """
    name = canonical(f"bpe-{vocab_size}")
    counts = collections.Counter()
    split = regex.compile(SPLIT)
    for text in texts:
        counts.update(piece for piece in split.findall(text) if len(piece) <= LONGEST)
    rank = {token[0]: i for i, token in enumerate(BYTES)}
    words = [[rank[b] for b in piece.encode(errors="replace")] for piece in counts]
    return Tokenizer(name, learn(words, list(counts.values()), vocab_size - 1))


def replace_pair(word: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """`word` with every `pair` of neighbours, from the left, replaced by the one id `new`."""
    out = []
    for i in word:
        if out and (out[-1], i) == pair:
            out[-1] = new
        else:
            out.append(i)
    return out


def learn_slowly(words: list[list[int]], counts: list[int], size: int) -> list[bytes]:
    """The idea in full: count all pairs, join the best, again. Returns up to `size` tokens, the 256 bytes first."""
    tokens = list(BYTES)
    while len(tokens) < size:
        totals = collections.Counter()
        for word, count in zip(words, counts, strict=True):
            for pair in itertools.pairwise(word):
                totals[pair] += count
        pair, total = min(totals.items(), key=lambda item: (-item[1], item[0]), default=(None, 0))
        if total < 2:
            break
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in tokens:
            tokens.append(token)
        words = [replace_pair(word, pair, tokens.index(token)) for word in words]
    return tokens


def learn(words: list[list[int]], counts: list[int], size: int) -> list[bytes]:
    """`learn_slowly`, but a join recounts only the words that hold the pair: 4,096 ids of 12 MB in 4 s, not 20 min.

    words: the distinct pieces as lists of byte ranks (changed in place); counts: how often each occurs. The best pair
    is the most frequent one, and of equals the one with the smallest ids, as in Hugging Face's trainer.
    """
    tokens, ids = list(BYTES), {token: i for i, token in enumerate(BYTES)}
    totals, places = (
        collections.Counter(),
        collections.defaultdict(set),
    )  # of each pair: occurrences, indices of words
    for w, word in enumerate(words):
        for pair in itertools.pairwise(word):
            totals[pair] += counts[w]
            places[pair].add(w)
    heap = [(-total, pair) for pair, total in totals.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < size:
        total, pair = heapq.heappop(heap)
        if (
            -total != totals[pair]
        ):  # lazy: a total falls behind the heap's back, and is put right when it surfaces
            heapq.heappush(heap, (-totals[pair], pair))
            continue
        if -total < 2:
            break
        token = tokens[pair[0]] + tokens[pair[1]]
        new = ids.setdefault(
            token, len(tokens)
        )  # a + bc may spell what ab + c did: one token, one id
        if new == len(tokens):
            tokens.append(token)
        change = collections.Counter()
        for w in places.pop(pair):
            before, words[w] = words[w], replace_pair(words[w], pair, new)
            for old in itertools.pairwise(before):
                change[old] -= counts[w]
            for now in itertools.pairwise(words[w]):
                change[now] += counts[w]
                places[now].add(w)
        for p, difference in change.items():
            totals[p] += difference
            if difference > 0:
                heapq.heappush(heap, (-totals[p], p))
    return tokens


def main(argv: list[str]) -> None:
    """Train or load the tokenizer that the command line names, and cut a sentence with it."""
    name = canonical(next(iter(arguments(argv, "[TOKENIZER]")), "bpe-512"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    start = time.perf_counter()
    tokenizer = train_bpe(texts, int(name[4:])) if name.startswith("bpe") else load(name)
    print(
        f"{name}: {tokenizer.vocab_size} entries in {time.perf_counter() - start:.1f} s, {tokenizer.fingerprint}"
    )
    sentence = f"The return value of encode('größe') is not None, and {END_OF_TEXT} is text."
    ids = tokenizer.encode(sentence)
    print("|".join(tokenizer.decode([i]) for i in ids))
    print(*ids)
    corpus = "".join(texts)
    print(
        f"{len(corpus.encode()) / len(tokenizer.encode(corpus)):.2f} bytes per token of {len(texts)} stdlib files"
    )
    assert tokenizer.decode(ids) == sentence and tokenizer.eot not in ids


if __name__ == "__main__":
    run(main)
