"""A small model of a terminal's screen: bytes of a program in, the text that a user would see out.

It knows what line editors, pagers and full-screen programs commonly send: cursor movement, erasing, scroll regions, the
alternate screen. Colours are ignored. Any bytes are accepted, and memory is bounded.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

MOST_HISTORY = 5000
"""Lines that scrolled off the screen and are kept."""
MOST_SEQUENCE = 256

_CSI = re.compile(r"\x1b\[([0-?]*)[ -/]*([@-~])")
_STRING = re.compile(r"\x1b[\]P_^X][^\x07\x1b]*(?:\x07|\x1b\\)")
_SHORT = re.compile(r"\x1b(?:[ -/]+[0-~]|[0-OQ-WYZ\\`-~])")
_PARTIAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]P_^X][^\x07\x1b]*\x1b?|[ -/]*)?$")


class VirtualTerminal:
    """A screen of `columns` by `rows` characters."""

    def __init__(self, columns: int = 160, rows: int = 40) -> None:
        self.columns, self.rows = columns, rows
        self.history: list[str] = []
        self.lost = 0
        """Lines that were dropped from the history."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._main: list[list[str]] | None = None  # the main screen, while the alternate one is shown
        self._reset()

    def _reset(self) -> None:
        self._cells = [self._blank() for _ in range(self.rows)]
        self._row = self._column = 0
        self._saved = (0, 0)
        self._top, self._bottom = 0, self.rows - 1
        self._wraps = False  # the cursor is past the last column

    def _blank(self) -> list[str]:
        return [" "] * self.columns

    def feed(self, data: bytes) -> None:
        """Take output of a program."""
        text = self._rest + self._decoder.decode(data)
        self._rest, at = "", 0
        while at < len(text):
            char = text[at]
            if char != "\x1b":
                self._put(char)
                at += 1
                continue
            for pattern in (_CSI, _STRING, _SHORT):
                if (match := pattern.match(text, at)) is not None:
                    if pattern is _CSI:
                        self._control(match[1], match[2])
                    elif pattern is _SHORT:
                        self._escape(match[0][1:])
                    at = match.end()
                    break
            else:
                if len(text) - at < MOST_SEQUENCE and _PARTIAL.fullmatch(text, at):
                    self._rest = text[at:]
                    return
                at += 1

    def lines(self) -> list[str]:
        """The rows of the screen, without blanks at their ends and without empty rows at the bottom."""
        rows = ["".join(row).rstrip() for row in self._cells]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _put(self, char: str) -> None:
        if char == "\n" or char in "\x0b\x0c":
            self._down()
        elif char == "\r":
            self._move(self._row, 0)
        elif char == "\b":
            self._move(self._row, self._column - 1)
        elif char == "\t":
            self._move(self._row, (self._column // 8 + 1) * 8)
        elif char >= " " and char != "\x7f":
            self._print(char)

    def _print(self, char: str) -> None:
        if unicodedata.combining(char):
            return
        width = 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if self._wraps or self._column + width > self.columns:
            self._move(self._row, 0)
            self._down()
        row = self._cells[self._row]
        row[self._column] = char
        if width == 2 and self._column + 1 < self.columns:
            row[self._column + 1] = ""
        after = self._column + width
        self._wraps = after >= self.columns
        self._column = min(after, self.columns - 1)

    def _move(self, row: int, column: int) -> None:
        self._row = min(max(row, 0), self.rows - 1)
        self._column = min(max(column, 0), self.columns - 1)
        self._wraps = False

    def _down(self) -> None:
        self._wraps = False
        if self._row == self._bottom:
            self._scroll(1)
        elif self._row < self.rows - 1:
            self._row += 1

    def _scroll(self, count: int) -> None:
        """Scroll the region up, or down for a negative count."""
        size = self._bottom - self._top + 1
        for _ in range(min(abs(count), size)):
            if count > 0:
                gone = self._cells.pop(self._top)
                self._cells.insert(self._bottom, self._blank())
                if self._main is None and self._top == 0:
                    self.history.append("".join(gone).rstrip())
            else:
                self._cells.pop(self._bottom)
                self._cells.insert(self._top, self._blank())
        if (over := len(self.history) - MOST_HISTORY) > 0:
            del self.history[:over]
            self.lost += over

    def _escape(self, code: str) -> None:
        if code == "7":
            self._saved = (self._row, self._column)
        elif code == "8":
            self._move(*self._saved)
        elif code == "M":
            if self._row == self._top:
                self._scroll(-1)
            else:
                self._move(self._row - 1, self._column)
        elif code in ("D", "E"):
            self._down()
            if code == "E":
                self._move(self._row, 0)
        elif code == "c":
            self._main = None
            self._reset()

    def _control(self, parameters: str, final: str) -> None:
        if parameters.startswith("?"):
            if final in "hl" and {"1049", "1047", "47"} & set(parameters[1:].split(";")):
                self._alternate(final == "h")
            return
        numbers = [int(p[:5]) if p.isdigit() else 0 for p in re.split("[;:]", parameters)]
        first = numbers[0]
        count = min(max(first, 1), 9999)
        row, column = self._row, self._column
        if final in "ABCDEFGd`aefHjk":
            moves = {
                "A": (row - count, column),
                "B": (row + count, column),
                "e": (row + count, column),
                "C": (row, column + count),
                "a": (row, column + count),
                "D": (row, column - count),
                "E": (row + count, 0),
                "F": (row - count, 0),
                "G": (row, count - 1),
                "`": (row, count - 1),
                "d": (count - 1, column),
            }
            second = numbers[1] if len(numbers) > 1 else 1
            self._move(*moves.get(final, (count - 1, max(second, 1) - 1)))
        elif final == "J":
            self._erase_screen(first)
        elif final == "K":
            self._erase(row, 0 if first else column, self.columns if first != 1 else column + 1)
        elif final == "X":
            self._erase(row, column, column + count)
        elif final == "P":
            cells = self._cells[row]
            cells[column:] = (cells[column + count :] + self._blank())[: self.columns - column]
        elif final == "@":
            cells = self._cells[row]
            cells[column:] = ([" "] * min(count, self.columns) + cells[column:])[: self.columns - column]
        elif final in "LM" and self._top <= row <= self._bottom:
            for _ in range(min(count, self._bottom - row + 1)):
                self._cells.pop(self._bottom if final == "L" else row)
                self._cells.insert(row if final == "L" else self._bottom, self._blank())
        elif final in "ST":
            self._scroll(count if final == "S" else -count)
        elif final == "r":
            bottom = numbers[1] if len(numbers) > 1 and numbers[1] else self.rows
            if count < bottom <= self.rows:
                self._top, self._bottom = count - 1, bottom - 1
                self._move(0, 0)
        elif final == "s":
            self._saved = (row, column)
        elif final == "u":
            self._move(*self._saved)

    def _erase(self, row: int, start: int, end: int) -> None:
        end = min(end, self.columns)
        self._cells[row][start:end] = [" "] * (end - start)

    def _erase_screen(self, what: int) -> None:
        if what == 3:
            self.lost += len(self.history)
            self.history.clear()
            return
        if what in (0, 1):
            self._erase(self._row, 0 if what else self._column, self._column + 1 if what else self.columns)
        span = {0: (self._row + 1, self.rows), 1: (0, self._row)}.get(what, (0, self.rows))
        for row in range(*span):
            self._cells[row] = self._blank()

    def _alternate(self, on: bool) -> None:
        if on and self._main is None:
            self._main, self._saved = self._cells, (self._row, self._column)
            self._cells = [self._blank() for _ in range(self.rows)]
        elif not on and self._main is not None:
            self._cells, self._main = self._main, None
            self._top, self._bottom = 0, self.rows - 1
            self._move(*self._saved)
