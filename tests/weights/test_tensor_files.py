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

from config import UserError
from weights import tensor_files

GOOD = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "empty": {"dtype": "F64", "shape": [0, 5], "data_offsets": [26, 26]},
    "c": {"dtype": "F16", "shape": [3], "data_offsets": [26, 32]},
}
NUMBERS = [
    0,
    1,
    2,
    3,
    5,
    24,
    26,
    32,
    33,
    -1,
    -24,
    2**31,
    2**62,
    2**63,
    2**64,
    10**30,
    1.0,
    24.0,
    0.5,
    True,
    False,
]
VALUES = [
    *NUMBERS,
    None,
    "24",
    "F32",
    "I64",
    "F8",
    "F4",
    "",
    [],
    [1],
    [0, 24],
    [24, 0],
    [0, 24, 24],
    {},
    {"a": "b"},
]
TEXTS = [
    '"',
    ",",
    "{",
    "}",
    "[",
    "]",
    "0",
    "-",
    "1e1",
    "NaN",
    "Infinity",
    "\ufeff",
    "\0",
    "\\ud800",
    " ",
    "\n",
    "/**/",
]

# Where ours refuses what the reference accepts: pattern in our message -> why.
STRICTER = {
    "expected one of: F64": "integers and 8-bit floats are no weights of ours",
    "a name is there twice": "the reference takes the last one, which hides the first",
    "must have dtype, shape and data_offsets": "the reference ignores further fields, and takes lists for objects",
    "__metadata__ must be an object": "the reference takes null, too",
    "shape that is no list of whole numbers": "at most 16 dimensions, below 2^63: torch has no larger ones",
}


def packed(header, size=32, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)


def ours(path, content):
    """None, or why the file is refused."""
    path.write_bytes(content)
    try:
        tensor_files.safetensors_layout(path)
    except UserError as error:
        assert "\n" not in str(error) and path.name in str(error)
        return str(error)


def theirs(content):
    safetensors = pytest.importorskip(
        "safetensors", reason="the reference: see requirements-dev.txt"
    )
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        return str(error)


def mutated(draw):
    """A file in which one to three things are changed: values, keys, characters, sizes."""
    header, size, length = copy.deepcopy(GOOD), 32, None
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        entry = header.get(draw.choice([*GOOD, "a.weight", "c"]))
        kind = draw.randrange(8)
        if kind == 0:
            header[draw.choice([*GOOD, "new"])] = copy.deepcopy(
                draw.choice([*VALUES, *GOOD.values()])
            )
        elif kind < 3 and isinstance(entry, dict):
            key = draw.choice([*entry, "dtype", "shape", "data_offsets", "more"])
            entry[key] = copy.deepcopy(draw.choice(VALUES))
        elif kind < 6 and isinstance(entry, dict) and isinstance(entry.get("shape"), list):
            numbers = entry.get(draw.choice(["shape", "data_offsets"]))
            if isinstance(numbers, list) and numbers:
                numbers[draw.randrange(len(numbers))] = draw.choice(NUMBERS)
        elif kind == 6 and isinstance(entry, dict) and entry:
            entry.pop(draw.choice([*entry]))
        elif kind == 7:
            size += draw.choice([-33, -2, -1, 1, 2, 8])
    text = json.dumps(header)
    kind = draw.randrange(8)
    at, name = (
        draw.randrange(len(text)),
        draw.choice(['"a.weight":', '"__metadata__":', '"shape":', '"b":']),
    )
    if kind == 0:
        text = text[:at] + draw.choice(TEXTS) + text[at + draw.randrange(2) :]
    elif kind == 1 and name in text:  # the same name again
        text = text.replace(
            name, f"{name} {json.dumps(draw.choice([*VALUES, *GOOD.values()]))}, {name}", 1
        )
    elif kind == 2:
        length = draw.choice(
            [0, 1, len(text) - 1, len(text) + 1, 10**8, 10**8 + 1, 2**63, 2**64 - 1]
        )
    return packed(text.encode(), max(0, size), length)


def test_headers_are_accepted_as_the_reference_accepts_them(tmp_path):
    """Whatever differs has a reason that is written down, and every reason occurs."""
    draw, path = random.Random(0), tmp_path / "model.safetensors"
    assert ours(path, packed(GOOD)) is None and theirs(packed(GOOD)) is None
    accepted, found = 0, set()
    for _ in range(6000):
        content = mutated(draw)
        mine, reference = ours(path, content), theirs(content)
        accepted += reference is None
        if mine is None and reference is not None:
            assert re.search(rb"-0\b", content), (
                reference,
                content,
            )  # a whole number to Python, not to the reference
        if mine is not None and reference is None:
            reasons = [pattern for pattern in STRICTER if pattern in mine]
            assert reasons, (mine, content)
            found.update(reasons)
    assert accepted > 300 and found == set(STRICTER)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"c": {"dtype": "F16", "shape": [3], "data_offsets": [20, 26]}},
            "gap, or tensors that overlap",
        ),
        ({"c": {"dtype": "F16", "shape": [3], "data_offsets": [-6, 0]}}, "not two whole numbers"),
        (
            {"c": {"dtype": "F16", "shape": [3], "data_offsets": [26.0, 32.0]}},
            "not two whole numbers",
        ),
        (
            {"c": {"dtype": "F16", "shape": [3], "data_offsets": [False, 6]}},
            "not two whole numbers",
        ),
        (
            {"c": {"dtype": "F16", "shape": [3], "data_offsets": [32, 26]}},
            "has -6 bytes, but its shape",
        ),
        (
            {"c": {"dtype": "F16", "shape": [2], "data_offsets": [26, 32]}},
            "has 6 bytes, but its shape and dtype need 4",
        ),
        (
            {"c": {"dtype": "F16", "shape": [2**62] * 16, "data_offsets": [26, 32]}},
            "shape and dtype need 8.37116099364e+298",
        ),
        (
            {"c": {"dtype": "F16", "shape": [3] * 10**5, "data_offsets": [26, 32]}},
            "no list of whole numbers",
        ),
        ({"c": 7}, "must have dtype, shape and data_offsets"),
        ({"__metadata__": {"format": 1}}, "__metadata__ must be an object of texts"),
        ({"__metadata__": [1]}, "__metadata__ must be an object of texts"),
    ],
)
def test_headers_that_lie(change, message, tmp_path):
    assert message in ours(tmp_path / "x.safetensors", packed(GOOD | change))


def test_headers_that_are_none(tmp_path):
    path = tmp_path / "x.safetensors"
    assert "a header of 100,000,001 bytes" in ours(path, packed(GOOD, length=100_000_001))
    assert "a header of 100 bytes" in ours(path, packed(b"{}", 0, length=100))
    assert "a header of 0 bytes" in ours(path, b"\0\0\0")
    assert "recursion" in ours(path, packed(b"[" * 100_000))
    assert "truncated or damaged: 343 bytes instead of 342" in ours(path, packed(GOOD, 33))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="x.safetensors is not a regular file"):
        tensor_files.locate(path)
    with pytest.raises(UserError, match="/dev/zero is not a regular file"):
        tensor_files.safetensors_layout(tensor_files.Path("/dev/zero"))


# --- folders


def index(folder, *names):
    tensor_files.write_safetensors(folder / "part.safetensors", {"a": torch.ones(3)})
    weight_map = {str(number): name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_links_as_in_the_cache_of_hugging_face(tmp_path):
    """snapshots/REVISION/model.safetensors -> ../../blobs/HASH: the name is plain, the file a regular one."""
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
    with pytest.raises(
        UserError, match="index.json names the file .*, expected the plain name of a file beside it"
    ):
        tensor_files.locate(tmp_path / "model")


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
    with pytest.raises(UserError, match=f"{name} is (a folder|not a regular file)"):
        tensor_files.locate(tmp_path)


# --- pickles


class Made:
    """Pickled as a tensor with any place, shape and strides."""

    def __init__(self, offset, shape, strides):
        self.how = offset, shape, strides

    def __reduce__(self):
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.ones(4).untyped_storage(), dtype=torch.float32
        )
        return torch._utils._rebuild_tensor_v2, (storage, *self.how, False, {})


@pytest.mark.parametrize(
    "offset, shape, strides, message",
    [
        (0, (5,), (1,), "reaches beyond its storage"),
        (1, (4,), (1,), "reaches beyond its storage"),
        (10**9, (2, 2), (2, 1), "reaches beyond its storage"),
        (0, (10**12,), (1,), "reaches beyond its storage"),
        (0, (10**6,) * 4, (1,) * 4, "with weights_only=True: .*overflow"),
        (-5, (2, 2), (2, 1), "with weights_only=True: .*invalid storage offset -5"),
        (0, (2, 2), (1, 1), "not a contiguous tensor"),
        (0, ("a",), (1,), "with weights_only=True"),
    ],
)
def test_tensors_that_point_beyond_their_storage(offset, shape, strides, message, tmp_path, capfd):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"good": torch.ones(2), "bad": Made(offset, shape, strides)}, path)
    with pytest.raises(UserError, match=message) as error:
        tensor_files.locate(tmp_path)
    assert "\n" not in str(error.value) and "weights_only=False" not in str(error.value)
    assert capfd.readouterr().err == ""  # torch logs a traceback of its own


class Runs:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_refusal_never_advises_to_read_it_all_the_same(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    for content in (
        {"a": Runs()},
        {"a": zipfile.ZipFile},
        {"a": torch.nn.Linear(2, 2)},
        re.compile("x"),
    ):
        torch.save(content, path)
        with pytest.raises(
            UserError, match="cannot read .*pytorch_model.bin with weights_only=True: "
        ) as error:
            tensor_files.locate(tmp_path)
        assert "weights_only=False" not in str(error.value) and "allowlist" not in str(error.value)
    torch.save({"a": torch.ones(3)}, path)
    damaged = bytearray(path.read_bytes())
    at = damaged.index(b"PK", 4) if b"data.pkl" not in damaged else damaged.index(b"data.pkl") + 60
    damaged[at : at + 9] = b"\xff" * 9
    path.write_bytes(damaged)
    with pytest.raises(UserError) as error:
        tensor_files.locate(tmp_path)
    assert "weights_only=False" not in str(error.value)


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    """A gigabyte of zeros in a megabyte, which torch would read."""
    path, made = tmp_path / "pytorch_model.bin", tmp_path / "made.bin"
    torch.save({"a": torch.ones(3)}, made)
    with zipfile.ZipFile(made) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name) + bytes(2**27) * name.endswith("data.pkl"))
    begin = time.process_time()
    with pytest.raises(
        UserError, match="pytorch_model.bin is compressed: torch.save does not write that"
    ):
        tensor_files.locate(tmp_path)
    assert time.process_time() - begin < 5


def test_another_byte_order_and_a_hidden_sign_are_refused(tmp_path):
    """torch.load of another byte order crashed without memory for the tensors, and the sign was lost."""
    torch.save({"x": torch.arange(4.0)}, tmp_path / "here.bin")
    with (
        zipfile.ZipFile(tmp_path / "here.bin") as here,
        zipfile.ZipFile(tmp_path / "big.bin", "w") as big,
    ):
        for name in here.namelist():
            big.writestr(name, b"big" if name.endswith("byteorder") else here.read(name))
    torch.save({"x": torch.arange(4.0)._neg_view()}, tmp_path / "negative.bin")
    with pytest.raises(UserError, match="another byte order"):
        tensor_files.locate(tmp_path / "big.bin")
    with pytest.raises(UserError, match="not a contiguous tensor"):
        tensor_files.locate(tmp_path / "negative.bin")
