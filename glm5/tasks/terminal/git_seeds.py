"""Seeds about git repositories."""

from __future__ import annotations

import random

from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, seed
from glm5.tasks.terminal.words import NOUNS, WORDS, sentence

_GIT = """\
export GIT_AUTHOR_NAME=Dev GIT_AUTHOR_EMAIL=dev@example.org GIT_COMMITTER_NAME=Dev GIT_COMMITTER_EMAIL=dev@example.org
export GIT_AUTHOR_DATE='2026-01-02T03:04:05Z' GIT_COMMITTER_DATE='2026-01-02T03:04:05Z'
git init -q -b main /app/repo
cd /app/repo
git config user.name Dev; git config user.email dev@example.org
"""


def _commit(name: str, text: str, message: str) -> str:
    return f"cat > {name} <<'END'\n{text}END\ngit add -A; git commit -qm '{message}'\n"


def _check_lost_commit(t: Tests) -> None:
    t.equal(
        t.git("/app/repo", "cat-file", "blob", f"main:{t.data['name']}"), t.data["text"], f"{t.data['name']} on main"
    )
    t.equal(t.git("/app/repo", "cat-file", "blob", "main:README"), t.data["readme"], "README on main")
    t.equal(t.text(f"/app/repo/{t.data['name']}"), t.data["text"], f"{t.data['name']} in the work tree")
    t.equal(t.git("/app/repo", "status", "--porcelain", "--untracked-files=no"), "", "the status")
    t.equal(t.git("/app/repo", "rev-parse", "--abbrev-ref", "HEAD").strip(), "main", "the branch")


@seed("git", level=2)
def lost_commit(rng: random.Random) -> Draft:
    """Work that a hard reset threw away is brought back from the reflog."""
    name = f"{rng.choice(NOUNS)}.txt"
    text = "".join(f"{sentence(rng)} {rng.randint(100, 999)}\n" for _ in range(rng.randint(5, 9)))
    readme = f"{sentence(rng)}\n"
    setup = _GIT + _commit("README", "first\n", "start")
    for _ in range(rng.randint(1, 3)):
        setup += (
            _commit("other.txt", f"{sentence(rng)} {rng.random()}\n", "try something") + "git reset -q --hard HEAD~1\n"
        )
    setup += _commit(name, text, f"add {name}") + "git reset -q --hard HEAD~1\n"
    setup += _commit("README", readme, "better readme")
    return Draft(
        instruction=f"""
        In the git repository /app/repo someone committed the file {name} ("add {name}") on main, and then threw the
        commit away with `git reset --hard`. Bring the file back, as it was in that commit: it has to be committed on
        main, on top of what is there now, and nothing that main has now may get lost.
        """,
        setup=setup,
        solution=f"""
        cd /app/repo
        git cherry-pick "$(git log -g --format='%H %s' | grep 'add {name}' | head -1 | cut -d' ' -f1)"
        """,
        check=_check_lost_commit,
        data={"name": name, "text": text, "readme": readme},
        packages=("git",),
    )


@seed("git", level=2)
def first_bad_commit(rng: random.Random) -> Draft:
    """The commit that broke a script, found among many."""
    total = rng.randint(40, 70)
    bad, factor = rng.randint(8, total - 8), rng.randint(3, 9)
    word = rng.choice(WORDS)
    setup = _GIT + "names=0\n"
    for number in range(total):
        shift = 1 if number >= bad else 0
        body = f"import sys\n# {sentence(rng)}\nn = int(sys.argv[1])\n"
        body += f"print(n * {factor} + {shift} * (n > {50 + number % 7}))\n"
        setup += _commit("price.py", body, f"{word} {number}: {sentence(rng, 5)}")
    setup += f"git tag good HEAD~{total - 1}\n"
    return Draft(
        instruction=f"""
        `python3 price.py N` in the git repository /app/repo should print {factor} times N. In the commit tagged
        `good` it does for every N, on the branch main it does not: for some N the result is too large. Find the first
        commit with the fault and write its message's first line to /app/answer.txt.
        """,
        setup=setup,
        solution=f"""
        cd /app/repo
        git bisect start main good > /dev/null
        git bisect run sh -c 'test "$(python3 price.py 1000)" = {factor * 1000}' > /dev/null
        git log -1 --format=%s refs/bisect/bad > /app/answer.txt
        git bisect reset > /dev/null 2>&1
        """,
        data={"/app/answer.txt": [_subject(setup, bad)]},
        packages=("git",),
    )


def _subject(setup: str, number: int) -> str:
    """The message of commit `number` of a setup."""
    return [line.partition("-qm '")[2].rstrip("'") for line in setup.splitlines() if "git commit" in line][number]


def _check_conflict(t: Tests) -> None:
    t.equal(t.git("/app/repo", "status", "--porcelain"), "", "the status")
    parents = t.git("/app/repo", "log", "-1", "--format=%P", "main").split()
    t.equal(len(parents), 2, "the number of parents of main")
    for branch in ("feature", t.data["main"]):
        t.git("/app/repo", "merge-base", "--is-ancestor", branch, "main")
    t.equal(t.git("/app/repo", "cat-file", "blob", "main:hosts.txt").splitlines(), t.data["lines"], "hosts.txt")


@seed("git", level=2)
def merge_conflict(rng: random.Random) -> Draft:
    """Two branches changed a sorted list; the merge keeps both sides' changes."""
    names = rng.sample(WORDS, 16)
    base = {name: rng.randint(1, 254) for name in names[:10]}
    ours, theirs = dict(base), dict(base)
    for name in names[10:13]:
        ours[name] = rng.randint(1, 254)
    for name in names[13:]:
        theirs[name] = rng.randint(1, 254)
    gone_ours, gone_theirs, changed = names[0], names[1], names[2]
    del ours[gone_ours], theirs[gone_theirs]
    theirs[changed] = base[changed] % 200 + 11
    merged = {
        **base,
        **{n: ours[n] for n in names[10:13]},
        **{n: theirs[n] for n in names[13:]},
        changed: theirs[changed],
    }
    for name in (gone_ours, gone_theirs):
        del merged[name]

    def text(table: dict[str, int]) -> str:
        return "".join(f"10.0.0.{table[name]} {name}\n" for name in sorted(table))

    setup = _GIT + _commit("hosts.txt", text(base), "hosts") + "git checkout -q -b feature\n"
    setup += _commit("hosts.txt", text(theirs), "hosts of the new rack") + "git checkout -q main\n"
    setup += _commit("hosts.txt", text(ours), "hosts of the office") + "git branch before-merge\n"
    return Draft(
        instruction="""
        Merge the branch `feature` into `main` in the git repository /app/repo. Both changed hosts.txt, a list of
        `ADDRESS NAME` lines sorted by name, and git cannot merge it by itself. The result must contain what either side
        added or changed, must not contain what either side removed, has one line per name and stays sorted by name.
        Finish the merge with a merge commit on main that leaves a clean work tree.
        """,
        setup=setup,
        solution="""
        cd /app/repo
        git checkout -q main
        base=$(git merge-base main feature)
        git merge -q feature > /dev/null || true
        python3 - "$base" <<'END'
        import subprocess, sys
        def load(name):
            command = ["git", "cat-file", "blob", f"{name}:hosts.txt"]
            text = subprocess.run(command, capture_output=True, text=True).stdout
            return {line.split()[1]: line.split()[0] for line in text.splitlines()}
        base, ours, theirs = load(sys.argv[1]), load("main"), load("feature")
        result = {}
        for name in base.keys() | ours.keys() | theirs.keys():
            mine, other, old = ours.get(name), theirs.get(name), base.get(name)
            value = mine if other == old else other
            if value:
                result[name] = value
        open("hosts.txt", "w").write("".join(f"{result[n]} {n}\\n" for n in sorted(result)))
        END
        git add hosts.txt
        git -c user.name=Dev -c user.email=dev@example.org commit -qm "merge feature"
        """,
        check=_check_conflict,
        data={"lines": text(merged).splitlines(), "main": "before-merge"},
        packages=("git",),
    )


def _check_secret(t: Tests) -> None:
    everything = t.git("/app/repo", "rev-list", "--all", "--objects")
    for line in everything.splitlines():
        name = line.split()[0]
        if t.git("/app/repo", "cat-file", "-t", name).strip() == "blob":
            t.true(
                t.data["secret"] not in t.git("/app/repo", "cat-file", "blob", name), "the secret is still in history"
            )
    subjects = t.git("/app/repo", "log", "--format=%s", "--reverse", "main").splitlines()
    t.equal(subjects, t.data["subjects"], "the messages on main")
    for name, text in t.data["files"].items():
        t.equal(t.git("/app/repo", "cat-file", "blob", f"main:{name}"), text, name)
    t.equal(
        t.git("/app/repo", "ls-tree", "-r", "--name-only", "main").split(), sorted(t.data["files"]), "files on main"
    )
    t.true(t.git("/app/repo", "rev-parse", "--verify", "release"), "the branch release is gone")


@seed("git", level=3)
def secret_in_history(rng: random.Random) -> Draft:
    """A key that was committed once is removed from every commit, and nothing else changes."""
    secret = "".join(rng.choice("abcdef0123456789") for _ in range(32))
    files, subjects = dict[str, str](), list[str]()
    setup = _GIT
    total = rng.randint(4, 6)
    for number in range(total):
        name = f"{rng.choice(NOUNS)}{number}.txt"
        files[name] = "".join(f"{sentence(rng)}\n" for _ in range(3))
        subject = f"add {name}"
        if number == 1:
            setup += f"echo 'key={secret}' > deploy.env\n"
        if number == total - 1:
            setup += "git rm -q deploy.env\n"
        setup += _commit(name, files[name], subject)
        subjects.append(subject)
        if number == total - 2:
            setup += "git branch release\n"
    return Draft(
        instruction="""
        Someone committed the file deploy.env with a secret key to the git repository /app/repo and removed it later. It
        is still in the history. Rewrite the branches main and release so that no commit that any branch or tag reaches
        has the file. Messages and order of the commits and all other files stay as they are. No reference may keep the
        old commits alive (backup references of a rewrite included).
        """,
        setup=setup,
        solution="""
        cd /app/repo
        export FILTER_BRANCH_SQUELCH_WARNING=1
        git filter-branch -f --index-filter 'git rm -q --cached --ignore-unmatch deploy.env' -- --all > /dev/null 2>&1
        git for-each-ref --format='%(refname)' refs/original | xargs -r -n1 git update-ref -d
        git reflog expire --expire=now --all
        git gc -q --prune=now
        """,
        check=_check_secret,
        data={"secret": secret, "subjects": subjects, "files": files},
        packages=("git",),
    )
