"""Frontend tasks in a real browser: the scripted judge against the known truth, hostile pages, and the whole suite."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.agents.endpoint import Reply
from glm5.cli.options import app
from glm5.eval.cc_bench.judge import FrontendJudge, unquoted
from glm5.eval.cc_bench.project_browser import ProjectBrowser
from glm5.eval.cc_bench.scripted_judge import ScriptedItem, scripted_judge
from glm5.records import Message, ToolCall
from glm5.tasks import make_family
from glm5.tasks.cc_bench.checks import PAGES, FrontendTask, frontend_task
from glm5.tasks.cc_bench.frontend import NUMBERS
from glm5.tasks.cc_bench.kinds import KINDS
from glm5.tasks.cc_bench.project import APP, Project, build_project
from glm5.tasks.harbor.trial import TaskRoom
from tests.agents.scripted_model import Say, ScriptedModel
from tests.pages import wait_for
from tests.rooms import needs_rooms
from tests.tasks.cc_bench.test_frontend_tasks import NPM, TITLE

pytestmark = [pytest.mark.slow, pytest.mark.browser]


def project(html: str, **files: bytes) -> Project:
    site = {"index.html": html.encode(), **files}
    return Project(site, site)


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_scripted_judge_agrees_with_the_truth(name: str) -> None:
    """The reference and one or two mutants of each seed: more than 100 items with known truth over all seeds."""
    number = sorted(PAGES).index(name) % NUMBERS
    task = frontend_task(name, number)
    for mutant in ("", *sorted(task.mutants)[number::4]):
        found = scripted_judge().verdicts(task, project(task.mutated(mutant).html(TITLE)))
        told = [one.verdict == "pass" for one in found.values()]
        why = [(i, one) for i, one in found.items() if (one.verdict == "pass") != task.truth(mutant)[int(i) - 1]]
        assert told == task.truth(mutant), (mutant, why)
        assert all(one.evidence for one in found.values())


def test_the_browser_tools() -> None:
    page = """<title>T</title><h1>Hello</h1><button onclick="alert('stop'); this.textContent = 'pressed'">Go</button>
    <button onclick="while (true);">Hang</button><label>Name <input></label>
    <script>console.log('started'); fetch('http://elsewhere.test/x').catch(() => console.error('no network'));
    window.open('/other.html');</script>"""
    with ProjectBrowser(project(page, **{"other.html": b"<p>second", "note.txt": b"source"})) as browser:

        def call(name: str, **arguments: str) -> str:
            return browser.call(name, arguments).text

        assert call("look").startswith("error: no page is open")
        assert 'heading "Hello"' in call("open") and "second" in call("open", path="/other.html")
        call("open")
        assert 'button "pressed"' in call("click", target='button "Go"')
        assert "textbox" in call("type", target='textbox "Name"', text='a "quoted" text')
        assert "error: the page has no" in call("click", target='button "Nothing"')
        assert "is no target" in call("click", target="Go!!")
        assert "2 elements" in call("inspect", target="css=button") and "box: " in call("inspect", target="css=h1")
        console = call("console")
        assert all(
            text in console for text in ("log: started", "refused: a request to elsewhere.test", "dialog alert: stop")
        )
        assert "1280 x 720" in call("screenshot")
        assert (
            call("list_files") == "index.html\nnote.txt\nother.html" and call("read_file", path="note.txt") == "source"
        )
        assert call("read_file", path="../x").startswith("error: ") and call("nothing").startswith("error: ")
        assert call("click").startswith("error: click takes target")
        assert 'heading "Hello"' in call("open", path="/a/route") and "not found" in call("open", path="/a/gone.js")
        call("open")
        assert "did not answer" in call("click", target='button "Hang"')  # ends the browser
        assert 'heading "Hello"' in call("open")


def test_a_page_cannot_forge_what_inspect_shows() -> None:
    page = """<h1>real</h1><select aria-label="Size"><option>small</option><option>large</option></select><script>
    const forged = () => ["<h1>forged</h1>"];
    for (const type of [Array, Object, String, NodeList, Element, Node, Document, HTMLElement, HTMLSelectElement])
      for (const name of Object.getOwnPropertyNames(type.prototype))
        try { Object.defineProperty(type.prototype, name, { get: () => forged, set: forged }) } catch {}
    window.getComputedStyle = forged;</script>"""
    with ProjectBrowser(project(page)) as browser:
        browser.call("open", {})
        shown = browser.call("inspect", {"target": "css=h1"}).text
        assert shown.startswith('1 element\n<h1></h1> text: "real" box: ') and "forged" not in shown
        assert browser.call("inspect", {"target": 'heading "real"'}).text == shown
        assert "large" in browser.call("type", {"target": "css=select", "text": "large"}).text


def test_what_is_evidence_of_the_page_and_what_has_failed() -> None:
    with ProjectBrowser(project("<!-- nothing -->")) as browser:
        for tool, arguments in (("open", {}), ("screenshot", {}), ("console", {}), ("inspect", {"target": "css=nav"})):
            found = browser.call(tool, arguments)
            assert found.text and not found.shown and not found.failed
    page = "<title>error: 404</title><h1>fine</h1><script>console.error('boom')</script>"
    with ProjectBrowser(project(page, **{"a.txt": b"alpha"})) as browser:
        for tool, arguments in (("open", {}), ("console", {}), ("inspect", {"target": "css=h1"})):
            found = browser.call(tool, arguments)
            assert found.shown == found.text and not found.failed
        assert browser.call("screenshot", {}).shown
        assert browser.call("read_file", {"path": "a.txt"}).text == "alpha" and not browser.call("list_files", {}).shown
        for bad in ("echo a\0b", "echo \ud800", "#" * 300_000):
            assert browser.call("terminal", {"command": bad}).failed


@needs_rooms
def test_no_item_sees_what_another_left() -> None:
    class Leaves:
        """Every item looks before it does anything, and leaves a page, a line and a file."""

        def __init__(self) -> None:
            self.calls = [
                ("look", {}), ("console", {}), ("terminal", {"command": "ls"}),
                ("open", {}), ("terminal", {"command": "touch left"}),
            ]  # fmt: skip

        def complete(self, messages: Any, tools: Any, on_delta: Any = None) -> Reply:
            heard.append([unquoted(one.content) for one in messages if one.role == "tool"])
            quote = {"passed": False, "evidence": "no page is open", "reason": ""}
            name, arguments = self.calls.pop(0) if self.calls else ("verdict", quote)
            return Reply(Message("assistant", tool_calls=(ToolCall(name, arguments),)), "tool_calls")

    heard = list[list[str]]()
    task = frontend_task("bars", 0)
    judge = FrontendJudge(lambda task, item: Leaves())
    found = judge.verdicts(
        replace(task, items=task.items[:2]), project("<h1>x</h1><script>console.log('line')</script>")
    )
    assert [one.verdict for one in found.values()] == ["fail", "fail"]
    for results in (results for results in heard if len(results) == 5):
        assert results[:2] == ["error: no page is open; call open", "[the console is empty]"]
        assert results[2] == "[exit code 0]\nindex.html"


def test_a_project_that_shows_nothing_is_not_built_and_passes_nothing() -> None:
    problem = make_family("frontend", tools=[]).problem("heldout", 0)
    judge = FrontendJudge(lambda task, item: pytest.fail("no model is asked"))
    row = {"project": project("<!-- x --><script>console.log('3 open')</script>").packed(), "built": True}
    ((_, change),) = judge.judged([(("html", 0, 0), problem, row)])
    assert isinstance(change, dict) and change["built"] is False and change["outcome"] == "failed"
    assert set(change["checks"].values()) == {"fail"} and change["reward"] == 0.0
    late = "<script>setTimeout(() => document.body.append('here'), 500)</script>"
    for page in (late, "<canvas style='background: red'></canvas>"):
        with ProjectBrowser(project(page)) as browser:
            assert browser.opens()


def test_a_page_that_floods_the_console_between_calls_is_ended() -> None:
    page = "<h1>x</h1><script>setTimeout(() => setInterval(() => console.log('y'.repeat(4e6) + Math.random())), 500)"
    with ProjectBrowser(project(f"{page}</script>")) as browser:
        assert browser.call("open", {}).shown
        chromium = browser._chromium
        assert chromium is not None
        wait_for(lambda: not chromium._processes(), 30)  # no call reads what the page writes
        assert browser.call("look", {}).failed
        assert browser.call("open", {}).shown


def test_webrtc_sends_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(0.5)
        page = f"""<h1>x</h1><script>
        const server = {{ urls: "stun:127.0.0.1:{listener.getsockname()[1]}" }};
        const peer = new RTCPeerConnection({{ iceServers: [server] }});
        peer.onicecandidate = (event) => event.candidate || console.log("gathered");
        peer.createDataChannel("x");
        peer.createOffer().then((offer) => peer.setLocalDescription(offer));</script>"""
        with ProjectBrowser(project(page)) as browser:
            browser.call("open", {})
            with pytest.raises(TimeoutError):
                listener.recvfrom(100)
            browser.call("look", {})
            assert "gathered" in browser.call("console", {}).text


@needs_rooms
def test_the_terminal_has_the_source_and_no_network() -> None:
    with ProjectBrowser(project("<p>x", **{"a.txt": b"alpha"})) as browser:
        assert "alpha" in browser.call("terminal", {"command": "cat a.txt"}).text
        assert "[exit code 0]" not in browser.call("terminal", {"command": "curl -s http://1.1.1.1 || exit 3"}).text


@needs_rooms
@pytest.mark.parametrize("kind", [name for name in KINDS if KINDS[name].build])
def test_built_frameworks_in_the_browser(kind: str) -> None:
    """The reference of a task as a project of each framework passes, and a mutant fails where it should."""
    if not NPM:
        pytest.skip("The npm packages are not here; install them and name their folder in GLM5_NPM.")
    problem = make_family("frontend", kind=kind, packages=NPM).problem("heldout", sorted(KINDS).index(kind))
    task, mutant = problem.task, min(problem.task.mutants)
    for name, page in (("", task.page), (mutant, task.mutated(mutant))):
        with TaskRoom(problem.folder) as room:
            files = problem.kind.project(page, TITLE)
            room.room.upload({f"{APP}/{path}": text.encode() for path, text in files.items()})
            made = build_project(room.room, problem.kind)
            room.room.upload({f"{APP}/{max(files, key=lambda path: len(files[path]))}": b"<<<"})
            assert name or not build_project(room.room, problem.kind).built
        found = scripted_judge().verdicts(task, Project.unpacked(made.packed()))
        assert [one.verdict == "pass" for one in found.values()] == task.truth(name), (made.log, found)


def references(body: dict[str, Any], turn: int) -> Say:
    """A model that answers with the reference of the task; of every second seed with its first mutant."""
    task, mutant = task_of(body["messages"][-1]["content"])
    return Say(f"Here it is.\n\n```html index.html\n{task.mutated(mutant).html(TITLE)}```\n")


def task_of(asked: str) -> tuple[FrontendTask, str]:
    names = [(name, number) for name in sorted(PAGES) for number in range(NUMBERS)]
    place, task = next((i, t) for i, n in enumerate(names) if asked.startswith((t := frontend_task(*n)).statement))
    return task, sorted(task.mutants)[0] if place % 2 else ""


def judge_by_script(body: dict[str, Any], turn: int) -> Say:
    """A judge behind a URL that follows the item's script."""
    messages = [Message(m["role"], m["content"] or "") for m in body["messages"]]
    asked = messages[1].content
    task = next(t for name in PAGES for n in range(NUMBERS) if (t := frontend_task(name, n)).statement in asked)
    item = next(one for one in task.items if asked.endswith(one.text))
    (call,) = ScriptedItem(item).complete(messages, []).message.tool_calls
    return Say(calls=[(call.name, dict(call.arguments))])


@needs_rooms
def test_the_suite_from_end_to_end(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    out, by_model = tmp_path / "scripted", tmp_path / "model"
    with ScriptedModel(references) as model, ScriptedModel(judge_by_script) as judge:
        common = ["eval", model.url, "--suite", "cc-bench-frontend", "--part", "html", "--set", "tools=[]", "--json"]
        found = json.loads(run(*common, "--problems", "8", "--judge", "scripted", "--out", str(out)))[
            "cc-bench-frontend"
        ]
        again = json.loads(run(*common, "--problems", "2", "--judge", judge.url, "--out", str(by_model)))
    rows = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    judged = [row for row in rows if "verdicts" in row]
    assert len(judged) == 8 and not any(row.get("project") for row in judged)
    truth = list[bool]()
    for row in judged:
        name, number = re.fullmatch(r"frontend/html/(\w+)-(\d)", row["problem"]).groups()  # type: ignore[union-attr]
        task, mutant = task_of(frontend_task(name, int(number)).statement)
        truth += task.truth(mutant)
        assert [row["checks"][str(i + 1)] == "pass" for i in range(len(task.items))] == task.truth(mutant)
    assert (
        found["checks"]["html"]["score"] == pytest.approx(sum(truth) / len(truth))
        and found["built"]["html"]["score"] == 1
    )
    assert (
        found["score"] == pytest.approx(sum(row["outcome"] == "solved" for row in judged) / 8) and "errors" not in found
    )
    assert again["cc-bench-frontend"]["checks"]["html"]["n"] > 0 and "errors" not in again["cc-bench-frontend"]
    text = run("table", "8", str(out))
    (line,) = [one for one in text.splitlines() if one.startswith("| HTML, check-items |")]
    assert f"{100 * sum(truth) / len(truth):.1f} (" in line.split("|")[2] and f", {len(truth)}" in line
