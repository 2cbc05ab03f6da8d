"""Episodes: token-in/token-out, every way to end, and the merge of turns into train rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5.chat import RULES, Tokenizer, render_chat
from glm5.errors import ConfigError, GradingError, RolloutError
from glm5.records import (
    Completion,
    Message,
    Outcome,
    SamplingParams,
    StepResult,
    Trajectory,
    Turn,
)
from glm5.tasks import Episode, Problem, count_forks, make_family, open_episodes, play, to_samples
from tests.tasks.own_problems import names_of_families, needs_sandbox

TOKENIZER = Tokenizer.byte_level()
SPECIAL = TOKENIZER.special
FAMILY_NAMES = names_of_families("slides")  # which need a browser
LENGTHS = {"ruler": {"length": 1500}, "mrcr": {"length": 1500}}
CONTEXT = 1 << 13
THINKERS = ("arithmetic", "bugfix", "code", "math", "python_tool", "science")


def sampled(ids: Sequence[int], reason: str = "stop", version: int = 3) -> Completion:
    return Completion(list(ids), [-0.5] * len(ids), [version] * len(ids), reason)


class GoldCompleter:
    """Continues a prompt as the demonstrations do, whose ids come from the template in one go."""

    def __init__(self, problems: Sequence[Problem], version: str) -> None:
        self.rows = [gold_ids(problem, version) for problem in problems]
        self.calls = 0

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        self.calls += 1
        completions = []
        for prompt in prompts:
            ids, mask = next(row for row in self.rows if row[0][: len(prompt)] == list(prompt))
            end = len(prompt)
            while end < len(ids) and mask[end]:
                end += 1
            completions.append(sampled(ids[len(prompt) : end]))
        return completions


def gold_ids(problem: Problem, version: str) -> tuple[list[int], list[bool]]:
    opening = len(problem.env().start()[0])
    messages = [replace(m, train=i >= opening) for i, m in enumerate(problem.demonstration(7))]
    rendered = render_chat(
        messages, problem.tools, tokenizer=TOKENIZER, version=version, enable_thinking=problem.thinking,
        clear_thinking=False, add_generation_prompt=False, close_last=True,
    )  # fmt: skip
    return rendered.ids, rendered.loss_mask


class FixedCompleter:
    """Says the same to everyone."""

    def __init__(self, ids: Sequence[int], reason: str = "stop") -> None:
        self.ids, self.reason = ids, reason
        self.params: list[SamplingParams] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Completion]:
        self.params.extend(params)
        return [sampled(self.ids, self.reason) for _ in prompts]


class ScriptedEnv:
    """Answers every message with the next result, or raises it."""

    problem, domain = "scripted", "test"

    def __init__(self, *results: StepResult | Exception, tools: Sequence[Any] = (), thinking: bool = False) -> None:
        self.results = list(results)
        self.heard: list[Message | None] = []
        self.opening = ((Message("user", "hi"),), tools, thinking)

    def start(self) -> Any:
        return self.opening

    def step(self, message: Message | None) -> StepResult:
        self.heard.append(message)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, allow_special=True)


CALL = ids_of("<tool_call>go</tool_call><|observation|>")
ANSWER = ids_of("hello<|user|>")
MORE = StepResult(messages=(Message("tool", "seen"),))
WON = StepResult(done=True, reward=1.0, outcome=Outcome.SOLVED)


@pytest.mark.parametrize("version", ["5.0", "5.2"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_gold_policy_earns_one_and_its_ids_are_the_templates(name: str, version: str) -> None:
    options = {"thinking": None} if name in THINKERS else LENGTHS.get(name, {})
    drawn = [make_family(name, 2, **options).problem("train", index) for index in range(10)]
    problems = [*{problem.prompt: problem for problem in drawn}.values()]  # the completer knows a problem by its prompt
    completer = GoldCompleter(problems, version)
    episodes = [
        Episode(p.env(), TOKENIZER, version=version, group=i, max_context=CONTEXT) for i, p in enumerate(problems)
    ]
    for i, trajectory in enumerate(play(episodes, completer)):
        assert (trajectory.reward, trajectory.outcome) == (1.0, Outcome.SOLVED), trajectory.detail
        assert (trajectory.group, trajectory.problem, trajectory.domain) == (i, problems[i].id, problems[i].domain)
        (row,) = to_samples(trajectory, advantage=0.25)
        ids, mask = gold_ids(problems[i], version)
        assert row.ids == ids and row.loss_mask == mask
        assert row.advantages == [0.25 * flag for flag in mask] and row.rollout_logprobs == [-0.5 * m for m in mask]
        assert row.weight_versions == [3 if flag else -1 for flag in mask]
        assert count_forks(trajectory) == 0
    assert completer.calls == max(len(episode.turns) for episode in episodes)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_wrong_policy_earns_nothing(name: str) -> None:
    options = {"thinking": False} if name in THINKERS else LENGTHS.get(name, {})
    family = make_family(name, 2, **options)
    episodes = [Episode(family.problem("train", i).env(), TOKENIZER, max_context=CONTEXT) for i in range(4)]
    for trajectory in play(episodes, FixedCompleter(ids_of("nonsense<|user|>"))):
        assert (trajectory.reward, trajectory.outcome, len(trajectory.turns)) == (0.0, Outcome.FAILED, 1)


def test_sampled_ids_are_kept_even_where_the_text_has_another_tokenisation() -> None:
    merged = Tokenizer.train(["hello hello hello hello <tool_call>"] * 9, 300)
    odd = [merged.encode(letter)[0] for letter in "hello"]
    assert odd != merged.encode("hello")
    call = [*odd, *merged.encode("<tool_call>go</tool_call><|observation|>", allow_special=True)]
    env = ScriptedEnv(MORE, WON)
    episode = Episode(env, merged)
    prompt = episode.pending()
    episode.accept(sampled(call))
    assert prompt is not None and (episode.pending() or [])[: len(prompt) + len(call)] == [*prompt, *call]
    episode.accept(sampled(merged.encode("x<|user|>", allow_special=True)))
    assert env.heard[0] is not None and env.heard[0].content == "hello"
    assert len(to_samples(episode.trajectory())) == 1


def test_user_turns_continue_too() -> None:
    env = ScriptedEnv(StepResult(messages=(Message("user", "and?"),)), WON)
    episode = Episode(env, TOKENIZER)
    episode.accept(sampled(ANSWER))
    assert TOKENIZER.decode(episode.pending() or []).endswith("<|user|>and?<|assistant|><think></think>")
    episode.accept(sampled(ANSWER))
    assert episode.trajectory().reward == 1.0 and episode.pending() is None


def test_cut_output_is_truncated() -> None:
    env = ScriptedEnv(StepResult(done=True, reward=0.0, outcome=Outcome.MALFORMED))
    (trajectory,) = play([Episode(env, TOKENIZER)], FixedCompleter(ids_of("hel"), "length"))
    assert env.heard == [None] and (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED, 0.0)
    (trajectory,) = play([Episode(ScriptedEnv(MORE), TOKENIZER)], FixedCompleter([], "length"))
    assert trajectory.outcome is Outcome.TRUNCATED and trajectory.turns[0].output_ids == ()


def test_cut_output_keeps_what_the_environment_pays() -> None:
    (trajectory,) = play([Episode(ScriptedEnv(WON), TOKENIZER)], FixedCompleter(ids_of("hel"), "length"))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SOLVED, 1.0)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>go</tool_call><|user|>", "<tool_call>go<|user|>", "<tool_call>go</tool_call><|endoftext|>",
     "hello<|observation|>", "<tool_call>go</tool_call>", "<tool_call></tool_call><|observation|>"],
)  # fmt: skip
def test_unreadable_output_reaches_the_environment_as_none(text: str) -> None:
    env = ScriptedEnv(replace(MORE, done=True, outcome=Outcome.MALFORMED))
    (trajectory,) = play([Episode(env, TOKENIZER)], FixedCompleter(ids_of(text)))
    assert env.heard == [None] and trajectory.outcome is Outcome.MALFORMED


def test_unclosed_thinking_is_malformed() -> None:
    env = ScriptedEnv(StepResult(done=True, outcome=Outcome.MALFORMED), thinking=True)
    (trajectory,) = play([Episode(env, TOKENIZER)], FixedCompleter(ANSWER))
    assert env.heard == [None] and trajectory.outcome is Outcome.MALFORMED


def test_malformed_call_may_be_answered_or_not() -> None:
    answered = Episode(ScriptedEnv(MORE, WON), TOKENIZER)
    answered.accept(sampled(ids_of("<tool_call><|observation|>")))
    assert TOKENIZER.decode(answered.pending() or []).endswith(
        "<|observation|><tool_response>seen</tool_response><|assistant|><think></think>"
    )
    mute = Episode(ScriptedEnv(MORE), TOKENIZER)  # no place for an observation behind <|user|>
    mute.accept(sampled(ids_of("<tool_call>go<|user|>")))
    assert (mute.trajectory().outcome, mute.trajectory().reward) == (Outcome.MALFORMED, 0.0)


@needs_sandbox
def test_two_malformed_calls_end_bugfix() -> None:
    episode = Episode(make_family("bugfix", thinking=False).problem("train", 0).env(), TOKENIZER)
    (trajectory,) = play([episode], FixedCompleter(ids_of("<tool_call>rm</tool_call><|observation|>")))
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.MALFORMED, 2)
    assert "error: no such tool" in trajectory.detail["text"]


@pytest.mark.parametrize("error", [GradingError("sandbox is gone"), RolloutError("service is gone")])
def test_environment_errors_are_recorded_and_contained(error: Exception) -> None:
    episodes = [Episode(ScriptedEnv(error), TOKENIZER), Episode(ScriptedEnv(WON), TOKENIZER)]
    broken, fine = play(episodes, FixedCompleter(ANSWER))
    assert (broken.outcome, broken.reward, fine.outcome) == (Outcome.ENV_ERROR, 0.0, Outcome.SOLVED)
    assert broken.detail["error"] == str(error)


def test_environment_that_cannot_start() -> None:
    class Broken(ScriptedEnv):
        def start(self) -> Any:
            raise GradingError("no room")

    (trajectory,) = play([Episode(Broken(), TOKENIZER)], FixedCompleter(ANSWER))
    assert (trajectory.outcome, trajectory.turns, to_samples(trajectory)) == (Outcome.ENV_ERROR, [], [])


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [(ZeroDivisionError(), "crash"), (SystemExit(3), "crash"), (GeneratorExit(), "crash"), (Mute(), "crash"),
     (StopIteration(), "crash"), (GradingError("out of order"), "grading"), (RolloutError("gone"), "rollout"),
     ("no result", "rollout"), (replace(WON, reward=float("nan")), "rollout"), (replace(WON, reward="1"), "rollout"),
     (replace(WON, reward=1e160), "rollout"), (replace(WON, reward=float("-inf")), "rollout"),
     (replace(WON, outcome="lovely"), "crash"), (replace(WON, detail=7), "crash"),
     (StepResult(messages=("text",)), "crash"), (replace(WON, outcome=Outcome.ENV_ERROR), None)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_whatever_an_environment_does_ends_its_episode_only(
    wrong: Any, cause: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile(ScriptedEnv):
        def step(self, message: Message | None) -> StepResult:
            if isinstance(wrong, BaseException):
                raise wrong
            return wrong  # type: ignore[no-any-return]

    broken, fine = play([Episode(Hostile(), TOKENIZER), Episode(ScriptedEnv(WON), TOKENIZER)], FixedCompleter(ANSWER))
    assert (broken.outcome, broken.reward, broken.detail.get("cause")) == (Outcome.ENV_ERROR, 0.0, cause)
    assert fine.outcome is Outcome.SOLVED
    assert cause is None or (broken.detail["error"] and "Traceback" in caplog.text and "scripted" in caplog.text)


def test_an_environment_that_hangs_is_given_up() -> None:
    """More of them than there are threads, so that those that wait for a thread get theirs."""
    go = threading.Event()

    class Hanging(ScriptedEnv):
        def step(self, message: Message | None) -> StepResult:
            go.wait(30)
            return WON

    episodes = [Episode(Hanging(), TOKENIZER) for _ in range(18)] + [Episode(ScriptedEnv(WON), TOKENIZER)]
    try:
        *hung, fine = play(episodes, FixedCompleter(ANSWER), env_seconds=0.1)
    finally:
        go.set()
    assert {(t.outcome, t.reward, t.detail["cause"]) for t in hung} == {(Outcome.ENV_ERROR, 0.0, "timeout")}
    assert fine.outcome is Outcome.SOLVED and "within 0.1 seconds" in hung[0].detail["error"]


@pytest.mark.parametrize("where", ["env", "start", "hang"])
def test_an_environment_that_cannot_be_made(where: str) -> None:
    go = threading.Event()

    class Hostile(ScriptedEnv):
        key = id = "hostile"

        def env(self) -> Any:
            if where == "env":
                raise SystemExit
            return self

        def start(self) -> Any:
            if where == "hang":
                go.wait(30)
            raise SystemExit

    try:
        episodes = open_episodes([(4, Hostile())], TOKENIZER, 0.1, max_turns=2)  # type: ignore[list-item]
    finally:
        go.set()
    (trajectory,) = play(episodes, FixedCompleter(ANSWER))
    assert (trajectory.outcome, trajectory.group, trajectory.turns) == (Outcome.ENV_ERROR, 4, [])
    assert trajectory.detail["cause"] == ("timeout" if where == "hang" else "crash")


def test_ctrl_c_is_no_environment_error() -> None:
    class Interrupted(ScriptedEnv):
        def step(self, message: Message | None) -> StepResult:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play([Episode(Interrupted(), TOKENIZER)], FixedCompleter(ANSWER))


def test_aborted_generation_is_not_the_policys_fault() -> None:
    for reason in ("abort", "error"):
        (trajectory,) = play([Episode(ScriptedEnv(), TOKENIZER)], FixedCompleter(ids_of("h"), reason))
        assert trajectory.outcome is Outcome.ENV_ERROR and trajectory.detail["cause"] == "abort"


def test_reaction_that_fits_nowhere_is_an_environment_error() -> None:
    (trajectory,) = play([Episode(ScriptedEnv(MORE), TOKENIZER)], FixedCompleter(ANSWER))
    assert trajectory.outcome is Outcome.ENV_ERROR and "cannot follow" in trajectory.detail["error"]


def test_turn_and_context_limits() -> None:
    (trajectory,) = play([Episode(ScriptedEnv(*[MORE] * 9), TOKENIZER, max_turns=3)], FixedCompleter(CALL))
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.TRUNCATED, 3)
    completer = FixedCompleter(CALL)
    (trajectory,) = play([Episode(ScriptedEnv(*[MORE] * 99), TOKENIZER, max_context=150)], completer)
    assert trajectory.outcome is Outcome.TRUNCATED and trajectory.detail["cut"] == "context"
    lengths = [len(turn.context_ids) for turn in trajectory.turns]
    assert all(length < 150 for length in lengths) and len(lengths) > 1
    assert [params.max_tokens for params in completer.params] == [min(128, 150 - length) for length in lengths]
    (trajectory,) = play([Episode(ScriptedEnv(), TOKENIZER, max_context=5)], completer)
    assert (trajectory.outcome, trajectory.turns) == (Outcome.TRUNCATED, [])


def test_params_of_the_batch() -> None:
    completer = FixedCompleter(ANSWER)
    play([Episode(ScriptedEnv(WON), TOKENIZER) for _ in range(2)], completer, SamplingParams(seed=1, max_tokens=9))
    first, second = completer.params
    assert first.seed != second.seed and None not in (first.seed, second.seed) and first.max_tokens == 9
    assert set(TOKENIZER.stop_token_ids) <= set(first.stop_token_ids)
    with pytest.raises(ConfigError, match="n=2"):
        play([], completer, SamplingParams(n=2))


def test_misuse_is_refused() -> None:
    episode = Episode(ScriptedEnv(WON), TOKENIZER)
    with pytest.raises(RolloutError, match="not over"):
        episode.trajectory()
    with pytest.raises(RolloutError, match="logprobs"):
        episode.accept(Completion([1], [], [0], "stop"))
    episode.accept(sampled(ANSWER))
    with pytest.raises(RolloutError, match="over"):
        episode.accept(sampled(ANSWER))
    with pytest.raises(ConfigError, match="max_turns"):
        Episode(ScriptedEnv(), TOKENIZER, max_turns=0)


@pytest.mark.parametrize("version", RULES)
def test_continuation_equals_one_rendering(version: str) -> None:
    """After any sampled turns, the prompt is what the template gives for the whole conversation at once."""
    env = ScriptedEnv(MORE, MORE, WON, thinking=True)
    episode = Episode(env, TOKENIZER, version=version)
    for thought in ("one", "two"):
        episode.accept(sampled(ids_of(f"{thought}</think><tool_call>go</tool_call><|observation|>")))
    messages = [*env.opening[0]]
    for heard in env.heard:
        assert heard is not None
        messages += [heard, Message("tool", "seen")]
    whole = render_chat(messages, tokenizer=TOKENIZER, version=version, clear_thinking=False)
    assert episode.pending() == whole.ids


@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_merge_keeps_every_sampled_token_once(data: st.DataObject) -> None:
    """Random histories in which a turn extends the last one or starts over."""
    ids = st.lists(st.integers(0, 3), max_size=5)
    turns: list[Turn] = []
    for _ in range(data.draw(st.integers(0, 5))):
        extends = bool(turns) and data.draw(st.booleans())
        before = [*turns[-1].context_ids, *turns[-1].output_ids] if extends else []
        context, output = before + data.draw(ids), data.draw(ids)
        logprobs = tuple(-1.0 - i - 10 * len(turns) for i in range(len(output)))
        turns.append(Turn(tuple(context), tuple(output), logprobs, (len(turns),) * len(output), "stop"))
    trajectory = Trajectory("p", "d", 4, turns, 1.0, Outcome.SOLVED)
    rows = to_samples(trajectory, advantage=2.0)
    for row in rows:
        size = len(row.ids)
        assert [len(row.loss_mask), len(row.rollout_logprobs), len(row.advantages), len(row.weight_versions)] == [
            size
        ] * 4
        for flag, logprob, advantage, version in zip(
            row.loss_mask, row.rollout_logprobs, row.advantages, row.weight_versions, strict=True
        ):
            assert (
                (advantage == 2.0 and logprob < 0 and version >= 0)
                if flag
                else (advantage, logprob, version) == (0, 0, -1)
            )
    flat = [
        (token, logprob)
        for row in rows
        for token, logprob, flag in zip(row.ids, row.rollout_logprobs, row.loss_mask, strict=True)
        if flag
    ]
    assert flat == [pair for turn in turns for pair in zip(turn.output_ids, turn.logprobs, strict=True)]
    forks = sum(
        list(b.context_ids[: len(a.context_ids) + len(a.output_ids)]) != [*a.context_ids, *a.output_ids]
        for a, b in pairwise(turns)
    )
    assert len(rows) == (forks + 1 if turns else 0) and count_forks(trajectory) == forks


def test_forked_history_makes_two_rows() -> None:
    turns = [
        Turn((1, 2), (3, 4), (-0.1, -0.2), (0, 0), "stop"),
        Turn((1, 2, 3, 4, 5), (6,), (-0.3,), (1,), "stop"),
        Turn((1, 2, 9, 5), (7,), (-0.4,), (1,), "stop"),
    ]
    first, second = to_samples(Trajectory("p", "d", 0, turns, 0.0, Outcome.FAILED))
    assert (first.ids, second.ids) == ([1, 2, 3, 4, 5, 6], [1, 2, 9, 5, 7])
    assert first.loss_mask == [False, False, True, True, False, True] and first.weight_versions[-1] == 1
