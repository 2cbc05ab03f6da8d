"""MCP servers that break the protocol or say too much, without the package. tests/external/mcp has real ones."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from glm5.errors import GradingError
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks.mcp import client
from glm5.tasks.mcp.atlas import AtlasEnv, AtlasProblem
from glm5.tasks.mcp.client import MOST_PARTS, MOST_RESULT, MOST_TOOLS, ServerConfig, Servers
from glm5.tasks.mcp.env import Setting


@contextlib.asynccontextmanager
async def session(_: Any) -> AsyncIterator[Any]:
    """Wraps in a group what is raised in it, as those of the package do."""
    async with anyio.create_task_group():
        yield None


@contextlib.contextmanager
def pipes(*_: Any) -> Iterator[None]:
    yield None


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([("sh", ""), ("sh", "")], "two tools"),
        ([(f"t{i}", "") for i in range(MOST_TOOLS + 1)], "too many tools"),
        ([(f"t{i}", "x" * 100_000) for i in range(20)], "too long descriptions"),
        (RuntimeError("odd"), "s does not start: odd"),
    ],
)
def test_a_list_of_tools_that_cannot_be_used_is_a_fault_of_the_environment(
    tools: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed(_: Any) -> list[Any]:
        if isinstance(tools, Exception):
            raise tools
        return [SimpleNamespace(name=name, description="", input_schema={"x": text}) for name, text in tools]

    monkeypatch.setattr(client, "_session", session)
    monkeypatch.setattr(client, "_tools", listed)
    monkeypatch.setattr(client, "Pipes", pipes)
    with pytest.raises(GradingError, match=said):
        Servers(None, [ServerConfig("s", ("s",))], "/").__enter__()  # type: ignore[arg-type]


def test_answers_are_bounded_before_they_are_checked() -> None:
    texts: list[Any] = [{"type": "text", "text": "\ud800" + "a" * MOST_RESULT, "annotations": {}}]
    result = {"content": [*texts, {"type": "image", "data": "x"}, 5, {"type": "text", "text": ""}] * 90_000,
              "structuredContent": {"a": "x" * 9999}, "isError": False}  # fmt: skip
    client._bounded(result)
    assert len(result["content"]) == MOST_PARTS and set(result) == {"content", "isError"}  # type: ignore[arg-type]
    assert [part["text"][:9] for part in result["content"][:4]] == ["?aaaaaaaa", "[image]", "[content]", ""]  # type: ignore[index]
    tools: dict[str, Any] = {"tools": [{"name": "a", "inputSchema": {}, "outputSchema": {"pattern": "(a+)+$"}}] * 9999}
    client._bounded(tools)
    assert len(tools["tools"]) == MOST_TOOLS + 1 and tools["tools"][0] == {"name": "a", "inputSchema": {}}


def test_a_task_whose_tools_no_server_has_cannot_be_played(tmp_path: Path) -> None:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(str(error))
    env = AtlasEnv(AtlasProblem("a/1", "a 1", "Look.", Setting(()), offered=frozenset({"github_search"})))
    with pytest.raises(GradingError, match="none of its tools, such as github_search"):
        env.start()
    env.close()
