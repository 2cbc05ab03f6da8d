"""Small corpora for tests: texts that pass every rule, web archives, PDF, hostile files; runs of `glm5 data run`."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5.chat.tokenizer import Tokenizer
from glm5.data.shards import open_shard
from glm5.process import python_path

TOKENIZER = Tokenizer.byte_level()
WORDS = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split()
PLAIN = [word for word in WORDS if word.isalpha() and len(word) > 3]
LITTLE = "the of and to in that is with for it as was on be by at have from this".split()


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


def documents(out: Path, kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(split, text, what is known) of all documents of a shard."""
    for split in ("train", "held_out"):
        shard = open_shard(out / "shards" / kind, split, TOKENIZER)
        lines = (out / "shards" / kind / f"{split}.documents").read_text().splitlines()
        for index, line in enumerate(lines):
            assert json.loads(line)["name"] == shard.paths[index]
            yield split, TOKENIZER.decode(shard.document(index)[:-1].tolist()), json.loads(line)
        assert len(lines) == len(shard)


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
