"""Plays environments token-in/token-out (TITO) and turns trajectories into train samples (§4.1).

Sampled ids are kept as they are: the next prompt is the last prompt + the sampled ids + the rendered reaction of the
environment. Only the environment sees text parsed from the ids; text is never tokenised again. An episode is a state
machine (`pending`, `accept`, `trajectory`): one caller can drive thousands of episodes and pass completions in any
order. `play` is the simple lock-step driver.
"""

from __future__ import annotations

import dataclasses
import numbers
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from glm5.chat import Tokenizer, opens_thinking, parse_message, render_chat, render_tail
from glm5.errors import ConfigError, EnvironmentTimeout, GradingError, RequestFailed, RolloutError, text_of
from glm5.obs.logs import get_logger
from glm5.records import (
    Completer,
    Completion,
    Env,
    Message,
    Outcome,
    SamplingParams,
    StepResult,
    TrainSample,
    Trajectory,
    Turn,
)
from glm5.sandbox.cancel import current_cancel_token
from glm5.seeds import derive_seed
from glm5.tasks.contract import AgentProblem, Problem
from glm5.tasks.env_threads import LIMIT_S, EnvThreadPool

NOT_SAMPLED = -1  # weight version of tokens that no policy produced

MOST_ERROR_TEXT = 500
"""Characters of an environment's error kept in a trajectory; the log has the full text."""

_log = get_logger(__name__)


class Episode:
    """One run of one environment. It ends in one of these ways:

    - The environment ends it.
    - TRUNCATED: output cut off by a limit, or no context or turn left. Reward 0, unless the environment ends at this
      step with a reward.
    - MALFORMED: output that cannot be parsed and that the environment cannot answer.
    - ENV_ERROR, no reward: an aborted generation, an exception of the environment (except KeyboardInterrupt), an
      invalid answer of it, or none in time (`fail`). `detail["error"]` has the reason and `detail["cause"]` its kind
      ("timeout", "grading", "rollout", "abort", "crash"); the log has the trace.
    """

    def __init__(
        self,
        env: Env,
        tokenizer: Tokenizer,
        *,
        version: str | None = None,
        enable_thinking: bool | None = None,
        max_turns: int = 16,
        max_context: int = 4096,
        group: int = 0,
        render_tools: bool = True,
        teacher: str = "",
    ) -> None:
        """`version` None: the tokenizer's template. `enable_thinking` None: the environment decides. `max_context`
        limits prompt plus output, in tokens. `render_tools=False` omits the tool specifications from the prompt (for
        policies trained on these tools); calls are still parsed with them. `teacher` is the prompt's tag."""
        if max_turns < 1 or max_context < 2:
            raise ConfigError(f"episode: max_turns={max_turns} and max_context={max_context} leave nothing to play.")
        self.env, self.tokenizer = env, tokenizer
        self.problem, self.domain = env.problem, env.domain
        self.max_turns, self.max_context, self.group, self.teacher = max_turns, max_context, group, teacher
        self.version = tokenizer.template_version if version is None else version
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        """The conversation so far. An output that cannot be parsed is its text."""
        self._context: list[int] = []
        self._result: StepResult | None = None
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._thinking = bool(enable_thinking)
        with self._contained():
            messages, self._tools, wish = env.start()
            self._thinking = wish if enable_thinking is None else enable_thinking
            self.messages += messages
            opening = render_chat(
                messages,
                self._tools if render_tools else None,
                tokenizer=tokenizer,
                version=self.version,
                enable_thinking=self._thinking,
                clear_thinking=False,
            )
            self._extend(opening.ids)

    @property
    def room(self) -> int:
        """Maximum number of tokens of the next output."""
        return self.max_context - len(self._context)

    def pending(self) -> list[int] | None:
        """The ids to continue, or None after the end of the episode."""
        return None if self._result is not None else list(self._context)

    def accept(self, completion: Completion) -> None:
        """Record an output of the policy, let the environment react and prepare the next prompt.

        Raises RolloutError after the end of the episode, and for a completion with lists of different lengths.
        """
        if self._result is not None:
            raise RolloutError(f"{self.problem}: the episode is over and takes no further completion.")
        count = len(completion.token_ids)
        if len(completion.logprobs) != count or len(completion.weight_versions) != count:
            raise RolloutError(
                f"{self.problem}: a completion with {count} tokens, {len(completion.logprobs)} logprobs and "
                f"{len(completion.weight_versions)} weight versions; every token needs one of each."
            )
        output = tuple(completion.token_ids)
        versions = tuple(completion.weight_versions)
        context = tuple(self._context)
        self.turns.append(Turn(context, output, tuple(completion.logprobs), versions, completion.finish_reason))
        if completion.finish_reason in ("abort", "error"):
            self._env_error("abort", "the engine aborted or failed the generation")
            return
        cut = completion.finish_reason == "length"
        with self._contained():
            message = None if cut and not takes_cut(self.env) else self._read(output)
            self.messages.append(message or Message("assistant", self.tokenizer.decode(output)))
            result = checked(self.env.step(message))
            if result.done or cut:
                solved = result.done and result.outcome is Outcome.SOLVED
                self._finish(dataclasses.replace(result, outcome=Outcome.TRUNCATED) if cut and not solved else result)
            elif len(self.turns) >= self.max_turns:
                self._finish(dataclasses.replace(result, outcome=Outcome.TRUNCATED))
            elif message is None and output[-1:] != (self.tokenizer.special["<|observation|>"],):
                self._finish(dataclasses.replace(result, outcome=Outcome.MALFORMED))
            else:
                self._extend([*output, *self._reaction(output, result.messages)])
                self.messages += result.messages

    def fail(self, error: EnvironmentTimeout) -> None:
        """End the episode because its environment does not answer. A later answer is ignored."""
        self._env_error("timeout", str(error))
        _log.warning("%s: %s.", self.problem, error)

    def trajectory(self) -> Trajectory:
        """The trajectory of a finished episode. Raises RolloutError before its end."""
        if self._result is None:
            raise RolloutError(f"{self.problem}: the episode is not over; there is no trajectory yet.")
        last = (*self.turns[-1].context_ids, *self.turns[-1].output_ids) if self.turns else tuple(self._context)
        return Trajectory(
            problem=self.problem,
            domain=self.domain,
            group=self.group,
            turns=self.turns,
            reward=self._result.reward,
            outcome=self._result.outcome,
            detail={**self._result.detail, "text": self.tokenizer.decode(last)},
            teacher=self.teacher,
        )

    def _read(self, output: tuple[int, ...]) -> Message | None:
        """The sampled message. None if it breaks the grammar or ends with the wrong id: `<|observation|>` must end tool
        calls and must not end answers."""
        special = self.tokenizer.special
        stopped = output[-1:] and output[-1] in self.tokenizer.stop_token_ids
        text = self.tokenizer.decode(output[:-1] if stopped else output)
        thinking = opens_thinking(self.version, self._thinking)
        message, well_formed = parse_message(text, self._tools, thinking=thinking)
        observes = output[-1:] == (special["<|observation|>"],)
        return message if well_formed and observes == bool(message.tool_calls) else None

    def _reaction(self, output: tuple[int, ...], messages: Sequence[Message]) -> list[int]:
        """Ids of the environment's messages, up to the next generation prompt."""
        roles = [message.role for message in messages]
        last = self.tokenizer.decode(output[-1:])
        if (last == "<|observation|>" and set(roles) == {"tool"}) or (last == "<|user|>" and roles == ["user"]):
            return render_tail(
                messages,
                tokenizer=self.tokenizer,
                version=self.version,
                enable_thinking=self._thinking,
                after=output[-1],
            )
        raise RolloutError(f"{self.problem}: messages of roles {roles} cannot follow an output that ends in {last!r}.")

    def _extend(self, ids: Sequence[int]) -> None:
        self._context.extend(ids)
        if self.room < 1:
            self._finish(StepResult(done=True, outcome=Outcome.TRUNCATED, detail={"cut": "context"}))

    def _finish(self, result: StepResult) -> None:
        """Set the result, once. A step that was not the environment's last gives no reward."""
        if self._result is None:
            self._result = result if result.done else dataclasses.replace(result, done=True, reward=0.0)

    def _env_error(self, cause: str, reason: str) -> None:
        detail = {"error": reason[:MOST_ERROR_TEXT], "cause": cause}
        self._finish(StepResult(done=True, outcome=Outcome.ENV_ERROR, detail=detail))

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """End this episode on any exception of the environment."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            cause = CAUSES.get(type(error), "crash")
            said = "".join(traceback.format_exception_only(error)).strip() if cause == "crash" else text_of(error)
            self._env_error(cause, said)
            token = current_cancel_token()
            if token is None or not token.cancelled:  # cancellation is not a failure
                _log.warning("%s: the environment failed (%s).", self.problem, cause, exc_info=error)


CAUSES: Mapping[type[BaseException], str] = {
    EnvironmentTimeout: "timeout",
    GradingError: "grading",
    RolloutError: "rollout",
}


def takes_cut(env: Env) -> bool:
    """Whether an environment wants to read output that was cut off by a limit, instead of None: its `takes_cut`."""
    return getattr(env, "takes_cut", False) is True


class _FailedEnv:
    """Replaces an environment that could not be made; raises the reason at `start`."""

    def __init__(self, problem: Problem, error: BaseException) -> None:
        self.problem, self.domain = problem.id, problem.domain
        self._error = error

    def start(self) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]], bool]:
        """Raise the reason."""
        raise self._error

    def step(self, message: Message | None) -> StepResult:
        """Raise the reason."""
        raise self._error


MOST_REWARD = 1e6
"""Largest absolute reward of an environment: its square, and sums of squares, must be numbers in fp32."""


def checked(result: StepResult) -> StepResult:
    """A validated step result. Raises RolloutError for an unusable one. ENV_ERROR gives no reward."""
    if not isinstance(result, StepResult):
        raise RolloutError(f"the environment answered with {type(result).__name__} instead of a StepResult.")
    if not isinstance(result.reward, numbers.Real) or not abs(result.reward) <= MOST_REWARD:  # nan too
        raise RolloutError(
            f"the environment gave the reward {result.reward!r:.40}, which is not a number up to {MOST_REWARD:g}."
        )
    reward = 0.0 if result.outcome is Outcome.ENV_ERROR else float(result.reward)
    return dataclasses.replace(result, reward=reward, outcome=Outcome(result.outcome), detail=dict(result.detail))


def play_agent(problem: AgentProblem, base_url: str, api_key: str) -> StepResult:
    """Have an agent play a problem. A reward of 1 means solved. Raises RolloutError for a result that is no reward, and
    what the agent raises."""
    found = problem.run(base_url, api_key)
    if not isinstance(found, StepResult):
        found = StepResult(done=True, reward=found, outcome=Outcome.SOLVED if found == 1 else Outcome.FAILED)
    return checked(found)


def open_episode(problem: Problem, tokenizer: Tokenizer, threads: EnvThreadPool, **options: Any) -> Episode:
    """An episode of the problem with the `options` of `Episode`. A thread makes and starts its environment. If that
    fails or takes too long, the returned episode has ended with ENV_ERROR."""
    try:
        episode: Episode = threads.wait(threads.submit(partial(_open, problem, tokenizer, **options)))
    except EnvironmentTimeout as error:
        return Episode(_FailedEnv(problem, error), tokenizer, **options)
    return episode


async def open_episode_async(problem: Problem, tokenizer: Tokenizer, threads: EnvThreadPool, **options: Any) -> Episode:
    """`open_episode` for coroutines."""
    try:
        episode: Episode = await threads.result(threads.submit(partial(_open, problem, tokenizer, **options)))
    except EnvironmentTimeout as error:
        return Episode(_FailedEnv(problem, error), tokenizer, **options)
    return episode


def _open(problem: Problem, tokenizer: Tokenizer, **options: Any) -> Episode:
    try:
        env: Env = problem.env()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        env = _FailedEnv(problem, error)
    return Episode(env, tokenizer, **options)


def open_episodes(
    problems: Iterable[tuple[int, Problem]], tokenizer: Tokenizer, env_seconds: float = LIMIT_S, **options: Any
) -> list[Episode]:
    """Open an episode for each (group, problem), one after the other (see `open_episode`)."""
    with EnvThreadPool(limit_s=env_seconds) as threads:
        return [open_episode(problem, tokenizer, threads, group=group, **options) for group, problem in problems]


def settle(episode: Episode, answer: Future[None], threads: EnvThreadPool) -> None:
    """Wait for `answer`, the future of `threads.submit(episode.accept, completion)`. The episode fails on a timeout."""
    try:
        threads.wait(answer)
    except EnvironmentTimeout as error:
        episode.fail(error)


def play(
    episodes: Sequence[Episode],
    completer: Completer,
    params: SamplingParams | None = None,
    env_seconds: float = LIMIT_S,
    places: Sequence[int] | None = None,
) -> list[Trajectory]:
    """Play all episodes to their end, one batch per turn. Returns trajectories in the order of `episodes`.

    The tokenizer's stop ids are added to `params`, and `max_tokens` is limited to the context left. With `params.seed`,
    every (episode, turn) gets its own seed, by the number of the episode in `places`, or else in `episodes`.
    Environments run in threads: they mostly wait for the sandbox, which answers several of them in one run. An episode
    ends with ENV_ERROR if a reaction takes longer than `env_seconds` or the completer cannot compute its request.
    Raises RequestFailed if every first request fails.
    """
    params = params or SamplingParams()
    if params.n != 1:
        raise ConfigError(f"play: n={params.n}; make one episode per sample instead.")
    with EnvThreadPool(limit_s=env_seconds) as threads:
        while live := [(i, episode) for i, episode in enumerate(episodes) if episode.pending() is not None]:
            prompts = [episode.pending() or [] for _, episode in live]
            asked = [_params_of(params, i if places is None else places[i], episode) for i, episode in live]
            try:
                completions = completer.generate(prompts, asked)
            except RequestFailed:
                completions = _complete_apart(completer, prompts, asked)
                if not any(c.token_ids for c in completions) and not any(e.turns for e in episodes):
                    raise
            if len(completions) != len(live):
                raise RolloutError(f"the completer gave {len(completions)} completions for {len(live)} prompts.")
            answers = [threads.submit(e.accept, c) for (_, e), c in zip(live, completions, strict=True)]
            for (_, episode), answer in zip(live, answers, strict=True):
                settle(episode, answer, threads)
    return [episode.trajectory() for episode in episodes]


def _complete_apart(
    completer: Completer, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[Completion]:
    """Completions of a batch that failed as a whole: retries halves recursively, so only single failures remain."""
    if len(prompts) == 1:
        return [Completion(finish_reason="error")]
    found: list[Completion] = []
    middle = len(prompts) // 2
    for part in (slice(middle), slice(middle, None)):
        try:
            found += completer.generate(prompts[part], params[part])
        except RequestFailed:
            found += _complete_apart(completer, prompts[part], params[part])
    return found


def _params_of(params: SamplingParams, index: int, episode: Episode) -> SamplingParams:
    stops = tuple(dict.fromkeys((*params.stop_token_ids, *episode.tokenizer.stop_token_ids)))
    seed = None if params.seed is None else derive_seed(params.seed, "episode", index, len(episode.turns))
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, episode.room), stop_token_ids=stops, seed=seed)


def to_samples(trajectory: Trajectory, advantage: float = 0.0) -> list[TrainSample]:
    """Train samples of an episode. A turn joins the last row if its prompt extends it; otherwise it starts a new row.

    Every sampled token is in exactly one row, once, with `advantage`. Tokens of prompts and environments have loss mask
    False and weight version -1. The caller decides whether to train on a trajectory at all.
    """
    rows: list[TrainSample] = []
    for turn in trajectory.turns:
        context = list(turn.context_ids)
        if not rows or context[: len(rows[-1].ids)] != rows[-1].ids:
            rows.append(TrainSample([], [], [], [], [], trajectory.group, trajectory.domain, trajectory.teacher))
        row = rows[-1]
        given = context[len(row.ids) :]
        row.ids += [*given, *turn.output_ids]
        row.loss_mask += [False] * len(given) + [True] * len(turn.output_ids)
        row.rollout_logprobs += [0.0] * len(given) + list(turn.logprobs)
        row.advantages += [0.0] * len(given) + [advantage] * len(turn.output_ids)
        row.weight_versions += [NOT_SAMPLED] * len(given) + list(turn.weight_versions)
    return rows


def count_forks(trajectory: Trajectory) -> int:
    """Number of turns with a prompt that did not extend the tokens before it (context management, foreign clients)."""
    return max(0, len(to_samples(trajectory)) - 1)
