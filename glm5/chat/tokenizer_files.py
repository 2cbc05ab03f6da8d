"""Reads and checks the files of a tokenizer: tokenizer.json and the chat template beside it. All are untrusted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5.chat.split_pattern import check_split
from glm5.errors import CheckpointError
from glm5.files import read_small

DEFAULT_TEMPLATE_VERSION = "5.2"
TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 64 * 2**20  # the released tokenizer.json has about 20 MB
_MOST_ADDED, _MOST_ADDED_CHARS, _MOST_STEPS = 1024, 128, 8


@dataclass(frozen=True)
class TemplateSetting:
    """The chat template of a tokenizer: a `version` by name, or the Jinja text `source`. `origin` says who chose it."""

    version: str | None = DEFAULT_TEMPLATE_VERSION
    source: str | None = None
    origin: str = "the default"


def checked(data: Any) -> dict[str, Any]:
    """The content of a tokenizer.json. Raises ValueError for one that would lose text, make ids random or never end."""
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    if data.get("normalizer") is not None:
        raise ValueError("it has a normalizer, which would change text")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if data["model"].get(setting):
            raise ValueError(f"its model sets {setting}")
    if len(data["added_tokens"]) > _MOST_ADDED:
        raise ValueError(f"it adds more than {_MOST_ADDED:,} tokens")
    for token in data["added_tokens"]:
        if type(token["id"]) is not int or not isinstance(token["content"], str) or not token["content"]:
            raise ValueError("an added token has no text or no id")
        if len(token["content"]) > _MOST_ADDED_CHARS:
            raise ValueError(f"an added token has more than {_MOST_ADDED_CHARS} characters")
    splitter = data["pre_tokenizer"]
    steps = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    if len(steps) > _MOST_STEPS:
        raise ValueError(f"its pre-tokenizer has more than {_MOST_STEPS} steps")
    for step in steps:
        if step["type"] == "Split":
            check_split(step)
        elif step["type"] not in ("ByteLevel", "Digits") or step.get("add_prefix_space"):
            raise ValueError(f"its pre-tokenizer {step['type']} would change text")
    if [step["type"] for step in steps].count("ByteLevel") != 1 or steps[-1]["type"] != "ByteLevel":
        raise ValueError("its pre-tokenizer does not end with the only step ByteLevel")
    return data


def read_text(file: Path) -> str:
    try:
        return read_small(file, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {file}: {reason_of(error)}; a checkpoint needs this file.") from error


def stored_template(directory: Path) -> TemplateSetting:
    """The chat template that a checkpoint's files specify."""
    file, jinja = directory / "tokenizer_config.json", directory / TEMPLATE_FILE
    try:
        config = json.loads(read_text(file)) if file.exists() else {}
        version, source = config.get("glm5_template_version"), config.get("chat_template")
    except (ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a JSON object: {reason_of(error)}; restore the file.") from error
    if version is not None:
        if not isinstance(version, str):
            raise CheckpointError(f'{file}: "glm5_template_version" must be a string such as "5.2", not {version!r}.')
        return TemplateSetting(version, None, str(file))
    if jinja.exists():
        return TemplateSetting(None, read_text(jinja), str(jinja))
    if isinstance(source, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return TemplateSetting(None, source, str(file)) if isinstance(source, str) else TemplateSetting()


def chosen_template(choice: str) -> TemplateSetting:
    """A version, or the path of a Jinja file."""
    if Path(choice).is_file():
        return TemplateSetting(None, read_text(Path(choice)), choice)
    return TemplateSetting(choice, None, "the command line")


def reason_of(error: Exception) -> str:
    """One line that says what is wrong with a damaged file."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
