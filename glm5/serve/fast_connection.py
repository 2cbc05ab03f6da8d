"""Connections parsed by httptools: less than half the time of h11. Import it only if httptools is installed."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from glm5.serve.connection import MOST_HEAD, Connection


class FastConnection(Connection, HttpToolsProtocol):  # type: ignore[misc]
    """See `Connection`."""

    _head: int | None = None
    """Bytes that arrived during the current head; None outside of heads."""

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
            if self._head > MOST_HEAD:  # httptools has no limit of its own
                self.send_400_response("The head of the request is too long.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    @property
    def receiving(self) -> str | None:
        if self.cycle is None:
            return "head"
        if self.cycle.more_body:
            return "body"
        return "head" if self.cycle.response_complete else None

    @property
    def head_began(self) -> bool:
        return self._head is not None
