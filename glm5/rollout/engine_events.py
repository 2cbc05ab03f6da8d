"""What engines over HTTP say: events of streams, refusals, versions. They may be any server, so all is checked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pydantic_core import from_json

from glm5.errors import EngineError, RequestFailed
from glm5.serve.errors import ApiError
from glm5.serve.samples import Delta

FINISHES = (None, "stop", "length", "abort", "error")
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading an answer of another form raises."""


class EngineLost(EngineError):
    """The engine died, closed the connection, is full, or aborted the generation; another engine can continue it."""


class EventReading(Protocol):
    """Reads the events of one answer."""

    told: list[int] | None
    """The weight version of every token of the answer, once an event has told them."""

    def feed(self, text: str) -> Delta:
        """The new tokens of an event; none are possible. Raises EngineLost for an event that reports an error or is
        broken off, RequestFailed for one of another form."""
        ...


class Reading:
    """Reads the events of one answer. Each event may contain only the new tokens or all tokens of the sample so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen = 0
        self.told: list[int] | None = None

    def feed(self, text: str) -> Delta:
        """The new tokens of an event. Raises EngineLost for an event that reports an error, RequestFailed for one that
        is not in SGLang's format."""
        try:
            try:
                told = from_json(text)
            except ValueError:  # json also reads strings that are not Unicode
                told = json.loads(text)
        except (ValueError, RecursionError) as error:  # the connection ended within the event
            raise EngineLost(f"{self._name} sent a broken event: {error}") from error
        try:
            if "error" in told:
                raise EngineLost(f"{self._name}: {message_of(told)[:200]}")
            meta, finish = told["meta_info"], told["meta_info"].get("finish_reason")
            fresh = whole_number(meta["completion_tokens"]) - self._seen
            ids = [whole_number(token) for token in told["output_ids"][-fresh:]] if fresh else []
            scores = [float(entry[0]) for entry in meta["output_token_logprobs"][-fresh:]] if fresh else []
            versions = meta.get("output_weight_versions")
            if versions is None:
                versions = [version_number(meta.get("weight_version"))] * len(ids)
            versions = [whole_number(version) for version in versions[-fresh:]] if fresh else []
            kind = None if finish is None else str(finish["type"] if isinstance(finish, dict) else finish)
            if kind not in FINISHES:
                raise ValueError(f"finish reason {kind!r:.40}")
            if (spans := meta.get("weight_versions")) is not None:
                self.told = spanned(spans, self._seen + fresh)
        except MALFORMED as error:
            raise RequestFailed(f"{self._name} sent an event not in SGLang's format: {error!r:.200}.") from error
        if not len(ids) == len(scores) == len(versions) == fresh:
            if kind in ("abort", "error"):
                raise EngineLost(f"{self._name} aborted a generation.")
            raise RequestFailed(f"{self._name} sent {len(ids)} ids and {len(scores)} scores for {fresh} tokens.")
        self._seen += fresh
        return Delta(0, ids, scores, [], kind, versions)


def whole_number(value: Any) -> int:
    """Raises ValueError for what is not an int."""
    if type(value) is not int:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def spanned(spans: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """The version of each of `count` tokens from spans {version, start, end}, which follow each other. Raises
    ValueError, LookupError or TypeError for others."""
    found: list[int] = []
    for span in spans:
        start, end = whole_number(span["start"]), whole_number(span["end"])
        if not start == len(found) <= end <= count:
            raise ValueError(f"weight versions of tokens {start} to {end}, after those of {len(found)}")
        found += [version_number(span["version"])] * (end - start)
    if len(found) != count:
        raise ValueError(f"weight versions of {len(found)} tokens, not {count}")
    return found


def with_versions(name: str, deltas: list[Delta], said: list[int], told: list[int] | None) -> list[Delta]:
    """The deltas with the versions that the end of the answer told. Raises RequestFailed if it contradicts those that
    were `said` of the tokens before."""
    if told is None:
        return deltas
    if told[: len(said)] != said:
        raise RequestFailed(f"{name} told other weight versions at the end of an answer than while it sampled.")
    start, found = len(said), list[Delta]()
    for delta in deltas:
        end = start + len(delta.token_ids)
        found.append(replace(delta, weight_versions=told[start:end]))
        start = end
    return found


def version_number(version: Any) -> int:
    """A weight version as a number; 0 if the server gives no number."""
    return int(version) if str(version).isdigit() else 0


def message_of(told: Any) -> str:
    """The text of an error's body: OpenAI's and SGLang's form, vLLM's, FastAPI's, or any other."""
    if not isinstance(told, dict):
        return str(told)
    found = told.get("error", told.get("message", told.get("detail")))
    return str(found.get("message") or "") if isinstance(found, dict) else str(found or "")


def refused(status: int, text: str) -> Exception:
    """The error for an HTTP status other than 200: EngineLost if another engine may succeed, else ApiError."""
    with contextlib.suppress(ValueError, RecursionError):
        text = message_of(json.loads(text)) or text
    if status in (429, 503):
        return EngineLost(f"An engine is full or starting: {text[:200]}")
    if status >= 500:
        return EngineLost(f"An engine failed: {text[:200]}")
    return ApiError(400, f"The engine refused the request: {text[:500]}", code="engine_refused")
