"""Checkpoints of tensors that --tp has cut: a rank has several blocks of the whole tensor.

DCP's own shards are one block a rank. A tensor rank has three spans of the rows of Wqkv (of its
heads' q, k and v): `Pieces` tells DCP of each, and the planners show it the tensors so.
"""

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from program import require
from storage import checkpoint_files


class Pieces(torch.Tensor):
    """A tensor that lies on this rank in blocks, in the form that DCP asks for.

    pieces: [(corner in the whole tensor, view of this rank's memory), ...]. DCP saves and fills the
    views. It knows no other way to say that a rank has three spans of rows (of Wqkv).
    """

    @staticmethod
    def __new__(cls, shape, dtype, pieces):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, shape, dtype, pieces):
        self.pieces = pieces

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} on a tensor that lies in pieces")

    def __repr__(self):
        return f"Pieces({tuple(self.shape)}, {[corner for corner, _ in self.pieces]})"

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size(corner), x.shape) for corner, x in self.pieces]

    def __get_tensor_shard__(self, index):
        return next(x for corner, x in self.pieces if tuple(index.offset) == corner)

    def __create_write_items__(self, name, tensor):
        items = []
        for number, (chunk, (_, x)) in enumerate(
            zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(x), self.shape)
            index = MetadataIndex(name, chunk.offsets, number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items


def in_pieces(state: dict, layout) -> dict:
    """The same flat state dict; tensors that tensor parallelism has cut become `Pieces`.

    Keys: names of parameters, or as DCP flattens them: model.NAME, optim.state.NAME.exp_avg.
    """
    found = {}
    for key, value in state.items():
        name = name_of_param(key)
        if isinstance(value, torch.Tensor) and value.dim() and layout.spans(name):
            require(
                layout.fits(name, value),
                f"the optimizer's {key} does not have the shape of its weight: set --tp=1",
            )
            shape = layout.whole_shape(name, value.shape)
            value = Pieces(shape, value.dtype, layout.pieces(name, value))
        found[key] = value
    return found


def name_of_param(key: str) -> str:
    """optim.state.transformer.wte.weight.exp_avg -> transformer.wte.weight"""
    if key.startswith("optim.state."):
        return key.removeprefix("optim.state.").rpartition(".")[0]
    return key.removeprefix("model.")


class InPieces:
    """Part of a planner of DCP: shows it the tensors in pieces."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        """Begin: DCP flattens the state dict. For saving it looks for this name of an argument."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = in_pieces(self.state_dict, self.layout)


class SavePlanner(InPieces, DefaultSavePlanner):
    """DCP's planner for saving. If several ranks have the same piece, one of them writes it."""


class LoadPlanner(InPieces, checkpoint_files.Planner):
    """Ours for loading."""
