"""Recipe of a corpus: sources, filters, deduplication and shards of `glm5 data run`.

The recipe and its inputs decide the result. Processes, executor and machine are options of the command.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from glm5.config.schema import Frozen

Kind = Literal["web", "prose", "code", "swe"]
KINDS: tuple[Kind, ...] = ("web", "prose", "code", "swe")
RULES = ("gopher_repetition", "gopher_quality", "c4", "fineweb", "code", "generated")
"""Rule sets: the first four are datatrove's filters, `code` and `generated` are those of `glm5.data.corpus.filters`."""


class ChangesConfig(Frozen):
    """SWE rows (§2.3): each document is one change of a repository: related files, the changed files before it, issue,
    pull request, diff. The filter of repositories is loose, that of issues and diffs strict."""

    issues: list[str] = []
    """JSONL of issues and pull requests in GitHub's form, joined by their numbers ("Fixes #12")."""
    need_issue: bool = False
    """Keep only changes of which the text of an issue is known; otherwise the pull request or the message may say what
    the change is for."""
    tokens: int = Field(32_768, ge=256)
    """Of one row. Issue, pull request and diff come first, then the changed files, then related ones."""
    related: int = Field(8, ge=0)
    """Files of the repository that BM25 finds with the issue as query."""
    least_words: int = Field(12, ge=1)
    """Of an issue or a pull request, without the words of a form."""
    most_files: int = Field(20, ge=1)
    most_lines: int = Field(1000, ge=1)
    """Files and lines that a change may touch."""
    least_sources: int = Field(3, ge=1)
    """Source files that a repository has."""
    newest: int | None = Field(None, ge=1)
    """So many changes of a git history at most; None: all."""


class SourceConfig(Frozen):
    """A folder, a file or a git repository (`git:PATH` or `git:PATH@REVISION`). Files are read by their suffix."""

    name: str
    path: str
    """`stdlib`, `site-packages` and `doc` stand for the folders of the running Python and of /usr/share/doc."""
    kind: Kind | None = None
    """Kind of all documents; by default each format has its own (HTML: web, Markdown: prose, Python: code)."""
    license: str | None = None
    """SPDX name for documents of which the source itself says nothing."""
    include: list[str] = []
    """Patterns of paths below the folder, such as `*.html`; empty: all."""
    exclude: list[str] = []
    repositories: bool = False
    """Each folder at the top is a repository: its source files become one document (or several, by their limit), in the
    order of their imports."""
    changes: ChangesConfig | None = None
    """SWE rows: of the history of a git repository, or of the Debian source packages (`.dsc` and their archives) in a
    folder."""
    by_content: bool = False
    """Name the language of source code by content (extra `magika`), and read files whose names say nothing if they are
    code."""
    field: str = "text"
    """Field of JSONL records and column of parquet rows with the text."""

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        return _plain_name("source", name)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.changes is not None and (self.repositories or self.kind is not None):
            raise ValueError("a source with `changes` has neither `repositories` nor a `kind`")
        return self


class FilterConfig(Frozen):
    """Which documents stay. Dropped documents are counted by reason."""

    languages: list[str] = ["en"]
    """ISO 639-1 codes of web pages and prose; empty: all."""
    language_score: float = Field(0.5, ge=0, le=1)
    """Least probability of the best language."""
    licenses: list[str] = []
    """SPDX names that code and SWE rows must have, or "permissive" for a list of them; empty: any, also none."""
    problems: list[str] = []
    """Problems of evaluations that must not be in the corpus: JSONL files, `FILE` (field `text`) or `FILE#FIELD`."""
    problem_share: float = Field(0.8, gt=0, le=1)
    """A document with this share of a problem's words, in runs of 13, is dropped (0.8: seen, in Llama 2's terms)."""
    rules: dict[Kind, list[str]] = {
        "web": ["gopher_repetition", "gopher_quality", "c4", "fineweb"],
        "prose": ["gopher_repetition", "gopher_quality"],
        "code": ["code"],
    }
    """Rule sets by kind of document, in their order."""
    options: dict[str, dict[str, Any]] = {"c4": {"filter_no_terminal_punct": False, "filter_curly_bracket": False}}
    """Arguments of rule sets, named as those of datatrove's filters. By default two rules of C4 are off, as in FineWeb:
    lines need no terminal punctuation; and a curly bracket is no reason, as the web page may be about code."""

    @model_validator(mode="after")
    def _rules_exist(self) -> Self:
        for name in [*(rule for rules in self.rules.values() for rule in rules), *self.options]:
            if name not in RULES:
                raise ValueError(f'there is no rule set "{name}"; choose from {", ".join(RULES)}')
        if any("code" in rules for kind, rules in self.rules.items() if kind != "code"):
            raise ValueError('the rule set "code" is for documents of the kind code')
        return self


class BucketConfig(Frozen):
    """Documents with at least this score, and how often training should see them (§2.2 of GLM-4.5: more than 3.2 epochs
    of the best)."""

    name: str
    at_least: float = Field(ge=0, le=1)
    epochs: float = Field(1.0, gt=0)

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        return _plain_name("bucket", name)


class QualityConfig(Frozen):
    """Quality buckets by a classifier of `glm5 data classifier` or by the scores of `glm5 data score`. Each bucket gets
    its own shard, `KIND-BUCKET`."""

    classifier: str
    """Folder of the classifier, or of scores; a document without a score is dropped."""
    kinds: list[Kind] = ["web", "prose"]
    buckets: list[BucketConfig] = Field(min_length=1)
    """From the best to the worst. A score below the last one drops the document."""
    second: str | None = None
    """Another classifier, such as one on embeddings: of both buckets a document gets the better one. Documents that it
    lifts are counted as added."""
    knowledge: str | None = None
    """A classifier for knowledge of the world: it keeps a document of low quality in the last bucket."""
    knowledge_at_least: float = Field(0.8, ge=0, le=1)

    @model_validator(mode="after")
    def _fall(self) -> Self:
        scores = [bucket.at_least for bucket in self.buckets]
        if any(low >= high for high, low in pairwise(scores)):
            raise ValueError(f"the buckets' scores must fall from one to the next, not {scores}")
        if len({bucket.name for bucket in self.buckets}) < len(self.buckets):
            raise ValueError("two buckets have the same name")
        return self


class SemanticConfig(Frozen):
    """SemDedup: of documents whose embeddings almost agree, one stays."""

    embeddings: str = "wordllama"
    """What embeds documents: wordllama, all-MiniLM-L6-v2 or the folder of a checkpoint."""
    at_least: float = Field(0.88, gt=0, le=1)
    """Cosine of two embeddings from which one of the documents is dropped. 0.88 suits wordllama; measure for others."""
    kinds: list[Kind] = ["web", "prose"]
    cluster: int = Field(1000, ge=1)
    """Documents per cluster, on average. Only documents of one cluster are compared. The time for the centres grows
    with the square of the documents, divided by this: above some ten million documents, take more."""


class DedupConfig(Frozen):
    """Deduplication over all sources: exact copies first, then near-duplicates by MinHash, then by embeddings."""

    exact: bool = True
    templates: bool = False
    """Between the two: drop web pages and prose that are made from a template, by comparing them with the other
    documents of their site (by URL) or of their folder in the source. Names and numbers do not count."""
    template_copies: int = Field(20, ge=2)
    """Documents that a line of a template is in."""
    template_share: float = Field(0.8, gt=0, le=1)
    """Share of a document's characters in such lines that drops it."""
    minhash: bool = True
    shingle_words: int = Field(5, ge=1)
    buckets: int = Field(18, ge=1)
    """MinHash proposes a pair of Jaccard similarity s with probability 1 - (1 - s^hashes)^buckets: 96.3 % at 0.8."""
    hashes: int = Field(8, ge=1)
    similarity: float = Field(0.7, ge=0, le=1)
    """Least Jaccard similarity of a pair, by all its shingles; a proposed pair below is not joined."""
    semantic: SemanticConfig | None = None
    """SemDedup; `[dedup.semantic]` switches it on."""
    held_out: float | None = Field(0.5, ge=0.3, le=1)
    """Held-out documents of this Jaccard similarity to a training document become training documents too. None: all
    stay."""


class LimitConfig(Frozen):
    """Limits for untrusted files. What exceeds one is skipped and counted."""

    document_bytes: int = Field(4 << 20, ge=1)
    """UTF-8 length of one document, and bytes of one HTML page or text file before extraction."""
    repository_characters: int = Field(200_000, ge=1)
    """Characters of one document of several source files."""
    input_bytes: int = Field(4 << 30, ge=1)
    """Bytes of one archive, PDF, WARC, JSONL or parquet file."""
    expansion: int = Field(200, ge=1)
    """Decompressed bytes per compressed byte of a file."""
    members: int = Field(100_000, ge=1)
    """Files in one archive."""
    seconds: float = Field(30.0, gt=0)
    """Time to extract the text of one HTML page or PDF."""
    memory: int = Field(1 << 30, ge=1)
    """Bytes of memory for that."""


class ClassifierRecipe(Frozen):
    """What `glm5 data classifier` trains: the probability that a text is like the positive sources."""

    name: str
    seed: int = 0
    positive: list[SourceConfig] = Field(min_length=1)
    negative: list[SourceConfig] = Field(min_length=1)
    embeddings: str | None = None
    """Decide by embeddings of texts, of this model (see SemanticConfig), instead of by their words."""
    characters: int = Field(2000, ge=1)
    """Of each text the first so many count, so that length decides nothing."""
    shortest: int = Field(200, ge=0)
    """Shorter texts are left out."""
    limits: LimitConfig = LimitConfig()

    @model_validator(mode="after")
    def _texts(self) -> Self:
        if any(source.changes is not None for source in (*self.positive, *self.negative)):
            raise ValueError("a classifier learns from texts; `changes` is for the sources of a corpus")
        return self


class CorpusRecipe(Frozen):
    """What `glm5 data run` makes: token shards per kind of document under `shards/`, a manifest and a report."""

    name: str
    seed: int = 0
    tasks: int = Field(16, ge=1, le=99_999)
    """Parts in which the sources are processed, of about equal bytes. A part is the unit of parallel work and of
    resuming; it does not depend on the number of processes."""
    tokenizer: str | None = None
    """Tokenizer or checkpoint directory; None: bytes."""
    sources: list[SourceConfig] = Field(min_length=1)
    filters: FilterConfig = FilterConfig()
    quality: QualityConfig | None = None
    dedup: DedupConfig = DedupConfig()
    limits: LimitConfig = LimitConfig()
    samples: int = Field(5, ge=0)
    """Documents per part and reason that are kept for the report."""

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        return _plain_name("corpus", name)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [source.name for source in self.sources]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two sources are named {sorted(twice)[0]}")
        return self


def _plain_name(what: str, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"the {what} name {name!r} may have only letters, digits, dots, - and _")
    return name
