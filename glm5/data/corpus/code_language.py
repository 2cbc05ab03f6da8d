"""The programming language of a file by its content (`SourceConfig.by_content`), as the package magika sees it: for
names that are shared (`.h`, `.t`, `.v`, `.m`), wrong or missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from glm5.data.corpus.kinds import UNKNOWN_CODE
from glm5.data.corpus.text import Found, Skipped
from glm5.errors import MissingExtraError

LEAST = 0.9
"""Probability from which a language of content counts."""
LANGUAGES = {
    "asm": "Assembly", "autohotkey": "AutoHotkey", "autoit": "AutoIt", "awk": "AWK", "batch": "Batch",
    "bazel": "Starlark", "c": "C", "clojure": "Clojure", "cmake": "CMake", "cobol": "COBOL",
    "coffeescript": "CoffeeScript", "cpp": "C++", "cs": "C#", "css": "CSS", "dart": "Dart",
    "dockerfile": "Dockerfile", "elixir": "Elixir", "erlang": "Erlang", "fortran": "Fortran", "gemfile": "Ruby",
    "gemspec": "Ruby", "go": "Go", "gradle": "Groovy", "groovy": "Groovy", "haskell": "Haskell", "hcl": "HCL",
    "java": "Java", "javascript": "JavaScript", "julia": "Julia", "kotlin": "Kotlin", "lisp": "Common Lisp",
    "lua": "Lua", "m4": "M4", "makefile": "Makefile", "matlab": "MATLAB", "objectivec": "Objective-C", "ocaml": "OCaml",
    "pascal": "Pascal", "perl": "Perl", "php": "PHP", "powershell": "PowerShell", "prolog": "Prolog",
    "proto": "Protocol Buffers", "python": "Python", "r": "R", "ruby": "Ruby", "rust": "Rust", "scala": "Scala",
    "scss": "CSS", "shell": "Shell", "smali": "Smali", "solidity": "Solidity", "sql": "SQL", "swift": "Swift",
    "tcl": "Tcl", "typescript": "TypeScript", "vba": "VBA", "verilog": "Verilog", "vhdl": "VHDL", "vue": "Vue",
    "yara": "YARA", "zig": "Zig",
}  # fmt: skip
"""magika's labels of source code, and the names of `kinds.py`."""
_SEEN = set(LANGUAGES.values())

Identify = Callable[[bytes], tuple[str, float]]
"""Label and probability of a file's content."""


@cache
def identify_by_magika() -> Identify:
    """magika's model, which its package brings along. Raises MissingExtraError without the extra `magika`."""
    try:
        from magika import Magika
    except ImportError:
        raise MissingExtraError("magika", "magika") from None
    model = Magika()

    def identify(raw: bytes) -> tuple[str, float]:
        found = model.identify_bytes(raw)
        return str(found.output.label), float(found.score)

    return identify


def named_by_content(found: Found, identify: Identify) -> Found:
    """A document of code with the language of its content. A file whose name says nothing is dropped if it is no code.

    A name stays where the content is unclear, and where magika does not know its language (Ada, Cython, Scheme).
    """
    if isinstance(found, Skipped) or found.code is None:
        return found
    unknown = found.code == UNKNOWN_CODE
    label, probability = identify(found.text.encode()) if unknown or found.code in _SEEN else ("", 0.0)
    language = LANGUAGES.get(label) if probability >= LEAST else None
    if language is None:
        return Skipped(found.name, "no_code") if unknown else found
    return (
        found
        if language == found.code
        else replace(found, code=language, more=found.more | {"code_by_name": found.code})
    )
