"""The house rules that a program can check: layers, sizes, docstrings, no hidden state."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Each room may import those before it. `environment` makes the virtual environment, so it imports nothing at all.
ORDER = """
    environment program config files startup
    corpus tokenizer shards loss optim launch_table flash_attention
    devices matmuls flops memory decoding speed calibrate
    attention model data lora
    processes parallel pipeline runlog microbatch checkpoint_files checkpoint resume resilience watch tensor_files hf
    plot elastic sampling generate icl_tasks icl_score icl_eval fsdp_train plan_picture plan
    bench_team bench_compare bench_table bench_train bench_attention bench_machine bench serve
""".split()
LIGHT = """
    program config files startup corpus tokenizer shards matmuls memory decoding speed calibrate plan_picture plan
""".split()  # no torch

FILES = sorted(ROOT.glob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """The top names of all modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "there is no package, so no relative import"
            names.add(node.module.split(".")[0])
    return names


@every_file
def test_imports_only_point_up(path):
    assert path.stem in ORDER, f"{path.name} is a new room: give it its place in ORDER"
    ours = imported(path) & set(ORDER)
    earlier = set(ORDER[: ORDER.index(path.stem)]) - {"environment"}
    assert ours <= earlier, f"{path.name} imports {sorted(ours - earlier)}, which stand later in ORDER"


@every_file
def test_a_leaf_imports_nothing_of_ours(path):
    """Leaves of arithmetic stand on each other, Triton's kernels on their table; the first three serve all."""
    leaves = ORDER[ORDER.index("program") : ORDER.index("attention")]
    planning = "devices matmuls flops memory decoding speed calibrate".split()
    if path.stem in leaves:
        others = {"flash_attention": ["launch_table"]} | {name: planning[:i] for i, name in enumerate(planning)}
        assert imported(path) & set(ORDER) <= {"program", "config", "files", *others.get(path.stem, [])}


@every_file
def test_what_answers_at_once_imports_no_torch(path):
    if path.stem in LIGHT:
        assert "torch" not in imported(path)
    if path.stem == "environment":
        assert imported(path) <= set(sys.stdlib_module_names)


def test_the_distributed_machinery_is_outside_of_the_model():
    """The model does not know that it is distributed."""
    for name in ("model", "attention", "loss", "optim", "data"):
        assert "torch.distributed" not in (ROOT / f"{name}.py").read_text()


@every_file
def test_a_docstring_says_how_to_run_it(path):
    docstring = ast.get_docstring(tree(path)) or ""
    assert len(docstring.splitlines()) >= 3, "a line about the concept, then more"
    assert re.search(rf"(python|torchrun|srun) [^\n]*\b{path.name}\b", docstring)


def is_guard(node):
    """`if __name__ == "__main__":`, which an import does not enter."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'" and not node.orelse


@every_file
def test_importing_runs_nothing(path):
    """Below imports there are definitions, constants and the guard: no loops, no calls for their effect."""
    body = tree(path).body
    assert is_guard(body[-1])
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in body[1:-1]:
        if path.stem == "fsdp_train" and is_guard(node):  # a program may speak before its slow imports
            assert [ast.unparse(line) for line in node.body] == ["startup.begin(sys.argv[1:])"]
        elif isinstance(node, ast.Try):  # an import that may fail, with a message
            assert all(isinstance(inner, kinds[:2]) for inner in node.body)
        else:
            assert isinstance(node, kinds), f"{path.name}, line {node.lineno}"


@every_file
def test_no_module_variable_changes(path):
    found = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Global)]
    assert not found, f"`global` in {path.name}, lines {found}"
    calls = {node.func.id for node in ast.walk(tree(path)) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
    assert not calls & {"exec", "eval"}


@pytest.mark.parametrize("function, limit", [("main", 150), ("train_step", 40)])
def test_the_loop_stays_short(function, limit):
    (node,) = (n for n in tree(ROOT / "fsdp_train.py").body if getattr(n, "name", "") == function)
    assert node.end_lineno - node.lineno + 1 <= limit


def test_there_is_no_drawer_for_odds_and_ends():
    assert not {path.stem for path in FILES} & {"utils", "util", "common", "helpers", "misc"}
    assert not list(ROOT.glob("*/__init__.py"))
