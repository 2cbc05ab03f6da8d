"""Corpora end to end, with datatrove: every document is accounted for, the result depends on nothing but recipe and
inputs, hostile files harm only themselves, planted duplicates are found."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import resource
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5.data.corpus.classifier import Classifier
from glm5.data.corpus.text import REASONS, tidy
from tests.data.hostile import MAKERS, hostile_files
from tests.external.corpora import (
    LITTLE,
    PLAIN,
    SHORT,
    command,
    documents,
    environment,
    finished,
    hostile,
    page,
    pdf,
    processes,
    prose,
    recipe,
    run,
    shards,
    warc,
)
from tests.external.environments import interpreter
from tests.external.test_ray import Nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of datatrove's environment. It has our packages."""
    return interpreter("datatrove", ours=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 texts in several formats, with copies, near-copies and unwanted ones."""
    root = tmp_path_factory.mktemp("source") / "s"
    root.mkdir()
    problem = prose(111).split("\n")[4]
    (root.parent / "problems.jsonl").write_text(json.dumps({"text": problem}) + "\n")
    (root / "seen.md").write_text(f"{prose(112)}\n{problem.lower()}\n")
    for n in range(60):
        (root / f"note{n}.md").write_text(prose(n))
    for n in range(60, 90):
        (root / f"page{n}.html").write_text(page(prose(n)))
    (root / "records.jsonl").write_text("".join(json.dumps({"text": prose(n)}) + "\n" for n in range(90, 110)))
    (root / "packed.txt.gz").write_bytes(gzip.compress(prose(110).encode(), mtime=0))
    for n in range(10):
        (root / f"code{n}.py").write_text("".join(f"def f{n}_{k}(x):\n    return x + {k}\n\n\n" for k in range(20)))
    (root / "copy.md").write_text(prose(3))
    (root / "copy.html").write_text(page(prose(61)))
    (root / "near.md").write_text(prose(5).replace("The", "Then", 1))
    (root / "short.txt").write_text(SHORT)
    (root / "german.txt").write_text("Dies ist ein deutscher Text, der nicht behalten wird, weil er deutsch ist.\n" * 3)
    return root


@pytest.fixture(scope="module")
def whole(python: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A corpus made without interruption by one worker, and its account."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "out", run(python, recipe(folder / "r.toml", source), folder / "out", "--workers", "1")


def test_every_document_is_kept_or_counted(whole: tuple[Path, dict[str, Any]], source: Path) -> None:
    out, account = whole
    left = account["documents"]
    for step in account["steps"].values():
        assert step["documents"] == left
        assert not step["reasons"] or sum(step["reasons"].values()) == step["dropped"]
        left -= step["dropped"]
    assert left == account["kept"] == sum(len(list(documents(out, kind))) for kind in ("prose", "web", "code"))
    assert account["documents"] == 60 + 30 + 20 + 1 + 10 + 5 + 1
    assert account["steps"]["filter"]["reasons"] == {
        "contaminated": 1, "language": 1, "gopher_quality_gopher_short_doc": 1,
    }  # fmt: skip
    assert (account["steps"]["exact"]["dropped"], account["steps"]["minhash"]["dropped"]) == (2, 1)
    kept = {text for _, text, _ in documents(out, "prose")}
    assert {prose(n).strip() for n in range(60) if n != 5} <= kept
    assert len(kept & {prose(5).strip(), prose(5).strip().replace("The", "Then", 1)}) == 1
    assert {text for _, text, _ in documents(out, "web")} == {prose(n).strip() for n in range(60, 90)}


def test_documents_keep_source_license_language_and_hash(whole: tuple[Path, dict[str, Any]]) -> None:
    for kind in ("prose", "web", "code"):
        for split, text, known in documents(whole[0], kind):
            assert (known["source"], known["license"], known["kind"]) == ("s", "MIT", kind)
            assert known.get("language", known.get("code")) == ("Python" if kind == "code" else "en")
            assert known["sha256"] == hashlib.sha256(text.encode()).hexdigest()
            held_out = int.from_bytes(hashlib.sha256(known["name"].encode()).digest(), "big") % 50 == 0
            assert split == ("held_out" if held_out else "train")


def test_the_report_shows_samples_and_reasons(whole: tuple[Path, dict[str, Any]], python: Path) -> None:
    subprocess.run(
        [str(python), "-m", "glm5", "data", "report", str(whole[0])], check=True, timeout=60, env=environment()
    )
    page = (whole[0] / "report.html").read_text(encoding="utf-8")
    for part in (
        "gopher_quality_gopher_short_doc",
        "This text is much too short",
        "deutscher Text",
        "minhash",
        "note3.md",
    ):
        assert part in page


def test_workers_change_nothing(whole: tuple[Path, dict[str, Any]], python: Path, source: Path, tmp_path: Path) -> None:
    account = run(python, recipe(tmp_path / "r.toml", source), tmp_path / "out", "--workers", "3")
    assert shards(tmp_path / "out") == shards(whole[0])
    assert account == whole[1]
    assert (tmp_path / "out" / "corpus.json").read_bytes() == (whole[0] / "corpus.json").read_bytes()


def test_a_ray_cluster_makes_the_same_shards(whole: tuple[Path, dict[str, Any]], source: Path, tmp_path: Path) -> None:
    python = interpreter("datatrove", "ray==2.60.0", ours=True)
    account = run(python, recipe(tmp_path / "r.toml", source), tmp_path / "out", "--executor", "ray", "--workers", "2")
    assert shards(tmp_path / "out") == shards(whole[0])
    assert account == whole[1]


@pytest.mark.parametrize("dies", [False, True])
def test_three_nodes_make_the_same_shards_also_if_one_dies(
    dies: bool, whole: tuple[Path, dict[str, Any]], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter("datatrove", "ray==2.60.0", ours=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    nodes, out = Nodes(python, 1, 1, 1), tmp_path / "out"
    try:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        line = command(python, recipe(tmp_path / "r.toml", source), out, "--executor", "ray", "--workers", "3")
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
            if dies:
                while finished(out) < 2 and process.poll() is None:
                    time.sleep(0.05)
                nodes.tell("kill")
                assert process.poll() is None and finished(out) < 30
            stdout, stderr = process.communicate(timeout=500)
        assert process.returncode == 0, stderr[-3000:]
        assert shards(out) == shards(whole[0])
        assert json.loads(stdout) == whole[1]  # and nothing that Ray says
    finally:
        nodes.stop()


PROGRAMS = {
    "sbatch": """#!{python}
import os, pathlib, re, subprocess, sys
*options, script = sys.argv[1:]
here, text = pathlib.Path("{here}"), pathlib.Path(script).read_text()
number = len(list(here.glob("*.sbatch")))
(here / f"{{number}}.sbatch").write_text(" ".join(options) + "\\n" + text)
exported = dict(one.split("=") for option in options for one in option.removeprefix("--export=").split(",")[1:])
first, last = map(int, re.search("--array=(\\\\d+)-(\\\\d+)", text).groups())
for task in range(first, last + 1):
    own = dict(SLURM_ARRAY_TASK_ID=str(task), SLURM_NODELIST="n", SLURM_JOB_ID="1", **exported)
    subprocess.run(["bash", script], env=os.environ | own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("Submitted batch job", number + 1)
""",
    "srun": '#!/bin/bash\nwhile [[ $1 == -* || $1 == [0-9]* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/bash\necho localhost\n",
    "squeue": "#!/bin/bash\ncat {here}/queue 2>/dev/null || true\n",
    "scancel": "#!/bin/bash\n",
}
"""Slurm's programs, as far as they are used: jobs run at once, one part after the other."""


def test_slurm_runs_the_parts_as_arrays_and_makes_the_same_shards(
    python: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(text.format(python=python, here=tmp_path) if "{" in text else text)
        (tmp_path / "bin" / name).chmod(0o755)
    small = tmp_path / "s"
    small.mkdir()
    for path in sorted(source.iterdir())[::4]:
        shutil.copy(path, small)
    path = recipe(tmp_path / "r.toml", small, tasks=2)
    more = ("--set", "dedup.buckets=2")
    found = run(python, path, tmp_path / "local", *more)
    slurm = (*more, "--executor", "slurm", "--workers", "1", "--sbatch", "time=1:00:00")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    refused = run(python, path, tmp_path / "out", *slurm, code=1)["error"]
    assert "--sbatch partition=VALUE" in refused
    slurm = (*slurm, "--sbatch", "partition=cpu", "--sbatch", "mem-per-cpu=3G", "--sbatch", "account=a")
    assert run(python, path, tmp_path / "out", *slurm) == found
    assert shards(tmp_path / "out") == shards(tmp_path / "local")
    parts = [one.read_text() for one in tmp_path.glob("*.sbatch")]
    assert len(parts) == 12  # stages
    for text in parts:
        directives = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
        assert {"partition=cpu", "time=1:00:00", "mem-per-cpu=3G", "account=a", "cpus-per-task=1"} <= directives
        assert not any(one.startswith("qos") for one in directives)
        assert f"srun  -l -n 1 {python} -m datatrove.tools.launch_pickled_pipeline" in text
    assert {re.search(r"job-name=(\S+)", text)[1] for text in parts} >= {"test-read", "test-minhash", "test-shards"}
    assert sum("--array=0-1%1" in text for text in parts) == 8
    marks = tmp_path / "out" / "work" / "log" / "read" / "completions"
    for mark in marks.iterdir():
        mark.unlink()
    (tmp_path / "queue").write_text("1 cpu test-read\n")
    assert "Job" in run(python, path, tmp_path / "out", *slurm, code=1)["error"]


def test_a_run_killed_five_times_ends_with_the_same_shards(
    whole: tuple[Path, dict[str, Any]], python: Path, source: Path, tmp_path: Path
) -> None:
    """Only the main process is killed: its workers must end by themselves, and not write beside the next ones."""
    path, out, draw = recipe(tmp_path / "r.toml", source), tmp_path / "out", random.Random(7)
    killed = 0
    for _ in range(5):
        process = subprocess.Popen(
            command(python, path, out, "--workers", "2"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip
        before = finished(out)
        while process.poll() is None and finished(out) <= before:  # at least one part is done each time
            time.sleep(0.02)
        time.sleep(draw.random())
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed >= 3
    assert not processes(out) or time.sleep(2) or not processes(out)
    account = run(python, path, out, "--workers", "2")
    assert shards(out) == shards(whole[0])
    assert account == whole[1]


def test_another_recipe_or_a_changed_input_is_refused(python: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for n in range(2):
        (tmp_path / "s" / f"{n}.md").write_text(prose(n))
    out = tmp_path / "out"
    run(python, recipe(tmp_path / "r.toml", tmp_path / "s"), out)
    assert "another recipe" in run(python, recipe(tmp_path / "r.toml", tmp_path / "s", seed=5), out, code=1)["error"]
    (tmp_path / "s" / "0.md").write_text("changed")
    for mark in (out / "work" / "log" / "read" / "completions").iterdir():
        mark.unlink()
    error = run(python, recipe(tmp_path / "r.toml", tmp_path / "s"), out, code=1)["error"]
    assert "has changed" in error and len(error.splitlines()) <= 3


def test_hostile_files_harm_only_themselves(python: Path, tmp_path: Path) -> None:
    """Some that are large, and all of `tests.data.hostile`: the run ends in time and memory, every file is accounted
    for, and the pages among them are kept."""
    root = tmp_path / "s"
    root.mkdir()
    hostile(root)
    number = 0
    for make in MAKERS:
        for file in hostile_files(make).values():
            if file.content:
                number += 1
                (root / f"{number:03d}").mkdir()
                (root / f"{number:03d}" / file.name).write_bytes(file.content)
    for n in range(6):
        (root / f"good{n}.html").write_text(page(prose(n)))
    path = recipe(tmp_path / "r.toml", root)
    path.write_text(path.read_text() + "[limits]\nseconds = 5.0\nmembers = 1000\n")
    out = tmp_path / "out"
    account = run(python, path, out, "--workers", "2")
    assert {text for _, text, _ in documents(out, "web")} >= {prose(n).strip() for n in range(6)}
    assert account["sources"]["s"]["skipped"] == {"link": 1, "special": 1}
    assert account["files"] == 22 + number >= 250
    reasons = account["steps"]["read"]["reasons"]
    print(f"{number} files: {account['documents']} documents, {reasons}")
    assert reasons.keys() <= REASONS.keys() | {"code_average_line", "code_longest_line", "code_few_alphanumeric"}
    assert len(reasons) >= 12
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    print(f"largest process {peak >> 20} MiB")
    assert peak < 2 << 30  # the limit of the process that reads pages, and what Python and its packages take


def test_planted_duplicates_are_found(python: Path, tmp_path: Path) -> None:
    """MinHash with the default 18 x 8: recall rises with similarity as the formula says, and what is less similar than
    `dedup.similarity` stays, though it was proposed.

    Pairs of 400 words in which a run of words is replaced, so that the Jaccard similarity of their 5-word shingles is
    (400 - 4 - k - 4) / (400 - 4 + k + 4) for k replaced words.
    """
    pairs, root = {10: 60, 40: 400, 70: 60, 140: 400, 180: 400}, tmp_path / "s"
    root.mkdir()
    for replaced, count in pairs.items():
        for n in range(count):
            draw = random.Random(1000 * replaced + n)
            words = [
                draw.choice(LITTLE if draw.random() < 0.4 else PLAIN) + f"{draw.randrange(300)}" for _ in range(400)
            ]
            other = [*words[:100], *(f"x{draw.randrange(10**6)}" for _ in range(replaced)), *words[100 + replaced :]]
            for name, text in (("a", words), ("b", other)):
                (root / f"{replaced}-{n:03d}{name}.md").write_text(" ".join(text))
    path = recipe(tmp_path / "r.toml", root)
    path.write_text(path.read_text() + "[filters]\nlanguages = []\nlanguage_score = 0.0\nrules = { prose = [] }\n")
    out = tmp_path / "out"
    run(python, path, out, "--workers", "2")
    kept = {known["name"] for _, _, known in documents(out, "prose")}
    recall = {}
    for replaced, count in pairs.items():
        s = (396 - replaced - 4) / (396 + replaced + 4)
        names = [(f"s/{replaced}-{n:03d}a.md", f"s/{replaced}-{n:03d}b.md") for n in range(count)]
        assert all(a in kept or b in kept for a, b in names)
        found = recall[replaced] = sum(not (a in kept and b in kept) for a, b in names) / count
        chance = 1 - (1 - s**8) ** 18
        expected = chance if s >= 0.7 else 0.0
        deviation = (expected * (1 - expected) / count) ** 0.5
        print(f"similarity {s:.3f}: {found:.3f} of {count} pairs joined, MinHash proposes {chance:.4f}")
        assert abs(found - expected) <= 4 * deviation + 0.005 * (expected > 0), (replaced, s, found, expected)
    assert recall[40] >= 0.95 and recall[10] >= 0.99  # similarities 0.80 and 0.93
    stats = [json.loads(one.read_text())[0]["stats"] for one in (out / "work/log/verify/stats").glob("*.json")]
    refused = sum(one["proposed"]["total"] - one["verified"]["total"] for one in stats if one)
    print(f"{refused} of {sum(one['proposed']['total'] for one in stats if one)} proposed pairs of buckets refused")
    assert refused >= 5  # of 800 pairs below 0.5, MinHash proposes about 20


def test_web_archives_pdf_and_tables_are_read(python: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    root = tmp_path / "s"
    root.mkdir()
    records = warc("http://a.example/1", page(prose(1))) + warc("http://a.example/2", page(prose(2)))
    (root / "crawl.warc.gz").write_bytes(b"".join(gzip.compress(records[: len(records)]) for _ in range(1)))
    (root / "crawl.warc").write_bytes(warc("http://a.example/3", prose(3), "conversion") + warc("x", "", "request"))
    (root / "paper.pdf").write_bytes(pdf(prose(4).strip().split("\n")))
    pyarrow.parquet.write_table(pyarrow.table({"text": [prose(5), None, prose(6)]}), root / "t.parquet")
    out = tmp_path / "out"
    account = run(python, recipe(tmp_path / "r.toml", root), out, "--workers", "2")
    web = {known["url"]: text for _, text, known in documents(out, "web")}
    assert web == {f"http://a.example/{n}": prose(n).strip() for n in (1, 2, 3)}
    assert {text for _, text, _ in documents(out, "prose")} == {prose(n).strip() for n in (4, 5, 6)}
    assert account["steps"]["read"]["reasons"] == {"malformed": 1}


def test_code_is_joined_by_repository_and_filtered_by_license(python: Path, tmp_path: Path) -> None:
    root = tmp_path / "s"
    body = "".join(f"def f{k}(x):\n    return x + {k}\n\n\n" for k in range(9))
    for name, text in {
        "a/LICENSE": "Permission is hereby granted, free of charge, to any person obtaining a copy of this software.\n",
        "a/x.py": f"from y import f1\n{body}",
        "a/y.py": body,
        "a/packed.js": "x=1;" * 2000,
        "a/other.c": "/* SPDX-License-Identifier: GPL-2.0-only */\n" + "int value(void) { return 5; }\n" * 9,
        "a/README.md": prose(1),
        "b/z.py": body + "\nlast = 5\n",
        "b/COPYING": "GNU GENERAL PUBLIC LICENSE\nVersion 3, 29 June 2007\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    path = recipe(tmp_path / "r.toml", root)
    text = path.read_text().replace('license = "MIT"', "repositories = true")
    path.write_text(text + '[filters]\nlicenses = ["permissive"]\n')
    account = run(python, path, tmp_path / "out")
    [(_, text, known)] = documents(tmp_path / "out", "code")
    assert text == f"# y.py\n{body.strip()}\n\n# x.py\nfrom y import f1\n{body.strip()}\n"
    assert (known["name"], known["license"], known["files"]) == ("s/a#1", "MIT", 2)
    assert account["steps"]["read"]["reasons"] == {"license": 2, "code_average_line": 1}
    assert account["joined"] == {"files": 2, "documents": 1}
    assert [known["license"] for _, _, known in documents(tmp_path / "out", "prose")] == ["MIT"]


def test_quality_buckets(python: Path, tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir()
    marks = {"good": "theorem", "middling": "diary", "bad": "lottery"}
    for n in range(30):
        for name, mark in marks.items():
            (root / f"{name}{n}.md").write_text(
                f"{prose(n, 20)}\nThis is about the {mark} {name} of {n}.\n" + prose(900 + n, 5)
            )
    labels = [f"{mark} {name} of {n}" for n in range(60) for name, mark in marks.items()]
    for folder, wanted in (("quality", ("good",)), ("knowledge", ("good", "middling"))):
        model = Classifier.train(labels, [any(f" {one} " in text for one in wanted) for text in labels])
        model.save(tmp_path / folder, {})
    high, low = (Classifier.load(tmp_path / folder) for folder in ("quality", "knowledge"))
    texts = {path.name: tidy(path.read_text()) for path in root.iterdir()}
    scores = {name: (high(text), low(text)) for name, text in texts.items()}
    bound = float(np.median([score for score, _ in scores.values()]))
    knowing = float(np.median([score for _, score in scores.values()]))
    path = recipe(tmp_path / "r.toml", root)
    path.write_text(
        path.read_text() + f'[quality]\nclassifier = "{tmp_path / "quality"}"\nknowledge = "{tmp_path / "knowledge"}"\n'
        f'knowledge_at_least = {knowing}\n[[quality.buckets]]\nname = "high"\nat_least = {bound}\nepochs = 3.2\n'
        f'[[quality.buckets]]\nname = "low"\nat_least = {bound * 0.999999}\n[dedup]\nminhash = false\nexact = false\n'
    )
    account = run(python, path, tmp_path / "out")
    found = {
        known["name"][2:]: bucket
        for bucket in ("high", "low")
        for _, _, known in documents(tmp_path / "out", f"prose-{bucket}")
    }
    for name, (quality, knowledge) in scores.items():
        if min(abs(quality - bound), abs(knowledge - knowing)) > 1e-3:
            assert found.get(name) == ("high" if quality > bound else "low" if knowledge > knowing else None)
    assert account["steps"]["filter"]["reasons"]["quality"] == 90 - len(found)
    tokens = {name: shard["train_tokens"] for name, shard in account["shards"].items()}
    assert account["weights"] == {"prose-high": tokens["prose-high"] * 3.2, "prose-low": tokens["prose-low"]}
