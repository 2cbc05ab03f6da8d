"""A chat endpoint as an agent sees it: messages in, one reply out, streamed, over plain HTTP.

Dialects: OpenAI Chat Completions, Completions for base models, and Anthropic Messages. What comes back is untrusted: it
is bounded, and what does not have the form of a reply is an `EndpointError`, or a call that is marked as broken.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from glm5.agents import wire
from glm5.agents.connections import Connections, read_rest
from glm5.errors import EngineError, MissingExtraError, UsageError
from glm5.records import Message

try:
    import httpx
except ImportError as error:
    raise MissingExtraError("httpx", "serve") from error

Found = TypeVar("Found")
Dialect = Literal["openai", "completions", "anthropic"]
MOST_BYTES = 16 << 20
"""Maximum bytes of one answer."""
COMPRESSED = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress"})
MOST_SAID = 1 << 16
"""Maximum bytes that are read of a refusal."""
OWNER = "glm5"
"""What `glm5 serve` says of its model: who owns it."""
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LENGTH = re.compile(
    r"(prompt|input|messages|context|sequence).{0,80}(too (long|large|many)|length|window|size|limit|exceed|maximum)"
    r"|(too (long|large)|too many|exceed|maximum|longer).{0,80}(prompt|input|context|sequence)",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_LIMIT = re.compile(r"^[^.]{0,40}max_(completion_|new_|output_)?tokens|quota|rate limit|credit", re.IGNORECASE)
PAUSES_S = (0.5, 2.0, 8.0, 20.0)
"""Seconds before each repetition of a request that failed for a reason that may pass."""


class EndpointError(EngineError):
    """The model's server refused a request, could not be reached, or answered something that is not a reply.
    `refused`: it answered that it will not answer this request. `too_long`: it seems to have refused it for the length
    of its prompt. `may_pass`: the same request may get an answer later. `tries`: the requests that were made."""

    refused = False
    too_long = False
    may_pass = False
    tries = 0


@dataclass(frozen=True)
class Reply:
    """One answer. `broken` has, by the number of a call, what the model wrote as arguments if that is not a JSON
    object; the call's arguments are then empty. Token counts are the server's; 0 if it does not tell them. `tries`
    counts the requests that it took."""

    message: Message
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    broken: Mapping[int, str] = field(default_factory=dict)
    tries: int = 1


class Model(Protocol):
    """What an agent needs of a model."""

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: wire.OnDelta | None = None
    ) -> Reply:
        """Raises EndpointError."""
        ...


class Endpoint:
    """A model behind a URL.

    Args:
        url: the server, with or without the path `/v1`.
        name: of the model; "" takes the first one that the server lists.
        thinking: tokens of thinking to ask for in Messages; 0 asks for none. Chat Completions leave it to the server.
        seconds: maximum time of silence while waiting for an answer.
        whole_s: maximum time of one answer's body.

    Raises UsageError for what is not an http or https URL.
    """

    def __init__(
        self,
        url: str,
        name: str = "",
        *,
        dialect: Dialect = "openai",
        key: str | None = None,
        max_tokens: int = 8192,
        temperature: float | None = None,
        thinking: int = 0,
        seconds: float = 600.0,
        whole_s: float = 3600.0,
        pauses: Sequence[float] | None = None,
    ) -> None:
        host = _host(url)
        if host is None:
            raise UsageError(f"{url!r:.80} is neither a checkpoint directory nor an http(s) URL of a server.")
        if dialect not in wire.DIALECTS:
            raise UsageError(f"The dialect is one of {', '.join(wire.DIALECTS)}, not {dialect!r:.40}.")
        self.base = url.rstrip("/").removesuffix("/v1")
        self._wire = wire.DIALECTS[dialect]
        self._options: dict[str, Any] = {"max_tokens": max_tokens} | (
            {} if temperature is None else {"temperature": temperature}
        )
        if thinking and dialect == "anthropic":
            self._options |= {"thinking": {"type": "enabled", "budget_tokens": thinking}}
        self._pauses = PAUSES_S if pauses is None else pauses
        client = httpx.Client(
            timeout=httpx.Timeout(seconds, connect=10.0, pool=None),
            # As many connections as threads ask. At a limit, httpcore closes some that it takes for idle ones.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=host not in ("127.0.0.1", "localhost", "::1"),
            headers=self._wire.headers(key) | {"accept-encoding": "identity"},
        )
        self._connections = Connections(client)
        self._names, self._whole_s = [name] if name else [], whole_s  # one list for all that `asking` makes
        self._ours: list[bool] = []  # as well

    def close(self) -> None:
        """Close the connections. A request of another thread fails at once, or within 10 s if it still connects."""
        self._connections.close()

    def asking(self, **options: Any) -> Endpoint:
        """The same model over the same connections, with other or more fields in its requests, such as `top_p`."""
        other = copy.copy(self)
        other._options = self._options | options
        return other

    def answering(self, schema: Mapping[str, Any]) -> Endpoint:
        """`asking` for answers that are JSON of this schema; servers may refuse or ignore that."""
        form = {"name": "verdict", "strict": True, "schema": schema}
        return self.asking(response_format={"type": "json_schema", "json_schema": form})

    @property
    def name(self) -> str:
        """The model's name; asks the server if it was not given."""
        if not self._names:
            try:
                first = self._listed()[0]["id"]
                if not isinstance(first, str):
                    raise TypeError(f"its first one is {first!r:.40}")
                self._names.append(first)
            except (EndpointError, LookupError, TypeError) as error:
                raise EndpointError(f"{self.base} does not list its models; name one. ({error})") from error
        return self._names[0]

    @property
    def ours(self) -> bool:
        """Whether `glm5 serve` has the model. Asks the server once. Raises EndpointError if it does not answer."""
        if not self._ours:
            try:
                self._ours.append(any(one["id"] == self.name and one["owned_by"] == OWNER for one in self._listed()))
            except EndpointError as error:
                if error.may_pass:
                    raise
                self._ours.append(False)
            except (LookupError, TypeError):
                self._ours.append(False)
        return self._ours[0]

    def prompted(self, thinking: bool | None, render_tools: bool, template: bool = True) -> tuple[Endpoint, bool]:
        """The model with `chat_template_kwargs`, if `template`, and whether its requests have the tools.

        `thinking`: whether to think; None says nothing of it. Without `render_tools` no prompt shows the tools: a
        server of ours gets them, to read calls, and is told so; another would show or refuse them, so it gets none.
        Raises EndpointError if that server does not answer.
        """
        kwargs = {} if thinking is None else {"enable_thinking": thinking}
        sent = render_tools or (template and self.ours)
        if sent and not render_tools:
            kwargs["render_tools"] = False
        return self.asking(chat_template_kwargs=kwargs) if template and kwargs else self, sent

    def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], on_delta: wire.OnDelta | None = None
    ) -> Reply:
        body = self._wire.request(self.name, messages, tools) | self._options
        data = json.dumps(body, ensure_ascii=True).encode()
        told = on_delta or (lambda kind, text: None)
        return self._repeated(lambda tries: replace(self._once(data, told), tries=tries), told)

    def _repeated(self, ask: Callable[[int], Found], told: wire.OnDelta) -> Found:
        """What `ask` returns, which gets the number of the try, after pauses if it fails for a reason that may pass."""
        for tries, pause in enumerate((*self._pauses, None), 1):
            try:
                return ask(tries)
            except _MayPass as error:
                told("wait", "")
                if pause is None or self._connections.closed_within(pause):
                    failed = EndpointError(str(error))
                    failed.may_pass, failed.tries = True, tries
                    raise failed from error
            except EndpointError as error:
                error.tries = tries
                raise
        raise AssertionError("the last pause is None")

    def _once(self, data: bytes, on_delta: wire.OnDelta) -> Reply:
        url = self.base + self._wire.path
        try:
            with self._stream("POST", url, data) as answer:
                draft, chunks = wire.Draft(on_delta), answer.iter_raw()
                stream = _told(_bounded(chunks, MOST_BYTES, self._whole_s), on_delta)
                if "text/event-stream" in answer.headers.get("content-type", ""):
                    try:
                        for event in _events(stream):
                            self._wire.feed(draft, event)
                        read_rest(answer, chunks)
                    except httpx.HTTPError:  # after the last word nothing is missing
                        if not draft.finish_reason:
                            raise
                else:
                    self._wire.whole(draft, _whole(b"".join(stream)))
        except wire.StreamFailed as error:
            raise _MayPass(f"{url} failed in the middle of an answer: {error}") from error
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise EndpointError(f"{url} answered something that is not a reply: {error!r:.200}") from error
        if not draft.finish_reason:
            raise _MayPass(f"{url} broke off in the middle of an answer.")
        message, broken = draft.message()
        return Reply(message, draft.finish_reason, draft.prompt_tokens, draft.completion_tokens, broken)

    def _listed(self) -> Any:
        """The models that the server lists; anything, if it lists none. A server that cannot be reached, which is most
        often a wrong address, is not asked again."""
        url = f"{self.base}/v1/models"

        def ask(tries: int) -> Any:
            try:
                with self._stream("GET", url) as answer:
                    return _json(b"".join(_bounded(answer.iter_raw(), MOST_BYTES)))
            except _Unreachable as error:
                failed = EndpointError(str(error))
                failed.may_pass = True
                raise failed from error

        return self._repeated(ask, lambda kind, text: None)["data"]

    @contextlib.contextmanager
    def _stream(self, method: str, url: str, data: bytes | None = None) -> Iterator[httpx.Response]:
        """An answer with status 200 that is not compressed: a few bytes of those can grow without end. Raises
        EndpointError, also in the block for connections that break."""
        try:
            with self._connections.stream(method, url, data) as answer:
                encoding = answer.headers.get("content-encoding", "").lower()
                if answer.status_code != 200:
                    raise self._refusal(url, answer.status_code, _beginning(answer.iter_raw(), MOST_SAID))
                if not COMPRESSED.isdisjoint(one.strip() for one in encoding.split(",")):
                    raise EndpointError(f"{url} answered in the encoding {encoding!r:.40}, without being asked to.")
                yield answer
        except (httpx.RequestError, httpx.StreamError) as error:
            raise _Unreachable(f"{url} does not answer: {str(error) or type(error).__name__}.") from error
        except ConnectionAbortedError as error:
            raise EndpointError(str(error)) from error

    def _refusal(self, url: str, status: int, body: bytes) -> EndpointError:
        try:
            found = json.loads(body)["error"]
            said = str(found["message"] if isinstance(found, dict) else found)
        except (ValueError, LookupError, TypeError, RecursionError):
            said = body.decode("utf-8", "replace")
        text = f"{url} refused the request with status {status}: {' '.join(said.split())[:400]}"
        refusal = _MayPass(text) if status in RETRIED else EndpointError(text)
        refusal.refused = status in (400, 403, 413, 422)
        length = _LENGTH.search(said) is not None and _OTHER_LIMIT.search(said) is None
        refusal.too_long = status in (400, 413, 422) and length
        return refusal


class _MayPass(EndpointError):
    """A failure that the same request may not meet again."""

    may_pass = True


class _Unreachable(_MayPass):
    """The server does not answer."""


def _host(url: str) -> str | None:
    """The host of an http or https URL."""
    try:
        parts = urlsplit(url)
        port = parts.port  # may be no port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return None
    return parts.hostname if parts.scheme in ("http", "https") and port != 0 else None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"The server's answer is not JSON: {data[:80]!r}.") from error


def _whole(data: bytes) -> Any:
    """The JSON of an answer that is not streamed. One that only misses its end may come whole the next time."""
    try:
        return _json(data)
    except EndpointError as error:
        text, cause = data.strip(), error.__cause__
        at_the_end = isinstance(cause, json.JSONDecodeError) and cause.pos >= len(cause.doc.rstrip())
        if at_the_end or (text.startswith(b"{") and not text.endswith((b"}", b"{"))):
            raise _MayPass(f"The server's answer breaks off: {data[-80:]!r}.") from error
        raise


def _beginning(chunks: Iterator[bytes], most: int) -> bytes:
    """At most the first `most` bytes; reading stops after a minute."""
    read, began = bytearray(), time.monotonic()
    for chunk in chunks:
        read += chunk
        if len(read) >= most or time.monotonic() - began > 60:
            break
    return bytes(read[:most])


def _bounded(chunks: Iterator[bytes], most: int, seconds: float = 60.0) -> Iterator[bytes]:
    size, began = 0, time.monotonic()
    for chunk in chunks:
        if time.monotonic() - began > seconds:
            raise EndpointError(f"The server's answer took longer than {seconds:g} seconds.")
        size += len(chunk)
        if size > most:
            raise EndpointError(f"The server's answer has more than {most >> 10:,} KiB.")
        yield chunk


def _told(chunks: Iterator[bytes], on_delta: wire.OnDelta) -> Iterator[bytes]:
    """Lets the caller stop an answer that only says that it is not dead."""
    for chunk in chunks:
        on_delta("wait", "")
        yield chunk


def _events(chunks: Iterator[bytes]) -> Iterator[Any]:
    """The JSON values of server-sent events, up to the one that says that there are no more."""
    rest: list[bytes] = []
    for chunk in chunks:
        rest.append(chunk)
        if b"\n" not in chunk:
            continue
        *lines, last = b"".join(rest).split(b"\n")
        rest = [last]
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data:
                continue
            if data == b"[DONE]":
                return
            event = _json(data)
            yield event
            if isinstance(event, dict) and event.get("type") == "message_stop":
                return
