"""Sources read their packages' files into records, and say what is wrong with damaged ones."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path

import pytest

from glm5.errors import DataError
from glm5.tasks.search.records import Record, Ref
from glm5.tasks.search.sources import SOURCES
from tests.tasks.search.world import write_dictionary


def read(name: str, *roots: Path) -> list[Record]:
    paths = SOURCES[name].find(list(roots))
    assert paths is not None
    return list(SOURCES[name].read(paths))


def test_the_dictionary(tmp_path: Path) -> None:
    entries = {"C++": "<language> By {Bjarne} at\n   {AT&T (http://att.com)} in 1986.\n\n   (1996-06-06)", "Empty": ""}
    write_dictionary(tmp_path, entries)
    subject, term = read("foldoc", tmp_path)
    assert (subject.type, subject.name) == ("subject", "language")
    assert term.name == "C++" and term.keys == ("foldoc:C++", "name:c")
    assert ("refers_to", Ref("term", "name:bjarne")) in term.claims
    assert ("term_year", 1986) in term.claims and ("term_updated", 1996) in term.claims
    assert "[[Bjarne|term|name:bjarne]]" in term.text and "AT&T" in term.text and "http" not in term.text
    (tmp_path / "usr/share/dictd/foldoc.dict.dz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="not a dictd dictionary"):
        read("foldoc", tmp_path)


def test_packages_of_debian(tmp_path: Path) -> None:
    names = [f"tool{i}" for i in range(40)]
    listed = (
        f"Package: {name}\nMaintainer: Ann B <a@example.org>\nSection: contrib/utils\nInstalled-Size: 12\n"
        "Depends: tool1 (>= 2) | other, tool2:any\nTag: implemented-in::c++\nHomepage: https://example.org/x/\n"
        f"Description: does {name}\n more\n"
        for name in names
    )
    (tmp_path / "debian-packages.txt").write_text("\n".join(listed))
    records = read("debian", tmp_path)
    packages = [record for record in records if record.type == "package"]
    assert 0 < len(packages) < len(names)  # a share of the source packages
    claims = packages[0].claims
    assert ("maintained_by", Ref("maintainer", "maintainer:ann b")) in claims
    assert ("depends", Ref("package", "deb:other")) in claims and ("depends", Ref("package", "deb:tool2")) in claims
    assert ("section", Ref("section", "section:utils")) in claims
    assert ("written_in", Ref("term", "name:c")) in claims and ("homepage", "example.org/x") in claims
    assert sum(record.type == "maintainer" for record in records) == 1


def test_manual_pages_and_modules(tmp_path: Path) -> None:
    man = tmp_path / "usr/share/man/man1"
    man.mkdir(parents=True)
    page = (
        '.TH X 1\n.SH NAME\nx \\- shows \\fBthings\\fR of every kind there is\n.SH "SEE ALSO"\n.BR y (1),\n.BR z (3)\n'
    )
    (man / "x.1.gz").write_bytes(gzip.compress((page + "text " * 20).encode()))
    (man / "bad.1.gz").write_bytes(b"no gzip")
    owners = tmp_path / "var/lib/dpkg/info"
    owners.mkdir(parents=True)
    (owners / "xtools:amd64.list").write_text("/usr\n/usr/share/man/man1/x.1.gz\n")
    [found] = read("manpages", tmp_path)
    assert found.name == "x(1)" and "shows things of every kind" in found.text
    assert set(found.claims) == {
        ("man_section", "1"),
        ("shipped_in", Ref("package", "deb:xtools")),
        ("man_refers", Ref("manpage", "man:y.1")),
    }
    library = tmp_path / "usr/share/doc/python3.11/html/library"
    library.mkdir(parents=True)
    html = (
        '<script>no()</script><a href="os.html">outside</a><div role="main"><span id="module-argparse"></span>'
        "<h1>argparse ¶</h1><p>New in version 3.2.</p><p>Source code: Lib/argparse.py</p>"
        '<p><a href="optparse.html#x">o</a></p>'
        '</div><div class="sphinxsidebar">side</div>'
    )
    (library / "argparse.html").write_text(html)
    (library / "intro.html").write_text("no module")
    [module] = read("python-docs", tmp_path)
    assert module.name == "argparse" and "side" not in module.text and "no()" not in module.text
    assert set(module.claims) == {
        ("module_source", "Lib/argparse.py"),
        ("module_since", "3.2"),
        ("module_refers", Ref("module", "py:optparse")),
    }


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mendeleev").mkdir()
    (tmp_path / "mendeleev/elements.db").write_text("text")
    with pytest.raises(DataError, match="not the database of mendeleev"):
        read("elements", tmp_path)
    with sqlite3.connect(tmp_path / "mendeleev/elements.db2") as db:
        db.execute("CREATE TABLE elements (x)")
    db.close()
    (tmp_path / "mendeleev/elements.db2").replace(tmp_path / "mendeleev/elements.db")
    with pytest.raises(DataError, match="not the database of mendeleev"):
        read("elements", tmp_path)
