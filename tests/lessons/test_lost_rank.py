"""lessons/lost_rank.py: a stopped rank is named, the others end, and the next start resumes."""

import re

import pytest
from conftest import launch

from lessons import lost_rank
from program import UserError


@pytest.mark.long
def test_a_stopped_rank_is_named_and_the_run_resumes(tmp_path):
    """`kill`, which is quicker, is run by tests/test_readme.py."""
    done = launch([], tmp_path, ["stop"], program="lessons/lost_rank.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step \d+: SIGSTOP to rank 1$", done.stdout, re.MULTILINE)
    assert re.search(r"error: .*rank 1 \(process \d+ on ", done.stdout)
    assert re.search(r"resumed from step-\d+, finished at step \d+", done.stdout)
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line():
    with pytest.raises(UserError, match="kill or stop, not 'murder'"):
        lost_rank.main(["murder"])
