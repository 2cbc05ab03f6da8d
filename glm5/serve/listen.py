"""The listening socket, and the address to print. Free of torch."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from glm5.errors import UsageError
from glm5.serve.access import LOOPBACK_NAMES, Access, is_loopback


def hosts_answered(host: str, api_key: str | None, access: Access) -> set[str] | None:
    """Accepted Host names; None accepts all. Raises UsageError if a server without a key would be open to others."""
    if not is_loopback(host) and not api_key:
        raise UsageError(f"Serving on {host} lets others in; give an API key, or serve on 127.0.0.1.")
    pages = {name for origin in access.origins if (name := urlsplit(origin).hostname) is not None}
    return None if api_key else {*LOOPBACK_NAMES, host, *pages}


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a connection fails at once until the model is loaded."""
    # Without the protocol number, asyncio does not set TCP_NODELAY, and answers wait 40 ms for an ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise address_error(error, host, port) from None
    return listener


def address_error(error: OSError | OverflowError, host: str, port: int) -> UsageError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return UsageError(f"Port {port} on {host} is in use; choose another one with --port.")
    return UsageError(f"Cannot serve on {host}:{port}: {error}.")


def announce(sockets: Iterable[socket.socket]) -> None:
    """Print the server's address on stdout."""
    for listener in sockets:
        host, port = listener.getsockname()[:2]
        with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the server
            print(f"Ready on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
