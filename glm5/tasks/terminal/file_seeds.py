"""Seeds about files: permissions, links, duplicates."""

from __future__ import annotations

import json
import random

from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, python, seed
from glm5.tasks.terminal.words import NOUNS, WORDS, sentence


def _check_modes(t: Tests) -> None:
    import os
    import stat

    found = t.tree("/app/site")
    t.equal(sorted(found), sorted(t.data), "the files of /app/site")
    for name, (kind, mode) in t.data.items():
        t.equal(found[name], kind, f"the kind of {name}")
        if kind != "link":
            t.equal(stat.S_IMODE(os.lstat(f"/app/site/{name}").st_mode), mode, f"the mode of {name}")


@seed("permissions", level=2)
def site_permissions(rng: random.Random) -> Draft:
    """A tree gets the permissions that a policy asks for."""
    files, wanted, setup = dict[str, str | bytes](), dict[str, tuple[str, int]](), "cd /app/site\n"
    for number in range(rng.randint(14, 22)):
        folder = rng.choice(("public", "public/img", "bin", "private", "private/keys", "uploads"))
        end = rng.choice((".html", ".sh", ".key", ".txt", ""))
        name = f"{folder}/{rng.choice(WORDS)}{number}{end}"
        script = end == ".sh" or (end == "" and rng.random() < 0.5)
        files[f"/app/site/{name}"] = "#!/bin/sh\nexit 0\n" if script else f"{sentence(rng)}\n"
        if folder.startswith("private"):
            mode = 0o700 if script else 0o600
        else:
            mode = 0o755 if script else 0o644
        wanted[name] = ("file", mode)
        setup += f"chmod {rng.choice(('777', '600', '644', '4755', '666', '755', '400'))} {name}\n"
        for part in (folder, folder.partition("/")[0]):
            place = 0o700 if part.startswith("private") else 0o2775 if part == "uploads" else 0o755
            wanted[part] = ("folder", place)
    for folder in sorted(name for name, (kind, _) in wanted.items() if kind == "folder"):
        setup += f"chmod {rng.choice(('777', '755', '700'))} {folder}\n"
    setup += f"mkdir -p public; ln -s ../{next(iter(wanted))} public/current\n"
    wanted.setdefault("public", ("folder", 0o755))
    wanted["public/current"] = ("link", 0)
    return Draft(
        instruction="""
        Set the permissions in /app/site by this policy:

        - below /app/site/private only the owner may do anything: folders (private itself included) 700, files 600, and
          scripts 700;
        - elsewhere folders are 755, files 644 and scripts 755, but the folder uploads itself is 2775;
        - a script is a file that begins with `#!`, whatever its name;
        - no file has set-uid, set-gid or sticky bits. Symbolic links stay as they are.

        /app/site itself does not matter. Change nothing but permissions.
        """,
        files=files,
        setup=setup,
        solution="""
        cd /app/site
        find . -mindepth 1 -type d -exec chmod 0755 {} + -exec chmod g-s,u-s,-t {} +
        find . -type f -print0 | while IFS= read -r -d '' f; do
            mode=644; [ "$(head -c2 "$f")" = '#!' ] && mode=755
            case $f in ./private/*) mode=600; [ "$(head -c2 "$f")" = '#!' ] && mode=700;; esac
            chmod 0$mode "$f"
        done
        if [ -d private ]; then find private -type d -exec chmod 700 {} +; fi
        if [ -d uploads ]; then chmod 2775 uploads; fi
        """,
        check=_check_modes,
        data=wanted,
    )


def _check_links(t: Tests) -> None:
    import os

    found = t.tree("/app/media")
    t.equal(sorted(found.items()), sorted(t.data["kinds"].items()), "the files of /app/media")
    for name, target in t.data["targets"].items():
        path = f"/app/media/{name}"
        t.equal(os.path.realpath(path), f"/app/media/{target}", f"where {name} leads")
        t.true(not os.readlink(path).startswith("/"), f"{name} is not relative")


@seed("files", level=2)
def broken_links(rng: random.Random) -> Draft:
    """Links that broke when files moved are repaired, and dead ones removed."""
    files, setup, kinds, targets = dict[str, str | bytes](), "cd /app/media\n", dict[str, str](), dict[str, str]()
    names = [f"{rng.choice(NOUNS)}{number}.bin" for number in range(rng.randint(10, 14))]
    for name in names:
        folder = rng.choice(("audio", "video", "video/raw", "notes"))
        files[f"/app/media/{folder}/{name}"] = rng.randbytes(20).hex()
        kinds[f"{folder}/{name}"] = "file"
        for part in (folder, folder.partition("/")[0]):
            kinds[part] = "folder"
        place = rng.choice(("links", "links/more"))
        kinds["links"] = kinds[place] = "folder"
        target = rng.choice((f"/old/disk/{name}", f"../gone/{name}", f"../../{folder}x/{name}"))
        setup += f"mkdir -p {place}; ln -s {target} {place}/to-{name}\n"
        kinds[f"{place}/to-{name}"] = "link"
        targets[f"{place}/to-{name}"] = f"{folder}/{name}"
    for number in range(rng.randint(2, 4)):
        setup += f"ln -s /old/disk/lost{number}.bin links/lost{number}\n"
    return Draft(
        instruction="""
        The links in /app/media/links (and below) broke when the files they lead to were moved. Each of the files is now
        in another folder of /app/media, with the name that the link's target ends in; these names are unique. Make
        every link lead to its file again, with a relative target. Remove links whose file is nowhere in /app/media.
        Change nothing else.
        """,
        files=files,
        setup=setup,
        solution="""
        cd /app/media
        find links -type l | while read -r link; do
            file=$(find . -type f -name "$(basename "$(readlink "$link")")" | head -1)
            if [ -n "$file" ]; then ln -sfn "$(realpath --relative-to="$(dirname "$link")" "$file")" "$link"
            else rm "$link"; fi
        done
        """,
        check=_check_links,
        data={"kinds": kinds, "targets": targets},
    )


@seed("files")
def duplicate_files(rng: random.Random) -> Draft:
    """Files with equal content are found, whatever their names."""
    files, groups = dict[str, str | bytes](), dict[bytes, list[str]]()
    contents = [rng.randbytes(rng.randint(1, 300)) for _ in range(14)] + [b""]
    contents.append(contents[0][:-1] + b"?")
    for number in range(rng.randint(30, 40)):
        folder, data = rng.choice(("a", "a/b", "c", "c/d e")), rng.choice(contents)
        name = f"{folder}/{rng.choice(WORDS)}{number}{rng.choice(('.txt', '.bak', ''))}"
        files[f"/app/store/{name}"] = data
        if data:
            groups.setdefault(data, []).append(name)
    found = sorted(sorted(names) for names in groups.values() if len(names) > 1)
    return Draft(
        instruction="""
        Find the files below /app/store that have the same content as another one. Write them to /app/duplicates.json
        as a list of groups, each a list of paths relative to /app/store. Paths within a group are sorted, and groups
        by their first path. Empty files do not count.
        """,
        files=files,
        solution=python(
            """
        import json
        from pathlib import Path
        groups = {}
        for path in Path(".").rglob("*"):
            if path.is_file() and path.stat().st_size:
                groups.setdefault(path.read_bytes(), []).append(str(path))
        Path("/app/duplicates.json").write_text(json.dumps(sorted(sorted(g) for g in groups.values() if len(g) > 1)))
        """,
            "/app/store",
        ),
        data={"/app/duplicates.json": json.loads(json.dumps(found))},
    )
