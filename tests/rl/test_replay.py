"""Recorded rollouts: the same records back bit for bit, the same update from them, and nothing malformed taken in."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.config.optim import OptimConfig
from glm5.config.recipe import AgenticStage, DistillStage, FamilyConfig, PolicyStage, ReasoningStage
from glm5.errors import DataError
from glm5.obs.metrics import read_metrics
from glm5.records import Outcome, Trajectory, Turn
from glm5.rl import learner as learner_module
from glm5.rl import replay
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.distill import Distillation, ModelTeacher
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.drivers.timing import TIMES
from glm5.rl.learner import Learner
from glm5.rl.update import update
from glm5.tasks import trajectory_json

DROPPED = ("dropped_groups", "dropped_env", "dropped_stale", "stale_responses", "padded_responses", "env_errors",
           "excluded/toy")  # fmt: skip

LIMITS: dict[str, Any] = dict(
    max_tokens=8, max_context=80, row_length=80, max_turns=4, prompts=2, group=4, record=True,
    families=[FamilyConfig(name="toy", options={"turns": 3})],
)  # fmt: skip


def trajectory(group: int = 0, logprob: float = -0.1, reward: float = 0.0) -> Trajectory:
    turns = [
        Turn((1, 2), (3, 4), (logprob, -2.5), (0, 1), "stop"),
        Turn((1, 2, 3, 4, 9), (5,), (-0.0,), (1,), "length"),
    ]
    return Trajectory("p/1", "toy", group, turns, reward, Outcome.SOLVED, {"error": "ü", "n": [1, 2.5, None]}, "ü")


def test_turns_that_share_a_long_beginning_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has ten tokens, of which the second turn shares four with the first."""
    file = tmp_path / replay.FILE
    replay.write([[trajectory()]], file)
    monkeypatch.setattr(trajectory_json, "TOKENS_PER_BYTE", 0)
    monkeypatch.setattr(trajectory_json, "MAX_TOKENS", 10)
    assert len(replay.read(file)[0]) == 1
    monkeypatch.setattr(trajectory_json, "MAX_TOKENS", 9)
    with pytest.raises(DataError, match="line 1: the turns have too many tokens for a line of this length"):
        replay.read(file)
    monkeypatch.undo()
    turns = [Turn(tuple(range(3000 + 20 * i)), (1,) * 20, (-1.0,) * 20, (0,) * 20, "stop") for i in range(100)]
    honest = replace(trajectory(), turns=turns)
    replay.write([[honest]], tmp_path / "honest.jsonl")
    assert replay.read(tmp_path / "honest.jsonl") == [[honest]]


# ----------------------------------------------------------------------------------------------------- records

IDS = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
FLOATS = st.floats(width=64) | st.floats(width=32)


@st.composite
def turn_lists(draw: Any) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 4))):
        before = (*turns[-1].context_ids, *turns[-1].output_ids) if turns else ()
        context = before[: draw(st.integers(0, len(before)))] + draw(IDS)
        output = draw(IDS)
        logprobs = tuple(draw(st.lists(FLOATS, min_size=len(output), max_size=len(output))))
        versions = tuple(draw(st.lists(st.integers(0, 99), min_size=len(output), max_size=len(output))))
        turns.append(Turn(context, output, logprobs, versions, draw(st.sampled_from(["stop", "length", "abort"]))))
    return turns


LONGS = st.integers(-(1 << 63), (1 << 63) - 1)
TRAJECTORIES = st.builds(
    Trajectory, problem=st.text(), domain=st.text(), group=st.integers(0, 9), turns=turn_lists(), reward=FLOATS,
    outcome=st.sampled_from(list(Outcome)), detail=st.dictionaries(st.text(), LONGS | st.text(), max_size=2),
    teacher=st.text(),
)  # fmt: skip


def bits(trajectory: Trajectory) -> str:
    """Everything, floats by their bits: nan equals itself, and 0.0 is not -0.0."""

    def walk(value: Any) -> Any:
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, list | tuple):
            return [walk(child) for child in value]
        return {k: walk(v) for k, v in value.items()} if isinstance(value, dict) else value

    return repr(walk(dataclasses.asdict(trajectory)))


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(st.lists(st.lists(TRAJECTORIES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_what_is_written_comes_back(tmp_path_factory: Any, groups: list[list[Trajectory]]) -> None:
    path = tmp_path_factory.mktemp("replay") / "r.jsonl"
    replay.write(groups, path)
    found = replay.read(path)
    assert [[bits(t) for t in g] for g in found] == [[bits(t) for t in g] for g in groups]
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == sum(map(len, groups)) + 1 and lines[-1] == ""
    for line in lines[:-1]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_long_episode_is_written_once(tmp_path: Path) -> None:
    context, turns = tuple(range(1000)), []
    for turn in range(20):
        turns.append(Turn(context, (7, 8), (-1.0, -2.0), (0, 0), "stop"))
        context = (*context, 7, 8, turn)
    replay.write([[Trajectory("p", "d", 0, turns, 0.0, Outcome.FAILED)]], tmp_path / "r.jsonl")
    row = json.loads((tmp_path / "r.jsonl").read_text())
    assert [len(t["given"]) for t in row["turns"]] == [1000] + [1] * 19
    assert replay.read(tmp_path / "r.jsonl")[0][0].turns == turns


def test_batches_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    replay.write([[trajectory(0)], [trajectory(1)]], path, "a", 1)
    replay.write([[trajectory(2), trajectory(2)]], path, "a", 2)
    replay.write([[trajectory(3)]], path, "b", 1)
    found = [(key, [[t.group for t in g] for g in groups]) for key, groups in replay.batches(path)]
    assert found == [(("a", 1), [[0], [1]]), (("a", 2), [[2, 2]]), (("b", 1), [[3]])]
    assert [g[0].group for g in replay.read(path)] == [0, 1, 2, 3]
    assert [g[0].group for g in replay.read(path, "a")] == [0, 1, 2]
    assert [g[0].group for g in replay.read(path, "a", 2)] == [2]
    with pytest.raises(DataError, match="contains no rollouts of stage c"):
        replay.read(path, "c")
    # Rewinding takes out a stage's later updates, and only those; a cut-off line goes too.
    before = path.read_bytes().splitlines(keepends=True)
    with path.open("ab") as file:
        file.write(before[0][:50])
    assert replay.rewind(path, "a", 1) == 3
    assert path.read_bytes() == b"".join(before[:2] + before[4:])
    assert replay.rewind(path, "a", 1) == 0 == replay.rewind(tmp_path / "none", "a", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.jsonl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("group"), '"group" is missing'),
        (lambda row: row.update(teacher=3), '"teacher" is not a text'),
        (lambda row: row.update(group=1.5), '"group" is not a whole number'),
        (lambda row: row.update(group=True), '"group" is not a whole number'),
        (lambda row: row.update(problem=3), '"problem" is not a text'),
        (lambda row: row.update(reward="much"), '"reward" contains .much., which is not a number'),
        (lambda row: row.update(reward=10**400), '"reward" contains 1000000'),
        (lambda row: row.update(reward=math.inf), '"reward" contains inf'),
        (lambda row: row.update(outcome="won"), 'unknown outcome "won"; choose one of solved, '),
        (lambda row: row.update(turns=[3]), "a turn is not an object"),
        (lambda row: row["turns"][0].update(shared=1), "shares 1 tokens with the previous turn, which has 0"),
        (lambda row: row["turns"][1].update(shared=-1), '"shared" is -1'),
        (lambda row: row["turns"][1].update(output=[5, 6]), "2 output tokens have 1 logprobs and 1 versions"),
        (lambda row: row["turns"][0].update(output=[-1, 3]), '"output" contains a value'),
        (lambda row: row["turns"][0].update(given="12"), '"given" is not a list'),
        (lambda row: row["turns"][0].update(logprobs=[None, 0]), '"logprobs" contains None'),
        (lambda row: row.update(count=0), '"count" is 0; it must be at least 1'),
        (lambda row: row.update(count=5), "ends after 1 of 2"),
        (lambda row: row.update(index=0), "trajectory 0 .* lines are missing or out of order"),
        (lambda row: row.update(slot=2), "group 2.* lines are missing or out of order"),
        (lambda row: row.update(step=9), "ends after 1 of 2 trajectories"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "r.jsonl"
    replay.write([[trajectory(), trajectory()]], path, "rl", 3)
    first, second = path.read_text().splitlines()
    row = json.loads(second)
    change(row)
    path.write_text(f"{first}\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=rf"r\.jsonl, line [12]: .*{message}"):
        replay.read(path)


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"a": ', "\x00", "[" * 100_000, '{"stage": "rl", "step": 1'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r.jsonl"
    replay.write([[trajectory()]], path)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(DataError, match=r"r\.jsonl, line 2: not a JSON object"):
        replay.read(path)


def test_half_a_batch_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    replay.write([[trajectory(), trajectory()], [trajectory(1)]], path, "rl", 3)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(DataError, match=r'line 2: the batch of step 3 of "rl" ends after 2 of 3 trajectories'):
        replay.read(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        replay.read(tmp_path / "other.jsonl")


# ----------------------------------------------------------------------------------------------------- updates


def reasoning(**changes: Any) -> ReasoningStage:
    optim = OptimConfig(steps=4, lr=5e-3, schedule="linear", save_every=2)
    return ReasoningStage(kind="reasoning", name="rl", optim=optim, **LIMITS | changes)


def agentic(**changes: Any) -> AgenticStage:
    fields = LIMITS | dict(concurrency=10, train_ticks=6, max_staleness=2) | changes
    return AgenticStage(kind="agentic", name="rl", optim=OptimConfig(steps=4, lr=5e-3, save_every=2), **fields)


def distill(**changes: Any) -> DistillStage:
    fields = LIMITS | dict(group=1, prompts=6, teachers={"toy": "x"}) | changes
    return DistillStage(kind="distill", name="rl", optim=OptimConfig(steps=3, lr=5e-3), **fields)


def algorithm_of(stage: PolicyStage, teacher: Any) -> Any:
    if isinstance(stage, DistillStage):
        return Distillation(stage, {"x": ModelTeacher(teacher, 64)})
    return AgenticRL(stage) if isinstance(stage, AgenticStage) else ReasoningRL(stage)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    "stage",
    [
        reasoning(),
        reasoning(kl_weight=0.1, average="token"),
        agentic(),
        agentic(loss="ppo", kl_weight=0.05),
        distill(),
    ],
    ids=["reasoning", "reasoning-kl", "agentic", "agentic-ppo", "distill"],
)
def test_replaying_repeats_the_updates_bit_for_bit(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, stage: PolicyStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "ROWS_PER_STEP", 2)  # several micro-batches
    played, io, teacher = talker(), stage_io(), talker(9)
    after: dict[int, dict[str, torch.Tensor]] = {}
    resets: list[int] = []

    class Watched(LogicalDriver):
        def _update(self, groups: Any) -> dict[str, float]:
            numbers = super()._update(groups)
            state = self.learner.model.state_dict()
            after[self.learner.version] = {name: tensor.clone() for name, tensor in state.items()}
            return numbers

        def _push(self) -> None:
            super()._push()
            resets.append(self.learner.version)

    Watched(played, tokenizer, stage, algorithm_of(stage, teacher), io, 0).run()
    rows = {row["step"]: row for row in read_metrics(io.metrics.path)}
    model = talker()
    learner = Learner(
        model, stage.optim, row_length=stage.row_length, temperature=stage.temperature,
        reference=talker() if getattr(stage, "kl_weight", 0) else None,
    )  # fmt: skip
    algorithm = algorithm_of(stage, teacher)
    assert not hasattr(learner, "engine")
    steps = []
    for (name, step), groups in replay.batches(io.folder.parent / "rollouts.jsonl"):
        numbers = update(learner, algorithm, stage, groups)
        assert name == "stage" and step == learner.version
        assert numbers == {key: rows[step][key] for key in numbers}, step
        assert set(rows[step]) - set(numbers) == {"stage", "step", "time", *DROPPED, *TIMES}
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, after[step][key]), (step, key)
        if isinstance(stage, AgenticStage) and step in resets:
            learner.reset_optimizer()
        steps.append(step)
    assert steps == sorted(rows) == list(range(1, stage.optim.steps + 1))
    assert any(rows[step]["grad_norm"] > 0 for step in steps)
    assert not torch.equal(model.lm_head.weight, talker().lm_head.weight)


def test_a_resumed_run_leaves_the_record_of_an_uninterrupted_one(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any
) -> None:
    stage, files = reasoning(), []
    for folder, stop in (("whole", None), ("broken", 3)):
        io = stage_io(folder, stop_after=stop)
        file = io.folder.parent / replay.FILE
        replay.write([[trajectory()]], file, "earlier", 1)
        if stop:
            with pytest.raises(KeyboardInterrupt):
                LogicalDriver(talker(), tokenizer, stage, ReasoningRL(stage), io, 0).run()
            with file.open("a") as half:
                half.write('{"stage": "stage", "st')
            io = stage_io(folder)
        LogicalDriver(talker(), tokenizer, stage, ReasoningRL(stage), io, 0).run()
        files.append(file.read_bytes())
    assert files[0] == files[1] and files[0].count(b"\n") == 1 + 4 * 8


def test_nothing_is_recorded_unasked(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    stage, io = reasoning(record=False), stage_io()
    LogicalDriver(talker(), tokenizer, stage, ReasoningRL(stage), io, 0).run()
    assert not (io.folder.parent / replay.FILE).exists()
    assert not ReasoningStage.model_fields["record"].default and math.isfinite(
        read_metrics(io.metrics.path)[-1]["loss"]
    )
