"""Environments that crash, hang or lie, through the whole loop: excluded by cause, counted, and an end if too many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5.config.optim import OptimConfig
from glm5.config.recipe import FamilyConfig, ReasoningStage
from glm5.engine.runner import Runner
from glm5.errors import RolloutError
from glm5.obs.metrics import read_metrics
from glm5.records import Message, Outcome, StepResult, Trajectory
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.drivers.timing import TIMES
from glm5.rl.env_errors import EnvErrors
from glm5.tasks import families


def stage_of(names: list[str], **changes: Any) -> ReasoningStage:
    fields: dict[str, Any] = dict(prompts=2, group=4, max_tokens=8, max_context=80, row_length=80) | changes
    return ReasoningStage(
        kind="reasoning", name="rl", optim=OptimConfig(steps=4, lr=5e-3, save_every=2),
        families=[FamilyConfig(name=name) for name in names], **fields,
    )  # fmt: skip


@pytest.fixture
def hostile(toy: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    """Problems of the toy family by number (mod 8) that misbehave, and how; the fixture's value is filled by tests."""
    ways: dict[int, str] = {}
    go = threading.Event()

    def misbehave(way: str) -> Any:
        if way == "hang":
            go.wait(60)
        if way == "exit":
            raise SystemExit(1)
        if way == "signal":
            raise ValueError("40 is not a valid Signals")
        return "no result"

    class Problem:
        def __init__(self, inner: Any) -> None:
            self.inner, self.way = inner, ways.get(inner.index % 8, "")
            self.id, self.key, self.domain = f"hostile/{inner.index}", inner.key, "toy"

        def env(self) -> Any:
            if self.way == "make":
                raise MemoryError("no room")
            env = self.inner.env()
            real_start, real_step = env.start, env.step

            def start() -> Any:
                return misbehave("exit") if self.way == "start" else real_start()

            def step(message: Message | None) -> StepResult:
                return misbehave(self.way) if self.way else real_step(message)  # type: ignore[no-any-return]

            env.start, env.step = start, step
            return env

    class Hostile(families.FAMILIES["toy"]):  # type: ignore[misc]
        def problem(self, split: str, index: int) -> Any:
            return Problem(super().problem(split, index))

    monkeypatch.setitem(families.FAMILIES, "hostile", Hostile)
    yield ways
    go.set()


def run(model: Any, tokenizer: Any, stage: ReasoningStage, io: Any) -> LogicalDriver:
    loop = LogicalDriver(model, tokenizer, stage, ReasoningRL(stage), io, 0)
    loop.run()
    return loop


def rows_of(io: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in read_metrics(io.metrics.path)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "stop"), [("exit", None), ("signal", 1), ("signal", 3), ("lie", None), ("make", 3), ("start", None)]
)
def test_training_goes_on_without_them_also_after_a_resume(
    hostile: dict[int, str], talker: Any, tokenizer: Any, stage_io: Any, way: str, stop: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    hostile |= {1: way, 6: way}
    stage = stage_of(["hostile"], env_error_window=16)
    model, io = talker(), stage_io("whole")
    loop = run(model, tokenizer, stage, io)
    rows = rows_of(io)
    assert len(rows) == 4 and rows[-1]["env_errors"] == rows[-1][f"env_errors/{'rollout' if way == 'lie' else 'crash'}"]
    assert rows[-1]["env_errors"] == 4 * rows[-1]["dropped_env"] > 0 and rows[-1]["dropped_groups"] > 0
    assert "/1: the environment failed (" in caplog.text and "Traceback" in caplog.text
    if stop is None:
        return
    with pytest.raises(KeyboardInterrupt):
        run(talker(), tokenizer, stage, stage_io("broken", stop_after=stop))
    again, resumed = stage_io("broken"), talker()
    rest = run(resumed, tokenizer, stage, again)
    assert rows_of(again) == rows and rest.env_errors.state == loop.env_errors.state
    assert all(tensor.equal(resumed.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_request_that_the_engine_cannot_compute_costs_its_episode(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, bad = Runner.trunk, 0

    def trunk(self: Runner, feeds: Any) -> Any:
        nonlocal bad
        if any(feed.request.number == 3 for feed in feeds):
            bad += 1
            raise ZeroDivisionError("poison")
        return inner(self, feeds)

    monkeypatch.setattr(Runner, "trunk", trunk)
    io = stage_io()
    run(talker(), tokenizer, stage_of(["toy"]), io)
    rows = rows_of(io)
    assert len(rows) == 4 and bad and rows[-1]["env_errors"] == rows[-1]["env_errors/abort"] == 1


def test_an_environment_that_hangs_is_given_up(
    hostile: dict[int, str], talker: Any, tokenizer: Any, stage_io: Any
) -> None:
    hostile[2] = "hang"
    io = stage_io()
    run(talker(), tokenizer, stage_of(["hostile"], env_seconds=0.2), io)
    rows = rows_of(io)
    assert len(rows) == 4 and rows[-1]["env_errors/timeout"] == rows[-1]["env_errors"] == 4


def test_too_many_failures_end_the_stage_with_one_sentence(
    hostile: dict[int, str], talker: Any, tokenizer: Any, stage_io: Any
) -> None:
    """One family fails in half of its problems, which is more than a quarter; its neighbour works."""
    hostile |= dict.fromkeys((1, 2, 5, 6), "signal")
    stage = stage_of(["toy", "hostile"], env_error_share=0.25, env_error_window=16)
    for _ in range(2):  # a resumed stage has the same end
        with pytest.raises(RolloutError) as caught:
            run(talker(), tokenizer, stage, stage_io())
        assert str(caught.value).startswith("rl: the environment of hostile failed in ") and "\n" not in str(
            caught.value
        )
        assert "of its last 16 episodes, more than env_error_share = 0.25 allows" in str(caught.value)
        assert "ValueError: 40 is not a valid Signals" in str(caught.value)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8), st.sampled_from([0.0, 0.3, 0.5, 0.9]), st.data())
def test_the_window_against_a_plain_count(failed: list[bool], window: int, share: float, data: st.DataObject) -> None:
    errors, cut = EnvErrors("s", share, window), data.draw(st.integers(0, 60))
    for i, lost in enumerate(failed):
        if i == cut:  # a resume changes nothing
            state, errors = errors.state, EnvErrors("s", share, window)
            errors.restore(state)
        kind = Outcome.ENV_ERROR if lost else Outcome.FAILED
        trajectory = Trajectory("p", "toy", 0, [], 0.0, kind, {"cause": "crash"} if lost else {})
        last = failed[max(0, i + 1 - window) : i + 1]
        if len(last) == window and sum(last) > share * window:
            with pytest.raises(RolloutError, match="s: the environment of f failed in"):
                errors.add("f", trajectory)
            return
        errors.add("f", trajectory)
        errors.add("other", Trajectory("p", "toy", 0, [], 0.0, Outcome.FAILED))
    assert errors.numbers["env_errors"] == sum(failed) == errors.numbers.get("env_errors/crash", 0)
