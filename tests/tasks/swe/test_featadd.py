"""Source featadd: sessions that add features, what becomes of them, hostile ones, resuming, the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5 import cli
from glm5.agents.coding import Budget
from glm5.agents.endpoint import Endpoint
from glm5.agents.models import Measure
from glm5.agents.session_log import read_log
from glm5.cli.task_model import TaskModel
from glm5.errors import GradingError, UsageError
from glm5.tasks.swe.build import MOST_FAULTS, Build, Job
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.featadd import FEATURES, MOST_MODULE, FeatAdd, Session, Unusable, changes_of, documented
from glm5.tasks.swe.make import make
from glm5.tasks.swe.text import instruction
from glm5.tasks.swe.validate import Baseline
from tests.agents.scripted_model import Say, ScriptedModel
from tests.rooms import needs_rooms
from tests.tasks.swe.tiny import CLIP, tiny

RANGES = "tiny/ranges.py"
BROKEN = CLIP.replace("def clip(x, low, high):", "def clip(x, low, high, step=1):").replace(
    "return high", "return high - step"
)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return tiny(tmp_path / "tiny")


@dataclass
class Player:
    """Plays sessions by a plan and remembers the requests; "down" is a model that cannot be reached."""

    plan: list[Session | str | None]
    requests: list[str] = field(default_factory=list)

    def __call__(self, repository: Repository, request: str, log: Path, stopping: Callable[[], bool]) -> Session | None:
        self.requests.append(request)
        found = self.plan[min(len(self.requests), len(self.plan)) - 1]
        if isinstance(found, str):
            raise GradingError("http://127.0.0.1:9 does not answer.")
        return found


def one(repository: Repository, tmp_path: Path, text: str = BROKEN) -> Any:
    play = Player([Session({RANGES: text.encode()})])
    (candidate,) = FeatAdd(play, tmp_path / "featadd", 1).candidates(repository, 0)
    return candidate


def test_a_candidate_is_what_the_agent_left(repository: Repository, tmp_path: Path) -> None:
    candidate = one(repository, tmp_path)
    assert (candidate.source, candidate.kind, candidate.changes) == ("featadd", "bug-fix", {RANGES: BROKEN})
    assert candidate.description == "" and candidate.patch().count("def clip(x, low, high):") == 1


def test_the_request_asks_for_a_documented_function_and_no_bug(repository: Repository, tmp_path: Path) -> None:
    assert documented(repository) == [(RANGES, "clip"), (RANGES, "spread"), (RANGES, "words")]
    play = Player([Session({})])
    assert not list(FeatAdd(play, tmp_path / "a", 9).candidates(repository, 0))
    assert not list(FeatAdd(play, tmp_path / "b", 9).candidates(repository, 0))
    assert play.requests[:3] == play.requests[3:] and len(set(play.requests)) == 3  # the seed decides
    for request in play.requests:
        assert "must keep working" in request and any(feature in request for feature in FEATURES)
        assert not {"bug", "break", "fault", "wrong"} & set(request.lower().split())
    assert not list(FeatAdd(play, tmp_path / "c", 9).candidates(repository, 1))
    assert play.requests[6:] != play.requests[:3]


def test_the_text_says_nothing_of_the_feature(repository: Repository, tmp_path: Path) -> None:
    failing = {"tests/test_ranges.py::test_clip": "assert clip(x, 2, 5) == want\n\nAssertionError: assert 4 == 5"}
    text = instruction(one(repository, tmp_path), failing, "/app")
    assert text is not None and "assert 4 == 5" in text
    assert "feature" not in text and "step" not in text and not any(feature in text for feature in FEATURES)


def test_other_files_are_left_out(repository: Repository) -> None:
    more: dict[str, bytes | None] = {
        "tests/test_ranges.py": b"", "tests/test_new.py": b"x = 1\n", "test_own.py": b"", "NEWS": b"\0\xff",
        "setup.py": None, "tiny/__init__.py": b"# nothing that runs\n",
    }  # fmt: skip
    assert changes_of(repository, Session({RANGES: BROKEN.encode(), **more})) == {RANGES: BROKEN}


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        (Session({}), "no code was changed"),
        (Session({"tests/test_ranges.py": b"", "README": b"x"}), "no code was changed"),
        (Session({RANGES: CLIP.replace("Numbers in", "Some").encode() + b"# x\n"}), "no code was changed"),
        (Session({RANGES: None}), "added or removed"),
        (Session({RANGES: BROKEN.encode(), "tiny/more.py": b"x = 1\n"}), "added or removed"),
        (Session({RANGES: b"\x7fELF\0\xff\xfe"}), "does not compile"),
        (Session({RANGES: CLIP.encode() + b"\0"}), "does not compile"),
        (Session({RANGES: b"def broken(:\n"}), "does not compile"),
        (Session({RANGES: b"return 1\n"}), "does not compile"),
        (Session({RANGES: b"x = " + b"-" * 50_000 + b"1\n"}), "does not compile"),
        (Session({RANGES: b"x = " + b"(" * 50_000 + b")" * 50_000 + b"\n"}), "does not compile"),
        (Session({RANGES: b"x = 1\n" * MOST_MODULE}), "more than"),
        (Session({RANGES: BROKEN.encode()}, left_out=["tiny/__init__.py"]), "too large"),
        (Session({RANGES: BROKEN.encode()}, cut_off="turns"), "did not end by itself"),
    ],
)
def test_sessions_without_a_candidate(repository: Repository, tmp_path: Path, session: Session, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        changes_of(repository, session)
    told: list[str] = []
    play = Player([session, Session({RANGES: BROKEN.encode()})])
    found = list(FeatAdd(play, tmp_path / "featadd", 2, told=told.append).candidates(repository, 0))
    assert [candidate.changes for candidate in found] == [{RANGES: BROKEN}]
    assert len(told) == 1 and reason in told[0]


def test_sessions_are_not_repeated(repository: Repository, tmp_path: Path) -> None:
    play = Player([Session({RANGES: BROKEN.encode()}), "down", Session({}), None])
    source = FeatAdd(play, tmp_path / "featadd", 3)
    with pytest.raises(GradingError, match="does not answer"):
        list(source.candidates(repository, 0))
    first, second = play.requests
    assert [c.changes for c in source.candidates(repository, 0)] == [{RANGES: BROKEN}]  # the build stops in the third
    assert play.requests[2] == second and len(play.requests) == 4
    replaced = FeatAdd(play, tmp_path / "featadd", 3, model="another")
    play.plan = [None]
    assert not list(replaced.candidates(repository, 0))
    assert play.requests[-1] == first


@pytest.fixture
def no_validation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    clean = Baseline(frozenset(("a",)), {}, 0.1, 0)
    monkeypatch.setattr(Build, "_baseline", lambda *_: clean)

    def validated(candidate: Any, clean: Any, driver: Any, rules: Any, folder: Path, *_: Any) -> dict[str, Any]:
        folder.mkdir(parents=True)
        return {"failing": ""}

    monkeypatch.setattr("glm5.tasks.swe.build.validate", validated)
    return iter(())


@pytest.mark.usefixtures("no_validation")
def test_a_model_that_is_down(repository: Repository, tmp_path: Path) -> None:
    """Other packages go on; too many failures in a row end the build with the model's sentence."""
    good = Player([Session({RANGES: BROKEN.encode()})])
    told: list[str] = []

    def job(name: str, play: Player) -> Job:
        own = replace(repository, name=name)
        return Job(name, lambda: (own, [FeatAdd(play, tmp_path / "featadd", 1)]))

    build = Build(tmp_path / "out", tmp_path, told=told.append)
    down = [job(f"p{i}", Player(["down"])) for i in range(2)]
    assert build.run([*down, job("good", good)], 9, None, 1)["tasks"] == 1
    assert sum("127.0.0.1:9 does not answer" in line for line in told) == 2
    with pytest.raises(GradingError, match="does not answer"):
        build.run([job(f"p{i}", Player(["down"])) for i in range(MOST_FAULTS + 1)], 9, None, 1)
    again = Build(tmp_path / "out", tmp_path)
    assert again.run([job(f"p{i}", good) for i in range(2)], 9, None, 1)["tasks"] == 3


@pytest.mark.usefixtures("no_validation")
def test_no_session_is_played_that_is_not_wanted(repository: Repository, tmp_path: Path) -> None:
    play = Player([Session({RANGES: BROKEN.replace("1):", f"{i}):").encode()}) for i in range(3)])
    job = Job("tiny", lambda: (repository, [FeatAdd(play, tmp_path / "featadd", 3)]))
    assert Build(tmp_path / "out", tmp_path).run([job], 9, 1, 1)["tasks"] == 1
    assert len(play.requests) == 1


def test_featadd_needs_a_model_and_packages(tmp_path: Path) -> None:
    source = FeatAdd(Player([None]), tmp_path)
    for options in ({}, {"featadd": source, "language": "go"}, {"featadd": source, "modules": ["textwrap"]}):
        with pytest.raises(UsageError, match="featadd needs"):
            make(tmp_path, work=tmp_path, sources=["featadd"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--source", "featadd"], "--model is for"), (["--text", "model"], "--model is for"),
     (["--model", "http://x"], "--model is for"), (["--text", "poem"], "--text is template or model"),
     (["--text", "model", "--model", "nowhere"], "neither a checkpoint directory nor")],
)  # fmt: skip
def test_options_that_do_not_fit(tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(cli.app, ["task", "build", "swe", "--out", str(tmp_path), *options])
    assert isinstance(done.exception, UsageError) and said in str(done.exception)


def edit(old: str, new: str) -> Say:
    return Say(calls=[("edit", {"path": RANGES, "old": old, "new": new})])


SCRIPT = [
    edit("def clip(x, low, high):", "def clip(x, low, high, step=1):"),
    edit("return high", "return high - step"),
    Say(calls=[("test", {"arguments": "-k clip"})]),
    Say("`clip` takes a step now."),
]


@pytest.fixture
def command(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("glm5.tasks.swe.make.open_package", lambda *_: repository)
    listed = tmp_path / "list.toml"
    listed.write_text('[pytest]\nrequires = []\n[package.tiny]\nversion = "1.0"\n')
    return ["task", "build", "swe", "--out", str(tmp_path / "out"), "--packages", str(listed), "--source", "featadd",
            "--json", "--features-per-package", "1", "--model"]  # fmt: skip


@needs_rooms
@pytest.mark.usefixtures("no_validation")
def test_a_build_from_the_command_line(repository: Repository, tmp_path: Path, command: list[str]) -> None:
    """A second run asks the model nothing."""
    with ScriptedModel(SCRIPT) as model:
        done, again = (CliRunner().invoke(cli.app, [*command, model.url]) for _ in range(2))
        assert done.exit_code == 0, (done.output, done.exception)
        assert len(model.bodies) == 4
    assert json.loads(done.stdout)["tasks"] == 1 and again.stdout == done.stdout
    assert "1 failed, 3 passed" in model.bodies[-1]["messages"][-1]["content"]  # it could run the tests
    assert repository.read(RANGES) == CLIP
    (log,) = (tmp_path / "out/work/featadd").glob("*.jsonl")
    assert read_log(log)[0][-1]["reason"] == "done"


@needs_rooms
@pytest.mark.slow
def test_a_task_that_is_validated(tmp_path: Path, command: list[str]) -> None:
    with ScriptedModel(SCRIPT) as model:
        done = CliRunner().invoke(cli.app, [*command, model.url])
    assert json.loads(done.stdout)["sources"] == {"featadd": {"tasks": 1, "rejects": {}}}
    (row,) = map(json.loads, (tmp_path / "out/manifest.jsonl").read_text().splitlines())
    assert (row["kind"], row["text"], row["fail_to_pass"]) == ("bug-fix", "template", 1)
    assert (tmp_path / "out/tasks" / row["id"] / "environment/repo" / RANGES).read_text() == BROKEN


@needs_rooms
def test_sessions_of_the_agent(repository: Repository, tmp_path: Path) -> None:
    """One that never ends, a model that goes away and comes back, a prompt that is too long, a stopped build, a log
    that a crash left empty."""

    def never() -> bool:
        return False

    with ScriptedModel(lambda body, turn: Say(calls=[("run", {"command": f"echo {turn}"})])) as endless:
        model = TaskModel(Endpoint(endless.url), Measure(), endless.url, budget=Budget(turns=3))
        session = model.play(repository, "Add it.", tmp_path / "endless", never)
        assert session is not None and (session.cut_off, len(endless.bodies)) == ("turns", 3)
    log = tmp_path / "log"
    log.write_bytes(b"")
    with ScriptedModel(SCRIPT) as scripted:
        model = TaskModel(Endpoint(scripted.url, pauses=()), Measure(), scripted.url)
        scripted.refuse = [(400, "This model's maximum context length is 9.")]
        session = model.play(repository, "Add it.", tmp_path / "long", never)
        assert session is not None and session.cut_off == "endpoint"
        assert model.play(repository, "Add it.", log, lambda: len(scripted.bodies) > 1) is None
        scripted.refuse = [(500, "out of memory")]
        with pytest.raises(GradingError, match="refused the request with status 500"):
            model.play(repository, "Add it.", log, never)
        session = model.play(repository, "Add it.", log, never)
        assert session is not None and not session.cut_off and dict(session.files) == {RANGES: BROKEN.encode()}
    model = TaskModel(Endpoint(scripted.url, "x", pauses=()), Measure(), scripted.url)
    with pytest.raises(GradingError, match="does not answer"):
        model.play(repository, "Add it.", tmp_path / "down", never)
    with pytest.raises(GradingError, match="does not answer"):
        model.ask("Write it.")


@needs_rooms
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("rm -r tiny", "added or removed"),
        ("head -c 9000000 /dev/zero > tiny/ranges.py", "too large"),
        ("ln -sf /etc/passwd tiny/ranges.py", "added or removed|too large"),
        ("mkfifo tiny/pipe.py", "added or removed|too large"),
        ("for i in 1 2 3; do echo 1 > $i.py; done", "added or removed"),
    ],
)
def test_hostile_sessions(repository: Repository, tmp_path: Path, command: str, reason: str) -> None:
    script = [edit("x > high", "x > high + 1"), Say(calls=[("run", {"command": command})]), Say("Done.")]
    with ScriptedModel(script) as scripted:
        model = TaskModel(Endpoint(scripted.url), Measure(), scripted.url)
        session = model.play(repository, "Add it.", tmp_path / "log", lambda: False)
    assert session is not None
    with pytest.raises(Unusable, match=reason):
        changes_of(repository, session)
