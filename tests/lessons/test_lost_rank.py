"""lessons/lost_rank.py: a stopped rank is named, the others end, and the next start resumes."""

import re

import pytest
from conftest import launch

from config import UserError
from lessons import lost_rank


@pytest.mark.long
def test_a_stopped_rank_is_named_and_the_run_resumes(tmp_path):
    """`kill`, which is quicker, is run by tests/test_readme.py."""
    done = launch([], tmp_path, ["stop", "--device=cpu"], program="lessons/lost_rank.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step \d+: SIGSTOP to rank 1$", done.stdout, re.MULTILINE)
    assert re.search(r"ended after [\d.]+ s with status \[75\]", done.stdout)
    assert re.search(r"error: .*rank 1 \(process \d+ on ", done.stdout)
    assert re.search(r"resumed from step-\d+, finished at step \d+ after", done.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_does_not_start_shows_its_last_lines(monkeypatch, capfd):
    """Its data cannot be prepared: the ranks' own error is shown."""
    flags = [*lost_rank.SETTINGS, "--dataset=nowhere.txt"]
    monkeypatch.setattr(lost_rank, "SETTINGS", flags)
    monkeypatch.setattr(lost_rank.signal, "signal", lambda *handler: None)  # pytest keeps its own
    with pytest.raises(UserError, match="the run failed with status 2: a bug in this project"):
        lost_rank.main(["kill", "--device=cpu"])
    assert "nowhere.txt" in capfd.readouterr().out


def test_a_wrong_word_is_one_line(monkeypatch):
    with pytest.raises(UserError, match="kill or stop, not 'murder'"):
        lost_rank.main(["murder"])
    with pytest.raises(UserError, match="ranks is 5"):
        lost_rank.main(["kill", "--ranks=5"])
    monkeypatch.setattr(lost_rank.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="1 GPU: two ranks need two"):
        lost_rank.main(["kill"])
