"""Pages of a training stage as small pictures with their scores, for the report: the first update's and the last's.

`slides.json` in the stage's folder: {"before": {"step", "pages"}, "after": ...}; a page has its title, the picture as
base64 of a PNG, its total, parts, faults and tricks. One page per prompt, of its first rollout: nothing is picked out.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.errors import Glm5Error
from glm5.files import atomic_write
from glm5.obs.logs import get_logger
from glm5.records import Trajectory
from glm5.tasks.slides.brief import PageBrief, assets_of
from glm5.tasks.slides.render import PageFault, shared_renderer

FILE = "slides.json"
MOST_PAGES = 8
SCALE = 0.25

_log = get_logger(__name__)


def write_pages(folder: Path, step: int, groups: Sequence[Sequence[Trajectory]]) -> bool:
    """Record an update's first pages. Returns whether there was one. A page without a picture is recorded too."""
    first = [group[0] for group in groups if group and group[0].detail.get("pages")]
    pages = [_page(page) for t in first for page in t.detail["pages"] if isinstance(page, Mapping)][:MOST_PAGES]
    if not pages:
        return False
    path = folder / FILE
    found: dict[str, Any] = {}
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found = {}
    now = {"step": step, "pages": pages}
    if not isinstance(found, dict) or "before" not in found or found["before"].get("step", 0) >= step:
        found = {"before": now}
    found["after"] = now
    atomic_write(path, json.dumps(found))
    return True


def _page(page: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: page.get(name) for name in ("total", "compliant", "parts", "faults", "tricks")}
    brief, html = page.get("brief"), page.get("html")
    title = brief.get("title", "") if isinstance(brief, Mapping) else ""
    picture = ""
    if html and isinstance(brief, Mapping):
        try:
            picture = thumbnail(str(html), PageBrief(title, (), tuple(brief["pictures"]), tuple(brief["ratios"])))
        except (Glm5Error, PageFault, KeyError, TypeError, ValueError) as error:
            _log.info("slides: no picture of a page for the report (%s).", error)
    return {"title": title, "picture": picture, **kept}


def thumbnail(html: str, brief: PageBrief, scale: float = SCALE) -> str:
    """The page at 1280 x 720, scaled, as base64 of a PNG. Raises as `Renderer.screenshot` does."""
    from PIL import Image

    out = io.BytesIO()
    shot = Image.fromarray(shared_renderer().screenshot(html, assets_of(brief), scale))
    shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()
