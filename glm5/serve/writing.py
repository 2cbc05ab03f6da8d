"""Long JSON answers, written in pieces: the encoder holds the GIL until it is done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from starlette.responses import Response

PIECE = 64
"""Entries of an iterator that are encoded at once."""
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_pieces(value: Any) -> Iterator[str]:
    """`value` as JSON. Iterators in it become lists; their entries are created only when they are written."""
    if isinstance(value, dict):
        yield "{"
        for i, (name, one) in enumerate(value.items()):
            yield f"{',' if i else ''}{encode(name)}:"
            yield from json_pieces(one)
        yield "}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for i, one in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(one)
        yield "]"
    elif isinstance(value, Iterator):
        before = "["
        while some := list(islice(value, PIECE)):
            yield before + encode(some)[1:-1]
            before = ","
        yield "]" if before == "," else "[]"
    else:
        yield encode(value)


def json_answer(value: Any) -> Response:
    """A response with `value`. Call it in a thread, not in the event loop."""
    return Response(b"".join(piece.encode() for piece in json_pieces(value)), media_type="application/json")
