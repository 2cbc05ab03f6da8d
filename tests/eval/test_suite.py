"""Suites: what is played and recorded, their intervals, and the verb on a checkpoint and on a server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.models import exact_measure
from glm5.chat import Tokenizer
from glm5.config.suite import Suite, SuitePart
from glm5.errors import ConfigError, DataError
from glm5.eval.needle_recall import needle_recall, token_places
from glm5.eval.players import LocalPlayer, Played
from glm5.eval.record import EPISODES
from glm5.eval.remote_player import RemotePlayer, simulated_user
from glm5.eval.suite import find_suite, run_suite, with_tokenizer
from glm5.eval.summary import cells_of
from glm5.records import Message, Outcome
from glm5.stats import bounded_mean, mean_of_groups, paired_rewards
from glm5.tasks import make_family
from glm5.tasks.judged import graded_by
from tests.agents.raw_server import answer, server, until
from tests.agents.scripted_model import Say, ScriptedModel
from tests.rooms import needs_rooms
from tests.tasks.long_readers import blind, perfect

DESK = Path(__file__).parents[1] / "tasks" / "dialogue" / "desk"
PARTS = [SuitePart(name=task, family="ruler", options={"tasks": [task]}) for task in ("qa_1", "niah_multiquery")]
SUITE = Suite(title="two", measure="reward", problems=4, repeats=2, grid={"length": [600, 900]}, parts=PARTS)


class Coin:
    """Answers by place: the first is right, the second half right, the third an error, the others wrong."""

    def __init__(self, fail_after: int = 1000) -> None:
        self.played: Counter[str] = Counter()
        self.left = fail_after

    def play(self, problems: Any, suite: Suite, part: SuitePart, seed: int) -> Iterator[tuple[int, Played]]:
        for place, problem in reversed(problems):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            self.played[problem.id] += 1
            which = int(problem.id.rpartition("/")[2])
            reward = {0: 1.0, 1: 0.5}.get(which, 0.0)
            outcome = {0: Outcome.SOLVED, 2: Outcome.ENV_ERROR}.get(which, Outcome.FAILED)
            detail = {"depth": which / 4, "cell": "none", "text": "é" * 99_999 + "end", "much": ["x" * 9999] * 999}
            yield place, Played(reward, outcome, detail)


class Wrong(Coin):
    """Always wrong."""

    def play(self, problems: Any, suite: Suite, part: SuitePart, seed: int) -> Iterator[tuple[int, Played]]:
        for place, _ in problems:
            yield place, Played(0.0, Outcome.FAILED)


def test_scores_are_means_of_problems_and_of_cells() -> None:
    found = run_suite(SUITE, Coin())
    mean = bounded_mean([1.0, 0.5, 0.0, 0.0], most=8)
    assert found["score"] == pytest.approx(0.375) and found["n"] == 16 and found["errors"] == 8
    assert found["cells"].keys() == {f"{part.name} length={length}" for length in (600, 900) for part in PARTS}
    for cell in found["cells"].values():
        assert cell == {"score": 0.375, "low": mean.low, "high": mean.high, "n": 4}
    whole = mean_of_groups([mean] * 4)
    assert (found["low"], found["high"]) == pytest.approx((whole.low, whole.high))
    assert found["by_length"]["600"]["n"] == 8 and found["by_length"].keys() == {"600", "900"}
    assert {bin_: value["score"] for bin_, value in found["by_depth"].items()} == {
        "0 to 0.2": 1.0, "0.2 to 0.4": 0.5, "0.4 to 0.6": 0.0, "0.6 to 0.8": 0.0
    }  # fmt: skip
    solved = run_suite(SUITE.model_copy(update={"measure": "solved"}), Coin())
    assert solved["score"] == pytest.approx(0.25)


def test_an_interrupted_run_goes_on_and_others_are_refused(tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", run_suite(SUITE, Coin())
    for stop in (3, 0, 11):
        with pytest.raises(KeyboardInterrupt):
            run_suite(SUITE, Coin(stop), folder=folder, told={"name": "m"})
    with (folder / EPISODES).open("ab") as handle:
        handle.write(b'{"cell": "qa_1 length=600", "place": 0}')  # cut off before the end of the line
    last = Coin()
    assert run_suite(SUITE, last, folder=folder, told={"name": "m"}) == whole
    assert sum(last.played.values()) == 32 - 14
    rows = [json.loads(line) for line in (folder / EPISODES).read_text().splitlines()]
    assert len(rows) == len({(row["cell"], row["place"], row["repeat"]) for row in rows}) == 32
    assert all(row["text"].endswith("éend") and len(json.dumps(row)) < 2 << 20 for row in rows)
    assert json.loads((folder / "result.json").read_text()) == whole
    settings = json.loads((folder / "settings.json").read_text())
    assert Suite.model_validate(settings["suite"]) == SUITE and settings["model"] == {"name": "m"}
    again = Coin(0)
    assert run_suite(SUITE, again, folder=folder, told={"name": "m"}) == whole
    with pytest.raises(DataError, match="other settings"):
        run_suite(SUITE, Coin(), folder=folder, told={"name": "other"})
    (folder / EPISODES).write_text('{"cell": 1}\n')
    with pytest.raises(DataError, match="line 1: not an answer"):
        run_suite(SUITE, Coin(), folder=folder, told={"name": "m"})
    with pytest.raises(DataError, match="no record"):
        run_suite(SUITE, Coin(), folder=tmp_path)


def test_ruler_has_the_published_numbers_of_tokens() -> None:
    from glm5.tasks.long_context.ruler import TASKS

    assert [(part.name, part.max_tokens) for part in find_suite("ruler", {}).parts] == [
        (name, task.tokens) for name, task in TASKS.items()
    ]


def test_a_benchmark_of_a_file_is_played(tmp_path: Path) -> None:
    (tmp_path / "aime.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{i} + 1?", "answer": i + 1}) for i in range(5))
    )

    def script(body: dict[str, Any], turn: int) -> Say:
        number = int(body["messages"][0]["content"].split()[0])
        return Say(f"\\boxed{{{number + 1 if number < 3 else 0}}}", thought="well")

    suite = find_suite("aime", {"file": str(tmp_path / "aime.jsonl")}, repeats=2)
    with ScriptedModel(script) as server:
        found = run_suite(suite, RemotePlayer(Endpoint(server.url, pauses=())))
    assert found["score"] == pytest.approx(0.6) and found["n"] == 5
    assert len(server.bodies) == 10 and {body["temperature"] for body in server.bodies} == {1.0}


def test_options_of_a_suite(tmp_path: Path) -> None:
    found = find_suite("ruler", {"length": [512, 1024], "thinking": True}, problems=3, top_p=None)
    assert found.grid == {"length": [512, 1024]} and found.problems == 3 and len(cells_of(found)) == 26
    assert all(part.options["thinking"] for part in found.parts)
    assert find_suite("ruler", {"length": 512}).grid == {"length": [512]}
    one = with_tokenizer(find_suite("arithmetic", {"levels": [1]}), tmp_path)
    assert one.parts == [SuitePart(name="arithmetic", family="arithmetic", options={"levels": [1]})]
    told = with_tokenizer(found, tmp_path).parts[0].options
    assert told["tokenizer"] == str(tmp_path)
    (tmp_path / "own.toml").write_text('title = "own"\nparts = [{ name = "a", family = "arithmetic" }]\n')
    assert find_suite(str(tmp_path / "own.toml"), {}).title == "own"
    with pytest.raises(ConfigError, match="did you mean"):
        find_suite("rular", {})
    assert [part.name for part in find_suite("ruler", {}, ["vt", "cwe"]).parts] == ["vt", "cwe"]
    assert {part.max_tokens for part in find_suite("ruler", {}, max_tokens=2000).parts} == {None}
    for options, only, changes, said in (
        ({"tasks": ["vt"]}, [], {}, "sets tasks itself"), ({}, ["vd"], {}, 'no part "vd"'),
        ({"length": []}, [], {}, "length"), ({"length": [9, 9]}, [], {}, "a value twice"),
        ({}, [], {"top_p": 0.0}, "top_p"), ({}, [], {"temperature": float("inf")}, "temperature"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            find_suite("ruler", options, only, **changes)
    twice = ", ".join(['{ name = "a", family = "math" }'] * 2)
    (tmp_path / "twice.toml").write_text(f'title = "x"\nparts = [{twice}]\n')
    with pytest.raises(ConfigError, match="the same name"):
        find_suite(str(tmp_path / "twice.toml"), {})
    (tmp_path / "bad.toml").write_text('title = "own"\nparts = []\n')
    with pytest.raises(ConfigError, match="parts"):
        find_suite(str(tmp_path / "bad.toml"), {})


@pytest.mark.parametrize("reader, score", [(perfect, 1.0), (blind, 0.0)])
def test_a_server_is_played(reader: Callable[[str], str], score: float) -> None:
    def script(body: dict[str, Any], turn: int) -> Say:
        return Say(reader(body["messages"][-1]["content"]), finish="length" if turn == 0 else None)

    suite = find_suite("ruler", {"length": [3000]}, problems=2, temperature=0.7, top_p=0.95)
    with ScriptedModel(script) as server:
        found = run_suite(suite, RemotePlayer(Endpoint(server.url, pauses=()), concurrency=3))
    assert found["score"] == score and found["n"] == 26 and "errors" not in found
    assert {(body["temperature"], body["top_p"]) for body in server.bodies} == {(0.7, 0.95)}
    assert Counter(body["max_tokens"] for body in server.bodies) == {128: 16, 30: 2, 120: 2, 50: 2, 32: 4}


def test_several_turns_with_tools_and_what_may_fail_on_a_server(tmp_path: Path, tokenizer: Tokenizer) -> None:
    family = make_family("toolcall")

    def solve(body: dict[str, Any], turn: int) -> Say:
        for index in range(3):
            problem = family.problem("heldout", index)
            if body["messages"][0]["content"] == problem.prompt:
                said = [m for m in problem.demonstration(0) if m.role == "assistant"][turn]
                return Say(said.content, [(call.name, dict(call.arguments)) for call in said.tool_calls])
        raise AssertionError(body["messages"][0])

    suite = find_suite("toolcall", {}, problems=3)
    with ScriptedModel(solve) as server:
        player = RemotePlayer(Endpoint(server.url, pauses=()))
        assert run_suite(suite, player)["score"] == 1.0
        assert {body["chat_template_kwargs"]["enable_thinking"] for body in server.bodies} == {False}
        server.refuse = [(400, '{"error": {"message": "the prompt is too long: maximum context length"}}')]
        found = run_suite(suite, player)
        assert found["score"] == pytest.approx(2 / 3) and found["too_long"] == 1
        assert run_suite(suite, player)["score"] == 1.0
        server.refuse = [(500, "{}")] * 20
        with pytest.raises(EndpointError, match="status 500"):
            run_suite(suite, player)
    with ScriptedModel(solve) as server:
        player = RemotePlayer(Endpoint(server.url, pauses=()), concurrency=1, template=False)
        server.refuse = [(400, '{"error": {"message": "a content filter said no"}}')]
        found = run_suite(suite.model_copy(update={"render_tools": False}), player)
        assert found["score"] == pytest.approx(2 / 3) and found["errors"] == 1 and "too_long" not in found
        assert not any("chat_template_kwargs" in body or "tools" in body for body in server.bodies)
        for said in ("max_tokens is too large: 131072. This model supports at most 32768", "'top_p' exceeds its limit",
                     "You exceeded your current quota"):  # fmt: skip
            server.refuse = [(400, json.dumps({"error": {"message": said}}))] * 3
            with pytest.raises(EndpointError, match="Every request was refused"):
                run_suite(suite, player, folder=tmp_path / "refused")
            assert not (tmp_path / "refused" / EPISODES).exists()
    for owner in ("glm5", "vllm", ""):  # only ours reads calls of tools that the prompt does not show
        with ScriptedModel(solve, owner=owner) as server:
            player = RemotePlayer(Endpoint(server.url, pauses=()))
            assert run_suite(suite.model_copy(update={"render_tools": False}), player)["score"] == 1.0
            kwargs = {"enable_thinking": False} | ({"render_tools": False} if owner == "glm5" else {})
            assert all(body["chat_template_kwargs"] == kwargs for body in server.bodies)
            assert all(("tools" in body) == (owner == "glm5") for body in server.bodies)
    count = exact_measure(tokenizer).count
    most = max(sum(map(count, family.problem("heldout", index).demonstration(0))) for index in range(3))
    settings = {"render_tools": False, "context": "discard-all", "discard_above": most}
    with ScriptedModel(solve) as server:  # tools that no prompt shows take no place in it
        player = RemotePlayer(Endpoint(server.url, pauses=()), tokenizer=tokenizer)
        assert run_suite(suite.model_copy(update=settings), player)["score"] == 1.0
        assert run_suite(suite.model_copy(update={**settings, "render_tools": True}), player)["score"] < 1.0
    broken = [Say("", [("get_price", "{not json")])] * 9
    with ScriptedModel(broken) as server:
        assert run_suite(suite, RemotePlayer(Endpoint(server.url, pauses=())))["score"] == 0.0


def test_a_checkpoint_is_played(small: Callable[..., Any], tokenizer: Tokenizer) -> None:
    model = small(max_position_embeddings=1500)
    suite = Suite(
        title="both", measure="reward", problems=2, max_tokens=8, temperature=1.0, repeats=2,
        parts=[SuitePart(name="long", family="ruler", options={"tasks": ["niah_single_1"], "length": 400}),
               SuitePart(name="short", family="arithmetic", options={"levels": [1]}, max_tokens=4)],
    )  # fmt: skip
    one, two = (run_suite(suite, LocalPlayer(model, tokenizer)) for _ in range(2))
    assert one == two and one["n"] == 4 and one["cells"].keys() == {"long", "short"}
    problems = [(i, make_family("arithmetic").problem("heldout", i)) for i in range(6)]
    player = LocalPlayer(model, tokenizer)
    whole = dict(player.play(problems, suite, suite.parts[1], 3))
    assert dict(player.play(problems[4:], suite, suite.parts[1], 3)) == {place: whole[place] for place in (4, 5)}


def test_the_needles_that_indexers_select(small: Callable[..., Any], tokenizer: Tokenizer) -> None:
    """Of n tokens every layer selects k for the last one."""
    model = small(index_topk=8)
    ids = tokenizer.encode("an apple is green and a pear is, too; say pear")
    every = range(len(ids))
    assert needle_recall(model, ids, every) == pytest.approx(8 / len(ids))
    single = [needle_recall(model, ids, [place]) for place in every]
    assert sum(single) == pytest.approx(8) and set(single) <= {0.0, 0.5, 1.0}  # type: ignore[arg-type]
    assert needle_recall(model, ids, []) is None and needle_recall(model, ids[:8], [0]) is None
    assert needle_recall(small(use_dsa=False), ids, every) is None
    assert token_places(tokenizer, ids, ["pear", "nothing"]) == [24, 25, 26, 27]  # of bytes
    suite = find_suite("ruler", {"length": [600]}, ["niah_single_1"], problems=1)
    wide = small(max_position_embeddings=3000, index_topk=8)
    found = run_suite(suite, LocalPlayer(wide, tokenizer, needles=True))
    assert 0.0 <= found["needle_recall"]["niah_single_1 length=600"] <= 1.0


def test_a_change_is_paired_by_problem(tmp_path: Path) -> None:
    first = run_suite(SUITE, Coin(), folder=tmp_path / "before")
    same = run_suite(SUITE, Coin(), against=tmp_path / "before")
    none = mean_of_groups([paired_rewards([0.0] * 4)] * 4)
    assert same["difference"] == {"score": 0.0, "low": none.low, "high": none.high, "n": 16} and first["n"] == 16
    more = run_suite(SUITE.model_copy(update={"problems": 6}), Wrong(), against=tmp_path / "before")["difference"]
    one = paired_rewards([-1.0, -0.5, 0.0, 0.0])
    four = mean_of_groups([one] * 4)
    assert more == pytest.approx({"score": -0.375, "low": four.low, "high": four.high, "n": 16})
    with pytest.raises(DataError, match="another suite"):
        run_suite(find_suite("mrcr", {}), Coin(), against=tmp_path / "before")
    with pytest.raises(DataError, match="no record"):
        run_suite(SUITE, Coin(), against=tmp_path / "nothing")
    other = SUITE.model_copy(update={"grid": {"length": [601]}})
    with pytest.raises(DataError, match="no problem in common"):  # the same names, other lengths
        run_suite(other, Coin(), against=tmp_path / "before")


def test_answers_to_what_is_another_problem_now(tmp_path: Path) -> None:
    """A file that changed, or rows that are none of the run's."""
    data, folder = tmp_path / "q.jsonl", tmp_path / "run"
    data.write_text(
        json.dumps({"question": "one", "answer": "1"}) + "\n" + json.dumps({"question": "two", "answer": "2"})
    )
    suite = find_suite("questions", {"file": str(data)}, problems=9)
    one = run_suite(suite, Wrong(), folder=folder)
    rows = (folder / EPISODES).read_text().splitlines(keepends=True)
    strange = rows[0].replace('"place": 0', '"place": 99'), rows[1].replace('"repeat": 0', '"repeat": 7'), rows[1]
    (folder / EPISODES).write_text("".join([*rows, *strange]))
    assert run_suite(suite, Coin(0), folder=folder) == one and one["n"] == 2
    data.write_text(data.read_text().replace("two", "three"))
    with pytest.raises(DataError, match="another problem now"):
        run_suite(suite, Wrong(), folder=folder)
    for damage in ('"reward": 1e400', '"reward": NaN', '"reward": "x"', '"place": Infinity'):
        name = damage.split(":")[0]
        (folder / EPISODES).write_text(rows[0].replace(f"{name}: 0.0", damage).replace(f"{name}: 0,", f"{damage},"))
        with pytest.raises(DataError, match="line 1: not an answer"):
            run_suite(suite, Wrong(), folder=folder)
    (folder / "settings.json").write_bytes(b"\xff")
    with pytest.raises(DataError, match="other settings"):
        run_suite(suite, Wrong(), folder=folder)
    for place in (data, data / "below", Path("/proc/none")):
        with pytest.raises(DataError, match=r"cannot be written|no record|another process"):
            run_suite(suite, Wrong(), folder=place)


@needs_rooms
def test_a_user_that_does_not_answer_is_no_failure_of_the_model() -> None:
    suite = find_suite("dialogue", {"folder": str(DESK.parent), "domain": "desk"}, problems=1)
    with ScriptedModel([Say("No.")]) as server, ScriptedModel([Say("Hi")]) as person:
        person.refuse = [(500, "{}")]
        user = simulated_user(Endpoint(person.url, pauses=()))
        with pytest.raises(EndpointError, match="status 500"):
            run_suite(suite, RemotePlayer(Endpoint(server.url, pauses=())), user=user)


def test_an_evaluation_that_fails_does_not_wait_for_the_user() -> None:
    with server([answer(b"{}", 401)]) as (model, asked), server([]) as (person, waiting):
        user = Endpoint(person, "user", pauses=(60.0,))

        class Talk:
            def start(self) -> Any:
                if len(waiting) == 3:
                    return [Message("user", "Hi.")], (), False
                user.complete([Message("user", "Who are you?")], [])
                raise AssertionError("it does not answer")

        player = RemotePlayer(Endpoint(model, "m", pauses=()), 4, template=False, user=user)
        problems = [(i, SimpleNamespace(env=Talk)) for i in range(3)]

        def late() -> Iterator[Any]:
            yield from problems
            until(lambda: len(waiting) == 3)
            yield 3, SimpleNamespace(env=Talk)

        suite = find_suite("dialogue", {"folder": str(DESK.parent), "domain": "desk"})
        with pytest.raises(EndpointError, match="status 401"):
            list(player.play(late(), suite, suite.parts[0], 0))
        assert len(asked) == 1


def test_a_suite_that_needs_a_user_or_a_server_says_so(small: Callable[..., Any], tokenizer: Tokenizer) -> None:
    folder = {"folder": str(DESK.parent), "domain": "desk"}
    with pytest.raises(ConfigError, match="--user"):
        run_suite(find_suite("dialogue", folder), Coin())
    player = LocalPlayer(small(max_position_embeddings=700), tokenizer)
    with pytest.raises(ConfigError, match="context policy"):
        run_suite(find_suite("vending-bench-2", {"days": 2}, problems=1), player)


def test_the_verb(
    small: Callable[..., Any], tokenizer: Tokenizer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from glm5.cli import main

    small(max_position_embeddings=700).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")

    def said(model: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["glm5", "eval", model, "--problems", "2", *arguments])
        main()
        return capsys.readouterr().out

    local, tasks = str(tmp_path / "model"), ("--suite", "ruler", "--set", "length=[600]", "--set", 'tasks=["vt"]')
    monkeypatch.setattr("glm5.eval.suite.SUITES", tmp_path)
    (tmp_path / "ruler.toml").write_text(
        'title = "x"\nmeasure = "reward"\ngrid = { length = [9] }\nparts = [{ name = "vt", family = "ruler" }]\n'
    )
    with pytest.raises(SystemExit) as end:  # the bytes of the question alone are more than 600
        said(local, *tasks)
    assert end.value.code == 1
    answers = ("--limit", "max_tokens=4", "--suite", "arithmetic", "--out", str(tmp_path / "out"))
    found = json.loads(said(local, *answers, "--json"))["arithmetic"]
    assert found["n"] == 2 and found == json.loads((tmp_path / "out" / "result.json").read_text())
    assert "arithmetic" in said(local, *answers) and "n = 2" in said(local, *answers)
    with ScriptedModel(lambda body, turn: Say(perfect(body["messages"][-1]["content"]))) as server:
        table = said(server.url, "--suite", "ruler", "--set", "length=[900, 1200]", "--tokenizer", local).splitlines()
    assert [line.split()[:2] for line in table if not line.startswith("depth")] == [
        ["vt", "length=900"], ["vt", "length=1200"], ["length", "900"], ["length", "1200"],
        ["ruler", "100.0%"],
    ]  # fmt: skip
    for wrong in (("--limit", "turns=3"), ("--limit", "max_tokens=0"), ("--limit", "max_tokens=true")):
        with pytest.raises(SystemExit) as end:
            said(local, "--suite", "arithmetic", *wrong)
        assert end.value.code == 2


@pytest.mark.parametrize("how", ["idle", "cut", "too long"])
def test_a_year_that_ends_early_pays_nothing_for_stalling(how: str, tmp_path: Path) -> None:
    suite = find_suite("vending-bench-2", {"days": 20}, problems=1, max_turns=4)
    with ScriptedModel(lambda body, turn: Say("Hm.", finish="length" if how == "cut" else "stop")) as server:
        if how == "too long":
            server.refuse = [(400, '{"error": {"message": "the maximum context length is 10 tokens"}}')]
        found = run_suite(suite, RemotePlayer(Endpoint(server.url, pauses=())), folder=tmp_path / "out")
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()]
    assert found["score"] == row["reward"] == 500 - 20 * 2 and row["days"] == 0


def test_a_record_is_not_resumed_with_other_answers_or_tests(tmp_path: Path) -> None:
    def played(family: str, row: dict[str, Any], **options: Any) -> dict[str, Any]:
        (tmp_path / f"{family}.jsonl").write_text(json.dumps(row) + "\n")
        suite = find_suite(family, {"file": str(tmp_path / f"{family}.jsonl"), **options}, problems=1)
        with ScriptedModel([Say("done")]) as server:
            return run_suite(suite, RemotePlayer(Endpoint(server.url, pauses=())), folder=tmp_path / family)

    def tests(output: str) -> dict[str, Any]:
        tests = json.dumps([{"input": "1", "output": output, "testtype": "stdin"}])
        return {"question_content": "Q", "public_test_cases": tests, "private_test_cases": "[]"}

    first = played("questions", {"question": "q?", "answer": "a"}, grader="exact")
    assert played("questions", {"question": "q?", "answer": "a"}, grader="exact") == first
    with pytest.raises(DataError, match=r"other answers or tests grade questions/questions.jsonl/1 now"):
        played("questions", {"question": "q?", "answer": "done"}, grader="exact")
    file = tmp_path / "questions" / "episodes.jsonl"
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(json.dumps({key: value for key, value in row.items() if key != "graded_by"}) + "\n")
    assert played("questions", {"question": "q?", "answer": "done"}, grader="exact") == first  # an older record
    problems = [make_family("livecodebench", file=str(tmp_path / f"{i}.jsonl")) for i in range(2)
                if (tmp_path / f"{i}.jsonl").write_text(json.dumps(tests(str(i))))]  # fmt: skip
    keys = [(one.key, graded_by(one)) for one in (family.problem("heldout", 0) for family in problems)]
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]
