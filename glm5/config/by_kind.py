"""Tables of a recipe whose `kind` names the class that checks their other keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from glm5.errors import ConfigError
from glm5.register import Register


class ByKind:
    """Annotates a table: its class is the entry of a register that the table's `kind` names."""

    def __init__(self, register: Register[Any]) -> None:
        self._register = register

    def schemas_of(self, table: Any) -> list[type[BaseModel]]:
        """The class of a table; all classes for a table without a valid `kind`, such as a stage with a `preset`."""
        for tables in ([table], [{"kind": kind} for kind in self._register]):
            found = []
            for one in tables:
                with suppress(ConfigError, PydanticCustomError):
                    found.append(self._class(one))
            if found:
                return found
        return []

    def __get_pydantic_core_schema__(self, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(table: Any, info: ValidationInfo) -> BaseModel:
            if isinstance(table, source):
                return table
            schema = self._class(table)
            if info.mode == "json":  # a recipe file: no value is converted
                return schema.model_validate_json(json.dumps(table), strict=True)
            return schema.model_validate(table)

        return core_schema.with_info_plain_validator_function(validate)

    def _class(self, table: Any) -> type[BaseModel]:
        if not isinstance(table, Mapping):
            raise PydanticCustomError("dict_type", "Input should be a valid dictionary")
        kind = table.get("kind")
        if not isinstance(kind, str):
            given = "no kind" if kind is None else f"the kind {kind!r}"
            raise ConfigError(f"it has {given}; choose one of {', '.join(sorted(self._register))}")
        schema: type[BaseModel] = self._register[kind]
        return schema
