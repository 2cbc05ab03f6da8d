"""Installed manual pages of sections 1 and 8, with their SEE ALSO references and the packages that ship them."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from glm5.tasks.search.records import Record, Ref, Source

MOST_BYTES = 200_000
MOST_TEXT = 4_000
MOST_PAGES = 4_000
_SEE = re.compile(r"\b([A-Za-z0-9][\w.+-]*)\s?\(([18])\)")


def _find(roots: list[Path]) -> list[Path] | None:
    for root in (*roots, Path("/")):
        paths = sorted(
            p for s in "18" for p in (root / f"usr/share/man/man{s}").glob(f"*.{s}.gz") if not p.is_symlink()
        )
        if paths:
            return paths[:: max(1, len(paths) // MOST_PAGES)][:MOST_PAGES]
    return None


def _read(paths: list[Path]) -> Iterator[Record]:
    owners = _owners(paths[0].parents[4])
    for path in paths:
        name, _, section = path.name.removesuffix(".gz").rpartition(".")
        try:
            with gzip.open(path) as file:
                source = file.read(MOST_BYTES).decode("utf-8", "replace")
        except (OSError, EOFError, zlib.error):
            continue  # a damaged page is no page
        text = _plain(source)
        if len(text) < 80 or source.startswith(".so "):
            continue
        record = Record("manpage", (f"man:{name}.{section}",), f"{name}({section})")
        record.claim("man_section", section)
        record.claim("shipped_in", Ref("package", f"deb:{owner}") if (owner := owners.get(path.name)) else None)
        _, heading, also = text.partition("SEE ALSO")
        for other, number in dict.fromkeys(_SEE.findall(also[:3000] if heading else "")):
            if (other, number) != (name, section):
                record.claim("man_refers", Ref("manpage", f"man:{other}.{number}"))
        record.text = text[:MOST_TEXT]
        yield record


def _owners(root: Path) -> dict[str, str]:
    """The package that ships each manual page, from dpkg's lists."""
    owners = {}
    for path in sorted((root / "var/lib/dpkg/info").glob("*.list")):
        package = path.stem.partition(":")[0]
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("/usr/share/man/man1/", "/usr/share/man/man8/")):
                owners[line.rpartition("/")[2]] = package
    return owners


def _plain(source: str) -> str:
    """The text of a page's roff source, roughly: requests are left out, their words kept where they are text."""
    lines = []
    for line in source.splitlines():
        if line.startswith((".SH", ".Sh", ".SS", ".Ss")):
            lines.append("\n" + line[3:].strip(' "') + "\n")
        elif line.startswith((".BR", ".B ", ".I ", ".IR", ".RB", ".RI", ".Nm", ".Nd", ".Xr", ".Ar", ".Cm")):
            joined = "" if line[1:3] in ("BR", "IR", "RB", "RI") else " "
            parts = re.findall(r'"([^"]*)"|(\S+)', line[3:])
            shown = joined.join(a or b for a, b in parts)
            lines.append(re.sub(r"^(\S+) (\d)\b", r"\1(\2)", shown) if line.startswith(".Xr") else shown)
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"\\f[A-Z]|\\f\(..|\\f\[[^]]*\]|\\s[+-]?\d|\\[&|/^,%]", "", text)
    text = text.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\").replace("\\ ", " ")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", text)).strip()


MANPAGES = Source("manpages", "the licence of each page's package", "apt install manpages man-db", _find, _read)
