"""Drivers, operators and grading of the languages other than Python, on a repository of two files each."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from glm5.tasks.swe.attacks import _with_modules
from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.debian import SourceTree
from glm5.tasks.swe.driver import DRIVERS, open_room
from glm5.tasks.swe.folder import read_tests
from glm5.tasks.swe.grading import grade
from glm5.tasks.swe.in_room import suite
from glm5.tasks.swe.in_room.grade import request
from glm5.tasks.swe.languages import imports
from glm5.tasks.swe.languages.attacks import TITLES, additions
from glm5.tasks.swe.languages.table import SYNTAX
from glm5.tasks.swe.languages.test_edits import split_id
from glm5.tasks.swe.validate import Rules, baseline, validate
from glm5.tasks.swe.versions import Versions
from tests.rooms import needs_rooms

JS = "exports.clip = (x, low, high) => {\n  if (x < low) return low;\n  if (x > high) return high;\n  return x;\n};\n"
JS_TEST = """\
const { test } = require("node:test");
const assert = require("node:assert");
const { clip } = require("../clip.js");

test("low", () => {
  assert.strictEqual(clip(1, 2, 5), 2);
});
test("high", () => {
  assert.strictEqual(clip(9, 2, 5), 5);
});
"""
GO = """\
package clip

func Clip(x, low, high int) int {
	if x < low {
		return low
	}
	if x > high {
		return high
	}
	return x
}
"""
GO_TEST = """\
package clip

import "testing"

func TestLow(t *testing.T) {
	if got := Clip(1, 2, 5); got != 2 {
		t.Errorf("Clip(1, 2, 5) = %d, want 2", got)
	}
}

func TestHigh(t *testing.T) {
	if got := Clip(9, 2, 5); got != 5 {
		t.Errorf("Clip(9, 2, 5) = %d, want 5", got)
	}
}
"""
PHP = """\
<?php
function clip($x, $low, $high)
{
    if ($x < $low) {
        return $low;
    }
    return $x > $high ? $high : $x;
}
"""
PHP_TEST = """\
<?php
require_once __DIR__ . '/../clip.php';

class ClipTest extends PHPUnit\\Framework\\TestCase
{
    public function testLow(): void
    {
        $this->assertSame(2, clip(1, 2, 5));
    }

    public function testHigh(): void
    {
        $this->assertSame(5, clip(9, 2, 5));
    }
}
"""
RUBY = "def clip(x, low, high)\n  return low if x < low\n  x > high ? high : x\nend\n"
RSPEC = """\
require "clip"

describe "clip" do
  it "low" do
    expect(clip(1, 2, 5)).to eq(2)
  end

  it "high" do
    expect(clip(9, 2, 5)).to eq(5)
  end
end
"""
MINITEST = """\
require "minitest/autorun"
require "clip"

class ClipTest < Minitest::Test
  def test_low
    assert_equal 2, clip(1, 2, 5)
  end

  def test_high
    assert_equal 5, clip(9, 2, 5)
  end
end
"""
TEST_UNIT = MINITEST.replace("minitest/autorun", "test/unit").replace("Minitest::Test", "Test::Unit::TestCase")
# language, framework, source, its text, an edit that makes the bug, test file, its text
ROWS = {
    "node": ("javascript", "clip.js", JS, "return high", "return low", "test/clip.test.js", JS_TEST),
    "go": ("go", "clip.go", GO, "return high", "return low", "clip_test.go", GO_TEST),
    "phpunit": ("php", "clip.php", PHP, "? $high", "? $low", "tests/ClipTest.php", PHP_TEST),
    "rspec": ("ruby", "lib/clip.rb", RUBY, "? high", "? low", "spec/clip_spec.rb", RSPEC),
    "minitest": ("ruby", "lib/clip.rb", RUBY, "? high", "? low", "test/test_clip.rb", MINITEST),
    "test-unit": ("ruby", "lib/clip.rb", RUBY, "? high", "? low", "test/test_clip.rb", TEST_UNIT),
}
PROGRAMS = {"node": "node", "go": "go", "phpunit": "phpunit", "rspec": "rspec", "minitest": "ruby", "test-unit": "ruby"}
FRAMEWORKS = pytest.mark.parametrize("framework", ROWS)


def repository(root: Path, framework: str) -> Repository:
    if shutil.which(PROGRAMS[framework]) is None:
        pytest.skip(f"{PROGRAMS[framework]} is not installed.")
    language, path, source, _, _, test, text = ROWS[framework]
    for name, content in ((path, source), (test, text), ("go.mod", "module example.com/clip\n")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    paths = ("example.com/clip",) if language == "go" else ("lib", ".")
    package = imports.Package("clip", "npm", framework, (test,), "1.0", paths=paths)
    return imports.from_tree(SourceTree(root, "1.0", "MIT", "test"), package, language)


@needs_rooms
@FRAMEWORKS
def test_driver_reports_every_test_and_its_message(tmp_path: Path, framework: str) -> None:
    found = repository(tmp_path, framework)
    language, path, source, old, new, test, _ = ROWS[framework]
    run = DRIVERS[language].run(found, {path: source.replace(old, new)}, found.test_files, 60)
    assert run.stopped is None
    assert sorted(run.outcomes.values()) == ["failed", "passed"]
    failed = next(name for name, outcome in run.outcomes.items() if outcome == "failed")
    assert failed.startswith(f"{test}::")
    assert split_id(failed, framework)[1][0].lower().endswith("high")
    assert "5" in run.messages[failed]
    assert "2" in run.messages[failed]


@needs_rooms
def test_ids_have_no_addresses_of_ruby_objects(tmp_path: Path) -> None:
    """They differ from run to run."""
    found = repository(tmp_path, "rspec")
    (tmp_path / found.test_files[0]).write_text(
        "describe 'ids' do\n  subject { Object.new }\n  it { same = subject; is_expected.to equal(same) }\nend\n"
    )
    run = DRIVERS["ruby"].run(found, {}, found.test_files, 60)
    assert list(run.outcomes) == [f"{found.test_files[0]}::ids > is expected to equal #<Object:0x>"]


def test_what_an_import_of_vitest_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"root": "/app", "files": ["src/a.test.ts"], "site": [], "select": None, "args": [],
            "paths": [".", "@x/kit/query=src/query/index.ts", "@x/kit=src/index.ts"],
            "framework": "vitest", "reload": [], "language": "typescript", "runner": "suite.py"}  # fmt: skip
    spec = request(spec, {"files": spec["files"], "select": None}, None, "0")
    told: dict[str, str] = {}
    monkeypatch.setattr(suite, "link_modules", lambda _: None)
    monkeypatch.setattr(suite.Suite, "launch", lambda _, command, **given: told.update(given) or (0, b"", b""))
    suite.run_vitest(suite.Suite(spec))
    assert [row["find"] for row in json.loads(told["VITEST_ALIASES"])] == ["@x/kit/query", "@x/kit"]
    assert json.loads(told["VITEST_ALIASES"])[1]["replacement"] == "/app/src/index.ts"


@needs_rooms
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["node", "rspec"])
def test_task_pays_the_solution_and_nothing_else(tmp_path: Path, framework: str) -> None:
    pytest.importorskip("tree_sitter", reason="tree-sitter (the extra swe) is not installed.")
    found = repository(tmp_path / "repo", framework)
    language, path, source, old, new, test, _ = ROWS[framework]
    candidate = Candidate(found, "mutate", {path: source.replace(old, new)}, notes=("by hand in clip",))
    rules = Rules(clean_runs=1, bug_runs=1, twins=1)
    clean = baseline(found, DRIVERS[language], rules)
    validate(candidate, clean, DRIVERS[language], rules, tmp_path / "task")  # no change 0, solution 1
    tests = read_tests(tmp_path / "task")
    hidden = (tmp_path / "task/environment/repo" / test).read_text()
    assert "low" in hidden
    assert "high" not in hidden.replace("low, high", "")
    with open_room(tmp_path / "task/environment/repo", ()) as room:
        room.upload({f"/app/{test}": b""})  # tests deleted
        assert grade(room, tests, ())["reward"] == 0.0
        leave = "process.exit(0);" if framework == "node" else "exit! 0"
        room.upload({f"/app/{path}": f"{source}\n{leave}\n".encode()})  # right, but it ends the run
        assert grade(room, tests, ())["reward"] == 0.0


@pytest.mark.parametrize("framework", ["node", "go", "phpunit", "rspec"])
def test_operators_propose_minimal_edits_that_parse(tmp_path: Path, framework: str) -> None:
    pytest.importorskip("tree_sitter", reason="tree-sitter (the extra swe) is not installed.")
    from glm5.tasks.swe.languages import mutate, syntax

    language, path, source, *_ = ROWS[framework]
    comment = {"javascript": "// x < 1\n", "go": "// x < 1\n", "ruby": "# x < 1\n", "php": ""}[language]
    parsed = syntax.Parsed(comment + source, path, language)
    edits = list(mutate.places(parsed, random.Random(0)))
    assert {"change_comparison", "remove_guard", "confuse_names"} <= {edit.operator for edit in edits}
    assert all(edit.start >= len(comment) for edit in edits)
    for edit in edits:
        text = mutate.apply(parsed, language, [edit])
        assert text is not None
        assert text != comment + source


def test_lists_of_packages_are_well_formed() -> None:
    for language in SYNTAX:
        entries = imports.packages(language)
        assert entries
        assert all(e.tests and e.version and e.source in ("npm", "debian", "deb", "git") for e in entries)
        histories = [e.history for e in entries if e.history]
        assert all(h.origin.startswith("https://") and len(h.version) == 40 and h.licence for h in histories)


def test_globs_of_a_history_are_those_of_folders(tmp_path: Path) -> None:
    names = "a.js lib/a.js lib/b/a.js lib/b/c/a.jsx test/a.js test/b/x.js".split()
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for glob in ("*.js", "lib/*.js", "lib/**/*.js", "**/*.js", "**/*", "test/**/x.?s", "lib/b/**/*.jsx"):
        package = imports.Package("x", "git", "node", (glob,), "1")
        found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob(glob) if path.is_file()}
        assert {name for name in names if imports.files_of(package, "javascript").is_test(name)} == found


def test_a_release_is_taken_back_in_any_language(tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter", reason="tree-sitter (the extra swe) is not installed.")
    new = repository(tmp_path / "new", "node")
    repository(tmp_path / "old", "node")
    (tmp_path / "old/clip.js").write_text(JS.replace("x > high", "x >= high") + "// old\n")
    (candidate,) = Versions(tmp_path / "old", "0.9").candidates(new, 0)
    assert "x >= high" in str(candidate.changes["clip.js"])
    assert not list(Versions(tmp_path / "old", "0.9", most_lines=2).candidates(new, 0))
    (tmp_path / "old/clip.js").write_text(JS + "// old\n")
    assert not list(Versions(tmp_path / "old", "0.9").candidates(new, 0))


def test_a_cheat_in_node_modules_replaces_the_link() -> None:
    cheat = _with_modules({"a.js": "1\n", "node_modules/tape/index.js": "process.exit(0);\n"})
    assert dict(cheat.files) == {"a.js": "1\n"}
    assert cheat.command.startswith("rm -rf node_modules\nmkdir -p node_modules/tape\n")


def test_types_do_not_make_another_program() -> None:
    pytest.importorskip("tree_sitter_typescript", reason="tree-sitter's grammar of TypeScript is not installed.")
    from glm5.tasks.swe.languages.syntax import Parsed

    texts = ("type A = 1;\nconst f = (x: A) => x;\n", "const f = <T,>(x: T): T => x;\n", "const f = (x) => -x;\n")
    typed, other, changed = (Parsed(text, "a.ts", "typescript").tokens() for text in texts)
    assert typed == other != changed


def test_what_was_built_from_the_sources_is_left_out(tmp_path: Path) -> None:
    for name in ("src/clip.js", "src/test/clip.js", "dist/clip.js", "package.json"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(JS)
    tree = SourceTree(tmp_path / "tree", "1.0", "MIT", "sha256:1")
    root = imports.kept(tree, ("src", "*.json"), tmp_path)
    assert {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()} == {
        "src/clip.js", "src/test/clip.js", "package.json"
    }  # fmt: skip
    assert imports.kept(tree, ("src", "*.json"), tmp_path) == root != imports.kept(tree, ("src",), tmp_path)


@pytest.mark.parametrize("language", sorted(SYNTAX))
def test_cheats_are_code_of_the_language(language: str) -> None:
    pytest.importorskip("tree_sitter", reason="tree-sitter (the extra swe) is not installed.")
    from glm5.tasks.swe.languages.syntax import parse

    source = {"go": GO, "php": PHP, "ruby": RUBY, "java": "public class Clip {\n    int x;\n}\n", "rust": "fn f() {}\n",
              "c": "int f(void) { return 1; }\n", "cpp": "int f() { return 1; }\n"}.get(language, JS)  # fmt: skip
    module = "src/Clip" + next(iter(SYNTAX[language].grammars))
    cheats = additions(language, module, source, ['tests/x::A > b "c"', "tests/x::d"])
    assert set(cheats) == {"configuration", *TITLES.values()}
    for name, files in cheats.items():
        if name != "configuration":
            ((path, text),) = files.items()
            tree = parse(text, path, language)
            assert tree is not None and tree.errors() == 0, name
