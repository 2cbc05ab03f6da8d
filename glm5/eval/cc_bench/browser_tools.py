"""The tools of the frontend judge, as a model is told of them, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm5.tasks.cc_bench.project import APP

MOST_ARGUMENT = 20_000
"""Characters."""


def _spec(name: str, about: str, **arguments: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [k for k in arguments if k != "path" or name == "read_file"],
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TARGET = 'a line of the tree, such as button "Add" (with #2 for the second of that name), or css=SELECTOR'
SPECS: tuple[Mapping[str, Any], ...] = (
    _spec("open", "Open a page of the project anew, without what was stored.", path="such as / (default) or /about"),
    _spec("look", "The page now, as its accessibility tree."),
    _spec("click", "Click an element; shows the page after it.", target=TARGET),
    _spec("type", "Replace a field's text or choose an option; shows the page then.", target=TARGET, text="the text"),
    _spec("press", "Press a key; shows the page after it.", key="such as Enter, ArrowRight, Control+z"),
    _spec("inspect", "Elements with attributes, position and style.", target=TARGET),
    _spec("screenshot", "Size and colours of the page as a grid, for pictures and canvases."),
    _spec("console", "What the page wrote to the console since it was opened, and its errors."),
    _spec("list_files", "The project's source files."),
    _spec("read_file", "A source file.", path="as listed"),
    _spec("terminal", f"Run a line of bash in a copy of the source, at {APP}, without a network.", command="the line"),
)  # fmt: skip
"""The tools in OpenAI function format."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answers: `text` for the judge; `shown` is what of it comes from the running page, "" if nothing does:
    of files, of the terminal, of an empty page. `failed`: the call was wrong or could not be carried out."""

    text: str
    shown: str = ""
    failed: bool = False


def shown(text: str) -> ToolResult:
    """A result that is all of the running page."""
    return ToolResult(text, text)


def is_text(value: object) -> bool:
    """Whether an argument can be handed on to a program."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return len(value) <= MOST_ARGUMENT and value.encode("utf-8", "ignore").decode() == value
