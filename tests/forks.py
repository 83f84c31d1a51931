"""Programs in forks of one process that has imported torch: seconds instead of minutes.

    forks = Forks(ROOT)
    status, out, err = forks(["-m", "lifecycle.plot", "runs/demo"], folder)
    status, out, err = forks(["tensor_parallel.py"], folder, ranks=2)

Each is started as `python WORDS` in `folder`: its own modules are imported anew, from the root.
Several ranks find each other as under torchrun.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import PATIENCE, clean_environment

from launch.pool import free_port, torchrun_variables


class Forks:
    """The process that forks. root: the project, or a copy of it. variables: more for programs."""

    def __init__(self, root, **variables):
        self.folder = tempfile.TemporaryDirectory()
        reader, self.writer = os.pipe()  # a pipe that nobody reads
        os.close(reader)
        command = [sys.executable, __file__, str(root), str(self.writer)]
        env = clean_environment() | {"PYTHONPATH": str(root)} | variables
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=env, pass_fds=[self.writer])

    def __call__(self, words, folder, read=True, ranks=1):
        """Exit status, output, errors. read=False: the reader of the output is gone.

        The status of several ranks is 0 if all have ended with it.
        """
        port = free_port()
        places = [torchrun_variables(rank, ranks, port) for rank in range(ranks)]
        out, err = (Path(self.folder.name, name) for name in ("out", "err"))
        for path in (out, err):
            path.write_text("")
        case = {
            "words": words,
            "folder": str(folder),
            "out": str(out) if read else None,
            "err": str(err),
            "places": places if ranks > 1 else [{}],
        }
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        return status, out.read_text(), err.read_text()

    def stop(self):
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        os.close(self.writer)
        self.folder.cleanup()


def import_torch(root: str) -> None:
    """And all else that programs import, but nothing of the project."""
    sys.path[0] = root
    import bench.train  # noqa: F401
    import evaluation.zero_shot  # noqa: F401
    import generate  # noqa: F401
    import lessons.elastic  # noqa: F401

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(root + "/") and not file.startswith(sys.prefix) and name != "__main__":
            del sys.modules[name]


def serve(unread: int) -> None:
    """Run each command that comes, a line of JSON, in forks, and answer with an exit status."""
    for line in sys.stdin:
        case = json.loads(line)
        children = []
        for variables in case["places"]:
            child = os.fork()
            if child == 0:
                os.environ.update(variables)
                be_a_program(case, unread)
                return
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next(filter(None, statuses), 0), flush=True)


def be_a_program(case: dict, unread: int) -> None:
    """Run a command in this process."""
    signal.alarm(2 * PATIENCE)  # one that hangs ends
    os.chdir(case["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a program that reads its input ends
    appending = os.O_WRONLY | os.O_APPEND
    os.dup2(os.open(case["out"], appending) if case["out"] else unread, 1)
    os.dup2(os.open(case["err"], appending), 2)
    start(case["words"])


def start(words: list[str]) -> None:
    """As `python WORDS` does."""
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import_torch(sys.argv[1])
    gc.freeze()  # else each fork collects all objects of torch when it ends: a second
    serve(int(sys.argv[2]))
