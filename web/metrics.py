"""What the server has done, as Prometheus reads it: `curl localhost:8000/metrics`."""

from bisect import bisect_left
from collections import Counter

SECONDS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]  # upper ends of buckets


OF_ENGINE = {  # name: (kind, help)
    "texts_running": ("gauge", "Texts in the batch."),
    "texts_waiting": ("gauge", "Texts that wait for a row."),
    "steps_total": ("counter", "Steps of the engine."),
    "prompt_tokens_total": ("counter", "Tokens of prompts that were read."),
    "prefix_tokens_total": ("counter", "Tokens of prompts that were known from an earlier one."),
    "new_tokens_total": ("counter", "Tokens that were generated."),
}


class Histogram:
    """How often a number fell into each bucket."""

    def __init__(self, bounds: list[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str) -> list[str]:
        """In Prometheus's text format, where each bucket counts all that is smaller, too."""
        lines = []
        total = 0
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self.sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counters of one server."""

    def __init__(self):
        self.answers = Counter()  # (path, status) -> how many
        self.first_token_seconds = Histogram(SECONDS)
        self.answer_seconds = Histogram(SECONDS)

    def text(self, engine: dict[str, int], n_open: int) -> str:
        """All in Prometheus's text format.

        engine: `EngineThread.statistics`; empty without one.
        n_open: requests that are being answered.
        """
        lines = []

        def add(name: str, kind: str, help_text: str, values: list[str]) -> None:
            lines.extend([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *values])

        def number(name: str, kind: str, help_text: str, value: int) -> None:
            add(name, kind, help_text, [f"{name} {value}"])

        number("mpt_requests_open", "gauge", "Requests that are being answered.", n_open)
        for name, (kind, help_text) in OF_ENGINE.items():
            if engine:
                key = name.removeprefix("texts_").removesuffix("_total")
                number(f"mpt_{name}", kind, help_text, engine[key])
        answers = [
            f'mpt_answers_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.answers.items())
        ]
        add("mpt_answers_total", "counter", "Answers by path and status.", answers)
        for name in ("first_token_seconds", "answer_seconds"):
            histogram = getattr(self, name)
            help_text = "From the request's body to the first token, or to the answer's end."
            add(f"mpt_{name}", "histogram", help_text, histogram.lines(f"mpt_{name}"))
        return "\n".join(lines) + "\n"
