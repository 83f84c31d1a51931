"""Plant one bug at a time in a copy of the code: the quick tests of that part must fail.

    make mutants                                    all of them
    .venv/bin/python tests/mutants.py alibi lease   those with one of these words in file or reason

Each stands for a kind of fault. First the tests must pass in a copy without a bug. Each line says
which test found a bug, and after how many seconds. Exit status 1: a bug survives, a text of BUGS is
not once in its file, or the tests fail without a bug.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds for the tests of one bug: one that hangs is found, too
LEFT_OUT = (".git", ".venv", "runs", "data", "__pycache__", ".pytest_cache", ".ruff_cache")

# What the bug does; the file: the tests in tests/ that must fail, as files or FILE::test; then the
# text, once in the file, as it is (-) and with the bug (+). Several lines are one text.
BUGS = r"""
# --- attention and model

ALiBi's slopes begin at 2^0, one exponent too early
attention.py: test_attention.py
- i = torch.arange(1, n + 1
+ i = torch.arange(0, n

the causal mask shows each query the next token
attention.py: test_attention.py
- masked_fill(j > i,
+ masked_fill(j > i + 1,

the gradient of the keys lacks the backward of softmax
fast/cpu_attention.py: test_attention.py
- dk[:, keys] += torch.bmm(dscores.mT
+ dk[:, keys] += torch.bmm(probs.mT

in the kernel's backward, blocks on the diagonal have no causal mask
fast/flash_attention.py: fast/test_flash_attention.py::test_diagonal_masks_are_enough
- mask_until = tl.max(first) - past
+ mask_until = tl.min(first) - past

on a KV cache the positions begin at 0 again
model.py: serving/test_decoder.py
- positions = torch.arange(self.length, end,
+ positions = torch.arange(0, end - self.length,

the end-of-text token belongs to the next document
model.py: test_model.py
- F.pad(ended[:, :-1], (1, 0))
+ ended

# --- loss

the gradient of the z-loss is half of what it should be
loss.py: test_loss.py
- probs.mul_(1 + 2 * z_loss * log_z)
+ probs.mul_(1 + z_loss * log_z)

the loss kernel does not move its sums to a new maximum
fast/cross_entropy.py: fast/test_cross_entropy.py
- l = l * tl.exp(m - m_new) + tl.exp(s - m_new)
+ l = l + tl.exp(s - m_new)

# --- data and tokenizer

the order of the batch depends on the number of ranks
data.py: test_data.py
- global_batch_size + dp_rank * n_rows
+ global_batch_size + dp_rank

a mixture reads the same samples of a source again and again
data.py: test_mixture.py
- schedules * self.counts[sources] + self.numbers[places]
+ self.numbers[places]

prompts and padding are learned as well
data.py: test_chat_data.py
- torch.where(rows < 0, IGNORE, rows)
+ torch.where(rows < 0, ~rows, rows)

a message may write special tokens, and so begin a turn of the system
text/tokenizer.py: text/test_chat.py
- text = text.replace(name, name[0] + MARK + name[1:])
+ break

# --- optimizer and step

weight decay is multiplied by the learning rate
optim.py: test_optim.py
- weight_decay=cfg.decoupled_weight_decay / cfg.lr
+ weight_decay=cfg.decoupled_weight_decay

good steps are skipped, bad ones are taken
optim.py: test_optim.py
- (~good).float()
+ good.float()

# --- several ranks

the gradient is divided by the number of ranks once too often
fsdp_train.py: test_layouts.py::test_each_layout_trains_as_one_process
- loss * world.dp_size / n_tokens
+ loss / n_tokens

every step has the same dropout masks
parallel.py: test_parallel.py::test_dropout_depends_on_seed_step_and_rank_alone
- dropout of step {step}, ranks
+ dropout of ranks

each rank clips by the norm of its own shard
parallel.py: test_layouts.py::test_each_layout_trains_as_one_process
- dist.all_reduce(total, group=group)
+ pass

Wqkv is cut as if its rows were of one kind: a rank gets keys where its queries belong
tensor_parallel.py: test_layouts.py::test_each_layout_trains_as_one_process
- "Wqkv": [(cfg.d_model, n), (kv_dim, n_kv), (kv_dim, n_kv)]
+ "Wqkv": [(cfg.d_model + 2 * kv_dim, n)]

with sequence parallelism norms have the gradient of a rank's own tokens
tensor_parallel.py: test_layouts.py::test_in_float64_nothing_but_the_order_of_sums_differs
- is_partial = model.team.sequence_parallel or
+ is_partial =

in the drain the gradient of one microbatch goes back through another
pipeline.py: test_layouts.py::test_each_layout_trains_as_one_process
- for i in range(n - n_warmup, n):
-         pipe
+ for i in reversed(range(n - n_warmup, n)):
+         pipe

# --- adapters

# --- checkpoints and files

a checkpoint has one tensor rank's parts as if they were whole tensors
checkpoint.py: test_resharding.py::test_each_layout_saves_the_whole_and_loads_it
- return pieces.SavePlanner(layout), pieces.LoadPlanner(layout)
+ return DefaultSavePlanner(), pieces.LoadPlanner(layout)

a flipped bit in a checkpoint is not noticed
storage/checkpoint_files.py: storage/test_checkpoint_files.py
- if checksum(path) != [size, crc]
+ if checksum(path)[0] != size

the restricted unpickler admits any name of a known module
storage/checkpoint_files.py: storage/test_checkpoint_files.py
- is_known = name in KNOWN_NAMES.get(module, "").split()
+ is_known = module in KNOWN_NAMES

an atomic write is not atomic
storage/files.py: storage/test_files.py
- os.replace(temporary, path)
+ path.write_bytes(content)

a store keeps what was damaged on the way up
storage/object_store.py: storage/test_object_store.py
- more["checksum_algorithm"] = "SHA256"
+ pass

a half-deleted checkpoint in a store counts as complete
storage/remote_checkpoints.py: storage/test_remote_checkpoints.py
- if fault or any(sizes.get(file) != size for file, (size, _) in checksums.items()):
+ if fault:

# --- the life of a run

a run does not notice that another one owns its store now
lifecycle/lease.py: lifecycle/test_remote.py
- if self.is_later(version):
+ if False:

two runs may own one folder
lifecycle/lease.py: lifecycle/test_lease.py
- fcntl.LOCK_EX
+ fcntl.LOCK_SH

only the rank that got the signal stops
processes.py: lifecycle/test_run.py lifecycle/test_stopping.py
- dist.all_reduce(largest, op=dist.ReduceOp.MAX)
+ pass

a resumed run drops the row of its last step
lifecycle/runlog.py: lifecycle/test_runlog.py
- row["step"] <= first_step
+ row["step"] < first_step

of ranks that hang, one that waits for others is named, too
launch/heartbeat.py: lifecycle/test_watchdog.py
- if line != WAITS
+ if line

a user error ends with the exit status of a bug
program.py: test_program.py
- return getattr(mistake, "status", 2)
+ return 1

settings whose names are misspelled are ignored
launch/parser.py: test_config.py
- elif key not in ignored:
+ elif False:

# --- the use of a model

top_p keeps a token more where the sum of the likelier ones is exactly p
serving/sampling.py: serving/test_sampling.py
- outside = likelier >= top_p
+ outside = likelier > top_p

the beginning of a prompt is shared with texts of other adapters
serving/engine.py: serving/test_engine.py::test_a_beginning_belongs_to_its_adapter
- return adapter, self.bank.version(adapter) if self.bank else 0
+ return ("all",)

# --- the planner and its arithmetic

looking up an embedding counts as a matmul
flops.py: test_flops.py
- n = n_params(cfg) - lookup
+ n = n_params(cfg)

the planner counts one of Adam's two moments
planning/memory.py: planning/test_memory.py
- MOMENTS: 8 * rank.n_trained}
+ MOMENTS: 4 * rank.n_trained}

# --- jobs and the page

two workers take one job
web/jobs.py: web/test_jobs.py::test_no_job_is_taken_twice
- fcntl.LOCK_EX | fcntl.LOCK_NB
+ fcntl.LOCK_SH | fcntl.LOCK_NB

a link leads out of the folder of runs
web/files.py: web/test_runs.py
- stat.S_ISDIR(os.lstat(path).st_mode)
+ stat.S_ISDIR(os.stat(path).st_mode)

a card takes a run's name for HTML
weights/card.py: weights/test_card.py
- html.escape(words, quote=False)
+ words
"""


class Mutant(NamedTuple):
    """`old`, once in `file`, becomes `new`: `why` says what that does, and `tests` must fail."""

    why: str
    file: str
    tests: list[str]
    old: str
    new: str


def mutants_of(text: str) -> list[Mutant]:
    """The bugs in BUGS, which are parted by empty lines."""
    mutants = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("#"):
            continue
        why, place, *lines = paragraph.splitlines()
        file, tests = place.split(": ")
        old, new = ("\n".join(s[2:] for s in lines if s[0] == sign) for sign in "-+")
        times = (ROOT / file).read_text(encoding="utf-8").count(old)
        if times != 1:
            sys.exit(f"tests/mutants.py: {old!r} is in {file} {times} times ({why})")
        mutants.append(Mutant(why, file, tests.split(), old, new))
    return mutants


def first_failure(copy: Path, tests: list[str]) -> str:
    """The first of these quick tests that fails in a copy of the code, "" if all pass."""
    command = ["timeout", str(LIMIT), sys.executable, "-B", "-m", "pytest", "-x", "-n2"]
    command += ["--dist", "loadfile", "-m", "not slow and not long"]
    command += [f"tests/{name}" for name in tests]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if not failed and done.returncode not in (0, 124):  # 124: `timeout` has ended them
        sys.exit(done.stdout[-3000:])
    return failed[1] if failed else "the limit of time" * (done.returncode != 0)


def main(words: list[str]) -> None:
    """Plant the bugs that these words choose, all without words."""
    mutants = [
        mutant
        for mutant in mutants_of(BUGS)
        if not words or any(word.lower() in f"{mutant.file} {mutant.why}".lower() for word in words)
    ]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        if (ROOT / ".venv").exists():
            (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
        tests = dict.fromkeys(name for mutant in mutants for name in mutant.tests)
        if failed := first_failure(copy, list(tests)):
            sys.exit(f"without a bug {failed} fails")
        survivors = [mutant for mutant in mutants if not is_found(mutant, copy)]
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} bugs were found")
    sys.exit(1 if survivors else 0)


def is_found(mutant: Mutant, copy: Path) -> bool:
    """Whether the tests find the bug in a copy. Says so in a line, and restores the copy."""
    path = copy / mutant.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    begin = time.monotonic()
    failed = first_failure(copy, mutant.tests)
    seconds = time.monotonic() - begin
    path.write_text(sound, encoding="utf-8")
    what = f"found by {failed}" if failed else "SURVIVED"
    print(f"{seconds:6.1f} s  {mutant.file}: {mutant.why}: {what}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
