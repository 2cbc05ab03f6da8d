"""Chromium for slides: where it is, how it is started without network and with fixed fonts, and one tab of it.

A page is hostile until measured. Its scripts never run, a content security policy refuses every request, the browser
has no way to a network (a proxy that does not exist, no name resolves, no UDP, offline), and a page at `about:blank`
may not read files.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.errors import ConfigError, MissingExtraError
from glm5.tasks.slides.boxes import HEIGHT, PICTURES, WIDTH, overlap

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

VARIABLE = "CHROMIUM"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = """--disable-gpu --hide-scrollbars --font-render-hinting=none --force-color-profile=srgb --mute-audio
--disable-background-networking --disable-component-update --disable-sync --disable-extensions --no-first-run
--disable-remote-fonts --disable-lcd-text --proxy-server=http://127.0.0.1:9 --proxy-bypass-list=<-loopback>
--force-webrtc-ip-handling-policy=disable_non_proxied_udp
--disable-features=Translate,MediaRouter,OptimizationHints""".split()
RESOLVE = "--host-resolver-rules=MAP * ~NOTFOUND"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; base-uri 'none'"
LOW = 10
"""Height of the first pass's viewport: whatever a page stretches to the viewport is then as high as its content."""
FONT_FOLDERS = ("/usr/share/fonts/truetype/dejavu", "/usr/share/fonts/dejavu", "/usr/share/fonts/TTF")
MEASURE = Path(__file__).with_name("measure.js")
GENERATED = re.compile(r"(?<!-)content|\\", re.I)
"""In every page with text of pseudo-elements."""
LIMITS = {"nodes": 1500, "rects": 40, "lines": 2500, "text": 400}

# Rules of the first layer that are important outrank all rules of the page, and no page can name this layer.
LAYER = f"glm5-{secrets.token_hex(8)}"
STILL = "transition: none !important"
BARE_RULES = f"""*, *::before, *::after, *::marker, *::first-line, *::first-letter {{
  {STILL}; text-shadow: none !important;
  -webkit-text-fill-color: transparent !important; -webkit-text-stroke-color: transparent !important;
  text-emphasis-color: transparent !important }}"""
# The page in black on white without anything but its letters and pictures, in the same places.
REFERENCE_RULES = f"""*, *::first-line, *::first-letter {{ {STILL}; color: #000 !important; background: none !important;
  -webkit-text-fill-color: #000 !important; -webkit-text-stroke: 0 !important; text-shadow: none !important;
  text-decoration: none !important; -webkit-text-security: none !important; border-color: transparent !important;
  border-image: none !important; outline-color: transparent !important; box-shadow: none !important;
  column-rule-color: transparent !important; opacity: 1 !important; mix-blend-mode: normal !important;
  mask: none !important; clip-path: none !important; -webkit-box-reflect: none !important }}
  html {{ background: #fff !important }}
  svg, canvas, video, *::before, *::after {{ opacity: 0 !important }}
  *::marker {{ color: transparent !important; -webkit-text-fill-color: transparent !important }}"""
LOOK = f"""const look = (rules) => {{
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`@layer {LAYER} {{ ${{rules}} }}`);
  document.adoptedStyleSheets = [sheet];
}}; const set = (e, name, value) => e.style.setProperty(name, value, "important");"""
BARE = f"""((pictures) => {{ {LOOK}
  for (const e of document.querySelectorAll("[style]"))
    if (e.style.cssText.includes("!important"))
      for (const name of [...e.style]) e.style.setProperty(name, e.style.getPropertyValue(name));
  for (const e of document.querySelectorAll("*")) {{
    const style = getComputedStyle(e);
    if (style.backgroundClip.includes("text")) set(e, "background", "none");
    if (style.textDecorationLine !== "none") set(e, "text-decoration-color", style.textDecorationColor);
  }}
  for (const i of pictures) set(measured[i], "opacity", "0");
  look(`{BARE_RULES}`);
}})"""
# An identity in place of a filter: without any, what is placed relative to the element would move.
REFERENCE = f"""((pictures) => {{ {LOOK}
  for (const e of document.querySelectorAll("*")) {{
    const style = getComputedStyle(e);
    if (style.filter !== "none") set(e, "filter", "brightness(1)");
    if (style.backdropFilter !== "none") set(e, "backdrop-filter", "brightness(1)");
  }}
  for (const e of document.images) set(e, "opacity", pictures.some((i) => measured[i] === e) ? "1" : "0");
  look(`{REFERENCE_RULES}`);
}})"""
# Fading in ends at its end, and what never ends is as if it had not begun. What takes longer than a reader waits, never
# begins or never ends is noted, unless it only fades a little.
SETTLE = """(() => {
  const faint = (frames) => frames.every((frame) => Object.entries(frame).every(([name, value]) =>
    ["offset", "computedOffset", "easing", "composite"].includes(name) || (name === "opacity" && +value >= 0.3)));
  for (const a of document.getAnimations()) {
    const effect = a.effect, ends = +effect.getComputedTiming().endTime;
    const calm = a.timeline === document.timeline && a.playState !== "paused" && a.playbackRate === 1 && ends <= 5000;
    if (!calm && !faint(effect.getKeyframes())) restless.add(effect.target);
    try { a.finish() } catch { a.cancel() }
  }
})()"""
FRESH = "document.adoptedStyleSheets = []; globalThis.restless = new Set();"  # the document object outlives its content
LOADED = "[...document.images].every((image) => image.complete)"


def find_chromium() -> str:
    """Path of the browser: the variable CHROMIUM, or the first of `NAMES` on the path. Raises ConfigError without."""
    named = os.environ.get(VARIABLE)
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if not found or not shutil.which(found):
        raise ConfigError(
            f"slides are measured in Chromium, and {named or 'none'} was found; install one (Debian: `apt install "
            f"chromium-headless-shell`) or name it in the variable {VARIABLE}, or do without (--static of `glm5 task "
            'score-slide`, measure = "static" in a recipe).'
        )
    return found


@cache
def font_folder() -> Path:
    """Folder of the DejaVu fonts: the system's, or the copy that matplotlib brings. Raises ConfigError without."""
    spec = find_spec("matplotlib")
    shipped = [Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"] if spec and spec.origin else []
    for folder in (*map(Path, FONT_FOLDERS), *shipped):
        if (folder / "DejaVuSans.ttf").is_file():
            return folder
    raise ConfigError(
        "slides are measured with the DejaVu fonts, which were not found; install them (Debian: `apt install "
        "fonts-dejavu-core`) or matplotlib, which brings a copy."
    )


def font_config(folder: Path) -> str:
    """A fontconfig file with the DejaVu fonts alone, so that a page has the same lines on every machine."""
    families = {"sans-serif": "DejaVu Sans", "serif": "DejaVu Serif", "monospace": "DejaVu Sans Mono"}
    aliases = "".join(
        f"<alias><family>{name}</family><prefer><family>{font}</family></prefer></alias>"
        for name, font in families.items()
    )
    return (
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>'
        f"<dir>{font_folder()}</dir><cachedir>{folder}/fonts</cachedir>{aliases}</fontconfig>"
    )


def playwright_driver() -> Any:
    """Playwright's async entry. Raises MissingExtraError without the package, or without Pillow for screenshots."""
    for package, name in (("playwright", "playwright"), ("PIL", "Pillow")):
        if find_spec(package) is None:
            raise MissingExtraError(name, "slides")
    from playwright.async_api import async_playwright

    return async_playwright()


class Chromium:
    """One browser process with a home of its own. `close` ends it, also if it hangs."""

    def __init__(self, driver: Playwright) -> None:
        self._driver = driver
        self._home = Path(tempfile.mkdtemp(prefix="glm5-slides-"))
        self._mark = f"--glm5-slides={secrets.token_hex(8)}"
        self.browser: Browser | None = None
        self.rendered = 0

    async def start(self) -> None:
        """Start the process. Raises an error of Playwright if it does not answer within 30 s."""
        (self._home / "fonts.conf").write_text(font_config(self._home), encoding="utf-8")
        own = {"HOME": str(self._home), "TMPDIR": str(self._home), "FONTCONFIG_FILE": str(self._home / "fonts.conf")}
        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses its own sandbox to root
        self.browser = await self._driver.chromium.launch(
            executable_path=find_chromium(),
            headless=True,
            chromium_sandbox=not sandbox,
            args=[*FLAGS, RESOLVE, self._mark, *sandbox],
            env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "TZ": "UTC", **own},
            timeout=30_000,
        )

    @property
    def alive(self) -> bool:
        return self.browser is not None and self.browser.is_connected()

    async def tab(self) -> Tab:
        """A tab in a context of its own."""
        assert self.browser is not None
        context = await self.browser.new_context(
            java_script_enabled=False, offline=True, service_workers="block", accept_downloads=False, permissions=[]
        )
        page = await context.new_page()
        channel = await context.new_cdp_session(page)
        frame = (await channel.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
        return Tab(self, context, page, channel, frame)

    def kill_large(self, limit_bytes: int) -> bool:
        """End every process of the browser that holds more memory than this; returns whether there was one."""
        large = [pid for pid in self._processes() if _resident(pid) > limit_bytes]
        for pid in large:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(large)

    def kill_flooding(self, limit_bytes: int) -> bool:
        """End the browser and playwright's driver, which has started it, if the driver holds more memory than this;
        returns whether it did."""
        processes = self._processes()
        drivers = {driver for driver in map(_parent, processes) if _parent(driver) == os.getpid()}
        if not any(_resident(pid) > limit_bytes for pid in drivers):
            return False
        for pid in (*drivers, *processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    async def close(self) -> None:
        """End the browser: politely, then by force."""
        processes = self._processes()
        if self.browser is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.browser.close(), 3.0)
        for pid in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._mark in _command(pid) or pid in self._processes():
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._home, ignore_errors=True)

    def _processes(self) -> list[int]:
        """The browser's process, which has our mark in its command line, and all below it."""
        parents = {}
        for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
            if entry.name.isdigit():
                parents[int(entry.name)] = _parent(int(entry.name))
        found = [pid for pid in parents if self._mark in _command(pid)]
        for pid in found:  # grows while it is walked
            found += [child for child, parent in parents.items() if parent == pid and child not in found]
        return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Tab:
    """Measures one page after the other. After any exception of `measure`, throw the tab away."""

    def __init__(self, chromium: Chromium, context: Any, page: Any, channel: Any, frame: str) -> None:
        self.chromium, self.pages = chromium, 0
        self._context, self._page, self._channel, self._frame = context, page, channel, frame
        self._script = MEASURE.read_text(encoding="utf-8")

    async def measure(
        self, html: str, pictures: bool, names: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        """Both passes' trees, and if `pictures` three screenshots: the page, the page without its text and pictures,
        and its text and pictures alone in black on white. `names` are the names of pictures by their addresses.

        The first pass is in a viewport 10 pixels high, the second at 1280 x 720.
        """
        await self._size(LOW)
        await self._evaluate(FRESH)
        policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>@layer {LAYER};</style>'
        limits = {**LIMITS, "names": dict(names), "generated": bool(GENERATED.search(html)), "layer": LAYER}
        script = f"({self._script})({json.dumps(limits)})"
        await self._channel.send("Page.setDocumentContent", {"frameId": self._frame, "html": _with_head(html, policy)})
        for _ in range(40):
            if await self._evaluate(LOADED):
                break
            await asyncio.sleep(0.05)
        await self._evaluate(SETTLE)
        first = await self._evaluate(script)
        await self._size(HEIGHT)
        await self._evaluate(SETTLE)
        second = await self._evaluate(script)
        images = []
        if pictures:
            images.append(await self.screenshot(0.5))
            taken = json.dumps(alone(second["boxes"]))
            for look in (BARE, REFERENCE):
                await self._evaluate(f"{look}({taken})")
                images.append(await self.screenshot(0.5))
        if self._page.url != "about:blank":
            raise RuntimeError(f"the page left for {self._page.url:.60}")
        return first, second, images

    async def screenshot(self, scale: float) -> Any:
        """The page at 1280 x 720 as an array [height, width, 3] of uint8, scaled."""
        import numpy as np
        from PIL import Image

        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": scale}
        found = await self._channel.send(
            "Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True, "clip": clip}
        )
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB"))

    async def close(self) -> None:
        """Close the tab, if it still answers."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._context.close(), 3.0)

    async def _size(self, height: int) -> None:
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._channel.send("Emulation.setDeviceMetricsOverride", size)

    async def _evaluate(self, expression: str) -> Any:
        found = await self._channel.send("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        if "exceptionDetails" in found:
            raise RuntimeError(f"measuring failed: {found['exceptionDetails'].get('text', '')}")
        return found["result"].get("value")


def alone(boxes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the pictures without text on them. The others stay, so that text on them keeps its background."""
    lines = [rect for box in boxes if box["tag"] not in PICTURES for rect in box.get("rects", ())]
    pictures = [(i, box["rect"]) for i, box in enumerate(boxes) if box["tag"] in PICTURES]
    return [i for i, rect in pictures if not any(overlap(rect, line) > 0 for line in lines)]


def _with_head(html: str, head: str) -> str:
    """The document with `head` before anything of its own, in standards mode whatever it asks for: in quirks mode, the
    body is always as high as the window."""
    text = html.lstrip("\ufeff \t\r\n")
    if text[:9].lower() == "<!doctype":
        text = text[text.find(">") + 1 :] if ">" in text else ""
    return f"<!doctype html>{head}{text}"
