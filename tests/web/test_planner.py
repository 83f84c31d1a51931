"""The planner as a form: plan.py's own answer, or the line in which it refuses."""

import asyncio
import json

import pytest
from conftest import slowly

import plan

pytest.importorskip("fastapi")

from fastapi.testclient import TestClient  # noqa: E402

from web import app, page  # noqa: E402


@pytest.fixture(scope="module")
def client():
    return TestClient(app.build(app.Viewer(60), [], [], 1000))


QUESTIONS = [
    (
        {"model": "mpt7b", "device": "MI250X GCD", "devices": 8, "seq_len": 4096},
        ["configs/mpt7b.py", "--device=MI250X GCD", "--devices=8", "--max_seq_len=4096"],
    ),
    (
        {"model": "mpt1b", "device": "h100,mi250", "devices": 8, "price": 2.5},
        ["configs/mpt1b.py", "--device=h100,mi250", "--devices=8", "--price=2.5"],
    ),
    (
        {"model": "mpt1b", "device": "h100", "sweep_devices": [8, 16], "tokens": 1e9},
        ["configs/mpt1b.py", "--device=h100", "--sweep_devices=8,16", "--tokens=1e9"],
    ),
    slowly(
        {"device": "h100", "devices": 8, "budget": 0.5},
        ["--device=h100", "--devices=8", "--budget=0.5"],
    ),
]


@pytest.mark.parametrize("body, argv", QUESTIONS)
def test_the_form_answers_as_the_program(body, argv, client, capsys, monkeypatch):
    monkeypatch.chdir(page.ROOT)
    answer = client.post("/api/plan", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    plan.main([*argv, "--json"])
    expected = json.loads(capsys.readouterr().out)
    if isinstance(expected, dict):
        others, fixes = expected.pop("others"), expected.pop("would_fit")
        assert found["would_fit"] == fixes
        expected = [expected, *others]
    assert found["rows"] == expected
    plan.main(argv)
    assert found["text"] == capsys.readouterr().out.rstrip("\n")


@pytest.mark.parametrize(
    "body, word",
    [
        ({}, "--device"),
        ({"model": "mpt7b", "device": "abacus"}, "abacus"),
        ({"model": "../../etc/passwd", "device": "h100"}, "passwd"),
        ({"model": "mpt7b", "device": "h100", "devices": 8, "tp": 3}, "--devices="),
        slowly({"model": "mpt70b", "device": "RTX 4090", "devices": 1}, "--devices="),
        ({"model": "mpt7b", "device": "h100", "machine": "frontier"}, "--device=h100"),
        ({"device": "h100", "budget": 7, "sweep_devices": [8]}, "--budget"),
        ({"device": "h100\n--out=x"}, "device"),
        ({"device": "h100", "out": "x"}, "out"),
        ({"device": "h100", "calibrate": "/etc/passwd"}, "calibrate"),
        ({"device": "h100", "devices": True}, "devices"),
        ({"device": "h100", "tokens": -1}, "tokens"),
        ({"device": "h100", "sweep_devices": list(range(1, 99))}, "sweep_devices"),
        ([], "JSON object"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(body, word, client):
    answer = client.post("/api/plan", json=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert word in message
    assert "\n" not in message


def test_choices_can_be_chosen(client):
    choices = client.get("/api/plan/choices").json()
    assert "mpt7b" in choices["models"]
    assert "MI250X GCD" in choices["devices"]
    for device in choices["devices"]:
        assert page.devices.by_name(device).name == device
        page.PlanRequest(device=device)


def test_a_search_ends_in_time(monkeypatch):
    """And leaves no process behind."""
    monkeypatch.setattr(page, "PLAN_SECONDS", 0.01)
    with pytest.raises(page.ApiError, match="takes more than"):
        asyncio.run(page.planned(["configs/mpt70b.py", "--device=h100", "--devices=1024"]))


def test_only_some_may_wait(monkeypatch):
    monkeypatch.setattr(page, "MOST_PLANS", 0)
    client = TestClient(app.build(app.Viewer(60), [], [], 1000))
    answer = client.post("/api/plan", json={"device": "h100"})
    assert answer.status_code == 429
    assert answer.headers["Retry-After"]
