"""Corpora end to end, with datatrove: every document is accounted for, the result depends on nothing but recipe and
inputs, hostile files harm only themselves, planted duplicates are found."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm5.chat.tokenizer import Tokenizer
from glm5.data.corpus.classifier import Classifier
from glm5.data.corpus.text import tidy
from glm5.data.shards import open_shard
from glm5.process import python_path
from tests.external.environments import interpreter

pytestmark = pytest.mark.slow
TOKENIZER = Tokenizer.byte_level()
WORDS = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split()
PLAIN = [word for word in WORDS if word.isalpha() and len(word) > 3]
LITTLE = "the of and to in that is with for it as was on be by at have from this".split()


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of datatrove's environment. It has our packages."""
    return interpreter("datatrove", ours=True)


def prose(seed: int, sentences: int = 30) -> str:
    """English-looking text that passes every rule, different for every seed."""
    draw, lines = random.Random(seed), []
    for _ in range(sentences):
        words = [draw.choice(LITTLE if draw.random() < 0.4 else PLAIN) for _ in range(draw.randint(10, 20))]
        lines.append(" ".join(["The", *words, draw.choice(PLAIN)]) + ".")
    return "\n".join(lines) + "\n"


SHORT = (
    "This text is much too short. It has two or three sentences, about nothing at all; then it ends without saying "
    "more, which nobody would want to read twice.\n"
)


def page(text: str) -> str:
    paragraphs = "".join(f"<p>{line}</p>" for line in text.split("\n"))
    return f"<html><head><title>T</title></head><body><nav>menu</nav><main>{paragraphs}</main></body></html>"


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


def recipe(path: Path, source: Path, **more: Any) -> Path:
    values = {"name": "test", "tasks": 5, "samples": 2} | more
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    lines += ["[[sources]]", 'name = "s"', f"path = {json.dumps(str(source))}", 'license = "MIT"']
    problems = source.parent / "problems.jsonl"
    if problems.exists():
        lines += ["[filters]", f"problems = [{json.dumps(str(problems))}]"]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(python: Path, path: Path, out: Path, *more: str) -> list[str]:
    return [str(python), "-m", "glm5", "data", "run", str(path), "--out", str(out), "--json", *more]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def run(python: Path, path: Path, out: Path, *more: str, code: int = 0) -> dict[str, Any]:
    """The account that the command prints, or {"error": its stderr}."""
    done = subprocess.run(
        command(python, path, out, *more), capture_output=True, text=True, timeout=600, env=environment()
    )
    assert done.returncode == code, done.stderr[-3000:]
    account: dict[str, Any] = json.loads(done.stdout) if code == 0 else {"error": done.stderr}
    return account


def shards(out: Path) -> dict[str, str]:
    files = sorted(path for path in (out / "shards").rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def whole(python: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A corpus made without interruption by one worker, and its account."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "out", run(python, recipe(folder / "r.toml", source), folder / "out", "--workers", "1")


def documents(out: Path, kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(split, text, what is known) of all documents of a shard."""
    for split in ("train", "held_out"):
        shard = open_shard(out / "shards" / kind, split, TOKENIZER)
        lines = (out / "shards" / kind / f"{split}.documents").read_text().splitlines()
        for index, line in enumerate(lines):
            assert json.loads(line)["name"] == shard.paths[index]
            yield split, TOKENIZER.decode(shard.document(index)[:-1].tolist()), json.loads(line)
        assert len(lines) == len(shard)


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


def processes(out: Path) -> list[str]:
    """Processes that have a file of the corpus open."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            found += [str(folder) for one in folder.iterdir() if os.readlink(one).startswith(str(out))]
        except OSError:
            continue
    return found


def finished(out: Path) -> int:
    return len(list((out / "work" / "log").glob("*/completions/*")))


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


def hostile(root: Path) -> None:
    """Files that hang, crash or swell their reader, or lie about what they are."""
    deep = "<div>" * 300_000
    (root / "deep.html").write_text(f"<html><body>{deep}text")
    (root / "table.html").write_text("<table>" * 3000 + "<td>" * 300_000)
    (root / "broken.html").write_bytes(b"<html><p>" + bytes(range(256)) * 200 + b"<title>" * 9000)
    (root / "bomb.html.gz").write_bytes(gzip.compress(b"<p>a" * (16 << 20), mtime=0))
    (root / "broken.pdf").write_bytes(b"%PDF-1.7\n1 0 obj << /Length 99999999999 >> stream\n" + os.urandom(5000))
    (root / "loop.pdf").write_bytes(
        b"%PDF-1.4\n1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj\n"
        b"2 0 obj <</Type/Pages/Kids[2 0 R 2 0 R]/Count 1000000>> endobj\n"
        b"trailer <</Root 1 0 R>>\n%%EOF\n"
    )
    (root / "broken.warc.gz").write_bytes(gzip.compress(b"WARC/1.0\r\nContent-Length: 99999999999\r\n\r\n" * 50))
    (root / "broken.warc").write_bytes(
        b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: -5\r\n\r\n" + os.urandom(999)
    )
    (root / "broken.parquet").write_bytes(b"PAR1" + os.urandom(2000) + b"PAR1")
    (root / "broken.zip").write_bytes(b"PK\x03\x04" + os.urandom(2000))
    (root / "zero.txt").write_bytes(b"\0" * 5000)
    (root / "one-line.md").write_text("word " * 700_000)
    (root / "one-word.md").write_text("x" * 3_500_000)
    (root / "marks.md").write_text("!?" * 900_000)
    (root / "spaces.md").write_text("a" + " " * 3_000_000 + "b")
    (root / "combining.md").write_text("e" + "\u0301" * 900_000)
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.html")


def test_hostile_files_harm_only_themselves(python: Path, tmp_path: Path) -> None:
    root = tmp_path / "s"
    root.mkdir()
    hostile(root)
    for n in range(6):
        (root / f"good{n}.html").write_text(page(prose(n)))
    limits = "[limits]\nseconds = 5.0\n"
    path = recipe(tmp_path / "r.toml", root)
    path.write_text(path.read_text() + limits)
    out = tmp_path / "out"
    account = run(python, path, out, "--workers", "2")
    assert {text for _, text, _ in documents(out, "web")} >= {prose(n).strip() for n in range(6)}
    assert account["sources"]["s"]["skipped"] == {"link": 1, "special": 1}
    assert account["steps"]["read"]["dropped"] >= 7
    assert account["files"] == 22


def test_planted_duplicates_are_found(python: Path, tmp_path: Path) -> None:
    """MinHash with the default 14 x 8: recall rises with similarity as the formula says, and nothing else is dropped.

    Pairs of 400 words in which a run of words is replaced, so that the Jaccard similarity of their 5-word shingles is
    (400 - 4 - k - 4) / (400 - 4 + k + 4) for k replaced words.
    """
    pairs, root = 60, tmp_path / "s"
    root.mkdir()
    similarity = {}
    for replaced in (10, 40, 140):
        similarity[replaced] = (396 - replaced - 4) / (396 + replaced + 4)
        for n in range(pairs):
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
    for replaced, s in similarity.items():
        names = [(f"s/{replaced}-{n:03d}a.md", f"s/{replaced}-{n:03d}b.md") for n in range(pairs)]
        assert all(a in kept or b in kept for a, b in names)
        found = sum(not (a in kept and b in kept) for a, b in names) / pairs
        expected = 1 - (1 - s**8) ** 14
        deviation = (expected * (1 - expected) / pairs) ** 0.5
        assert abs(found - expected) <= 4 * deviation + 0.02, (replaced, s, found, expected)


def warc(url: str, body: str, kind: str = "response") -> bytes:
    content = body.encode()
    if kind == "response":
        content = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + content
    lines = ["WARC/1.0", f"WARC-Type: {kind}", f"WARC-Target-URI: {url}", "WARC-Date: 2026-01-01T00:00:00Z"]
    lines += [f"WARC-Record-ID: <urn:uuid:{hashlib.md5(url.encode()).hexdigest()}>"]
    lines += ["Content-Type: application/http; msgtype=response" if kind == "response" else "Content-Type: text/plain"]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content + b"\r\n\r\n"


def pdf(lines: list[str]) -> bytes:
    """A PDF of one page with these lines."""
    shown = "".join(f"({line}) Tj T*\n" for line in lines)
    stream = f"BT /F1 10 Tf 12 TL 40 780 Td\n{shown}ET"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 900 800]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(stream)}>>\nstream\n{stream}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"xref\n0 6\n0000000000 65535 f \n{table}trailer\n<</Size 6/Root 1 0 R>>\nstartxref\n{len(out)}\n%%EOF\n"
    return (out + end).encode()


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
