"""The process that renders foreign chat templates; `glm5.chat.jinja` starts it and kills it after a time limit.

It reads one JSON object per line and answers each with one line. The first is `{"source", "memory", "max_chars"}`; each
later one has the variables of one rendering. An answer has `text`, or `error` with `blame`: "template", or "input" for
a conversation that the template refused. It runs as a file and imports only jinja2 and the standard library, to start
fast.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Refused(Exception):
    """The template called `raise_exception`: it refuses this conversation."""


class GenerationTag(Extension):
    """`{% generation %}` marks what the model writes; rendering treats it as any other block."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    hello = json.loads(sys.stdin.readline())
    # The worker writes no files and needs at most one open file beside the pipes.
    resource.setrlimit(resource.RLIMIT_AS, (hello["memory"], hello["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    template: Template | None = None
    try:
        template = environment().from_string(hello["source"])
        answer({})
    except (TemplateError, RecursionError, MemoryError, ValueError) as error:
        answer(failure(error))
        return
    for line in sys.stdin:
        signal.alarm(hello["seconds"])  # if the server was killed, nobody else ends a rendering
        try:
            answer({"text": render(template, json.loads(line), hello["max_chars"])})
        except Exception as error:  # a hostile template can make jinja2 raise anything
            answer(failure(error))
        signal.alarm(0)


def environment() -> ImmutableSandboxedEnvironment:
    """The settings and helpers that chat templates expect."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return found


def render(template: Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, size = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        size += len(piece)
        if size > max_chars:
            raise ValueError(f"its output has more than {max_chars:,} characters")
    return "".join(pieces)


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: Any) -> None:
    raise Refused(str(message))


def failure(error: BaseException) -> dict[str, str]:
    if isinstance(error, Refused):
        return {"error": str(error)[:500], "blame": "input"}
    what = "it needs too much memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return {"error": what.splitlines()[0][:500] + (f" (line {line})" if line else ""), "blame": "template"}


def answer(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
