"""Seeds about archives and checksums."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import random
import tarfile
import zipfile
from typing import Any

from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, seed
from glm5.tasks.terminal.words import NOUNS, WORDS, sentence


def _tar(files: dict[str, bytes], kind: str) -> bytes:
    """A tar archive, compressed with gz, bz2 or xz."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1_700_000_000
            tar.addfile(member, io.BytesIO(data))
    plain = stream.getvalue()
    if kind == "gz":
        return gzip.compress(plain, mtime=0)
    return bz2.compress(plain) if kind == "bz2" else lzma.compress(plain)


def _zip(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), data)
    return stream.getvalue()


@seed("archives", level=2)
def nested_archives(rng: random.Random) -> Draft:
    """Files are found in archives inside of archives of several kinds."""
    wanted, number = dict[str, str](), 0

    def level(depth: int) -> dict[str, bytes]:
        nonlocal number
        files = dict[str, bytes]()
        for _ in range(rng.randint(2, 4)):
            number += 1
            kind = rng.choice((".txt", ".txt", ".md", ".log"))
            text = f"{sentence(rng)}\n{'KEEP' if rng.random() < 0.5 else 'keep'} {number}\n"
            name = f"{rng.choice(NOUNS)}{number}{kind}"
            files[f"{rng.choice(WORDS)}/{name}"] = text.encode()
            if kind == ".txt" and "KEEP" in text:
                wanted[name] = text
        for _ in range(2 if depth else 0):
            number += 1
            pack, end = rng.choice((("gz", ".tar.gz"), ("bz2", ".tar.bz2"), ("xz", ".tar.xz"), ("", ".zip")))
            inner = level(depth - 1)
            files[f"pack{number}{end}"] = _tar(inner, pack) if pack else _zip(inner)
        return files

    outer = level(3)
    wanted["needle.txt"] = "KEEP me\n"
    outer["needle.txt"] = b"KEEP me\n"
    return Draft(
        instruction="""
        /app/all.tar.gz contains files and further archives (.tar.gz, .tar.bz2, .tar.xz, .zip), which contain files and
        archives again, and so on. Copy every file whose name ends in .txt and that has the word KEEP (upper case) in it
        into /app/found, without its folders. All these names are different. Nothing else may be in /app/found.
        """,
        files={"/app/all.tar.gz": _tar(outer, "gz")},
        solution="""
        cd /app; mkdir -p found work; cp all.tar.gz work/
        python3 - <<'END'
        import os, shutil, tarfile, zipfile
        from pathlib import Path
        todo, count = [Path("work/all.tar.gz")], 0
        while todo:
            pack, count = todo.pop(), count + 1
            target = Path(f"work/{count}")
            if pack.suffix == ".zip":
                zipfile.ZipFile(pack).extractall(target)
            else:
                tarfile.open(pack).extractall(target)
            for path in target.rglob("*"):
                if path.suffix in (".zip", ".gz", ".bz2", ".xz"):
                    todo.append(path)
                elif path.suffix == ".txt" and "KEEP" in path.read_text():
                    shutil.copy(path, "found")
        END
        rm -r work
        """,
        data={"/app/found/": wanted},
        packages=("tar", "gzip", "bzip2", "xz-utils", "unzip"),
    )


def _check_release(t: Tests) -> None:
    import io
    import tarfile

    try:
        archive = tarfile.open(fileobj=io.BytesIO(t.read("/app/release.tar.gz")), mode="r:gz")  # noqa: SIM115
        members = archive.getmembers()
        found = {}
        for member in members:
            if member.isdir():
                continue
            stream = archive.extractfile(member) if member.isreg() else None
            t.true(stream is not None, f"{member.name} is not a regular file")
            found[member.name] = [stream.read().decode() if stream else "", bool(member.mode & 0o100)]
            t.equal((member.uid, member.gid, member.mtime), (0, 0, t.data["mtime"]), f"owner or time of {member.name}")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        t.fail(f"/app/release.tar.gz: {error}")
    t.equal(found, t.data["files"], "the files of /app/release.tar.gz")
    names = [member.name for member in members if not member.isdir()]
    t.equal(names, sorted(names), "the order of the files")


@seed("archives", level=2)
def release_archive(rng: random.Random) -> Draft:
    """A release archive is packed by rules: what is left out, names, owners, times, order."""
    name, version = rng.choice(NOUNS), f"{rng.randint(0, 3)}.{rng.randint(0, 20)}.{rng.randint(0, 9)}"
    mtime, files, wanted = rng.randint(1_500_000_000, 1_700_000_000), dict[str, str | bytes](), dict[str, list[Any]]()
    for number in range(rng.randint(14, 20)):
        folder = rng.choice(("src", "src/core", "docs", "tests", "build", ".git/objects", "src/__pycache__", "bin"))
        end = rng.choice((".py", ".txt", ".pyc", ".log", ""))
        text = f"#!/bin/sh\necho {number}\n" if folder == "bin" else f"{sentence(rng)} {number}\n"
        path = f"{folder}/{rng.choice(WORDS)}{number}{end}"
        files[f"/app/project/{path}"] = text
        out = folder in ("build", ".git/objects", "src/__pycache__", "tests") or end in (".pyc", ".log")
        if not out:
            wanted[f"{name}-{version}/{path}"] = [text, folder == "bin"]
    files["/app/project/VERSION"] = f"{version}\n"
    files["/app/project/.releaseignore"] = (
        "# not for users\nbuild/\ntests/\n.git/\n__pycache__/\n*.pyc\n*.log\n.releaseignore\n"
    )
    wanted[f"{name}-{version}/VERSION"] = [f"{version}\n", False]
    return Draft(
        instruction=f"""
        Pack the project in /app/project into /app/release.tar.gz:

        - leave out what /app/project/.releaseignore names: `x/` is every folder of that name, at any depth, with all
          that is in it; `*.x` every file with that ending; other lines are names of files; # begins a comment;
        - all paths in the archive begin with {name}-VERSION/, with the content of the file VERSION in the place of
          VERSION;
        - files are sorted by path (as bytes), owner and group are 0, the time of every file is {mtime} (seconds since
          1970), the permissions stay;
        - no links and no other kinds of files.
        """,
        files=files,
        solution=f"""
        cd /app
        version=$(cat project/VERSION)
        cd project
        find . -type d \\( -name build -o -name tests -o -name .git -o -name __pycache__ \\) -prune -o -type f \\
            ! -name '*.pyc' ! -name '*.log' ! -name .releaseignore -printf '%P\\n' | LC_ALL=C sort > /tmp/list
        tar --format=gnu --owner=0 --group=0 --numeric-owner --mtime=@{mtime} --transform "s,^,{name}-$version/," \\
            -czf ../release.tar.gz -T /tmp/list
        """,
        check=_check_release,
        data={"files": wanted, "mtime": mtime},
        packages=("tar", "gzip"),
    )


def _check_repair(t: Tests) -> None:
    import hashlib

    tree = t.tree("/app/archive")
    t.equal(sorted(name for name, kind in tree.items() if kind != "folder"), sorted(t.data["sums"]), "/app/archive")
    for name, wanted in t.data["sums"].items():
        t.equal(hashlib.sha256(t.read(f"/app/archive/{name}")).hexdigest(), wanted, name)
    t.equal(t.lines("/app/repaired.txt"), t.data["bad"], "/app/repaired.txt")


@seed("archives", level=2)
def damaged_files(rng: random.Random) -> Draft:
    """Files that do not match their checksums are restored from the right one of several backups."""
    files, sums, bad, listing = dict[str, str | bytes](), dict[str, str](), list[str](), ""
    for number in range(rng.randint(25, 35)):
        name = f"{rng.choice(WORDS)}/{rng.choice(NOUNS)}{number}.dat"
        data = rng.randbytes(rng.randint(200, 2000))
        sums[name] = hashlib.sha256(data).hexdigest()
        listing += f"{sums[name]}  {name}\n"
        state = rng.choice(("fine", "fine", "fine", "changed", "missing", "short"))
        places = ["daily", "weekly", "monthly"]
        rng.shuffle(places)
        files[f"/app/backups/{places[0]}/{name}"] = data
        for place in places[1:]:
            if rng.random() < 0.7:
                files[f"/app/backups/{place}/{name}"] = rng.choice((data[:-1], data + b"x", bytes(reversed(data))))
        if state == "fine":
            files[f"/app/archive/{name}"] = data
            continue
        bad.append(name)
        if state == "changed":
            files[f"/app/archive/{name}"] = data[:50] + bytes([data[50] ^ 1]) + data[51:]
        elif state == "short":
            files[f"/app/archive/{name}"] = data[: len(data) // 2]
    files["/app/SHA256SUMS"] = listing
    return Draft(
        instruction="""
        /app/SHA256SUMS lists the files of /app/archive with their SHA-256 sums. Some of the files are damaged or
        missing. /app/backups has several backups with the same folders, of which some are damaged too. Bring every
        file of /app/archive to the state that its sum describes. Write the paths of the files that you repaired, as
        they are in SHA256SUMS and sorted as bytes, to /app/repaired.txt, one a line.
        """,
        files=files,
        solution="""
        cd /app/archive
        sha256sum -c ../SHA256SUMS 2>/dev/null | grep -v ': OK$' | sed 's/: FAILED.*//' |
            LC_ALL=C sort > ../repaired.txt
        while read -r name; do
            wanted=$(awk -v n="$name" '$2 == n { print $1 }' ../SHA256SUMS)
            for copy in ../backups/*/"$name"; do
                if [ "$(sha256sum < "$copy" | cut -d' ' -f1)" = "$wanted" ]; then
                    mkdir -p "$(dirname "$name")"; cp "$copy" "$name"
                fi
            done
        done < ../repaired.txt
        """,
        check=_check_repair,
        data={"sums": sums, "bad": sorted(bad)},
    )
