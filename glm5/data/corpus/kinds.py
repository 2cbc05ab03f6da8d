"""Formats, kinds and programming languages of files, by name."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from glm5.config.corpus import Kind

COMPRESSIONS = (".gz", ".bz2", ".xz", ".dz")
ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".whl")

_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".asciidoc", ".org", ".tex")
_PROSE_NAMES = "readme* news* change* todo* authors* faq* copyright* licen[cs]e* history* install* notice*".split()
_LANGUAGES = {
    "Ada": ".adb .ads",
    "Assembly": ".asm .s",
    "C": ".c .h",
    "C#": ".cs",
    "C++": ".cc .cpp .cxx .hh .hpp .hxx .ipp .tcc",
    "CMake": ".cmake",
    "CSS": ".css .scss",
    "CUDA": ".cu .cuh",
    "Clojure": ".clj .cljs",
    "Common Lisp": ".lisp .lsp",
    "Cython": ".pyx .pxd .pxi",
    "Dart": ".dart",
    "Elixir": ".ex .exs",
    "Emacs Lisp": ".el",
    "Erlang": ".erl .hrl",
    "Fortran": ".f .f90 .f95 .f03",
    "Go": ".go",
    "Groovy": ".groovy .gradle",
    "Haskell": ".hs",
    "Java": ".java",
    "JavaScript": ".js .mjs .cjs .jsx",
    "Julia": ".jl",
    "Kotlin": ".kt .kts",
    "Lua": ".lua",
    "M4": ".m4",
    "Makefile": ".mk .mak",
    "OCaml": ".ml .mli",
    "PHP": ".php",
    "Perl": ".pl .pm .t",
    "PowerShell": ".ps1",
    "Prolog": ".pro",
    "Python": ".py .pyi",
    "R": ".r",
    "Ruby": ".rb",
    "Rust": ".rs",
    "SQL": ".sql",
    "Scala": ".scala .sc",
    "Scheme": ".scm .ss",
    "Shell": ".sh .bash .zsh",
    "Swift": ".swift",
    "Tcl": ".tcl",
    "TypeScript": ".ts .tsx",
    "VHDL": ".vhd .vhdl",
    "Verilog": ".v .sv",
    "Vim script": ".vim",
    "Zig": ".zig",
}
_BY_SUFFIX = {suffix: language for language, suffixes in _LANGUAGES.items() for suffix in suffixes.split()}
_BY_NAME = {"makefile": "Makefile", "gnumakefile": "Makefile", "cmakelists.txt": "CMake", "dockerfile": "Dockerfile"}


UNKNOWN_CODE = "?"
"""Language of a file whose name says nothing: its content decides (`SourceConfig.by_content`)."""


@dataclass(frozen=True)
class FileType:
    """`format` is html, text, pdf, warc, jsonl, parquet, dictionary or archive; `compression` one of COMPRESSIONS or
    empty; `code` the programming language of source code. `kind` is None for archives: each file in one has its own."""

    format: str
    kind: Kind | None
    compression: str = ""
    code: str | None = None


UNNAMED = FileType("text", "code", code=UNKNOWN_CODE)


def file_type(path: str) -> FileType | None:
    """What a file is by its name; None for a file that is not read."""
    name = PurePosixPath(path).name.lower()
    compression = next((end for end in COMPRESSIONS if name.endswith(end)), "")
    name = name.removesuffix(compression)
    suffix = PurePosixPath(name).suffix
    if suffix in ARCHIVES:
        return FileType("archive", None, compression)
    if suffix == ".dict":
        return FileType("dictionary", "prose", compression) if compression in ("", ".dz") else None
    if suffix == ".warc":
        return FileType("warc", "web", compression)
    if compression == ".gz" or not compression:
        if suffix in (".jsonl", ".ndjson"):
            return FileType("jsonl", "prose", compression)
    if suffix == ".parquet":
        return None if compression else FileType("parquet", "prose")
    if suffix == ".pdf":
        return FileType("pdf", "prose", compression)
    if suffix in (".html", ".htm", ".xhtml"):
        return FileType("html", "web", compression)
    language = _BY_NAME.get(name) or _BY_SUFFIX.get(suffix)
    if language is not None:
        return FileType("text", "code", compression, language)
    if suffix in _PROSE or any(fnmatchcase(name, pattern) for pattern in _PROSE_NAMES):
        return FileType("text", "prose", compression)
    return None
