"""Access control: API keys, allowed hosts, cross-site requests, concurrent requests. Imports no torch."""

from __future__ import annotations

import hmac
import ipaddress
import re
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm5.errors import UsageError
from glm5.serve.errors import ApiError, error_response

OPEN_PATHS = ("/", "/health", "/ping")
"""Answered without an API key."""
FLUSH_PATH = "/flush_cache"
GROUP_PATHS = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
"""Weights over `torch.distributed`: the server connects to an address that the request names."""
PREFILL_PATH = "/prefill"
"""The pages of a prompt, for another engine. Only engines ask; a router does not answer."""
PREFILL_HEADER = "x-glm5-prefill"
"""From a router to an engine: the Unix sockets of the engines that prefill for a request, best first."""
ADMIN_PATHS = (
    "/update_weights_from_disk",
    *GROUP_PATHS,
    PREFILL_PATH,
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    FLUSH_PATH,
)
"""Paths that change the server for everybody. They need the admin key; without one, the API key; without either, they
answer only this machine."""
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d{1,5})?")
_PORTS = {"http": "80", "https": "443"}
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
WORKERS_PATH = "/workers"
"""Path of a router only: the list of its engine processes. Paths under it act on one process. Protected like
ADMIN_PATHS."""
UNCOUNTED = (*OPEN_PATHS, "/metrics")
"""Not counted as concurrent requests: these, and ADMIN_PATHS, must work while a server is full."""
FORWARDED = frozenset(("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via"))
"""Headers of a proxy, or of a client that poses as one. They are believed only from a trusted proxy."""


@dataclass(frozen=True)
class Access:
    """Access rules apart from the API key.

    Attributes:
        admin_key: opens all paths. With it, the API key does not open ADMIN_PATHS.
        origins: other sites that may use this server, like "https://chat.example".
        proxies: addresses and networks with trusted X-Forwarded-For, -Host and -Proto headers.
    """

    admin_key: str | None = None
    origins: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                text = f"{origin!r:.80} is not an origin; give one like https://chat.example, without a path."
                raise UsageError(text)
        self.networks()

    def networks(self) -> list[Network]:
        """`proxies`, parsed. Raises UsageError for one that is not an address or network."""
        try:
            return [ipaddress.ip_network(proxy) for proxy in self.proxies]
        except ValueError as error:
            raise UsageError(f"A trusted proxy must be an IP address or a network: {error}.") from None


KEY_ALONE = Access()
"""No access rules apart from the API key."""


@dataclass(frozen=True)
class Asker:
    """The client of a request and the host it was addressed to, after resolving trusted proxies. `client` is None if an
    untrusted proxy, or a client that poses as one, hides it. `scheme` is None if only a proxy could know it."""

    client: str | None
    host: str
    scheme: str | None = None


class Guard:
    """ASGI middleware that refuses requests with a wrong key and cross-site requests made by a visitor's browser.

    A browser sends the requests of another site's page without asking the user. If the host name of that site resolves
    to our address (DNS rebinding), the page can also read the answers. The headers Origin and Sec-Fetch-Site show
    requests from another site; the header Host shows DNS rebinding. More than `requests` concurrent requests get 429.
    `observe` is called with the path and status of every answer. Every answer carries a request id. With `trusted`, a
    router in front has checked access already; only `requests` applies.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        access: Access,
        allowed_hosts: Collection[str] | None,
        requests: int,
        observe: Callable[[str, int], None],
        trusted: bool = False,
    ) -> None:
        self.app = app
        self.api_key = api_key
        self.access = access
        self.networks = access.networks()
        self.allowed_hosts = allowed_hosts
        self.requests = requests
        self.observe = observe
        self.trusted = trusted
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, request_id = scope["path"], b"req_" + uuid.uuid4().hex[:24].encode()
        counted = path not in UNCOUNTED and not _is_admin(path)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route's path pattern, so clients cannot invent label values.
                self.observe(getattr(scope.get("route"), "path", "other"), message["status"])
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id),
                    (b"request-id", request_id),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        error = None if self.trusted else self._refusal(scope)
        if error is None and counted and self.under_way >= self.requests:
            text = f"The server is at its limit of {self.requests} requests; retry later."
            error = ApiError(429, text, code="rate_limit_exceeded")
        if error is not None:
            await error_response(error, path)(scope, receive, told)
            return
        self.under_way += counted
        try:
            await self.app(scope, receive, told)
        finally:
            self.under_way -= counted

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, path = Headers(scope=scope), scope["path"]
        asker = asker_of(scope, headers, self.networks)
        if self.allowed_hosts is not None and _hostname(asker.host) not in self.allowed_hosts:
            return ApiError(403, f"The host {asker.host!r} is not allowed on this server.", code="wrong_host")
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        # Some admin paths accept GET and still change the server.
        acts = scope["method"] not in ("GET", "HEAD") or _is_admin(path)
        foreign = site in ("cross-site", "same-site") or _is_foreign(origin, asker)
        if acts and foreign and origin not in self.access.origins:
            return ApiError(
                403, "Cross-site requests are not allowed; allow a site with --allowed-origin.", code="cross_site"
            )
        if _is_admin(path) and self.access.admin_key is not None:
            if not knows(headers, self.access.admin_key):
                return ApiError(401, "This path needs the admin key.", code="invalid_admin_key")
        elif self.api_key is None:
            if _is_admin(path) and not (asker.client is not None and is_loopback(asker.client)):
                return ApiError(
                    403, "Without an API key, this path is only available from this machine.", code="local_only"
                )
        elif path not in OPEN_PATHS and not knows(headers, self.api_key, self.access.admin_key):
            text = "Wrong or missing API key; send it as Authorization: Bearer KEY or as x-api-key: KEY."
            return ApiError(401, text, code="invalid_api_key")
        return None


def add_guard(
    app: FastAPI,
    api_key: str | None,
    access: Access,
    allowed_hosts: Collection[str] | None,
    requests: int,
    observe: Callable[[str, int], None],
    trusted: bool = False,
) -> None:
    """Put a Guard before `app` and, if other sites may use it, the CORS middleware before the Guard."""
    app.add_middleware(
        Guard,
        api_key=api_key or None,
        access=access,
        allowed_hosts=allowed_hosts,
        requests=requests,
        observe=observe,
        trusted=trusted,
    )
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )


def asker_of(scope: Scope, headers: Headers, networks: Collection[Network] = ()) -> Asker:
    """The client of a request. X-Forwarded-For is read from the right, up to the first address that is not trusted."""
    peer = scope.get("client")
    client, host = (None if peer is None else str(peer[0])), headers.get("host", "")
    if not _is_among(client, networks):
        return Asker(client if FORWARDED.isdisjoint(headers.keys()) else None, host)
    # Repeated headers of one name form one list.
    hops = [hop.strip() for value in headers.getlist("x-forwarded-for") for hop in value.split(",")]
    while hops and _is_among(client, networks):
        client = hops.pop()
    if _is_among(client, networks) or _address(client) is None:
        client = None  # a proxy that does not name its client
    scheme = headers.get("x-forwarded-proto", "").rpartition(",")[2].strip().lower()
    host = headers.get("x-forwarded-host", host).rpartition(",")[2].strip()
    return Asker(client, host, scheme if scheme in _PORTS else None)


def _is_among(client: str | None, networks: Collection[Network]) -> bool:
    if not networks:
        return False
    address = _address(client)
    return address is not None and any(address in network for network in networks)


def _address(client: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(client or "")
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def offered(headers: Headers) -> list[str]:
    """The keys that a request sends."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    found = [bearer.strip()] if scheme.lower() == "bearer" else []
    return found + ([headers["x-api-key"].strip()] if "x-api-key" in headers else [])


def knows(headers: Headers, *keys: str | None) -> bool:
    """Whether a request carries one of the keys, in constant time."""
    found = [hmac.compare_digest(o.encode("latin-1"), key.encode()) for o in offered(headers) for key in keys if key]
    return any(found)


def _is_admin(path: str) -> bool:
    return path in ADMIN_PATHS or path == WORKERS_PATH or path.startswith(f"{WORKERS_PATH}/")


def _is_foreign(origin: str | None, asker: Asker) -> bool:
    if origin is None:
        return False
    scheme, _, rest = origin.partition("://")
    if asker.scheme is not None and scheme != asker.scheme:
        return True
    # A proxy may name the default port, which the browser omits.
    return not rest or rest not in (asker.host, asker.host.removesuffix(f":{_PORTS.get(scheme, '')}"))


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback one."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def hosts_answered(host: str, api_key: str | None, access: Access) -> set[str] | None:
    """Accepted Host names; None accepts all. Raises UsageError for a server without a key that would be open to
    others."""
    if not is_loopback(host) and not api_key:
        raise UsageError(f"Other machines can reach {host}; give an API key, or serve on 127.0.0.1.")
    pages = {name for origin in access.origins if (name := urlsplit(origin).hostname) is not None}
    return None if api_key else {*LOOPBACK_NAMES, host, *pages}
