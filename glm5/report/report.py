"""Run folder -> one self-contained HTML file: no script, no request, and text of models cannot act."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from glm5.errors import DataError
from glm5.files import atomic_write
from glm5.report import sections
from glm5.report.adaptation import AdaptationSection, adaptation_section
from glm5.report.drawing import LIGHT, TEXT_CSS, palette_css
from glm5.report.live import live_sections
from glm5.report.post_training import pass_at, policy_sections
from glm5.report.records import stage_samples, stage_updates
from glm5.report.results import Results, Run, load_run
from glm5.report.rollout import RolloutSection, rollout_section
from glm5.report.skills import recovered, recovery_sentences
from glm5.report.slides import SlideSection, slide_section
from glm5.report.training import standing, training_groups, training_sentence, training_tiles
from glm5.report.wording import KINDS, SKILLS, agreement, clean, duration, listing, number, problem_count, safe, visible

TEMPLATE = Path(__file__).with_name("template.html")
_DEMOS = {"laptop": "make demo", "smoke": "make smoke"}


def build_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run and return its path, by default `run_dir/report.html`.

    Needs `results.json`, `metrics.jsonl` or both; anything missing is left out of the page. The same data give the same
    bytes. Raises DataError for a folder with nothing to report or a damaged file, MissingExtraError without matplotlib.
    """
    run_dir = Path(run_dir)
    run = load_run(run_dir)
    out = run_dir / "report.html" if out is None else Path(out)
    if out.is_dir():
        raise DataError(f"{out} is a folder; name the file that the report goes to.")
    atomic_write(out, render(run))
    return out


def render(run: Run) -> str:
    """The page as text."""
    return environment().from_string(TEMPLATE.read_text(encoding="utf-8")).render(_context(run))


def environment() -> Environment:
    """Of a template whose printed values are inert text unless they are HTML already."""
    made = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["visible"] = visible
    return made


def _finalize(value: object) -> object:
    """Applied to every printed value of the template that is not already HTML."""
    return safe(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _context(run: Run) -> dict[str, Any]:
    results = run.results
    families = dict.fromkeys(skill.partition(".")[0] for skill in results.skills)
    return {
        "name": results.name,
        "finished": run.finished,
        "palette": palette_css(),
        "text_css": TEXT_CSS,
        "problems": run.artifacts.problems,
        "summary": summary(run),
        "tiles": _tiles(results) + ([] if results.skills else training_tiles(run)),
        "stages": sections.stage_rows(results),
        "forgetting": sections.forgetting_table(results),
        "recovered": sections.recovery_table(recovered(results)),
        "recovery": recovery_sentences(recovered(results)),
        "pass_at": pass_at(results),
        "skills": [(name, SKILLS[name]) for name in families if name in SKILLS],
        "groups": training_groups(run),
        "policies": policy_sections(run),
        "live": live_sections(run),
        "rollouts": _rollouts(run),
        "slides": _slides(run),
        "needle": sections.needle(results),
        "mtp": sections.mtp(results),
        "comparisons": sections.comparisons(results),
        "adaptations": _adaptations(run),
        "learned": [stage_samples(name, samples) for name, samples in run.artifacts.samples.items()],
        "updates": [stage_updates(name, updates) for name, updates in run.artifacts.updates.items()],
        "notes": results.notes,
        "exact": sections.exactness(run),
        "agreement": agreement(results.exact),
        "commands": _commands(run),
        "environment": _environment(run),
        "recipe": run.recipe,
        "total": duration(results.times.total_seconds) if results.times.total_seconds is not None else "",
        "marks": {"better": "▲", "worse": "▼", "same": "≈"},
        "classes": [name for name in LIGHT if name[0] in "sr" and name[1:].isdigit()],
    }


def summary(run: Run) -> list[str]:
    """The run and its results in a few sentences, from the data alone."""
    results = run.results
    model = "a model"
    if results.preset:
        model = f"a “{results.preset}” model"
    if results.parameters:
        model += f" of {results.parameters:,} parameters"
    count = len(results.stages)
    text = f"The run “{results.name}” took {model} through {count} stage{'s' if count != 1 else ''}"
    if results.stages:
        text += f": {listing(_steps(results))}"
    seed = f", with seed {results.seed}" if results.seed is not None else ""
    took = results.times.total_seconds
    said = [f"{text}{seed}.", f"It took {duration(took)} in all." if took is not None else "", _corpus(results)]
    if not run.finished:
        said.insert(0, standing(run))
    said.append(training_sentence(run))
    said.append(_final(results))
    said.append(agreement(results.exact))
    return [sentence for sentence in said if sentence]


def _steps(results: Results) -> list[str]:
    """Titles of the stages, each title once: "pre-training, DSA warm-up, ..."."""
    titles = []
    for stage in results.stages:
        title = KINDS[stage.kind].title if stage.kind in KINDS else stage.name
        # Abbreviations keep their capitals.
        titles.append(title if title[:2].isupper() or stage.kind not in KINDS else title[0].lower() + title[1:])
    return list(dict.fromkeys(titles))


def _corpus(results: Results) -> str:
    corpus = results.corpus
    if not corpus.train_tokens:
        return ""
    documents = f" from {corpus.train_documents:,} documents" if corpus.train_documents else ""
    vocabulary = f", in a vocabulary of {corpus.tokenizer_vocab:,}" if corpus.tokenizer_vocab else ""
    return f"Its training text has {corpus.train_tokens:,} tokens{documents}{vocabulary}."


def _final(results: Results) -> str:
    if not results.evaluated:
        return ""
    stage, last = results.evaluated[-1]
    scores = [f"{score.score:.2f} on {name}" for name, score in last.skills.items()]
    bits = last.text.bits_per_byte
    parts = [f"scores {listing(scores)} (1 is perfect)"] if scores else []
    if bits is not None:
        parts.append(f"needs {bits:.3f} bits per byte of held-out text")
    return f"After the last evaluated stage, {stage.name}, the model {' and '.join(parts)}." if parts else ""


def _tiles(results: Results) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the most wanted numbers: the last evaluation."""
    if not results.evaluated:
        return []
    _, last = results.evaluated[-1]
    tiles = []
    for name, score in last.skills.items():
        cell = sections.score_cell(score)
        tiles.append((name, cell.value, ", ".join(part for part in (cell.interval, problem_count(score)) if part)))
    if last.text.bits_per_byte is not None:
        tiles.append(("bits per byte", f"{last.text.bits_per_byte:.3f}", "fewer are better"))
    if last.mtp and last.mtp.accept_length is not None:
        tiles.append(("accept length", number(last.mtp.accept_length), "tokens per check"))
    return tiles


def _adaptations(run: Run) -> list[AdaptationSection]:
    made = (adaptation_section(stage, record) for stage, record in run.artifacts.adaptations.items())
    return [section for section in made if section is not None]


def _rollouts(run: Run) -> list[RolloutSection]:
    made = (rollout_section(stage, rollout) for stage, rollout in run.artifacts.rollouts.items())
    return [section for section in made if section is not None]


def _slides(run: Run) -> list[SlideSection]:
    made = (slide_section(stage, record) for stage, record in run.artifacts.slides.items())
    return [section for section in made if section is not None]


def _environment(run: Run) -> list[tuple[str, str]]:
    """Environment of the run: from its results, or from its notes at the start."""
    facts = {**run.artifacts.environment, **run.results.environment, **run.results.software}
    return [(name, "–" if value is None else str(value)) for name, value in facts.items()]


def _commands(run: Run) -> list[tuple[str, str]]:
    """(command, what it does), to run in the repository."""
    name = run.results.name
    folder = shlex.quote(clean(f"runs/{name}"))
    repeat = _DEMOS.get(name, f"glm5 pipeline {shlex.quote(clean(f'runs/{name}/recipe.toml'))}")
    commands = [(repeat, "runs all stages")]
    if run.finished:
        final = shlex.quote(clean(f"runs/{name}/final"))
        commands.append((f"glm5 serve {final}", "serves the final model, with a page to chat with it"))
    commands.append((f"glm5 report {folder}", "writes this page again"))
    return commands
