"""Parts of an experiment: variants, questions with the paper's answer, figures; and the work of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm5.chat import Tokenizer
from glm5.config.model import GLM5Config
from glm5.config.recipe import GradientStage
from glm5.data.shards import Shard, open_shard
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter, read_metrics
from glm5.parallel.ranks import Ranks
from glm5.reproduce.corpus import build_corpus
from glm5.train.loop import StageIO

METRICS = "metrics.jsonl"
CURVE_POINTS = 60

Sizes = dict[str, Any]
"""All numbers that decide what a run computes, as JSON. The time budget scales only `steps`."""
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Variant:
    """One variant of training. `after` names the variant that it continues: the model of the same seed."""

    name: str
    title: str
    after: str | None = None


@dataclass(frozen=True)
class Question:
    """A statement about `left - right` of a metric, the two variants paired by seed.

    `left_base` and `right_base` are subtracted first, to compare two gaps. "equal" means within `margin` times the mean
    of `right`. `least` is the smallest difference that would matter for "lower" or "higher", in the metric's unit: an
    interval below it is a no. `chance` names the metric of guessing, which `right`, or the variant and metric `able`,
    must exceed; otherwise the question has no answer. The verdict on the whole experiment uses only the `main`
    questions.
    """

    text: str
    metric: str
    left: str
    right: str
    expect: Literal["lower", "higher", "equal"]
    margin: float = 0.0
    least: float = 0.0
    main: bool = False
    left_base: str | None = None
    right_base: str | None = None
    chance: str | None = None
    able: tuple[str, str] | None = None
    right_metric: str | None = None
    """The metric of `right`, if it is another one."""


@dataclass(frozen=True)
class Figure:
    """A plot with one band per variant: a curve over training steps, or the metrics `{metric}@{x}` over their x."""

    file: str
    title: str
    y: str
    curve: str = ""
    metric: str = ""
    x: str = "step"
    logx: bool = False


@dataclass
class Outcome:
    """Measurements of one run. Repeating the run gives the same values; times are kept elsewhere."""

    metrics: dict[str, float]
    tokens: int
    curves: dict[str, Points] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """One run: a variant, a seed, its own folder, the corpus, the checkpoint that it continues, or None, and where it
    computes."""

    sizes: Sizes
    variant: str
    seed: int
    folder: Path
    corpus: Path
    start: Path | None = None
    device: str = "cpu"

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.corpus / "tokenizer")

    @property
    def ranks(self) -> Ranks:
        """The one process of this run, with its device."""
        return Ranks(self.device)

    @property
    def runs(self) -> Path:
        """The experiment's folder, with the runs of other variants (see `worker.read_run`)."""
        return self.folder.parent.parent

    def shard(self, split: str) -> Shard:
        return open_shard(self.corpus / "data", split, self.tokenizer, verify=False)

    def config(self, **changes: Any) -> GLM5Config:
        """The experiment's model with this variant's changes."""
        tokenizer = self.tokenizer
        values = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_token_id, **self.sizes["model"]}
        return GLM5Config.preset("nano", **values | changes)

    def model(self) -> GLM5ForCausalLM:
        """The model that this run continues."""
        if self.start is None:
            raise ValueError(f"{self.variant} continues no other variant")
        return self.ranks.load(self.start)

    def fresh_model(self, **changes: Any) -> GLM5ForCausalLM:
        """A model with new weights, the same on every device, from `config(**changes)`."""
        return self.ranks.fresh(self.config(**changes), self.seed)

    def train(self, runner: Callable[..., Any], model: GLM5ForCausalLM, stage: GradientStage) -> Points:
        """Run a stage (`pretrain.run` or `dsa_adapt.run`), which resumes from its own state; saves the model and
        returns its loss curve."""
        with MetricsWriter(self.folder / METRICS) as metrics:
            io = StageIO(stage.name, self.folder, metrics, lambda steps, numbers: None, self.ranks)
            runner(model, stage, self.shard("train"), self.tokenizer, io, self.seed)
        model.eval()
        model.save_pretrained(self.folder / "model")
        return curve([row for row in self.rows() if row["stage"] == stage.name], "loss")

    def rows(self) -> list[dict[str, Any]]:
        """The metrics lines of this run."""
        return read_metrics(self.folder / METRICS)

    def curve(self, name: str) -> Points:
        """A metric over steps, thinned."""
        return curve(self.rows(), name)


def standard_library(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The corpus of most experiments."""
    return build_corpus(folder, sizes["vocab"], sizes["max_bytes"])


@dataclass(frozen=True)
class Experiment:
    """A claim of the paper, and its test.

    `sizes(quick, steps)` gives the numbers of all runs (None: the default length), `run` is one run. `labels` names the
    metrics of the card, in order; `limits` are sentences about what the experiment does not show.
    """

    name: str
    title: str
    section: str
    claim: str
    variants: tuple[Variant, ...]
    sizes: Callable[[bool, int | None], Sizes]
    run: Callable[[Work], Outcome]
    questions: tuple[Question, ...]
    figures: tuple[Figure, ...]
    labels: Mapping[str, str]
    limits: tuple[str, ...]
    training: Callable[[Sizes], str] | None = None
    """How it was trained, for the card, if not by next-token training on text."""
    corpus: Callable[[Path, Sizes], dict[str, Any]] = standard_library
    """Makes the folder of texts unless it exists; returns counts, `sha256` and, for the card, `text`."""

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    """A metric over steps, thinned, from the metrics lines that have it."""
    return thinned([(float(row["step"]), row[name]) for row in rows if row.get(name) is not None])


def thinned(points: Points, most: int = CURVE_POINTS) -> Points:
    """At most `most` points: means over neighbours."""
    size = max(1, -(-len(points) // most))
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in b) / len(b), sum(p[1] for p in b) / len(b)) for b in blocks]
