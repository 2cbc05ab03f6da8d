"""C, C++, Rust and Java: drivers on tiny repositories, edits of tests, Debian's patches as a source."""

from __future__ import annotations

import glob
import io
import random
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import DataError, GradingError
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks.swe import debian
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.debian import Patch, licence
from glm5.tasks.swe.driver import DRIVERS
from glm5.tasks.swe.in_room import compiled
from glm5.tasks.swe.languages.crates import simplify
from glm5.tasks.swe.languages.imports import Package, open_package
from glm5.tasks.swe.make import SOURCES, _jobs
from glm5.tasks.swe.patches import Patches, below, description, files, weight
from glm5.tasks.swe.versions import Versions

C_SOURCE = "int twice(int x)\n{\n    if (x > 100) {\n        return 100;\n    }\n    return x + x;\n}\n"
C_TEST = """\
#include <stdio.h>
int twice(int x);
static int failed;
static void check(const char *name, int good)
{
    printf("test.c:1:%s:%s\\n", name, good ? "PASS" : "FAIL: wrong");
    failed |= !good;
}
int main(void)
{
    check("small", twice(2) == 4);
    check("large", twice(200) == 100);
    return failed;
}
"""
RUST_TEST = (
    "#[test]\nfn small() {\n    assert_eq!(tiny::twice(2), 4);\n}\n\n"
    "#[test]\nfn large() {\n    assert_eq!(tiny::twice(200), 100);\n}\n"
)
RUST_SOURCE = "pub fn twice(x: i32) -> i32 {\n    if x > 100 {\n        return 100;\n    }\n    x + x\n}\n"
JAVA_SOURCE = "public class Tiny {\n    static int twice(int x) {\n        return x > 100 ? 100 : x + x;\n    }\n}\n"
JAVA_TEST = """\
import static org.junit.Assert.assertEquals;
import org.junit.Test;

public class TinyTest {
    @Test
    public void small() {
        assertEquals(4, Tiny.twice(2));
    }

    @Test
    public void large() {
        assertEquals(100, Tiny.twice(200));
    }
}
"""
CC = {"compiler": "cc", "flags": "-O0", "objects": ["src/*.c"], "libraries": "", "style": "unity"}
JARS = """junit4.jar hamcrest.jar junit-jupiter*.jar junit-platform-*.jar junit-vintage-engine.jar opentest4j.jar
apiguardian-api.jar picocli.jar univocity-parsers.jar"""
JUNIT = {"sources": ["src"], "helpers": ["tests"], "resources": [], "jars": JARS.split()}
TINY: dict[str, tuple[str, dict[str, str], str, dict[str, Any]]] = {
    "c": ("cc", {"src/tiny.c": C_SOURCE, "tests/test.c": C_TEST}, "tests/test.c", CC),
    "cpp": ("cc", {"src/tiny.cpp": C_SOURCE, "tests/test.cpp": C_TEST}, "tests/test.cpp",
            {**CC, "compiler": "c++", "objects": ["src/*.cpp"]}),
    "rust": ("cargo", {"src/lib.rs": RUST_SOURCE, "tests/all.rs": RUST_TEST,
                       "Cargo.toml": '[package]\nname = "tiny"\nversion = "1.0.0"\nedition = "2018"\n'},
             "tests/all.rs", {"tests": "integration"}),
    "java": ("junit", {"src/Tiny.java": JAVA_SOURCE, "tests/TinyTest.java": JAVA_TEST}, "tests/TinyTest.java", JUNIT),
}  # fmt: skip
NEEDS = {
    "c": "/usr/bin/cc",
    "cpp": "/usr/bin/c++",
    "rust": "/usr/bin/cargo",
    "java": "/usr/share/java/junit-platform-console.jar",
}


def tiny(root: Path, language: str) -> Repository:
    framework, contents, test, build = TINY[language]
    for path, text in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    sources = tuple(path for path in contents if path.startswith("src/"))
    return Repository("tiny", "1", "MIT", "", root, (".",), (test,), ("tests",), framework=framework, sources=sources,
                      language=language, build=build)  # fmt: skip


def outcomes(repository: Repository, changes: Mapping[str, str | None]) -> dict[str, str]:
    run = DRIVERS[repository.language].run(repository, changes, repository.test_files, 60)
    assert run.stopped is None
    return {name.split("::")[1]: outcome for name, outcome in run.outcomes.items()}


@pytest.mark.parametrize("language", sorted(TINY))
def test_a_driver_tells_which_tests_a_bug_breaks(tmp_path: Path, language: str) -> None:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(f"no rooms: {error}")
    if not glob.glob(NEEDS[language]):
        pytest.skip(f"this machine has no {NEEDS[language]}.")
    repository = tiny(tmp_path, language)
    program = {"program": "failed"} if repository.framework == "cc" else {}
    source = repository.sources[0]
    bugged = repository.read(source).replace("x > 100", "x > 1000")
    assert outcomes(repository, {source: bugged}) == {"small": "passed", "large": "failed", **program}


def test_a_program_that_exits_early_fails_whatever_it_printed(tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("this machine has no C compiler.")
    repository = tiny(tmp_path, "c")
    forged = '#include <stdio.h>\n#include <stdlib.h>\nint twice(int x) { puts("f:1:large:PASS"); exit(3); }\n'
    assert outcomes(repository, {"src/tiny.c": forged}) == {"large": "passed", "program": "failed"}


def test_edits_of_c_tests() -> None:
    pytest.importorskip("tree_sitter_c", reason="tree-sitter's grammar of C is not installed.")
    from glm5.tasks.swe.languages.test_edits import sabotaged, without_tests

    text = (
        "static void one(void)\n{\n    TEST_ASSERT_EQUAL(1, f());\n}\n"
        "static void two(void)\n{\n    TEST_ASSERT_NULL(g());\n}\n"
        "int main(void)\n{\n    RUN_TEST(one);\n    RUN_TEST(two);\n    return 0;\n}\n"
    )
    left = without_tests(text, "t.c", "c", {("two",), ("program",)})
    assert left == text.replace("static void two(void)\n{\n    TEST_ASSERT_NULL(g());\n}\n", "").replace(
        "    RUN_TEST(two);\n", ""
    )
    stub = without_tests(text, "t.c", "c", {("program",)})
    assert stub is not None and "return 77;" in stub
    twin = sabotaged(text, "t.c", "c", {("two",)}, random.Random(0))
    assert twin == text.replace("TEST_ASSERT_NULL", "TEST_ASSERT_NOT_NULL")
    plain = (
        'int main(void)\n{\n    if (f() != 1)\n        fail("f");\n    if (g())\n        help("g");\n    return 0;\n}\n'
    )
    twin = sabotaged(plain, "t.c", "c", {("program",)}, random.Random(0))
    assert twin == plain.replace("(f() != 1)", "(!(f() != 1))")


def test_edits_of_rust_tests() -> None:
    pytest.importorskip("tree_sitter_rust", reason="tree-sitter's grammar of Rust is not installed.")
    from glm5.tasks.swe.languages.test_edits import sabotaged, without_tests

    assert without_tests(RUST_TEST, "t.rs", "rust", {("small",)}) == RUST_TEST[RUST_TEST.index("\n#[test]\nfn large") :]
    twin = sabotaged(RUST_TEST, "t.rs", "rust", {("large",)}, random.Random(0))
    assert twin is not None and "twice(2), 4)" in twin and "twice(200), 100)" not in twin


PATCH = """\
--- a/src/tiny.c
+++ b/src/tiny.c
@@ -1,5 +1,8 @@
 int twice(int x)
 {
+    if (x > 100) {
+        return 100;
+    }
     return x + x;
 }
"""
HEADER = """\
From: Someone <someone@example.org>
Bug-Debian: https://bugs.example.org/1
Subject: [PATCH] twice() of a large number is too large (#12)
 Large numbers overflow.
 .
 This fixes CVE-2024-12345
"""


def test_a_patch_taken_back_is_a_candidate(tmp_path: Path) -> None:
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch.")
    repository = tiny(tmp_path, "c")
    spelling = Patch("spelling.patch", "Description: spelling\n", PATCH.replace("src/tiny.c", "docs/x"))
    fix = Patch("fix.patch", HEADER, PATCH)
    assert weight(fix) > weight(spelling) and files(PATCH) == ["src/tiny.c"]
    (candidate,) = Patches((spelling, fix)).candidates(repository, 0)
    assert candidate.changes == {"src/tiny.c": "int twice(int x)\n{\n    return x + x;\n}\n"}
    assert candidate.origin == {"patch": "fix.patch", "advisory": "CVE-2024-12345"}
    assert description(fix) == "twice() of a large number is too large\nLarge numbers overflow."


def test_a_patch_of_a_tree_is_one_of_its_folder() -> None:
    inside, outside = (PATCH.replace("src/tiny.c", path) for path in ("sub/src/tiny.c", "other/tiny.c"))
    found = below(Patch("fix.patch", HEADER, outside + inside + f"diff --git a/x b/x\n{outside}"), "sub")
    assert found == Patch("fix.patch", HEADER, PATCH)


def test_a_release_of_a_compiled_language_is_taken_back_by_functions_first(tmp_path: Path) -> None:
    pytest.importorskip("tree_sitter_c", reason="tree-sitter's grammar of C is not installed.")
    gap = "\n".join(f"int spare{number};" for number in range(9))
    old = f"int low(int x)\n{{\n    return x - 1;\n}}\n{gap}\nint high(int x)\n{{\n    return x + 1;\n}}\n"
    new = f"int help(int x) {{ return x; }}\n{old.replace('x - 1', 'help(x)').replace('x + 1', 'x + 2')}"
    for name, text in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.c").write_text(text)
    there = Repository("a", "1", "MIT", "", tmp_path / "new", (), ("t.c",), (), sources=("a.c",), language="c")
    found = [str(c.changes["a.c"]) for c in Versions(tmp_path / "old", "0.9").candidates(there, 0)]
    bodies = {new.replace("return help(x)", "return x - 1"), new.replace("x + 2", "x + 1")}
    assert len(found) == len(set(found)) and set(found[:3]) == {*bodies, old}


def test_the_report_of_googletest() -> None:
    said = (
        "[ RUN      ] Clip.Low\nprinted[       OK ] Clip.Low (12 ms)\n[ RUN      ] Clip.High\ntest.cc:7: Failure\n"
        "Expected: 5\n[  FAILED  ] Clip.High, where TypeParam = int (0 ms)\n[ RUN      ] All/Clip.Each/1\n"
        "[  SKIPPED ] All/Clip.Each/1 (1 ms)\n[  FAILED  ] 1 test, listed below:\n[  FAILED  ] Clip.High\n"
    )
    assert list(compiled.STYLES["gtest"](said)) == [
        (["Clip", "Low"], "passed", 0.012, "printed"),
        (["Clip", "High"], "failed", 0.0, "test.cc:7: Failure\nExpected: 5"),
        (["All/Clip", "Each"], "skipped", 0.001, ""),
    ]


def test_a_source_package_without_its_dsc(tmp_path: Path) -> None:
    """Some mirrors lack it. Upstream's archive is the tree, not the packaging's, and the patches are applied."""
    if not shutil.which("patch"):
        pytest.skip("this machine has no patch.")
    packaging = {"patches/series": "# first\nfix.patch\n", "patches/fix.patch": PATCH, "control": "Source: tiny\n"}
    bugged = C_SOURCE.replace("    if (x > 100) {\n        return 100;\n    }\n", "")
    names = ["a.debian.tar.xz", "a.orig.tar.gz"]
    archives = [tmp_path / name for name in names]
    for path, top, contents in zip(archives, ("debian", "a-1"), (packaging, {"src/tiny.c": bugged}), strict=True):
        with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as tar:
            for name, text in contents.items():
                info = tarfile.TarInfo(f"{top}/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
    assert debian._assemble(archives, tmp_path / "tree") == ["fix.patch"]
    assert (tmp_path / "tree/src/tiny.c").read_text() == C_SOURCE
    assert debian._assemble(archives[1:], tmp_path / "plain") == []
    assert (tmp_path / "plain/src/tiny.c").read_text() == bugged
    with pytest.raises(DataError, match="lacks the archive"):
        debian._assemble(archives[:1], tmp_path / "none")


def test_source_files_of_a_binary_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve as the older one of two versions, which needs no tests."""
    if not shutil.which("dpkg-deb"):
        pytest.skip("this machine has no dpkg-deb.")
    for name, text in {
        "DEBIAN/control": "Package: ruby-x\nVersion: 1.0-1\nArchitecture: all\nMaintainer: x <x@x.x>\nDescription: x\n",
        "usr/lib/ruby/vendor_ruby/x.rb": "X = 1\n", "usr/share/doc/ruby-x/copyright": "Files: *\nLicense: Expat\n",
    }.items():  # fmt: skip
        (tmp_path / "deb" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "deb" / name).write_text(text)
    real = debian.run

    def run(*command: str, cwd: Path | None = None) -> str:
        if command[0] == "apt-get" and "download" in command:
            assert command[-1] == "ruby-x=1.0-1"
            return real("dpkg-deb", "-b", str(tmp_path / "deb"), str(cwd))
        return "" if command[0] == "apt-get" else real(*command, cwd=cwd)

    monkeypatch.setattr(debian, "run", run)
    package = Package("ruby-x", "debian", "minitest", ("test/*.rb",), "2.0-1", previous=("ruby-x=1.0-1",))
    found, patches = open_package(package, "ruby", tmp_path / "work", "ruby-x=1.0-1")
    assert found.read("lib/x.rb") == "X = 1\n"
    assert (found.version, found.licence, patches) == ("1.0-1", "Expat", ())
    with pytest.raises(DataError, match="has no folder"):
        debian.binary_tree("ruby-x", "1.0-1", {"usr/share/cargo/registry/*": "."}, tmp_path / "other")
    with pytest.raises(DataError, match="no source files"):
        open_package(package, "java", tmp_path / "work", "ruby-x=1.0-1")


def test_jobs_of_a_debian_package() -> None:
    """A binary package has no tests: it is the older one of the nearest version that has. Every version with tests has
    patches."""
    package = Package("x", "debian", "minitest", ("t",), "4-1", previous=("x=3-1", "2-1", "x=1-1", "x=0-1"))
    names = [job.name for job in _jobs(package, SOURCES, lambda *_: pytest.fail("nothing is opened yet"), None)]
    pairs = ["x 4-1 from x=3-1", "x 4-1 from 2-1", "x 2-1 from x=1-1", "x 2-1 from x=0-1"]
    assert names == [*pairs, "x patches", "x 2-1 patches"]


@pytest.mark.long
def test_a_java_test_file_that_does_not_compile_is_broken_alone(tmp_path: Path) -> None:
    """So is a source that no test needs."""
    if not glob.glob(NEEDS["java"]):
        pytest.skip(f"this machine has no {NEEDS['java']}.")
    repository = tiny(tmp_path, "java")
    (tmp_path / "tests/OtherTest.java").write_text("import missing.Library;\n\npublic class OtherTest {\n}\n")
    (tmp_path / "src/Unused.java").write_text("import missing.Library;\n\npublic class Unused {\n}\n")
    two = replace(repository, test_files=("tests/OtherTest.java", *repository.test_files))
    run = DRIVERS["java"].run(two, {}, two.test_files, 60)
    assert run.stopped is None
    assert run.outcomes == {
        "tests/OtherTest.java": "error", "tests/TinyTest.java::small": "passed", "tests/TinyTest.java::large": "passed",
    }  # fmt: skip


def test_a_rust_test_file_that_does_not_compile_is_broken_alone(tmp_path: Path) -> None:
    try:
        environment_mechanism()
    except GradingError as error:
        pytest.skip(f"no rooms: {error}")
    if not glob.glob(NEEDS["rust"]):
        pytest.skip(f"this machine has no {NEEDS['rust']}.")
    repository = tiny(tmp_path, "rust")
    broken = tuple(f"tests/{name}.rs" for name in ("a", "b", "c"))
    for path in broken:
        (tmp_path / path).write_text("use missing::library;\n")
    several = replace(repository, test_files=(*broken, *repository.test_files))
    run = DRIVERS["rust"].run(several, {}, several.test_files, 60)
    assert run.outcomes == {
        **dict.fromkeys(broken, "error"), "tests/all.rs::small": "passed", "tests/all.rs::large": "passed",
    }  # fmt: skip


def test_the_licence_of_most_files(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.md").write_text("\n# The MIT License\n\nPermission is granted\n")
    assert licence(tmp_path) == "The MIT License"
    (tmp_path / "debian").mkdir()
    text = "Files: debian/*\nLicense: GPL-2+\n\nFiles: *\nCopyright: x\nLicense: Expat\n text\n"
    (tmp_path / "debian/copyright").write_text(text)
    assert licence(tmp_path) == "Expat"
    assert licence(tmp_path / "absent") == "see debian/copyright"


def test_a_crate_without_optional_dependencies(tmp_path: Path) -> None:
    text = (
        '[package]\nname = "a"\nversion = "1.0.0"\n[dependencies.serde]\nversion = "1"\noptional = true\n'
        '[features]\ndefault = ["std"]\nstd = ["serde?/std"]\n[dev-dependencies.rand]\nversion = "0.8"\n'
    )
    (tmp_path / "Cargo.toml").write_text(text)
    simplify(tmp_path)
    left = (tmp_path / "Cargo.toml").read_text()
    assert "serde" not in left and "rand" not in left and '"default" = ["std"]' in left
    for key in ("version", "edition"):
        (tmp_path / "Cargo.toml").write_text(f'[package]\nname = "x"\n{key}.workspace = true\n')
        with pytest.raises(DataError, match="workspace"):
            simplify(tmp_path)
