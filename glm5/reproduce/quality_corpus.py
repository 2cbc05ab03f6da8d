"""The texts of `data-quality`: one slice of what is installed here, made into a corpus in several ways by `glm5 data
run`, and held-out text of three sources that none of these ways has chosen.

Packages (top folders) are drawn by the hash of their name, one in `HELD_OUT_ONE_IN` of them for held-out text. Held-out
text is taken as it comes, without the filters under test, except that what resembles training text of any variant is
dropped; beside it stands the reference manual that comes with Python, of which training sees nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm5.chat import Tokenizer
from glm5.config.corpus import ClassifierRecipe, CorpusRecipe
from glm5.data.corpus.labelled import train_classifier
from glm5.data.corpus.plan import Input, list_inputs
from glm5.data.corpus.run import need_extra, run_corpus
from glm5.data.dedup import group, sketcher
from glm5.data.shards import encode_documents, open_shard, publish_shards, verify_shards
from glm5.errors import DataError
from glm5.files import publish_dir, recover_dir
from glm5.reproduce.plan import Sizes

INFO = "corpus.json"
TRAIN, HELD_OUT = "train", "held_out"
HELD_OUT_ONE_IN = 5
HELD_OUT_CHARACTERS = 4000
"""Of each held-out document the first so many are used, so that many documents have a say."""
NEAR = 0.5
"""Jaccard similarity of 5-word shingles from which held-out text counts as a copy of training text."""
SOURCES = {"code": "stdlib", "doc": "doc"}
REFERENCE = "reference"
_NO_RULES: dict[str, Any] = {"languages": [], "language_score": 0.0, "rules": {"web": [], "prose": [], "code": []}}
_NO_DEDUP = {"exact": False, "minhash": False}
CORPORA: dict[str, dict[str, Any]] = {
    "unfiltered": {"filters": _NO_RULES, "dedup": _NO_DEDUP},
    "filtered": {"dedup": _NO_DEDUP},
    "deduplicated": {"filters": _NO_RULES},
    "both": {},
    "classified": {"quality": {"buckets": [{"name": "high", "at_least": 0.5}]}},
}
"""What differs from the defaults of a recipe of `glm5 data run`, by variant."""
_CHRONICLES = ["changelog*", "copyright*", "NEWS*", "ChangeLog*", "news*", "AUTHORS*", "THANKS*", "TODO*"]


def build(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Make `folder` unless it exists: `tokenizer`, `data/VARIANT` (training) and `held_out/SOURCE`; returns counts and
    `sha256` of all. Raises MissingExtraError without the extra `data`, DataError if too little is installed here."""
    need_extra("local")
    recover_dir(folder)
    if not folder.exists():
        with publish_dir(folder) as fresh:
            _make(fresh, sizes)
    try:
        info: dict[str, Any] = json.loads((folder / INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError(f"{folder} is no corpus of this experiment; delete it to build it again.") from None
    shards = [path.parent for path in folder.glob("*/*/shards.json")]
    verify_shards(*shards, remedy=f"Delete {folder} to build the data again.")
    return info


def _make(folder: Path, sizes: Sizes) -> None:
    raw = folder / "raw"
    for name in SOURCES:
        _stage(name, raw, sizes["source_bytes"], sizes["package_bytes"])
    classifier = folder / "classifier"
    facts = train_classifier(_classifier(raw / TRAIN / "doc"), classifier)
    accounts, texts = {}, {}
    for variant, changes in CORPORA.items():
        accounts[variant], texts[variant] = _corpus(raw / TRAIN, folder / "work" / variant, changes, classifier)
    _, held = _corpus(raw / HELD_OUT, folder / "work" / HELD_OUT, CORPORA["unfiltered"], classifier)
    sets: dict[str, list[tuple[str, str]]] = {name: [] for name in (*SOURCES, REFERENCE)}
    for path, text in held:
        sets[path.partition("/")[0]].append((path, text))
    sets[REFERENCE] = list(_reference())
    seen = [text for _, text in texts["unfiltered"]]
    sets = {name: _fresh(seen, found, sizes["held_out_bytes"]) for name, found in sets.items()}
    if empty := [name for name, found in sets.items() if not found]:
        raise DataError(
            f"All held-out text of the source {empty[0]} resembles training text; install packages with more "
            "documentation (/usr/share/doc), or give the experiment more `source_bytes`."
        )
    tokenizer = Tokenizer.train(seen, sizes["vocab"])
    tokenizer.save(folder / "tokenizer")
    digest = hashlib.sha256()
    counts = {
        variant: _write(folder / "data" / variant, tokenizer, found, TRAIN, digest) for variant, found in texts.items()
    }
    left = {name: _write(folder / HELD_OUT / name, tokenizer, found, HELD_OUT, digest) for name, found in sets.items()}
    for rest in (raw, folder / "work"):
        shutil.rmtree(rest)
    info = {
        "text": _described(counts, left),
        "sha256": digest.hexdigest(),
        "vocab": tokenizer.vocab_size,
        "train_tokens": counts["unfiltered"]["tokens"],
        "held_out_tokens": sum(found["tokens"] for found in left.values()),
        "held_out_documents": sum(found["documents"] for found in left.values()),
        "variants": counts,
        "held_out": left,
        "steps": {variant: account["steps"] for variant, account in accounts.items()},
        "classifier": {"held_out": facts["held_out"], "texts": facts["texts"]},
    }
    (folder / INFO).write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")


def _stage(name: str, raw: Path, most: int, of_package: int) -> None:
    """Copy a slice of a source: packages in the order of their names' hashes, of each `of_package` bytes of files (as
    they are on disk), until `most` bytes are taken for training and a fifth of it for held-out text."""
    recipe = CorpusRecipe.model_validate({"name": name, "sources": [{"name": name, "path": SOURCES[name]}]})
    packages: dict[str, list[tuple[str, Input]]] = {}
    for one in list_inputs(recipe.sources[0])[0]:
        inner = one.name.partition("/")[2]
        if not inner.startswith("pydoc_data/"):
            packages.setdefault(inner.partition("/")[0], []).append((inner, one))
    room = {TRAIN: most, HELD_OUT: most // HELD_OUT_ONE_IN}
    for package in sorted(packages, key=_hash):
        split = HELD_OUT if _hash(package) % HELD_OUT_ONE_IN == 0 else TRAIN
        left = min(of_package, room[split])
        for inner, one in sorted(packages[package], key=lambda file: _hash(file[0])):
            if one.bytes <= left:
                left -= one.bytes
                room[split] -= one.bytes
                place = raw / split / name / inner
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(one.path, place)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _classifier(doc: Path) -> ClassifierRecipe:
    """Manuals against the chronicles of packages: changelogs, copyright files, news."""
    where = {"path": str(doc)}
    return ClassifierRecipe.model_validate(
        {
            "name": "manuals",
            "positive": [{"name": "manuals", "exclude": _CHRONICLES, **where}],
            "negative": [{"name": "chronicles", "include": _CHRONICLES, **where}],
        }
    )


def _corpus(
    raw: Path, out: Path, changes: dict[str, Any], classifier: Path
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A corpus of the staged files by `glm5 data run`: its account; name and text of every document, both splits."""
    if "quality" in changes:
        changes = changes | {"quality": changes["quality"] | {"classifier": str(classifier)}}
    sources = [{"name": path.name, "path": str(path)} for path in sorted(raw.iterdir())]
    recipe = CorpusRecipe.model_validate({"name": out.name, "tasks": 4, "samples": 0, "sources": sources, **changes})
    account, tokenizer = run_corpus(recipe, out), Tokenizer.byte_level()
    found = []
    for path in sorted((out / "shards").iterdir()):
        for split in (TRAIN, HELD_OUT):
            shard = open_shard(path, split, tokenizer)
            found += [
                (shard.paths[i], tokenizer.decode(shard.document(i).astype(int).tolist(), skip_special=True))
                for i in range(len(shard))
            ]
    return account, found


def _reference() -> Iterator[tuple[str, str]]:
    """The topics of Python's reference manual that `help()` shows."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError("This Python comes without pydoc_data, whose text is held out; install it whole.") from error
    for topic in sorted(topics, key=_hash):
        yield f"{REFERENCE}/{topic}", topics[topic]


def _fresh(seen: Sequence[str], found: list[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Of documents in the order of their names' hashes, until `most` bytes, those that resemble neither training text
    nor each other."""
    if not found:
        return []
    found = sorted(found, key=lambda one: _hash(one[0]))
    sketch = sketcher()
    sketches = [sketch(text) for text in (*seen, *(text for _, text in found))]
    groups = group(np.stack([one.signature for one in sketches]), lambda i: sketches[i].shingles, NEAR)
    taken = set(groups[: len(seen)].tolist())
    kept: list[tuple[str, str]] = []
    for (path, text), own in zip(found, groups[len(seen) :].tolist(), strict=True):
        if own not in taken and most > 0:
            taken.add(own)
            text = text[:HELD_OUT_CHARACTERS]
            most -= len(text.encode())
            kept.append((path, text))
    return kept


def _write(out: Path, tokenizer: Tokenizer, found: list[tuple[str, str]], split: str, digest: Any) -> dict[str, int]:
    with publish_shards(out, tokenizer) as (_, writers, info):
        info["sources"] = [{"source": out.name}]
        for (path, text), ids in zip(found, encode_documents([text for _, text in found], tokenizer), strict=True):
            for part in (path, text):
                digest.update(hashlib.sha256(part.encode()).digest())
            writers[split].append(ids, len(text.encode()), path)
        counts = writers[split].counts()
    return {name.removeprefix(f"{split}_"): count for name, count in counts.items()}


def _described(counts: dict[str, dict[str, int]], held: dict[str, dict[str, int]]) -> str:
    def listed(found: dict[str, dict[str, int]]) -> str:
        return ", ".join(
            f"{name} {one['documents']:,} documents with {one['tokens']:,} tokens" for name, one in found.items()
        )

    return (
        "a slice of Python's standard library and of /usr/share/doc, whole packages by the hash of their names, made "
        f"into a corpus by `glm5 data run` in {len(counts)} ways: {listed(counts)}. Held out, as they come and without "
        f"near-duplicates (Jaccard {NEAR:g}) of any training text: {listed(held)}; code and doc are packages of which "
        "training has nothing, reference is Python's manual in pydoc_data"
    )
