"""bench/lora.py: adapters by peft are the same step as ours, and the ratios are those of speeds."""

import pytest

from bench import lora
from config import UserError

TINY = """
    --n_layers=1 --d_model=32 --n_heads=2 --max_seq_len=16 --vocab_size=64 --rounds=1 --steps=1
    --threads=1
""".split()


@pytest.mark.slow
def test_three_programs_take_turns_and_compute_the_same_step(capsys):
    pytest.importorskip("peft")
    lora.main([*TINY, "--precision=fp32", "--rslora"])  # lora_rank is the benchmark's own
    printed = capsys.readouterr().out
    assert printed.startswith("fp32, 1 turns of 1 steps, peft with glibc's defaults")
    for name in lora.PROGRAMS:
        assert f"\n| {name} | " in printed
    assert "a step with adapters takes" in printed


def test_other_losses_are_refused():
    losses = {lora.OURS: [4.0, 3.0], lora.FULL: [4.0, 2.5], lora.PEFT: [4.0, 3.00005]}
    lora.require_equal(losses, "fp32")
    for name, other in ((lora.PEFT, [4.0, 3.001]), (lora.FULL, [4.1, 2.5])):
        with pytest.raises(UserError, match="the losses differ by"):
            lora.require_equal(losses | {name: other}, "fp32")


def test_the_table_has_ratios_of_medians():
    rates = {lora.OURS: [90.0, 100.0, 500.0], lora.FULL: [70.0, 80.0, 90.0], lora.PEFT: [50.0]}
    peaks = {lora.OURS: 1 * 10**9, lora.FULL: 3 * 10**9, lora.PEFT: 1.5 * 10**9}
    _, _, ours, full, peft, _, share = lora.table(rates, peaks)
    assert ours == "| adapters | 100 | 1.00 | 1.000 | 1.00 |"
    assert full == "| all weights | 80 | 1.25 | 3.000 | 3.00 |"
    assert peft == "| peft on transformers | 50 | 2.00 | 1.500 | 1.50 |"
    assert share == "a step with adapters takes 0.800 of the time of one without"


@pytest.mark.parametrize("flags, message", [
    ("--alibi=False", "transformers' MPT has ALiBi"),
    ("--lora_last_blocks=1", "remove the flags that change this"),
    ("--lora_rank=0", "leaves nothing to compare"),
    ("--lora_dropout=0.1", "lora_dropout draws other masks in each program"),
    ("--lora_rank=32", "lora_rank 32"),
])  # fmt: skip
def test_bad_input_is_one_clear_line(flags, message):
    with pytest.raises(UserError, match=message) as error:
        lora.main([*TINY, "--precision=fp32", flags])
    assert "\n" not in str(error.value)
