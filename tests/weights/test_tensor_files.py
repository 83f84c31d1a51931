"""weights/tensor_files.py: pickles that point beyond their file, links; see test_fuzz.py, too."""

import json
import os
import re
import sys
import zipfile

import pytest
import torch
from conftest import refusal

from weights import tensor_files

pytest.importorskip("safetensors", reason="see requirements-extra.txt")


def test_without_the_package_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = refusal(tensor_files.locate, tmp_path)
    assert "needs the package safetensors" in message
    assert "pip install -r requirements-extra.txt" in message


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


@pytest.mark.parametrize("name", ["../part.safetensors", "..", "", "a\\b", "a\0", 7])
def test_a_weight_map_names_files_beside_it(name, tmp_path):
    (tmp_path / "model").mkdir()
    tensor_files.write_safetensors(tmp_path / "part.safetensors", {"a": torch.ones(3)})
    index(tmp_path / "model", name, "part.safetensors")
    assert "plain name of a file beside it" in refusal(tensor_files.locate, tmp_path / "model")


@pytest.mark.parametrize("name", ["part.safetensors", "part.bin"])
def test_a_weight_map_names_regular_files(name, tmp_path):
    """test_fuzz.py has pipes and folders in place of them."""
    index(tmp_path, name)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/zero")
    assert "not a regular file" in refusal(tensor_files.locate, tmp_path)


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
    (0, (5,), (1,)),
    (0, (10**6,) * 4, (10**18, 1, 1, 1)),
    (-5, (2, 2), (2, 1)),
    (0, ("a",), (1,)),
]


@pytest.mark.parametrize("offset, shape, strides", BEYOND)
def test_tensors_that_point_beyond_their_storage(offset, shape, strides, tmp_path, capfd):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"good": torch.ones(2), "bad": Made(offset, shape, strides)}, path)
    found = refusal(tensor_files.locate, tmp_path)
    assert "pytorch_model.bin with weights_only=True: " in found
    assert "weights_only=False" not in found and "\n" not in found
    assert capfd.readouterr().err == ""


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
