"""Make the files of this folder with the code of commit e0c057d. See README.md.

    git worktree add /tmp/old e0c057d
    python tests/old_runs/make.py /tmp/old

The run is made in a new folder and copied to this one, so that all paths in it are relative.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CODE = "../code"  # a link beside the folder of the run, so that no path of a machine is kept
TRAIN = [f"{CODE}/fsdp_train.py", "settings.py"]
# Columns in which no two runs are alike.
UNLIKE = "tokens_per_second mfu memory_gb seconds slowest_rank slowest_by".split()
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
WORDS = "the a river tree house blue old sings walks sees under slowly".split()
PROMPT = "the old river"
LOGITS = """
import json, sys, torch, checkpoint
from pathlib import Path
model = checkpoint.load_model(Path("run/checkpoints/step-6"), torch.device("cpu"))
with torch.no_grad():
    logits = model(torch.arange(3, 27)[None])[0, -1]
print(json.dumps([round(value, 6) for value in logits.tolist()]))
"""


def write_inputs(work: Path) -> None:
    """Text, questions and settings, as a user would have them."""
    words = random.Random(0)
    (work / "text").mkdir()
    for number in range(2):
        documents = [" ".join(words.choices(WORDS, k=120)) for _ in range(20)]
        (work / "text" / f"{number}.txt").write_text("<|endoftext|>".join(documents))
    choices = ["sings slowly", "under", "sees a tree"]
    gold = {WORDS[i]: i % 3 for i in range(4)}
    questions = [{"query": f"the {w} river", "choices": choices, "gold": gold[w]} for w in gold]
    (work / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    shutil.copy(HERE / "settings.py", work)


def expected(metrics: Path) -> str:
    """The rows of the resumed part of a run, without the columns that differ from run to run."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 6]
    rows = [{name: row[name] for name in row if name not in UNLIKE} for row in rows]
    return "".join(json.dumps(row) + "\n" for row in rows)


def make(work: Path) -> None:
    def python(*args, cwd=work) -> str:
        """Run a program of the old code; what it printed."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": CODE}
        options = {"cwd": cwd, "env": environment, "check": True, "text": True}
        return subprocess.run([sys.executable, *args], stdout=subprocess.PIPE, **options).stdout

    def resumed(n_ranks: int) -> Path:
        """A copy of everything in which `n_ranks` ranks went on from step 6."""
        copy = work.with_name(f"resumed-{n_ranks}")
        shutil.copytree(work, copy)
        python(*(TORCHRUN if n_ranks > 1 else []), *TRAIN, cwd=copy)
        rows = expected(copy / "run" / "metrics.jsonl")
        (work / f"expected-{n_ranks}.jsonl").write_text(rows)
        return copy

    write_inputs(work)
    python(*TRAIN)
    shutil.rmtree(work / "run" / "checkpoints" / "step-12")  # as if killed before it was there
    resumed(1)
    two = resumed(2)
    shutil.copy(two / "run" / "microbatch.json", work / "run")  # on record for 1 rank and for 2
    greedy = "--temperature=0 --precision=fp32 --max_new_tokens=8 --json".split()
    text = python(f"{CODE}/generate.py", "run", "--prompt", PROMPT, *greedy)
    (work / "greedy.json").write_text(text)
    (work / "logits.json").write_text(python("-c", LOGITS))
    asked = "--tasks=questions.jsonl --precision=fp32 --out=evaluation.json".split()
    python(f"{CODE}/icl_eval.py", "run", *asked)
    short = "--microbatch_size=8 --rounds=1 --steps=1 --out=bench.csv".split()
    python(f"{CODE}/bench_train.py", "settings.py", *short)


def main() -> None:
    old = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        (work.parent / "code").symlink_to(old)
        make(work)
        with tarfile.open(work / "checkpoints.tar.gz", "w:gz") as archive:
            archive.add(work / "run" / "checkpoints", "run/checkpoints")
        shutil.rmtree(work / "run" / "checkpoints")
        left_out = shutil.ignore_patterns("bench.md", "bench.png", "__pycache__")
        shutil.copytree(work, HERE, dirs_exist_ok=True, ignore=left_out)


if __name__ == "__main__":
    main()
