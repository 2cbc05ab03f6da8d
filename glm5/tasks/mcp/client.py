"""MCP servers in a room, behind the client of the package `mcp` (an extra), for callers without an event loop.

A server is a program of the room that talks on its standard streams. It may come from anywhere and has no network. What
a tool answers is untrusted text; a server that fails, hangs or breaks the protocol is an answer that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError, GradingError, MissingExtraError, text_of
from glm5.records import ToolCall
from glm5.sandbox.environment import NamespaceEnvironment
from glm5.sandbox.room_pipes import MOST_LINE, Pipes
from glm5.tasks.contract import ToolSpec

START_S, CALL_S = 60.0, 120.0
MOST_RESULT = 50_000
"""Characters of a tool's answer."""
MOST_PARTS = 1000
"""Parts of a tool's answer; further ones are left out."""
MOST_TOOLS, MOST_SPECS = 1000, 1_000_000
"""Tools of a room's servers, and characters of their descriptions in all."""
MOST_NAME = 64
"""Characters of a function's name in OpenAI's format."""


@dataclass(frozen=True)
class ServerConfig:
    """How a server is started."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def read_servers(path: Path) -> list[ServerConfig]:
    """The servers of a file of the usual form, `{"mcpServers": {NAME: {"command", "args", "env"}}}`. Raises
    DataError for another one."""
    try:
        rows = json.loads(path.read_bytes())["mcpServers"]
        found = [
            ServerConfig(name, tuple(map(str, (row["command"], *row.get("args", ())))), dict(row.get("env") or {}))
            for name, row in rows.items()
        ]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        form = '{"mcpServers": {NAME: {"command": ..., "args": [...], "env": {...}}}}'
        raise DataError(f"{path} is not of the form {form}: {error!r:.100}.") from None
    if not found or not all(isinstance(value, str) for one in found for value in one.env.values()):
        raise DataError(f"{path} names no server, or an environment variable that is no text.")
    return found


def check_shown(family: str, show: Sequence[str]) -> None:
    """Raises ConfigError for a folder that is to be shown and is not there."""
    if missing := [path for path in show if not Path(path).exists()]:
        raise ConfigError(f"{family}: show names {missing[0]!r}, which does not exist.")


def require() -> None:
    """Raises MissingExtraError without the package `mcp`."""
    try:
        import mcp_types  # noqa: F401
        from mcp import ClientSession  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("mcp", "mcp") from error


@dataclass(frozen=True)
class Tool:
    """A tool with the server that has it."""

    server: str
    name: str
    spec: ToolSpec


class Servers:
    """Servers that run in one room. `with` starts and stops them; raises GradingError if one does not start."""

    def __init__(self, room: NamespaceEnvironment, configs: Sequence[ServerConfig], cwd: str) -> None:
        self._room, self._configs, self._cwd = room, configs, cwd
        self._stack = contextlib.ExitStack()
        self._sessions: dict[str, Any] = {}
        self._specs = 0
        self.tools: dict[str, Tool] = {}
        """By the name under which an agent calls them: that of the server, "_", and the tool's."""

    def __enter__(self) -> Servers:
        try:
            return self._enter()
        except Exception as error:  # leaving a session wraps what was raised in a group
            inner = _innermost(error)
            if isinstance(inner, GradingError):
                raise inner from None
            raise GradingError(f"the MCP servers do not start: {_reason(error)}") from error

    def _enter(self) -> Servers:
        from anyio.from_thread import start_blocking_portal

        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            for config in self._configs:
                pipes = stack.enter_context(Pipes(self._room, config.argv, self._cwd, config.env))
                try:
                    session = stack.enter_context(self._portal.wrap_async_context_manager(_session(pipes)))
                    listed = self._portal.call(_tools, session)
                except Exception as error:
                    raise GradingError(f"the MCP server {config.name} does not start: {_reason(error)}") from error
                self._sessions[config.name] = session
                for tool in listed:
                    self._add(config.name, tool)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):  # a server that has ended already
            self._stack.close()

    def _add(self, server: str, tool: Any) -> None:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}_{tool.name}")[:MOST_NAME]
        if name in self.tools:
            raise GradingError(f"two tools of the MCP servers are called {name}.")
        shape = {"name": name, "description": (tool.description or "")[:4000], "parameters": dict(tool.input_schema)}
        self._specs += len(json.dumps(shape))
        if len(self.tools) >= MOST_TOOLS or self._specs > MOST_SPECS:
            raise GradingError(
                f"the MCP server {server} has too many tools, or too long descriptions: at most {MOST_TOOLS} of "
                f"{MOST_SPECS} characters in all."
            )
        self.tools[name] = Tool(server, tool.name, {"type": "function", "function": shape})

    def call(self, call: ToolCall) -> str:
        """What a tool answers; failures begin with "Error: "."""
        tool = self.tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name[:MOST_NAME]}"
        try:
            done = self._portal.call(_call, self._sessions[tool.server], tool.name, dict(call.arguments))
        except Exception as error:
            return f"Error: {_reason(error)}"
        text = "\n".join(part.text for part in done.content)[:MOST_RESULT]
        return f"Error: {text}" if done.is_error else text or "[no output]"


async def _tools(session: Any) -> list[Any]:
    import anyio
    from mcp_types import PaginatedRequestParams

    found, cursor = list[Any](), None
    with anyio.fail_after(START_S):
        for _ in range(100):
            page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            found += page.tools
            cursor = page.next_cursor
            if len(found) > MOST_TOOLS:
                break
            if not cursor:
                return found
    raise GradingError("its list of tools is too long, or does not end.")


async def _call(session: Any, name: str, arguments: dict[str, Any]) -> Any:
    import anyio

    with anyio.fail_after(CALL_S):
        return await session.call_tool(name, arguments)


def _bounded(result: dict[str, Any]) -> None:
    """Keep of a server's answer what is used of it, for the package checks every part in the thread of all servers: of
    a tool's answer its first texts, of a list of tools no schemas of answers."""
    result.pop("structuredContent", None)
    if isinstance(parts := result.get("content"), list):
        result["content"] = [_text_part(part) for part in parts[:MOST_PARTS]]
    if isinstance(tools := result.get("tools"), list):
        result["tools"] = [
            {key: value for key, value in tool.items() if key in ("name", "description", "inputSchema")}
            if isinstance(tool, dict)
            else tool
            for tool in tools[: MOST_TOOLS + 1]
        ]


def _text_part(part: Any) -> dict[str, str]:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
    known = kind == "text" and isinstance(text, str)
    shown = str(text)[:MOST_RESULT] if known else f"[{kind or 'content'!s:.40}]"
    return {"type": "text", "text": shown.encode("utf-8", "replace").decode()}


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    """The innermost reason of a failure, in short."""
    error = _innermost(error)
    text = "it did not answer in time" if isinstance(error, TimeoutError) else text_of(error) or type(error).__name__
    return " ".join(text.split())[:400]


@contextlib.asynccontextmanager
async def _session(pipes: Pipes) -> AsyncIterator[Any]:
    """A session over the pipes of a program, after the handshake."""
    import anyio
    import mcp_types
    from mcp import ClientSession
    from mcp.shared.message import SessionMessage

    heard, reading = anyio.create_memory_object_stream[Any](0)
    writing, told = anyio.create_memory_object_stream[Any](0)
    os.set_blocking(pipes.output, False)

    async def hear() -> None:
        rest = b""
        async with heard:
            while True:
                await anyio.wait_readable(pipes.output)
                chunk = os.read(pipes.output, 1 << 16)
                *lines, rest = (rest + chunk).split(b"\n")
                if not chunk or len(rest) > MOST_LINE:
                    return
                for line in lines:
                    with contextlib.suppress(ValueError, RecursionError):  # no message, such as a line of a log
                        said = json.loads(line)
                        if isinstance(said, dict) and isinstance(result := said.get("result"), dict):
                            _bounded(result)
                        await heard.send(SessionMessage(mcp_types.jsonrpc_message_adapter.validate_python(said)))

    async def tell() -> None:
        async with told:
            async for message in told:
                data = message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                while data:
                    await anyio.wait_writable(pipes.input)
                    data = data[os.write(pipes.input, data) :]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hear)
        tasks.start_soon(tell)
        try:
            async with ClientSession(reading, writing) as session:
                with anyio.fail_after(START_S):
                    await session.initialize()
                yield session
        finally:
            tasks.cancel_scope.cancel()


def chosen(configs: Sequence[ServerConfig], names: Sequence[str]) -> list[ServerConfig]:
    """The servers with these names. Raises ConfigError for one that there is not."""
    known = {config.name: config for config in configs}
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"the file of MCP servers has no {missing[0]}; it has {', '.join(known)}.")
    return [known[name] for name in names]
