"""evaluation/tasks.py, hub.py: wording, examples, rows of the Hub, tasks from a text, bad files."""

import json

import pytest
from conftest import refusal
from conftest import write_lines as write

from evaluation import hub as icl_hub
from evaluation import tasks as icl_tasks
from evaluation.tasks import MakeConfig, continuations, load

ICE = {"query": " Question: Ice is \n", "choices": ["cold ", "  hot"], "gold": 0}


def test_a_name_is_looked_for_in_the_data_folder_and_gets_its_delimiter(tmp_path):
    write(tmp_path / "piqa.jsonl", ICE)
    schema = {"context_options": ["a ", " b"], "continuation": "c ", "gold": 0}
    write(tmp_path / "winograd_wsc.jsonl", schema)
    mine = write(tmp_path / "mine.jsonl", ICE, "", ICE)
    (tmp_path / "notes.txt").write_text("some words")
    tasks = load(f"piqa,winograd,{mine},notes.txt", str(tmp_path))
    assert [(t.name, t.kind, len(t.items)) for t in tasks] == [
        ("piqa", "multiple_choice", 1),
        ("winograd", "schema", 1),
        ("mine", "multiple_choice", 2),
        ("notes", "text", 0),
    ]
    assert tasks[0].items[0].contexts[0] == "Question: Ice is\nAnswer:"
    assert tasks[2].items[0].contexts[0] == "Question: Ice is"
    assert (tasks[1].items[0].contexts, tasks[1].items[0].continuations) == (["a", "b"], [" c"] * 2)
    assert all(task.harness == task.items for task in tasks[:3])
    assert tasks[3].text == "some words"


def test_a_task_is_the_text_that_training_reads(tmp_path):
    """Without a byte order mark, with one kind of line ends; no line ends at U+2028."""
    text = "one\u2028still one\ntwo\x0c\x85\n"
    (tmp_path / "a.txt").write_bytes(("\ufeff" + text.replace("\n", "\r\n")).encode())
    (task,) = load(str(tmp_path / "a.txt"))
    assert task.text == text
    row = json.dumps(ICE | {"query": "a\u2028\x85b"}, ensure_ascii=False)
    (tmp_path / "b.jsonl").write_bytes(f"\ufeff{row}\r\n\r\n{row}".encode())
    (task,) = load(str(tmp_path / "b.jsonl"))
    assert [item.contexts[0] for item in task.items] == ["a\u2028\x85b"] * 2
    for name in ("A.TXT", "c.jsonl"):  # U+FFFD in its place would be scored
        (tmp_path / name).write_bytes("größe and so on\n".encode("latin-1"))
        message = refusal(load, str(tmp_path / name))
        assert f"{name} is not UTF-8 text: byte 0xf6 at offset 2" in message


def letters(n):
    """n different questions."""
    return [{"query": f"Q{i}", "choices": [f"yes{i}", f"no{i}"], "gold": i % 2} for i in range(n)]


def test_examples_are_others_with_their_answers_and_the_same_each_time(tmp_path):
    path = write(tmp_path / "a.jsonl", *letters(12))
    (one,), (two,), (other,) = (load(path, shots=3, seed=seed) for seed in (0, 0, 1))
    assert one.items == two.items and one.digest == two.digest != other.digest
    for number, item in enumerate(one.items):
        *examples, question = item.contexts[0].split("\n")
        assert question == f"Q{number}" and len(set(examples)) == 3
        right = {f"Q{i} {'no' if i % 2 else 'yes'}{i}" for i in range(12) if i != number}
        assert set(examples) <= right
    first_examples = {item.contexts[0].partition("\n")[0] for item in one.items}
    assert len(first_examples) > 3  # items have different examples
    (few,) = load(path, shots=3, limit=2)
    assert few.items == one.items[:2]  # the examples come from all items
    twins = write(tmp_path / "twins.jsonl", *letters(4), *letters(4))
    (task,) = load(twins, shots=3)
    for item in task.items:
        assert item.example.count("Q") == 4
        assert len(set(item.example.split("\n"))) == 4
    assert "there are 4 different items" in refusal(load, twins, shots=4)


# --------------------------------------------------------------------------------------------------
# The Hub: original rows, the (context, continuation) pairs that they become, and the right one

ORIGINALS = {  # "context|continuation" of each choice
    "arc_easy": (
        {
            "question": "What is hot?",
            "choices": {"text": ["Ice", "Fire"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        ["Question: What is hot?\nAnswer:| Ice", "Question: What is hot?\nAnswer:| Fire"],
        1,
    ),
    "boolq": (
        {"passage": "Ice is cold.", "question": "is ice hot", "label": 0},
        [
            "Passage: Ice is cold.\nQuestion: is ice hot?\nAnswer:| no",
            "Passage: Ice is cold.\nQuestion: is ice hot?\nAnswer:| yes",
        ],
        0,
    ),
    "hellaswag": (
        {
            "activity_label": "Cooking",
            "ctx_a": "A man  cooks.",
            "ctx_b": "he",
            "label": "1",
            "endings": ["sits [step] down.", "eats [title] it."],
        },
        ["Cooking: A man cooks. He| sits down.", "Cooking: A man cooks. He| eats. it."],
        1,
    ),
    "piqa": (
        {"goal": "boil water ", "sol1": "Heat it.", "sol2": "Cool it. ", "label": 0},
        ["Question: boil water\nAnswer:| Heat it.", "Question: boil water\nAnswer:| Cool it."],
        0,
    ),
    "winograd": (
        {
            "text": "The man lost to the boy because he was slow.",
            "pronoun": "he",
            "pronoun_loc": 32,
            "options": ["The man", "The boy"],
            "label": 0,
        },
        [
            "The man lost to the boy because the man| was slow.",
            "The man lost to the boy because the boy| was slow.",
        ],
        0,
    ),
    "winogrande": (
        {
            "sentence": "Ann helped Joan, so _ was glad.",
            "option1": "Ann",
            "option2": "Joan",
            "answer": "2",
        },
        ["Ann helped Joan, so Ann| was glad.", "Ann helped Joan, so Joan| was glad."],
        1,
    ),
    "lambada": ({"text": "He took his old hat"}, ["He took his old| hat"], 0),
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`hub(name, rows)` puts a data set into a local folder as on the Hub, for `datasets`."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)

    def lay_out(name, rows):
        source = icl_hub.SOURCES[name]
        folder = tmp_path / source.path
        folder.mkdir(parents=True)
        lines = ["---", "configs:", f"- config_name: {source.subset or 'default'}", "  data_files:"]
        for split in ("train", "validation", "test"):
            write(folder / f"{split}.jsonl", *(rows if split == source.split else rows * 2))
            lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (folder / "README.md").write_text("\n".join([*lines, "---", ""]))

    return lay_out


@pytest.mark.parametrize("name", ORIGINALS)
def test_original_rows_become_questions(name, hub):
    row, pairs, gold = ORIGINALS[name]
    hub(name, [row])
    (task,) = load(name)
    (item,) = task.items
    found = list(map("|".join, zip(item.contexts, item.continuations, strict=True)))
    assert (found, item.gold) == (pairs, gold)


def test_a_possessive_pronoun_and_the_begin_of_a_sentence():
    row = {"text": "Ann saw Joan. Her hat was red.", "pronoun": "Her", "pronoun_loc": 14}
    item = icl_hub.winograd(row | {"options": ["The girl", "Ann"], "label": 1})
    assert item["context_options"] == ["Ann saw Joan. The girl's", "Ann saw Joan. Ann's"]
    assert item["continuation"] == " hat was red."


@pytest.fixture(scope="module")
def lm_eval_tasks():
    pytest.importorskip("lm_eval", reason="pip install -r requirements-peers.txt")
    from lm_eval.tasks import TaskManager

    return TaskManager()


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_other_wording_is_lm_evals_own(name, hub, lm_eval_tasks):
    """What lm-eval's own task asks when it is given the same original row."""
    hub(name, [ORIGINALS[name][0]])
    (task,) = load(name)
    ours = list(zip(task.harness[0].contexts, task.harness[0].continuations, strict=True))
    their_name = {"winograd": "wsc273", "lambada": "lambada_openai"}.get(name, name)
    (theirs,) = lm_eval_tasks.load([their_name])["tasks"].values()
    theirs.build_all_requests(limit=1, rank=0, world_size=1)
    assert [tuple(request.args) for request in theirs.instances] == ours


# --------------------------------------------------------------------------------------------------
# User errors, tasks from a text


WRONG_LINES = [  # test_fuzz.py has damaged ones
    (ICE | {"choices": []}, "choices must list two or more"),
    (ICE | {"choices": ["a", " "]}, "choices holds an empty text"),
    (ICE | {"choices": ["a", 1]}, "choices must be text"),
    (ICE | {"gold": 2}, "gold is 2, expected 0 to 1"),
    (ICE | {"gold": -1}, "gold is -1"),
    (ICE | {"gold": True}, "gold is True"),
    ({"query": "a"}, "exactly one kind"),
    ({"context": "a", "continuation": " "}, "continuation holds an empty text"),
    ({"context": "a", "continuation": "b"}, "language_modeling"),  # another kind
]


@pytest.mark.parametrize("line, expected", WRONG_LINES, ids=str)
def test_a_wrong_line_is_named(tmp_path, line, expected):
    message = refusal(load, write(tmp_path / "a.jsonl", ICE, line))
    assert "a.jsonl" in message and "line 2" in message and expected in message


def test_a_task_that_is_not_there(tmp_path):
    for names, data, expected in (
        ("hellaswg", "", "did you mean 'hellaswag'?"),
        ("xyzzy", "", "choices: all, arc_challenge"),
        ("nothing.jsonl", "", "no file 'nothing.jsonl'"),
        ("nothing.jsonl", str(tmp_path), "neither here nor in"),
        ("piqa", "nowhere", "no folder 'nowhere'"),
        (write(tmp_path / "empty.jsonl"), "", "is empty"),
        (write(tmp_path / "empty.txt"), "", "is empty"),
        (",".join([write(tmp_path / "a.jsonl", ICE)] * 2), "", "names a twice"),
    ):
        assert expected in refusal(load, names, data)


def test_continuations_are_of_the_text_and_only_one_is_real():
    text = " ".join(f"word{i} and" for i in range(2000))
    rows, again, others = (continuations(text, MakeConfig(200, seed)) for seed in (3, 3, 4))
    assert rows == again != others
    golds = [row["gold"] for row in rows]
    for gold in range(4):  # 50 each is expected; 30 is 3.3 standard deviations below
        assert 30 < golds.count(gold) < 70
    for row in rows:
        assert len(set(row["choices"])) == 4
        assert all(choice in text for choice in row["choices"])
        follows = [f"{row['query']} {choice}" in text for choice in row["choices"]]
        assert follows == [number == row["gold"] for number in range(4)]
    assert "too few" in refusal(continuations, "a few words", MakeConfig())


def test_the_program_makes_a_task_of_a_file_or_of_prepared_data(tmp_path, tiny_data, capsys):
    (tmp_path / "a.txt").write_text(" ".join(f"word{i}" for i in range(500)))
    made = set()
    for source in (str(tmp_path / "a.txt"), str(tiny_data)):
        for flag in ("--seed=0", "--seed=1", "--context=20", "--length=30"):  # each changes it
            icl_tasks.main([source, str(tmp_path / "out.jsonl"), "--n=7", "--choices=3", flag])
            made.add((tmp_path / "out.jsonl").read_text())
            (task,) = load(str(tmp_path / "out.jsonl"))
            assert len(task.items) == 7
            assert len(task.items[0].contexts) == 3
    assert "7 questions with 3 choices" in capsys.readouterr().out and len(made) == 8
    assert "no text in 'nothing'" in refusal(icl_tasks.main, ["nothing", "out.jsonl"])
    assert "choices must be " in refusal(icl_tasks.main, ["a.txt", "out.jsonl", "--choices=1"])


KINDS = {
    "choices": letters(4),
    "schema": [
        {"context_options": [f"Ann{i}", f"Joan{i}"], "continuation": "left.", "gold": 0}
        for i in range(4)
    ],
    "context": [{"context": f"Once upon {i}", "continuation": "time"} for i in range(4)],
}


@pytest.mark.parametrize("delimiter", ["\n", "\nAnswer: ", "\nAnswer:", " = ", "\t", " "])
@pytest.mark.parametrize("kind", KINDS)
def test_a_delimiter_of_ones_own(tmp_path, kind, delimiter):
    """It stands between question and answer, also in examples; an answer begins with its space."""
    path = write(tmp_path / "a.jsonl", *KINDS[kind])
    (task,) = load(path, delimiter=delimiter)
    (plain,) = load(path)
    for item, bare in zip(task.items, plain.items, strict=True):
        for i, context in enumerate(item.contexts):
            answer = bare.continuations[i].removeprefix(" ")
            assert item.continuations[i] == " " * delimiter.endswith(" ") + answer
            whole = bare.contexts[i] + delimiter + answer
            assert context + item.continuations[i] == whole
    (shown,) = load(path, delimiter=delimiter, shots=1)
    assert shown.items[0].contexts[0].count(delimiter.rstrip(" ")) >= 2


def test_flags_of_questions_are_refused_for_a_text(tmp_path):
    """Beside questions a text may stand."""
    (tmp_path / "b.txt").write_text("some words")
    questions = write(tmp_path / "a.jsonl", *letters(3))
    for flag in ({"shots": 1}, {"delimiter": "\n"}):
        assert f"{[*flag][0]} sets nothing" in refusal(load, str(tmp_path / "b.txt"), **flag)
    assert len(load(f"{questions},{tmp_path / 'b.txt'}", shots=1)) == 2
