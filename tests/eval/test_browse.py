"""Browse evaluation: its metrics against hand-made numbers, and whole runs on scripted models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.agents.endpoint import EndpointError, Reply
from glm5.agents.search import SearchAgent
from glm5.agents.wire import OnDelta
from glm5.cli import app
from glm5.errors import DataError, GradingError, UsageError
from glm5.eval.browse import Played, calibration_error, evaluate, metrics, play
from glm5.records import Message, ToolCall
from glm5.tasks.search.answers import right
from glm5.tasks.search.build import build
from glm5.tasks.search.family import SearchFamily
from glm5.tasks.search.questions import read_questions
from tests.agents.scripted_model import Say, ScriptedModel
from tests.tasks.search.conftest import RULES, SOURCES, built, world  # noqa: F401 - fixtures

pytest.importorskip("bm25s")


def test_metrics_by_hand() -> None:
    first = Played("a", True, "x", "answer", 0.9, turns=2, tokens=10, searches=4, depth=2, returned=("p", "q", "r"),
                   cited=("p", "z"), evidence=("p", "s"))  # fmt: skip
    second = replace(first, id="b", right=False, searches=1, returned=(), cited=(), depth=3, reason="turns")
    found = metrics([first, second, Played("c", None, error="down")])
    assert (found["score"], found["n"], found["errors"]) == (0.5, 2, 1)
    assert found["low"] < 0.5 < found["high"] and found["searches"] == 2.5
    assert found["retrieval_recall"] == 0.25  # (1/2 + 0) / 2
    assert (found["citation_precision"], found["citation_recall"], found["citing"]) == (0.5, 0.25, 1)
    assert found["calibration_error"] is None  # fewer than 100 answers
    assert found["ended"] == {"answer": 1, "turns": 1} and found["by_depth"] == {"2": 1.0, "3": 0.0}
    assert metrics([replace(first, id=str(i)) for i in range(100)])["calibration_error"] == pytest.approx(0.1)
    assert metrics([Played("c", None)])["score"] is None


def test_calibration_by_hand() -> None:
    assert calibration_error([(0.5, i % 2 == 0) for i in range(100)]) == pytest.approx(0.0)
    low, high = [(0.1, False)] * 50, [(0.9, False)] * 50
    assert calibration_error(low + high) == pytest.approx(((0.1**2 + 0.9**2) / 2) ** 0.5)


@dataclass
class Knows:
    """Searches once, then gives the right answer with its page, or fails if `down`."""

    names: dict[str, str]
    down: bool = False

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: OnDelta | None = None
    ) -> Reply:
        if self.down:
            raise EndpointError("down")
        if len(messages) == 2:
            return Reply(Message("assistant", tool_calls=(ToolCall("search", {"query": messages[1].content}),)))
        name = self.names[messages[1].content]
        return Reply(Message("assistant", f"Explanation: [country/x]\nExact Answer: {name}\nConfidence: 100%"))


@pytest.fixture
def names(built: Path) -> dict[str, str]:  # noqa: F811
    return {question.text: question.names[0] for question in read_questions(built)}


@pytest.mark.long
def test_a_whole_run(built: Path, names: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    family, log = SearchFamily(folder=str(built)), tmp_path / "log.jsonl"
    found = evaluate(family, "rl", 8, SearchAgent(Knows(names, down=True)), log=log)
    assert found["n"] == 0 and found["errors"] > 0 and found["score"] is None
    found = evaluate(family, "rl", 8, SearchAgent(Knows(names)), log=log)
    assert found["score"] == 1.0 and found["searches"] == 1 and found["turns"] == 2 and found["errors"] == 0
    assert found["citation_precision"] == 0.0
    again = evaluate(family, "rl", 8, SearchAgent(Knows(names, down=True)), log=log)  # nothing is played again
    assert again == found
    log.write_text('{"id": 3}\n')
    with pytest.raises(DataError, match="none of a browse evaluation"):
        evaluate(family, "rl", 8, SearchAgent(Knows(names)), log=log)


@pytest.mark.long
def test_judges_decide_only_on_what_is_not_a_name(built: Path, names: dict[str, str]) -> None:  # noqa: F811
    family, asked = SearchFamily(folder=str(built)), list[str]()

    def judge(question: str, answer: str, right: Sequence[str]) -> bool:
        asked.append(answer)
        if answer.startswith("fails"):
            raise GradingError("no verdict")
        return answer.startswith("good")

    assert evaluate(family, "rl", 4, SearchAgent(Knows(names)), judge=judge)["score"] == 1.0 and not asked
    for answer, score in (("good enough", 1.0), ("bad", 0.0), ("fails", None)):
        found = evaluate(family, "rl", 4, SearchAgent(Knows(dict.fromkeys(names, answer))), judge=judge)
        assert found["score"] == score and bool(found["errors"]) == (score is None)


@pytest.mark.long
def test_answers_of_another_model_are_no_result(built: Path, tmp_path: Path, world: Path) -> None:  # noqa: F811
    web = tmp_path / "web"
    web.symlink_to(built)

    def run(model: ScriptedModel, *more: str) -> Any:
        command = ["eval", model.url, "--suite", "browse", "--problems", "2", "--set", f"folder={web}"]
        return CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out"), *more])

    with ScriptedModel([Say("Oslo")]) as one, ScriptedModel([Say("Bergen")]) as other:
        assert run(one).exit_code == 0 and one.bodies
        played = len(one.bodies)
        assert run(one).exit_code == 0 and len(one.bodies) == played  # the same model goes on
        refused = [run(other), run(one, "--name", "b")]
        web.unlink()
        build(web, replace(RULES, count=9), only=SOURCES[:2], roots=[world])  # another web at the same path
        for found in (*refused, run(one)):
            assert found.exit_code != 0 and "by another model" in str(found.exception)
        assert len(one.bodies) == played and not other.bodies


@dataclass
class Replays:
    """Says what it was given, in order, and keeps what it was told of `click`."""

    script: list[Message]
    told: str = ""

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: OnDelta | None = None
    ) -> Reply:
        self.told = json.dumps([tool for tool in tools if tool["function"]["name"] == "click"])
        return Reply(self.script.pop(0))


def test_a_link_by_number_is_an_answer(built: Path) -> None:  # noqa: F811
    family = SearchFamily(folder=str(built), numbered=True, thinking=False)
    for index in range(10):
        problem = family.problem("train", index)
        *way, last, opened, _ = problem.demonstration(0)
        if right(opened.content.partition(" <")[0], problem.question.names):
            break
    (call,) = last.tool_calls
    script = [m for m in way if m.role == "assistant"] + [Message("assistant", f"[{call.arguments['link_id']}]")]
    model = Replays(script)
    played = play(problem, SearchAgent(model))
    assert played.right and right(played.answer, problem.question.names) and "link of the open page" in model.told


OPTIONS = ("--set", 'tools=["search","click"]', "--set", "numbered=true", "--set", "thinking=false")


@pytest.mark.parametrize(
    ("owner", "more", "tools", "kwargs"),
    [
        ("glm5", (), ["search", "click", "open", "find", "python"], None),
        ("vllm", ("--chat",), ["search", "click", "open", "find", "python"], None),
        ("vllm", OPTIONS, ["search", "click"], {"enable_thinking": False}),
        ("glm5", (*OPTIONS, "--no-render-tools"), ["search", "click"],
         {"enable_thinking": False, "render_tools": False}),
        ("glm5", (*OPTIONS, "--no-template-kwargs"), ["search", "click"], None),
        ("glm5", (*OPTIONS, "--no-render-tools", "--no-template-kwargs"), [], None),
        ("vllm", (*OPTIONS, "--no-render-tools"), [], {"enable_thinking": False}),
        ("", (*OPTIONS, "--no-render-tools"), [], {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_a_model_is_asked_in_the_form_of_its_training(
    built: Path, tmp_path: Path, owner: str, more: tuple[str, ...], tools: list[str], kwargs: dict[str, bool] | None,  # noqa: F811
) -> None:  # fmt: skip
    def script(body: dict[str, Any], turn: int) -> Say:
        return Say("[0]") if turn else Say(calls=[("python", {"code": "print(1)"}), ("search", {"query": "airport"})])

    with ScriptedModel(script, owner=owner) as model:
        command = ["eval", model.url, "--suite", "browse", "--problems", "1", "--set", f"folder={built}", *more]
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
        assert done.exit_code == 0, done.output
        first, second = model.bodies
        assert [tool["function"]["name"] for tool in first.get("tools", ())] == tools
        assert all(body.get("chat_template_kwargs") == kwargs for body in model.bodies)
        two, system = OPTIONS[0] in more, first["messages"][0]["content"]
        assert ("tools: search, click.\n" if two else "tools: search, click, open, find, python.\n") in system
        assert ("such as [2]" in system) == two and ("link of the open page" in json.dumps(first)) == two
        assert (second["messages"][3]["content"] == "error: no such tool") == two
        if "--no-render-tools" in more:
            again = CliRunner().invoke(app, [*command[:-1], "--out", str(tmp_path)])
            assert again.exit_code != 0 and "other settings" in str(again.exception)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--plain",), "does not take --plain;"), (("--top-p", "0.9", "--repeats", "2"), "take --top-p, --repeats;"),
        (("--fast",), "take --fast;"), (("--exact",), "take --exact;"), (("--part", "x"), "take --part;"),
        (("--against", "x"), "take --against;"), (("--trained-on", "x"), "take --trained-on;"),
        (("--judge", "http://x"), "take --judge;"), (("--user", "http://x"), "take --user;"),
        (("--tokenizer", "x"), "take --tokenizer;"), (("--dense", "--device", "cpu"), "take --dense, --device;"),
        (("--set", "max_turns=3"), "use --limit max_turns"), (("--set", "strict=true"), "a wrong call ends no session"),
        (("--set", 'stop=["x"]'), "stop: browse does not take it"), (("--set", "plain=true"), "agents chat"),
        (("--limit", "max_context=9"), "browse takes max_tokens and max_turns;"),
        *((("--limit", f"{name}={number}"), "is not a whole number from 1 to") for name, number in (
            ("max_turns", "x"), ("max_turns", "0"), ("max_turns", "1.5"), ("max_turns", "true"),
            ("max_tokens", "99999999999999"), ("max_tokens", "-1"))),
        (("--set", "session_tokens=-5"), "session_tokens=-5: it is not negative"),
        (("--set", "split=test"), "split=test: it is one of"),
    ],
)  # fmt: skip
def test_options_that_would_change_nothing_are_refused(built: Path, more: tuple[str, ...], said: str) -> None:  # noqa: F811
    command = ["eval", "http://127.0.0.1:9", "--suite", "browse", "--set", f"folder={built}", *more]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UsageError) and said in str(done.exception)


def test_folders_and_options_of_the_family_are_named(built: Path) -> None:  # noqa: F811
    def said(*more: str) -> str:
        return str(CliRunner().invoke(app, ["eval", "http://127.0.0.1:9", "--suite", "browse", *more]).exception)

    assert "needs its option folder" in said() and "there is no folder 'missing'" in said("--set", "folder=missing")
    assert 'has no option "shufled" (did you mean "shuffled"?); it has folder, depths' in said(
        "--set", f"folder={built}", "--set", "shufled=true"
    )
    assert "is the build itself" in said("--set", f"folder={built}", "--out", str(built))


def test_without_any_answer_the_fault_is_said(built: Path) -> None:  # noqa: F811
    with ScriptedModel([Say("Oslo")]) as model:
        model.refuse = [(400, '{"error": {"message": "no such model"}}')] * 2
        command = ["eval", model.url, "--suite", "browse", "--problems", "2", "--set", f"folder={built}", "--json"]
        done = CliRunner().invoke(app, command)
    found = json.loads(done.stdout)["browse"]
    assert done.exit_code == 1 and (found["n"], found["errors"]) == (0, 2) and "no such model" in found["error"]


def test_lm_eval_refuses_options_too(tmp_path: Path) -> None:
    command = ["eval", "http://127.0.0.1:9", "--suite", "lm-eval", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--temperature", "1", "--chat"])
    assert "--suite lm-eval does not take --temperature, --chat;" in str(done.exception)


def test_the_command(built: Path, names: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    def script(body: dict[str, Any], replies: int) -> Say:
        if replies == 0:
            return Say(calls=[("search", {"query": "airport"})])
        return Say(f"Exact Answer: {names[body['messages'][1]['content']]}")

    def run(*more: str) -> Any:
        command = [
            "eval",
            model.url,
            "--suite",
            "browse",
            "--set",
            f"folder={built}",
            "--problems",
            "3",
            "--json",
            *more,
        ]
        return CliRunner().invoke(app, command)

    with ScriptedModel(script) as model:
        done = run("--set", "context=hierarchical", "--out", str(tmp_path / "out"))
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)["browse"]
        assert (found["score"], found["context"], found["searches"]) == (1.0, "hierarchical", 1.0)
        assert len((tmp_path / "out" / "episodes.jsonl").read_text().splitlines()) == found["n"]
        assert json.loads((tmp_path / "out" / "result.json").read_text()) == found
        refused = run("--out", str(tmp_path / "out"))
        assert refused.exit_code != 0 and "other settings" in str(refused.exception)
        for wrong in (["--set", "context=all"], ["--set", "keep=x"], ["--limit", "turns=3"], ["--set", "split=test"]):
            assert run(*wrong).exit_code != 0 and run(*wrong).exception is not None
