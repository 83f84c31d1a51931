"""The process in which a chat template runs: other people's code, with limits on all it does.

A template is Jinja and comes with a model. Jinja's sandbox shows it the messages and nothing else,
but does not stop a loop in a loop, or a letter times 10^12. A process of its own can be limited.

    a line of its input                                       a line of its output
    {"source": "...", "seconds": 5, ...}                      {}, or {"error": "..."}
    {"messages": [...], "cuts": [[1, true], [2, false]]}      {"texts": [...]}, or {"error": "..."}

A cut (n, ask) stands for the text of the first n messages; with `ask`, what precedes an answer
follows them. `text/chat.py::Template` starts this process, one for each template.

    printf '{"source": "{{ 6 * 7 }}", "seconds": 1}\\n{"messages": [], "cuts": [[0, true]]}\\n' |
        python -m text.render
"""

import json
import re
import resource
import signal
import sys

import jinja2  # torch requires it
import jinja2.ext
import jinja2.sandbox

import program

MOST_BYTES = 2**30  # of this process, on Linux
# What a template may write: so much of its own, and so much for each character of a conversation
# (JSON in ASCII spells one with up to 12).
MOST_CHARACTERS = 100_000
MOST_COPIES = 20


class Missing(jinja2.Undefined):
    """What is not defined: false in a test, and an error where a template would write it.

    Jinja's own writes nothing, so a misspelled name would go unnoticed in each example.
    """

    def __str__(self) -> str:
        if self._undefined_name is None:  # {{ 'x' if ask }}, or the message before the first one
            return ""
        self._fail_with_undefined_error()


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: its content, unchanged.

    With these tags a template says which text the assistant wrote. The roles say it here.
    """

    tags = {"generation"}

    def parse(self, parser):
        """The block, in which a template may set variables of its own."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line_number)


class Renderer:
    """A template as it is used here. Raises jinja2.TemplateError if it is none.

    setup: the first line of the input. source: the template. special_tokens: such as eos_token,
    which it may write. mark: a character that the filter tojson leaves as it is.
    """

    def __init__(self, setup: dict):
        self.special_tokens = setup.get("special_tokens", {})
        self.mark = setup.get("mark", "")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=Missing,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = self.tojson
        environment.globals["raise_exception"] = refuse
        today = "strftime_now would write another date every day: write a fixed date in its place"
        environment.globals["strftime_now"] = jinja2.Undefined(today)
        self.template = environment.from_string(setup["source"])

    def texts(self, messages: list[dict], cuts: list) -> list[str]:
        """A text for each cut, see the file's docstring. Raises whatever the template raises."""
        size = sum(len(message["content"]) for message in messages)
        return [self.text(messages[:n], ask, MOST_COPIES * size) for n, ask in cuts]

    def text(self, messages: list[dict], ask: bool, most: int) -> str:
        """The messages as the template writes them. most: characters beside those of its own."""
        parts = self.template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=ask,
            **self.special_tokens,
        )
        written = []
        size = 0
        for part in parts:
            written.append(part)
            size += len(part)
            if size > MOST_CHARACTERS + most:
                raise ValueError(f"it writes more than {MOST_CHARACTERS + most:,} characters")
        return "".join(written)

    def tojson(
        self, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
    ) -> str:
        """The filter as transformers defines it: Jinja's own writes < and & as for HTML."""
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if not ensure_ascii:
            return text
        not_ascii = rf"[^\x00-\x7e{self.mark}]"  # JSON in ASCII spells out DEL, too
        return re.sub(not_ascii, lambda match: json.dumps(match[0])[1:-1], text)


def refuse(reason: str) -> None:
    """What a template calls to refuse a conversation."""
    raise ValueError(reason)


def reason_of(error: BaseException) -> str:
    """What to say of an error that a template caused."""
    if isinstance(error, MemoryError):
        return f"it needs more than {MOST_BYTES >> 30} GB of memory"
    return str(error)[:1000] or type(error).__name__


def main(argv: list[str]) -> None:
    """Answer each line of the input. The system ends this process where it exceeds its limits."""
    program.arguments(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that asks
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if sys.platform == "linux":
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = MOST_BYTES if most == resource.RLIM_INFINITY else min(MOST_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    renderer = seconds = None
    for line in sys.stdin:
        request = json.loads(line)
        seconds = seconds or request["seconds"]  # the first line says it
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor, until SIGPROF
        try:
            if renderer:
                answer = {"texts": renderer.texts(request["messages"], request["cuts"])}
            else:
                renderer, answer = Renderer(request), {}
        except Exception as error:  # whatever a template raises, or Python's compiler gives up
            what = "fails" if renderer else "is not a template"
            answer = {"error": f"{what}: {reason_of(error)}"}
        print(json.dumps(answer), flush=True)
        if not renderer:
            return


if __name__ == "__main__":
    program.run(main)
