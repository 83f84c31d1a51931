"""What the server has done, as Prometheus reads it: `curl localhost:8000/metrics`.

A summary is a sum and a count: rate(mpt_answer_seconds_sum) / rate(mpt_answer_seconds_count).
"""

from collections import Counter

ENGINE = {  # of `EngineThread.statistics`: (name here, kind, help)
    "running": ("texts_running", "gauge", "Texts in the batch."),
    "waiting": ("texts_waiting", "gauge", "Texts that wait for a row."),
    "steps": ("steps_total", "counter", "Steps of the engine."),
    "prompt_tokens": ("prompt_tokens_total", "counter", "Tokens of prompts that were read."),
    "prefix_tokens": ("prefix_tokens_total", "counter", "Those known from an earlier prompt."),
    "new_tokens": ("new_tokens_total", "counter", "Tokens that were generated."),
}
TIMES = {  # from the request's body
    "first_token_seconds": "To the first token.",
    "answer_seconds": "To the answer's end.",
}


class Metrics:
    """Counters of one server."""

    def __init__(self):
        self.answers = Counter()  # (path, status) -> how many
        self.counts, self.sums = Counter(), Counter()  # of TIMES

    def add(self, name: str, seconds: float) -> None:
        """Count one of TIMES."""
        self.counts[name] += 1
        self.sums[name] += seconds

    def text(self, engine: dict[str, int], n_open: int) -> str:
        """All in Prometheus's text format.

        engine: `EngineThread.statistics`; empty without one. n_open: requests being answered.
        """
        rows = [("requests_open", "gauge", "Requests that are being answered.", {"": n_open})]
        for key, number in engine.items():
            rows.append((*ENGINE[key], {"": number}))
        answers = {
            f'{{path="{path}",status="{status}"}}': count
            for (path, status), count in sorted(self.answers.items())
        }
        rows.append(("answers_total", "counter", "Answers by path and status.", answers))
        for name, words in TIMES.items():
            values = {"_sum": f"{self.sums[name]:.6f}", "_count": self.counts[name]}
            rows.append((name, "summary", words, values))
        lines = []
        for name, kind, words, values in rows:
            lines += [f"# HELP mpt_{name} {words}", f"# TYPE mpt_{name} {kind}"]
            lines += [f"mpt_{name}{end} {value}" for end, value in values.items()]
        return "\n".join(lines) + "\n"
