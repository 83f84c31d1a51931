"""CUDA graphs on a CPU: operations are recorded, and run again on the memory they had.

As on a GPU, a replay knows nothing of Python: numbers, shapes and addresses are those of the
capture. So a step that depends on anything but the memory that it reads gives wrong results here,
too. As on a GPU, results are undefined between capture and replay: here they are NaN.

What it cannot show: which operations CUDA refuses to capture, streams, speed.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self):
        self.calls = []  # (operation, args, kwargs, results)
        self.n_replays = 0

    def pool(self):
        return 0, 1

    def replay(self) -> None:
        self.n_replays += 1
        for operation, args, kwargs, results in self.calls:
            again = operation(*args, **kwargs)
            for old, new in own_memory(results, again):
                old.copy_(new)


class Recorder(TorchDispatchMode):
    """Appends what runs inside of it to a graph."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        self.graph.calls.append((operation, args, kwargs or {}, results))
        return results


@contextlib.contextmanager
def graph(graph: Graph, pool=None, capture_error_mode="global"):
    """Stands in for torch.cuda.graph."""
    with Recorder(graph):
        yield
    given, made = set(), set()  # addresses: read before anything was written there, and the others
    for _, args, kwargs, results in graph.calls:
        given |= {address(x) for x in tensors((args, kwargs))} - made
        made |= {address(x) for x in tensors(results)} - given
    for x in tensors([results for *_, results in graph.calls]):
        if x.is_floating_point() and address(x) in made:
            x.fill_(torch.nan)


def own_memory(old, new):
    """The pairs of results that do not share memory: no views, nothing written in place."""
    pairs = zip(tensors(old), tensors(new), strict=True)
    return [(a, b) for a, b in pairs if address(a) != address(b)]


def address(x) -> int:
    return x.untyped_storage().data_ptr()


def tensors(tree) -> list[torch.Tensor]:
    """Those in a nested list, but packed weights, which nothing writes."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if not leaf.is_mkldnn]
