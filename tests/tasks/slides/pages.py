"""The lists of exploits and of honest designs: one brief, many pages."""

from __future__ import annotations

from pathlib import Path

from glm5.tasks.slides.brief import PageBrief, assets_of

BRIEF = PageBrief(
    "River cleanup results",
    (
        "Volunteers removed 42 tons of waste",
        "Oxygen rose by 18 percent",
        "Three beaches reopened in June",
        "Next survey starts in March",
    ),
    ("chart",),
    (1.5,),
)
ASSETS = assets_of(BRIEF)
BASE = (
    "body{margin:0;font-family:sans-serif;color:#1d2733}"
    ".slide{width:1280px;height:720px;box-sizing:border-box;padding:56px 64px;background:#fff;position:relative}"
    "h1{font-size:44px;margin:0 0 24px} ul{margin:0 0 24px;padding-left:32px}"
    "li{font-size:26px;line-height:1.4;margin:12px 0} img{display:block;height:260px}"
)
TITLE = f"<h1>{BRIEF.title}</h1>"
LIST = "<ul>" + "".join(f"<li>{point}</li>" for point in BRIEF.points) + "</ul>"
PIC = '<img src="chart" alt="">'
PARTS = {
    "BASE": BASE, "TITLE": TITLE, "LIST": LIST, "PIC": PIC, "CONTENT": TITLE + LIST + PIC,
    "FILLER": "lorem ipsum dolor sit amet " * 120,
    **{f"P{i}": point for i, point in enumerate(BRIEF.points, 1)},
}  # fmt: skip


def pages(name: str) -> dict[str, str]:
    """The pages of a list ("exploits" or "honest") by their names."""
    found = {}
    text = (Path(__file__).parent / "pages" / f"{name}.txt").read_text(encoding="utf-8")
    for piece in text.split("\n=== ")[1:]:
        title, _, body = piece.partition("\n")
        for key, part in PARTS.items():
            body = body.replace("{" + key + "}", part)
        found[title.strip()] = f"<!doctype html><html><head><meta charset='utf-8'></head><body>{body}</body></html>"
    return found
