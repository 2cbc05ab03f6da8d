"""Seeded ways to spoil a page of the list of honest designs: CSS put behind its own, or a part taken out or doubled."""

from __future__ import annotations

import random

from tests.tasks.slides.pages import BRIEF

TEXTS = "li,p,td,.card,.line div,.kpi span,.steps div,.p,figcaption"
STYLES = (
    "SELF{font-size:SMALLpx!important}",
    "SELF{color:PALE!important}",
    "li,p,td,.card,.p{margin-bottom:GAPpx!important;padding-bottom:20px!important} img{height:420px!important}",
    ".slide{height:TALLpx!important;min-height:TALLpx!important}",
    ".slide{height:SHORTpx!important;min-height:0!important;overflow:hidden!important}",
    "img{position:absolute!important;left:90px!important;top:OVERpx!important;margin:0!important}",
    "h1{position:absolute!important;left:80px!important;top:DOWNpx!important;margin:0!important}",
    "img{width:1000px!important;height:120px!important;object-fit:fill!important}",
    "img{opacity:0!important}",
    "h1{position:relative!important;left:-SIDEpx!important;top:-20px!important}",
    "SELF{letter-spacing:14px!important}",
    "SELF{filter:blur(6px)!important}",
    "SELF{position:relative!important;left:RIGHTpx!important}",
    ".slide{background:repeating-linear-gradient(45deg,#777 0 2px,#eee 2px 6px)!important}",
    "h1{font-size:190px!important;line-height:1!important}",
    "SELF{line-height:.5!important}",
    ".slide{zoom:.7!important}",
)


def corrupt(page: str, seed: int) -> tuple[str, str]:
    """The spoiled page and what was done."""
    rng = random.Random(f"slide-corruption {seed}")
    kind = rng.randrange(len(STYLES) + 3)
    if kind == len(STYLES):
        gone = rng.choice([point for point in BRIEF.points if point in page] or [BRIEF.title])
        return page.replace(gone, ""), f"without {gone}"
    if kind == len(STYLES) + 1:
        return page.replace('<img src="chart" alt="">', "").replace('<img class=hero src="chart">', ""), "no picture"
    if kind == len(STYLES) + 2:
        return page.replace('src="chart"', 'src="chart2"'), "a picture that does not exist"
    numbers = {
        "SELF": TEXTS, "SMALL": rng.randint(5, 11), "PALE": rng.choice(("#fefefe", "#e9eef2", "transparent")),
        "GAP": rng.randint(60, 110), "TALL": rng.randint(780, 1100), "SHORT": rng.randint(380, 640),
        "OVER": rng.randint(60, 170), "DOWN": rng.randint(150, 260), "SIDE": rng.randint(220, 500),
        "RIGHT": rng.randint(1000, 1250),
    }  # fmt: skip
    style = STYLES[kind]
    for name, value in numbers.items():
        style = style.replace(name, str(value))
    return page.replace("</body>", f"<style>{style}</style></body>"), style
