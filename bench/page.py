"""The page of serve.py in a real browser: how fast it is with many runs, and its picture.

    python -m bench page                            200 runs of 10,000 steps: seconds, milliseconds
    python -m bench page --picture=page.png         trains three small runs, and takes their picture

The first writes run folders with invented losses, starts `serve.py --runs` on them, and opens the
page in Chromium (requirements-dev.txt, and Debian's package chromium or your own). It reports when
the page has first painted, when all runs are listed, and for each interaction the time from the
event to the next paint, as the browser measures it (the Event Timing API), rounded to 8 ms.
"""

import contextlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import config
import program
from config import MPTConfig, TrainConfig
from program import require

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # as in a container
WATCH = """() => {
  window.events = [];
  new PerformanceObserver((list) => {
    for (const { name, duration } of list.getEntries()) window.events.push([name, duration]);
  }).observe({ type: "event", durationThreshold: 16 });
}"""
PAINTED = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


@dataclass
class PageSettings:
    """What the page shows."""

    runs: int = 200
    steps: int = 10_000
    chosen: int = 10  # runs whose curves are on the page
    picture: str = ""  # take a picture of small real runs instead, and write it here


def main(argv: list[str]) -> None:
    """Measure the page, or take its picture."""
    cfg = config.load(argv, PageSettings)[0]
    fix = "pip install -r requirements-dev.txt"
    require(find_spec("playwright"), f"bench page needs the package playwright: {fix}")
    require(shutil.which("chromium"), "bench page needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        if cfg.picture:
            train_runs(folder)
            model = [f"{folder}/runs/bytes/lr-3e-3", f"--jobs={folder}/jobs"]
            with served(f"{folder}/runs", *model) as url, browser() as chromium:
                take_picture(chromium, url, cfg.picture)
            return
        for number in range(cfg.runs):
            write_run(Path(folder) / f"sweep-{number % 10}" / f"run-{number}", cfg.steps, number)
        with served(folder) as url, browser() as chromium:
            measure(chromium, url, cfg)


@contextlib.contextmanager
def browser():
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def served(folder: str, *more: str):
    """The address of a serve.py that shows the runs of a folder."""
    command = [sys.executable, ROOT / "serve.py", *more, f"--runs={folder}", "--port=0"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    process = subprocess.Popen(command, **options)
    try:
        first = process.stdout.readline()
        yield re.search(r"http://[\w.:]+\d", first)[0]
    finally:
        process.terminate()
        process.wait()


# --------------------------------------------------------------------------------------------------
# Speed


def write_run(folder: Path, n_steps: int, seed: int) -> None:
    """Write the folder of a run that never was: a falling loss, with noise."""
    folder.mkdir(parents=True)
    cfg = TrainConfig(max_steps=n_steps, seed=seed, lr=1e-3 / (1 + seed % 5))
    settings = asdict(MPTConfig()) | asdict(cfg)
    (folder / "config.json").write_text(json.dumps(settings))
    draw = random.Random(seed)
    floor, power = draw.uniform(2.5, 3.5), draw.uniform(0.2, 0.4)
    noise = [draw.gauss(0, 0.05) for _ in range(997)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, n_steps + 1):
            loss = floor + 7 * (step + 5) ** -power + noise[step % 997]
            row = {"step": step, "tokens": step * 8192, "loss": round(loss, 4), "lr": cfg.lr}
            row |= {"grad_norm": 0.5, "batch_hash": None, "skipped": False}
            row |= {"tokens_per_second": 20000.0, "mfu": None, "memory_gb": 1.0, "seconds": 0.4}
            file.write(json.dumps(row) + "\n")
            if step % 500 == 0:
                file.write(json.dumps({"step": step, "val_loss": round(loss + 0.1, 4)}) + "\n")


def measure(chromium, url: str, cfg: PageSettings) -> None:
    """Print how fast the page is: on its first visit, on its second, and at each interaction."""
    page = chromium.new_page(viewport={"width": 1280, "height": 860})
    for visit in ("first", "second"):
        begun = time.perf_counter()
        page.goto(f"{url}/#runs")
        page.locator("#run-table tbody tr").nth(cfg.runs - 1).wait_for(state="attached")
        seconds = time.perf_counter() - begun
        painted = page.evaluate(PAINTED)
        print(f"{visit} visit: painted after {painted:.0f} ms, all runs listed in {seconds:.2f} s")
        page.goto("about:blank")
    page.goto(f"{url}/#runs")
    page.locator("#run-table tbody tr").nth(cfg.runs - 1).wait_for(state="attached")
    page.evaluate(WATCH)
    boxes = page.locator("#run-table tbody input")
    begun = time.perf_counter()
    for number in range(cfg.chosen):
        boxes.nth(number).check()
    page.locator("#run-chart polyline").nth(cfg.chosen - 1).wait_for(state="attached")
    print(f"{cfg.chosen} curves chosen and drawn: {time.perf_counter() - begun:.2f} s")
    report(page, "choosing runs")
    interactions = {
        "typing into the filter": lambda: page.locator("#run-filter").press_sequentially("run-1"),
        "sorting": lambda: page.get_by_role("button", name="Loss", exact=True).click(),
        "smoothing": lambda: [page.locator("#smoothing").press("ArrowRight") for _ in range(10)],
        "logarithmic": lambda: page.locator("#log").click(),
        "another view": lambda: page.get_by_role("link", name="Planner").click(),
    }
    for name, act in interactions.items():
        act()
        report(page, name)


def report(page, name: str) -> None:
    """Print the longest time from an event to the next paint, and forget the events."""
    page.wait_for_timeout(500)  # the browser hands the events over when it is idle
    events = page.evaluate("() => window.events.splice(0)")
    longest = max((duration for _, duration in events), default=math.nan)
    said = "below 16 ms" if math.isnan(longest) else f"{longest:.0f} ms at most"
    print(f"{name}: {said} from the event to the next paint")


# --------------------------------------------------------------------------------------------------
# The picture


def train_runs(folder: str) -> None:
    """Train three small models of this project's own code, one with a restart."""
    small = "--d_model=64 --n_heads=4 --n_layers=2 --vocab_size=320 --max_seq_len=64 --alibi"
    data = f"--dataset={ROOT}/planning/*.py --tokenizer=bytes --data_dir={folder}/data"
    length = "--global_batch_size=8 --warmup_steps=10 --eval_interval=40 --eval_tokens=4096"
    for name, more in {
        "lr-1e-3": ["--lr=1e-3"],
        "lr-3e-3": ["--lr=3e-3"],
        "lr-3e-3-deeper": ["--lr=3e-3", "--n_layers=4"],
    }.items():
        command = [sys.executable, ROOT / "fsdp_train.py", *small.split(), *data.split()]
        command += [*length.split(), *more, f"--run_dir={folder}/runs/bytes/{name}"]
        for steps in (["--max_steps=160"], ["--max_steps=400"])[name != "lr-3e-3" :]:
            subprocess.run([*command, *steps], check=True, stdout=subprocess.DEVNULL)


def take_picture(chromium, url: str, path: str) -> None:
    """Show the curves of all runs, and write a PNG."""
    page = chromium.new_page(viewport={"width": 1280, "height": 820})
    page.goto(f"{url}/#runs")
    boxes = page.locator("#run-table tbody input")
    boxes.nth(2).wait_for()
    for number in range(3):
        boxes.nth(number).check()
    page.locator("#run-chart polyline").nth(2).wait_for()
    page.locator("#smoothing").fill("0.6")
    page.locator("#differences table").wait_for()
    page.mouse.move(0, 0)
    page.screenshot(path=path)
    print(f"{path}: {Path(path).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    program.run(main)
