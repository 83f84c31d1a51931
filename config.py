"""Settings: typed dataclasses, filled from defaults, config files and flags. A typo is an error.

A later source wins over an earlier one:

    defaults below  <  configs/mpt1b.py  <  more files  <  --lr=1e-4 --compile

A config file is Python: flat assignments, which may compute. Names that start with `_` are local
to the file:

    _gpus = 8
    microbatch_size = 4
    global_batch_size = 16 * microbatch_size * _gpus

Settings are grouped by what they belong to: model, data, batch, optimizer, machine, evaluation,
saving, lifecycle. Their names are unique over all groups, so a flag needs no prefix.

Run `python config.py --help` to list them all, or with config files and flags to see what they
add up to. This file does not import torch, so it answers in 0.1 s.
"""

import ast
import dataclasses
import datetime
import difflib
import functools
import json
import math
import os
import re
import runpy
import sys
import types
from dataclasses import dataclass
from typing import Literal

import program
from program import UserError, checked, require, shown, types_of

# Smallest and largest value of each number; whatever is outside is a typo.
# Every number of the trainer and the planner has an entry, and every figure of a calibration.
# A fork may add settings without one: those need only be finite.
RANGES = {
    name: (low, high)
    for low, high, names in [
        (1, 2**20, "d_model"),
        (1, 2**16, "n_heads kv_n_heads tp pp"),
        (1, 10**4, "n_layers recompute_every"),
        (0, 2**16, "lora_rank"),
        (0, 10**4, "lora_last_blocks"),
        (1e-6, 10**6, "lora_alpha"),
        (1, 2**24, "max_seq_len vocab_size"),
        (1e-3, 128, "expansion_ratio alibi_bias_max"),  # 2^-128 is near the smallest fp32 number
        (1e-9, 10**6, "softmax_scale logit_scale"),
        (1e-3, 10**6, "attn_logit_softcapping final_logit_softcapping"),
        (-1, 2**24, "sliding_window_size"),
        (1e-6, 1, "embedding_fraction"),
        (0, 0.99, "emb_pdrop attn_pdrop resid_pdrop lora_dropout"),
        (0, 10**18, "seed"),
        (1e-9, 0.5, "val_fraction"),
        (1, 10**6, "global_batch_size microbatch_size keep_last max_bad_steps"),
        (1, 10**15, "max_steps eval_tokens rope_theta"),
        (0, 10**15, "max_tokens warmup_steps eval_interval save_interval keep_every"),
        (0, 10**15, "icl_interval icl_limit"),
        (1e-12, 1000, "lr"),
        (0, 1, "alpha_f decoupled_weight_decay z_loss"),
        (0, 0.999999, "beta1 beta2"),
        (1e-30, 1, "adam_eps"),  # 0 would divide by 0 where the gradient is 0
        (0, 10**6, "clip_qkv grad_clip save_minutes shard_size"),
        (1e-3, 10**6, "timeout_minutes peak_tflops"),
        # Planning.
        (1, 10**6, "devices ranks nodes"),
        (1, 10**4, "node_size"),
        (1e-3, 10**6, "network bandwidth memory_gb"),  # GB/s, GB/s, GiB
        (1e-3, 1, "attention_efficiency attention"),
        (1, 10**18, "tokens"),
        (1e-9, 10**9, "price"),
        (1e-3, 10**6, "watts"),
        (1e-6, 3650, "budget"),  # days
        (1e-6, 10**15, "tokens_per_second"),
        (1, 10**15, "n_params"),
        (1, 2**20, "head_dim"),
        (1, 10**9, "batch"),
        (0, 2**24, "context window document"),
        (1e-6, 10**9, "matmul_tflops memory_gbs collectives_gbs latency_us"),
        # Evaluation.
        (0, 10**9, "shots limit"),
        (1, 10**9, "n length batch_tokens"),
        (2, 10**6, "choices"),
        # Benchmarks.
        (1, 10**6, "rounds turns steps grad_accum texts streams new_tokens"),
        (1, 10**4, "threads"),
        (1e-6, 10**4, "seconds minutes"),
    ]
    for name in names.split()
}

# The chunks of loss.py, of which planning/memory.py counts the bytes.
CHUNK_BYTES = 64 * 2**20  # of a chunk's fp32 logits: 256 rows at V = 50368
GPU_ROWS = 4096  # of a chunk, at least: products of fewer rows leave parts of a GPU idle
COLUMNS = 4096  # vocabulary entries per block: a block stays in a CPU's cache

# --------------------------------------------------------------------------------------------------
# The model

# The linear layers of a block, in the order in which it computes them.
LINEAR_LAYERS = ["Wqkv", "out_proj", "gate_proj", "up_proj", "down_proj"]

Norm = Literal["low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"]
AttentionImpl = Literal["auto", "reference", "blocks", "sdpa", "flex", "triton"]


@dataclass
class MPTConfig:
    """The model: everything that decides its weights and logits. Names and defaults are MPT's."""

    # --- model: sizes
    d_model: int = 2048  # width of the residual stream
    n_heads: int = 16  # attention heads (queries)
    n_layers: int = 24  # transformer blocks
    expansion_ratio: float = 4  # hidden width of the feed-forward / d_model
    max_seq_len: int = 2048  # tokens of one training sequence
    vocab_size: int = 50368  # rows of the embedding; at least the tokenizer's entries
    no_bias: bool = False  # True: no bias anywhere, not in the norms either
    # --- model: positions
    learned_pos_emb: bool = True  # a learned vector per position (ALiBi and RoPE turn it off)
    alibi: bool = False  # attention with linear biases
    alibi_bias_max: float = 8  # slope of head i = 1..n_heads: 2^(-i * alibi_bias_max / n_heads)
    rope: bool = False  # rotary positions: rotate q and k by angles that grow with the position
    rope_theta: float = 10000.0  # RoPE: base of the wavelengths; the longest is about 2 pi * this
    # --- model: attention
    kv_n_heads: int | None = None  # key/value heads: None = n_heads, 1 = multi-query, else grouped
    attn_uses_sequence_id: bool = False  # documents packed into one row do not see each other
    clip_qkv: float | None = None  # clamp the output of Wqkv to +-clip_qkv (0 or None: do not)
    qk_ln: bool = False  # norm over all of q and all of k
    qk_gn: bool = False  # norm over each head of q and of k
    softmax_scale: float | None = None  # None = 1 / sqrt(head_dim)
    sliding_window_size: int = -1  # a query sees so many keys before its own (-1 = all)
    attn_logit_softcapping: float | None = None  # c: a score becomes c * tanh(score / c)
    attn_impl: AttentionImpl = "auto"  # see attention.py
    # --- model: feed-forward
    ffn_type: Literal["mptmlp", "mptglu"] = "mptmlp"  # mptglu: down_proj(act(gate_proj) * up_proj)
    ffn_act_fn: Literal["gelu", "silu", "relu"] = "gelu"  # act; gelu is the exact one
    # --- model: norm, dropout and output
    norm_type: Norm = "low_precision_layernorm"  # layernorm, rmsnorm; low_precision_...: in bf16
    embedding_fraction: float = 1.0  # the embedding gets this part of its gradient (GLM-130B)
    emb_pdrop: float = 0.0  # dropout after the embedding
    attn_pdrop: float = 0.0  # dropout on the attention probabilities
    resid_pdrop: float = 0.0  # dropout after attention and after the feed-forward
    tie_word_embeddings: bool = True  # the output layer is the embedding, transposed
    logit_scale: float | Literal["inv_sqrt_d_model"] | None = None  # multiply the logits by this
    final_logit_softcapping: float | None = None  # c: a logit becomes c * tanh(logit / c)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.d_model // self.n_heads

    @property
    def n_kv_heads(self) -> int:
        """Heads of keys and values; fewer than n_heads in multi-query and grouped attention."""
        return self.n_heads if self.kv_n_heads is None else self.kv_n_heads

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward."""
        return int(self.d_model * self.expansion_ratio)

    @property
    def window(self) -> int | None:
        """How many keys before its own a query sees; None: all."""
        return None if self.sliding_window_size == -1 else self.sliding_window_size

    @property
    def keys_seen(self) -> int:
        """How many keys a query's scores are counted for: all of a sequence, or those of a window.

        As many as the last query sees, for every query: causality is not counted.
        """
        return self.max_seq_len if self.window is None else min(self.window + 1, self.max_seq_len)

    @property
    def learned_positions(self) -> bool:
        """Whether the model has a table of learned positions."""
        return self.learned_pos_emb and not (self.alibi or self.rope)

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        check_ranges(self)
        d_model, n_heads, n_kv = self.d_model, self.n_heads, self.n_kv_heads
        require(d_model % n_heads == 0, f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        require(n_heads % n_kv == 0, f"n_heads {n_heads} is not a multiple of kv_n_heads {n_kv}")

        both = self.rope and self.alibi
        require(not both, "rope and alibi both encode positions: set only one of them")
        odd = f"rope rotates pairs of channels: head dim {self.head_dim} is odd, change n_heads"
        require(not self.rope or self.head_dim % 2 == 0, odd)

        has_dropout = self.attn_impl not in ("flex", "triton")
        no_dropout = f"attn_impl={self.attn_impl} has no dropout: set attn_pdrop=0"
        require(has_dropout or not self.attn_pdrop, no_dropout)
        too_wide = f"attn_impl=triton has head dims up to 128, not {self.head_dim}"
        fits = self.attn_impl != "triton" or self.head_dim <= 128
        require(fits, f"{too_wide}: use sdpa, or more heads")

        no_width = f"expansion_ratio {self.expansion_ratio} leaves the feed-forward no hidden width"
        require(self.hidden_dim > 0, no_width)
        block = sum(n_out * n_in for n_out, n_in in self.linear_layers().values())
        size = self.n_layers * block + self.vocab_size * d_model
        require(size <= 1e13, f"the model has {size:.0e} parameters, expected at most 1e+13")

    @property
    def tensor_ranks(self) -> list[int]:
        """The tp that give each rank whole heads. A single head of keys and values stays whole."""
        divided = self.n_heads if self.n_kv_heads == 1 else self.n_kv_heads
        return [n for n in range(1, divided + 1) if divided % n == 0]

    def check_tensor_ranks(self, tp: int, sequence_parallel: bool) -> None:
        """Raise UserError if the model cannot be cut for `tp` tensor ranks."""
        name = "kv_n_heads" if self.n_heads % tp == 0 else "n_heads"
        fix = f"tp can be {', '.join(map(str, self.tensor_ranks))}"
        problem = f"tp {tp} does not divide {name} {getattr(self, name)}"
        require(tp in self.tensor_ranks, f"{problem}: {fix}")
        if not sequence_parallel:
            return
        require(tp > 1, "sequence_parallel needs tensor ranks: set --tp=2")
        require(
            self.max_seq_len % tp == 0,
            f"sequence_parallel: tp {tp} does not divide max_seq_len {self.max_seq_len}: "
            "change one of them, or set --sequence_parallel=False",
        )

    def check_stages(self, pp: int) -> None:
        """Raise UserError if there are not enough layers for `pp` pipeline stages."""
        layers = self.n_layers
        require(pp <= layers, f"pp {pp} is more than n_layers {layers}: set --pp={layers}")

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block: name -> (features out, features in)."""
        d_model, hidden = self.d_model, self.hidden_dim
        gate = {"gate_proj": (hidden, d_model)} if self.ffn_type == "mptglu" else {}
        return {
            "Wqkv": (d_model + 2 * self.n_kv_heads * self.head_dim, d_model),
            "out_proj": (d_model, d_model),
            **gate,
            "up_proj": (hidden, d_model),
            "down_proj": (d_model, hidden),
        }

    def adapted_blocks(self, last_blocks: int) -> range:
        """The blocks that get adapters: the last ones, or all (0)."""
        return range(self.n_layers - last_blocks if last_blocks else 0, self.n_layers)


def stage_sizes(n_layers: int, stages: int) -> list[int]:
    """The number of blocks of each pipeline stage. If they do not divide, some have one more.

    The middle ones come first: the ends have the embeddings and the loss to compute.
    """
    base, extra = divmod(n_layers, stages)
    middle_first = [*range(1, stages - 1), 0, stages - 1]
    larger = middle_first[:extra]
    return [base + (stage in larger) for stage in range(stages)]


@functools.cache
def blocks_of(n_layers: int, stage: int, stages: int) -> range:
    """The blocks of a pipeline stage."""
    sizes = stage_sizes(n_layers, stages)
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


# --------------------------------------------------------------------------------------------------
# The run


@dataclass(frozen=True)
class ShardingMode:
    """What a mode shards, and when.

    parallel.py carries it out; planning/ counts its bytes and seconds.
    """

    over: Literal["all", "group", "none"]  # data-parallel ranks that share one copy of the weights
    frees_weights: bool  # free a block's gathered weights after its forward; backward gathers again
    reduces_late: bool  # reduce gradients only at the last microbatch of a step


SHARDING_MODES = {
    "FULL_SHARD": ShardingMode(over="all", frees_weights=True, reduces_late=False),
    "SHARD_GRAD_OP": ShardingMode(over="all", frees_weights=False, reduces_late=False),
    "HYBRID_SHARD": ShardingMode(over="group", frees_weights=True, reduces_late=False),
    "ZERO1": ShardingMode(over="all", frees_weights=False, reduces_late=True),
    "DDP": ShardingMode(over="none", frees_weights=False, reduces_late=True),
}

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "ZERO1", "DDP"]
Checkpointing = Literal["none", "selective", "full"]  # of activations: see parallel.py
Schedule = Literal["cosine", "constant", "inv_sqrt"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16"]

EXTRA_PARTS = ["norms", "biases"]  # what lora_train can add
TRACKERS = ["tensorboard", "wandb", "mlflow", "trackio"]  # see lifecycle/trackers.py
# These have no effect without lora_rank, and those without data_format=chat.
ADAPTER_SETTINGS = "lora_alpha rslora lora_dropout lora_targets lora_last_blocks lora_train".split()
CHAT_SETTINGS = "chat_template target_prompts target_responses packing".split()


@dataclass
class TrainConfig:
    """The run: data, batch, optimizer, machine, evaluation, saving, lifecycle."""

    # --- model: what its weights start from
    init_from: str = ""  # a Hugging Face folder, a Composer .pt, a run, a checkpoint; empty = none
    seed: int = 1337  # of the initial weights, the data order and dropout
    # --- finetuning: adapters on a model whose weights stay as they are; see lora.py
    lora_rank: int = 0  # rank of each update (0 = no adapters: train all weights)
    lora_alpha: float = 16.0  # the update is multiplied by alpha / rank
    rslora: bool = False  # multiply it by alpha / sqrt(rank)
    lora_dropout: float = 0.0  # dropout on the input of each adapter
    lora_targets: str = "all"  # layers that get one: Wqkv,out_proj,up_proj,down_proj
    lora_last_blocks: int = 0  # give adapters to the last n blocks only (0 = all blocks)
    lora_train: str = ""  # train these, too: norms, biases, or norms,biases
    # --- data: one data set, or a mixture, --mix='NAME SHARE DATASET' for each source
    dataset: str = "stdlib"  # stdlib, my/*.txt (.jsonl, .parquet, MDS), of the Hub: allenai/c4:en
    mix: list[str] = dataclasses.field(default_factory=list)  # as 'c4 0.7 allenai/c4:en'
    tokenizer: str = "gpt2"  # gpt2, bytes, bpe-N (trained on the data, N entries), a tokenizer.json
    data_dir: str = ""  # the prepared tokens: a folder, s3://..., or empty = data/DATASET-TOKENIZER
    data_cache: str = ""  # data_dir in a store (s3://...): each node's copy; empty = in TMPDIR
    max_tokens: int = 0  # prepare at most this many training tokens (0 = all), of each source
    val_fraction: float = 0.005  # share of the documents kept for validation
    # --- data: prompts and responses; see text/chat.py
    data_format: Literal["text", "chat"] = "text"  # chat: prompts and responses, in .jsonl lines
    chat_template: str = ""  # of messages: a tokenizer's folder or a file; empty = ChatML
    target_prompts: str = "none"  # learn prompts, too: none, all, length>=N (of N tokens or more)
    target_responses: Literal["last", "all"] = "last"  # of a conversation: learn its last, or all
    packing: bool = True  # several examples in a row; needs attn_uses_sequence_id
    # --- batch: global = microbatch x data-parallel ranks x accumulation steps
    global_batch_size: int = 256  # sequences per optimizer step, over all ranks
    microbatch_size: int | Literal["auto"] = 8  # sequences per forward of a rank (auto: what fits)
    max_steps: int = 4800  # optimizer steps
    # --- optimizer
    lr: float = 6e-4  # peak learning rate
    schedule: Schedule = "cosine"  # after the warmup
    warmup_steps: int = 100  # steps of linear warmup
    alpha_f: float = 0.1  # cosine ends at alpha_f * lr
    lr_one_step_late: bool = False  # schedule as in Composer: step k uses the factor of step k-1
    beta1: float = 0.9  # Adam: decay of the mean of the gradient
    beta2: float = 0.95  # Adam: decay of the mean of its square
    adam_eps: float = 1e-8  # Adam: added to the denominator
    decoupled_weight_decay: float = 0.0  # p *= 1 - (lr_t / lr) * this; not PyTorch's weight_decay
    grad_clip: float = 1.0  # clip the global gradient norm to this (0 = never)
    z_loss: float = 0.0  # weight of the squared logsumexp of the logits in the loss (PaLM: 1e-4)
    # --- machine
    device: Device = "auto"  # cuda also means ROCm
    precision: Precision = "auto"  # auto: bf16 where that is known to be fast, else fp32
    sharding: Sharding = "FULL_SHARD"  # see parallel.py
    tp: int = 1  # tensor parallelism: ranks over which each layer is cut; see tensor_parallel.py
    sequence_parallel: bool = False  # with tp: cut the tokens between the layers, too; less memory
    pp: int = 1  # pipeline parallelism: stages, each with some of the layers; see pipeline.py
    shard_size: int = 0  # HYBRID_SHARD: ranks that share one copy of the weights (0 = a node's)
    activation_checkpointing: Checkpointing = "none"  # see parallel.py
    recompute_every: int = 1  # activation checkpointing of every k-th block
    compile: bool | Literal["auto"] = "auto"  # torch.compile each block; auto: on GPUs, if it works
    peak_tflops: float | Literal["auto", "measure"] = "auto"  # of a device, for MFU; see devices.py
    # --- evaluation
    eval_interval: int = 500  # steps between validations (0 = only before step 1 and at the end)
    eval_tokens: int = 1_000_000  # validation tokens of one evaluation, at most
    icl_interval: int = 0  # in-context learning: steps between runs of icl_tasks (0 = never)
    icl_tasks: str = ""  # zero-shot tasks: piqa,my/task.jsonl, ... see evaluation/tasks.py
    icl_limit: int = 0  # items of each task, at most (0 = all)
    expect: str = ""  # what a run of this file alone ends with: printed beside the result
    # --- saving
    run_dir: str = "runs/mpt"  # folder of this run: settings, metrics, checkpoints
    save_interval: int = 500  # steps between checkpoints (0 = only the last)
    save_minutes: float = 0.0  # also save when this many minutes have passed (0 = never)
    keep_last: int = 3  # keep this many of the newest checkpoints
    keep_every: int = 0  # also save every this many steps, and never delete those (0 = none)
    remote: str = ""  # also keep the run in a store: s3://bucket/path, gs://, az://, file:///folder
    # --- lifecycle: trackers, resuming, bad steps, hangs
    track: str = ""  # send metrics to tensorboard, wandb, mlflow, trackio; to several: wandb,mlflow
    resume: str = "auto"  # auto (continue), again (anew if finished), never (refuse), a checkpoint
    skip_steps: str = ""  # skip these steps' batches: 120:140 is steps 120 to 139 in metrics.jsonl
    max_bad_steps: int = 10  # stop after this many steps in a row with non-finite loss or gradient
    timeout_minutes: float = 30.0  # longest a step may take, evaluation included; then the run ends

    def check(self) -> None:
        """Raise UserError if a setting is out of range, contradicts another, or has no effect."""
        check_ranges(self)
        require(self.run_dir.strip(), "run_dir is empty: set --run_dir=runs/NAME")
        listed("track", self.track, TRACKERS)
        listed("lora_train", self.lora_train, EXTRA_PARTS)
        layers_named(self.lora_targets)
        step_ranges(self.skip_steps)

        steps = f"warmup_steps {self.warmup_steps} must be below max_steps {self.max_steps}"
        require(self.warmup_steps < self.max_steps, steps)
        has_tasks = self.icl_tasks or not self.icl_interval
        require(has_tasks, "icl_interval needs tasks: set --icl_tasks=piqa, or a .jsonl")
        one_source = not self.mix or self.dataset == TrainConfig.dataset
        require(one_source, "dataset and mix both say what to train on: remove one of them")
        no_base = "lora_rank needs a trained model to start from: set --init_from=runs/NAME"
        require(self.init_from or not self.lora_rank, f"{no_base}, or a Hugging Face folder")
        if not self.lora_rank:
            self.require_defaults(ADAPTER_SETTINGS, "without adapters: set --lora_rank=8")
        if self.data_format == "text":
            self.require_defaults(CHAT_SETTINGS, "for plain text: set --data_format=chat")

    def require_defaults(self, names: list[str], fix: str) -> None:
        """Raise UserError if one of these settings is not as by default."""
        for name in names:
            unchanged = getattr(self, name) == getattr(TrainConfig, name)
            require(unchanged, f"{name} sets nothing {fix}")

    def evaluation_due(self, done: int) -> bool:
        """Is the validation loss due after `done` steps? At the end of the run it always is."""
        return done % (self.eval_interval or self.max_steps) == 0 or done == self.max_steps

    def tasks_due(self, done: int) -> bool:
        """Are the zero-shot tasks due after `done` steps? Never if icl_interval is 0."""
        every = self.icl_interval
        return every > 0 and (done % every == 0 or done == self.max_steps)

    @property
    def collective_timeout(self) -> datetime.timedelta:
        """How long a collective may wait: so long that the watchdog acts first and says more."""
        return datetime.timedelta(minutes=max(60.0, 2 * self.timeout_minutes))

    @property
    def adapted_layers(self) -> list[str]:
        """The names of the linear layers that get adapters, in a block's order."""
        return layers_named(self.lora_targets)

    @property
    def lora_scale(self) -> float:
        """The factor on each update B A x."""
        rank = self.lora_rank
        return self.lora_alpha / (math.sqrt(rank) if self.rslora else rank)

    @property
    def sharding_mode(self) -> ShardingMode:
        """What `sharding` shards, and when."""
        return SHARDING_MODES[self.sharding]

    def shard_ranks(self, dp_size: int, node: int) -> int:
        """How many data-parallel ranks share one copy of the weights.

        dp_size: data-parallel ranks in all. node: those on one node.
        """
        group = self.shard_size or node
        return {"all": dp_size, "group": group, "none": 1}[self.sharding_mode.over]


def listed(name: str, text: str, known) -> list[str]:
    """The words of a setting such as "norms,biases". Raises UserError for one that is not known."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            near = nearest(word, known)
            hint = f"did you mean {near!r}? It can be" if near else "expected"
            raise UserError(f"{name}: {shown(word)} is not known, {hint} {', '.join(known)}")
    return words


def layers_named(lora_targets: str) -> list[str]:
    """The linear layers of "Wqkv,out_proj" or "all", in a block's order. Raises UserError."""
    chosen = listed("lora_targets", lora_targets, ["all", *LINEAR_LAYERS])
    require(chosen, "lora_targets is empty: set --lora_targets=all")
    return [name for name in LINEAR_LAYERS if name in chosen or "all" in chosen]


def step_ranges(text: str) -> list[range]:
    """The ranges of --skip_steps: "120:140,300:310" -> [range(119, 139), range(299, 309)].

    The text counts steps from 1, as metrics.jsonl does; the ranges count from 0. Raises UserError.
    """
    ranges = []
    for part in text.split(",") if text else []:
        ends = re.fullmatch(r"\s*(\d{1,15}):(\d{1,15})\s*", part)
        valid = ends and 0 < int(ends[1]) < int(ends[2])
        example = "ranges such as 120:140, which is 120 to 139"
        require(valid, f"skip_steps takes {example}, not {shown(part)}")
        ranges.append(range(int(ends[1]) - 1, int(ends[2]) - 1))
    return ranges


def check_ranges(settings) -> None:
    """Raise UserError for the first number of a dataclass outside its range. NaN always is.

    A default passes: 0 may stand for "not set".
    """
    for name, value in vars(settings).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value != getattr(type(settings), name, None):
            check_range(name, value)


def check_range(name: str, number: float) -> None:
    """Raise UserError if a number is outside the range that RANGES has for this name."""
    low, high = RANGES.get(name, (-sys.float_info.max, sys.float_info.max))
    expected_range = f"{name} must be from {shown(low)} to {shown(high)}"
    require(low <= number <= high, f"{expected_range}, not {shown(number)}")


# --------------------------------------------------------------------------------------------------
# Names

# What nanoGPT, nanochat, LLM Foundry and Hugging Face call our settings and linear layers.
FOREIGN_NAMES = {
    "d_model": "n_embd hidden_size",
    "n_layers": "depth",
    "max_seq_len": "block_size",
    "lr": "learning_rate",
    "max_steps": "max_iters lr_decay_iters num_iterations max_duration",
    "microbatch_size": "batch_size device_batch_size device_train_microbatch_size",
    "global_batch_size": "global_train_batch_size",
    "precision": "dtype",
    "run_dir": "save_folder",
    "Wqkv": "q_proj k_proj v_proj qkv_proj qkv query_key_value c_attn",
    "out_proj": "o_proj c_proj dense",
    "up_proj": "gate_proj gate_up_proj c_fc fc1 fc_in dense_h_to_4h w1",
    "down_proj": "fc2 fc_out dense_4h_to_h w2",
    "all": "all-linear",
}

# Settings that had another name here: old -> new. Config files, flags and saved settings may use
# either; we write only the new one.
RENAMED = {"checkpoint_every": "recompute_every"}

# Settings that are gone: name -> why. Config files and saved settings may still have them.
REMOVED = {"data_cache_gb": "a data set in a store is copied as a whole to --data_cache now"}

# Keys that a checkpoint saves beside its settings.
OTHER_SAVED_KEYS = {"step", "data_fingerprint", "optimizer", "base", "base_fingerprint"}


def unknown_key(key: str, source: str, names) -> str:
    """The message for an unknown key, with our name for the same thing or the closest match."""
    message = f"unknown key {key!r} in {source}"
    if key == "weight_decay" and "decoupled_weight_decay" in names:
        fix = "decoupled_weight_decay = weight_decay * lr is the same decay here"
        return f"{message}: PyTorch multiplies it by lr, MPT does not. {fix}"
    if key in REMOVED:
        return f"{message}: {REMOVED[key]}"
    if key in ("tp", "pp"):
        return f"{message}: this program does not cut a model that way"
    near = nearest(key, names)
    return f"{message}, " + (f"did you mean {near!r}?" if near else "see --help for the names")


def nearest(word: str, known) -> str | None:
    """The one of `known` that others call by this word, or else the one most like it."""
    for name in known:
        if word in FOREIGN_NAMES.get(name, "").split():
            return name
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


# --------------------------------------------------------------------------------------------------
# Loading


def load(argv: list[str], *classes: type, takes: str | None = None) -> list:
    """Fill `classes` from defaults < config files < flags, and check them. Returns the instances.

    argv: files and flags in any order. Of two files, or two flags, the later one wins; a list grows
        with each flag.
    takes: what the program takes in place of config files, as in `program.arguments`: "RUN",
        "FILE OUT". Those arguments come first in the result.

    Raises UserError naming the source, the key and the fix. Only the settings `program.ADDRESSES`
    take addresses of stores.
    """
    if program.wants_help(argv):
        program.show_help(program.settings_help(*classes, files=takes is None))
    hints = types_of(*classes)
    argv = joined(argv, *classes)
    paths = [word for word in argv if not word.startswith("-")]
    flags = known(values_of(argv, hints), hints, "the command line")
    taken = []
    if takes is not None:
        more = "[--key=value ...] (--help lists the settings)"
        taken, paths = [program.arguments(paths, takes, more)], []

    of_a_run = types_of(MPTConfig, TrainConfig).keys() | REMOVED  # this program may have fewer
    sources = [known(read_file(path), hints, path, of_a_run) for path in paths]
    values = {}
    for settings in filter(None, [*sources, flags]):
        values.pop("expect", None)  # of the settings before
        for name, other in (("dataset", "mix"), ("mix", "dataset")):
            if settings.get(name):
                values.pop(other, None)  # one replaces the other
        values |= settings
    for name, value in values.items():
        if name not in (*program.PROSE, *program.ADDRESSES):
            program.require_local(name, value)
    return taken + [filled(cls, values) for cls in classes]


def joined(argv: list[str], *classes: type) -> list[str]:
    """`--key value` -> `--key=value`, `--switch` -> `--switch=true`, old names -> today's.

    A value may begin with `-`.
    """
    hints = types_of(*classes)
    words = []
    rest = iter(argv)
    for word in rest:
        key, has_value, value = word.lstrip("-").partition("=")
        key = RENAMED.get(key, key)
        if word.startswith("-") and key in hints:
            if not has_value:
                is_switch = bool in program.alternatives(hints[key])
                value = "true" if is_switch else next(rest, "--")
                needed = f"--{key} needs a value: --{key}=... ({program.expected(hints[key])})"
                require(not value.startswith("--"), needed)
            word = f"--{key}={value}"
        words.append(word)
    return words


def values_of(argv: list[str], hints: dict) -> dict:
    """The value of each flag in argv, which is `joined`. One that grows has a list of texts."""
    values = {}
    for word in argv:
        if word.startswith("-"):
            key, _, text = word.lstrip("-").partition("=")
            hint = hints.get(key, str)
            is_list = hint == list[str]
            values[key] = [*values.get(key, []), text] if is_list else program.parse(text, hint)
    return values


def known(settings: dict, hints: dict, source: str, others=()) -> dict:
    """The settings under today's names, checked. UserError for an unknown one.

    others: names that are ignored.
    """
    values = {}
    for key, value in renamed(settings).items():
        if key in hints:
            values[key] = checked(value, hints[key], key, source)
        elif key not in others:
            raise UserError(unknown_key(key, source, [*hints, *others]))
    return values


def filled(cls: type, values: dict):
    """A checked instance of a dataclass, from those of `values` that are its fields."""
    names = {field.name for field in dataclasses.fields(cls)}
    instance = cls(**{name: value for name, value in values.items() if name in names})
    check_ranges(instance)
    if hasattr(instance, "check"):
        instance.check()
    return instance


# --------------------------------------------------------------------------------------------------
# Config files


def read_file(path: str) -> dict:
    """Run a config file and return its assignments, without `_names` and imported modules.

    Raises UserError if the file is missing, fails, or ends the program (`exit()`).
    """
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "configs"
        files = os.listdir(folder) if os.path.isdir(folder) else []
        near = nearest(path, [os.path.join(folder, file) for file in files])
        hint = f", did you mean {near}?" if near else ""
        raise UserError(f"no config file {path!r} (flags are written --key=value){hint}")
    try:
        require_assignments(path)
        names = runpy.run_path(path)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too
        reason = f"{type(error).__name__}: {program.one_line(error)}"
        raise UserError(f"{path} does not run: {reason}") from error

    settings = {}
    for name, value in names.items():
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            settings[name] = value
    return settings


def require_assignments(path: str) -> None:
    """Raise UserError for lines that look like settings but set nothing.

    `d_model: 64` as in YAML is an annotation to Python; `{"d_model": 64}` as in JSON and
    `d_model == 64` are expressions. Docstrings and calls such as print() are allowed.
    """
    with open(path, "rb") as file:
        statements = ast.parse(file.read(), path).body
    for node in statements:
        unused = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Constant)
        if unused or (isinstance(node, ast.AnnAssign) and node.value is None):
            line = f"{path}, line {node.lineno}: {shown(ast.unparse(node))}"
            raise UserError(f"{line} sets nothing, write key = value")


# --------------------------------------------------------------------------------------------------
# Saved settings


def to_json(*configs) -> str:
    """All fields of these dataclasses as one JSON object."""
    values = {}
    for settings in configs:
        values |= dataclasses.asdict(settings)
    return json.dumps(values, indent=2)


def renamed(values: dict) -> dict:
    """Saved settings under today's names."""
    return {RENAMED.get(key, key): value for key, value in values.items()}


def from_dict(cls: type, values: dict, source: str = "the saved settings"):
    """A checked instance of `cls` from saved settings. Raises UserError if a value is wrong.

    Keys of other classes are ignored. So are unknown ones, as a newer version or a fork may have
    saved, but rank 0 warns: the model may not be the same without them.
    """
    values = renamed(values)
    hints = types_of(cls)
    usual = types_of(MPTConfig, TrainConfig, cls).keys() | OTHER_SAVED_KEYS | REMOVED.keys()
    strange = [shown(key) for key in values if key not in usual]
    if strange:
        named = ", ".join(strange[:5]) + ", ..." * (len(strange) > 5)
        ignored = f"{source} has unknown settings, which are ignored: {named}"
        program.say_once("warning", f"{ignored}. If they change the model, its results differ")

    values = known(values, hints, source, others=values)
    try:
        return filled(cls, values)
    except UserError as error:  # a value out of range, or two that contradict each other
        raise UserError(f"{error} (in {source})") from error


def main(argv: list[str]) -> None:
    """Print the settings that config files and flags add up to, as JSON."""
    print(to_json(*load(argv, MPTConfig, TrainConfig)))


if __name__ == "__main__":
    program.run(main)
