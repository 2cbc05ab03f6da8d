"""C, C++, Rust and Java: drivers on tiny repositories, edits of tests, Debian's patches as a source."""

from __future__ import annotations

import glob
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import GradingError
from glm5.sandbox.environment import environment_mechanism
from glm5.tasks.swe.candidate import Repository
from glm5.tasks.swe.debian import Patch, licence
from glm5.tasks.swe.driver import DRIVERS
from glm5.tasks.swe.languages.crates import simplify
from glm5.tasks.swe.patches import Patches, description, files, weight

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
