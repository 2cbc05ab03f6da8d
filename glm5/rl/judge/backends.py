"""Where the judge's model runs: our engine with a grammar, or any OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from glm5.chat import Tokenizer, parse_message, render_chat
from glm5.engine.engine import Engine
from glm5.errors import EngineError, GradingError, MissingExtraError
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.records import GrammarSpec, Message, SamplingParams
from glm5.rl.judge.prompt import Winner, read_verdict, schema_of
from glm5.rl.weight_sync import tensor_hashes

CHUNKS = 4
"""Questions at once per concurrent request: as few as keep a server busy, because limits are checked in between."""
BYTES_PER_TOKEN = 3


@dataclass(frozen=True)
class Question:
    """One request to the judge; the sample's `seed` is part of its identity."""

    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True)
class Verdict:
    """The judge's answer: the verdict, None if there is none, the tokens that it cost, why it failed, and the number of
    requests that it took."""

    winner: Winner | None
    tokens: int = 0
    failure: str = ""
    calls: int = 1


class Backend(Protocol):
    """A model that answers questions. `identity` names everything about it that changes verdicts; `most` is the number
    of questions to ask at once."""

    @property
    def identity(self) -> str: ...

    @property
    def most(self) -> int: ...

    def ask(self, questions: Sequence[Question]) -> Iterable[Verdict]:
        """One verdict per question, in order, as they come. A failure is a verdict without a winner, not an
        exception."""
        ...

    def close(self) -> None: ...


class EndpointBackend:
    """A server with Chat Completions. The verdict's schema goes along as `response_format`; a server that ignores it
    only gives more failures. With `structured=False` it is not sent, for servers that refuse it. An answer without
    `usage` counts as `max_tokens` and a token per `BYTES_PER_TOKEN` bytes of the question; a request that failed counts
    no tokens."""

    def __init__(
        self,
        url: str,
        name: str = "",
        *,
        key: str | None = None,
        max_tokens: int = 512,
        temperature: float = 0.7,
        template: str = "full",
        concurrency: int = 8,
        seconds: float = 120.0,
        structured: bool = True,
        pauses: Sequence[float] | None = None,
    ) -> None:
        from glm5.agents.endpoint import Endpoint

        self._endpoint = Endpoint(
            url, name, key=key, max_tokens=max_tokens, temperature=temperature, seconds=seconds, whole_s=4 * seconds,
            pauses=pauses,
        )  # fmt: skip
        if structured:
            self._endpoint = self._endpoint.answering(json.loads(schema_of(template)))
        self._settings, self._max_tokens = f"{max_tokens} {temperature:g}", max_tokens
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        self.most = CHUNKS * concurrency

    @property
    def identity(self) -> str:
        return f"{self._endpoint.base} {self._endpoint.name} {self._settings}"

    def ask(self, questions: Sequence[Question]) -> Iterator[Verdict]:
        return self._pool.map(self._one, questions)

    def close(self) -> None:
        self._endpoint.close()  # first: what is asked, or would be, fails at once
        self._pool.shutdown()

    def _one(self, question: Question) -> Verdict:
        from glm5.agents.endpoint import EndpointError

        try:
            reply = self._endpoint.asking(seed=question.seed % (1 << 31)).complete(question.messages, [])
        except EndpointError as error:
            return Verdict(None, 0, str(error), error.tries)
        size = sum(len(message.content.encode()) for message in question.messages)
        tokens = (reply.prompt_tokens or size // BYTES_PER_TOKEN) + (reply.completion_tokens or self._max_tokens)
        winner = read_verdict(reply.message.content)
        return Verdict(winner, tokens, "" if winner else f"not a verdict: {reply.message.content[:80]!r}", reply.tries)


class EngineBackend:
    """Our engine in this process, with the verdict's form enforced by a grammar (extra `grammar`); without thinking."""

    def __init__(
        self,
        source: Path | str | GLM5ForCausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        max_tokens: int = 512,
        temperature: float = 0.7,
        template: str = "full",
        device: torch.device | str = "cpu",
        batch: int = 64,
    ) -> None:
        if isinstance(source, GLM5ForCausalLM):
            model, self._name = source, "model"
        else:
            model, self._name = GLM5ForCausalLM.from_pretrained(source, device=device).eval(), str(source)
            tokenizer = tokenizer or Tokenizer.load(Path(source))
        if tokenizer is None:
            raise ValueError("a model needs its tokenizer")
        self._tokenizer = tokenizer
        self._engine = Engine(model, tokenizer, max_batch=batch, exact=False)
        self.most = batch
        self._max_tokens, self._temperature = max_tokens, temperature
        self._grammar = GrammarSpec("json_schema", schema_of(template))
        self._settings = f"{max_tokens} {temperature:g}"

    @cached_property
    def identity(self) -> str:
        weights = "".join(value for _, value in sorted(tensor_hashes(self._engine.model).items()))
        return f"{weights} {self._settings}"

    def ask(self, questions: Sequence[Question]) -> list[Verdict]:
        rows, params = [], []
        for question in questions:
            ids = render_chat(
                list(question.messages), tokenizer=self._tokenizer, enable_thinking=False, clear_thinking=False
            ).ids
            rows.append(ids)
            room = self._engine.max_length - len(ids)
            params.append(
                SamplingParams(
                    max_tokens=max(1, min(self._max_tokens, room)),
                    temperature=self._temperature,
                    seed=question.seed,
                    grammar=self._grammar,
                )
            )
        fits = [i for i, row in enumerate(rows) if len(row) + 8 < self._engine.max_length]
        found = [Verdict(None, 0, "the question is longer than the judge's context")] * len(rows)
        try:
            done = self._engine.generate([rows[i] for i in fits], [params[i] for i in fits]) if fits else []
        except MissingExtraError as error:
            raise GradingError(f"the judge's engine enforces the form of verdicts: {error}") from error
        except EngineError as error:
            return [Verdict(None, 0, str(error))] * len(rows)
        for i, completion in zip(fits, done, strict=True):
            message, _ = parse_message(self._tokenizer.decode(completion.token_ids), thinking=False)
            winner = read_verdict(message.content)
            tokens = len(rows[i]) + len(completion.token_ids)
            found[i] = Verdict(winner, tokens, "" if winner else f"not a verdict: {message.content[:80]!r}")
        return found

    def close(self) -> None:
        self._engine.close()
