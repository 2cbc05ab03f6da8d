"""Make `docs/levels.svg`: the packages of glm5 by import level, read from the imports themselves.

    .venv/bin/python docs/levels.py

A package stands one row above the highest package that it imports. Hover over a box to see what it imports.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "glm5"
WIDTH, ROW, BOX, GAP, LEFT = 760, 46, 30, 10, 36


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node, without looking into expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(child)


def imported(path: Path) -> Iterator[str]:
    """Packages and top-level modules of glm5 that a file imports (absolutely, as all our imports are)."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "glm5" else [f"glm5.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "glm5" and len(parts) > 1 and not parts[1].startswith("__"):
                yield parts[1]


@functools.cache
def graph() -> dict[str, set[str]]:
    """Package or module -> those that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own.startswith("__"):
            continue
        found.setdefault(own, set()).update(set(imported(path)) - {own})
    return found


def levels(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Names by level, the lowest first."""
    level: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in level:
            level[name] = 1 + max((of(other) for other in imports[name]), default=-1)
        return level[name]

    for name in imports:
        of(name)
    return [sorted(name for name in imports if level[name] == number) for number in range(max(level.values()) + 1)]


def svg() -> str:
    imports = graph()
    rows = levels(imports)
    height = ROW * len(rows) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" text-anchor="middle">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, names in enumerate(rows):
        top = height - ROW * (number + 1)
        width = (WIDTH - LEFT - GAP * (len(names) + 1)) / len(names)
        out.append(f'<text x="{LEFT / 2}" y="{top + BOX / 2 + 5}" fill="#888888">{number}</text>')
        for place, name in enumerate(names):
            left = LEFT + GAP + place * (width + GAP)
            below = ", ".join(sorted(imports[name])) or "nothing"
            out.append(
                f'<g><title>{name} imports {below}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{BOX}" rx="4" fill="#e8f0fa" stroke="#5b7fa6"/>'
                f'<text x="{left + width / 2:.1f}" y="{top + BOX / 2 + 5}" fill="#1b2a3a">{name}</text></g>'
            )
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "levels.svg").write_text(svg(), encoding="utf-8")
