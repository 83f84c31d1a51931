"""What several lessons need: the project's folder, and where pictures go.

figure = Figure(figsize=(8, 4))       matplotlib.figure.Figure: no window, no hidden state
pictures.save(figure, "1-alibi")      writes runs/lessons/1-alibi.png and says so; an editor
                                      shows the picture below a cell that ends with this
"""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "lessons"


def save(figure, name: str):
    """Write a matplotlib figure to runs/lessons/NAME.png, print where it is, and return it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", dpi=110, bbox_inches="tight")
    print(f"[picture: runs/lessons/{name}.png]")
    return figure


def why_no_interpreter() -> str:
    """Why Triton cannot run a kernel on the CPU here; "" if it can."""
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed ({platform.system()}); it comes for Linux"
    versions = [importlib.metadata.version(name) for name in ("triton", "numpy")]
    triton, numpy = (tuple(map(int, version.split(".")[:2])) for version in versions)
    if triton < (3, 7) and numpy >= (2, 4):
        return "the interpreter of Triton before 3.7 cannot run these loops with NumPy 2.4"
    return ""
