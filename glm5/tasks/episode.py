"""Plays environments with token ids in and token ids out, and turns the record into rows for the learner (§4.1).

The ids that the engine sampled are kept as they are: the next prompt is the last prompt, the sampled ids and the
rendered reaction of the environment, appended. Text is parsed from the ids for the environment alone and is never
tokenised again. An episode is a state machine (`pending`, `accept`, `trajectory`), so one caller can drive thousands
of them in whatever order completions arrive; `play` is the plain lock-step driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from glm5.chat import (
    Tokenizer,
    opens_thinking,
    parse_message,
    render_chat,
    render_tool_results,
    render_user_turn,
)
from glm5.errors import ConfigError, GradingError, RolloutError
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
from glm5.seeds import derive_seed
from glm5.tasks.reactions import Reactions

NOT_SAMPLED = -1  # weight version of tokens that no policy produced


class Episode:
    """One playing of one environment.

    How it can end: the environment says so; output cut off by a limit, or no room or turn left (TRUNCATED, reward 0
    unless the environment pays for what was done); output that cannot be read and that the environment cannot answer
    (MALFORMED); `GradingError` or `RolloutError` from the environment, or an aborted generation (ENV_ERROR, the reason
    in `detail["error"]`). Other exceptions are bugs and pass through.
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
        """`version` None takes the tokenizer's template, `enable_thinking` None the environment's wish. `max_context`
        bounds prompt and output together, in tokens. `render_tools=False` leaves the tool specifications out of the
        prompt (for policies that know their tools by training); calls are parsed by them all the same. `teacher` is
        the tag of the prompt in distillation."""
        if max_turns < 1 or max_context < 2:
            raise ConfigError(f"episode: max_turns={max_turns} and max_context={max_context} leave nothing to play.")
        self.env, self.tokenizer = env, tokenizer
        self.max_turns, self.max_context, self.group, self.teacher = max_turns, max_context, group, teacher
        self.version = tokenizer.template_version if version is None else version
        self.turns: list[Turn] = []
        self._context: list[int] = []
        self._result: StepResult | None = None
        self._tools: Sequence[Mapping[str, Any]] = ()
        try:
            messages, self._tools, wish = env.start()
        except (GradingError, RolloutError) as error:
            self._env_error(str(error))
            return
        self._thinking = wish if enable_thinking is None else enable_thinking
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
        """How many tokens the next output may have."""
        return self.max_context - len(self._context)

    def pending(self) -> list[int] | None:
        """The ids to continue, or None when the episode is over."""
        return None if self._result is not None else list(self._context)

    def accept(self, completion: Completion) -> None:
        """Record an output of the policy, let the environment react and prepare the next prompt.

        Raises `RolloutError` when the episode is over or the completion's lists differ in length.
        """
        if self._result is not None:
            raise RolloutError(f"{self.env.problem}: the episode is over and takes no further completion.")
        count = len(completion.token_ids)
        if len(completion.logprobs) != count or len(completion.weight_versions) != count:
            raise RolloutError(
                f"{self.env.problem}: a completion with {count} tokens, {len(completion.logprobs)} logprobs and "
                f"{len(completion.weight_versions)} weight versions; every token needs one of each."
            )
        output = tuple(completion.token_ids)
        versions = tuple(completion.weight_versions)
        context = tuple(self._context)
        self.turns.append(Turn(context, output, tuple(completion.logprobs), versions, completion.finish_reason))
        if completion.finish_reason == "abort":
            self._env_error("the engine aborted the generation")
            return
        cut = completion.finish_reason == "length"
        message = None if cut else self._read(output)
        try:
            result = self.env.step(message)
            if result.done or cut:
                solved = result.done and result.outcome is Outcome.SOLVED
                self._finish(dataclasses.replace(result, outcome=Outcome.TRUNCATED) if cut and not solved else result)
            elif len(self.turns) >= self.max_turns:
                self._finish(dataclasses.replace(result, outcome=Outcome.TRUNCATED))
            elif message is None and output[-1:] != (self.tokenizer.special["<|observation|>"],):
                self._finish(dataclasses.replace(result, outcome=Outcome.MALFORMED))
            else:
                self._extend([*output, *self._reaction(output, result.messages)])
        except (GradingError, RolloutError) as error:
            self._env_error(str(error))

    def trajectory(self) -> Trajectory:
        """The record of a finished episode; raises `RolloutError` before its end."""
        if self._result is None:
            raise RolloutError(f"{self.env.problem}: the episode is not over; there is no trajectory yet.")
        last = (*self.turns[-1].context_ids, *self.turns[-1].output_ids) if self.turns else tuple(self._context)
        return Trajectory(
            problem=self.env.problem,
            domain=self.env.domain,
            group=self.group,
            turns=self.turns,
            reward=self._result.reward,
            outcome=self._result.outcome,
            detail={**self._result.detail, "text": self.tokenizer.decode(last)},
            teacher=self.teacher,
        )

    def _read(self, output: tuple[int, ...]) -> Message | None:
        """The message that was sampled; None when it breaks the grammar, or when its last id does not fit its kind:
        tool calls are closed by `<|observation|>`, answers by any other stop."""
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
        if last == "<|observation|>" and roles and set(roles) == {"tool"}:
            return render_tool_results(
                messages, tokenizer=self.tokenizer, version=self.version, enable_thinking=self._thinking
            )
        if last == "<|user|>" and roles == ["user"]:
            return render_user_turn(
                messages[0].content, tokenizer=self.tokenizer, version=self.version, enable_thinking=self._thinking
            )
        raise RolloutError(
            f"{self.env.problem}: messages of roles {roles} cannot follow an output that ends in {last!r}."
        )

    def _extend(self, ids: Sequence[int]) -> None:
        self._context.extend(ids)
        if self.room < 1:
            self._finish(StepResult(done=True, outcome=Outcome.TRUNCATED, detail={"cut": "context"}))

    def _finish(self, result: StepResult) -> None:
        """A step that was not the environment's last carries no reward."""
        self._result = result if result.done else dataclasses.replace(result, done=True, reward=0.0)

    def _env_error(self, reason: str) -> None:
        self._result = StepResult(done=True, outcome=Outcome.ENV_ERROR, detail={"error": reason})


def play(episodes: Sequence[Episode], completer: Completer, params: SamplingParams | None = None) -> list[Trajectory]:
    """Play all episodes to their ends, one batch per turn. Trajectories in the order of `episodes`.

    The tokenizer's stop ids are added to `params`, `max_tokens` is cut to the room that is left, and a seed gives every
    (episode, turn) a seed of its own. Environments react in threads, since they mostly wait for their sandbox, which
    answers several of them in one run.
    """
    params = params or SamplingParams()
    if params.n != 1:
        raise ConfigError(f"play: n={params.n}; make one episode per sample instead.")
    with Reactions() as threads:
        while live := [(i, episode) for i, episode in enumerate(episodes) if episode.pending() is not None]:
            prompts = [episode.pending() or [] for _, episode in live]
            asked = [_params_of(params, i, episode) for i, episode in live]
            completions = completer.generate(prompts, asked)
            if len(completions) != len(live):
                raise RolloutError(f"the completer gave {len(completions)} completions for {len(live)} prompts.")
            for answer in [threads.submit(e.accept, c) for (_, e), c in zip(live, completions, strict=True)]:
                answer.result()
    return [episode.trajectory() for episode in episodes]


def _params_of(params: SamplingParams, index: int, episode: Episode) -> SamplingParams:
    stops = tuple(dict.fromkeys((*params.stop_token_ids, *episode.tokenizer.stop_token_ids)))
    seed = None if params.seed is None else derive_seed(params.seed, "episode", index, len(episode.turns))
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, episode.room), stop_token_ids=stops, seed=seed)


def to_samples(trajectory: Trajectory, advantage: float = 0.0) -> list[TrainSample]:
    """Token rows of an episode: turns whose prompt extends the row so far share it, any other turn starts a new row.

    Every sampled token is in exactly one row, once, with `advantage`. Tokens of prompts and environments have loss mask
    False and weight version -1. Whether a trajectory should be trained on at all is the caller's decision.
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
    """How often a prompt did not extend what came before it (context management, foreign clients)."""
    return max(0, len(to_samples(trajectory)) - 1)
