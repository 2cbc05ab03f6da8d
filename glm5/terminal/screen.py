"""Input and output of a terminal chat: a terminal, or pipes.

On a terminal everything is shown there. With pipes stdout gets only the answers and tool calls, and stderr the rest.
"""

from __future__ import annotations

import contextlib
import io
import sys

from rich.console import Console
from rich.status import Status
from rich.text import Text

from glm5.errors import for_screen


class Screen:
    """Reads lines and shows text as it comes."""

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # invalid bytes, and characters that the terminal lacks
                stream.reconfigure(errors="replace")
        self._out = Console(highlight=False)
        self._talks = sys.stdin.isatty()
        self.interactive = self._talks and self._out.is_terminal
        self._notes = self._out if self._out.is_terminal else Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._line_open = False
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and editing keys)

    def read(self, prompt: str) -> str:
        """One input; a line that ends in a backslash continues on the next. Raises EOFError at the end of all input."""
        lines = [self._read_line(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._read_line("... "))
            except EOFError:
                break
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        self.end_line()
        prompt = for_screen(prompt).replace("\n", " ")  # it may name a model's call
        if self.interactive:
            return input(prompt)
        if self._talks:
            self._notes.out(prompt, end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")

    def write(self, text: str, style: str = "") -> None:
        """Print text of an answer as it streams."""
        if text:
            self.waiting(None)
            clean = for_screen(text)
            if style:
                self._out.print(Text(clean, style), end="", soft_wrap=True)
            else:  # rich would expand tabs
                self._out.file.write(clean)
                self._out.file.flush()
            self._line_open = not text.endswith("\n")

    def end_line(self) -> None:
        """End the current line unless it is empty."""
        self.waiting(None)
        if self._line_open:
            self._out.out("")
            self._line_open = False

    def note(self, text: str, style: str = "dim") -> None:
        """Print a line about the chat, not part of it."""
        self.end_line()
        self._notes.out(for_screen(text), style=style)

    def error(self, text: str) -> None:
        self.note(f"Error: {text}", style="red")

    def waiting(self, text: str | None) -> None:
        """Show a temporary line, only on a terminal; the next output replaces it. None removes it."""
        if text is None:
            if self._status is not None:
                self._status.stop()
            self._status = None
        elif self._out.is_terminal:
            shown = Text(for_screen(text))  # a string would be read as markup
            if self._status is None:
                self.end_line()
                self._status = self._out.status(shown, spinner="dots", spinner_style="dim")
                self._status.start()
            self._status.update(shown)
