"""The settings of a model and of a run: typed dataclasses. A typo is an error.

A later source wins over an earlier one:

    defaults below  <  configs/mpt1b.py  <  more files  <  --lr=1e-4 --compile

A config file is Python: flat assignments, which may compute. Names that start with `_` are local
to the file:

    _gpus = 8
    microbatch_size = 4
    global_batch_size = 16 * microbatch_size * _gpus

Settings are grouped by what they belong to: model, data, batch, optimizer, machine, evaluation,
saving, lifecycle. Their names are unique over all groups, so a flag needs no prefix. How files and
flags are read stands in launch/parser.py.

Run `python config.py --help` to list them all, or with config files and flags to see what they
add up to. This file does not import torch, so it answers in 0.1 s.
"""

import dataclasses
import datetime
import functools
import json
import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import program
from launch import parser
from launch.parser import Float, Int
from program import UserError, quote

# --------------------------------------------------------------------------------------------------
# The model

Norm = Literal["low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"]
Kernel = Literal["auto", "reference", "blocks", "sdpa", "flex", "triton"]  # of MPT's attention
AttentionImpl = Literal[Kernel]  # a fork's attention that computes another function joins here


@dataclass
class MPTConfig:
    """The model: everything that decides its weights and logits. Names and defaults are MPT's."""

    # --- model: sizes
    d_model: Int[1, 2**20] = 2048  # width of the residual stream
    n_heads: Int[1, 2**16] = 16  # attention heads (queries)
    n_layers: Int[1, 10**4] = 24  # transformer blocks
    expansion_ratio: Float[1e-3, 128] = 4  # hidden width of the feed-forward / d_model
    max_seq_len: Int[1, 2**24] = 2048  # tokens of one training sequence
    vocab_size: Int[1, 2**24] = 50368  # rows of the embedding; at least the tokenizer's entries
    no_bias: bool = False  # True: no bias anywhere, not in the norms either
    # --- model: positions
    learned_pos_emb: bool = True  # a learned vector per position (ALiBi and RoPE turn it off)
    alibi: bool = False  # attention with linear biases
    # 2^-128 is near the smallest number of fp32.
    alibi_bias_max: Float[1e-3, 128] = 8  # slope of head i = 1..n_heads: 2^(-i * this / n_heads)
    rope: bool = False  # rotary positions: rotate q and k by angles that grow with the position
    rope_theta: Float[1, 10**15] = 10000.0  # RoPE: the longest wavelength is about 2 pi * this
    # --- model: attention
    kv_n_heads: Int[1, 2**16] | None = None  # key/value heads (None = n_heads, 1 = multi-query)
    attn_uses_sequence_id: bool = False  # documents packed into one row do not see each other
    clip_qkv: Float[0, 10**6] | None = None  # clamp the output of Wqkv to +-this (0 or None: no)
    qk_ln: bool = False  # norm over all of q and all of k
    qk_gn: bool = False  # norm over each head of q and of k
    softmax_scale: Float[1e-9, 10**6] | None = None  # None = 1 / sqrt(head_dim)
    sliding_window_size: Int[-1, 2**24] = -1  # a query sees so many keys before its own (-1 = all)
    attn_logit_softcapping: Float[1e-3, 10**6] | None = None  # c: scores are c * tanh(score / c)
    attn_impl: AttentionImpl = "auto"  # see attention.py
    # --- model: feed-forward
    ffn_type: Literal["mptmlp", "mptglu"] = "mptmlp"  # mptglu: down_proj(act(gate_proj) * up_proj)
    ffn_act_fn: Literal["gelu", "silu", "relu"] = "gelu"  # act; gelu is the exact one
    # --- model: norm, dropout and output
    norm_type: Norm = "low_precision_layernorm"  # layernorm, rmsnorm; low_precision_...: in bf16
    embedding_fraction: Float[1e-6, 1] = 1.0  # the embedding gets this part of its gradient
    emb_pdrop: Float[0, 0.99] = 0.0  # dropout after the embedding
    attn_pdrop: Float[0, 0.99] = 0.0  # dropout on the attention probabilities
    resid_pdrop: Float[0, 0.99] = 0.0  # dropout after attention and after the feed-forward
    tie_word_embeddings: bool = True  # the output layer is the embedding, transposed
    logit_scale: Float[1e-9, 10**6] | Literal["inv_sqrt_d_model"] | None = None  # multiplies logits
    final_logit_softcapping: Float[1e-3, 10**6] | None = None  # c: logits are c * tanh(logit / c)

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
        """How many keys FLOPs are counted for, of each query: the sequence's, or the window's.

        These are the keys of the last query. Earlier ones see fewer, which the count leaves out.
        """
        return self.max_seq_len if self.window is None else min(self.window + 1, self.max_seq_len)

    @property
    def learned_positions(self) -> bool:
        """Whether the model has a table of learned positions."""
        return self.learned_pos_emb and not (self.alibi or self.rope)

    def check(self) -> None:
        """Raise UserError if a setting is out of range or contradicts another."""
        parser.check_ranges(self)
        d_model, n_heads, n_kv = self.d_model, self.n_heads, self.n_kv_heads
        if d_model % n_heads:
            raise UserError(f"d_model {d_model} is not a multiple of n_heads {n_heads}")
        if n_heads % n_kv:
            raise UserError(f"n_heads {n_heads} is not a multiple of kv_n_heads {n_kv}")
        if self.qk_ln and self.qk_gn:
            raise UserError("qk_ln and qk_gn both norm q and k: set only one of them")
        if self.rope and self.alibi:
            raise UserError("rope and alibi both encode positions: set only one of them")
        if self.rope and self.head_dim % 2:
            odd = f"head dim {self.head_dim} is odd"
            raise UserError(f"rope rotates pairs of channels: {odd}, change n_heads")
        if self.attn_pdrop and self.attn_impl in ("flex", "triton"):
            raise UserError(f"attn_impl={self.attn_impl} has no dropout: set attn_pdrop=0")
        if self.attn_logit_softcapping and self.attn_impl == "sdpa":
            raise UserError("attn_impl=sdpa has no attn_logit_softcapping: use auto")
        if self.head_dim > 128 and self.attn_impl == "triton":
            fix = "use sdpa, or more heads"
            raise UserError(f"attn_impl=triton has head dims up to 128, not {self.head_dim}: {fix}")
        if self.hidden_dim == 0:
            ratio = self.expansion_ratio
            raise UserError(f"expansion_ratio {ratio} leaves the feed-forward no hidden width")
        block = sum(n_out * n_in for n_out, n_in in self.linear_layers().values())
        size = self.n_layers * block + self.vocab_size * d_model
        if size > 1e13:
            raise UserError(f"the model has {size:.0e} parameters, expected at most 1e+13")

    @property
    def tensor_ranks(self) -> list[int]:
        """The tp that give each rank whole heads. A single head of keys and values stays whole."""
        divided = self.n_heads if self.n_kv_heads == 1 else self.n_kv_heads
        return [n for n in range(1, divided + 1) if divided % n == 0]

    def check_tensor_ranks(self, tp: int, sequence_parallel: bool) -> None:
        """Raise UserError if the model cannot be cut for `tp` tensor ranks."""
        if tp not in self.tensor_ranks:
            name = "kv_n_heads" if self.n_heads % tp == 0 else "n_heads"
            fix = f"tp can be {', '.join(map(str, self.tensor_ranks))}"
            raise UserError(f"tp {tp} does not divide {name} {getattr(self, name)}: {fix}")
        if sequence_parallel and tp == 1:
            raise UserError("sequence_parallel needs tensor ranks: set --tp=2")
        if sequence_parallel and self.max_seq_len % tp:
            raise UserError(
                f"sequence_parallel: tp {tp} does not divide max_seq_len {self.max_seq_len}: "
                "change one of them, or set --sequence_parallel=False"
            )

    def check_stages(self, pp: int) -> None:
        """Raise UserError if there are not enough layers for `pp` pipeline stages."""
        layers = self.n_layers
        if pp > layers:
            raise UserError(f"pp {pp} is more than n_layers {layers}: set --pp={layers}")

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The linear layers of a block, in its order: name -> (features out, features in)."""
        d_model, hidden = self.d_model, self.hidden_dim
        gate = {"gate_proj": (hidden, d_model)} if self.ffn_type == "mptglu" else {}
        return {
            "Wqkv": (d_model + 2 * self.n_kv_heads * self.head_dim, d_model),
            "out_proj": (d_model, d_model),
            **gate,
            "up_proj": (hidden, d_model),
            "down_proj": (d_model, hidden),
        }

    def adapted_layers(self, lora_targets: str) -> list[str]:
        """The linear layers that `lora_targets` names, in a block's order; "all": all of them.

        UserError for one that this model does not have.
        """
        own, named = list(self.linear_layers()), target_names(lora_targets)
        if "all" in named:
            return own
        for name in named:
            if name not in own:
                has = f"a model with ffn_type={self.ffn_type} has {', '.join(own)}"
                raise UserError(f"lora_targets names {name}, but {has}: remove it")
        return [name for name in own if name in named]

    def adapted_blocks(self, last_blocks: int) -> range:
        """The blocks that get adapters: the last ones, or all (0)."""
        return range(self.n_layers - last_blocks if last_blocks else 0, self.n_layers)


# All that a block can have, in the order in which it computes them.
LINEAR_LAYERS = list(MPTConfig(ffn_type="mptglu").linear_layers())


def function_of(attn_impl: str) -> str:
    """The function that an attention computes: "auto" for all of MPT's, or the name of a fork's."""
    return "auto" if attn_impl in get_args(Kernel) else attn_impl


def norm_of(norm_type: str) -> str:
    """The function of a norm, whatever its precision."""
    return norm_type.removeprefix("low_precision_")


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
    """What a mode shards, and when: the columns of the table in parallel.py, which carries it out.

    planning/ counts its bytes and seconds.
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

Sharding = Literal[tuple(SHARDING_MODES)]
Checkpointing = Literal["none", "selective", "full"]  # of activations: see parallel.py
Schedule = Literal["cosine", "constant", "inv_sqrt"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16"]

EXTRA_PARTS = ["norms", "biases"]  # what lora_train can add
TRACKERS = ["tensorboard", "wandb", "mlflow", "trackio"]  # see lifecycle/trackers.py
# The first have no effect without lora_rank, the second none without data_format=chat.
ADAPTER_SETTINGS = "lora_alpha rslora lora_dropout lora_targets lora_last_blocks lora_train".split()
CHAT_SETTINGS = "chat_template target_prompts target_responses packing".split()


@dataclass
class TrainConfig:
    """The run: data, batch, optimizer, machine, evaluation, saving, lifecycle."""

    # --- model: what its weights start from
    init_from: str = ""  # a Hugging Face folder, a Composer .pt, a run, a checkpoint; empty = none
    seed: Int[0, 10**18] = 1337  # of the initial weights, the data order and dropout
    # --- finetuning: adapters on a model whose weights stay as they are; see lora.py
    lora_rank: Int[0, 2**16] = 0  # rank of each update (0 = no adapters: train all weights)
    lora_alpha: Float[1e-6, 10**6] = 16.0  # the update is multiplied by alpha / rank
    rslora: bool = False  # multiply it by alpha / sqrt(rank)
    lora_dropout: Float[0, 0.99] = 0.0  # dropout on the input of each adapter
    lora_targets: str = "all"  # layers that get one: Wqkv,out_proj,gate_proj,up_proj,down_proj
    lora_last_blocks: Int[0, 10**4] = 0  # give adapters to the last n blocks only (0 = all blocks)
    lora_train: str = ""  # train these, too: norms, biases, or norms,biases
    # --- data: one data set, or a mixture, --mix='NAME SHARE DATASET' for each source
    dataset: str = "stdlib"  # stdlib, my/*.txt (.jsonl, .parquet, MDS), of the Hub: allenai/c4:en
    mix: list[str] = dataclasses.field(default_factory=list)  # as 'c4 0.7 allenai/c4:en'
    tokenizer: str = "gpt2"  # gpt2, bytes, bpe-N (trained on the data, N entries), a tokenizer.json
    data_dir: str = ""  # the prepared tokens: a folder, s3://..., or empty = data/DATASET-TOKENIZER
    data_cache: str = ""  # data_dir in a store (s3://...): each node's copy; empty = in TMPDIR
    max_tokens: Int[0, 10**15] = 0  # training tokens to prepare of each source, at most (0 = all)
    val_fraction: Float[1e-9, 0.5] = 0.005  # share of the documents kept for validation
    # --- data: prompts and responses; see text/chat.py
    data_format: Literal["text", "chat"] = "text"  # chat: prompts and responses, in .jsonl lines
    chat_template: str = ""  # of messages: a tokenizer's folder or a file; empty = ChatML
    target_prompts: str = "none"  # learn prompts, too: none, all, length>=N (of N tokens or more)
    target_responses: Literal["last", "all"] = "last"  # of a conversation: learn its last, or all
    packing: bool = True  # several examples in a row; needs attn_uses_sequence_id
    # --- batch: global = microbatch x data-parallel ranks x accumulation steps
    global_batch_size: Int[1, 10**6] = 256  # sequences per optimizer step, over all ranks
    microbatch_size: Int[1, 10**6] | Literal["auto"] = 8  # sequences per forward (auto: what fits)
    max_steps: Int[1, 10**15] = 4800  # optimizer steps
    # --- optimizer
    lr: Float[1e-12, 1000] = 6e-4  # peak learning rate
    schedule: Schedule = "cosine"  # after the warmup
    warmup_steps: Int[0, 10**15] = 100  # steps of linear warmup
    alpha_f: Float[0, 1] = 0.1  # cosine ends at alpha_f * lr
    lr_one_step_late: bool = False  # schedule as in Composer: step k uses the factor of step k-1
    beta1: Float[0, 0.999999] = 0.9  # Adam: decay of the mean of the gradient
    beta2: Float[0, 0.999999] = 0.95  # Adam: decay of the mean of its square
    adam_eps: Float[1e-30, 1] = 1e-8  # Adam: added to the denominator, which may be 0
    decoupled_weight_decay: Float[0, 1] = 0.0  # p *= 1 - this * lr_t/lr; not PyTorch's weight_decay
    grad_clip: Float[0, 10**6] = 1.0  # clip the global gradient norm to this (0 = never)
    z_loss: Float[0, 1] = 0.0  # weight of the squared logsumexp of the logits (PaLM: 1e-4)
    # --- machine
    device: Device = "auto"  # cuda also means ROCm
    precision: Precision = "auto"  # auto: bf16 where that is known to be fast, else fp32
    sharding: Sharding = "FULL_SHARD"  # see parallel.py
    tp: Int[1, 2**16] = 1  # tensor parallelism: ranks that share each layer; see tensor_parallel.py
    sequence_parallel: bool = False  # with tp: cut the tokens between the layers, too; less memory
    pp: Int[1, 2**16] = 1  # pipeline parallelism: stages, each with some layers; see pipeline.py
    shard_size: Int[0, 10**6] = 0  # HYBRID_SHARD: ranks that share a copy of weights (0 = a node's)
    activation_checkpointing: Checkpointing = "none"  # see parallel.py
    recompute_every: Int[1, 10**4] = 1  # activation checkpointing of every k-th block
    compile: bool | Literal["auto"] = "auto"  # torch.compile each block; auto: on GPUs, if it works
    peak_tflops: Float[1e-3, 10**6] | Literal["auto", "measure"] = "auto"  # of a device, for MFU
    # --- evaluation
    eval_interval: Int[0, 10**15] = 500  # steps between validations (0 = only at start and end)
    eval_tokens: Int[1, 10**15] = 1_000_000  # validation tokens of one evaluation, at most
    icl_interval: Int[0, 10**15] = 0  # in-context learning: steps between icl_tasks (0 = never)
    icl_tasks: str = ""  # zero-shot tasks: piqa,my/task.jsonl, ... see evaluation/tasks.py
    icl_limit: Int[0, 10**15] = 0  # items of each task, at most (0 = all)
    expect: str = ""  # what a run of this file alone ends with: printed beside the result
    # --- saving
    run_dir: str = "runs/mpt"  # folder of this run: settings, metrics, checkpoints
    save_interval: Int[0, 10**15] = 500  # steps between checkpoints (0 = only the last)
    save_minutes: Float[0, 10**6] = 0.0  # also save when this many minutes have passed (0 = never)
    keep_last: Int[1, 10**6] = 3  # keep this many of the newest checkpoints
    keep_every: Int[0, 10**15] = 0  # also save every this many steps, and keep those (0 = none)
    remote: str = ""  # also keep the run in a store: s3://bucket/path, gs://, az://, file:///folder
    # --- lifecycle: trackers, resuming, bad steps, hangs
    track: str = ""  # send metrics to tensorboard, wandb, mlflow, trackio; to several: wandb,mlflow
    # auto: go on; again: go on, anew if it is finished; never: refuse; or a checkpoint's path
    resume: str = "auto"  # what to do if the run folder has checkpoints
    skip_steps: str = ""  # skip these steps' batches: 120:140 is steps 120 to 139 in metrics.jsonl
    max_bad_steps: Int[1, 10**6] = 10  # stop after so many non-finite losses or gradients in a row
    timeout_minutes: Float[1e-3, 10**6] = 30.0  # longest step, with evaluation; then the run ends

    def check(self) -> None:
        """Raise UserError if a setting is out of range, contradicts another, or has no effect."""
        parser.check_ranges(self)
        if not self.run_dir.strip():
            raise UserError("run_dir is empty: set --run_dir=runs/NAME")
        parser.split_names("track", self.track, TRACKERS)
        parser.split_names("lora_train", self.lora_train, EXTRA_PARTS)
        target_names(self.lora_targets)
        step_ranges(self.skip_steps)

        warmup, steps = self.warmup_steps, self.max_steps
        if warmup >= steps:
            raise UserError(f"warmup_steps {warmup} must be below max_steps {steps}")
        if self.icl_interval and not self.icl_tasks:
            raise UserError("icl_interval needs tasks: set --icl_tasks=piqa, or a .jsonl")
        if self.mix and self.dataset != TrainConfig.dataset:
            raise UserError("dataset and mix both say what to train on: remove one of them")
        if self.lora_rank and not self.init_from:
            fix = "set --init_from=runs/NAME, or a Hugging Face folder"
            raise UserError(f"lora_rank needs a trained model to start from: {fix}")
        if not self.lora_rank:
            self.refuse_changed(ADAPTER_SETTINGS, "without adapters: set --lora_rank=8")
        if self.data_format == "text":
            self.refuse_changed(CHAT_SETTINGS, "for plain text: set --data_format=chat")

    def refuse_changed(self, names: list[str], fix: str) -> None:
        """Raise UserError if one of these settings is not as by default."""
        for name in names:
            if getattr(self, name) != getattr(TrainConfig, name):
                raise UserError(f"{name} sets nothing {fix}")

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


def target_names(lora_targets: str) -> list[str]:
    """The words of `lora_targets`: names of linear layers, or "all". Raises UserError."""
    named = parser.split_names("lora_targets", lora_targets, ["all", *LINEAR_LAYERS])
    if not named:
        raise UserError("lora_targets is empty: set --lora_targets=all")
    return named


def step_ranges(text: str) -> list[range]:
    """The ranges of --skip_steps: "120:140,300:310" -> [range(119, 139), range(299, 309)].

    The text counts steps from 1, as metrics.jsonl does; the ranges count from 0. Raises UserError.
    """
    ranges = []
    for part in text.split(",") if text else []:
        ends = re.fullmatch(r"\s*(\d{1,15}):(\d{1,15})\s*", part)
        if not ends or not 0 < int(ends[1]) < int(ends[2]):
            example = "ranges such as 120:140, which is 120 to 139"
            raise UserError(f"skip_steps takes {example}, not {quote(part)}")
        ranges.append(range(int(ends[1]) - 1, int(ends[2]) - 1))
    return ranges


# The chunks of loss.py. They stand here, since planning/memory.py counts them without torch.
CHUNK_BYTES = 64 * 2**20  # of a chunk's fp32 logits, at most: 256 rows at V = 50368
GPU_ROWS = 4096  # of a chunk, at least: products of fewer rows leave parts of a GPU idle
COLUMNS = 4096  # vocabulary entries per block: a block stays in a CPU's cache

# --------------------------------------------------------------------------------------------------
# Loading and saving


def load(argv: list[str], *classes: type, takes: str | None = None) -> list:
    """Fill `classes` from defaults < config files < flags, and check them: see `parser.load`.

    A config file may also have settings of the trainer that are not in `classes`.
    """
    return parser.load(argv, classes, takes, elsewhere=parser.types_of(MPTConfig, TrainConfig))


# Keys that a checkpoint saves beside its settings.
OTHER_SAVED_KEYS = {"step", "data_fingerprint", "optimizer", "base", "base_fingerprint"}


def to_json(*configs) -> str:
    """All fields of these dataclasses as one JSON object."""
    values = {}
    for settings in configs:
        values |= dataclasses.asdict(settings)
    return json.dumps(values, indent=2)


def from_dict(cls: type, values: dict, source: str = "the saved settings"):
    """A checked instance of `cls` from saved settings. Raises UserError if a value is wrong.

    Keys of other classes are ignored. So are unknown ones, as a newer version or a fork may have
    saved, but rank 0 warns: the model may not be the same without them.
    """
    values = parser.rename_keys(values)
    known = parser.types_of(MPTConfig, TrainConfig, cls)
    usual = {*known, *OTHER_SAVED_KEYS, *parser.REMOVED}
    strange = [quote(key) for key in values if key not in usual]
    if strange:
        named = ", ".join(strange[:5]) + ", ..." * (len(strange) > 5)
        ignored = f"{source} has unknown settings, which are ignored: {named}"
        program.say_once("warning", f"{ignored}. If they change the model, its results differ")

    values = parser.check_values(values, parser.types_of(cls), source, ignored=values)
    try:
        return parser.make(cls, values)
    except UserError as error:  # a value out of range, or two that contradict each other
        raise UserError(f"{error} (in {source})") from error


def main(argv: list[str]) -> None:
    """Print the settings that config files and flags add up to, as JSON."""
    print(to_json(*load(argv, MPTConfig, TrainConfig)))


if __name__ == "__main__":
    program.run(main)
