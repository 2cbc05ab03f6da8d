"""The renderer pool: pages in, measured box trees out, from any thread (§4.2.5).

One browser serves many pages at a time, each in a context of its own. It is replaced after a crash or a hang, and after
`RECYCLE` pages. A page during whose measurement the browser dies is measured once more, in a browser for it alone: if
that dies too, it is the page's doing (PageFault: the policy's failure), and otherwise nothing happened. A browser that
cannot be started or does not measure even a plain page is an environment error (GradingError).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

from glm5.errors import DataError, GradingError, MissingExtraError
from glm5.files import atomic_write
from glm5.obs.logs import get_logger
from glm5.tasks.slides.boxes import Extents, Slide, plain, slide_of
from glm5.tasks.slides.browser import Chromium, Tab, playwright_driver
from glm5.tasks.slides.markup_rules import MOST_BYTES, too_large

PAGE_SECONDS = 10.0
PATIENCE = 3
"""How many times `PAGE_SECONDS` a page gets that is measured alone: the machine may be busy."""
MEMORY_BYTES = 1 << 30
"""Of one process of the browser while it measures."""
RECYCLE = 2000
TAB_PAGES = 100
KEPT = 4096
"""Measured slides kept in memory."""
VERSION = 2
"""Part of the key of stored measurements; raise it when measuring changes."""

_log = get_logger(__name__)


class PageFault(Exception):
    """A page that cannot be measured, by its own fault: too large, too many elements, too slow, or it ends browsers."""


class Filled(NamedTuple):
    """A page with its pictures in it, and the names of these by their addresses."""

    html: str
    names: Mapping[str, str]


PROBE = Filled("<!doctype html><title>probe</title><p>plain</p>", {})


class Renderer:
    """A pool of `tabs` tabs. `cache` is a folder for measured slides, which survive the process. Use it from any
    thread; `close` it, or use it in a `with`."""

    def __init__(
        self, tabs: int = 3, cache: Path | None = None, page_seconds: float = PAGE_SECONDS, images: bool = True
    ) -> None:
        self._tabs, self._cache, self._page_seconds, self._images = tabs, cache, page_seconds, images
        self._memory: OrderedDict[str, Slide | str] = OrderedDict()
        self._lock = threading.Lock()
        self._free: asyncio.Queue[Tab | None] | None = None
        self._chromium: Chromium | None = None
        self._starting: asyncio.Lock | None = None
        self._one = asyncio.Lock()
        self._driver: Any = None
        self.browsers = 0
        """Browsers started so far."""
        self.measured = 0
        """Pages measured so far, without those found in the cache."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="glm5-slides", daemon=True)
        self._thread.start()

    def measure(self, html: str, assets: Mapping[str, str] | None = None) -> Slide:
        """The measured page. `assets` maps names of pictures to data URIs; `src="NAME"` of an image takes them.

        Raises PageFault for a page that cannot be measured, GradingError if the renderer is at fault, MissingExtraError
        or ConfigError if Playwright, Chromium or fonts are missing.
        """
        if too_large(html):
            raise PageFault(f"it has more than {MOST_BYTES:,} bytes")
        whole = fill(html, assets or {})
        key = hashlib.sha256(f"{VERSION} {self._images} {whole.html}".encode("utf-8", "replace")).hexdigest()
        found = self._known(key)
        if found is None:
            found = self._call(self._measured(whole))
            self._keep(key, found)
        if isinstance(found, str):
            raise PageFault(found)
        return found

    def screenshot(self, html: str, assets: Mapping[str, str] | None = None, scale: float = 0.5) -> Any:
        """The page as a reader sees it at 1280 x 720: uint8 [height, width, 3]. Raises as `measure` does."""
        return self._call(self._shot(fill(html, assets or {}), scale))

    def close(self) -> None:
        """End the browser. A second call does nothing."""
        if not self._loop.is_closed():
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(20)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            if not self._thread.is_alive():
                self._loop.close()

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, coroutine: Any) -> Any:
        """The coroutine's result. A page waits for its turn as long as other pages have theirs."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        seconds = 4 * PATIENCE * self._page_seconds + 60
        while True:
            before = self.measured
            try:
                return future.result(seconds)
            except futures.TimeoutError:
                if self.measured > before:
                    continue
                future.cancel()
                raise GradingError(f"the renderer of slides did nothing for {seconds:g} s.") from None

    def _known(self, key: str) -> Slide | str | None:
        with self._lock:
            if key in self._memory:
                self._memory.move_to_end(key)
                return self._memory[key]
        if self._cache is None:
            return None
        try:
            data = json.loads((self._cache / f"{key}.json").read_text(encoding="utf-8"))
            return str(data["fault"]) if "fault" in data else slide_of(data)
        except (OSError, ValueError, TypeError, DataError):
            return None

    def _keep(self, key: str, found: Slide | str) -> None:
        with self._lock:
            self._memory[key] = found
            while len(self._memory) > KEPT:
                self._memory.popitem(last=False)
        if self._cache is not None:
            self._cache.mkdir(parents=True, exist_ok=True)
            data = {"fault": found} if isinstance(found, str) else plain(found)
            atomic_write(self._cache / f"{key}.json", json.dumps(data))

    async def _measured(self, page: Filled) -> Slide | str:
        """The slide, or the reason why the page itself cannot be measured."""
        raw = await self._attempt(page, self._images)
        if isinstance(raw, str):
            return raw
        try:
            return await asyncio.to_thread(_slide, *raw)
        except (DataError, ArithmeticError, ValueError) as error:  # such as a length that is infinite
            return f"it has numbers that mean nothing ({_brief(error)})"

    async def _shot(self, page: Filled, scale: float) -> Any:
        raw = await self._attempt(page, scale)
        if isinstance(raw, str):
            raise PageFault(raw)
        return raw[2][0]

    async def _attempt(self, page: Filled, pictures: bool | float, again: bool = False) -> Any:
        """The result of `_once`, in the shared browser and then in one of its own, or the page's fault as text. A page
        whose browser another page has ended is tried in the next one first."""
        tab = await self._take()
        chromium = self._chromium
        assert chromium is not None
        try:
            found = await self._once(chromium, tab, page, pictures)
        except asyncio.CancelledError:
            self._give(None)
            raise
        except Exception as error:
            _log.info("slides: a browser failed while measuring a page (%s); it is replaced.", _brief(error))
            self._give(None)
            bystander = self._chromium is not chromium and not again
            await self._drop(chromium)
            if bystander:
                return await self._attempt(page, pictures, again=True)
            async with self._one:  # more browsers at a time would slow each other down
                return await self._alone(page, pictures)
        tab.pages += 1
        fresh = tab.pages < TAB_PAGES and chromium is self._chromium
        if not fresh:
            await tab.close()
        self._give(tab if fresh else None)
        if chromium.rendered >= RECYCLE:
            await self._drop(chromium)
        return found

    async def _alone(self, page: Filled, pictures: bool | float) -> Any:
        chromium = Chromium(self._driver)
        try:
            try:
                await self._start(chromium)
                patient = 3 * PATIENCE * self._page_seconds  # a page must not gain from a machine that is busy
                await self._once(chromium, await chromium.tab(), PROBE, False, patient)
            except (DataError, MissingExtraError):
                raise
            except Exception as error:
                raise GradingError(f"Chromium does not measure even a plain page: {_brief(error)}.") from None
            try:
                return await self._once(chromium, await chromium.tab(), page, pictures, PATIENCE * self._page_seconds)
            except Exception as error:
                return f"it ended two browsers or took over {PATIENCE * self._page_seconds:g} s ({_brief(error)})"
        finally:
            await chromium.close()

    async def _once(
        self, chromium: Chromium, tab: Tab, page: Filled, pictures: bool | float, seconds: float | None = None
    ) -> Any:
        chromium.rendered += 1
        self.measured += 1
        watch = asyncio.ensure_future(self._watch(chromium))
        try:
            async with asyncio.timeout(self._page_seconds if seconds is None else seconds):
                if isinstance(pictures, float):
                    found = await tab.measure(page.html, False, page.names)
                    return (*found[:2], [await tab.screenshot(pictures)])
                return await tab.measure(page.html, pictures, page.names)
        finally:
            watch.cancel()

    async def _watch(self, chromium: Chromium) -> None:
        """While a page takes unusually long: end processes that grow too large."""
        while True:
            await asyncio.sleep(0.7)
            await asyncio.to_thread(chromium.kill_large, MEMORY_BYTES)

    async def _take(self) -> Tab:
        """A tab of the present browser; starts a browser if there is none."""
        if self._free is None:
            self._free, self._starting = asyncio.Queue(), asyncio.Lock()
            for _ in range(self._tabs):
                self._free.put_nowait(None)
        tab = await self._free.get()
        assert self._starting is not None
        try:
            async with self._starting:
                if self._chromium is None or not self._chromium.alive:
                    if self._chromium is not None:
                        await self._chromium.close()
                    if self._driver is None:
                        self._driver = await playwright_driver().start()
                    self._chromium = Chromium(self._driver)
                    await self._start(self._chromium)
                if tab is None or tab.chromium is not self._chromium:
                    tab = await self._chromium.tab()
            return tab
        except BaseException as error:
            self._free.put_nowait(None)
            if self._driver is not None and not isinstance(error, asyncio.CancelledError):
                driver, self._driver, self._chromium = self._driver, None, None  # it may have died itself
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(driver.stop(), 3.0)
            if isinstance(error, DataError | ValueError | MissingExtraError | asyncio.CancelledError):
                raise
            raise GradingError(f"Chromium cannot be started for slides: {_brief(error)}.") from None

    async def _start(self, chromium: Chromium) -> None:
        self.browsers += 1
        await chromium.start()

    def _give(self, tab: Tab | None) -> None:
        assert self._free is not None
        self._free.put_nowait(tab)

    async def _drop(self, chromium: Chromium) -> None:
        """End a browser, unless another page's failure has done so."""
        if self._chromium is chromium:
            self._chromium = None
            await chromium.close()

    async def _end(self) -> None:
        if self._chromium is not None:
            await self._chromium.close()
        if self._driver is not None:
            await self._driver.stop()


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:120]


def fill(html: str, assets: Mapping[str, str]) -> Filled:
    """The page with its pictures in it: `src="NAME"` becomes the data URI of that name."""
    for name, uri in assets.items():
        there = rf"""(?<![\w-])src\s*=\s*(["']?)\s*{re.escape(name)}\s*\1(?=[\s/>])"""
        html = re.sub(there, lambda _, uri=uri: f'src="{uri}"', html, flags=re.I)  # type: ignore[misc]
    return Filled(html, {uri: name for name, uri in assets.items()})


def _slide(first: Mapping[str, Any], second: Mapping[str, Any], images: list[Any]) -> Slide:
    """The record of what a tab measured."""
    low, high = (
        slide_of({
            "boxes": found["boxes"], "more": found["more"], "natural_height": first["height"],
            "page_width": max(first["width"], second["width"]), "page_height": second["height"],
            "content_bottom": 0, "content_right": 0,
        })
        for found in (first, second)
    )  # fmt: skip
    extents = [Extents.of(found.boxes) for found in (low, high)]
    boxes, pixels = high.boxes, dict[str, float]()
    if images:
        from glm5.tasks.slides.picture import statistics, with_ink

        boxes = with_ink(boxes, *images)
        pixels = statistics(boxes, *images[:2])
    return dataclasses.replace(
        high,
        boxes=boxes,
        pixels=pixels,
        content_bottom=max(found.bottom for found in extents),
        content_right=max(found.right for found in extents),
        stretched=_stretched(low, high),
        more=low.more or high.more,
    )


def _stretched(low: Slide, high: Slide) -> float:
    """By how much an element is higher in the second pass, or a text or picture of the page's flow in another place."""
    found, free = [0.0], set[int]()
    boxes = [[i for i, box in enumerate(slide.boxes) if not box.hidden] for slide in (low, high)]
    for i, k in zip(*boxes):
        a, b = low.boxes[i], high.boxes[k]
        if b.style.position in ("absolute", "fixed") or b.parent in free:
            free.add(k)
        if b.tag not in ("img", "html"):
            found.append(b.rect[3] - a.rect[3])
        if k not in free and (b.text or b.is_picture):
            found += [abs(y - x) for x, y in zip(a.rect, b.rect)]
    return max(found)


_SHARED: dict[int, Renderer] = {}
_SHARED_LOCK = threading.Lock()


def shared_renderer() -> Renderer:
    """The renderer of this process, made at the first call."""
    with _SHARED_LOCK:
        pid = os.getpid()
        if pid not in _SHARED:
            _SHARED.clear()  # a forked child has no threads of its parent
            _SHARED[pid] = Renderer()
            atexit.register(_SHARED[pid].close)
        return _SHARED[pid]
