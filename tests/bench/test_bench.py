"""The door to the benchmarks: their figures are for bench/results/, not for a test."""

import pytest


@pytest.mark.parametrize("words", [(), ("trian",)])
def test_no_such_benchmark_is_one_line(python, words):
    wrong = python(*words, program="bench")
    usage = "error: usage: python -m bench train|attention|machine|scaling|compare [config] [--key=value]\n"
    assert (wrong.returncode, wrong.stderr) == (2, usage)


@pytest.mark.slow
def test_each_name_leads_to_its_file(python):
    assert "usage: python -m bench scaling" in python("scaling", program="bench").stderr
    for name, setting in {"train": "--sweep=", "attention": "--head_dims=", "machine": "--seconds="}.items():
        assert setting in python(name, "--help", program="bench").stdout
