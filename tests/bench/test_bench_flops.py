"""bench/flops.py: the closed forms of FLOPs and bytes beside what torch counts."""

import pytest

from bench import __main__ as door
from bench import flops
from config import UserError


def test_check_compares_with_what_torch_counts(capsys):
    shape = "--d_model=64 --n_heads=4 --n_layers=2 --vocab_size=128 --max_seq_len=64"
    door.main(["flops", *shape.split(), "--activation_checkpointing=full"])
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.endswith("%")]
    assert len(rows) == 6 + 6 + 2 + 1 and "full checkpointing" in out
    assert all(line.endswith("  0.00%") for line in rows[:-1])  # FLOPs exactly
    assert abs(float(rows[-1].split()[-1].rstrip("%"))) < 5  # bytes


@pytest.mark.parametrize("flags, message", [("--lora_rank=2", "weights all train")])
def test_bad_input_is_one_clear_line(flags, message):
    with pytest.raises(UserError, match=message) as error:
        flops.main(flags.split())
    assert "\n" not in str(error.value)
