"""Dialogues: the tools of a domain in a room, what a user simulator is told, and what is scored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import ConfigError, DataError, GradingError
from glm5.records import Message, Outcome, ToolCall
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks import make_family
from glm5.tasks.dialogue.domain_server import digest
from glm5.tasks.dialogue.family import DialogueProblem
from glm5.tasks.dialogue.user import SimulatedUser, ends, rules_of, scenario_of

DESK = Path(__file__).parent / "desk"


@pytest.fixture(autouse=True)
def rooms() -> None:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))


def problem(name: str, *lines: str | ToolCall, folder: Path = DESK) -> DialogueProblem:
    """A task of the desk, whose user says these lines."""
    family = make_family("dialogue", folder=str(folder.parent), domain=folder.name)
    found = next(p for i in range(4) if (p := family.problem("heldout", i)).id.endswith(f"/{name}"))
    said = iter(lines)

    def user(messages: Sequence[Message], tools: Any) -> Message:
        line = next(said)
        return Message("assistant", line) if isinstance(line, str) else Message("assistant", tool_calls=(line,))

    assert isinstance(found, DialogueProblem)
    return found.with_user(user)


def calls(*made: tuple[str, dict[str, Any]]) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(name, arguments) for name, arguments in made))


RENEW = ("renew_loan", {"member_id": "m1", "book": "Dune"})
SAY = Message("assistant", "It is due on day 26 now.")


def test_a_renewal_is_scored_by_the_database_and_by_what_was_said() -> None:
    def play(*messages: Message) -> tuple[Outcome, dict[str, Any]]:
        env = problem("renew", "Renew Dune, please", "###STOP###").env()
        opening, tools, _ = env.start()
        assert [m.role for m in opening] == ["system", "assistant", "user"] and "renewed once" in opening[0].content
        assert [tool["function"]["name"] for tool in tools] == ["get_member", "renew_loan", "transfer_to_librarian"]
        assert tools[1]["function"]["parameters"]["properties"]["days"] == {"type": "integer"}
        assert tools[1]["function"]["parameters"]["required"] == ["member_id", "book"]
        for message in messages:
            result = env.step(message)
        assert result.done
        return result.outcome, dict(result.detail)

    look = calls(("get_member", {"member_id": "m1"}), RENEW)
    assert play(look, SAY)[0] is Outcome.SOLVED
    outcome, detail = play(SAY)
    assert outcome is Outcome.FAILED and detail["checks"] == {"DB": False, "COMMUNICATE": True}
    assert detail["ended"] == "###STOP###"
    outcome, detail = play(calls(RENEW), Message("assistant", "Done."))
    assert outcome is Outcome.FAILED and detail["checks"] == {"DB": True, "COMMUNICATE": False}
    assert play(calls(("renew_loan", RENEW[1] | {"days": 20})), SAY)[1]["checks"]["DB"] is False


def test_tools_answer_their_failures_and_episodes_do_not_share_a_database() -> None:
    env = problem("refuse", "Renew Emma", "###STOP###").env()
    env.start()
    said = env.step(
        calls(("renew_loan", {"member_id": "m1", "book": "Emma"}), ("renew_loan", {"member": 1}), ("x", {}))
    )
    texts = [message.content for message in said.messages]
    assert texts[0] == "Error: Emma was renewed before" and texts[1].startswith("Error: ") and "argument" in texts[1]
    assert texts[2] == "Error: no such tool" and {message.role for message in said.messages} == {"tool"}
    assert env.step(calls(RENEW)).messages[0].content == "due on day 26"  # not an answer is printed meanwhile
    assert env.step(Message("assistant", "No.")).outcome is Outcome.FAILED  # what it changed was not asked for
    other = problem("refuse", "Renew Emma", "###STOP###").env()
    other.start()
    assert other.step(Message("assistant", "No.")).outcome is Outcome.SOLVED


def test_set_ups_assertions_and_the_users_own_tools() -> None:
    env = problem("card", "My card is broken", ToolCall("reset_card", {}), "It works: ###STOP###").env()
    env.start()
    done = env.step(Message("assistant", "Please reset it."))
    assert done.outcome is Outcome.SOLVED and done.detail["checks"] == {"ENV_ASSERTION": True}
    env = problem("card", "My card is broken", "I will not. ###STOP###").env()
    env.start()
    shown = env.step(calls(("get_member", {"member_id": "m1"}))).messages[0].content
    assert json.loads(shown)["name"] == "Ada L."
    assert env.step(Message("assistant", "Please reset it.")).outcome is Outcome.FAILED


def test_actions_that_must_be_called() -> None:
    for made, solved in ((calls(("transfer_to_librarian", {"summary": "long overdue"})), True), (None, False)):
        env = problem("transfer", "It is overdue", "###TRANSFER###").env()
        env.start()
        if made:
            env.step(made)
        assert (env.step(Message("assistant", "You are being transferred.")).outcome is Outcome.SOLVED) == solved


def test_what_ends_an_episode_without_the_user() -> None:
    env = problem("refuse", "Hello").env()
    env.start()
    assert [env.step(None).outcome for _ in range(3)][-1] is Outcome.MALFORMED
    silent = problem("refuse", "  ").env()
    with pytest.raises(GradingError, match="said nothing"):
        silent.start()
    with pytest.raises(GradingError, match="nobody"):
        make_family("dialogue", folder=str(DESK.parent), domain="desk").problem("heldout", 0).env()
    family = make_family("dialogue", folder=str(DESK.parent), domain="desk", max_turns=1)
    cut = family.problem("heldout", 0).with_user(lambda messages, tools: Message("assistant", "Hm")).env()  # type: ignore[attr-defined]
    cut.start()
    assert cut.step(Message("assistant", "What?")).outcome is Outcome.TRUNCATED


def test_the_users_view_and_its_rules() -> None:
    heard: list[Sequence[Message]] = []

    def model(messages: Sequence[Message], tools: Any) -> Message:
        heard.append(list(messages))
        return Message("assistant", f"line {len(heard)}", reasoning="secret")

    user = SimulatedUser(model, "retail", "You want a lamp.")
    assert (user.hear("Hi!"), user.hear("Which one?")) == ("line 1", "line 2")
    assert [message.role for message in heard[1]] == ["system", "user", "assistant", "user"]
    system = heard[1][0].content
    assert "<scenario>\nYou want a lamp.\n</scenario>" in system and "Never relax" in system
    assert all(message.reasoning is None for message in user.messages)
    assert system.index("Say what the customer says") < system.index("<scenario>") < system.index("Never relax")
    assert "transferred now" in rules_of("telecom") and rules_of("airline") == "" != rules_of("all")
    assert ends("Thanks ###STOP###") == "###STOP###" and ends("stop") is None
    told = scenario_of({"persona": "calm", "instructions": {"known_info": "id 3", "unknown_info": None}})
    assert told == "persona: calm\nwhat you know: id 3"
    loops = SimulatedUser(lambda m, t: Message("assistant", tool_calls=(ToolCall("x", {}),)), "desk", "")
    with pytest.raises(GradingError, match="16 times"):
        loops.hear("Hi!")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    def changed(name: str, text: str) -> Path:
        folder = tmp_path / "desk"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(DESK, folder)
        (folder / name).write_text(text)
        return folder

    yield changed


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tasks.json", "[]", "not a list of tasks"),
        ("tasks.json", "{", "no domain"),
        ("db.json", "x", "no domain"),
        ("tasks.json", '[{"id": "a"}]', "no evaluation_criteria"),
        ("tasks.json", '[{"evaluation_criteria": {"reward_basis": ["NL_ASSERTION"]}}]', "NL_ASSERTION"),
        ("tasks.json", '[{"evaluation_criteria": {"actions": 5}}]', "no list of tables"),
        ("tasks.json", '[{"evaluation_criteria": {"actions": [{"name": "x", "requestor": "y"}]}}]', "requestor"),
        ("tasks.json", '[{"evaluation_criteria": {}, "user_scenario": [1]}]', "not a table"),
        (
            "tasks.json",
            '[{"evaluation_criteria": {}, "initial_state": {"message_history": [{}]}}]',
            "in the middle of a dialogue",
        ),
    ],
)
def test_folders_that_are_no_domain(desk: Callable[[str, str], Path], name: str, text: str, said: str) -> None:
    folder = desk(name, text)
    with pytest.raises(DataError, match=said):
        make_family("dialogue", folder=str(folder.parent), domain="desk").problem("heldout", 0)


def test_broken_tools_are_faults_of_the_environment(desk: Callable[[str, str], Path]) -> None:
    for text in ("raise SystemExit(3)", "def get_member(db) -> str:\n    '''x'''\n    import os\n    os._exit(1)\n"):
        env = problem("refuse", "Hi", "###STOP###", folder=desk("tools.py", text)).env()
        with pytest.raises(GradingError):
            env.start()
            env.step(calls(("get_member", {})))
    network = (
        "import socket\n\ndef get_member(db) -> str:\n    '''x'''\n    socket.create_connection(('192.0.2.1', 80), 2)\n"
    )
    env = problem("refuse", "Hi", "###STOP###", folder=desk("tools.py", network)).env()
    env.start()
    assert "unreachable" in env.step(calls(("get_member", {}))).messages[0].content
    with pytest.raises(ConfigError, match="no folder of a domain"):
        make_family("dialogue", folder="/nowhere", domain="desk")


def test_nothing_is_solved_where_something_must_be_done(desk: Callable[[str, str], Path]) -> None:
    def played(basis: str, *lines: str | ToolCall, **action: Any) -> Outcome:
        criteria = {"actions": [{"arguments": {}, **action}], "reward_basis": [basis]}
        folder = desk("tasks.json", json.dumps([{"id": "one", "evaluation_criteria": criteria}]))
        env = problem("one", *lines, "###STOP###", folder=folder).env()
        env.start()
        return env.step(Message("assistant", "bye")).outcome

    with pytest.raises(GradingError, match="own action renew_lone failed: no such tool"):
        played("DB", "hi", name="renew_lone")
    asked: dict[str, Any] = {"name": "reset_card", "requestor": "user"}
    assert played("ACTION", "hi", **asked) is Outcome.FAILED
    assert played("ACTION", ToolCall("reset_card", {}), "hi", **asked) is Outcome.SOLVED


def test_only_tasks_call_functions_without_a_docstring() -> None:
    env = problem("card", "My card is broken", ToolCall("lock_card", {}), "###STOP###").env()
    env.start()  # the task's set-up calls lock_card
    assert env.step(calls(("card_works", {}))).messages[0].content == "Error: no such tool"
    assert env.step(Message("assistant", "Please reset it.")).outcome is Outcome.FAILED
    assert env._user.messages[-2].content == "Error: no such tool"  # type: ignore[attr-defined]


def test_numbers_are_equal_as_in_json() -> None:
    env = problem("renew", "Renew Dune, please", "###STOP###").env()
    env.start()
    env.step(calls(("renew_loan", RENEW[1] | {"days": 21.0})))
    assert env.step(SAY).outcome is Outcome.SOLVED
    assert digest({"a": [1.0, {"b": -0.0}]}) == digest({"a": [1, {"b": 0}]}) != digest({"a": [True, {"b": 0}]})
    assert digest({"a": 1e300}) == digest({"a": int(1e300)}) and digest({"a": 0.5}) != digest({"a": 0})
    assert digest({"a": {1}}) == digest({"a": 10**5000}) == ""
