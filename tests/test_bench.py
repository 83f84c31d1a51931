"""The door to the benchmarks: their figures are for benchmarks/, not for a test."""

import pytest


@pytest.mark.parametrize("words", [(), ("trian",)])
def test_no_such_benchmark_is_one_line(python, words):
    wrong = python(*words, program="bench.py")
    usage = "error: usage: python bench.py train|attention|machine|scaling|compare [config] [--key=value]\n"
    assert (wrong.returncode, wrong.stderr) == (2, usage)


def test_each_name_leads_to_its_file(python):
    for name, words in {
        "scaling": "usage: python bench.py scaling",
        "compare": "usage: python bench.py compare",
    }.items():
        assert words in python(name, program="bench.py").stderr
    for name in ("train", "attention", "machine"):
        done = python(name, "--help", program="bench.py")
        assert done.returncode == 0 and "usage:" in done.stdout
