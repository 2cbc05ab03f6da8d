"""Makes long-context rows from the shards of a corpus, part by part: what `glm5 data long` runs (§2.3).

Each section of the recipe becomes a shard folder. A part that is finished stays when the command is interrupted. The
result depends on the recipe, the shards and the checkpoint; on one machine it is the same byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm5.chat.tokenizer import Tokenizer
from glm5.config.load import dump_recipe
from glm5.config.long_rows import EntropyRows, LongRecipe, NaturalRows, NegativeRows
from glm5.data.chunk_index import ChunkIndex, Place
from glm5.data.dedup import group, select, sketcher
from glm5.data.entropy_long import LongRow, Scorer, entropy_row
from glm5.data.long_context import chunk_length, chunks, stretch
from glm5.data.shards import SplitWriter, id_dtype, open_shard, open_split, publish_shards
from glm5.errors import ConfigError, DataError
from glm5.files import MANIFEST, atomic_write, exclusive, publish_dir, read_rows, recover_dir, sha256_file
from glm5.seeds import derive_seed

ACCOUNT = "long.json"
SHORTEST_ROOT = 32
"""Tokens of the shortest document that is stretched or looked up."""
Progress = Callable[[str, int, int], None]
Section = NaturalRows | NegativeRows | EntropyRows


def make_long_rows(
    recipe: LongRecipe,
    out: Path,
    tokenizer: Tokenizer,
    scorer: Scorer | None = None,
    progress: Progress = lambda section, done, tasks: None,
) -> dict[str, Any]:
    """Make the shards `out/natural`, `out/negatives` and `out/entropy` that the recipe asks for, or finish them;
    returns the account (`out/long.json`): counts of documents, positions, queries, contexts and rows by section.

    `scorer` is the recipe's checkpoint. Raises ConfigError if `out` has other rows or no scorer is given for a section
    that needs one, DataError for shards that are missing, damaged or of another tokenizer, and if no row was made.
    """
    if recipe.entropy is not None and scorer is None:
        raise ConfigError("EntropyLong rows need a model that scores; give the recipe a `checkpoint`.")
    with exclusive(out, f"Another process is making the rows {out}; wait for it, or choose another --out."):
        _claim(recipe, out, tokenizer)
        job = _Job(recipe, out, tokenizer, scorer)
        account: dict[str, Any] = {"name": recipe.name, "length": recipe.length, "sections": {}}
        for name in ("natural", "negatives", "entropy"):
            section: Section | None = getattr(recipe, name)
            if section is not None:
                account["sections"][name] = job.make(name, section, progress)
        atomic_write(out / ACCOUNT, json.dumps(account, indent=1) + "\n")
        if not any(counts["rows"] for counts in account["sections"].values()):
            raise DataError(f"No row came out of these documents; {out / ACCOUNT} says why.")
        return account


def _claim(recipe: LongRecipe, out: Path, tokenizer: Tokenizer) -> None:
    """Check that `out` is new, or was begun with the same recipe, shards, checkpoint and tokenizer."""
    files = [Path(folder) / MANIFEST for folder in recipe.shards]
    if recipe.checkpoint is not None:
        folder = Path(recipe.checkpoint)
        listed = (folder / MANIFEST).exists()  # with the hashes of all others
        files += [folder / MANIFEST] if listed else sorted(path for path in folder.glob("*") if path.is_file())
    if missing := [path for path in files if not path.exists()]:
        raise DataError(f"{missing[0].parent} is no shard folder with a manifest; make it with `glm5 data run`.")
    inputs = {str(path): sha256_file(path) for path in files} | {"tokenizer": tokenizer.hash()}
    text = json.dumps({"recipe": dump_recipe(recipe), "inputs": inputs}, indent=1) + "\n"
    known = out / "inputs.json"
    if known.exists():
        if known.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{out} was begun with another recipe, shards or checkpoint (see {known}); choose another --out."
            )
    elif any(out.iterdir()):
        raise ConfigError(f"{out} has other content; choose a new or an empty folder for --out.")
    else:
        atomic_write(known, text)


class _Job:
    def __init__(self, recipe: LongRecipe, out: Path, tokenizer: Tokenizer, scorer: Scorer | None) -> None:
        self.recipe, self.out, self.tokenizer, self.scorer = recipe, out, tokenizer, scorer
        names = [Path(folder).name for folder in recipe.shards]
        if len(set(names)) < len(names):  # such as two folders called "prose"
            names = [f"{number}-{name}" for number, name in enumerate(names)]
        folders = dict(zip(names, map(Path, recipe.shards), strict=True))
        self.shards = {name: open_shard(folder, "train", tokenizer) for name, folder in folders.items()}
        self.end = tokenizer.special["<|endoftext|>"]
        self.separator = np.array(tokenizer.encode("\n\n"), dtype=id_dtype(tokenizer))
        self._indices: dict[int, ChunkIndex] = {}

    def make(self, name: str, section: Section, progress: Progress) -> dict[str, Any]:
        """One section: its parts, then its shard and counts."""
        places, work = self._places(section), self.out / "work" / name
        if not places:
            raise DataError(f"No document of the shards is long enough for the rows [{name}].")
        tasks = min(self.recipe.tasks, len(places))
        parts = [work / f"{part:05d}" for part in range(tasks)]
        for number, part in enumerate(parts):
            progress(name, number, tasks)
            recover_dir(part)
            if not part.exists():
                self._part(part, section, places[number::tasks])
        progress(name, tasks, tasks)
        counts = Counter({"documents": len(places)})
        for part in parts:
            counts.update(json.loads((part / "counts.json").read_text(encoding="ascii")))
        keep = self._plausible(section, parts, counts) if isinstance(section, NaturalRows) else None
        counts.update(self._publish(name, parts, keep))
        return {key: counts[key] for key in sorted(counts)}

    def _places(self, section: Section) -> list[Place]:
        """The documents that a section works on: all that are long enough, or as many of these as it wants."""
        least = SHORTEST_ROOT
        if isinstance(section, NaturalRows):
            least = section.least_tokens or self.recipe.length // 2
        found = [
            Place(name, int(document))
            for name, shard in self.shards.items()
            for document in np.flatnonzero(shard.lengths() >= least)
        ]
        most = None if isinstance(section, NaturalRows) else section.documents
        if most is None or most >= len(found):
            return found
        generator = np.random.default_rng(derive_seed(self.recipe.seed, "long documents", type(section).__name__))
        return [found[i] for i in np.sort(generator.permutation(len(found))[:most])]

    def _index(self, chunk_tokens: int | None) -> ChunkIndex:
        length = chunk_tokens or chunk_length(self.recipe.length)
        if length not in self._indices:
            self._indices[length] = ChunkIndex(self.shards, self.tokenizer, length)
        return self._indices[length]

    def _rows(self, section: Section, places: Sequence[Place], counts: Counter[str]) -> Iterator[LongRow]:
        """The rows of some documents; adds to `counts`."""
        length = self.recipe.length - 1  # the end-of-text token comes last
        for place in places:
            document = self.shards[place.shard].document(place.document)
            document = document[:-1] if document[-1] == self.end else document
            if isinstance(section, NaturalRows):
                yield LongRow(document, [place], self._bits_per_byte(document[: section.scored_tokens]))
                continue
            root = document[: length // 2]
            if isinstance(section, NegativeRows):
                yield self._negatives(place, root, section, length)
                continue
            assert self.scorer is not None, "make_long_rows has checked it"
            seed = derive_seed(self.recipe.seed, "entropy", place.shard, place.document)
            row = entropy_row(
                place, root, self._index(section.chunk_tokens), self.scorer, section, length=length,
                separator=self.separator, rng=np.random.default_rng(seed), counts=counts,
            )  # fmt: skip
            if row is not None:
                yield row
            else:
                counts["without_context"] += 1

    def _negatives(self, place: Place, root: np.ndarray, section: NegativeRows, length: int) -> LongRow:
        index, used, sources = self._index(section.chunk_tokens), set[int](), [place]
        parts = chunks(root, min(index.length, -(-len(root) // 2)))
        most = -(-length // index.length)

        def distractors(number: int) -> Iterator[np.ndarray]:
            found = index.search(index.words(parts[number]), most + len(used), place)
            for chunk in (chunk for chunk in found if chunk not in used):
                used.add(chunk)
                sources.append(index.place(chunk))
                yield index.chunk(chunk)

        return LongRow(stretch(parts, distractors, length), sources)

    def _bits_per_byte(self, tokens: np.ndarray) -> float | None:
        """How hard the model finds a text; None without a model."""
        if self.scorer is None:
            return None
        (scores,) = self.scorer([tokens])
        size = len(self.tokenizer.decode_bytes(tokens[1:].astype(int).tolist()))
        return float(-scores.logprobs.sum() / max(1, size) / np.log(2))

    def _part(self, folder: Path, section: Section, places: Sequence[Place]) -> None:
        """Write the rows of a part, what each was made of, and the counts."""
        counts: Counter[str] = Counter()
        with publish_dir(folder) as fresh, (fresh / "train.documents").open("w", encoding="ascii") as lines:
            writer = SplitWriter(fresh, "train", id_dtype(self.tokenizer))
            try:
                for row in self._rows(section, places, counts):
                    names = [self.shards[place.shard].paths[place.document] for place in row.places]
                    size = len(self.tokenizer.decode_bytes(row.tokens.astype(int).tolist()))
                    writer.append(np.append(row.tokens, self.end), size, names[row.root])
                    known: dict[str, Any] = {"name": names[row.root], "sources": names}
                    if row.bits_per_byte is not None:
                        known["bits_per_byte"] = round(row.bits_per_byte, 4)
                    lines.write(json.dumps(known) + "\n")
            finally:
                writer.close()
            (fresh / "counts.json").write_text(json.dumps(counts) + "\n", encoding="ascii")

    def _publish(self, name: str, parts: Sequence[Path], keep: np.ndarray | None) -> dict[str, int]:
        """One shard folder of all parts' rows (`keep`: which of them), in their order; returns its counts."""
        at = 0
        with publish_shards(self.out / name, self.tokenizer) as (fresh, writers, info):
            info["sources"] = [{"source": folder} for folder in self.recipe.shards]
            with (fresh / "train.documents").open("w", encoding="ascii") as lines:
                for part in parts:
                    shard = open_split(part, "train", id_dtype(self.tokenizer))
                    known = (part / "train.documents").read_text(encoding="ascii").splitlines()
                    for row in range(len(shard)):
                        if keep is None or keep[at]:
                            writers["train"].append(shard.document(row), int(shard.num_bytes[row]), shard.paths[row])
                            lines.write(known[row] + "\n")
                        at += 1
            (fresh / "held_out.documents").touch()
            written = writers["train"].counts()
        return {"rows": written["train_documents"], "tokens": written["train_tokens"]}

    def _plausible(self, section: NaturalRows, parts: Sequence[Path], counts: Counter[str]) -> np.ndarray:
        """Which natural rows stay, [n] bool: by perplexity, then one of each group of near-duplicates."""
        shards = [open_split(part, "train", id_dtype(self.tokenizer)) for part in parts]
        keep = np.ones(sum(map(len, shards)), dtype=np.bool_)
        if self.scorer is not None:
            bits = np.array([row["bits_per_byte"] for part in parts for row in read_rows(part / "train.documents")])
            low, high = np.quantile(bits, section.perplexity)
            counts["dropped_low_perplexity"], counts["dropped_high_perplexity"] = (
                int((bits < low).sum()),
                int((bits > high).sum()),
            )
            keep = (low <= bits) & (bits <= high)
        if section.dedup is not None:
            texts = (self.tokenizer.decode(s.document(i).astype(int).tolist()) for s in shards for i in range(len(s)))
            sketch = sketcher()
            sketches = [sketch(text) for text, kept in zip(texts, keep, strict=True) if kept]
            groups = group(np.stack([s.signature for s in sketches]), lambda i: sketches[i].shingles, section.dedup)
            alone = select(groups, np.zeros(len(groups), dtype=np.bool_)).keep
            counts["dropped_near_duplicates"] = int((~alone).sum())
            keep[np.flatnonzero(keep)[~alone]] = False
        return keep
