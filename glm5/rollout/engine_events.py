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
    late: bool
    """Whether only `told` knows versions that change within an answer."""

    def feed(self, text: str) -> Delta:
        """The new tokens of an event; none are possible. Raises EngineLost for an event that reports an error or is
        broken off, RequestFailed for one of another form."""
        ...


class Reading:
    """Reads the events of one answer. Each event may contain only the new tokens or all tokens of the sample so far."""

    late = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: list[int] = []
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
            if told.get("error") is not None:
                raise EngineLost(f"{self._name}: {message_of(told)[:200]}")
            meta, finish = told["meta_info"], told["meta_info"].get("finish_reason")
            fresh = whole_number(meta["completion_tokens"]) - len(self._seen)
            ids = [whole_number(token) for token in self._new(told["output_ids"], fresh)]
            if len(told["output_ids"]) > fresh > 0 and told["output_ids"][: len(self._seen)] != self._seen:
                raise ValueError("other tokens than those before")
            scored = self._new(meta["output_token_logprobs"], fresh)
            scores = [number(entry[0]) for entry in scored]
            if any(entry[1] not in (None, token) for entry, token in zip(scored, ids, strict=False) if len(entry) > 1):
                raise ValueError("log-probabilities of other tokens")
            versions = meta.get("output_weight_versions")
            if versions is None:
                versions = [version_number(meta.get("weight_version"))] * len(ids)
            else:
                versions = [whole_number(version) for version in self._new(versions, fresh)]
            kind = None if finish is None else str(finish["type"] if isinstance(finish, dict) else finish)
            if kind not in FINISHES:
                raise ValueError(f"finish reason {kind!r:.40}")
            if (spans := meta.get("weight_versions")) is not None:
                self.told = spanned(spans, len(self._seen) + fresh)
        except MALFORMED as error:
            raise RequestFailed(f"{self._name} sent an event not in SGLang's format: {error!r:.200}.") from error
        if not len(ids) == len(scores) == len(versions) == fresh:
            if kind in ("abort", "error"):
                raise EngineLost(f"{self._name} aborted a generation.")
            raise RequestFailed(f"{self._name} sent {len(ids)} ids and {len(scores)} scores for {fresh} tokens.")
        self._seen += ids
        return Delta(0, ids, scores, [], kind, versions)

    def _new(self, entries: Sequence[Any], fresh: int) -> Sequence[Any]:
        """The entries of the new tokens. Neither less nor more than all, or the new ones, may be there: nobody knows to
        which tokens they belong."""
        return (entries[len(self._seen) :] if len(entries) == len(self._seen) + fresh else entries) if fresh else []


def number(value: Any) -> float:
    """Raises ValueError for what is not a number."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.40} is no number")
    return float(value)


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
    were `said` of the tokens before, or tells too few."""
    if told is None:
        return deltas
    if told[: len(said)] != said:
        raise RequestFailed(f"{name} told other weight versions at the end of an answer than while it sampled.")
    if len(told) < len(said) + sum(len(delta.token_ids) for delta in deltas):
        raise RequestFailed(f"{name} told the weight versions of {len(told)} tokens, and sent more.")
    start, found = len(said), list[Delta]()
    for delta in deltas:
        end = start + len(delta.token_ids)
        found.append(replace(delta, weight_versions=told[start:end]))
        start = end
    return found


def version_number(version: Any) -> int:
    """A weight version as a number; -1 if the server gives no number, as after its start."""
    return int(version) if str(version).isdigit() else -1


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
