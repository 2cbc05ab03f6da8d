"""One build of a small made-up web, shared by the tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5.tasks.search.build import build
from glm5.tasks.search.checks import Checker
from glm5.tasks.search.query import Evaluator
from glm5.tasks.search.questions import Rules
from glm5.tasks.search.web import Web
from tests.tasks.search.world import write_world

SOURCES = ("geonames", "airports", "foldoc")
RULES = Rules(count=40, depths=(2, 3, 4), per_shape=40)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    write_world(folder)
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    pytest.importorskip("bm25s")
    out = tmp_path_factory.mktemp("search")
    build(out, RULES, only=SOURCES, roots=[world])
    return out


@pytest.fixture(scope="session")
def checker(built: Path) -> Checker:
    web = Web(built)
    graph = web.graph()
    return Checker(web, graph, Evaluator(graph))
