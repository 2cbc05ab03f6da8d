"""`task.toml` of a Harbor task folder: reads schema 1.0 to 1.4, writes 1.4.

Deprecated fields are read as their successors, with one warning each. Unknown keys are kept and written again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from glm5.config.toml_reader import parse_toml
from glm5.config.toml_writer import write_toml
from glm5.errors import ConfigError, DataError

SCHEMA = "1.4"
_SCHEMAS = ("1.0", "1.1", "1.2", "1.3", SCHEMA)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_STEP = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_])?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([GMK])B?", re.IGNORECASE)
_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

Seconds = Annotated[float, Field(gt=0, le=7 * 86_400)]
Pause = Annotated[float, Field(ge=0, le=86_400)]
Megabytes = Annotated[int, Field(gt=0, le=1 << 30)]
Env = dict[str, str]
NetworkMode = Literal["public", "no-network", "allowlist"]


class Section(pydantic.BaseModel):
    """A table of `task.toml`. Keys that no field has are kept."""

    model_config = pydantic.ConfigDict(
        extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class Author(Section):
    name: str
    email: str | None = None


class TaskInfo(Section):
    """`[task]`: what a registry shows."""

    name: str
    """`organisation/name`."""
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @pydantic.field_validator("name")
    @classmethod
    def _organisation_and_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or ".." in value:
            raise ValueError("a task's name is organisation/name, of letters, digits, dots, hyphens and underscores")
        return value


class Healthcheck(Section):
    """A command that succeeds once the environment is ready."""

    command: str
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    start_interval_sec: Pause = 5.0
    retries: Annotated[int, Field(ge=0, le=10_000)] = 3


class Environment(Section):
    """`[environment]`: where agent and verifier run."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    """A base image, if there is no Dockerfile."""
    os: Literal["linux", "windows"] = "linux"
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: Env = {}
    """Values may be templates: `${NAME}` or `${NAME:-default}`."""
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    """Overrides the Dockerfile's WORKDIR."""
    network_mode: NetworkMode = "public"
    allowed_hosts: list[str] | None = None


class Agent(Section):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class Collect(Section):
    """A command after the agent's end whose files the verifier wants to see."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class Verifier(Section):
    timeout_sec: Seconds = 600.0
    env: Env = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    collect: list[Collect] = []

    @pydantic.model_validator(mode="after")
    def _modes_agree(self) -> Verifier:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError('environment_mode = "shared" and a [verifier.environment] exclude each other')
        return self


class Solution(Section):
    env: Env = {}


class Step(Section):
    """One of several instructions that are played after each other in the same environment."""

    name: str
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | dict[str, Any]] = []

    @pydantic.field_validator("name")
    @classmethod
    def _folder(cls, value: str) -> str:
        if not _STEP.fullmatch(value):
            raise ValueError("a step's name is that of a folder: letters, digits, dots, hyphens and underscores")
        return value


class TaskConfig(Section):
    """The content of `task.toml`."""

    schema_version: str = SCHEMA
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    artifacts: list[str | dict[str, Any]] = []
    task: TaskInfo | None = None
    metadata: dict[str, Any] = {}
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: Environment = Environment()
    solution: Solution = Solution()
    steps: list[Step] | None = None

    @pydantic.field_validator("steps")
    @classmethod
    def _different(cls, value: list[Step] | None) -> list[Step] | None:
        names = [step.name.casefold() for step in value or []]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return value


def read_config(text: str, where: str = "task.toml") -> tuple[TaskConfig, list[str]]:
    """The checked content of a `task.toml` and one warning per deprecated field. Raises DataError, naming `where`."""
    try:
        raw = parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not TOML that can be read: {error}") from None
    try:
        warnings = _normalise(raw)
        return TaskConfig.model_validate(raw), warnings
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in found["loc"])
        raise DataError(f"{where}: {key or 'the file'}: {found['msg']}.") from None
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def write_config(config: TaskConfig) -> str:
    """`task.toml` of schema 1.4 with the fields that were set and the unknown keys. Raises DataError for unknown keys
    with values that TOML cannot hold."""
    values = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    values.pop("schema_version", None)
    try:
        return write_toml({"schema_version": SCHEMA, **values})
    except ConfigError as error:
        raise DataError(f"task.toml: {error}") from None


def resolve_env(env: Mapping[str, str], given: Mapping[str, str], where: str) -> dict[str, str]:
    """Fill in the templates of `env` from `given`, or from their defaults; the machine's own environment is not read.
    Raises DataError for a template without a value."""
    values = dict[str, str]()
    for name, text in env.items():
        match = _TEMPLATE.fullmatch(text)
        if match is None:
            values[name] = text
        elif match[1] in given:
            values[name] = given[match[1]]
        elif match[2] is not None:
            values[name] = match[2]
        else:
            raise DataError(f"{where}: {name} needs the value of {match[1]}; give it with --env {match[1]}=VALUE.")
    return values


def _normalise(raw: dict[str, Any]) -> list[str]:
    """Rename deprecated keys in place. Returns the warnings."""
    warnings = list[str]()
    if "version" in raw:
        raw.setdefault("schema_version", raw.pop("version"))
        warnings.append("version is deprecated: it is now schema_version.")
    schema = raw.get("schema_version", SCHEMA)
    if isinstance(schema, int | float) and not isinstance(schema, bool):
        schema = raw["schema_version"] = f"{schema:.1f}"
    if schema not in _SCHEMAS:
        raise ValueError(f"schema_version {schema!r:.40} is not one of {', '.join(_SCHEMAS)}.")
    tables = [("environment", raw), ("verifier.environment", raw.get("verifier"))]
    steps = raw.get("steps")
    for step in steps if isinstance(steps, list) else []:
        tables.append(("steps.verifier.environment", step.get("verifier") if isinstance(step, dict) else None))
    for name, parent in tables:
        table = parent.get("environment") if isinstance(parent, dict) else None
        if isinstance(table, dict):
            warnings += _normalise_environment(name, table)
    return list(dict.fromkeys(warnings))


def _normalise_environment(name: str, table: dict[str, Any]) -> list[str]:
    warnings = list[str]()
    for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
        if old not in table:
            continue
        size = _megabytes(table.pop(old), f"{name}.{old}")
        if table.setdefault(new, size) != size:
            raise ValueError(f"{name}.{old} and {name}.{new} differ.")
        warnings.append(f"{name}.{old} is deprecated: it is now {new}.")
    if "allow_internet" in table:
        allowed = table.pop("allow_internet")
        if "network_mode" not in table and "allowed_hosts" not in table and allowed is not None:
            table["network_mode"] = "public" if allowed else "no-network"
        warnings.append(f"{name}.allow_internet is deprecated: it is now network_mode.")
    if isinstance(table.get("os"), str):
        table["os"] = table["os"].lower()
    return warnings


def _megabytes(value: Any, where: str) -> int:
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    if match is None:
        raise ValueError(f'{where} is a size like "2G" or "512M", not {value!r:.40}.')
    return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()])
