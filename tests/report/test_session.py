"""The page of an agent's session: its steps with what they changed, from real and from damaged logs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.agents.session_log import read_log
from glm5.agents.workspace import File, diff
from glm5.cli import app
from glm5.errors import DataError
from glm5.report.session import build_session_page

EVENTS: list[dict[str, Any]] = [
    {"kind": "start", "version": 1, "settings": {"task": "Fix <b>add</b>."}},
    {
        "kind": "reply", "finish": "tool_calls", "prompt_tokens": 100, "completion_tokens": 10, "broken": {},
        "seconds": 1, "message": {
            "content": "I see.", "reasoning": "The sign is wrong.",
            "calls": [{"id": "a", "name": "edit", "arguments": {"path": "sums.py", "old": "a - b", "new": "a + b"}}],
        },
    },
    {
        "kind": "result", "name": "edit", "content": "Changed sums.py at line 2.", "ok": True, "seconds": 2,
        "diff": "--- a/sums.py\n+++ b/sums.py\n@@ -1 +1 @@\n-<script>alert(1)</script>\n+    return a + b\n",
    },
    {"kind": "note", "text": "Go on.", "seconds": 3},
    {"kind": "end", "reason": "done", "why": "It said so.", "seconds": 4},
]  # fmt: skip


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_page_shows_every_step_and_text_of_models_is_inert(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", EVENTS)
    done = CliRunner().invoke(app, ["report", str(log)])
    assert done.exit_code == 0 and done.output.strip() == f"Session: {log}.html"
    page = Path(f"{log}.html").read_text()
    for part in ("The sign is wrong.", "I see.", "old: a - b", "Changed sums.py", "Go on.", "It said so.", "100 read"):
        assert part in page
    assert '<span class="added">+    return a + b</span>' in page
    assert "<script" not in page and "<b>" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize("key", ["message", "finish", "prompt_tokens", "broken"])
def test_malformed_events_are_one_sentence(tmp_path: Path, key: str) -> None:
    events = [event if event["kind"] != "reply" else {**event, key: None} for event in EVENTS]
    if key == "finish":
        events[1].pop("finish")
    with pytest.raises(DataError, match="malformed"):
        build_session_page(written(tmp_path / "log.jsonl", events))
    assert CliRunner().invoke(app, ["report", str(written(tmp_path / "x.jsonl", []))]).exit_code == 1


def test_a_patch_since_earlier_changes_applies_to_them(tmp_path: Path) -> None:
    """Changed, new, deleted, and back to what the repository has, by git's own reader."""
    repo = tmp_path / "repo"
    repo.mkdir()
    for name in ("kept", "back", "gone"):
        (repo / name).write_text(f"{name}\n1\n")
    before = {"kept": File(b"kept\n2\n"), "back": File(b"back\n2\n"), "made": File(b"made\n")}
    after = {"kept": File(b"kept\n3\n"), "gone": File(None), "new": File(b"new\n")}
    patches = [diff(repo, before), diff(repo, after, before)]
    for patch in patches:
        subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=repo, check=True)
    found = {path.name: path.read_text() for path in repo.iterdir()}
    assert found == {"kept": "kept\n3\n", "back": "back\n1\n", "new": "new\n"}


def test_a_log_without_patches_is_shown_too(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", [{k: v for k, v in event.items() if k != "diff"} for event in EVENTS])
    assert read_log(log)[0] and "Changed sums.py" in build_session_page(log).read_text()
