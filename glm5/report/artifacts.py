"""Training files of a run folder besides numbers: samples by step, the optimizer's update table, the record of a DSA
adaptation, a rollout token by token, pages of slides, the environment.

A killed run may have left any of these half written, so unreadable files are listed and left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from glm5.report.live_store import LiveStage, read_live

Scalar = str | int | float | bool | None
_T = TypeVar("_T")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TrainingSample(_Record):
    """Model output for a prompt at one training step."""

    step: int
    prompt: str = ""
    text: str = ""


class Update(_Record):
    """Parameters that the optimizer treats alike: the rule, the blocks that it orthogonalises, and the change of an
    entry per step (root mean square)."""

    rule: str = ""
    name: str = ""
    block: Any = None
    parameters: int | None = None
    matrices: int | None = None
    update_rms: float | None = None
    lr: float | None = None


class MassCurve(_Record):
    """Attention mass of the k tokens that the indexer picks, and of the best k, by k."""

    k: list[float] = []
    indexer: list[float | None] = []
    oracle: list[float | None] = []


class Baseline(_Record):
    """Loss of the adapted model and of a dense baseline, by the tokens of the training that both had."""

    tokens: list[float] = []
    dense: list[float | None] = []
    sparse: list[float | None] = []


class HeldOut(_Record):
    """Loss on held-out documents of `length` tokens."""

    length: int | None = None
    dense: float | None = None
    sparse: float | None = None
    gap_percent: float | None = None


class Adaptation(_Record):
    """A record of dense attention becoming sparse (§2.1.1). `recall` is by layer, "L0" and so on, at `topk` tokens."""

    topk: int | None = None
    recall: dict[str, float | None] = {}
    mass_curve: MassCurve = MassCurve()
    kl: list[tuple[float, float | None]] = []
    baseline: Baseline = Field(Baseline(), validation_alias=AliasChoices("baseline", "twin"))
    held_out: HeldOut = HeldOut()


class _Finite(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, le=10**15)]


class RolloutToken(_Finite):
    """`ratio` is pi_theta / pi_rollout after the update; `rho` is the same ratio before it, as the loss uses it. The
    loss leaves a `masked` token out and clips the ratio of a `clipped` one. `version` is that of the weights that
    sampled the token."""

    text: str = ""
    loss: bool = False
    ratio: float | None = None
    rho: float | None = None
    advantage: float | None = None
    masked: bool = False
    clipped: bool = False
    version: Count | None = None


class Rollout(_Finite):
    """One trajectory of the last update, as `glm5.rl.rollout_trace` writes it."""

    step: Count | None = None
    problem: str = ""
    domain: str = ""
    outcome: str = ""
    reward: float | None = None
    teacher: str = ""
    tokens: list[RolloutToken] = []


class SlidePage(_Finite):
    """One page of slides: a picture (base64 of a PNG, or empty), its score and what is wrong with it."""

    title: str = ""
    picture: str = Field("", max_length=400_000)
    total: float | None = None
    compliant: bool | None = None
    parts: dict[str, float] = {}
    faults: list[str] = []
    tricks: list[str] = []


class SlideUpdate(_Finite):
    """Pages of one update."""

    step: Count | None = None
    pages: list[SlidePage] = []


class SlideRecord(_Finite):
    """Pages of the first and of the last recorded update, as `glm5.tasks.slides.record` writes them."""

    before: SlideUpdate = SlideUpdate()
    after: SlideUpdate = SlideUpdate()


@dataclass(frozen=True)
class Artifacts:
    """By stage name; adaptations of the run as a whole are under the empty name."""

    samples: dict[str, list[TrainingSample]] = field(default_factory=dict)
    updates: dict[str, list[Update]] = field(default_factory=dict)
    adaptations: dict[str, Adaptation] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    live: dict[str, LiveStage] = field(default_factory=dict)
    slides: dict[str, SlideRecord] = field(default_factory=dict)
    environment: dict[str, Scalar] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Unreadable files, by their path in the run folder."""


def stage_folders(run: Path) -> dict[str, Path]:
    """Folders `NN-STAGE` of a run by stage name, in their order."""
    found = ((re.fullmatch(r"(\d{2,})-(.+)", path.name), path) for path in (run.iterdir() if run.is_dir() else ()))
    numbered = sorted((int(match[1]), match[2], path) for match, path in found if match and path.is_dir())
    return {name: path for _, name, path in numbered}


def read_artifacts(run: Path) -> Artifacts:
    """All artifacts of the run folder and its stages. Missing files are not a problem."""
    problems: list[str] = []
    found = Artifacts(
        environment=_read(run, run / "environment.json", dict[str, Scalar], problems) or {}, problems=problems
    )
    for name, folder in {"": run, **stage_folders(run)}.items():
        if (adaptation := _read(run, folder / "adaptation.json", Adaptation, problems)) is not None:
            found.adaptations[name] = adaptation
        if updates := _read(run, folder / "update_table.json", list[Update], problems):
            found.updates[name] = updates
        if (rollout := _read(run, folder / "rollout.json", Rollout, problems)) is not None:
            found.rollouts[name] = rollout
        if (slides := _read(run, folder / "slides.json", SlideRecord, problems)) is not None:
            found.slides[name] = slides
        if (live := read_live(folder)) is not None:
            found.live[name] = live
        if samples := _samples(folder / "samples.jsonl"):
            found.samples[name] = samples
    return found


def read_text(path: Path) -> str:
    """A text file's content; empty for an unreadable one."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read(run: Path, path: Path, shape: type[_T], problems: list[str]) -> _T | None:
    if not path.is_file():
        return None
    try:
        # NaN and Infinity are not JSON, but Python writes them; they mean "no number", like null.
        return TypeAdapter(shape).validate_python(json.loads(path.read_bytes(), parse_constant=lambda _: None))
    except (OSError, ValueError, RecursionError, ValidationError):
        problems.append(str(path.relative_to(run)))
        return None


def _samples(path: Path) -> list[TrainingSample]:
    """The valid samples. Of a step that was repeated after a resume, the last sample counts."""
    found: dict[tuple[int, str], TrainingSample] = {}
    for line in read_text(path).splitlines():
        try:
            sample = TrainingSample.model_validate_json(line)
        except ValidationError:
            continue
        found[sample.step, sample.prompt] = sample
    return sorted(found.values(), key=lambda sample: sample.step)
