"""Attempts of a model behind a URL, and what is selected from them, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glm5.cli import app
from glm5.data.sft import read_conversations
from tests.agents.scripted_model import Say, ScriptedModel
