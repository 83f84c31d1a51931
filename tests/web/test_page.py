"""A server without a model, and the page in a real browser.

The last test is the whole story of a user: upload, mend, train, watch, cancel, try, compare.
"""

import html.parser
import json
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
from conftest import PATIENCE, ROOT
from servers import ASK, CHAT, KEY, Served

pytest.importorskip("fastapi")

from finetuning import Place, lines, set_settings  # noqa: E402

from config import MPTConfig, TrainConfig  # noqa: E402
from weights import card  # noqa: E402

MS = 1000 * PATIENCE
LOOKS = [((1280, 860), "light"), ((320, 640), "dark")]  # a size, a theme
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # as in a container


HOSTILE = '<img src=x onerror="document.title=1">'
TASKS = ["constructor", "__proto__", "poems"]


def write_run(folder: Path, n_steps: int, seed: int) -> None:
    """Write the folder of a run that never was, whose loss falls."""
    folder.mkdir(parents=True)
    cfg = TrainConfig(max_steps=n_steps, seed=seed, lr=1e-3 / (1 + seed % 5))
    (folder / "config.json").write_text(json.dumps(asdict(MPTConfig()) | asdict(cfg)))
    row = {"lr": cfg.lr, "grad_norm": 0.5, "batch_hash": None, "skipped": False}
    row |= {"tokens_per_second": 20000.0, "mfu": None, "memory_gb": 1.0, "seconds": 0.4}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, n_steps + 1):
            loss = 3 + 7 * (step + 5 + seed) ** -0.3
            row |= {"step": step, "tokens": step * 8192, "loss": round(loss, 4)}
            file.write(json.dumps(row) + "\n")


def add_step(folder: Path, step: int, loss: float) -> None:
    """The run in a folder has done one more step."""
    path = folder / "metrics.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps({**row, "step": step, "loss": loss}) + "\n")


@pytest.fixture(scope="module")
def runs(tiny_run, tmp_path_factory):
    """A folder of runs: a real one, sound ones, a hostile name, a damaged one, one with scores."""
    folder = tmp_path_factory.mktemp("viewed") / "runs"
    for number, name in enumerate(["team/first", "team/second", HOSTILE, "broken"]):
        write_run(folder / name, 300, number)
    (folder / "broken" / "config.json").write_text("{")
    shutil.copytree(tiny_run, folder / "mine")
    write_run(folder / "long", 5000, 0)
    write_run(folder / "scored", 3, 0)
    tasks = {task: {"acc": 0.5, "chance": 0.25} for task in TASKS}
    (folder / "scored" / "results.json").write_text(json.dumps({"tasks": tasks}))
    return folder


@pytest.fixture(scope="module")
def viewer(runs):
    """A server without a model, which shows these runs to those who have a key."""
    (runs.parent / "keys.txt").write_text(f"{KEY}\n")
    served = Served(runs.parent, "--runs=runs", "--keys=keys.txt", model=None)
    yield served
    assert served.stop() == 0


# --- Without a browser


def test_the_page_needs_no_key_and_what_it_shows_does(viewer):
    status, headers, text = viewer.request("GET", "/", key=None)
    assert status == 200 and text.startswith("<!doctype html>")
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    for path in ("/api/about", "/api/runs", "/v1/models"):
        assert viewer.request("GET", path, key=None)[0] == 401


def test_a_viewer_shows_runs_and_says_that_there_is_no_model(viewer, runs):
    def got(path):
        return json.loads(viewer.request("GET", path)[2])

    assert "mine" in [line["name"] for line in got("/api/runs")["runs"]]
    assert got("/api/about") == {
        "model": None,
        "jobs": False,
        "worker": None,
        "runs": True,
        "chat": False,
    }
    for path, asked in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        status, body = viewer.post(path, asked)
        assert status == 404 and "no model" in body["error"]["message"]
    assert got("/v1/models")["data"] == []
    assert viewer.health() == {"status": "ok"}
    assert viewer.metrics()['mpt_answers_total{path="/api/about",status="200"}'] == 1
    written = card.page(runs / "mine", "mine", card.record_of(runs / "mine"))
    assert viewer.request("GET", "/api/runs/mine/card")[2] == written
    add_step(runs / "mine", 3, 5.0)
    assert got("/api/runs/mine/curve")["last"] == 3


class Loaded(html.parser.HTMLParser):
    """Collects what a page loads, and fails for what the policy forbids in it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert tag != "style" and "style" not in given and (tag != "script" or "src" in given)
        assert not [name for name in given if name.startswith("on")]
        for address in filter(None, (given.get("src"), tag == "link" and given["href"])):
            self.names.add(address)


def test_every_file_of_the_page_is_reachable_and_no_other_one(viewer):
    loaded = Loaded()
    loaded.feed(viewer.request("GET", "/", key=None)[2])
    wanted = {address for address in loaded.names if not address.startswith("data:")}
    on_disk = {f"/static/{path.name}" for path in (ROOT / "web" / "static").iterdir()}
    for address in on_disk:
        status, headers, text = viewer.request("GET", address, key=None)
        assert status == 200 and headers["content-type"].startswith("text/")
        assert headers["x-content-type-options"] == "nosniff"
        wanted |= {f"/static/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert wanted == on_disk - {"/static/index.html"}

    outside = ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "..%5capp.py", "./../app.py"]
    outside += ["", ".", "..", "//etc/passwd", "%2fetc%2fpasswd", "index.html%00", "nothing.js"]
    outside += ["style.css/", "../static/style.css%2f..%2f..%2fapp.py", "x" * 5000]
    for name in outside:
        status, _, text = viewer.request("GET", f"/static/{name}", key=None)
        assert status == 404 and "error" in json.loads(text), name


# --- In a browser


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, or your own."""
    library = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: see requirements-dev.txt"
    )
    path = shutil.which("chromium")
    if not path:
        pytest.skip("needs the program chromium: apt-get install chromium")
    with library.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A tab, which notes all that the console says. key: one that the user has given already."""

    def __init__(self, browser, port, size=LOOKS[0][0], theme="light", key=KEY):
        width, height = size
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, color_scheme=theme)
        if key:
            self.context.add_init_script(f"sessionStorage.setItem('mpt-key', '{key}')")
        self.page = self.context.new_page()
        self.page.set_default_timeout(MS)
        self.url = f"http://127.0.0.1:{port}"
        self.said = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", self.answer)

    def open(self, view):
        """Go to a view of the page."""
        self.page.goto(f"{self.url}/#{view}")
        return self.page

    def answer(self, dialog) -> None:
        """Answer yes if the page asks whether something is to be deleted."""
        if not dialog.message.startswith("Delete "):
            self.said.append(f"dialog: {dialog.message}")
        dialog.accept()

    def errors(self) -> list[str]:
        """What the console said, without the answers of the server that a test provokes."""
        return [text for text in self.said if "the server responded with a status of 4" not in text]


def accessible(page) -> list[str]:
    """What axe-core finds to be wrong, seriously."""
    library = pytest.importorskip("axe_playwright_python")
    page.evaluate((Path(library.__path__[0]) / "axe.min.js").read_text())
    found = page.evaluate("() => axe.run()")["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in serious]


@pytest.mark.slow
def test_a_viewer_asks_for_the_key_and_shows_names_as_text(browser, viewer):
    visit = Visit(browser, viewer.port, key="")
    page = visit.open("runs")
    for key in ("wrong", KEY):
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Continue").click()
        if key == "wrong":
            page.get_by_text("The server does not know this key.").wait_for()
    row = page.get_by_role("row", name=HOSTILE)
    row.get_by_role("checkbox").check()
    page.get_by_label("Choose team/first").check()
    page.locator("#run-chart polyline").nth(1).wait_for(state="attached")
    page.get_by_text("Settings that differ").wait_for()
    assert "damaged" in page.get_by_role("row", name="broken").inner_text()
    assert page.title().startswith("Runs")
    page.get_by_label("Filter").first.fill("team second")
    page.get_by_text("1 of 7 runs").wait_for()
    for view, needs in (("playground", "model"), ("jobs", "jobs")):
        visit.open(view).locator("#missing", has_text=f"no {needs}").get_by_text(
            "python serve.py"
        ).wait_for()
    assert visit.errors() == []


@pytest.mark.slow
def test_names_that_every_object_has_break_no_view(browser, viewer):
    """A task may be named as what JavaScript's objects inherit, and so may a view."""
    visit = Visit(browser, viewer.port)
    for task in TASKS:
        visit.open("evaluation").get_by_role("button", name=task).click()
    assert visit.page.get_by_text("0.500", exact=True).count() == len(TASKS)
    visit.open("constructor").get_by_role("heading", name="Runs").wait_for()
    assert visit.errors() == []


@pytest.mark.slow
def test_the_keyboard_is_enough_and_a_new_step_appears_by_itself(browser, viewer, runs):
    page = Visit(browser, viewer.port).open("evaluation")
    page.get_by_role("link", name="Runs").focus()
    page.keyboard.press("Enter")
    page.locator("#run-chart polyline").first.wait_for(state="attached")  # the newest run's
    page.get_by_label("Choose team/second").focus()
    page.keyboard.press("Space")
    page.locator("#run-chart polyline").nth(1).wait_for(state="attached")
    page.locator("#run-chart .plot").focus()
    page.keyboard.press("ArrowLeft")
    assert "team/second" in page.locator("#run-chart .tip").inner_text()
    page.get_by_text("at step 300").wait_for()
    add_step(runs / "team/second", 301, 1.2345)
    page.get_by_text("1.235 at step 301").wait_for()


@pytest.mark.slow
def test_the_legend_has_the_value_of_the_last_step(browser, viewer, runs):
    """Not the mean of the steps that share the last point of the curve."""
    add_step(runs / "long", 5001, 9.5)
    page = Visit(browser, viewer.port).open("runs?run=long")
    page.get_by_text("9.5 at step 5,001").wait_for()
    row = page.get_by_role("row", name="long")
    assert row.locator("td.loss").inner_text() == "9.5"


def ticks_of_steps(page) -> list[int]:
    """The numbers below a chart."""
    texts = page.locator("#run-chart .tick.middle").all_text_contents()
    return [int(text.replace(",", "")) for text in texts]


@pytest.mark.slow
def test_the_newest_run_is_chosen_and_its_chart_zooms(browser, viewer, runs):
    """By mouse and keyboard, over steps, tokens or time; its tip has the validation loss."""
    path = runs / "long" / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"step": 5001, "val_loss": 4.625}) + "\n")
    visit = Visit(browser, viewer.port)
    page = visit.open("runs")
    page.get_by_label("Choose long").and_(page.locator(":checked")).wait_for()
    page.locator("#run-chart polyline").wait_for(state="attached")
    plot = page.locator("#run-chart .plot")
    assert ticks_of_steps(page)[-1] >= 4000
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 90, steps=3)
    page.mouse.up()
    page.locator("#run-chart .tick.middle", has_text="2,500").wait_for(state="attached")
    assert 1000 < ticks_of_steps(page)[0] <= ticks_of_steps(page)[-1] < 4000
    plot.focus()
    page.keyboard.press("Escape")
    page.locator("#run-chart .tick.middle", has_text="5,000").wait_for(state="attached")
    page.keyboard.press("ArrowLeft")
    page.locator("#run-chart .tip", has_text="(validation 4.625)").wait_for()
    page.get_by_label("Axis").select_option("tokens")
    page.locator("#run-chart .tick.end", has_text="tokens").wait_for(state="attached")
    page.wait_for_function("""() => [...document.querySelectorAll('#run-chart .tick.middle')]
        .some((tick) => tick.textContent.length > 6)""")
    page.get_by_label("Axis").select_option("seconds")
    page.locator("#run-chart .tick.end", has_text="seconds").wait_for(state="attached")
    seconds = 5000 * TrainConfig().global_batch_size * MPTConfig().max_seq_len / 20000
    assert 0.7 * seconds < ticks_of_steps(page)[-1] < 1.01 * seconds
    page.emulate_media(forced_colors="active")
    color = "node => getComputedStyle(node)"
    swatch = page.locator("#legend .swatch").evaluate(f"{color}.backgroundColor")
    assert swatch == page.locator("#run-chart polyline").evaluate(f"{color}.stroke")
    assert swatch != page.locator("body").evaluate(f"{color}.backgroundColor")
    assert visit.errors() == []


@pytest.mark.slow
def test_jobs_without_a_worker(browser, tiny_run, tmp_path):
    """A double click starts one job, all jobs are shown, and the page says how to start a worker.

    A schema that was typed before is not sent by Try it; a wrong number is not hidden.
    """
    shutil.copytree(tiny_run, tmp_path / "run")
    server = Served(tmp_path, "--jobs=my jobs", "--rows=4")
    visit = Visit(browser, server.port)
    page = visit.open("jobs")
    uploaded = page.get_by_text("pairs.jsonl is uploaded")
    told = []

    def answer(route) -> None:
        told.append(uploaded.count())
        route.continue_()

    page.route("**/v1/models", answer)
    choose_file(page, lines(20))
    uploaded.wait_for()
    assert not any(told)  # it is told once the form has the file
    page.get_by_role("button", name="Start the job").dblclick()
    page.get_by_text("No worker yet: python -m web.worker 'my jobs'").wait_for()
    page.get_by_role("button", name="Start the job").and_(page.locator(":enabled")).wait_for()
    folder = tmp_path / "my jobs/jobs"
    (made,) = folder.iterdir()
    for number in range(250):  # jobs of before, all of which have ended
        name = f"ftjob-{number:024x}"
        shutil.copytree(made, folder / name)
        (folder / name / "state.json").write_text(ENDED)
    page.reload()
    page.locator("#job-list > li").nth(250).wait_for()
    model = json.loads((made / "job.json").read_text())["fine_tuned_model"]
    (tmp_path / "my jobs/models" / model).mkdir()
    (folder / made.name / "state.json").write_text(ENDED)
    page.locator("#job-list > li").first.get_by_role("button", name="Try it").wait_for()

    visit.open("playground").locator("#model-a option").first.wait_for(state="attached")
    page.get_by_text("JSON schema").click()
    page.get_by_label("the answer conforms").fill(json.dumps(SCHEMA))
    visit.open("playground?model=run&beside=&kind=text").get_by_label("Prompt").last.fill("x")
    page.locator("#structure:not([open])").wait_for()
    with page.expect_request("**/v1/completions") as asked:
        page.get_by_role("button", name="Generate").click()
    assert "response_format" not in asked.value.post_data_json
    page.get_by_text("Done.").wait_for()

    page.get_by_label("Temperature").fill("5")
    page.locator("#sampling summary").click()
    page.get_by_role("button", name="Generate").click()
    page.locator("#temperature:focus").wait_for()  # with the browser's message
    assert page.locator(".answer").count() == 1
    assert visit.errors() == []
    server.process.kill()


ENDED = '{"status": "succeeded", "deaths": 0, "restarts": 0, "finished_at": 1}'


# --- The whole story


@pytest.fixture
def place(tiny_run, tmp_path):
    with Place(tiny_run, tmp_path) as place:
        yield place


def choose_file(page, content) -> None:
    """Upload examples as pairs.jsonl."""
    file = {"name": "pairs.jsonl", "mimeType": "application/jsonl", "buffer": content}
    field = page.get_by_label("File", exact=True)
    field.wait_for()  # set_input_files would also fill one that is still hidden
    field.set_input_files(file)


def start_job(page, suffix, epochs) -> None:
    """Start a job on the chosen file, and wait until it is in the list."""
    page.get_by_label("Suffix").fill(suffix)
    page.get_by_label("Epochs").fill(str(epochs))
    n_jobs = page.locator("#job-list > li").count()
    page.get_by_role("button", name="Start the job").click()
    page.locator("#job-list > li").nth(n_jobs).wait_for()


@pytest.mark.slow
def test_the_whole_story(browser, place, tmp_path):
    shutil.copytree(tmp_path / "run", tmp_path / "runs" / "base")
    (tmp_path / "keys.txt").write_text(KEY)
    flags = ["--jobs=jobs", "--runs=runs", "--keys=keys.txt", "--rows=4", "--precision=fp32"]
    server = Served(tmp_path, *flags)
    place.worker()
    visit = Visit(browser, server.port, key="")
    page = visit.open("jobs")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()

    examples = lines(60).splitlines(keepends=True)
    choose_file(page, b"".join([*examples[:6], b'{"prompt": "' + HOSTILE.encode(), *examples[7:]]))
    page.get_by_text("1 line cannot be used").wait_for()
    assert page.locator("#upload-lines tbody tr").inner_text().startswith("Mend 7")
    choose_file(page, b"".join(examples))
    page.get_by_text("pairs.jsonl is uploaded").wait_for()

    start_job(page, "first", 20)
    start_job(page, "second", 50)
    second, first = (page.locator("#job-list > li").nth(number) for number in range(2))
    first.locator("polyline").wait_for(state="attached")  # its losses come
    second.get_by_role("button", name="Cancel").click()
    second.get_by_text("cancelled", exact=True).wait_for()
    first.get_by_text("finished", exact=True).wait_for()
    first.get_by_text("held out, lines 10, 20, 30").wait_for()
    first.get_by_role("button", name="Try it").click()

    page.get_by_label("Prompt", exact=True).last.fill(f"{HOSTILE} it's")
    page.get_by_text("JSON schema").click()
    page.get_by_label("the answer conforms").fill(json.dumps(SCHEMA))
    page.locator("#model-b option", has_text="run").last.wait_for(state="attached")
    made = page.locator("#model-a").input_value()
    assert "first" in made and page.locator("#model-b").input_value() == "run"
    page.get_by_role("button", name="Generate").click()
    page.get_by_text("Done.").wait_for()
    states = page.locator(".answer > p").all_inner_texts()
    assert len(states) == 2 and all("valid JSON" in state for state in states), states
    assert HOSTILE in page.locator(".answer").first.inner_text()
    page.get_by_role("button", name="Show as curl").click()
    command = page.locator("#curl-text").inner_text()
    environment = {**os.environ, "KEY": KEY}
    answered = subprocess.run(["bash", "-c", command], env=environment, stdout=subprocess.PIPE)
    assert json.loads(answered.stdout)["model"] == made

    visit.open("runs")
    page.get_by_label("Choose base").check()
    page.get_by_label(f"Choose jobs/{made}").check()
    page.locator("#run-chart polyline").nth(1).wait_for(state="attached")
    page.get_by_role("cell", name="lora_rank", exact=True).wait_for()
    with page.expect_download() as download:
        page.locator("#legend li", has_text=made).get_by_role("button", name="Model card").click()
    assert made in Path(download.value.path()).read_text()
    visit.open("evaluation").locator("#evaluation-status").wait_for()
    assert visit.errors() == [] and page.title().startswith("Evaluation")
    look_at_all(browser, server, f"runs?run=base&run=jobs/{made}", tmp_path)
    server.process.kill()


def in_list(page, number=0):
    """A job in the list, the newest first."""
    return page.locator("#job-list > li").nth(number)


@pytest.mark.slow
def test_from_wrong_lines_to_a_deleted_job(browser, place, tmp_path):
    """Lines are mended in the page, a job is previewed, tried at a checkpoint, and deleted."""
    server = Served(tmp_path, "--jobs=jobs", "--rows=4", "--precision=fp32")
    place.worker()
    visit = Visit(browser, server.port)
    page = visit.open("jobs")
    good = lines(60).splitlines(keepends=True)
    choose_file(page, b"".join([*good[:6], b'{"prompt": "a" "response": "b"}\n', *good[7:]]))
    page.get_by_text("1 line cannot be used").wait_for()
    assert "not JSON" in page.locator("#upload-lines td").last.inner_text()
    assert page.locator("#upload-lines mark").inner_text() == '"'
    page.get_by_role("button", name="Mend 7").click()
    page.keyboard.type(good[6].decode().strip())
    page.get_by_role("button", name="Upload these lines").click()
    page.get_by_text("pairs.jsonl is uploaded").wait_for()
    file_id = page.locator("#training-file").input_value()
    assert server.request("GET", f"/v1/files/{file_id}/content")[2].encode() == b"".join(good)

    page.get_by_text("More settings").click()
    page.get_by_label("Held-out examples").select_option(file_id)
    page.get_by_label("Examples in a batch").fill("16")
    page.get_by_label("Seed", exact=True).last.fill("7")
    page.get_by_label("Epochs").fill("20")
    page.get_by_role("button", name="Preview").click()
    page.get_by_text("60 examples to learn, 60 held out").wait_for()
    page.get_by_role("button", name="Start the job").click()
    job = in_list(page)
    job.get_by_text("finished", exact=True).wait_for()
    (made,) = json.loads(server.request("GET", "/v1/fine_tuning/jobs")[2])["data"]
    assert made["seed"] == 7 and made["validation_file"] == file_id
    assert made["hyperparameters"]["batch_size"] == 16

    star = job.get_by_role("row", name="★")
    step = star.get_by_role("button").inner_text().removeprefix("Try step ")
    star.get_by_role("button").click()
    page.locator("#model-b option").nth(1).wait_for(state="attached")
    page.get_by_label("Prompt", exact=True).and_(page.locator(":visible")).wait_for()
    assert page.locator("#prompt").input_value() == "0 "
    chosen = page.locator("#model-a option:checked")
    chosen.get_by_text(made["fine_tuned_model"]).wait_for(state="attached")
    assert chosen.inner_text().partition("/")[2] in ("", f"checkpoints/step-{step}")

    visit.open("jobs")
    job.get_by_role("link", name="curves").click()
    run = f"jobs/{made['fine_tuned_model']}"
    page.get_by_label(f"Choose {run}").and_(page.locator(":checked")).wait_for()
    page.locator("#legend").get_by_role("link", name="Job").click()
    page.locator("#job-list summary:focus").wait_for()
    with page.expect_download() as download:
        job.get_by_role("button", name="Download the adapter").click()
    assert zipfile.is_zipfile(download.value.path())
    job.get_by_role("button", name="Delete the model").click()
    job.get_by_role("button", name="Try it").wait_for(state="hidden")
    assert made["fine_tuned_model"] not in server.request("GET", "/v1/models")[2]
    job.get_by_role("button", name="Delete the job").click()
    page.get_by_text("There is no job yet.").wait_for()
    page.get_by_role("button", name="Delete this file").click()
    page.locator("#training-file option", has_text="upload a file first").wait_for(state="attached")
    assert json.loads(server.request("GET", "/v1/files")[2])["data"] == []
    assert visit.errors() == []
    server.process.kill()


@pytest.mark.slow
def test_a_job_is_paused_resumed_and_fails_with_its_log(browser, place, tmp_path):
    server = Served(tmp_path, "--jobs=jobs", "--rows=4", "--precision=fp32")
    place.worker()
    visit = Visit(browser, server.port)
    page = visit.open("jobs")
    choose_file(page, lines(60))
    page.get_by_text("pairs.jsonl is uploaded").wait_for()
    page.get_by_text("More settings").click()
    page.get_by_label("Examples in a batch").fill("1")  # minutes
    start_job(page, "long", 50)
    job = in_list(page)
    job.locator("polyline").wait_for(state="attached")
    job.get_by_role("button", name="Pause").click()
    job.get_by_text("paused", exact=True).wait_for()
    assert job.get_by_role("button", name="Pause").is_hidden()
    job.get_by_role("button", name="Resume").click()
    job.get_by_text("running", exact=True).wait_for()
    job.get_by_role("button", name="Cancel").click()
    job.get_by_text("cancelled", exact=True).wait_for()
    (name,) = (folder.name for folder in (tmp_path / "jobs/jobs").glob("ftjob-*"))
    set_settings(tmp_path, name, "print('error: nonsense', flush=True)\nraise SystemExit(2)\n")
    job.get_by_role("button", name="Resume").click()
    job.get_by_text("failed", exact=True).wait_for()
    job.get_by_role("region", name="Output").get_by_text("nonsense").first.wait_for()
    assert visit.errors() == []
    server.process.kill()


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
SEEN = {  # view: what is there as soon as it has loaded
    "playground": "#model-b option:nth-child(2)",
    "runs": "#run-chart polyline",
    "evaluation": "#evaluation-status",
    "jobs": "#job-list li",
}


def look_at_all(browser, server, runs, folder) -> None:
    """Each view in both looks: a picture, nothing too wide, readable for all."""
    for size, theme in LOOKS:
        visit = Visit(browser, server.port, size, theme)
        for view, there in SEEN.items():
            page = visit.open(runs if view == "runs" else view)
            page.locator(there).first.wait_for(state="attached")
            if view == "jobs":
                page.locator("#job-list summary").last.click()
                page.get_by_role("row", name="★").last.wait_for()
                page.locator("#write summary").click()
                page.get_by_text("More settings").click()
            page.screenshot(path=folder / f"{view}-{theme}.png", full_page=True)
            too_wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert too_wide <= 0, (view, size)
            assert accessible(page) == [], (view, size, theme)
        assert visit.errors() == []
        visit.context.close()
