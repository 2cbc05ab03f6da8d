"""Connections parsed by h11, which is in Python and always installed."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glm5.serve.connection import Connection

_RECEIVING = {h11.IDLE: "head", h11.SEND_BODY: "body", h11.ERROR: "head"}


class PlainConnection(Connection, H11Protocol):  # type: ignore[misc]
    """See `Connection`."""

    @property
    def receiving(self) -> str | None:
        return _RECEIVING.get(self.conn.their_state)

    @property
    def head_began(self) -> bool:
        return self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
