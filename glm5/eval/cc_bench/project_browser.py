"""A browser with one project in it, for a judge: the page by its accessibility tree, its files, and a terminal.

The project is hostile. Its scripts run, but the browser has no way to a network: requests for the project's own address
are answered from memory, all others are refused, and names do not resolve. A page that hangs is ended with its browser.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import mimetypes
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from glm5.errors import GradingError
from glm5.eval.cc_bench.browser_tools import SPECS, TARGET, ToolResult, is_text, shown
from glm5.sandbox.container import open_environment
from glm5.sandbox.environment import RoomLimits
from glm5.sandbox.programs import Room
from glm5.tasks.cc_bench.project import APP, Project
from glm5.tasks.slides.boxes import HEIGHT, WIDTH
from glm5.tasks.slides.browser import Chromium, playwright_driver
from glm5.tasks.tools.python_tool import cut

HOST = "http://project.test"
ACTION_S, PAGE_S = 3.0, 15.0
"""Seconds until an element is given up, and until a page counts as hung."""
OPENS_S = 3.0
"""Seconds that a project has to show something."""
SETTLE_S = 0.1
"""Seconds after an action before the page is read."""
MOST_SHOWN = 8000
"""Characters of a result."""
MOST_CONSOLE = 40
MEMORY_BYTES = 1 << 30
"""Of one process of the browser."""
DRIVER_BYTES = 384 << 20
"""Of playwright's driver, which keeps what a page writes to the console until it is read."""
COMMAND_S = 30.0
LIMITS = RoomLimits(memory_mb=1024, disk_mb=128)
_TARGET = re.compile(r'([a-z]+)(?: "((?:[^"\\]|\\.)*)")?(?: #(\d{1,3}))?')
DESCRIBED = "described"
_DESCRIBED = """{ queryAll: (e) => {
  const box = e.getBoundingClientRect(), style = getComputedStyle(e), n = (x) => Math.round(x * 10) / 10;
  const names = ["display", "visibility", "color", "background-color", "fill", "stroke", "font-size", "opacity"];
  const text = (e.innerText ?? e.textContent ?? "").trim().replace(/\\s+/g, " ").slice(0, 120);
  const found = document.createElement("p");
  found.textContent = e.cloneNode(false).outerHTML.slice(0, 400) + (text && ` text: "${text}"`)
    + " box: " + [box.x, box.y, box.width, box.height].map(n).join(", ")
    + "; " + names.map((name) => name + ": " + style.getPropertyValue(name)).join("; ");
  return [found];
} }"""
"""A selector engine: an element's description as the text of a new element. Playwright runs engines that are content
scripts in an isolated world, so that nothing that the page's scripts have put in place of the language's own is used.
`evaluate` runs in the page's world, where every answer can be forged."""
MOST_ELEMENTS = 12


class _Failed(Exception):
    """A call that cannot be carried out; the text is for the judge."""


class ProjectBrowser:
    """The tools on one project; `with` starts and ends the browser. Use it from one thread. Raises GradingError if
    Chromium cannot be started, ConfigError or MissingExtraError if it or playwright is missing."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._runner = asyncio.Runner()
        self._driver: Any = None
        self._chromium: Chromium | None = None
        self._context: Any = None
        self._page: Any = None
        self._lines: list[str] = []
        self._room: Room | None = None
        self._stack, self._rooms = contextlib.ExitStack(), contextlib.ExitStack()
        self._left, self._flooded = threading.Event(), False

    def __enter__(self) -> ProjectBrowser:
        self._stack.callback(self._runner.close)
        self._stack.callback(self._rooms.close)
        try:
            self._runner.run(self._drive())
            self._stack.callback(lambda: self._runner.run(self._stop_driver()))
            self._stack.callback(lambda: self._runner.run(self._end()))
            watch = threading.Thread(target=self._watch, daemon=True)
            watch.start()
            self._stack.callback(watch.join)
            self._stack.callback(self._left.set)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def _drive(self) -> None:
        self._driver, self._flooded = await playwright_driver().start(), False
        await self._driver.selectors.register(DESCRIBED, script=_DESCRIBED, content_script=True)

    async def _stop_driver(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone
            await asyncio.wait_for(self._driver.stop(), ACTION_S)

    async def _end(self) -> None:
        if self._chromium is not None:
            await self._chromium.close()
        self._chromium = self._context = self._page = None

    def opens(self) -> bool:
        """Whether the project shows anything in its first seconds: a tree, or a picture of more than one colour. Raises
        GradingError if Chromium cannot be started."""
        found = self.call("open", {})
        until = time.monotonic() + OPENS_S
        while not found.failed and not found.shown and not (found := self.call("screenshot", {})).shown:
            if time.monotonic() > until:
                return False
            time.sleep(SETTLE_S)
            found = self.call("look", {})
        return not found.failed

    def forget(self) -> None:
        """Begin anew: no page is open, the console is empty, and the terminal has the source as it was."""
        if self._context is not None:
            try:
                self._runner.run(asyncio.wait_for(self._context.close(), ACTION_S))
            except Exception:  # it hangs, or is gone
                self._runner.run(self._end())
        self._page = self._context = self._room = None
        self._lines = []
        self._rooms.close()

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """The result of a tool; that of a call that is wrong or fails has `failed`. Raises GradingError if the machine
        fails."""
        try:
            found = self._called(name, arguments)
        except _Failed as error:
            return ToolResult(f"error: {error}", failed=True)
        if isinstance(found, str):  # not of the running page
            return ToolResult(cut(found, MOST_SHOWN) or "[nothing]")
        return ToolResult(cut(found.text, MOST_SHOWN), cut(found.shown, MOST_SHOWN))

    def _called(self, name: str, arguments: Mapping[str, Any]) -> ToolResult | str:
        spec = next((one["function"] for one in SPECS if one["function"]["name"] == name), None)
        if spec is None:
            raise _Failed(f"there is no tool {name!r:.60}")
        known, needed = spec["parameters"]["properties"], spec["parameters"]["required"]
        if not set(needed) <= set(arguments) <= set(known) or not all(map(is_text, arguments.values())):
            raise _Failed(f"{name} takes {', '.join(known) or 'no arguments'}, as short text")
        found: ToolResult | str = getattr(self, f"_{name}")(**arguments)
        return found

    def _run(self, act: Callable[[Any], Coroutine[Any, Any, ToolResult]]) -> ToolResult:
        """Carry out `act` on the page. A page that hangs is ended."""
        if self._page is None:
            raise _Failed("no page is open; call open")
        try:
            return self._runner.run(asyncio.wait_for(act(self._page), PAGE_S))
        except _Failed:
            raise
        except Exception as error:  # of the driver: it is not visible, not enabled, the page has crashed or hangs
            if self._answers():
                raise _Failed(" ".join(str(error).split())[:300]) from None
            self._runner.run(self._end())
            raise _Failed("the page did not answer and was ended") from None

    def _answers(self) -> bool:
        try:
            self._runner.run(asyncio.wait_for(self._page.evaluate("0"), ACTION_S))
        except Exception:
            return False
        return True

    def _watch(self) -> None:
        """Keep the browser from growing too large, in a call and between calls, when nobody reads what a page writes to
        the console."""
        while not self._left.wait(0.5):
            if (chromium := self._chromium) is not None:
                chromium.kill_large(MEMORY_BYTES)
                self._flooded |= chromium.kill_flooding(DRIVER_BYTES)

    def _open(self, path: str = "/") -> ToolResult:
        address = f"{HOST}/{path.removeprefix(HOST).lstrip('/')}"
        for attempt in range(2):
            try:
                self._runner.run(asyncio.wait_for(self._fresh(), 2 * PAGE_S))
                break
            except Exception as error:
                self._runner.run(self._end())
                if attempt:
                    raise GradingError(f"Chromium cannot be started: {' '.join(str(error).split())[:200]}.") from None

        async def act(page: Any) -> ToolResult:
            await page.goto(address, wait_until="load", timeout=1000 * PAGE_S / 2)
            return await self._tree(page)

        return self._run(act)

    async def _fresh(self) -> None:
        """A page without cookies, storage and history."""
        if self._flooded:
            await self._end()
            await self._stop_driver()
            await self._drive()
        if self._chromium is None or not self._chromium.alive:
            self._chromium = Chromium(self._driver)
            await self._chromium.start()
        if self._context is not None:
            await self._context.close()
        assert self._chromium.browser is not None
        self._context = await self._chromium.browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT}, service_workers="block", accept_downloads=False, permissions=[]
        )
        await self._context.route("**/*", self._serve)
        self._page, self._lines = await self._context.new_page(), []
        self._page.set_default_timeout(1000 * ACTION_S)
        self._page.on("console", lambda line: self._note(f"{line.type}: {line.text}"))
        self._page.on("pageerror", lambda error: self._note(f"uncaught: {error}"))
        self._page.on("dialog", self._dismiss)
        self._page.on("popup", self._close_popup)

    async def _serve(self, route: Any) -> None:
        url = urlsplit(route.request.url)
        if f"{url.scheme}://{url.netloc}" != HOST:
            self._note(f"refused: a request to {url.netloc}")
            await route.abort()
            return
        path, site = unquote(url.path).strip("/"), self.project.site
        names = (path, f"{path}.html", f"{path}/index.html".lstrip("/"))
        name = next((one for one in names if one in site), None)
        if name is None and "." not in path.rpartition("/")[2]:
            name = "index.html"  # a route of the page's own scripts
        if name is None:
            self._note(f"missing: /{path}")
            await route.fulfill(status=404, body="not found")
            return
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        kind = (
            {"application/octet-stream": "text/javascript"}.get(kind, kind) if name.endswith((".js", ".mjs")) else kind
        )
        await route.fulfill(
            body=site[name], content_type=f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        )

    def _note(self, text: str) -> None:
        if len(self._lines) < MOST_CONSOLE:
            self._lines.append(text[:500])

    async def _dismiss(self, dialog: Any) -> None:
        self._note(f"dialog {dialog.type}: {dialog.message}")
        with contextlib.suppress(Exception):
            await dialog.accept()

    async def _close_popup(self, page: Any) -> None:
        self._note("a new window was opened, and closed")
        with contextlib.suppress(Exception):
            await page.close()

    async def _tree(self, page: Any) -> ToolResult:
        await asyncio.sleep(SETTLE_S)
        tree = await page.locator("body").aria_snapshot()
        head = f"{await page.title()} <{page.url.removeprefix(HOST)}>\n"
        return shown(head + tree) if tree else ToolResult(f"{head}[the page is empty]")

    def _look(self) -> ToolResult:
        return self._run(self._tree)

    def _click(self, target: str) -> ToolResult:
        async def act(page: Any) -> ToolResult:
            await (await _only(page, target)).click()
            return await self._tree(page)

        return self._run(act)

    def _type(self, target: str, text: str) -> ToolResult:
        async def act(page: Any) -> ToolResult:
            found = await _only(page, target)
            if await found.and_(page.locator("select")).count():
                await found.select_option(label=text)
            else:
                await found.fill(text)
            return await self._tree(page)

        return self._run(act)

    def _press(self, key: str) -> ToolResult:
        async def act(page: Any) -> ToolResult:
            await page.keyboard.press(key)
            return await self._tree(page)

        return self._run(act)

    def _inspect(self, target: str) -> ToolResult:
        async def act(page: Any) -> ToolResult:
            found = _all(page, target)
            count = await found.count()
            each = [found.nth(i).locator(f"{DESCRIBED}=.") for i in range(min(count, MOST_ELEMENTS))]
            rows = [await one.text_content() or "" for one in each]
            text = "\n".join([f"{count} element{'' if count == 1 else 's'}", *rows])
            return shown(text) if count else ToolResult(text)

        return self._run(act)

    def _screenshot(self) -> ToolResult:
        async def act(page: Any) -> ToolResult:
            return await asyncio.to_thread(_grid, await page.screenshot())

        return self._run(act)

    def _console(self) -> ToolResult:
        return shown("\n".join(self._lines)) if self._lines else ToolResult("[the console is empty]")

    def _list_files(self) -> str:
        return "\n".join(sorted(self.project.source))

    def _read_file(self, path: str) -> str:
        data = self.project.source.get(path.removeprefix(f"{APP}/").removeprefix("./"))
        if data is None:
            raise _Failed(f"there is no file {path!r:.200}")
        return data.decode("utf-8", "replace")

    def _terminal(self, command: str) -> str:
        if self._room is None:
            try:
                self._room = self._rooms.enter_context(open_environment({}, writable=[APP], limits=LIMITS))
            except GradingError as error:
                raise _Failed(f"there is no terminal on this machine: {error}") from None
            self._room.upload({f"{APP}/{name}": data for name, data in self.project.source.items()})
        done = self._room.exec(command, cwd=APP, timeout_s=COMMAND_S)
        return f"[exit code {done.exit_code}]\n{(done.stdout + done.stderr).decode('utf-8', 'replace')}"


def _all(page: Any, target: str) -> Any:
    """The elements that a target means. Raises _Failed for a target of no form."""
    if target.startswith("css="):
        return page.locator(target)
    found = _TARGET.fullmatch(target.strip().removeprefix("- ").removesuffix(":"))
    if found is None:
        raise _Failed(f"{target!r:.200} is no target: give {TARGET}")
    role, name, number = found.groups()
    elements = page.get_by_role(role, exact=True, **({} if name is None else {"name": re.sub(r"\\(.)", r"\1", name)}))
    return elements if number is None else elements.nth(int(number) - 1)


async def _only(page: Any, target: str) -> Any:
    """The first of the elements."""
    found = _all(page, target)
    if await found.count() == 0:
        raise _Failed(f"the page has no {target}")
    return found.first


def _grid(png: bytes, columns: int = 16, rows: int = 9) -> ToolResult:
    """Mean colours of a picture's parts, row by row. A picture of one colour shows nothing."""
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    small = image.resize((columns, rows), Image.Resampling.BOX)
    lines: Sequence[str] = [
        " ".join("#{:02x}{:02x}{:02x}".format(*small.getpixel((x, y))) for x in range(columns))  # type: ignore[misc]
        for y in range(rows)
    ]
    grid = "\n".join(lines)
    text = f"{image.width} x {image.height} pixels; mean colours of {columns} x {rows} parts:\n{grid}"
    return ToolResult(text, "" if len(image.getcolors(2) or "more") == 1 else grid)
