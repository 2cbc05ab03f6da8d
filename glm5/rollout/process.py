"""Starts the gateway with its store, its admin key, and its own engine or given engines."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from glm5.chat.tokenizer import Tokenizer
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, UsageError
from glm5.obs.logs import get_logger
from glm5.rollout.completions_engine import find_out
from glm5.rollout.engines import EnginePool, LocalEngine, TokenSource
from glm5.rollout.gateway import Gateway, create_gateway
from glm5.rollout.store import Store
from glm5.serve.access import KEY_ALONE, find_key, hosts_answered
from glm5.serve.connection import Server, ServerConfig, address_error, announce, bind, bind_path, fitted, url_of
from glm5.serve.engine_thread import EngineThread
from glm5.serve.options import EngineOptions, Limits

log = get_logger("gateway")
LIMITS = Limits(requests=4096, samples=1024, header_seconds=60)
KEEP_ALIVE_SECONDS = 60
"""Seconds that a connection may be idle between requests. Agents keep connections open for 5 seconds (httpx) or longer.
An agent that sends a request just when the server closes the connection would see an error."""

_Sources = tuple[Sequence[TokenSource], Tokenizer, int]
"""Engines with their tokenizer and maximum sequence length."""


def run(
    directory: Path | None,
    engines: Sequence[str],
    store: Path,
    host: str = "127.0.0.1",
    port: int = 8100,
    *,
    socket_path: Path | None = None,
    admin_key_file: Path | None = None,
    engine_key: str | None = None,
    limits: Limits = LIMITS,
    options: EngineOptions | None = None,
    as_json: bool = False,
) -> None:
    """Serve sessions until interrupted. Without `engines` (base URLs), the model of `directory` runs in this process.
    With `engines`, only the tokenizer of `directory` is used; without a directory, the one that the first engine names.
    `socket_path` is a Unix socket to listen on as well, for agents in sandboxes; only our user may connect to it.

    Raises:
        UsageError: neither a directory nor engines; an address in use; an engine that does not answer.
        CheckpointError: the directory has no usable model or tokenizer.
        StoreError: the store cannot be opened or is in use.
    """
    if directory is None and not engines:
        raise UsageError("Give a checkpoint directory, or the engines with --engines URL.")
    limits = fitted(limits, files=2)
    with bind(host, port) as listener, contextlib.ExitStack() as stack:
        listeners = [listener]
        if socket_path is not None:
            listeners.append(stack.enter_context(bind_path(socket_path)))
        kept = stack.enter_context(Store(store))
        key, key_file = admin_key_of(admin_key_file, store)
        if engines:
            sources, tokenizer, length = _remote(engines, engine_key, directory)
        else:
            assert directory is not None
            sources, tokenizer, length = stack.enter_context(_local(directory, options or EngineOptions(), limits))
        pool = EnginePool(sources, tokenizer.vocab_size, limits.samples)
        app = create_gateway(
            Gateway(pool, kept, tokenizer, key, length, limits), allowed_hosts=hosts_answered(host, key, KEY_ALONE)
        )

        def ready(sockets: Iterable[socket.socket]) -> None:
            if not as_json:
                announce(sockets)
                return
            told: dict[str, str | None] = {"url": url_of(next(iter(sockets))), "store": str(store)}
            told["socket"] = None if socket_path is None else str(socket_path)
            print(json.dumps(told | {"admin_key_file": None if key_file is None else str(key_file)}), flush=True)

        config = ServerConfig(app, limits, limits.stop_seconds, timeout_keep_alive=KEEP_ALIVE_SECONDS)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                Server(config, ready).run(sockets=listeners)
        except OSError as error:  # another server took the port during loading
            raise address_error(error, host, port) from None


@contextlib.contextmanager
def _local(directory: Path, options: EngineOptions, limits: Limits) -> Iterator[_Sources]:
    engine = Engine.from_pretrained(directory, **asdict(options))
    if engine.tokenizer is None:
        raise CheckpointError(f"{directory} has no tokenizer.json; a gateway needs one.")
    thread = EngineThread(engine, limits.samples)
    thread.start()
    try:
        yield [LocalEngine(thread)], engine.tokenizer, engine.max_length
    finally:
        thread.stop(0.0)


def _remote(urls: Sequence[str], key: str | None, directory: Path | None) -> _Sources:
    found, errors = [], []
    for url in urls:
        try:
            found.append(find_out(url, key))
        except UsageError as error:
            errors.append(error)
            log.warning("%s", error)
    if not found:
        raise errors[0]
    tokenizer = Tokenizer.load(directory or found[0].local_tokenizer())
    return [info.source(key) for info in found], tokenizer, found[0].max_length or 1 << 20


def admin_key_of(file: Path | None, store: Path) -> tuple[str, Path | None]:
    """The admin key, and the path of its file if we created it, else None. A created key is reused after a restart,
    because the keys of sessions depend on it."""
    given = find_key("admin", None, file)
    if given is not None:
        return given, None
    path = store.with_name(store.name + ".admin-key")
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
        log.warning("The admin key is in %s.", path)
    key = find_key("admin", None, path)
    assert key is not None
    return key, path
