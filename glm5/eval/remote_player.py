"""A model behind a URL answers the problems of a suite, as text."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from glm5.agents.connections import AskingThreads
from glm5.agents.context import ContextPolicy, fold
from glm5.agents.endpoint import Endpoint, EndpointError
from glm5.agents.models import Measure, approximate_measure, exact_measure
from glm5.agents.wire import OnDelta
from glm5.chat import Tokenizer
from glm5.config.suite import Suite, SuitePart
from glm5.errors import GradingError, text_of
from glm5.eval.players import Numbered, Played
from glm5.records import Env, Message, Outcome, StepResult
from glm5.tasks.contract import Problem, ToolSpec
from glm5.tasks.dialogue.user import UserModel
from glm5.tasks.episode import checked, takes_cut

MOST_REFUSED = 8


@dataclass
class RemotePlayer:
    """A chat endpoint, which gets `concurrency` problems at a time. Its draws are its own: it gets no seed.

    Whether to think is said as `chat_template_kwargs`, which servers of open models know, if `template`. Tools that the
    suite does not show go only to servers of ours, which read their calls; other servers get none. A request that
    the server refuses is an error of that problem alone, but `MOST_REFUSED` without an answer in between end the run.
    `tokenizer` measures prompts for context policies; without one they are estimated. `user` plays the users of
    dialogues, if a model does.
    """

    endpoint: Endpoint
    concurrency: int = 8
    template: bool = True
    tokenizer: Tokenizer | None = None
    user: Endpoint | None = None

    def play(self, problems: Numbered, suite: Suite, part: SuitePart, seed: int) -> Iterator[tuple[int, Played]]:
        """Raises EndpointError if the server cannot be reached, or refuses many requests. Then, and if not all is
        consumed, the endpoints are closed, so that no request goes on."""
        tokens = part.max_tokens or suite.max_tokens
        model = self.endpoint.asking(max_tokens=tokens, temperature=suite.temperature, top_p=suite.top_p)
        model = model.asking(stop=suite.stop) if suite.stop else model
        left, stopped = iter(problems), threading.Event()
        running: dict[Future[Played], int] = {}
        refused, answered = list[tuple[int, Played]](), False

        def told(kind: str, text: str) -> None:
            if stopped.is_set():
                raise EndpointError("The evaluation was stopped.")

        def begin(problem: Problem) -> Played:
            return play_messages(problem, model, suite, self.template and not suite.plain, told, self.tokenizer)

        with AskingThreads(self.concurrency, "eval", self.endpoint, self.user) as threads:
            try:
                while True:
                    while len(running) < self.concurrency and (following := next(left, None)) is not None:
                        running[threads.submit(begin, following[1])] = following[0]
                    if not running and (answered or not refused):
                        yield from refused
                        return
                    failed: BaseException | None = None
                    if not running:
                        raise EndpointError(f"Every request was refused; the last: {refused[-1][1].detail['error']}")
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        place, failure = running.pop(future), future.exception()
                        if failure is None:
                            yield from (*refused, (place, future.result()))
                            refused.clear()
                            answered = True
                        elif isinstance(failure, EndpointError) and failure.refused:
                            error = {"error": text_of(failure)[:500], "cause": "refused"}
                            refused.append((place, Played(0.0, Outcome.ENV_ERROR, error)))
                            failed = failure if len(refused) >= MOST_REFUSED else failed
                        else:
                            failed = failure
                    if failed is not None:
                        raise failed
            finally:
                stopped.set()


def simulated_user(endpoint: Endpoint) -> UserModel:
    """A model behind a URL that plays the user of dialogues. If it does not answer, that ends the run as if the model
    under test did not."""
    return lambda messages, tools: endpoint.complete(messages, tools).message


def play_messages(
    problem: Problem,
    model: Endpoint,
    suite: Suite,
    template: bool = False,
    told: OnDelta | None = None,
    tokenizer: Tokenizer | None = None,
) -> Played:
    """Play one problem as text, with the suite's context policy; `told` hears the replies as they come.

    A prompt that is too long for the server and a reply that is cut off are TRUNCATED; a failure of the environment is
    ENV_ERROR. An environment with a method `close` is closed at the end, however that comes. Raises EndpointError for a
    server that does not answer.
    """
    with contextlib.ExitStack() as stack:
        try:
            env = problem.env()
            stack.callback(getattr(env, "close", lambda: None))
            opening = env.start()
        except EndpointError:  # of a simulated user
            raise
        except Exception as error:
            return _env_error(error)
        return _play(env, opening, model, suite, template, told, tokenizer)


def _play(
    env: Env,
    opening: tuple[Sequence[Message], Sequence[ToolSpec], bool],
    model: Endpoint,
    suite: Suite,
    template: bool,
    told: OnDelta | None,
    tokenizer: Tokenizer | None,
) -> Played:
    messages, tools, thinking = opening
    shown = tools if suite.render_tools else ()
    model, sent = model.prompted(thinking, suite.render_tools or not tools, template)
    history: list[Message] = list(messages)
    policy = ContextPolicy(suite.context, suite.keep, suite.discard_above)
    measure = Measure()
    if policy.mode != "none":
        measure = approximate_measure(shown) if tokenizer is None else exact_measure(tokenizer, shown)
    for _ in range(suite.max_turns):
        folded = fold(history, policy, measure.count, measure.overhead) if policy.mode != "none" else None
        try:
            reply = model.complete(folded.messages if folded else history, tools if sent else (), told)
        except EndpointError as error:
            if error.too_long:
                return _played(StepResult(detail={"cut": "context"}), history, True, env)
            raise
        cut = reply.finish_reason == "length" and not suite.plain  # a base model need not come to an end
        history.append(reply.message)
        try:
            unread = reply.broken or (cut and not takes_cut(env))
            result = checked(env.step(None if unread else reply.message))
        except EndpointError:
            raise
        except Exception as error:
            return _env_error(error)
        if result.done or cut or (reply.broken and not result.messages):
            return _played(result, history, cut, env)
        history += result.messages
    return _played(StepResult(outcome=Outcome.TRUNCATED), history, True, env)


def _played(result: StepResult, history: Sequence[Message], cut: bool, env: Env) -> Played:
    solved = result.done and result.outcome is Outcome.SOLVED
    outcome = Outcome.TRUNCATED if cut and not solved else result.outcome
    reward, detail = result.reward, dict(result.detail)
    if not result.done:
        reward, more = abandoned(env)
        detail |= more
    return Played(reward, outcome, {**detail, "text": _text(history)}, tuple(history))


def abandoned(env: Env) -> tuple[float, Mapping[str, Any]]:
    """Reward and detail of an episode that cannot go on: 0 and none, unless the environment has a method `abandon`."""
    abandon = getattr(env, "abandon", None)
    if abandon is None:
        return 0.0, {}
    left = checked(abandon())
    return left.reward, left.detail


def _text(history: Sequence[Message]) -> str:
    """For readers."""
    return "\n".join(
        f"<|{m.role}|>{f'<think>{m.reasoning}</think>' if m.reasoning else ''}{m.content}" for m in history
    )


def _env_error(error: Exception) -> Played:
    cause = "grading" if isinstance(error, GradingError) else "crash"
    return Played(0.0, Outcome.ENV_ERROR, {"error": text_of(error)[:500], "cause": cause})
