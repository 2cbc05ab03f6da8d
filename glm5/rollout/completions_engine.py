"""Servers whose `/v1/completions` takes a prompt of token ids and returns token ids with log-probabilities, as vLLM's.

vLLM returns the ids if asked by `return_token_ids` (0.10.2 or newer), or as token strings "token_id:17" if asked by
`return_tokens_as_token_ids`. Its log-probabilities are those of the model at temperature 1 unless it was started with
`--logprobs-mode processed_logprobs`. It tells the version of its weights if it was started with
`VLLM_SERVER_DEV_MODE=1` (see `WEIGHT_INFO`); else all tokens have version 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from glm5.chat.tokenizer import Tokenizer
from glm5.errors import RequestFailed, UsageError
from glm5.records import SamplingParams
from glm5.rollout.engine_events import (
    FINISHES,
    MALFORMED,
    EngineLost,
    EventReading,
    message_of,
    number,
    spanned,
    whole_number,
)
from glm5.rollout.engines import VERSION_SECONDS, HttpEngine
from glm5.rollout.native_params import native_params
from glm5.serve.samples import Delta

Flag = Literal["return_token_ids", "return_tokens_as_token_ids"]
FLAGS: tuple[Flag, ...] = ("return_token_ids", "return_tokens_as_token_ids")
_TOKEN = "token_id:"
WEIGHT_INFO = "/weight_info"
"""Path that tells the version of the weights. A server that has it also tells at the end of an answer, asked by
`return_weight_versions`, which version sampled which tokens."""
INFO_SECONDS, INFO_BYTES = 20.0, 1 << 20
"""Time to find out what a server is, in all, and the longest answer."""
NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Names of SGLang's sampling parameters that vLLM calls otherwise."""
TEXT_ONLY = ("skip_special_tokens", "no_stop_trim")
"""Parameters that change the text, which is not used."""
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Always sent: what a request leaves out, vLLM takes from the model's generation_config.json."""


class CompletionsEngine(HttpEngine):
    """A server with `/v1/completions`. `url` is its base URL, `model` the name that it serves, `flag` the field by
    which it returns token ids. `versions`: it has `WEIGHT_INFO`."""

    def __init__(
        self, url: str, api_key: str | None = None, *, model: str, flag: Flag = FLAGS[0], versions: bool = False
    ) -> None:
        super().__init__(url, api_key)
        self._model, self._flag, self._versions = model, flag, versions

    async def _request(
        self, ids: Sequence[int], params: SamplingParams, every: int
    ) -> tuple[str, dict[str, Any], EventReading]:
        sent = native_params(params, every)
        body = {NAMES.get(name, name): value for name, value in sent.items() if name not in TEXT_ONLY}
        body |= {name: getattr(params, name) for name in PENALTIES}
        body |= {"model": self._model, "prompt": list(ids), "logprobs": 0, "stream": True, self._flag: True}
        body |= {"return_weight_versions": True} if self._versions else {}
        version = await self.version() if self._versions else 0
        return "/v1/completions", body, CompletionsReading(self.name, version, self._versions)

    async def version(self) -> int:
        """0 if the server answers, but does not tell it."""
        if self._versions:
            return await self._told_version(WEIGHT_INFO)
        try:
            async with self._client() as client, asyncio.timeout(VERSION_SECONDS):
                status, _ = await client.request("GET", "/v1/models")
        except OSError as error:
            raise EngineLost(f"{self.name} does not answer: {type(error).__name__} {error}") from error
        if status != 200:
            raise EngineLost(f"{self.name} answers with status {status}.")
        return 0


class CompletionsReading:
    """Reads the events of one answer. Ids and log-probabilities of a token may come in different events. `version` is
    that of the weights when the request was sent."""

    def __init__(self, name: str, version: int = 0, late: bool = False) -> None:
        self._name, self._version, self.late = name, version, late
        self._seen = 0
        self.told: list[int] | None = None
        self._ids: list[int] = []
        self._scores: list[float] = []

    def feed(self, text: str) -> Delta:
        """See `EventReading.feed`."""
        try:
            told = json.loads(text)
        except (ValueError, RecursionError) as error:  # the connection ended within the event
            raise EngineLost(f"{self._name} sent a broken event: {error}") from error
        try:
            if told.get("error") is not None:
                raise EngineLost(f"{self._name}: {message_of(told)[:200]}")
            choice = told["choices"][0] if told["choices"] else {}
            if len(told["choices"]) > 1 or choice.get("index", 0) != 0:
                raise ValueError("more than one choice")
            ids, scores = scored_ids(choice)
            if (kind := choice.get("finish_reason")) not in FINISHES:
                raise ValueError(f"finish reason {kind!r:.40}")
            self._seen += len(ids)
            if (spans := choice.get("weight_versions")) is not None:
                self.told = spanned(spans, self._seen)
        except MALFORMED as error:
            raise RequestFailed(
                f"{self._name} sent an event not in the format of completions: {error!r:.200}."
            ) from error
        self._ids += ids
        self._scores += scores
        count = min(len(self._ids), len(self._scores))
        aborted = kind in ("abort", "error")  # the rest is sampled anew, also what came without its pair
        if kind is not None and not aborted and not len(self._ids) == len(self._scores) == count:
            raise RequestFailed(
                f"{self._name} sent {len(self._ids)} ids and {len(self._scores)} scores for the same tokens."
            )
        versions = [self._version] * count
        found = Delta(0, self._ids[:count], self._scores[:count], [], kind, versions)
        del self._ids[:count], self._scores[:count]
        return found


def scored_ids(choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The token ids of a choice and their log-probabilities. Raises ValueError or TypeError for another form."""
    scored = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None:
        texts = scored.get("tokens") or []
        if bad := [text for text in texts if not str(text).startswith(_TOKEN)]:
            raise ValueError(f"the token {bad[0]!r:.40} is not an id")
        ids = [int(text.removeprefix(_TOKEN)) for text in texts]
    return [whole_number(token) for token in ids], [number(score) for score in scored.get("token_logprobs") or []]


@dataclass(frozen=True)
class ServerInfo:
    """What a server is. `native`: it has SGLang's native API. `model`, `flag`: see `CompletionsEngine`. `tokenizer` is
    a folder, which may be on another machine; `max_length` the longest prompt plus answer in tokens, if it tells;
    `versions`: it has `WEIGHT_INFO`."""

    url: str
    native: bool
    model: str = ""
    flag: Flag = FLAGS[0]
    tokenizer: str = ""
    max_length: int | None = None
    versions: bool = False

    def source(self, api_key: str | None = None) -> HttpEngine:
        if self.native:
            return HttpEngine(self.url, api_key)
        return CompletionsEngine(self.url, api_key, model=self.model, flag=self.flag, versions=self.versions)

    def local_tokenizer(self) -> Path:
        """The folder of the tokenizer. Raises UsageError if it is not on this machine."""
        path = Path(self.tokenizer)
        if not self.tokenizer or not (path / "tokenizer.json").exists():
            text = f"The engine {self.url} names no tokenizer on this machine; give its checkpoint directory as well."
            raise UsageError(text)
        return path

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises UsageError if the server's tokenizer is on this machine and is another one."""
        path = Path(self.tokenizer)
        if self.tokenizer and (path / "tokenizer.json").exists() and not Tokenizer.load(path).equals(tokenizer):
            raise UsageError(f"The engine {self.url} has another tokenizer than the gateway: {path}.")


def find_out(url: str, api_key: str | None = None) -> ServerInfo:
    """Ask a server which surface it has, within `INFO_SECONDS`. Not for coroutines: call it in a thread. Raises
    UsageError if it does not answer, or has neither."""
    if "@" in urlsplit(url).netloc:  # it would be in every message
        raise UsageError("The URL of an engine has a user or a password; give a key in a file instead.")
    return asyncio.run(_find_out(url.rstrip("/"), api_key))


async def _find_out(url: str, api_key: str | None) -> ServerInfo:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=INFO_SECONDS, headers=headers)
    try:
        async with asyncio.timeout(INFO_SECONDS), client:
            info = await _json(client, "GET", "/model_info") or await _json(client, "GET", "/get_model_info")
            if isinstance(info, dict):
                return ServerInfo(url, True, tokenizer=str(info.get("tokenizer_path") or ""), max_length=_length(info))
            listed = await _json(client, "GET", "/v1/models")
            model = listed["data"][0] if isinstance(listed, dict) and listed.get("data") else {"id": ""}
            for flag in FLAGS:
                body = {"model": model["id"], "prompt": [0], "max_tokens": 1, "logprobs": 0, flag: True}
                answer = await _json(client, "POST", "/v1/completions", body)
                if isinstance(answer, dict) and _usable(answer):
                    root, told = str(model.get("root") or ""), await _json(client, "GET", WEIGHT_INFO)
                    versions = isinstance(told, dict) and "weight_version" in told
                    return ServerInfo(url, False, str(model["id"]), flag, root, _length(model), versions)
    except TimeoutError:
        raise UsageError(f"The engine {url} did not say what it is within {INFO_SECONDS:g} seconds.") from None
    except (httpx.HTTPError, httpx.InvalidURL, *MALFORMED) as error:
        raise UsageError(
            f"The engine {url} does not answer as an engine does: {type(error).__name__} {error!s:.200}."
        ) from None
    raise UsageError(
        f"The engine {url} has neither SGLang's native API nor a /v1/completions that takes and returns token ids with "
        "log-probabilities, as vLLM 0.10.2 and newer have; an engine needs one of them."
    )


def _length(told: Mapping[str, Any]) -> int | None:
    """The longest prompt plus answer in tokens; None if it is not told. Raises ValueError for one below 2."""
    length = told.get("max_model_len")
    if length is None:
        return None
    if int(length) < 2:
        raise ValueError(f"its max_model_len is {int(length)}")
    return int(length)


async def _json(client: httpx.AsyncClient, method: str, path: str, body: Any = None) -> Any:
    """The body of an answer; None if the server does not know the request. Raises UsageError for a wrong key or a
    server that fails or is starting, ValueError for an answer that is too long."""
    whole = bytearray()
    async with client.stream(method, path, json=body) as answer:
        if answer.status_code in (401, 403):
            raise UsageError(f"The engine {answer.url} refuses the key; give the right one.")
        if answer.status_code in (429, *range(500, 600)):
            raise UsageError(
                f"The engine {answer.url} answers with status {answer.status_code}; try again when it is ready."
            )
        if answer.status_code != 200:
            return None
        async for piece in answer.aiter_bytes():
            whole += piece
            if len(whole) > INFO_BYTES:
                raise ValueError(f"its answer to {path} is longer than {INFO_BYTES:,} bytes")
    try:
        return json.loads(whole)
    except ValueError:
        return None


def _usable(answer: Mapping[str, Any]) -> bool:
    """Whether an answer has one id and one log-probability for each of its tokens."""
    try:
        ids, scores = scored_ids(answer["choices"][0])
    except MALFORMED:
        return False
    return len(ids) == len(scores) == 1
