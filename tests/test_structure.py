"""The rules of CONTRIBUTING.md that a program can check: imports, folders, short functions."""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys

import pytest
from conftest import ROOT, flags_for, rooms_on_path

# Each may import those before it. Names with a slash are folders. Some are only planned, as web/.
ORDER = """
    program launch/ config storage/ devices flops planning/ fast/ attention loss model text/ data
    optim processes tensor_parallel pipeline lora parallel checkpoint
    weights/ evaluation/ lifecycle/ serving/ web/
    fsdp_train nano generate plan serve bench/ lessons/
""".split()
# The one exception: a model card draws the curve of a run.
LATER = {"weights.card": {"lifecycle.plot", "lifecycle.runlog"}}
# Imported by bench, lessons and tests alone.
PROGRAMS = ["fsdp_train", "generate", "nano", "plan", "serve"]
NO_LIMIT = ["bench", "lessons"]  # one program a file
PARTS = [name for name in ORDER if not name.endswith("/")]
ROOMS = [name.rstrip("/") for name in ORDER if name.endswith("/")]

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ROOT_FILES = sorted(ROOT.glob("*.py"))
ROOM_PATHS = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
FILES = ROOT_FILES + sorted(f for room in ROOM_PATHS for f in room.glob("[a-z]*.py"))
DOORS = sorted(room / "__main__.py" for room in ROOM_PATHS if (room / "__main__.py").exists())


def module_of(path) -> str:
    """ROOT/text/shards.py -> text.shards"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def place_of(module: str) -> str:
    """The entry of ORDER: text.shards -> text/, loss -> loss"""
    name = module.split(".")[0]
    return f"{name}/" if name in ROOMS else name


OURS = {module_of(path): path for path in FILES + DOORS}


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path) -> set[str]:
    """All modules that a file imports, in functions too. `from text import shards`: text.shards."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: no relative imports"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & set(OURS) or {node.module}
    return names


def ours(path) -> set[str]:
    """Those of them that are in this project."""
    return {name for name in imported(path) if place_of(name) in ORDER}


# --- The order


def test_imports_only_point_to_what_stands_earlier():
    for path in FILES:
        if path.stem == "install":  # it makes the virtual environment
            assert {name.split(".")[0] for name in imported(path)} <= sys.stdlib_module_names
            continue
        here = place_of(module_of(path))
        assert here in ORDER, f"{path.name} is new: give it its place in ORDER"
        earlier = ORDER[: ORDER.index(here)] + [here] * here.endswith("/")
        allowed = LATER.get(module_of(path), set())
        later = {name for name in ours(path) - allowed if place_of(name) not in earlier}
        assert not later, f"{module_of(path)} imports {sorted(later)}, which stand later in ORDER"


def test_programs_are_imported_by_no_part():
    for path in FILES:
        if place_of(module_of(path)) not in ("bench/", "lessons/"):
            assert not {place_of(name) for name in ours(path)} & {*PROGRAMS, "install"}, path


def test_no_circles_inside_a_room():
    """Take away, again and again, the files that import none of the others."""
    for room in ROOM_PATHS:
        left = {
            module_of(path): {name for name in ours(path) if name.startswith(f"{room.name}.")}
            for path in room.glob("[a-z]*.py")
        }
        while left:
            free = [name for name, needs in left.items() if not needs & (left.keys() - {name})]
            assert free, f"these import each other in a circle: {sorted(left)}"
            for name in free:
                del left[name]


def test_the_distributed_machinery_is_outside_of_the_model():
    """The model does not know that it is distributed."""
    for name in ("model", "attention", "loss", "optim", "data"):
        assert "torch.distributed" not in OURS[name].read_text()


# --- The rooms


def test_few_files_in_the_root_and_in_a_room():
    assert len(ROOT_FILES) <= 21
    for room in ROOM_PATHS:
        assert room.name in ROOMS
        assert room.name in NO_LIMIT or len(list(room.glob("[a-z]*.py"))) <= 12


def test_there_is_no_drawer_for_odds_and_ends():
    names = {path.stem for path in FILES} | {room.name for room in ROOM_PATHS}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


@pytest.mark.parametrize("room", ROOM_PATHS, ids=lambda room: room.name)
def test_a_room_says_what_it_is_for(room):
    """`__init__.py` holds only a docstring; README.md names each file, and is one screen long."""
    (line,) = tree(room / "__init__.py").body
    assert isinstance(line, ast.Expr) and isinstance(line.value.value, str)
    page = (room / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 60
    missing = [path.name for path in room.glob("[a-z]*.py") if path.name not in page]
    assert not missing, f"{room.name}/README.md lacks {missing}"
    started = set(re.findall(r"(?:python|torchrun[^\n]*?) -m ([\w.]+)", page))
    known = {*OURS, *(path.parent.name for path in DOORS)}
    assert started <= known, started - known


def test_our_names_are_not_those_of_installed_packages():
    """A package that is installed and imports its own `config` would get ours."""
    installed = importlib.metadata.packages_distributions().keys() | sys.stdlib_module_names
    names = {path.stem for path in ROOT_FILES} | {room.name for room in ROOM_PATHS}
    assert not names & installed


def test_every_name_is_found_here_with_all_requirements_installed(tmp_path):
    """From another folder, as spawned processes look them up."""
    names = {path.stem for path in ROOT_FILES} | {room.name for room in ROOM_PATHS}
    code = "import importlib.util as u, sys\nfor n in sys.argv[1:]: print(u.find_spec(n).origin)"
    for line in python("-c", code, *names, cwd=tmp_path).splitlines():
        assert line.startswith(f"{ROOT}/"), line


def test_test_files_lie_where_what_they_test_lies():
    """And no name occurs twice: pytest and spawned processes import them by it."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    folders = {path.parent.name for path in paths} - {"tests"}
    assert folders <= {room.name for room in ROOM_PATHS}
    names = [path.stem for path in paths]
    assert len(names) == len(set(names))


# --- What an import brings in


def python(*words, cwd=ROOT) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=rooms_on_path(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PLAIN_RUN = """
import os, sys
import fsdp_train
print(*sys.modules)
fsdp_train.main(sys.argv[1:])
print(*sys.modules, flush=True)
os._exit(0)
"""
TINY = """--d_model=32 --n_heads=4 --n_layers=2 --vocab_size=260 --max_seq_len=32 --device=cpu
    --global_batch_size=4 --microbatch_size=2 --max_steps=2 --warmup_steps=1 --eval_tokens=100
    --run_dir=run""".split()


def test_the_trainer_brings_in_what_training_uses_and_no_more(tiny_data, tmp_path):
    """Of our files at most 28. A run whose tokens are ready imports nothing that makes tokens."""
    out = python("-c", PLAIN_RUN, *TINY, *flags_for(tiny_data), cwd=tmp_path)
    first, *_, last = out.splitlines()
    for line in (first, last):
        brought = set(line.split()) & set(OURS)
        assert len(brought) <= 28, sorted(brought)
        rooms = {name.split(".")[0] for name in brought if "." in name}
        wanted = {"storage", "text", "launch", "lifecycle", "fast"}
        assert rooms == wanted, sorted(brought)


def test_what_answers_at_once_imports_no_torch():
    light = "program launch.parser config storage.files devices flops plan install text.corpus "
    light += "text.tokenizer text.shards text.sources text.recipe text.prepare data "
    light += "lifecycle.stopping lifecycle.trackers"
    planning = [name for name in OURS if name.startswith("planning.")]
    code = "import importlib, sys\nfor n in sys.argv[1:]:\n    importlib.import_module(n)\n"
    code += "    if 'torch' in sys.modules: sys.exit(n)"
    python("-c", code, *light.split(), *planning)


# --- Each file


def is_guard(node):
    """`if __name__ == "__main__":`, which an import does not enter."""
    is_if = isinstance(node, ast.If) and not node.orelse
    return is_if and ast.unparse(node.test) == "__name__ == '__main__'"


def test_importing_runs_nothing():
    """After the docstring: imports, definitions, constants and the guard; no loops, no calls."""
    imports = (ast.Import, ast.ImportFrom)
    definitions = (*FUNCTIONS, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for path in FILES:
        assert ast.get_docstring(tree(path)), f"{path.name} does not say what it is for"
        for node in tree(path).body[1:]:
            if isinstance(node, ast.Try):  # an import that may fail, with a message
                assert all(isinstance(inner, imports) for inner in node.body)
            else:
                is_fine = is_guard(node) or isinstance(node, imports + definitions)
                assert is_fine, f"{path.name}, line {node.lineno}"


@pytest.mark.parametrize("path", DOORS, ids=module_of)
def test_nothing_that_is_sent_to_other_processes_lives_in_a_door(path):
    """Spawned processes could not import it: their own `__main__` is another file."""
    assert is_guard(tree(path).body[-1])
    kinds = (ast.ClassDef, *FUNCTIONS)
    defined = {node.name for node in tree(path).body if isinstance(node, kinds)}
    assert defined <= {"main", "listing"}


def test_environment_variables_are_no_messengers():
    """processes.py sets that of PyTorch's GPU allocator, launch/ those of torchrun.

    And program.py one of OpenMP's, before PyTorch is imported.
    """
    for path in FILES:
        targets = []
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets += getattr(node, "targets", None) or [node.target]
        sets = [target.lineno for target in targets if "os.environ" in ast.unparse(target)]
        may = module_of(path) in ("processes", "launch.pool", "launch.rendezvous")
        assert not sets or may, f"{path.name}, line {sets[0]}"


def test_no_hidden_state():
    """No module variable changes, no code is made of text, modules are found without help."""
    for path in FILES:
        nodes = list(ast.walk(tree(path)))
        assert not [node for node in nodes if isinstance(node, ast.Global)], path
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        assert not {getattr(function, "id", "") for function in called} & {"exec", "eval"}, path
        found = re.search(r"sys\.path(\.\w+\(|\[| [+|]?=)", path.read_text(encoding="utf-8"))
        assert not found, path


def test_one_file_reaches_for_the_internet():
    """It asks for an answer first, and honours HF_HUB_OFFLINE. install.py runs without it."""
    for path in FILES + DOORS:
        libraries = {name.split(".")[0] for name in imported(path)}
        reaches = libraries & {"datasets", "huggingface_hub", "requests", "httpx"}
        reaches |= {"tiktoken"} & libraries if "get_encoding" in path.read_text("utf-8") else set()
        assert not reaches or module_of(path) == "storage.downloads", path


def length(node) -> int:
    """Lines of a definition, without its decorators."""
    return node.end_lineno - node.lineno + 1


def test_functions_are_short():
    """At most 60 lines. Attention's kernels are excepted."""
    for path in FILES + DOORS:
        functions = [node for node in ast.walk(tree(path)) if isinstance(node, FUNCTIONS)]
        long = {node.name for node in functions if length(node) > 60}
        assert not long or path.match("fast/flash_attention.py"), f"{path}: {long}"


def test_lines_are_short():
    """In code and configs, at most 100 characters."""
    for path in [*FILES, *DOORS, *ROOT.glob("configs/*.py")]:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert all(len(line) <= 100 for line in lines), path


@pytest.mark.parametrize("function, limit", [("main", 40), ("train_step", 30)])
def test_the_loop_is_a_recipe(function, limit):
    """Few lines, no functions inside."""
    body = tree(ROOT / "fsdp_train.py").body
    (node,) = (node for node in body if getattr(node, "name", "") == function)
    assert length(node) <= limit
    inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    assert inner == [node]


def classes(path) -> list[ast.ClassDef]:
    """The classes at the top of a file."""
    return [node for node in tree(path).body if isinstance(node, ast.ClassDef)]


def reads(node) -> set[str]:
    """The attributes that code reads, other than in the methods that check settings."""
    if isinstance(node, ast.FunctionDef) and (node.name + "_").startswith("check_"):
        return set()
    names = {node.attr} if isinstance(node, ast.Attribute) else set()
    return names.union(*map(reads, ast.iter_child_nodes(node)))


def test_every_setting_of_every_program_is_read():
    """A flag that nothing reads does nothing. By files that name its class."""
    names = set()
    for path in FILES + DOORS:
        for node in ast.walk(tree(path)):
            is_load = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load")
            is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "classes"
            if is_load or is_list:
                names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    settings = [node for path in FILES + DOORS for node in classes(path) if node.name in names]
    assert len(settings) > 25
    for node in settings:
        users = [tree(path) for path in FILES + DOORS if node.name in path.read_text("utf-8")]
        fields = {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
        assert fields <= set().union(*map(reads, users)), node.name


def test_every_number_of_ranks_says_which():
    """Global, local, data-parallel, tensor, pipeline: `world.rank` alone would be a riddle."""
    world = next(node for node in classes(ROOT / "processes.py") if node.name == "World")
    names = [node.target.id for node in world.body if isinstance(node, ast.AnnAssign)]
    which = ("global_", "local_", "dp_", "tp_", "pp_")
    assert all(name.startswith(which) for name in names if name not in ("device", "timeout"))
    assert {"global_rank", "local_rank", "dp_rank", "dp_size"} <= set(names)


def test_ci_runs_the_quick_and_the_slow_tests_each_once():
    makefile, ci = (ROOT / "Makefile").read_text(), (ROOT / ".ci/run").read_text()
    tiers = ["not slow and not long", "slow and not long", "long"]
    assert re.findall(r'pytest -m "([^"]+)"', makefile) == tiers
    assert re.findall(r"^make (\S+)", ci, re.MULTILINE) == ["test", "test-all"]
