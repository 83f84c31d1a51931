"""weights/tensor_files.py: strict headers, pickles that point beyond their file, links."""

import copy
import json
import os
import random
import re
import struct
import time
import zipfile

import pytest
import torch
from conftest import refusal

from program import UserError
from weights import tensor_files

GOOD = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "F64", "shape": [0, 5], "data_offsets": [26, 26]},
    "c": {"dtype": "F16", "shape": [3], "data_offsets": [26, 32]},
}
# What a mutation puts into a header.
SIZES = [0, 1, 2, 3, 5, 24, 26, 32, 33]
NUMBERS = [*SIZES, -1, -24, 2**31, 2**62, 2**63, 2**64, 10**30, 1.0, 24.0, 0.5, True, False]
OBJECTS = [[], [1], [0, 24], [24, 0], [0, 24, 24], {}, {"a": "b"}]
VALUES = [*NUMBERS, *OBJECTS, None, "24", "F32", "I64", "F8", "F4", ""]
SNIPPETS = ['"', ",", "{", "}", "[", "]", "0", "-", "1e1", "NaN", "Infinity", "\ufeff", "\0"]
SNIPPETS += ["\\ud800", " ", "\n", "/**/"]
NAMES = ['"a.weight":', '"__metadata__":', '"shape":', '"b":']

# Where ours refuses what the reference accepts: a part of our message -> why.
STRICTER = {
    "expected one of: F64": "an MPT has no weights of integers or 8-bit floats",
    "a name occurs twice": "the reference takes the last one, which hides the first",
    "shape that is not a list of whole numbers": (
        "at most 16 dimensions, below 2^63: torch has no larger ones"
    ),
}


def packed(header, size=32, length=None):
    """A safetensors file: its header (a dict or bytes) and `size` bytes of tensors.

    length: what it says of the length of its header; None: the truth.
    """
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated_length = len(text) if length is None else length
    return struct.pack("<Q", stated_length) + text + bytes(size)


def ours(path, content):
    """Why our reader refuses a file, or None."""
    path.write_bytes(content)
    try:
        tensor_files.safetensors_layout(path)
    except UserError as error:
        assert "\n" not in str(error) and path.name in str(error)
        return str(error)


def theirs(content):
    """Why the safetensors library, the reference, refuses a file, or None."""
    safetensors = pytest.importorskip("safetensors", reason="see requirements-dev.txt")
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        return str(error)


def mutated_header(draw):
    """GOOD with one to three changes of its entries, and a number of bytes for the tensors."""
    header = copy.deepcopy(GOOD)
    size = 32
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        entry = header.get(draw.choice([*GOOD, "a.weight", "c"]))
        is_object = isinstance(entry, dict)
        kind = draw.randrange(8)
        if kind == 0:
            value = draw.choice([*VALUES, *GOOD.values()])
            header[draw.choice([*GOOD, "new"])] = copy.deepcopy(value)
        elif kind < 3 and is_object:
            key = draw.choice([*entry, "dtype", "shape", "data_offsets", "more"])
            entry[key] = copy.deepcopy(draw.choice(VALUES))
        elif kind < 6 and is_object and isinstance(entry.get("shape"), list):
            sizes = entry.get(draw.choice(["shape", "data_offsets"]))
            if isinstance(sizes, list) and sizes:
                number = draw.choice(NUMBERS)
                sizes[draw.randrange(len(sizes))] = number
        elif kind == 6 and is_object and entry:
            entry.pop(draw.choice([*entry]))
        elif kind == 7:
            size += draw.choice([-33, -2, -1, 1, 2, 8])
    return header, max(0, size)


def mutated(draw):
    """A file with changed entries, and perhaps changed characters or a wrong header length."""
    header, size = mutated_header(draw)
    text = json.dumps(header)
    length = None
    kind = draw.randrange(8)
    begin = draw.randrange(len(text))
    name = draw.choice(NAMES)
    if kind == 0:
        snippet = draw.choice(SNIPPETS)
        end = begin + draw.randrange(2)
        text = text[:begin] + snippet + text[end:]
    elif kind == 1 and name in text:  # then it is there twice
        value = json.dumps(draw.choice([*VALUES, *GOOD.values()]))
        text = text.replace(name, f"{name} {value}, {name}", 1)
    elif kind == 2:
        near = [len(text) - 1, len(text) + 1]
        length = draw.choice([0, 1, *near, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
    return packed(text.encode(), size, length)


def test_headers_are_accepted_as_the_reference_accepts_them(tmp_path):
    """Each difference between the two readers has a reason in STRICTER, and each reason occurs."""
    draw = random.Random(0)
    path = tmp_path / "model.safetensors"
    assert ours(path, packed(GOOD)) is None and theirs(packed(GOOD)) is None
    n_accepted = 0
    reasons_seen = set()
    for _ in range(6000):
        content = mutated(draw)
        our_answer = ours(path, content)
        their_answer = theirs(content)
        n_accepted += their_answer is None
        if our_answer is None and their_answer is not None:
            # -0 is a whole number to Python, but not to the reference.
            assert re.search(rb"-0\b", content), (their_answer, content)
        if our_answer is not None and their_answer is None:
            reasons = [reason for reason in STRICTER if reason in our_answer]
            assert reasons, (our_answer, content)
            reasons_seen.update(reasons)
    assert n_accepted > 300 and reasons_seen == set(STRICTER)


def test_a_header_that_lies(tmp_path):
    """Beside those that the reference refuses, which are quicker to refuse than to read."""
    path = tmp_path / "x.safetensors"
    c = {"dtype": "F16", "shape": [2**62] * 16, "data_offsets": [26, 32]}
    assert "shape and dtype need 8.37" in ours(path, packed(GOOD | {"c": c}))
    assert "not a list of whole numbers" in ours(
        path, packed(GOOD | {"c": c | {"shape": [3] * 10**5}})
    )
    assert "a header of 100,000,001 bytes" in ours(path, packed(GOOD, length=100_000_001))
    assert "a header of 100 bytes" in ours(path, packed(b"{}", 0, length=100))
    assert "343 bytes instead of 342" in ours(path, packed(GOOD, 33))


# --- folders


def index(folder, *names):
    tensor_files.write_safetensors(folder / "part.safetensors", {"a": torch.ones(3)})
    weight_map = {str(number): name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_links_as_in_the_cache_of_hugging_face(tmp_path):
    """snapshots/REVISION/model.safetensors -> ../../blobs/HASH: a plain name, a regular file."""
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots/0123"
    folder.mkdir(parents=True)
    index(folder, "part.safetensors")
    (folder / "part.safetensors").rename(tmp_path / "blobs/4567")
    (folder / "part.safetensors").symlink_to("../../blobs/4567")
    assert tensor_files.locate(folder)["a"].shape == (3,)


@pytest.mark.parametrize(
    "name", ["../part.safetensors", "/etc/passwd", "..", "", ".", "a/b", "a\\b", "a\0", 7, None, []]
)
def test_a_weight_map_names_files_beside_it(name, tmp_path):
    (tmp_path / "model").mkdir()
    tensor_files.write_safetensors(tmp_path / "part.safetensors", {"a": torch.ones(3)})
    index(tmp_path / "model", name, "part.safetensors")
    assert "plain name of a file beside it" in refusal(tensor_files.locate, tmp_path / "model")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["part.safetensors", "part.bin"])
def test_a_weight_map_names_regular_files(kind, name, tmp_path):
    index(tmp_path, name)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    message = refusal(tensor_files.locate, tmp_path)
    assert ("is a folder" if kind == "folder" else "not a regular file") in message


# --- pickles


class Made:
    """Pickled as a tensor of 4 stored numbers with any offset, shape and strides."""

    def __init__(self, offset, shape, strides):
        self.view = offset, shape, strides

    def __reduce__(self):
        numbers = torch.ones(4).untyped_storage()
        storage = torch.storage.TypedStorage(wrap_storage=numbers, dtype=torch.float32)
        return torch._utils._rebuild_tensor_v2, (storage, *self.view, False, {})


BEYOND = [
    (0, (5,), (1,), "beyond its storage"),
    (1, (4,), (1,), "beyond its storage"),
    (10**9, (2, 2), (2, 1), "beyond its storage"),
    (0, (10**12,), (1,), "beyond its storage"),
    (0, (10**6,) * 4, (1,) * 4, "overflow"),
    (-5, (2, 2), (2, 1), "invalid storage offset -5"),
    (0, (2, 2), (1, 1), "not a contiguous tensor"),
    (0, ("a",), (1,), "with weights_only=True"),
]


@pytest.mark.parametrize("offset, shape, strides, message", BEYOND)
def test_tensors_that_point_beyond_their_storage(offset, shape, strides, message, tmp_path, capfd):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"good": torch.ones(2), "bad": Made(offset, shape, strides)}, path)
    found = refusal(tensor_files.locate, tmp_path)
    assert message in found and "weights_only=False" not in found
    assert capfd.readouterr().err == ""  # torch logs a traceback of its own


class RunsCommand:
    """Unpickled, it runs a command."""

    def __reduce__(self):
        return os.system, ("true",)


def test_a_refusal_never_advises_to_read_it_all_the_same(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    forbidden = [RunsCommand(), zipfile.ZipFile, torch.nn.Linear(2, 2)]
    for content in [*({"a": value} for value in forbidden), re.compile("x")]:
        torch.save(content, path)
        message = refusal(tensor_files.locate, tmp_path)
        assert "pytorch_model.bin with weights_only=True: " in message
        assert "weights_only=False" not in message and "allowlist" not in message


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    """128 MB of zeros, compressed to almost nothing: torch would read them into memory."""
    path = tmp_path / "pytorch_model.bin"
    made = tmp_path / "made.bin"
    torch.save({"a": torch.ones(3)}, made)
    with zipfile.ZipFile(made) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name) + bytes(2**27) * name.endswith("data.pkl"))
    begin = time.process_time()
    assert "pytorch_model.bin is compressed" in refusal(tensor_files.locate, tmp_path)
    assert time.process_time() - begin < 5


def test_another_byte_order_and_a_hidden_sign_are_refused(tmp_path):
    """torch.load of another byte order crashed, and the sign was lost."""
    little, big, negative = (tmp_path / f"{name}.bin" for name in ("little", "big", "negative"))
    torch.save({"x": torch.arange(4.0)}, little)
    with zipfile.ZipFile(little) as here, zipfile.ZipFile(big, "w") as there:
        for name in here.namelist():
            there.writestr(name, b"big" if name.endswith("byteorder") else here.read(name))
    torch.save({"x": torch.arange(4.0)._neg_view()}, negative)
    assert "not little-endian" in refusal(tensor_files.locate, big)
    assert "not a contiguous tensor" in refusal(tensor_files.locate, negative)
