"""The family "mcp_atlas": questions whose answers take MCP servers; a judge checks claims about the answer (App. B).

Rows have MCP-Atlas's fields: PROMPT, ENABLED_TOOLS and GTFA_CLAIMS, the last two lists, or texts of them. A claim
counts 1, 0.5 or 0; a task is solved if its claims are covered by 0.75 on average.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.errors import ConfigError, DataError
from glm5.records import Env, StepResult
from glm5.tasks.contract import Family
from glm5.tasks.judged import Material, unjudged
from glm5.tasks.mcp.client import check_shown, read_servers, require
from glm5.tasks.mcp.env import McpEnv, McpProblem, Setting
from glm5.tasks.questions import table_rows

PASSES = 0.75


@dataclass(frozen=True)
class AtlasProblem(McpProblem):
    """One row."""

    claims: tuple[str, ...] = ()

    @property
    def material(self) -> Material:
        return Material("claims", (("TASK", self.prompt),), self.claims, passes=PASSES)

    def env(self) -> Env:
        return AtlasEnv(self)


class AtlasEnv(McpEnv):
    """Ends with an answer for the judge."""

    def _answer(self, text: str) -> StepResult:
        return unjudged(text, self._counts())


class AtlasFamily(Family):
    """The rows of `file` (JSONL or CSV).

    Args:
        servers: a JSON file with the servers, as clients have it (see `read_servers`).
        files: a folder that `/workspace`, where the servers run, shows at first.
        show: folders of the machine that the servers need, such as their environment, read-only.
        seconds: time of an episode, without the judge.
    """

    name = domain = "mcp_atlas"

    def __init__(
        self,
        seed: int = 0,
        *,
        file: str = "",
        servers: str = "",
        files: str = "",
        show: Sequence[str] = (),
        seconds: float = 600.0,
        max_turns: int = 100,
        thinking: bool = True,
    ) -> None:
        require()
        if not file or not servers or isinstance(show, str) or not seconds > 0 or max_turns < 1:
            raise ConfigError("mcp_atlas: set file to the rows and servers to a JSON file of MCP servers.")
        if files and not Path(files).is_dir():
            raise ConfigError(f"mcp_atlas: files={files!r} is not a folder.")
        check_shown(self.name, show)
        self._path, self._files = Path(file), Path(files) if files else None
        self._rows = table_rows(self._path)
        self._setting = Setting(read_servers(Path(servers)), tuple(show), max_turns, float(seconds), bool(thinking))

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self._rows)

    def problem(self, split: str, index: int) -> AtlasProblem:
        """Raises DataError for a row that does not fit, and for a split to train on."""
        if split != "heldout":
            raise DataError("mcp_atlas: the rows are for evaluation; none are to train on.")
        line, row = self._rows[index % self.size]
        try:
            prompt, claims = str(row["PROMPT"]).strip(), _texts(row["GTFA_CLAIMS"], "claim")
            offered = _texts(row.get("ENABLED_TOOLS") or [], "name")
            if not prompt or not claims:
                raise ValueError("PROMPT or GTFA_CLAIMS is empty")
        except (LookupError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError, MemoryError) as error:
            raise DataError(f"{self._path}, line {line}: not a task of MCP-Atlas: {error!s:.200}.") from None
        key = f"mcp_atlas {hashlib.sha256(prompt.encode('utf-8', 'replace')).hexdigest()}"
        name = f"mcp_atlas/{row.get('TASK') or line}"
        return AtlasProblem(
            name, key, prompt, self._setting, offered=frozenset(offered), files=self._files, claims=claims
        )


def _texts(value: Any, key: str) -> tuple[str, ...]:
    """A list of texts, or of tables with one at `key`; or a text that is such a list in JSON or Python."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = ast.literal_eval(value)
    if not isinstance(value, list):
        raise ValueError("a list is expected")
    found = [one[key] if isinstance(one, Mapping) else one for one in value]
    if not all(isinstance(text, str) and text.strip() for text in found):
        raise ValueError("a list of texts is expected")
    return tuple(found)
