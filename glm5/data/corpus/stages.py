"""The stages of a corpus as datatrove pipelines, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.exact_dedup import (
    ExactDedupConfig,
    ExactDedupFilter,
    ExactDedupSignature,
    ExactFindDedups,
)
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)
from datatrove.pipeline.readers.jsonl import JsonlReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig

from glm5.config.corpus import CorpusRecipe
from glm5.data.corpus.filters import WORDS, Filter
from glm5.data.corpus.held_out import FindSimilar, Split, WriteHeldOut
from glm5.data.corpus.near import OwnText, Signatures, Verify, WriteProposed, content
from glm5.data.corpus.read import ReadInputs
from glm5.data.corpus.samples import Keep, Samples
from glm5.data.corpus.semantic import Assign, Centres, Compare, Embed, SemanticFilter
from glm5.data.corpus.split import MOVES
from glm5.data.corpus.templates import DropTemplates, FindTemplates, WriteSkeletons
from glm5.data.corpus.tokens import MergeTokens, WriteTokens


@dataclass(frozen=True)
class Stage:
    """A pipeline that runs once per part. Its parts may run at the same time; stages run one after the other."""

    name: str
    steps: list[PipelineStep]
    tasks: int


class PartWriter(JsonlWriter):
    """One file per part, also for a part without documents: readers match files to parts by their order."""

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        self.output_mg.get_file(f"{rank:05d}.jsonl.gz")
        yield from super().run(data, rank, world_size)


def stages(recipe: CorpusRecipe, out: Path) -> list[Stage]:
    """All stages of a recipe; their files are below `out/work`."""
    work, tasks, dedup = out / "work", recipe.tasks, recipe.dedup
    samples = Samples(work / "samples", recipe.samples)
    hashing = HashConfig(precision=64, hash_fc="sha1")
    exact = ExactDedupConfig(content, hash_config=hashing)
    near = MinhashConfig(
        n_grams=dedup.shingle_words,
        num_buckets=dedup.buckets,
        hashes_per_bucket=dedup.hashes,
        seed=recipe.seed + 1,
        norm_config=TextNormConfig(norm_numbers=False),
        hash_config=hashing,
    )

    def folder(name: str) -> str:
        return str(work / name)

    def left(after: str = "semantic", noted: bool = False) -> list[PipelineStep]:
        """Read the documents that deduplication has left after a step. With `noted`, samples are kept of the others."""
        steps: list[PipelineStep] = [JsonlReader(folder("documents"), compression="gzip", add_file_path=False)]
        if dedup.exact:
            steps.append(ExactDedupFilter(folder("exact/copies"), exact, Keep("exact", samples) if noted else None))
        if dedup.templates:
            steps.append(DropTemplates(work / "templates/found", Keep("templates", samples) if noted else None))
        if dedup.minhash and after != "exact":
            steps.append(MinhashDedupFilter(folder("minhash/clusters"), Keep("minhash", samples) if noted else None))
        if dedup.semantic is not None and after == "semantic":
            steps.append(SemanticFilter(work / "semantic/dropped", Keep("semantic", samples) if noted else None))
        return steps

    read = [
        ReadInputs(out, recipe.sources, recipe.limits, recipe.filters, samples, recipe.tokenizer),
        Filter(recipe.filters, recipe.quality, samples),
        PartWriter(folder("documents"), compression="gzip"),
    ]
    found = [Stage("read", read, tasks)]
    if dedup.exact:
        read.append(ExactDedupSignature(folder("exact/hashes"), exact))
        found.append(Stage("exact", [ExactFindDedups(folder("exact/hashes"), folder("exact/copies"), exact)], 1))
    if dedup.templates:
        read.insert(3, WriteSkeletons(work / "templates/skeletons"))  # exact signatures end the pipeline
        find = FindTemplates(
            work / "templates/skeletons", work / "templates/found", dedup.template_copies, dedup.template_share
        )
        found.append(Stage("templates", [find], 1))
    if dedup.minhash:
        signatures = Signatures(folder("minhash/signatures"), near, language=WORDS)
        pairs, shingles, verified = (work / "minhash" / name for name in ("pairs", "shingles", "verified"))
        found += [
            Stage("minhash", [*left("exact"), OwnText(), signatures], tasks),
            Stage("pairs", [MinhashDedupBuckets(signatures.output_folder, str(pairs), config=near)], dedup.buckets),
            Stage("proposed", [*left("exact"), OwnText(), WriteProposed(pairs, shingles, signatures)], tasks),
            Stage("verify", [Verify(pairs, shingles, verified, dedup.similarity)], dedup.buckets),
            Stage("clusters", [MinhashDedupCluster(str(verified), folder("minhash/clusters"), near)], 1),
        ]
    if dedup.semantic is not None:
        vectors, dropped = work / "semantic/vectors", work / "semantic/dropped"
        found += [
            Stage("embed", [*left("minhash"), Embed(vectors, dedup.semantic)], tasks),
            Stage("centres", [Centres(vectors, dedup.semantic, recipe.seed)], 1),
            Stage("assign", [Assign(vectors)], tasks),
            Stage("compare", [Compare(vectors, dropped, dedup.semantic)], tasks),
        ]
    moves = None
    if dedup.held_out is not None:
        split = work / "split"
        shingles, alike, moves = split / "shingles", split / "pairs", split / MOVES
        found += [
            Stage("held-out", [*left(), WriteHeldOut(shingles, dedup.shingle_words)], tasks),
            Stage("similar", [*left(), FindSimilar(shingles, alike, dedup.shingle_words, dedup.held_out)], tasks),
            Stage("split", [Split(shingles, alike, moves, dedup.held_out)], 1),
        ]
    tokens = work / "tokens"
    return [
        *found,
        Stage("tokens", [*left(noted=True), WriteTokens(tokens, recipe.tokenizer, samples, moves)], tasks),
        Stage("shards", [MergeTokens(tokens, out / "shards", recipe.tokenizer)], 1),
    ]
