"""Compiles grammars and prepares `bad_words` in separate threads. So neither the engine thread nor the event loop
waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from glm5.engine.grammar import Compiled, Grammars
from glm5.engine.penalties import check_bad_words
from glm5.errors import EngineError
from glm5.records import GrammarSpec, SamplingParams
from glm5.serve.errors import ApiError, Overloaded, Stopping

WORKERS = 2
WAITING = 128
"""Maximum grammars queued or compiling at once."""
SECONDS = 20.0
IN_USE_BYTES = 512 << 20
"""Maximum cost of grammars kept or in use: 64 different ones of usual size."""
FORMS = 16
"""Maximum different grammars per request."""
LISTS = 4
"""Maximum different lists per field and request."""


def check_forms(params: Sequence[SamplingParams]) -> None:
    """Raise EngineError for a request with too many different grammars, ApiError for one with too many different lists
    in a field (such as `bad_words`). With a large vocabulary, each list takes megabytes, and up to a second to
    prepare."""
    for field in ("bad_words", "stop", "allowed_token_ids"):
        values = {id(value): value for p in params if (value := getattr(p, field))}  # prompts may share a list
        if (count := len(set(values.values()))) > LISTS:
            text = f"The request has {count} different lists in {field}; at most {LISTS} are allowed."
            raise ApiError(400, text, param=field)
    count = len({(p.grammar.kind, p.grammar.value, p.grammar.many) for p in params if p.grammar is not None})
    if count > FORMS:
        raise EngineError(f"The request has {count} different grammars or schemas; at most {FORMS} are allowed.")


class Compiler:
    """Compiles at most `workers` grammars at once, with at most `waiting` queued or compiling. A request waits up to
    `seconds` for its grammar. Requests for the same grammar share the work. `glm5.engine.grammar` bounds the size and
    the work of a grammar, so every compilation ends. All grammars in use together cost at most `in_use` bytes."""

    def __init__(
        self,
        grammars: Callable[[], Grammars],
        *,
        workers: int = WORKERS,
        waiting: int = WAITING,
        seconds: float = SECONDS,
        in_use: int = IN_USE_BYTES,
    ) -> None:
        self._grammars = grammars
        self._in_use = in_use
        self._waiting, self._seconds = waiting, seconds
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="glm5-grammar")
        self._work: dict[GrammarSpec, Future[Compiled]] = {}
        self._readers: dict[GrammarSpec, int] = {}

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """The compiled grammar. Call it from one event loop only. Work that has not begun is dropped
        when no request waits for it any more.

        Raises:
            EngineError: the grammar cannot be enforced, or did not compile in time.
            Overloaded: too many other grammars are queued, compiling or in use.
            MissingExtraError: llguidance is not installed.
        """
        if spec not in self._work:
            if len(self._work) >= self._waiting:
                raise Overloaded("The server is at its limit of grammars that wait for compilation; retry later.")
            self._work[spec] = self._pool.submit(self._compiled, spec)
        work = self._work[spec]
        self._readers[spec] = self._readers.get(spec, 0) + 1
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(asyncio.wrap_future(work))
        except asyncio.CancelledError:
            if not work.cancelled():
                raise
            raise Stopping("The server is shutting down.") from None
        except TimeoutError:
            if not work.running():
                raise Overloaded("The grammar waited too long in the queue for compilation; retry later.") from None
            raise EngineError(f"The grammar did not compile within {self._seconds:g} s; make it smaller.") from None
        finally:
            self._readers[spec] -= 1
            if not self._readers[spec]:
                del self._readers[spec]
                if work.done() or work.cancel():
                    self._work.pop(spec, None)
                else:
                    work.add_done_callback(lambda _: self._work.pop(spec, None))

    async def spell(self, params: Sequence[SamplingParams]) -> None:
        """Prepare all `bad_words`, so the engine need not do it. Raises EngineError for a list that is not valid."""
        for words in dict.fromkeys(p.bad_words for p in params if p.bad_words):
            check_bad_words(words)
            await asyncio.to_thread(self._spelled, words)

    def _spelled(self, words: tuple[str, ...]) -> None:
        self._grammars().words.spelling(words)

    def _compiled(self, spec: GrammarSpec) -> Compiled:
        grammars = self._grammars()
        if not grammars.has_room(spec, self._in_use):
            raise Overloaded("The server is at its limit of grammars in use; retry later.")
        return grammars.compile(spec)

    def close(self) -> None:
        """Drop work that has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
