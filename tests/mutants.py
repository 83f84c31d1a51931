"""Plant one bug at a time in a copy of the code: the quick tests of that part must fail.

    make mutants                                    all of them, about 20 minutes on two cores
    .venv/bin/python tests/mutants.py alibi lease   those with one of these words in file or reason
    .venv/bin/python tests/mutants.py --jobs=2      two at a time
    .venv/bin/python tests/mutants.py --unchecked   without the check described next: half of that

First the tests must pass in the copy without a bug. Each line says which test found a bug, and
after how many seconds. Exit status: 1 if a bug survives; 2 if a snippet is not found
exactly once, or the tests fail without a bug.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds for the tests of one mutant: one that hangs is found, too
KEPT_OUT = (".git", ".venv", "runs", "data", "__pycache__", ".pytest_cache", ".ruff_cache")


@dataclass(frozen=True)
class Mutant:
    """`old`, once in `file`, becomes `new`: `why` says what that does, and `tests` must fail."""

    file: str
    old: str
    new: str
    tests: str  # in tests/, the likeliest first: files, folders, or FILE::test where a file is slow
    why: str


MUTANTS = [
    # --- attention, model, loss
    Mutant(
        "attention.py",
        "i = torch.arange(1, n + 1",
        "i = torch.arange(0, n",
        "test_attention.py",
        "ALiBi's slopes begin at 2^0, one exponent too early",
    ),
    Mutant(
        "attention.py",
        "[slopes[1::2], slopes[0::2]]",
        "[slopes[0::2], slopes[1::2]]",
        "test_attention.py",
        "ALiBi with 12 heads takes the slopes in another order than MPT",
    ),
    Mutant(
        "attention.py",
        "masked_fill(j > i,",
        "masked_fill(j > i + 1,",
        "test_attention.py",
        "the causal mask shows each query the next token",
    ),
    Mutant(
        "attention.py",
        "n_keys - n_queries + end",
        "end",
        "test_attention.py",
        "a block of queries on a cache does not see the newest keys",
    ),
    Mutant(
        "attention.py",
        "bias = bias[..., -rows:, -n_seen:]",
        "bias = bias[..., :rows, -n_seen:]",
        "test_attention.py",
        "the last block of queries, a short one, has the bias of a long block's first queries",
    ),
    Mutant(
        "attention.py",
        "dk[:, :n_seen] += torch.bmm(dscores.mT",
        "dk[:, :n_seen] += torch.bmm(probs.mT",
        "test_attention.py",
        "the gradient of the keys lacks the backward of softmax",
    ),
    Mutant(
        "attention.py",
        "* position / scale",
        "* position",
        "test_attention.py",
        "ALiBi's columns are scaled with the scores",
    ),
    Mutant(
        "gpu_kernels/flash_attention.py",
        "s = tl.where(i[None, :] >= first[:, None]",
        "s = tl.where(i[None, :] > first[:, None]",
        "gpu_kernels/test_flash_attention.py::test_output_and_gradients_equal_the_formula_in_fp64",
        "the gradient of a key and its value lacks the query at its own place",
    ),
    Mutant(
        "gpu_kernels/flash_attention.py",
        "mask_until = tl.max(first) - past",
        "mask_until = tl.min(first) - past",
        "gpu_kernels/test_flash_attention.py::test_masks_on_the_diagonal_alone_give_the_same_bits",
        "in the backward, blocks on the diagonal have no causal mask",
    ),
    Mutant(
        "gpu_kernels/flash_attention.py",
        'tensors | {"dk": dk, "dv": dv}',
        'tensors | {"dk": dv, "dv": dk}',
        "gpu_kernels/test_flash_attention.py::test_a_model_trains_the_same_with_one_gradient "
        "gpu_kernels/test_flash_attention.py::test_in_a_model_it_gives_the_gradients_of_sdpa",
        "the gradient of v is written where that of k belongs",
    ),
    Mutant(
        "model.py",
        "not (cfg.qk_ln or positions.angles or cache is not None)",
        "cache is None",
        "gpu_kernels/test_flash_attention.py::test_changed_queries_have_a_gradient_of_their_own",
        "with RoPE, attention is given the projection, of which q and k are no longer views",
    ),
    Mutant(
        "model.py",
        "self.k_ln(k).to(v.dtype)",
        "k",
        "test_model.py weights",
        "qk_ln does not norm the keys",
    ),
    Mutant(
        "model.py",
        "torch.arange(past, end,",
        "torch.arange(0, end - past,",
        "test_model.py serving/test_decoder.py",
        "on a KV cache the positions begin at 0 again",
    ),
    Mutant(
        "model.py",
        "< cache.pad[:, None]",
        "< cache.pad[:, None] - 1",
        "serving/test_decoder.py test_model.py",
        "left padding: a text sees the last padding token",
    ),
    Mutant(
        "model.py",
        "F.pad(ended[:, :-1], (1, 0))",
        "ended",
        "test_model.py",
        "the end-of-text token belongs to the next document",
    ),
    Mutant(
        "model.py",
        "torch.cat([-b, a]",
        "torch.cat([b, a]",
        "test_model.py weights",
        "RoPE mirrors pairs of numbers instead of turning them",
    ),
    Mutant(
        "model.py",
        "math.sqrt(2 * cfg.n_layers)",
        "math.sqrt(cfg.n_layers)",
        "test_model.py",
        "the initial weights of out_proj and down_proj are too large",
    ),
    Mutant(
        "loss.py",
        "z_loss * log_z.square() - log_prob",
        "-z_loss * log_z.square() - log_prob",
        "test_loss.py",
        "the z-loss rewards large logits",
    ),
    Mutant(
        "loss.py",
        "probs.mul_(1 + 2 * z_loss * log_z)",
        "probs.mul_(1 + z_loss * log_z)",
        "test_loss.py",
        "the gradient of the z-loss is half of what it should be",
    ),
    Mutant(
        "loss.py",
        "(grad @ weight).mul_(counted)",
        "(grad @ weight)",
        "test_loss.py",
        "labels that do not count have a gradient",
    ),
    Mutant(
        "loss.py",
        "loss_of = kernel_chunk_loss if takes_kernel(x.device, matmul_dtype) else chunk_loss",
        "loss_of = chunk_loss",
        "test_gpu_path.py::test_a_sharded_step_stays_on_the_gpu_and_never_waits",
        "the loss kernel never runs: the logits are copied to fp32",
    ),
    Mutant(
        "gpu_kernels/cross_entropy.py",
        "(1 + 2 * z_loss * log_z) / total",
        "(1 + z_loss * log_z) / total",
        "gpu_kernels/test_cross_entropy.py",
        "in the loss kernel the gradient of the z-loss is half of what it should be",
    ),
    Mutant(
        "gpu_kernels/cross_entropy.py",
        "l = l * tl.exp(m - m_new) + tl.exp(s - m_new)",
        "l = l + tl.exp(s - m_new)",
        "gpu_kernels/test_cross_entropy.py",
        "the loss kernel does not move its sums to a new maximum",
    ),
    # --- data
    Mutant(
        "data.py",
        "global_batch_size + dp_rank * n_rows",
        "global_batch_size + dp_rank",
        "test_data.py",
        "the order of the batch depends on the number of ranks",
    ),
    Mutant(
        "data.py",
        "np.divmod(samples, len(self))",
        "np.divmod(samples, len(self) - 1)",
        "test_data.py",
        "an epoch leaves out a window",
    ),
    Mutant(
        "data.py",
        'side="right") - 1',
        'side="left") - 1',
        "test_data.py",
        "the first window of a shard is looked for in the one before",
    ),
    Mutant(
        "data.py",
        "torch.where(rows < 0, IGNORE, rows)",
        "torch.where(rows < 0, ~rows, rows)",
        "test_chat_data.py",
        "prompts and padding are learned as well",
    ),
    Mutant(
        "text/chat.py",
        "ids[0] = min(ids[0], ~ids[0])",
        "pass",
        "text/test_chat.py",
        "the first token of a packed example is learned from the one before",
    ),
    Mutant(
        "text/chat.py",
        "if (ids[:room] >= 0).any()]",
        "if (ids >= 0).any()]",
        "text/test_chat.py",
        "an example whose response is cut off stays, though nothing in it is learned",
    ),
    Mutant(
        "text/packing.py",
        "return sorted(rows)  # by",
        "return rows  # by",
        "text/test_packing.py",
        "the first rows hold the longest examples, and an evaluation may read those alone",
    ),
    Mutant(
        "text/tokenizer.py",
        "text = text.replace(name, name[0] + MARK + name[1:])",
        "break",
        "text/test_chat.py",
        "a message may write special tokens, and so begin a turn of the system",
    ),
    Mutant(
        "data.py",
        'changed.append(f"{known_by}dataset={cfg.dataset}")',
        "pass",
        "test_chat_data.py",
        "a run goes on with rows made from a chat as it was before it was edited",
    ),
    Mutant(
        "text/tokenizer.py",
        "if totals[pair] < 2",
        "if totals[pair] < 1",
        "text/test_tokenizer.py",
        "a BPE learns pairs that occur once",
    ),
    Mutant(
        "text/tokenizer.py",
        "heap = [(-total, pair)",
        "heap = [(-total, pair[::-1])",
        "text/test_tokenizer.py",
        "a BPE learns its merges in another order",
    ),
    # --- optimizer and step
    Mutant(
        "optim.py",
        "return t / cfg.warmup_steps\n    progress",
        "return (t + 1) / cfg.warmup_steps\n    progress",
        "test_optim.py",
        "the warm-up ends a step early",
    ),
    Mutant(
        "optim.py",
        "weight_decay=cfg.decoupled_weight_decay / cfg.lr",
        "weight_decay=cfg.decoupled_weight_decay",
        "test_optim.py",
        "weight decay is multiplied by the learning rate",
    ),
    Mutant(
        "optim.py",
        "(~good).float()",
        "good.float()",
        "test_optim.py",
        "good steps are skipped, bad ones are taken",
    ),
    Mutant(
        "fsdp_train.py",
        "loss * world.dp_size / n_tokens",
        "loss / n_tokens",
        "test_parallel.py::test_ranks_modes_and_microbatches_give_the_losses_of_one_rank",
        "the gradient is divided by the number of ranks once too often",
    ),
    Mutant(
        "parallel.py",
        "key = (cfg.seed, step, world.dp_rank)",
        "key = (cfg.seed, world.dp_rank)",
        "test_parallel.py::test_dropout_depends_on_seed_step_and_rank_alone",
        "every step has the same dropout masks",
    ),
    Mutant(
        "fsdp_train.py",
        "window_ids >= n_windows",
        "window_ids > n_windows",
        "test_parallel.py::test_evaluation_counts_every_window_once",
        "an evaluation counts a window twice where the ranks do not divide them",
    ),
    Mutant(
        "parallel.py",
        "dist.all_reduce(squares, group=mesh.get_group(dim))",
        "pass",
        "test_parallel.py::test_clipping_a_sharded_model_equals_pytorch_on_the_plain_one",
        "each rank clips by the norm of its own shard",
    ),
    Mutant(
        "parallel.py",
        "    copy.grad = None",
        "",
        "test_parallel.py::test_weights_cast_once_a_step_train_as_if_cast_in_each_microbatch",
        "gradients of a weight's bf16 copy are added again in each later microbatch",
    ),
    Mutant(
        "parallel.py",
        'precision == "bf16" and n_microbatches > 1',
        "n_microbatches > 1",
        "test_parallel.py::test_one_process_casts_weights_once_a_step",
        "a run in fp32 multiplies by weights in bf16",
    ),
    Mutant(
        "optim.py",
        ".clamp(max=1.0)",
        "",
        "test_parallel.py::test_clipping_a_sharded_model_equals_pytorch_on_the_plain_one",
        "small gradients are scaled up to the clipping norm",
    ),
    # --- tensor parallelism
    Mutant(
        "tensor_parallel.py",
        '"Wqkv": [(cfg.d_model, n), (kv_dim, n_kv), (kv_dim, n_kv)]',
        '"Wqkv": [(cfg.d_model + 2 * kv_dim, n)]',
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "Wqkv is cut as if its rows were of one kind: a rank gets keys where its queries belong",
    ),
    Mutant(
        "tensor_parallel.py",
        "if self.rank > 0 and self.spans(name) is None",
        "if self.rank < 0 and self.spans(name) is None",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "the norm counts tensors that are whole on each tensor rank once for each",
    ),
    Mutant(
        "tensor_parallel.py",
        "first = self.team.rank * n_heads",
        "first = 0",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "every tensor rank has the ALiBi slopes of the first heads",
    ),
    Mutant(
        "tensor_parallel.py",
        "seed = int(torch.randint(2**62, ())) + self.team.rank",
        "seed = int(torch.randint(2**62, ()))",
        "test_tensor_parallel.py::test_each_tensor_rank_drops_other_attention_weights",
        "the heads of all tensor ranks have the same attention dropout",
    ),
    Mutant(
        "tensor_parallel.py",
        """        z = leave(self.share(y), self)
        return z if self.bias is None else z + self.bias.to(z.dtype)
""",
        """        return leave(F.linear(y, self.weight, self.bias), self)
""",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "each tensor rank adds a row's bias before the sum, so it counts n times",
    ),
    Mutant(
        "tensor_parallel.py",
        "largest = all_reduce(logits.amax(1, keepdim=True), team, dist.ReduceOp.MAX)",
        "largest = logits.amax(1, keepdim=True)",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "the loss adds sums of exponentials that are relative to each tensor rank's own maximum",
    ),
    Mutant(
        "tensor_parallel.py",
        "exp_sum, own = all_reduce(torch.cat([exp.sum(1, keepdim=True), own], 1), team)"
        ".split(1, dim=1)",
        "exp_sum, own = exp.sum(1, keepdim=True), all_reduce(own, team)",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "the softmax of the loss is over a tensor rank's own part of the vocabulary",
    ),
    Mutant(
        "tensor_parallel.py",
        "own = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)) * is_mine",
        "own = logits.gather(1, labels.clamp(0, logits.shape[1] - 1))",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "the logit of another tensor rank's label is one of ours",
    ),
    Mutant(
        "tensor_parallel.py",
        "minus_one = -is_mine[:, None].to(exact)",
        "minus_one = -torch.ones_like(log_z)",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "the label's -1 in the gradient of the logits is there once for each tensor rank",
    ),
    Mutant(
        "tensor_parallel.py",
        "rows * is_mine[..., None]",
        "rows",
        "test_tensor_parallel.py::test_tensor_ranks_train_as_one_process",
        "the embedding adds a row of ours to that of another tensor rank's id",
    ),
    Mutant(
        "tensor_parallel.py",
        "is_partial = model.team.sequence_parallel or",
        "is_partial =",
        "test_tensor_parallel.py::test_in_float64_nothing_but_the_order_of_sums_differs",
        "with sequence parallelism norms have the gradient of a rank's own tokens",
    ),
    Mutant(
        "tensor_parallel.py",
        "sequence_parallel or layout.spans(name)",
        "sequence_parallel",
        "test_tensor_parallel.py::test_in_float64_nothing_but_the_order_of_sums_differs",
        "the single head of keys and values (MQA) has the gradient of a rank's own queries",
    ),
    Mutant(
        "parallel.py",
        "if cfg.sequence_parallel and world.tp_rank:",
        "if world.tp_rank:",
        "test_tensor_parallel.py::"
        "test_with_dropout_the_whole_tensors_stay_equal_on_all_tensor_ranks",
        "tensor ranks drop other numbers of the residual stream that all of them have",
    ),
    Mutant(
        "checkpoint.py",
        "if layout.size == 1:",
        "if layout.size >= 1:",
        "test_tensor_parallel.py::test_one_process_loads_what_two_tensor_ranks_saved",
        "a checkpoint has one tensor rank's parts as if they were whole tensors",
    ),
    # --- pipeline parallelism
    Mutant(
        "pipeline.py",
        "n_warmup = min(n, pipe.size - 1 - pipe.rank)",
        "n_warmup = min(n, pipe.size - pipe.rank)",
        "test_pipeline_schedule.py::test_each_stage_computes_in_the_stated_order",
        "each stage keeps the activations of one microbatch more than it needs",
    ),
    Mutant(
        "pipeline.py",
        "for i in range(n - n_warmup, n):\n        pipe",
        "for i in reversed(range(n - n_warmup, n)):\n        pipe",
        "test_pipeline.py",
        "in the drain the gradient of one microbatch goes back through another",
    ),
    Mutant(
        "fsdp_train.py",
        "        ids, labels = microbatches[i]\n",
        "        ids, labels = microbatches[0]\n",
        "test_pipeline.py",
        "the last stage compares every microbatch with the labels of the first",
    ),
    Mutant(
        "pipeline.py",
        "transformer.norm_f = nn.Identity()",
        "pass",
        "test_pipeline.py",
        "each stage applies a final norm",
    ),
    Mutant(
        "pipeline.py",
        "return (stages - 1) / (n + stages - 1)",
        "return (stages - 1) / n",
        "test_pipeline_schedule.py::test_the_formula_is_what_the_picture_shows",
        "the bubble is given as a share of the time without it",
    ),
    Mutant(
        "pipeline.py",
        "grad += pipe.transfer(",
        "pipe.transfer(",
        "test_pipeline.py::test_every_grid_of_ranks_trains_as_one_process",
        "each end updates a tied embedding by its own gradient alone",
    ),
    Mutant(
        "pipeline.py",
        'return is_stage and name == "transformer.wte.weight"',
        "return False",
        "test_pipeline.py::test_every_grid_of_ranks_trains_as_one_process",
        "the norm counts a tied embedding once for each end",
    ),
    Mutant(
        "parallel.py",
        "    if isinstance(model, pipeline.Stage):\n        dist.all_reduce(total,",
        "    if False:\n        dist.all_reduce(total,",
        "test_pipeline.py::test_every_grid_of_ranks_trains_as_one_process",
        "each stage clips by the norm of its own gradients",
    ),
    Mutant(
        "fsdp_train.py",
        "    dist.all_reduce(loss_sum, group=model.pipe.group)\n",
        "",
        "test_pipeline.py::test_every_grid_of_ranks_trains_as_one_process",
        "all stages but the last log a loss of 0, and do not see that it is NaN",
    ),
    Mutant(
        "fsdp_train.py",
        "kept[i] = x, get_gradient_edge(y * world.dp_size / n_tokens)",
        "kept[i] = x, get_gradient_edge(y / n_tokens)",
        "test_pipeline.py::test_every_grid_of_ranks_trains_as_one_process",
        "with pipeline and data parallelism gradients are divided by the data-parallel ranks",
    ),
    Mutant(
        "fsdp_train.py",
        "last=i == len(microbatches) - 1",
        "last=i == 0",
        "test_pipeline.py::test_every_grid_of_ranks_trains_as_one_process",
        "with ZERO1 the gradients of all microbatches but the first are never reduced",
    ),
    Mutant(
        "fsdp_train.py",
        "x, edge = kept.pop(i)",
        "x, edge = kept[i]",
        "test_pipeline.py::test_hidden_states_stay_only_while_a_backward_needs_them",
        "a stage keeps the hidden states of all microbatches until the end of the step",
    ),
    Mutant(
        "parallel.py",
        "key += (-1, world.pp_rank)",
        "pass",
        "test_pipeline.py::test_each_stage_microbatch_and_step_draws_other_masks",
        "all stages draw the same dropout masks",
    ),
    Mutant(
        "checkpoint.py",
        "require_weights(path, metadata, saved_weights(model))",
        'require_weights(path, metadata, in_pieces(state["model"], layout_of(model)))',
        "test_pipeline_checkpoint.py::test_two_stages_and_one_process_load_what_the_other_saved",
        "a stage refuses every checkpoint, since it has the weights of other stages, too",
    ),
    Mutant(
        "checkpoint.py",
        "class SavePlanner(InPieces, DefaultSavePlanner):",
        "class SavePlanner(InPieces, DefaultSavePlanner):\n"
        "    def _dedup_save_plans(self, plans):\n"
        "        return plans\n",
        "test_pipeline_checkpoint.py::test_every_grid_reads_all_of_what_every_other_wrote",
        "the first and the last stage both write the tied embedding",
    ),
    # --- adapters
    Mutant(
        "lora.py",
        'if name.endswith("lora_A"):',
        "if True:",
        "test_lora.py::test_at_the_start_a_model_is_exactly_its_base",
        "B does not begin at zero, so adapters change the model before the first step",
    ),
    Mutant(
        "lora.py",
        "return layer.lora_scale * (layer.lora_B @ layer.lora_A)",
        "return layer.lora_B @ layer.lora_A",
        "test_lora.py::test_merging_leaves_a_plain_model_with_the_same_logits",
        "merging forgets the scale of the update",
    ),
    Mutant(
        "lora.py",
        "param.requires_grad_(is_trained_too(model, name, cfg))",
        "param.requires_grad_(True)",
        "test_lora.py::test_only_what_is_asked_for_trains",
        "the base is trained together with its adapters",
    ),
    Mutant(
        "config.py",
        "math.sqrt(rank) if self.rslora else rank",
        "rank",
        "test_lora.py::test_the_update_is_s_times_b_times_a",
        "rslora divides alpha by the rank, not by its root",
    ),
    Mutant(
        "config.py",
        "range(self.n_layers - last_blocks if last_blocks else 0, self.n_layers)",
        "range(last_blocks or self.n_layers)",
        "test_lora.py::test_only_what_is_asked_for_trains",
        "lora_last_blocks gives adapters to the first blocks",
    ),
    Mutant(
        "tensor_parallel.py",
        "or layout.spans(name) or is_adapter(name)",
        "or layout.spans(name)",
        "test_lora.py::test_any_number_of_ranks_trains_the_same_adapters",
        "each tensor rank keeps its own part of the gradient of an adapter's whole factor",
    ),
    Mutant(
        "tensor_parallel.py",
        'if module in columns and leaf in ("weight", "lora_A"):',
        'if module in columns and leaf == "weight":',
        "test_lora.py::test_any_number_of_ranks_trains_the_same_adapters",
        "the A of a row-parallel layer counts as whole on each tensor rank",
    ),
    # --- checkpoints and files
    Mutant(
        "checkpoint.py",
        "[: -self.keep_last]",
        "[: -self.keep_last - 1]",
        "test_checkpoint.py",
        "one checkpoint more than keep_last stays",
    ),
    Mutant(
        "checkpoint.py",
        "group.update(settings)",
        "pass",
        "test_checkpoint.py",
        "a resumed run trains with the saved learning rate, not with the one that is set",
    ),
    Mutant(
        "storage/checkpoint_files.py",
        "if checksum(path) != [size, crc]",
        "if checksum(path)[0] != size",
        "storage/test_checkpoint_files.py",
        "a flipped bit in a checkpoint is not noticed",
    ),
    Mutant(
        "storage/checkpoint_files.py",
        "known = name in KNOWN_NAMES.get(module, ())",
        "known = module in KNOWN_NAMES",
        "storage/test_checkpoint_files.py",
        "the restricted unpickler admits any name of a known module",
    ),
    Mutant(
        "storage/files.py",
        "os.replace(temporary, path)",
        "path.write_bytes(content)",
        "storage/test_files.py",
        "an atomic write is not atomic",
    ),
    # --- lifecycle
    Mutant(
        "lifecycle/lease.py",
        "fcntl.LOCK_EX",
        "fcntl.LOCK_SH",
        "lifecycle/test_lease.py",
        "two runs may own one folder",
    ),
    Mutant(
        "lifecycle/reporter.py",
        "dist.all_reduce(combined, op=dist.ReduceOp.MAX)",
        "pass",
        "lifecycle/test_reporter.py lifecycle/test_stopping.py",
        "only the rank that got the signal stops",
    ),
    Mutant(
        "lifecycle/cadence.py",
        "range(r.start, min(r.stop, step))",
        "range(r.start, min(r.stop, step + 1))",
        "lifecycle/test_cadence.py",
        "a skipped step is counted one step early",
    ),
    Mutant(
        "lifecycle/resume.py",
        'min(skipped_now.stop, meta["step"])',
        'min(skipped_now.stop, meta["step"] - 1)',
        "lifecycle/test_resume.py",
        "a run resumes from a checkpoint that was trained on a step that is skipped now",
    ),
    Mutant(
        "lifecycle/runlog.py",
        'row["step"] <= first_step',
        'row["step"] < first_step',
        "lifecycle/test_runlog.py",
        "a resumed run drops the row of its last step",
    ),
    Mutant(
        "lifecycle/microbatch.py",
        "half = cfg.microbatch_size // 2",
        "half = cfg.microbatch_size",
        "lifecycle/test_microbatch.py",
        "after running out of memory, the run announces the same microbatch again",
    ),
    Mutant(
        "lifecycle/microbatch.py",
        "n_microbatches = cfg.pp + 1",
        "n_microbatches = 2",
        "lifecycle/test_microbatch.py",
        "the trial of four stages keeps the activations of two microbatches",
    ),
    Mutant(
        "lifecycle/microbatch.py",
        'names += " pp"',
        "pass",
        "lifecycle/test_microbatch.py",
        "stages take the microbatch that was found to fit without them",
    ),
    Mutant(
        "lifecycle/reporter.py",
        "memory_gb=float(combined[3])",
        "memory_gb=memory_gb",
        "lifecycle/test_reporter.py",
        "the memory on record is that of the first stage",
    ),
    Mutant(
        "lifecycle/watchdog.py",
        "0 <= new == old",
        "new == old + 1",
        "lifecycle/test_watchdog.py",
        "of a lost rank, a living one is said to give no sign of life",
    ),
    Mutant(
        "processes.py",
        " or count < 0",
        "",
        "lifecycle/test_watchdog.py",
        "a rank that has left the training loop is taken for dead",
    ),
    Mutant(
        "processes.py",
        "if user_error(error):  # NCCL",
        "if False:  # NCCL",
        "lifecycle/test_microbatch.py",
        "a rank without memory is taken for a lost one, and started again forever",
    ),
    Mutant(
        "program.py",
        "        print_error(error)\n        status = 2",
        "        print_error(error)\n        status = 1",
        "test_program.py",
        "a user error ends with the exit status of a bug",
    ),
    # --- use of a model, arithmetic
    Mutant(
        "serving/sampling.py",
        "probs.cumsum(dim=-1) - probs",
        "probs.cumsum(dim=-1)",
        "serving/test_sampling.py",
        "top_p drops the token that crosses the limit",
    ),
    Mutant(
        "serving/adapters.py",
        "        row.zero_()\n",
        "",
        "serving/test_adapters.py",
        "a slot keeps what an adapter of a higher rank left there",
    ),
    Mutant(
        "serving/adapters.py",
        "            acquired.callback(self.use, [BASE])\n",
        "",
        "serving/test_adapters.py",
        "the texts after those of an adapter are written with it, too",
    ),
    Mutant(
        "serving/adapters.py",
        "        self.loaded.pop(unused[0], None)\n",
        "",
        "serving/test_adapters.py",
        "rows may use an adapter that has lost its slot to another one",
    ),
    Mutant(
        "weights/hf_tokenizer.py",
        "found |= {key: value for key, value in saved.items() if value is not None}",
        "",
        "weights/test_hf_tokenizer.py",
        "what a folder's generation_config.json names ends no text",
    ),
    Mutant(
        "text/tokenizer_json.py",
        "for cut in range(1, len(token))",
        "for cut in range(len(token) - 1, len(token))",
        "text/test_tokenizer_json.py",
        "an exported tokenizer lacks merges, so other programs give other ids",
    ),
    Mutant(
        "serving/stream.py",
        "range(1, len(stop))",
        "range(1, len(stop) - 1)",
        "serving/test_stream.py",
        "a stop string is shown except for its last character",
    ),
    Mutant(
        "evaluation/figures.py",
        '"nats_per_byte": nats / size',
        '"nats_per_byte": nats / tokens',
        "evaluation/test_zero_shot.py",
        "nats per byte are computed per token",
    ),
    Mutant(
        "evaluation/score.py",
        "labels[number, end - count : end]",
        "labels[number, end - count - 1 : end - 1]",
        "evaluation/test_score.py",
        "scores are of the tokens before the continuation",
    ),
    Mutant(
        "weights/tensor_files.py",
        '"shape": list(tensor.shape)',
        '"shape": list(tensor.shape)[::-1]',
        "weights/test_hf.py",
        "exported matrices are transposed",
    ),
    Mutant(
        "flops.py",
        "n = n_params(cfg) - lookup",
        "n = n_params(cfg)",
        "test_flops.py",
        "looking up an embedding counts as a matmul",
    ),
]


def lost_snippets(root: Path = ROOT) -> list[str]:
    """A line for each mutant whose snippet is not in its file exactly once."""
    lines = []
    for mutant in MUTANTS:
        path = root / mutant.file
        times = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if times != 1:
            lines.append(f"{mutant.file}: {mutant.old!r} is there {times} times ({mutant.why})")
    return lines


def copy_of_the_code(folder: Path) -> Path:
    """A copy of the working tree in `folder`, with this one's virtual environment."""
    copy = folder / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*KEPT_OUT))
    if (ROOT / ".venv").exists():
        (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
    return copy


def run_tests(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Exit status and output of the quick tests in some files, up to the first failure."""
    paths = [f"tests/{name}" for name in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not long", *paths]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": copy, "env": environment, "text": True, "start_new_session": True}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    pytest = subprocess.Popen(command, **options, **streams)
    try:
        output, _ = pytest.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)  # with the programs that a test has started
        pytest.communicate()
        return 1, f"FAILED the limit of {LIMIT} s"
    return pytest.returncode, output


def plant(mutant: Mutant, copy: Path) -> tuple[bool, str]:
    """Whether the tests found the bug, and a line about it. Restores the copy."""
    path = copy / mutant.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    begin = time.monotonic()
    try:
        status, output = run_tests(copy, mutant.tests.split())
    finally:
        path.write_text(sound, encoding="utf-8")
    seconds = time.monotonic() - begin
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
    killed = status == 1 and failed is not None
    what = f"killed by {failed[1]}" if killed else f"SURVIVED (pytest: {status})"
    return killed, f"{seconds:6.1f} s  {mutant.file}: {mutant.why}: {what}"


def run_all(mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Plant each, `jobs` at a time; the survivors."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as threads:
        copies = SimpleQueue()
        for number in range(jobs):
            copies.put(copy_of_the_code(Path(folder, str(number))))

        def judge(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                killed, line = plant(mutant, copy)
            finally:
                copies.put(copy)
            print(line, flush=True)
            return killed

        verdicts = list(threads.map(judge, mutants))
    return [mutant for mutant, killed in zip(mutants, verdicts, strict=True) if not killed]


def passes_without_a_bug(mutants: list[Mutant]) -> bool:
    """Whether the tests of these mutants pass in an unchanged copy: else nothing is proved."""
    files = dict.fromkeys(name for mutant in mutants for name in mutant.tests.split())
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        status, output = run_tests(copy_of_the_code(Path(folder)), list(files))
    print(
        f"{time.monotonic() - begin:6.1f} s  without a bug: pytest ends with {status}", flush=True
    )
    if status:
        print(output[-3000:], file=sys.stderr)
    return status == 0


def main(argv: list[str]) -> int:
    """The exit status: see the top of the file."""
    jobs = next((int(word[7:]) for word in argv if word.startswith("--jobs=")), 1)
    words = [word.lower() for word in argv if not word.startswith("--")]
    mutants = [
        mutant
        for mutant in MUTANTS
        if not words or any(word in f"{mutant.file} {mutant.why}".lower() for word in words)
    ]
    if lost := lost_snippets():
        print(
            "tests/mutants.py: these are not in their file exactly once; update them:",
            *lost,
            sep="\n  ",
        )
        return 2
    if "--unchecked" not in argv and not passes_without_a_bug(mutants):
        return 2
    survivors = run_all(mutants, jobs)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} bugs were found")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
