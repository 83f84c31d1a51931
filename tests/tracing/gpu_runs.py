"""What a run does on its device, on fake tensors, each under a tracer.

    train step    the second one of fsdp_train.train_step, sharded, recomputed and compiled as set
    evaluation    fsdp_train.evaluate, whose last windows are beyond the end
    scoring       evaluation.score.score: questions with shared prefixes, and single requests
    generation    serving.decoder.generate, with padding, top-k and top-p
    staging       checkpoint.state_of: what a checkpoint hands to be copied to the host

These are the functions that a run calls, and `parallel.build` makes the model. Before anything
else, `fake_gpu.pretend()` must have been called.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools import fake_collectives  # noqa: F401 (collectives on fake tensors)
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkpoint
import fsdp_train
import parallel
import processes
from config import MPTConfig, TrainConfig
from evaluation.score import Request, score
from fast import first_use
from model import MPT
from serving import decoder
from tracing.live_bytes import real_offsets
from tracing.tracer import Tracer

GPU = torch.device("cuda", 0)
PRECISION = "bf16"


@dataclass
class Setting:
    """A model and its training settings on a number of ranks, of which this process is rank 0.

    backend: of torch.compile, for every block; "" for no compilation. (cfg.compile takes the
    default, inductor, which needs the GPU itself.)
    """

    model_cfg: MPTConfig
    cfg: TrainConfig
    ranks: int = 1
    backend: str = ""

    @property
    def world(self) -> processes.World:
        """Rank 0 of one node. Its groups end with `pretended`."""
        world = processes.World(0, self.ranks, 0, self.ranks, GPU)
        return really(processes.in_grid)(world, self.cfg.tp, self.cfg.pp)

    def build(self):
        """(model, optimizer), as a run builds them."""
        cfg = replace(self.cfg, compile=False)
        model, optimizer = parallel.build(self.model_cfg, cfg, self.world, PRECISION, seed=None)
        if self.backend:
            for block in model.transformer.blocks:
                block.compile(backend=self.backend)
        return model, optimizer

    def rows(self) -> torch.Tensor:
        """The rows of this rank for one step, (B, T + 1) int64 on the GPU."""
        n_rows = self.cfg.global_batch_size // self.world.dp_size
        shape = n_rows, self.model_cfg.max_seq_len + 1
        return torch.zeros(shape, dtype=torch.long, device=GPU)


class FakeTensors(FakeTensorMode):
    """Tensors without data. torch.tensor(..., device="cuda") makes one, too: nothing is behind."""

    avoid_device_init = True


@contextlib.contextmanager
def pretended(setting: Setting) -> Iterator[None]:
    """Fake tensors, and a process group of `setting.ranks` that transfers nothing.

    Two things of `parallel.build` must be real. The table of ranks, because the mesh reads it. And
    the model on the meta device: a fake tensor cannot be replaced by one on another device.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    torch._dynamo.reset()
    real = {"make_mesh": really(parallel.make_mesh), "MPT": really(parallel.MPT)}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of torch, about what a GPU would do
            stack.enter_context(mock.patch.multiple(parallel, **real))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", fused))
            stack.enter_context(mock.patch.object(first_use, "is_right", lambda *_: True))
            stack.enter_context(real_offsets())
            # It would allocate on the GPU, so that autograd finds it awake.
            stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
            stack.enter_context(FakeTensors(allow_non_fake_inputs=True))
            yield
    finally:
        dist.destroy_process_group()


def really(function: Callable) -> Callable:
    """`function`, with real tensors inside."""

    def outside(*args, **kwargs):
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


def fused(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """F.scaled_dot_product_attention, with the kernel that PyTorch chooses on an H100.

    It asks the GPU before it chooses, and without one it takes the obvious version. A mask, or
    fp32, needs the memory-efficient kernel; of the rest, an H100 does dropout with flash attention
    and all else with cuDNN.
    """
    needs_backward = torch.is_grad_enabled()
    if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
        if dropout_p > 0:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        return cudnn(q, k, v, None, needs_backward, dropout_p, is_causal, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, needs_backward, dropout_p, is_causal, scale=scale)[0]


# --- The runs


def train_step(setting: Setting) -> Tracer:
    """The second step: in the first one, the optimizer and FSDP allocate what they keep."""
    cfg = replace(setting.cfg, compile=bool(setting.backend))
    with pretended(setting):
        model, optimizer = setting.build()
        rows = setting.rows()
        for step in range(2):
            with Tracer() as trace:
                fsdp_train.train_step(model, optimizer, rows, step, cfg, setting.world, PRECISION)
    return trace


class Windows:
    """A validation split of `n` windows of zeros: the part of data.Split that `evaluate` uses."""

    def __init__(self, n: int, seq_len: int):
        self.n, self.seq_len = n, seq_len

    def __len__(self):
        return self.n

    def windows(self, window_ids) -> np.ndarray:
        """The tokens of these windows, (len(window_ids), seq_len + 1) int64."""
        return np.zeros((len(window_ids), self.seq_len + 1), np.int64)


def evaluation(setting: Setting) -> Tracer:
    """Two passes on each rank. In the second one, this rank alone has a window, and only one."""
    n_windows = setting.ranks * setting.cfg.microbatch_size + 1
    val = Windows(n_windows, setting.model_cfg.max_seq_len)
    cfg = replace(setting.cfg, eval_tokens=n_windows * val.seq_len)
    with pretended(setting):
        model, _ = setting.build()
        with Tracer() as trace:
            fsdp_train.evaluate(model, val, cfg, setting.world, PRECISION)
    return trace


def scoring(setting: Setting) -> Tracer:
    """Questions of four answers each, and single requests."""
    length = 24
    requests = []
    for question in range(4):
        for answer in range(4):
            ids = np.full(length - question, 1 + question, np.int64)
            ids[-3:] = answer
            requests.append(Request(ids, 3))
    requests += [Request(np.full(length, 10 + i, np.int64), 2) for i in range(3)]
    with pretended(setting):
        model, _ = setting.build()
        model.eval()
        with Tracer() as trace:
            score(model, requests, setting.world, PRECISION, batch_tokens=16 * length)
    return trace


def generation(setting: Setting) -> Tracer:
    """Prompts of two lengths and eight tokens for each, on one GPU."""
    length = 16
    with pretended(replace(setting, ranks=1)):
        with torch.device("meta"):
            model = really(MPT)(setting.model_cfg)
            really(model.bfloat16)()
        model.to_empty(device=GPU)
        model.to = lambda dtype: model  # a fake weight cannot be replaced, and it is bf16 already
        with GPU:
            ids = torch.zeros(2, length, dtype=torch.long)
            pad = torch.zeros(2, dtype=torch.long)
            uniforms = torch.zeros(2, 8)
        ready = decoder.Decoder(model, setting.model_cfg.vocab_size - 1, torch.bfloat16)
        options = {"pad": pad, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
        with Tracer() as trace:
            for _ in decoder.generate(ready, ids, 8, uniforms=uniforms, **options):
                pass
    return trace


def staging(setting: Setting) -> Tracer:
    """What a checkpoint hands to DCP's stager: it must neither gather nor copy nor wait.

    The copy to the host itself cannot run on fake tensors: the stager copies memory by address.
    """
    with pretended(setting):
        model, optimizer = setting.build()
        rows = setting.rows()
        fsdp_train.train_step(model, optimizer, rows, 0, setting.cfg, setting.world, PRECISION)
        with Tracer() as trace:
            checkpoint.state_of(model, optimizer)
    return trace


RUNS = {
    "train step": train_step,
    "evaluation": evaluation,
    "scoring": scoring,
    "generation": generation,
    "staging": staging,
}
