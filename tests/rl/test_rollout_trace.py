"""One rollout token by token: numbers by hand, the right row, and a run that does not notice being watched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.config.optim import OptimConfig
from glm5.config.recipe import AgenticStage, DistillStage, FamilyConfig, ReasoningStage
from glm5.obs.metrics import read_metrics
from glm5.parallel.ranks import Ranks
from glm5.records import Outcome, TrainSample, Trajectory, Turn
from glm5.rl.algos.agentic import AgenticRL
from glm5.rl.algos.distill import Distillation, ModelTeacher
from glm5.rl.algos.reasoning import ReasoningRL
from glm5.rl.drivers import common
from glm5.rl.drivers.logical import LogicalDriver
from glm5.rl.drivers.timing import TIMES
from glm5.rl.learner import Learner, PolicyBatch
from glm5.rl.losses import DoubleSided, IcePop, policy_loss
from glm5.rl.losses.tokens import Tokens
from glm5.rl.rollout_trace import RolloutTrace

LIMITS: dict[str, Any] = dict(max_tokens=8, max_context=80, row_length=80, max_turns=4, prompts=3, group=4)
TOY = FamilyConfig(name="toy")


def stage_of(kind: str, steps: int, **changes: Any) -> Any:
    optim = OptimConfig(steps=steps, lr=5e-3, schedule="constant", save_every=2)
    fields: dict[str, Any] = LIMITS | dict(name="rl", optim=optim, families=[TOY]) | changes
    if kind == "agentic":
        fields |= dict(concurrency=10, train_ticks=6, max_staleness=2)
    make = {"reasoning": ReasoningStage, "agentic": AgenticStage, "distill": DistillStage}[kind]
    return make(kind=kind, **fields)


def sample(ids: list[int], mask: str, advantage: float, group: int = 0) -> TrainSample:
    loss = [c == "1" for c in mask]
    numbers = [float(m) for m in loss]
    return TrainSample(
        ids, loss, [-0.5 * m for m in numbers], [advantage * m for m in numbers], [3 if m else -1 for m in loss], group
    )


def batch_of(samples: list[TrainSample], logprobs: list[list[float]], rollout: list[list[float]]) -> PolicyBatch:
    """Lines as `Learner.forward` makes them, with nan where the mask is not."""
    width = max(map(len, logprobs))
    lines = [[*line, *[math.nan] * (width - len(line))] for line in logprobs]
    sampled = [[*line, *[math.nan] * (width - len(line))] for line in rollout]
    mask = torch.tensor([[i < len(line) for i in range(width)] for line in logprobs])
    advantages = [[max(s.advantages, key=abs)] * width for s in samples]
    return PolicyBatch(
        logprobs=torch.tensor(lines, requires_grad=True),
        rollout_logprobs=torch.tensor(sampled),
        advantages=torch.tensor(advantages),
        mask=mask,
        versions=torch.zeros_like(mask, dtype=torch.long),
        samples=samples,
    )


class Fixed:
    """A learner that knows what it will say after the step."""

    version = 7
    ranks = Ranks()

    def __init__(self, after: list[float]) -> None:
        self.after, self.asked = after, [0]

    def forward(self, samples: list[TrainSample]) -> PolicyBatch:
        assert not torch.is_grad_enabled()
        (self.asked,) = [s.ids for s in samples]
        return batch_of(samples, [self.after], [[-0.5] * len(self.after)])


def watched(objective: Any, batches: list[PolicyBatch]) -> RolloutTrace:
    trace = RolloutTrace(type(objective).__name__)
    for batch in batches:
        policy_loss(objective, batch, "token", observe=trace)
    return trace


def test_the_numbers_are_those_of_the_equations(tokenizer: Any, tmp_path: Path) -> None:
    """rho 1, 3 and 0.4 under bounds (0.5, 2); after the step the ratios are 2, 1 and 1/4."""
    rows = [sample(tokenizer.encode("ab=12"), "00111", 0.25)]
    rollout = [-0.5, -2.0, -1.0]
    before = [-0.5, -2.0 + math.log(3), -1.0 + math.log(0.4)]
    seen = watched(DoubleSided(), [batch_of(rows, [before], [rollout])])
    after = [-0.5 + math.log(2), -0.5, -0.5 + math.log(0.25)]
    turn = Turn(tuple(rows[0].ids[:2]), tuple(rows[0].ids[2:]), (-0.5, -2.0, -1.0), (3, 3, 3), "stop")
    other = Turn((1, 2), (3,), (-0.5,), (3,), "stop")
    groups = [[Trajectory("toy/9", "toy", 0, [other], 1.0, Outcome.SOLVED)],
              [Trajectory("toy/1", "toy", 0, [other, turn], -0.5, Outcome.TRUNCATED)]]  # fmt: skip
    learner: Any = Fixed(after)
    assert seen.write(tmp_path, learner, groups, tokenizer)
    found = json.loads((tmp_path / "rollout.json").read_text())
    tokens = found.pop("tokens")
    assert found == {
        "step": 7, "loss": "DoubleSided", "problem": "toy/1", "domain": "toy", "outcome": "truncated", "reward": -0.5,
        "teacher": "",
    }  # fmt: skip
    assert [t["text"] for t in tokens] == ["a", "b", "=", "1", "2"]
    assert tokens[:2] == [{"text": "a", "loss": False}, {"text": "b", "loss": False}]
    assert [t["rho"] for t in tokens[2:]] == pytest.approx([1.0, 3.0, 0.4], rel=1e-6)
    assert [t["ratio"] for t in tokens[2:]] == pytest.approx([2.0, 1.0, 0.25], rel=1e-6)
    assert [(t["masked"], t["clipped"], t["advantage"], t["version"]) for t in tokens[2:]] == [
        (False, False, 0.25, 3), (True, False, 0.25, 3), (True, False, 0.25, 3),
    ]  # fmt: skip


def test_the_row_with_an_advantage_and_the_farthest_ratio_is_taken(tokenizer: Any, tmp_path: Path) -> None:
    rows = [sample([65 + i, 66], "01", a) for i, a in enumerate([0.0, 1.0, -2.0, 0.5])]
    far = [[-9.0], [-0.5], [-1.5], [-1.4]]
    batches = [batch_of(rows[:2], far[:2], [[-0.5]] * 2), batch_of(rows[2:], far[2:], [[-0.5]] * 2)]
    learner: Any = Fixed([-0.5])
    assert watched(IcePop(), batches).write(tmp_path, learner, [], tokenizer)
    assert learner.asked == [67, 66]  # the first has no advantage, whatever its ratio
    assert watched(IcePop(), batches[::-1]).write(tmp_path, learner, [], tokenizer)
    assert learner.asked == [67, 66]
    level = [batch_of(rows[:2], [[-0.5]] * 2, [[-0.5]] * 2), batch_of(rows[2:], [[-0.5]] * 2, [[-0.5]] * 2)]
    assert watched(IcePop(), level).write(tmp_path, learner, [], tokenizer)
    assert learner.asked == [67, 66]  # all ratios are 1: the largest advantage
    found = json.loads((tmp_path / "rollout.json").read_text())
    assert "problem" not in found and found["tokens"][1]["rho"] == found["tokens"][1]["ratio"] == 1.0


def test_nothing_is_written_where_nothing_is_learnt(tokenizer: Any, tmp_path: Path) -> None:
    learner: Any = Fixed([-0.5])
    seen = watched(IcePop(), [batch_of([sample([65, 66], "01", 0.0)], [[-3.0]], [[-0.5]])])
    assert not seen.write(tmp_path, learner, [], tokenizer) and list(tmp_path.iterdir()) == []
    plain = RolloutTrace("IcePop")
    ones = torch.ones(1, 2)
    policy_loss(IcePop(), Tokens(logprobs=ones, rollout_logprobs=ones, advantages=ones, mask=ones.bool()), "token",
                observe=plain)  # fmt: skip
    assert not plain.write(tmp_path, learner, [], tokenizer)


def test_an_impossible_token_and_broken_text_are_still_json(tokenizer: Any, tmp_path: Path) -> None:
    ids = [*tokenizer.encode("ü\x00")[1:], tokenizer.special["<|user|>"]]
    seen = watched(IcePop(), [batch_of([sample(ids, "011", 1.0)], [[-math.inf, -0.5]], [[-0.5, -0.5]])])
    learner: Any = Fixed([-math.inf, 300.0])
    assert seen.write(tmp_path, learner, [], tokenizer)
    tokens = json.loads((tmp_path / "rollout.json").read_text(), parse_constant=pytest.fail)["tokens"]
    assert [t["text"] for t in tokens] == ["\\xbc", "\x00", "<|user|>"]
    assert tokens[1]["masked"] and 0 < tokens[1]["rho"] < 1e-20 and 1e20 < tokens[2]["ratio"] < 1e30


def run(model: Any, tokenizer: Any, stage: Any, io: Any) -> LogicalDriver:
    algorithm: Any = AgenticRL(stage) if stage.kind == "agentic" else ReasoningRL(stage)
    loop = LogicalDriver(model, tokenizer, stage, algorithm, io, 0)
    loop.run()
    return loop


def ids_of(tokens: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """Back from texts, which are all different among tokens of one byte."""
    known = {tokenizer.decode_bytes([i]).decode("utf-8", "backslashreplace"): i for i in range(tokenizer.vocab_size)}
    return [known[token["text"]] for token in tokens]


@pytest.mark.parametrize("kind", ["reasoning", "agentic"])
def test_a_watched_run_has_the_numbers_of_an_unwatched_one(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stage, first, second = stage_of(kind, 3), talker(), talker()
    one, two = stage_io("one"), stage_io("two")
    loop = run(first, tokenizer, stage, one)
    monkeypatch.setattr(common, "is_due", lambda *args: False)
    other = run(second, tokenizer, stage, two)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert loop.learner.agreement == other.learner.agreement
    rows = [
        [{k: v for k, v in row.items() if k not in ("time", *TIMES)} for row in read_metrics(io.metrics.path)]
        for io in (one, two)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert not (two.folder / "rollout.json").exists()
    found = json.loads((one.folder / "rollout.json").read_text())
    assert found["step"] == 3 and found["problem"].startswith("toy/")
    assert found["outcome"] in ("solved", "failed", "truncated")
    trained = [t for t in found["tokens"] if t["loss"]]
    assert {t["advantage"] for t in trained} != {0.0}
    assert any(t["ratio"] != 1.0 for t in trained)  # the step moved it
    if kind == "reasoning":
        assert all(t["rho"] == 1.0 and not t["masked"] and t["version"] == 2 for t in trained)
    else:
        assert any(t["rho"] != 1.0 for t in trained)


def test_a_resumed_run_writes_the_same_rollout(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    stage = stage_of("reasoning", 5)
    whole = stage_io("whole")
    run(talker(), tokenizer, stage, whole)
    for stop in (3, 5):
        name = f"stopped{stop}"
        with pytest.raises(KeyboardInterrupt):
            run(talker(), tokenizer, stage, stage_io(name, stop_after=stop))
        again = stage_io(name)
        run(talker(), tokenizer, stage, again)
        assert (again.folder / "rollout.json").read_bytes() == (whole.folder / "rollout.json").read_bytes()


def test_ratios_are_those_of_the_weights_before_and_after(
    toy: str, talker: Any, tokenizer: Any, stage_io: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored once more by models of their own, from what the file itself says."""
    model, io, before = talker(), stage_io("run"), talker()
    rows: list[TrainSample] = []
    real = Learner.step

    def step(self: Learner, samples: Any, loss_of: Any, rate: float) -> Any:
        before.load_state_dict(self.model.state_dict())
        rows[:] = samples
        return real(self, samples, loss_of, rate)

    monkeypatch.setattr(Learner, "step", step)
    run(model, tokenizer, stage_of("reasoning", 2), io)
    found = json.loads((io.folder / "rollout.json").read_text())["tokens"]
    (row, *_) = [r for r in rows if r.ids == ids_of(found, tokenizer)]
    for weights, key in ((before, "rho"), (model, "ratio")):
        logits = weights(torch.tensor([row.ids])).logits[0].detach().log_softmax(-1)
        expected = [
            math.exp(float(logits[i - 1, row.ids[i]]) - row.rollout_logprobs[i])
            for i in range(len(row.ids))
            if row.loss_mask[i]
        ]
        assert [t[key] for t in found if t["loss"]] == pytest.approx(expected, rel=1e-4), key


def test_distillation_shows_the_teachers_advantage(toy: str, talker: Any, tokenizer: Any, stage_io: Any) -> None:
    teacher, student, io = talker(seed=1), talker(), stage_io("run")
    stage = stage_of("distill", 1, group=1, teachers={"toy": "start"})
    LogicalDriver(student, tokenizer, stage, Distillation(stage, {"start": ModelTeacher(teacher, 80)}), io, 0).run()
    found = json.loads((io.folder / "rollout.json").read_text())
    trained = [t for t in found["tokens"] if t["loss"]]
    ids = ids_of(found["tokens"], tokenizer)
    assert found["teacher"] == "start"
    fresh = talker()
    logs = [m(torch.tensor([ids])).logits[0].detach().log_softmax(-1) for m in (teacher, fresh)]
    places = [i for i, t in enumerate(found["tokens"]) if t["loss"]]
    expected = [float(logs[0][i - 1, ids[i]] - logs[1][i - 1, ids[i]]) for i in places]
    assert [t["advantage"] for t in trained] == pytest.approx(expected, abs=1e-4)
