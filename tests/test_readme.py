"""What the pages say is true: commands run, the names of files and of what is in them exist.

Each command of README.md, READING.md, TROUBLE.md, CONTRIBUTING.md and the folders' pages is run,
small, in a copy of the project, in forks; torchrun itself starts one of them, and `make train`.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache

import pytest
from conftest import PATIENCE, ROOT, clean_environment
from forks import Forks
from random_adapters import write_random

from config import MPTConfig, TrainConfig, load
from model import MPT
from text import chat
from weights import hf, peft

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
READING = (ROOT / "READING.md").read_text(encoding="utf-8")
PAGES = README + (ROOT / "TROUBLE.md").read_text(encoding="utf-8") + CONTRIBUTING + READING
FOLDER_PAGES = "".join(path.read_text() for path in sorted(ROOT.glob("[a-z]*/*.md")))


# --- The commands


def command_lines(page: str) -> list[str]:
    """The lines of a page's blocks of commands."""
    return "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()


def commands_in(lines: list[str]) -> set[str]:
    """The commands without comments; a command may be broken over two lines."""
    return {" ".join(line.partition("  #")[0].split()) for line in lines} - {""}


BLOCKS = command_lines(PAGES)
INLINE = re.findall(r"`((?:python|torchrun) [^`]+)`", PAGES)
COMMANDS = sorted(commands_in(BLOCKS + INLINE))

# Flags come last, so these make any run small: some thousand weights, two steps, text in my/, or
# prompts and responses there.
SMALL_MODEL = "--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=320 --max_seq_len=32".split()
SMALL_DATA = (
    "--dataset=my/*.txt --tokenizer=bytes --data_dir=data/small --val_fraction=0.1 --max_tokens=0"
).split()
SMALL_CHAT = [*SMALL_DATA, "--dataset=my/*.jsonl", "--data_dir=data/small-chat"]
OF_CHAT = ("configs/lora_", "configs/finetune_")  # configs with data_format = "chat"
SMALL_RUN = (
    "--eval_tokens=64 --max_steps=2 --warmup_steps=1 --global_batch_size=8 --microbatch_size=2 "
    "--icl_limit=1 --save_interval=1"
).split()
SMALL = SMALL_MODEL + SMALL_DATA + SMALL_RUN
SMALL_BENCH = {
    "train": [*SMALL_MODEL, "--n_layers=1", "--rounds=1", "--steps=1"],
}


def words_of(command: str) -> list[str]:
    """The words of a command as a shell passes them on. Only bash and others know $'...'."""
    if "$'" not in command:
        return shlex.split(command)
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    return printed.stdout.split("\0")[:-1]


def shrunk(command: str) -> list[str]:
    """The words of the command, made small."""
    command = command.replace("step-3000", "step-1").replace("3110:3130", "2:3")  # 2 steps exist
    words = words_of(command)
    flags = []
    if "--help" not in words and any(program in words for program in ("fsdp_train.py", "data.py")):
        flags = [*SMALL, "--max_steps=3"] if "--skip_steps=2:3" in words else SMALL
        if any(name in command for name in OF_CHAT):
            flags = [*flags, *SMALL_CHAT]
    if "bench" in words:
        flags = SMALL_BENCH.get(words[words.index("bench") + 1], [])
    if "evaluation.tasks" in words:
        flags = ["--length=8"]  # bytes: later commands give this task to a model of 32 tokens
    return [*words, *flags]


def run_well(command, folder) -> str:
    """Run a command that must exit with 0, without the variables of a launcher; its output."""
    options = {"cwd": folder, "env": clean_environment(), "timeout": PATIENCE}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory, tiny_text):
    """The project in another folder, with text in my/ and the files that users have."""
    folder = tmp_path_factory.mktemp("readme") / "project"
    left_out = shutil.ignore_patterns(".*", "data", "runs", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=left_out)
    shutil.copytree(tiny_text, folder / "my")
    shutil.copy(folder / "my/0.txt", folder / "my/notes.txt")
    examples = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(200)]
    (folder / "my/chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in examples))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "my/chat.jinja").write_text(template)
    row = json.dumps({"query": "the", "choices": ["river", "tree"], "gold": 0})
    (folder / "words.jsonl").write_text(f"{row}\n")
    return folder


@pytest.fixture(scope="module")
def perform(copy):
    """`perform(command)` is the output of a command of a page in the copy. It must end well."""
    forks = Forks(copy)

    def perform(command):
        program, *words = shrunk(command)
        if "--rdzv-endpoint=localhost:0" in words:
            return run_well([sys.executable, "-m", "torch.distributed.run", *words], copy)
        ranks = 1
        if program == "torchrun":
            assert words.pop(0) == "--nproc_per_node"
            ranks = int(words.pop(0))
        status, out, err = forks(words, copy, ranks=ranks)
        assert status == 0, out[-2000:] + err[-2000:]
        return out

    yield perform
    forks.stop()


BENCH_TRAIN = "python -m bench train configs/mpt1b.py --out=mine.csv"


@pytest.fixture(scope="module")
def runs(copy, perform):
    """In the copy: runs, tables of a benchmark, weights from elsewhere and an adapter."""
    perform("python fsdp_train.py configs/demo.py")
    for name in ("hot", "rope"):
        shutil.copytree(copy / "runs/demo", copy / "runs" / name)

    perform(BENCH_TRAIN)
    for name in ("mi250.csv", "h100.csv"):
        shutil.copy(copy / "mine.csv", copy / name)

    export_small_model(copy / "mpt-7b")
    # An adapter in a PEFT folder, which fits any model of these sizes, and in a run.
    settings = TrainConfig(init_from="any", lora_rank=2)
    write_random(copy / "runs/a", SMALL_CONFIG, settings, seed=0)
    peft.import_(copy / "runs/a", copy / "runs/lora-demo", base=str(copy / "mpt-7b"))


SMALL_CONFIG = MPTConfig(
    d_model=32, n_heads=4, n_layers=2, vocab_size=320, max_seq_len=32, alibi=True, no_bias=True
)


def export_small_model(folder) -> None:
    """A Hugging Face folder of a model as small as the commands are made here."""
    hf.export(MPT(SMALL_CONFIG), folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tokenizer_name": "bytes"}))


# Commands without torch, which need no run.
QUICK = ("plan.py", "planning.", "flops.py")


# Commands that are tested elsewhere, or cannot run here.
FINETUNED = "tests/lessons/test_finetuned.py"
SERVED = "test_a_server_answers_its_own_example below"
STORED = "tests/text/test_from_a_store.py"
ELSEWHERE = {
    "make elastic": "tests/lessons/test_elastic.py",
    "make bundle": "tests/lessons/test_bundle.py",
    "make setup-lessons": "make train begins with it: tests/test_install.py",
    "python -m lessons 3": "tests/lessons/test_workshop.py",
    "python -m lessons check 3": "tests/lessons/test_workshop.py",
    "make finetune": FINETUNED,
    "python -m lessons.finetuned runs/demo runs/lora-demo": FINETUNED,
    "python -m lessons.spectrum runs/lora-demo": FINETUNED,
    "python -m weights.peft merge runs/lora-demo runs/whole": "tests/weights/test_peft.py",
    "python fsdp_train.py configs/lora_demo.py": FINETUNED,
    "python serve.py runs/demo --runs=runs": "the next command but one has this flag",
    "python serve.py runs/demo --jobs=jobs": "the next command has this flag",
    "python serve.py runs/demo --runs=runs --jobs=jobs": SERVED,
    "python -m web.worker jobs": "tests/web/test_jobs.py",
    'python -m web.worker jobs --slurm --nproc=8 --most=20 --sbatch_args="--partition=gpu"': (
        "tests/web/test_slurm_jobs.py"
    ),
    "python serve.py runs/demo --adapters=runs --keys=keys.txt --host=0.0.0.0": SERVED,
    "pip install obstore": "it needs internet",
    "aws s3 cp --recursive data/my s3://bucket/my": STORED,
    "python -m text.fetch s3://bucket/my /scratch/tokens": STORED,
    "python fsdp_train.py configs/demo.py --dataset='my/*.txt' --tokenizer=bpe-4096 "
    "--data_dir=s3://bucket/my": STORED,
    "python -m bench serve": "test_the_benchmark_of_the_server below",
    "python -m bench serve --shapes=2048x24 --engine=32": "tests/bench/test_bench_serve.py",
    BENCH_TRAIN: "the fixture `runs`",
    "python -m bench attention": "tests/bench/test_bench_attention.py",
    "python -m bench beside": "tests/bench/test_bench_beside.py",
    "torchrun --nproc_per_node 2 -m bench machine": "tests/bench/test_bench_machine.py",
    "python -m fast.flash_attention --tune": "it needs a GPU",
    "python -m planning.calibrate results.csv machine.json": "it refuses a CPU",
    "torchrun --nproc_per_node 2 -m lifecycle.watchdog": "it ends with an error, on purpose",
    "torchrun --nproc_per_node 4 -m bench machine": "README has it with 2 ranks",
}
# A reader's own file or run on the pages of folders, and what it is in the copy.
STANDS_FOR = {
    "results.csv": "mine.csv",
    "mine.csv theirs.csv": "mi250.csv h100.csv",
    "export runs/demo demo-hf": "export runs/demo exported",
    "demo-hf": "mpt-7b",
    "runs/mpt-7b": "runs/from-mpt-7b",
    "step-200": "step-1",
    "data/stdlib-bpe-4096/*.bin": "data/small/train-00000.bin",
    "my/c4/train/index.json": "tests/text/mds/raw/index.json",
    "s3://bucket/runs/my1b": "memory://",
    "s3://bucket/folder": "memory://",
    "--track=wandb": "--track=tensorboard",
}
RUN_HERE = ("python", "torchrun")
PROGRAMS = [c for c in COMMANDS if c.split()[0] in RUN_HERE and c not in ELSEWHERE]
QUICK_PROGRAMS = [c for c in PROGRAMS if any(words in c for words in QUICK)]
SLOW_PROGRAMS = [c for c in PROGRAMS if c not in QUICK_PROGRAMS]
OF_FOLDERS = sorted(
    command
    for command in commands_in(command_lines(FOLDER_PAGES)) - {*COMMANDS, *ELSEWHERE}
    if command.split()[0] in RUN_HERE
)
LONG = "python -m fast.flash_attention"  # in the interpreter


@pytest.mark.parametrize("command", QUICK_PROGRAMS)
def test_a_command_that_answers_at_once(command, copy):
    run_well([sys.executable, *shrunk(command)[1:]], copy)


@pytest.mark.slow
@pytest.mark.parametrize("command", SLOW_PROGRAMS)
def test_command(command, perform, copy, runs):
    for name in re.findall(r"--run_dir=(runs/(?:hot|rope))", command):
        shutil.rmtree(copy / name)  # the reader has not trained it yet
    perform(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[pytest.mark.long] * (c == LONG)) for c in OF_FOLDERS]
)
def test_command_of_a_folders_page(command, perform, runs):
    for word, in_the_copy in STANDS_FOR.items():
        command = command.replace(word, in_the_copy)
    perform(command)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c, where in ELSEWHERE.items() if where == SERVED])
def test_a_server_answers_its_own_example(command, copy, runs):
    (copy / "keys.txt").write_text("KEY-of-a-reader-0001\n")
    words = [sys.executable, *words_of(command)[1:], "--port=0"]
    server = subprocess.Popen(
        words, cwd=copy, env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    server.stdout.readline()
    example = server.stdout.readline().replace("KEY", "KEY-of-a-reader-0001")
    printed = run_well(["bash", "-c", example], copy)
    server.terminate()
    assert server.wait(PATIENCE) == 0
    assert json.loads(printed)["object"] == "text_completion"


@pytest.mark.slow
def test_the_benchmark_of_the_server(perform):
    assert "engine, 2 rows" in perform("python -m bench serve --texts=2 --turns=1 --rows=2")


def test_the_flags_of_finetuning_are_settings_and_its_prompt_is_what_training_reads():
    """Bash makes line breaks of its \\n, and the text is ChatML's, up to the answer."""
    page = (ROOT / "lessons/finetuning.md").read_text()
    flags = shlex.split("".join(re.findall(r"^    (--.*\n)", page, re.MULTILINE)))
    for name in ("demo", "mpt1b", "mpt7b_mi250"):
        _, cfg = load([str(ROOT / f"configs/{name}.py"), *flags], MPTConfig, TrainConfig)
        assert (cfg.lora_rank, cfg.data_format, cfg.init_from) == (8, "chat", "runs/NAME")
    (command,) = [c for c in commands_in(command_lines(page)) if "<|im_start|>" in c]
    words = dict(word.split("=", 1) for word in words_of(command) if "=" in word)
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    (turn,) = chat.turns_of({"messages": messages}, chat.load_template(""))
    assert words["--prompt"] == turn.read and turn.written == "4" + words["--stop"] + "\n"


def test_a_command_names_configs_targets_and_scripts_that_exist():
    """What runs is tested above, and the scripts of sbatch in test_slurm_scripts.py."""
    configs = set(re.findall(r"configs/\w+\.py", " ".join([*COMMANDS, *OF_FOLDERS])))
    assert not [name for name in configs if not (ROOT / name).exists()]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in set(COMMANDS) - set(PROGRAMS) - set(ELSEWHERE):
        if command.startswith("make "):
            assert command.split()[1] in targets, command
            continue
        form = r"sbatch --nodes=\d+ (?:--signal=\S+ )?(slurm/\S+) configs/\S+.*"
        assert (ROOT / re.fullmatch(form, command)[1]).exists()


OF_OTHERS = {"pip", "venv", "ensurepip", "pytest", "gpu", "torch.distributed.run"}


def test_every_program_that_the_source_names_is_there():
    """As in messages, which say what to run."""
    missing = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]:
        if path.parent.name == "tests":
            continue
        source = path.read_text(encoding="utf-8")
        modules = set(re.findall(r"-m (bench [a-z]\w*|[a-z][\w.]*\w)", source)) - OF_OTHERS
        places = {ROOT / module.replace(" ", "/").replace(".", "/") for module in modules}
        missing += [p for p in places if not p.is_dir() and not p.with_suffix(".py").exists()]
        names = re.findall(r"(?:python|per_node[ =]\d+) ([\w/]+\.py)", source)
        missing += [ROOT / name for name in names if not (ROOT / name).exists()]
    assert not missing


# --- The form of README.md


def test_no_prompt_of_ours_ends_with_a_space():
    """A space is the first character of the next token: after "def " a model writes oddities."""
    programs = "".join((ROOT / name).read_text() for name in ("Makefile", "generate.py"))
    prompts = re.findall(r"""--prompt=(["'])(.*?)\1""", PAGES + FOLDER_PAGES + programs)
    assert len(prompts) > 8
    assert not [prompt for _, prompt in prompts if prompt.endswith(" ")]


def test_the_readme_begins_with_the_two_commands():
    """And is a page that one reads."""
    assert len(README.splitlines()) <= 120
    first = [line.split("  #")[0].strip() for line in BLOCKS[:2]]
    assert first == ["make train", "make test"]


def test_the_tree_in_the_readme_lists_every_file_of_the_root_and_every_folder():
    """And there is a link to the page of each folder."""
    (tree,) = re.findall(r"```\n(nano\.py.*?)```", README, re.DOTALL)
    listed = set(re.findall(r"^(\w+(?:\.py|/))", tree, re.MULTILINE)) | {"tests/"}
    files = {path.name for path in ROOT.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")}
    assert listed == files | folders | {"configs/", "slurm/", "tests/"}
    pages = {f"{folder}README.md" for folder in folders}
    assert pages <= set(re.findall(r"\]\(([\w./]+)\)", README))


# --- Names of files and of what is in them


MARKDOWN = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if ".venv" not in path.parts and path.name != "CHANGES.md"
]
OF_USERS = ("runs/", "my/", "data/")


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(path):
    """Names with a folder, from the root or from the page. A name alone may be a user's file."""
    page = path.read_text(encoding="utf-8")
    page = re.sub(r"`\S+` at [0-9a-f]{7}", "", page)  # what made a table then, and is gone
    in_code = re.findall(r"`((?:\w+/)+[a-z]\w*\.(?:py|md|sbatch|png|csv))`", page)
    links = re.findall(r"\]\(([\w./]+)\)", page)
    names = [name for name in in_code + links if not name.startswith(OF_USERS)]
    missing = [n for n in names if not (ROOT / n).exists() and not (path.parent / n).exists()]
    assert not missing


@pytest.mark.parametrize("page", [README, CONTRIBUTING, GLOSSARY], ids=["README", "CON", "GLOSS"])
def test_every_file_without_a_folder_that_a_page_names_exists(page):
    names = set(re.findall(r"`([A-Za-z]\w*\.(?:py|md|txt))[`: ]", page))
    assert names and all((ROOT / name).exists() for name in names), names


REFERENCE = r"`((?:\w+/)*\w+\.py)::(\w+)(?:\.(\w+))?`"  # `file.py::name` or `file.py::Class.name`


@cache
def names_in(path: str) -> dict[str, set[str]]:
    """What a file defines at its top level, each with the names that a class defines inside."""
    return defined(ast.parse((ROOT / path).read_text(encoding="utf-8")).body)


def defined(body) -> dict[str, set[str]]:
    """{name: names inside} of the functions, classes and variables of a block."""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = set(defined(node.body))
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = set()
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: set() for target in targets if isinstance(target, ast.Name)}
    return found


REFERENCES = sorted(set(re.findall(REFERENCE, README + READING + CONTRIBUTING + GLOSSARY)))


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda names: "-".join(names).rstrip("-"))
def test_every_name_with_its_file_exists(reference):
    file, name, inside = reference
    assert (ROOT / file).exists()
    assert name in names_in(file)
    assert not inside or inside in names_in(file)[name]


# --- The newcomer's command


@pytest.mark.slow
def test_make_train_from_a_clone(copy, tmp_path):
    """With the torch that is installed, and a short run."""
    project = tmp_path / "project"
    shutil.copytree(copy, project, ignore=shutil.ignore_patterns("runs", "data"))
    small = "--max_steps=3 --warmup_steps=1 --eval_tokens=256 --max_tokens=20000"
    printed = run_well(["make", "train", f"PYTHON={sys.executable}", f"ARGS={small}"], project)
    expected = ["torchrun --rdzv-backend=c10d", "step 3/3", "validation loss"]
    for words in [*expected, "before training", "step-3", "Next"]:
        assert words in printed, words
    assert os.path.exists(project / "runs/demo/loss.png") or "needs matplotlib" in printed
