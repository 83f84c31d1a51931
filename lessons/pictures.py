"""Where the pictures of the lessons go: runs/lessons/.

`python -m lessons 1` draws some.

    figure = Figure(figsize=(8, 4))       matplotlib.figure.Figure: no window, no hidden state
    pictures.save(figure, "1-alibi")      writes runs/lessons/1-alibi.png and says so; an editor
                                          shows the picture below a cell that ends with this
"""

from pathlib import Path

import config

FOLDER = Path(__file__).parent.parent / "runs" / "lessons"


def save(figure, name: str):
    """Write a matplotlib figure to runs/lessons/NAME.png, print where it is, and return it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    figure.savefig(path, dpi=110, bbox_inches="tight")
    print(f"[picture: {path.relative_to(FOLDER.parent.parent)}]")
    return figure


def main(argv: list[str]) -> None:
    """Say what this file is for."""
    config.arguments(argv)
    print(__doc__)


if __name__ == "__main__":
    config.run(main)
