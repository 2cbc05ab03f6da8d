"""Source `patches`: a patch of a Debian source package taken back, with the upstream tests and those of the patch.

The fixed state has all patches of the package. The bug lacks one of them, except for what it changes in tests. The
header (DEP-3) is the description. Patches of packaging, documentation and tests are left out; those that name a
security advisory, a bug or an upstream commit come first.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from glm5.tasks.swe.candidate import Candidate, Repository
from glm5.tasks.swe.debian import Patch
from glm5.tasks.swe.versions import scrub

MOST_DESCRIPTION = 1500  # characters
CALL = "\x01"  # stands for the empty parentheses of a function's name
MOST_LATER = 2  # patches taken back together with an earlier one
WEIGHTS = (
    (r"CVE-\d{4}-\d+|secur|overflow|use.after.free|out.of.bounds|double.free|null (?:pointer|dereference)", 4),
    (r"^(?:Bug|Bug-\w+|Closes|Fixes):|\bfix(?:es|ed)?\b|regression|incorrect|crash", 2),
    (r"^(?:Origin|Applied-Upstream):.*(?:upstream|backport)|^From [0-9a-f]{40}", 1),
    (r"^Forwarded:\s*not-needed|spelling|typo|manpage|man page|reproducib|hardening|cross.build|shebang|privacy", -4),
)
FIELD = re.compile(
    r"^(?:From [0-9a-f]{40}.*|(?:From|Author|Date|Origin|Bug|Bug-\w+|Forwarded|Applied-Upstream|Reviewed-by|Acked-by|"
    r"Last-Update|Signed-off-by|Co-authored-by|Cc|Commit|Index|Message-Id|X-[\w-]+|MIME-Version|Content-[\w-]+|"
    r"Reported-by|Tested-by):.*)$",
    re.IGNORECASE,
)


class Patches:
    """Yields a candidate for each patch that can be taken back on top of the others."""

    name = "patches"

    def __init__(self, patches: tuple[Patch, ...]) -> None:
        self.patches = patches

    def candidates(self, repository: Repository, seed: int) -> Iterator[Candidate]:
        for patch in sorted(self.patches, key=weight, reverse=True):
            group = self._group(repository, patch)
            changes = taken_back(repository, group)
            if changes:
                tier = "hard" if len(changes) > 1 or len(group) > 1 else "single"
                origin = {"patch": " ".join(p.name for p in group)}
                known = sorted({name for p in group for name in advisories(p)})
                origin |= {"advisory": " ".join(known)} if known else {}
                notes = tuple(f"debian/patches/{p.name}" for p in group)
                text = "\n\n".join(map(description, group))[:MOST_DESCRIPTION]
                yield Candidate(repository, self.name, changes, "bug-fix", tier, notes, text, origin=origin)

    def _group(self, repository: Repository, patch: Patch) -> tuple[Patch, ...]:
        """The patch, and the later ones that must come off first because they change the same lines."""
        later = self.patches[self.patches.index(patch) + 1 :]
        same = [p for p in later if set(files(p.text)) & set(files(patch.text))]
        for count in range(min(len(same), MOST_LATER) + 1):
            for above in itertools.combinations(same, count):
                if taken_back(repository, (patch, *above)):
                    return (patch, *above)
        return (patch,)


def weight(patch: Patch) -> int:
    """How likely a patch repairs behaviour; security first."""
    text = f"{patch.name}\n{patch.header}"
    return sum(value for pattern, value in WEIGHTS if re.search(pattern, text, re.IGNORECASE | re.MULTILINE))


def advisories(patch: Patch) -> list[str]:
    return sorted(set(re.findall(r"CVE-\d{4}-\d{4,}", f"{patch.name} {patch.header}")))


def taken_back(repository: Repository, group: tuple[Patch, ...]) -> dict[str, str | None]:
    """The source files without the patches, which stand in the order of the series; empty if they change none or do not
    come off cleanly."""
    changed = sorted({path for patch in group for path in files(patch.text)})
    touched = [path for path in changed if path in repository.sources]
    if not touched:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        for path in changed:
            if (repository.root / path).is_file():
                (Path(scratch) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(repository.root / path, Path(scratch) / path)
        command = ["patch", "-R", "-p1", "--batch", "--fuzz=2", "--no-backup-if-mismatch", "-r", "-"]
        for patch in reversed(group):
            done = subprocess.run(command, cwd=scratch, input=patch.text.encode(), capture_output=True, timeout=60)
            if done.returncode:
                return {}
        found: dict[str, str | None] = {}
        for path in touched:
            try:
                text = (Path(scratch) / path).read_bytes().decode() if (Path(scratch) / path).is_file() else None
                if text != repository.read(path):
                    found[path] = text
            except UnicodeDecodeError:
                return {}
    return found


def below(patch: Patch, folder: str) -> Patch:
    """A patch for a tree's folder as the root: what it changes elsewhere is left out."""
    inside = []
    for part in re.split(r"^(?=--- \S+.*\n\+\+\+ \S)", patch.text, flags=re.MULTILINE):
        if any(path.startswith(folder + "/") for path in files(part)):
            head = rf"^(--- |\+\+\+ )([^\s/]+/){re.escape(folder)}/"
            text = re.sub(head, r"\1\2", part, count=2, flags=re.MULTILINE)
            inside.append(re.split(r"^(?:diff |Index: )", text, maxsplit=1, flags=re.MULTILINE)[0])
    return replace(patch, text="".join(inside))


def files(diff: str) -> list[str]:
    """The paths that a diff changes, the first component left out."""
    paths = []
    for old, new in re.findall(r"^--- (\S+).*\n\+\+\+ (\S+)", diff, re.MULTILINE):
        name = old if new == "/dev/null" else new
        paths.append(name.split("/", 1)[-1])
    return paths


def description(patch: Patch) -> str:
    """The header in prose: without names, dates, links and numbers that point at the fix."""
    lines = []
    for line in patch.header.split("\n---\n")[0].splitlines():
        if FIELD.match(line) or line.startswith(("---", "===")):
            continue
        line = re.sub(r"^(?:Subject|Description):\s*", "", line, flags=re.IGNORECASE)
        line = re.sub(r"\[PATCH[^]]*\]\s*", "", line)
        lines.append(re.sub(r"^ \.?$", "", line).removeprefix(" "))
    text = re.sub(
        r"^.*\bCVE-\d{4}-\d+\b.*$",
        _without_advisory,
        scrub("\n".join(lines).strip().replace("()", CALL)),
        flags=re.MULTILINE,
    )
    return re.sub(r"\n{3,}", "\n\n", text.replace(CALL, "()")).strip()[:MOST_DESCRIPTION]


def _without_advisory(line: re.Match[str]) -> str:
    left = re.sub(r"\s*\(?\bCVE-\d{4}-\d+\)?[:,.]?", "", line[0])
    return "" if len(re.findall(r"\w+", left)) < 5 else left.strip()
