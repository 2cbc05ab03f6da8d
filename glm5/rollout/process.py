"""Starts the gateway with its store, its admin key, and its own engine or given engines."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.errors import CheckpointError, Glm5Error, UsageError
from glm5.obs.logs import get_logger
from glm5.process import in_own_thread
from glm5.records import SamplingParams
from glm5.rollout.completions_engine import find_out
from glm5.rollout.engine_events import EngineLost
from glm5.rollout.engines import EnginePool, LocalEngine, TokenSource
from glm5.rollout.gateway import Gateway
from glm5.rollout.gateway_app import create_gateway
from glm5.rollout.store import Store
from glm5.serve.access import KEY_ALONE, hosts_answered
from glm5.serve.connection import SPARE, Server, ServerConfig, address_error, announce, bind, bind_path, fitted, url_of
from glm5.serve.engine_thread import EngineThread
from glm5.serve.keys import find_key
from glm5.serve.options import EngineOptions, Limits
from glm5.serve.samples import Delta

log = get_logger("gateway")
LIMITS = Limits(connections=4096 + SPARE, requests=4096, samples=1024, header_seconds=60)
PROBE_SECONDS = 5.0
"""Pause between two attempts to reach the engines that were down at the start."""

_Sources = tuple[list[TokenSource], Tokenizer, int]
"""Engines with their tokenizer and maximum sequence length."""


class AbsentEngine:
    """The place of an engine that was down at the start, until `join` finds it."""

    ready = False

    def __init__(self, url: str) -> None:
        self.name = url

    async def stream(
        self, ids: Sequence[int], params: SamplingParams, session: str, every: int = 1
    ) -> AsyncGenerator[Delta, None]:
        raise EngineLost(f"{self.name} was down at the start and has not answered since.")
        yield

    async def version(self) -> int:
        raise EngineLost(f"{self.name} was down at the start and has not answered since.")


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
    At least one engine must answer at the start; others join when they do. The shortest maximum length holds for all.
    `socket_path` is a Unix socket to listen on as well, for agents in sandboxes; only our user may connect to it.

    Raises:
        UsageError: neither a directory nor engines; an address in use; no engine answers.
        CheckpointError, ConfigError: the directory has no usable model or tokenizer.
        StoreError: the store cannot be opened or is in use.
    """
    # All that the arguments alone tell comes before the first file is made.
    given = find_key("admin", None, admin_key_file)
    if not engines:
        _check(directory)
    limits = fitted(limits, files=2)
    with bind(host, port) as listener, contextlib.ExitStack() as stack:
        listeners = [listener]
        if socket_path is not None:
            listeners.append(stack.enter_context(bind_path(socket_path)))
        if engines:
            sources, tokenizer, length = _remote(engines, engine_key, directory)
        kept = stack.enter_context(Store(store))
        key, key_file = admin_key_of(given, store)
        if not engines:
            assert directory is not None
            sources, tokenizer, length = stack.enter_context(_local(directory, options or EngineOptions(), limits))
        pool = EnginePool(sources, tokenizer.vocab_size, limits.samples)
        gateway = Gateway(pool, kept, tokenizer, key, length, limits)
        app = create_gateway(gateway, allowed_hosts=hosts_answered(host, key, KEY_ALONE))
        ended = threading.Event()
        stack.callback(ended.set)
        threading.Thread(target=join, args=(sources, engine_key, gateway, ended), daemon=True).start()

        def ready(sockets: Iterable[socket.socket]) -> None:
            if not as_json:
                announce(sockets)
                return
            told: dict[str, str | None] = {"url": url_of(next(iter(sockets))), "store": str(store)}
            told["socket"] = None if socket_path is None else str(socket_path)
            print(json.dumps(told | {"admin_key_file": None if key_file is None else str(key_file)}), flush=True)

        config = ServerConfig(app, limits, limits.stop_seconds)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                Server(config, ready).run(sockets=listeners)
        except OSError as error:  # another server took the port during loading
            raise address_error(error, host, port) from None


def _check(directory: Path | None) -> None:
    """Raise unless `directory` is a checkpoint with a tokenizer. Reads only its configuration."""
    if directory is None:
        raise UsageError("Give a checkpoint directory, or the engines with --engines URL.")
    GLM5Config.load(directory)
    if not (directory / "tokenizer.json").is_file():
        raise CheckpointError(f"{directory} has no tokenizer.json; a gateway needs one.")


@contextlib.contextmanager
def _local(directory: Path, options: EngineOptions, limits: Limits) -> Iterator[_Sources]:
    engine = in_own_thread(partial(Engine.from_pretrained, directory, **asdict(options)))
    assert engine.tokenizer is not None  # see `_check`
    thread = EngineThread(engine, limits.samples)
    thread.start()
    try:
        yield [LocalEngine(thread)], engine.tokenizer, engine.max_length
    finally:
        thread.stop(0.0)


def _remote(urls: Sequence[str], key: str | None, directory: Path | None) -> _Sources:
    sources, found, errors = list[TokenSource](), [], []
    for url in urls:
        try:
            found.append(find_out(url, key))
            sources.append(found[-1].source(key))
        except UsageError as error:
            errors.append(error)
            sources.append(AbsentEngine(url))
            log.warning("%s", error)
    if not found:
        raise errors[0]
    tokenizer = Tokenizer.load(directory or found[0].local_tokenizer())
    for info in found if directory is None else ():
        info.check_tokenizer(tokenizer)
    return sources, tokenizer, min(info.max_length or 1 << 20 for info in found)


def join(sources: list[TokenSource], key: str | None, gateway: Gateway, ended: threading.Event) -> None:
    """Ask the absent engines among `sources`, the engines of `gateway`, until each has answered and taken its place.
    One with another tokenizer does not take it. Runs in a thread of its own until `ended`."""
    refused: dict[str, str] = {}
    while any(isinstance(source, AbsentEngine) for source in sources) and not ended.wait(PROBE_SECONDS):
        for rank, source in enumerate(sources):
            if isinstance(source, AbsentEngine) and not ended.is_set():
                try:
                    info = find_out(source.name, key)
                except UsageError:
                    continue
                try:
                    info.check_tokenizer(gateway.tokenizer)
                except Glm5Error as error:
                    if refused.get(source.name) != str(error):  # else the log knows
                        log.error("It does not join: %s", error)
                    refused[source.name] = str(error)
                    continue
                gateway.max_length = min(gateway.max_length, info.max_length or gateway.max_length)
                sources[rank] = info.source(key)
                log.info("The engine %s has joined.", source.name)


def admin_key_of(given: str | None, store: Path) -> tuple[str, Path | None]:
    """The admin key, and the path of its file if we created it, else None. A created key is reused after a restart,
    because the keys of sessions depend on it."""
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
