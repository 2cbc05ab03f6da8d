"""Source code: files follow what they import, licenses are what files and packages say."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from glm5.config.corpus import LimitConfig, SourceConfig
from glm5.data.corpus import inputs
from glm5.data.corpus.inputs import documents
from glm5.data.corpus.kinds import file_type
from glm5.data.corpus.licenses import Licenses, recognised, spdx, tagged
from glm5.data.corpus.plan import list_inputs
from glm5.data.corpus.repository import Paths, concatenated, dependency_order
from glm5.data.corpus.spdx import UNKNOWN, all_of, allowed, normal


def ordered(**files: str) -> list[str]:
    """The order of files; `a_b__py` stands for a/b.py."""
    named = {name.replace("__", ".").replace("_", "/"): text for name, text in files.items()}
    codes = {"py": "Python", "c": "C", "h": "C", "ts": "TypeScript", "rs": "Rust", "java": "Java"}
    return dependency_order({name: (text, codes[name.rpartition(".")[2]]) for name, text in named.items()})


def test_python_files_follow_their_imports() -> None:
    assert ordered(
        p_a__py="from p.b import x\nimport os",
        p_b__py="from . import c\nfrom .d import (\n    y)",
        p_c__py="import p.d as d, sys",
        p_d__py="",
    ) == ["p/d.py", "p/c.py", "p/b.py", "p/a.py"]


def test_other_languages_follow_their_imports() -> None:
    assert ordered(a__c='#include "lib/b.h"\n#include <stdio.h>', lib_b__h='#include "c.h"', lib_c__h="") == [
        "lib/c.h", "lib/b.h", "a.c",
    ]  # fmt: skip
    assert ordered(src_a__ts="import {x} from './b'", src_b__ts="const c = require('../c/index')", c_index__ts="") == [
        "c/index.ts", "src/b.ts", "src/a.ts",
    ]  # fmt: skip
    assert ordered(main__rs="use crate::net::wire;", net_wire__rs="") == ["net/wire.rs", "main.rs"]
    assert ordered(a_B__java="import a.C;", a_C__java="") == ["a/C.java", "a/B.java"]


def test_cycles_end_and_equals_are_alphabetic() -> None:
    assert ordered(a__py="import b", b__py="import a", c__py="", d__py="import c, a, b") == [
        "a.py",
        "b.py",
        "c.py",
        "d.py",
    ]


@hypothesis.given(st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=1, max_size=8))
def test_every_file_comes_once_and_after_its_imports_unless_in_a_cycle(graph: list[set[int]]) -> None:
    files = {
        f"m{n}.py": (f"import {', '.join(f'm{k}' for k in sorted(needs)) or 'os'}", "Python")
        for n, needs in enumerate(graph)
    }
    order = dependency_order(files)
    assert sorted(order) == sorted(files)
    reach = {n: set() for n in range(len(graph))}
    for _ in graph:
        for n, needs in enumerate(graph):
            reach[n] |= {k for k in needs if k < len(graph)} | {m for k in needs if k < len(graph) for m in reach[k]}
    for n, needs in enumerate(graph):
        for k in needs:
            if k < len(graph) and k != n and n not in reach[k]:
                assert order.index(f"m{k}.py") < order.index(f"m{n}.py")


def test_files_are_joined_up_to_the_limit() -> None:
    files = {f"{name}.py": (name * 50, "Python") for name in "abc"}
    found = list(concatenated(files, 130))
    assert [paths for paths, _ in found] == [["a.py", "b.py"], ["c.py"]]
    assert found[1][1] == f"# c.py\n{'c' * 50}\n"
    assert [paths for paths, _ in concatenated(files, 1)] == [["a.py"], ["b.py"], ["c.py"]]


def test_no_file_takes_the_place_of_another_of_its_name() -> None:
    paths = Paths()
    files = {paths.unlike(name): (f"x = {n}", "Python") for n, name in enumerate(["m.py", "m.py", "a.py", "m.py"])}
    assert list(files) == ["m.py", "m.py~2", "a.py", "m.py~3"]
    assert all(file_type(name) is None for name in files if "~" in name)
    ((_, text),) = concatenated(files, 1000)
    assert all(f"x = {n}\n" in text for n in range(4))


def test_licenses_are_recognised() -> None:
    root = Path(__file__).parents[2]
    assert recognised((root / "LICENSE").read_text()) == "Apache-2.0"
    assert recognised("Permission is hereby granted, free of charge, to any person\n obtaining a copy") == "MIT"
    assert recognised("All rights reserved.") == ""
    assert tagged("// SPDX-License-Identifier: (MIT OR GPL-2.0-only)\n") == "MIT OR GPL-2.0-only"
    assert spdx("Expat") == "MIT" and spdx("see the file") == UNKNOWN and spdx(" ") == ""


@pytest.mark.parametrize(
    ("license", "answer"),
    [
        ("MIT", True),
        ("GPL-2.0-only", False),
        ("", False),
        ("MIT OR GPL-2.0-only", True),
        ("MIT AND GPL-2.0-only", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("MIT WITH Commons-Clause", False),
        ("GPL-3.0-only AND (Apache-2.0 OR MIT)", False),
        ("(MIT OR Apache-2.0) AND GPL-2.0-only", False),
        ("GPL-2.0-only AND MIT OR Zlib", True),
        ("Zlib OR GPL-2.0-only AND MIT", True),
        ("(MIT AND (GPL-2.0-only OR Zlib))", True),
        ("mit and ISC", True),
        ("MIT and GPL-2.0-only", False),
        ("MIT OR", False),
        ("MIT GPL-2.0-only", False),
        ("(MIT", False),
        ("MIT OR Apache-2.0)", False),
        ("MIT, GPL-2.0-only", False),
        ("(" * 400 + "MIT" + ")" * 400, False),
        (UNKNOWN, False),
    ],
)
def test_a_license_is_allowed(license: str, answer: bool) -> None:
    assert allowed(license, ["permissive"]) is answer


def _expressions() -> st.SearchStrategy[tuple[str, str]]:
    """Expressions of SPDX, and the same in Python, where a permissive name is True."""
    names = st.sampled_from([("MIT", "True"), ("GPL-2.0-only", "False"), ("Zlib", "True"), ("X", "False")])
    return st.recursive(
        names,
        lambda parts: (
            st.tuples(parts, st.sampled_from(["AND", "OR"]), parts).map(
                lambda found: tuple(f"{a} {o} {b}" for a, o, b in zip(found[0], (found[1], found[1].lower()), found[2]))
            )
            | parts.map(lambda part: (f"({part[0]})", f"({part[1]})"))
        ),
        max_leaves=8,
    )


@hypothesis.given(_expressions())
def test_expressions_mean_what_python_says(both: tuple[str, str]) -> None:
    license, python = both
    assert allowed(license, ["permissive"]) is eval(python)
    assert normal(normal(license)) == normal(license)
    assert allowed(normal(license), ["permissive"]) is eval(python)
    assert allowed(all_of([license, "X OR MIT"]), ["permissive"]) is eval(python)
    assert not allowed(all_of([license, "X"]), ["permissive"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# SPDX-License-Identifier: MIT AND (GPL-2.0-only)", "MIT AND GPL-2.0-only"),
        ("/* SPDX-License-Identifier: (MIT OR Apache-2.0) AND X */ int a;", "(MIT OR Apache-2.0) AND X"),
        ("<!-- SPDX-License-Identifier: mit -->", "MIT"),
        ('"SPDX-License-Identifier: MIT"', "MIT"),
        ("(* SPDX-License-Identifier: MIT OR (ISC AND X) *)", "MIT OR ISC AND X"),
        ("# SPDX-License-Identifier: MIT, GPL-2.0-only", UNKNOWN),
        ("# SPDX-License-Identifier: MIT but no commercial use", UNKNOWN),
        ("# SPDX-License-Identifier: MIT AND", UNKNOWN),
        ("# SPDX-License-Identifier:", UNKNOWN),
        ("# SPDX-License-Identifier: MIT" + " " * 500_000 + "X", UNKNOWN),
        ("/*! SPDX-License-Identifier: MIT */" + "x " * 500_000, "MIT"),
        ("# SPDX-License-Identifier: MIT\n# SPDX-License-Identifier: X OR Y\n", "MIT AND (X OR Y)"),
        ("#" * 2970 + "\n# SPDX-License-Identifier: MIT AND X", "MIT AND X"),
    ],
)
def test_all_of_a_tag_counts(line: str, expected: str) -> None:
    assert tagged(line) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Business Source License 1.1\nChange License: Apache License, Version 2.0", "BUSL-1.1"),
        ('"Commons Clause" License Condition\nApache License\nVersion 2.0', "LicenseRef-Commons-Clause"),
        ("GNU GENERAL PUBLIC LICENSE Version 3\nSome parts: Apache License, Version 2.0", ""),
        ("GNU GENERAL PUBLIC LICENSE Version 3\nSee also the GNU Affero General Public License", "GPL-3.0-or-later"),
        (
            "Mozilla Public License Version 2.0 “Secondary License” means either the GNU General Public License, "
            "Version 2.0, or any later versions of those licenses.",
            "MPL-2.0",
        ),
    ],
)
def test_a_text_of_several_licenses_is_none_of_them(text: str, expected: str) -> None:
    assert recognised(text) == expected


def test_packages_and_folders_answer_with_all_that_they_say(tmp_path: Path) -> None:
    mit = "Permission is hereby granted, free of charge, to any person obtaining a copy"
    classifiers = "".join(
        f"Classifier: License :: OSI Approved :: {name}\n"
        for name in ("MIT License", "GNU General Public License v3 (GPLv3)")
    )
    for name, text in {
        "evil-1.dist-info/METADATA": "Name: evil\nLicense-Expression: MIT\n",
        "evil-1.dist-info/RECORD": "gpl/a.py,,\nodd/a.py,,\nshared/a.py,,\nplain/a.py,,\n",
        "two-1.dist-info/METADATA": f"Name: two\n{classifiers}",
        "two-1.dist-info/RECORD": "two/a.py,,\nshared/b.py,,\n",
        "gpl/LICENSE": "GNU General Public License version 3",
        "odd/LICENSE": "All rights reserved.",
        "odd/license.py": mit,
        "both/COPYING": "GNU General Public License version 3",
        "both/LICENSE": mit,
        "mixed/COPYING": f"{mit} GNU General Public License",
        "mixed/LICENSE": mit,
        "deb/copyright": "Format: x\nFiles: *\nLicense: Expat and GPL-3+\n",
        "or/copyright": "Format: x\nFiles: *\nLicense: Expat or GPL-3+\n",
        "comma/copyright": "Format: x\nFiles: *\nLicense: Expat or GPL-3+, and X\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    licenses = Licenses(tmp_path)
    names = "plain gpl odd shared two both mixed deb or comma".split()
    assert {name: licenses.of(f"{name}/a.py") for name in names} == {
        "plain": "MIT",
        "gpl": "GPL-3.0-or-later",
        "odd": "",
        "shared": "GPL-3.0-only AND MIT",
        "two": "GPL-3.0-only AND MIT",
        "both": "GPL-3.0-or-later AND MIT",
        "mixed": "",
        "deb": "MIT AND GPL-3.0-or-later",
        "or": "MIT OR GPL-3.0-or-later",
        "comma": UNKNOWN,
    }


def test_packages_and_documentation_say_their_license(tmp_path: Path) -> None:
    for name, text in {
        "p-1.0.dist-info/METADATA": "Name: p\nVersion: 1.0\nLicense-Expression: MIT OR Apache-2.0\n",
        "p-1.0.dist-info/RECORD": "p/a.py,,\nq.py,,\n",
        "bash/copyright": "Format: x\n\nFiles: *\nCopyright: y\nLicense: GPL-3+\n\nFiles: b\nLicense: Expat\n",
        "mine/LICENSE.txt": "This is free and unencumbered software released into the public domain.",
        "none/a.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    licenses = Licenses(tmp_path)
    names = "p/a.py", "q.py", "bash/README", "mine/x/y.c", "none/a.py"
    assert [licenses.of(name) for name in names] == ["MIT OR Apache-2.0"] * 2 + ["GPL-3.0-or-later", "Unlicense", ""]


def test_hostile_metadata_of_packages_says_nothing(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"{name}-1.dist-info" for name in ("pipe", "link", "record", "large", "good")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "RECORD").write_text(f"{name}/a.py,,\n")
        if name in ("record", "good"):
            (folder / "METADATA").write_text("Name: x\nLicense-Expression: MIT\n")
    (folders["record"] / "RECORD").write_text("a" * 200_000 + ",,\n")
    (folders["link"] / "METADATA").symlink_to("/dev/zero")
    os.mkfifo(folders["pipe"] / "METADATA")
    with (folders["large"] / "METADATA").open("w") as file:
        file.truncate(1 << 40)
    (tmp_path / "aside-1.dist-info").symlink_to(folders["good"])
    licenses = Licenses(tmp_path)
    assert [licenses.of(f"{name}/a.py") for name in folders] == ["", "", "", "", "MIT"]


def test_languages_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A content that is clear wins over a name, and gives a file without one its language; else the name stays."""
    labels = {"cpp": 0.99, "perl": 0.5, "lisp": 0.99, "cobol": 0.95, "json": 0.99, "python": 0.99}

    def identify(raw: bytes) -> tuple[str, float]:
        label = raw.decode().split()[0]
        return label, labels[label]

    monkeypatch.setattr(inputs, "identify_by_magika", lambda: identify)
    files = {
        "a.h": "cpp", "b.t": "perl", "c.scm": "lisp", "payroll": "cobol", "data": "json", "script.unknown": "python",
        "readme": "json", "d.py": "json",
    }  # fmt: skip
    for name, label in files.items():
        (tmp_path / name).write_text(f"{label} text\n")
    (tmp_path / "image.xyz").write_bytes(b"\0\1")
    source = SourceConfig(name="s", path=str(tmp_path), by_content=True)
    found = {
        one.name: getattr(text, "code", getattr(text, "reason", ""))
        for one in list_inputs(source)[0]
        for text in documents(one, source, LimitConfig(), lambda format, raw: "damaged")
    }
    assert found == {
        "s/a.h": "C++", "s/b.t": "Perl", "s/c.scm": "Scheme", "s/payroll": "COBOL", "s/data": "no_code",
        "s/script.unknown": "Python", "s/readme": None, "s/d.py": "Python", "s/image.xyz": "binary",
    }  # fmt: skip
    plain = SourceConfig(name="s", path=str(tmp_path))
    assert len(list_inputs(plain)[0]) == 5 and list_inputs(plain)[1] == {"unsupported": 4}
