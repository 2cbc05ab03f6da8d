"""`glm5 task build slides` and `glm5 task score-slide`, with a model and a renderer that are made up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import glm5.agents.models
from glm5.cli.options import app
from glm5.data.sft import read_conversations
from glm5.errors import DataError, UsageError
from glm5.tasks.slides import family
from glm5.tasks.slides.boxes import slide_of
from tests.tasks.slides.pages import pages
from tests.tasks.slides.test_rewards import TREES

RUN = CliRunner()


class Model:
    """Gives one page of the honest list for every prompt, then a bad one."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def complete(self, messages: Any, tools: Any) -> Any:
        self.asked.append(messages[0].content)
        page = pages("honest")["plain"] if len(self.asked) % 2 else "<p>nothing"
        return SimpleNamespace(message=SimpleNamespace(content=f"```html\n{page}\n```"))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()

    @contextlib.contextmanager
    def open_model(*_: Any, **__: Any) -> Iterator[Any]:
        yield made, None

    class Stored:
        def measure(self, html: str, assets: Any) -> Any:
            return slide_of(TREES["honest", "plain"])

    monkeypatch.setattr(glm5.agents.models, "open_model", open_model)
    monkeypatch.setattr(family, "shared_renderer", Stored)
    return made


def test_the_best_answers_become_conversations(model: Model, tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    line = ["task", "build", "slides", "--model", "x", "--out", str(out), "--prompts", "3", "--samples", "2"]
    done = RUN.invoke(app, [*line, "--least", "0.1", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert (found["kept"], found["samples"], found["prompts"]) == (3, 6, 3) and len(model.asked) == 6
    kept = [c for _, c in read_conversations(out)]
    assert [c.messages[0].content for c in kept] == model.asked[::2] and "River" in kept[0].messages[1].content
    with pytest.raises(DataError, match="lower --least"):
        RUN.invoke(app, [*line, "--least", "0.99"], catch_exceptions=False)


def test_an_error_does_not_lose_the_samples_before_it(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = model.complete

    def complete(messages: Any, tools: Any) -> Any:
        if len(model.asked) == 2:
            raise ConnectionError("the server is gone")
        return answers(messages, tools)

    monkeypatch.setattr(model, "complete", complete)
    out = tmp_path / "kept.jsonl"
    line = ["task", "build", "slides", "--model", "x", "--out", str(out), "--samples", "1", "--least", "0.1"]
    with pytest.raises(ConnectionError):
        RUN.invoke(app, line, catch_exceptions=False)
    assert len(list(read_conversations(out))) == 2


def test_a_file_is_scored_without_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>eight words are enough to be content here</p><script>1</script>", encoding="utf-8")
    done = RUN.invoke(app, ["task", "score-slide", str(page), "--static", "--json"], catch_exceptions=False)
    (found,) = json.loads(done.stdout).values()
    assert found["total"] == 0.0 and found["faults"] == ["a script"]
    for bad, error in ((["nowhere.html"], DataError), ([str(page), "--picture", "a.exe"], UsageError),
                       ([str(page), "--screenshots", "shots"], UsageError)):  # fmt: skip
        with pytest.raises(error):
            RUN.invoke(app, ["task", "score-slide", *bad, "--static"], catch_exceptions=False)
