"""Text to ids: GPT-2's tokens, raw bytes, or a byte-pair encoding (BPE) trained here.

A model reads whole numbers. Bytes are the plainest choice: 256 ids, but long sequences. A BPE
learns to shorten them:

    start with one id per byte
    repeat: find the pair of neighbours that is most frequent in the corpus, give it an id of its
    own
            l o w   l o w e r   ->   lo w   lo w e r   ->   low   low e r

The list of tokens, in the order in which they were learned, is the whole tokenizer. To encode,
repeat the learning within each piece of text: merge the pair whose token was learned first, until
no pair is a token. The pieces come from a fixed split into words, numbers, punctuation and spaces
(GPT-2's), so a token never spans two words.

All kinds of tokenizer work on the bytes of UTF-8: no character is unknown, and
`decode(encode(text)) == text`. One more id, the last, is end-of-text. It separates documents, and
no text encodes to it.

Run `python -m text.tokenizer` to train 512 entries on a part of Python's standard library and
encode a sentence. `python -m text.tokenizer gpt2` encodes with GPT-2's tokens, and fetches their
files into TIKTOKEN_CACHE_DIR.

Sources: Sennrich et al. 2016 (arXiv 1508.07909), algorithm 1; Radford et al. 2019 (GPT-2),
section 2.2.
"""

import collections
import contextlib
import functools
import hashlib
import heapq
import itertools
import json
import re
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken; Python's own re does not know \p{L}
import tiktoken

from program import EXTRA, UserError, arguments, one_line, require, run
from storage import files
from text.sources import canonical

END_OF_TEXT = "<|endoftext|>"

# Inside the name of a special token it makes that name ordinary text: see `spelled_out`. It is half
# of a surrogate pair, which no text that UTF-8 can hold has.
MARK = "\ud800"

# What looks like this is a marker of a chat template, even if its file does not call it special
# (DeepSeek does not): <|im_end|>, <｜User｜>.
MARKER = re.compile(r"<[|\uff5c]\S+[|\uff5c]>")

# GPT-2's split with possessive quantifiers (++): the same pieces, but no backtracking, so a million
# spaces do not exhaust the stack.
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The 256 single bytes in GPT-2's order, printable ones first. Hugging Face's trainer numbers them
# in the same order.
BYTES = sorted(
    (bytes([value]) for value in range(256)),
    key=lambda byte: byte == b" " or not chr(byte[0]).isprintable(),
)
SAVED = b'{"name": "bpe-'  # how a file begins that `Tokenizer.save` wrote
N_PRINTABLE = 188
# The printable character with which a Hugging Face vocabulary spells each byte.
SPELLING = {
    byte[0]: chr(byte[0]) if i < N_PRINTABLE else chr(256 + i - N_PRINTABLE)
    for i, byte in enumerate(BYTES)
}

# Training a BPE ignores longer words, which no language needs: a merge takes time in proportion to
# the word's length.
MAX_WORD_CHARACTERS = 1000

# --------------------------------------------------------------------------------------------------
# Text <-> ids


@dataclass(frozen=True)
class SpecialToken:
    """A token with a name: end-of-text, or `<|im_start|>` of a chat.

    lstrip, rstrip: it takes the white space before it, or behind it.
    special: no text encodes to it. Otherwise it was added as a word is, such as `<think>`: each
    text that holds its name has its id.
    exact: other spellings, as in capitals, never count as its name.
    """

    id: int
    lstrip: bool = False
    rstrip: bool = False
    special: bool = True
    exact: bool = True


class Tokenizer:
    """Text to ids and back: GPT-2's tokens, raw bytes, or a BPE trained here.

    name            `gpt2`, `bytes` or `bpe-N`
    tokens          the bytes of each id, in order
    eot             the id of end-of-text, the last one
    ends            the ids that end a generated text: eot, and those that a model's folder adds
    special_tokens  names -> `SpecialToken`; here end-of-text alone
    vocab_size      the number of ids, with end-of-text
    fingerprint     equal for two tokenizers if they give equal ids for every text

    Do not pickle a tokenizer: not every version of tiktoken can. A worker process gets its name and
    path and calls `load`, which takes milliseconds.
    """

    def __init__(self, name: str, tokens: list[bytes]):
        """tokens: without end-of-text."""
        self.name = name
        self.tokens = tokens
        self.eot = len(tokens)
        self.ends = {self.eot}
        self.special_tokens = {END_OF_TEXT: SpecialToken(self.eot)}
        self.vocab_size = len(tokens) + 1
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self.bytes_of = dict(enumerate([*tokens, END_OF_TEXT.encode()]))  # id -> bytes
        if name == "bytes":
            self.encoding = None
            self.fingerprint = fingerprint("", tokens)  # bytes are not split into pieces
        else:
            self.encoding = tiktoken.Encoding(
                name,
                pat_str=SPLIT,
                mergeable_ranks={token: i for i, token in enumerate(tokens)},
                special_tokens={END_OF_TEXT: self.eot},
            )
            self.fingerprint = fingerprint(SPLIT, tokens)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) uint16, or uint32 if there are more than 65,536 ids.

        `<|endoftext|>` inside it is encoded like any other text.
        """
        try:
            return self._encode(text)
        except UnicodeEncodeError:  # a lone surrogate: JSON can hold one, UTF-8 cannot
            return self._encode(without_lone_surrogates(text))

    def _encode(self, text: str) -> np.ndarray:
        if self.encoding is None:
            ids = np.frombuffer(text.encode(), np.uint8)
        else:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(self.dtype)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern:
        """What finds the names of special tokens, of two that begin alike the longer one."""
        names = [name for name, token in self.special_tokens.items() if token.special]
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def encode_special(self, text: str) -> np.ndarray:
        """As `encode`, but the name of a special token in `text` becomes the id of that token.

        Only for text that may write them, such as a chat template: pass all other text that goes
        into it through `spelled_out`.
        """
        pieces = self.special_pattern.split(text)  # text, special token, text, ..., text
        for place in range(1, len(pieces), 2):
            token = self.special_tokens[pieces[place]]
            if token.lstrip:
                pieces[place - 1] = pieces[place - 1].rstrip()
            if token.rstrip:
                pieces[place + 1] = pieces[place + 1].lstrip()

        parts = [np.empty(0, self.dtype)]
        for place, piece in enumerate(pieces):
            if place % 2 == 1:
                parts.append(np.array([self.special_tokens[piece].id], self.dtype))
            elif piece:
                parts += map(self.encode, self.without_marks(piece))
        return np.concatenate(parts)

    def without_marks(self, text: str) -> list[str]:
        """`text` without marks, in pieces if a name that one of them divides would be an id."""
        is_safe = all(token.special for token in self.special_tokens.values())
        return [text.replace(MARK, "")] if is_safe else text.split(MARK)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`.

        An id without a token becomes U+FFFD: a model's vocabulary may be larger than its
        tokenizer's.
        """
        unknown = "\ufffd".encode()
        return b"".join(self.bytes_of.get(i, unknown) for i in np.asarray(ids).tolist())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    @property
    def content(self) -> bytes:
        """This tokenizer as Hugging Face's tokenizer.json, which gives equal ids."""
        from text import tokenizer_json  # here, since training does without

        spelled = ["".join(SPELLING[byte] for byte in token) for token in self.tokens]
        return tokenizer_json.of_tokens(spelled, END_OF_TEXT)

    def save(self, path: str) -> None:
        """Write the tokens to `path` as JSON. The file is complete or not there."""
        saved = {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "tokens": [token.decode("latin-1") for token in self.tokens],  # one character a byte
        }
        files.write_atomically(path, json.dumps(saved).encode())


class HuggingFaceTokenizer:
    """A `tokenizer.json` that came with a model, used as a `Tokenizer`; it has no `tokens`, `save`.

    Only byte-level tokenizers are supported (MPT's and GPT-NeoX's are). `eot` need not be the
    last id. A `vocab.json` serves as well, with its `merges.txt`.

    content     the tokenizer.json
    """

    def __init__(self, name: str, path: str):
        """name: the path that the file had at first; path: where it is now, or its copy.

        Raises UserError if the file cannot be read or used, or the package `tokenizers` is missing.
        """
        self.name = name
        self.path = path
        self.content = json_of(path)
        self.library = library_tokenizer(path, self.content)
        self.fingerprint = hashlib.sha256(self.content).hexdigest()[:16]

        spelling_of = {i: spelling for spelling, i in self.library.get_vocab().items()}
        self.vocab_size = 1 + max(spelling_of, default=0)
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self.eot = self.library.token_to_id(END_OF_TEXT)
        require(self.eot is not None, f"{path} has no {END_OF_TEXT}, which separates documents")
        self.ends = {self.eot}
        self.special_tokens = {END_OF_TEXT: SpecialToken(self.eot)}
        added = self.library.get_added_tokens_decoder()
        for i, token in added.items():
            # A MARK fits into two characters. Runs of spaces are no names.
            if len(token.content) > 1 and (token.special or token.content.strip()):
                is_exact = token.special or not (token.normalized and self.library.normalizer)
                special = SpecialToken(i, token.lstrip, token.rstrip, token.special, is_exact)
                self.special_tokens[token.content] = special

        # The vocabulary spells each byte as one printable character; other characters are text.
        byte_of = {character: bytes([byte]) for byte, character in SPELLING.items()}
        self.bytes_of = {
            i: b"".join(byte_of.get(character, character.encode()) for character in spelling)
            for i, spelling in spelling_of.items()
        }
        for i, token in added.items():  # which are spelled as they are
            if self.bytes_of[i] != token.content.encode() and not self.is_of_model(i, token):
                self.bytes_of[i] = token.content.encode()

    def is_of_model(self, token_id: int, token) -> bool:
        """Does an added token have the id of other bytes, which the model gives them?

        So has "é", which spells the byte 0xE9. UserError unless it is special.
        """
        try:
            with no_panic("the model cannot write it"):
                found = [piece.id for piece in self.library.model.tokenize(token.content)]
        except UserError:
            return False
        if found != [token_id]:
            return False
        require(
            token.special,
            f"{self.path} adds {token.content[:20]!r} as the token of the bytes "
            f"{self.bytes_of[token_id][:9]}, so text cannot be told from them: remove it from "
            "added_tokens",
        )
        return True

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) uint16 or uint32.

        Raises UserError if the library gives up, for example on an endless regular expression.
        """
        text = without_lone_surrogates(text)
        with no_panic(f"{self.path} cannot encode {text[:20]!r}"):
            ids = self.library.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=self.dtype)

    special_pattern = Tokenizer.special_pattern
    encode_special = Tokenizer.encode_special
    without_marks = Tokenizer.without_marks
    decode_bytes = Tokenizer.decode_bytes
    decode = Tokenizer.decode


def without_lone_surrogates(text: str) -> str:
    """`text` with U+FFFD in place of each half of a surrogate pair."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def spelled_out(text: str, special_tokens: Iterable[str]) -> str:
    """`text` with a MARK in each name of a special token, which `encode_special` takes for text.

    A conversation must not be able to end its own turn, or begin one of the system.
    """
    text = without_lone_surrogates(text)
    for name in special_tokens:
        while name in text:  # again, since occurrences may overlap
            text = text.replace(name, name[0] + MARK + name[1:])
    return text


@contextlib.contextmanager
def no_panic(problem: str):
    """UserError for what Hugging Face's library raises: a panic of Rust is not an Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:
        raise UserError(f"{problem}: {one_line(error)}") from error


def library_tokenizer(path: str, content: bytes):
    """A `tokenizers.Tokenizer` of a tokenizer.json. UserError if damaged or not byte-level."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{path} needs Hugging Face's package tokenizers: {EXTRA}") from error
    with no_panic(f"{path} is not Hugging Face's tokenizer.json, or is damaged"):
        parsed = json.loads(content)
        is_byte_level = "ByteLevel" in json.dumps(parsed["decoder"])
        for token in parsed.get("added_tokens", []):
            token["special"] |= MARKER.fullmatch(token["content"]) is not None
        library = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    require(is_byte_level, f"{path} is not a byte-level tokenizer: no other kind is supported")
    library.encode_special_tokens = True  # `<|endoftext|>` inside a text is ordinary text
    library.no_padding()
    library.no_truncation()
    return library


def fingerprint(split: str, tokens: list[bytes]) -> str:
    """16 hexadecimal digits of the SHA-256 of everything that determines the ids."""
    return hashlib.sha256(repr((split, tokens, END_OF_TEXT)).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# Loading by name


def load(name: str, path: str | None = None) -> Tokenizer | HuggingFaceTokenizer:
    """The tokenizer `name`. Raises UserError if it cannot be read.

    path: the file of a `bpe-N`, which `save` wrote; or the copy of a tokenizer.json in a run or
    data folder. If there is such a copy, the path in `name` is never opened: in a run folder from
    someone else it may lead anywhere. A name that is a path may lead to either kind of file.
    """
    name = canonical(name)
    if name.endswith(".json"):
        path = name if path is None else path
        is_ours = read(path).startswith(SAVED)
        return load_bpe(name, path) if is_ours else HuggingFaceTokenizer(name, path)
    if name == "bytes":
        return Tokenizer(name, [bytes([value]) for value in range(256)])
    if name == "gpt2":
        return load_gpt2()
    return load_bpe(name, path)


def load_gpt2() -> Tokenizer:
    """GPT-2's 50,257 entries. tiktoken downloads their files once into TIKTOKEN_CACHE_DIR."""
    from storage import downloads  # here, since most runs do without

    try:
        encoding = downloads.gpt2_encoding()
    except (OSError, ValueError) as error:
        # OSError: no network, or a cache that cannot be written. ValueError: a damaged download.
        raise UserError(
            f"GPT-2's tokenizer files are not in {downloads.gpt2_cache()} and cannot be downloaded "
            f"({type(error).__name__}): copy {' and '.join(downloads.GPT2_FILES)} there, which "
            "`TIKTOKEN_CACHE_DIR=folder python -m text.tokenizer gpt2` puts into a folder where "
            "there is internet, or use --tokenizer=bpe-4096 or --tokenizer=bytes"
        ) from error
    tokens = [encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)]
    return Tokenizer("gpt2", tokens)


def load_bpe(name: str, path: str | None) -> Tokenizer:
    """A BPE that was trained here. UserError if its file is damaged or holds another tokenizer.

    name: `bpe-N`, or the path that the file had at first.
    """
    require(path is not None, f"{name} is trained here, so load it with the path of its file")
    fix = "remove it and train again"
    fields = {"name": str, "fingerprint": str, "tokens": list}
    saved = files.parse_json(read(path), str(path), dict, fields, fix)

    tokens = []
    if all(isinstance(t, str) and max(t, default="") <= "\xff" for t in saved["tokens"]):
        tokens = [token.encode("latin-1") for token in saved["tokens"]]
    is_valid = (
        set(BYTES) <= set(tokens)
        and len(set(tokens)) == len(tokens)
        and saved["fingerprint"] == fingerprint(SPLIT, tokens)
    )
    require(is_valid, f"{path} is not a tokenizer file, or is damaged: {fix}")
    is_that = name.endswith(".json") or saved["name"] == name
    require(is_that, f"{path} holds {one_line(saved['name'])}, not {name}")
    return Tokenizer(name, tokens)


def json_of(path) -> bytes:
    """The file of a tokenizer at a path, or one that is made of a vocab.json and its merges.txt."""
    content = read(path)
    if Path(path).name != "vocab.json":
        return content
    from text import tokenizer_json  # here, since training does without

    return tokenizer_json.of_pair(path, END_OF_TEXT)


def read(path) -> bytes:
    """The content of a tokenizer's file. UserError if it cannot be read."""
    try:
        return files.read_bytes(path, files.MAX_JSON)
    except OSError as error:
        raise UserError(f"cannot read the tokenizer file {path}: {error.strerror}") from error


# --------------------------------------------------------------------------------------------------
# Training a BPE


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of `vocab_size` entries: 256 bytes, `vocab_size - 257` learned tokens, end-of-text.

    A small corpus gives fewer: learning ends when no pair occurs twice. The name still says
    `vocab_size`. 10 MB of text is plenty, and takes seconds.
    """
    name = canonical(f"bpe-{vocab_size}")
    split = regex.compile(SPLIT)
    piece_counts = collections.Counter()
    for text in texts:
        pieces = split.findall(text)
        piece_counts.update(piece for piece in pieces if len(piece) <= MAX_WORD_CHARACTERS)

    id_of_byte = {byte[0]: i for i, byte in enumerate(BYTES)}
    words = [[id_of_byte[b] for b in piece.encode(errors="replace")] for piece in piece_counts]
    counts = list(piece_counts.values())
    return Tokenizer(name, learn(words, counts, vocab_size - 1))


def merge_pair(word: list[int], pair: tuple[int, int], new_id: int) -> list[int]:
    """`word` with each occurrence of `pair`, from the left, replaced by the one id `new_id`."""
    merged = []
    for token_id in word:
        if merged and (merged[-1], token_id) == pair:
            merged[-1] = new_id
        else:
            merged.append(token_id)
    return merged


def learn_slowly(words: list[list[int]], counts: list[int], size: int) -> list[bytes]:
    """The obvious version of `learn`: count all pairs, merge the most frequent one, repeat."""
    tokens = list(BYTES)
    while len(tokens) < size:
        totals = collections.Counter()
        for word, count in zip(words, counts, strict=True):
            for pair in itertools.pairwise(word):
                totals[pair] += count

        # The most frequent pair; of equal ones, that of the smallest ids, as in Hugging Face's.
        pair, total = min(totals.items(), key=lambda item: (-item[1], item[0]), default=(None, 0))
        if total < 2:
            break
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in tokens:  # a + bc may spell what ab + c spelled: one token, one id
            tokens.append(token)
        words = [merge_pair(word, pair, tokens.index(token)) for word in words]
    return tokens


def learn(words: list[list[int]], counts: list[int], size: int) -> list[bytes]:
    """Learn the tokens of a BPE. Returns up to `size` of them, the 256 bytes first.

    words: the distinct pieces of text as lists of ids (changed in place); counts: how often each
    occurs. The result is that of `learn_slowly`, but a merge recounts only the words that hold the
    pair: 4,096 ids from 12 MB take 4 s, not 20 minutes.
    """
    tokens = list(BYTES)
    id_of = {token: i for i, token in enumerate(BYTES)}
    totals = collections.Counter()  # pair -> how often it occurs
    words_with = collections.defaultdict(set)  # pair -> indices of words
    for index, word in enumerate(words):
        for pair in itertools.pairwise(word):
            totals[pair] += counts[index]
            words_with[pair].add(index)

    heap = [(-total, pair) for pair, total in totals.items()]  # the best pair comes first
    heapq.heapify(heap)
    while heap and len(tokens) < size:
        negative_total, pair = heapq.heappop(heap)
        if -negative_total != totals[pair]:  # outdated: entries are corrected when they are popped
            heapq.heappush(heap, (-totals[pair], pair))
            continue
        if totals[pair] < 2:
            break

        token = tokens[pair[0]] + tokens[pair[1]]
        new_id = id_of.setdefault(token, len(tokens))  # an old id, if the token exists already
        if new_id == len(tokens):
            tokens.append(token)

        changes = merge_in_words(pair, new_id, words, counts, words_with)
        for changed_pair, difference in changes.items():
            totals[changed_pair] += difference
            if difference > 0:  # pairs that became rarer are corrected when they are popped
                heapq.heappush(heap, (-totals[changed_pair], changed_pair))
    return tokens


def merge_in_words(pair, new_id: int, words, counts, words_with) -> collections.Counter:
    """Merge `pair` in the words that hold it. Returns the change of each pair's total."""
    changes = collections.Counter()
    for index in words_with.pop(pair):
        old_word = words[index]
        new_word = merge_pair(old_word, pair, new_id)
        words[index] = new_word
        for old_pair in itertools.pairwise(old_word):
            changes[old_pair] -= counts[index]
        for new_pair in itertools.pairwise(new_word):
            changes[new_pair] += counts[index]
            words_with[new_pair].add(index)
    return changes


def main(argv: list[str]) -> None:
    """Train or load the tokenizer that the command line names, and encode a sentence with it."""
    names = arguments(argv, "[TOKENIZER]")
    name = canonical(names[0] if names else "bpe-512")
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]

    start = time.perf_counter()
    tokenizer = train_bpe(texts, int(name[4:])) if name.startswith("bpe") else load(name)
    seconds = time.perf_counter() - start
    print(f"{name}: {tokenizer.vocab_size} entries in {seconds:.1f} s, {tokenizer.fingerprint}")

    sentence = f"The return value of encode('größe') is not None, and {END_OF_TEXT} is text."
    ids = tokenizer.encode(sentence)
    print("|".join(tokenizer.decode([i]) for i in ids))
    print(*ids)


if __name__ == "__main__":
    run(main)
