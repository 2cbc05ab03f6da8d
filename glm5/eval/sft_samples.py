"""Attempts of a model at the training problems of a task family, for rejection sampling (§3.1)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm5.config.suite import Suite, SuitePart
from glm5.data.sft import Conversation, plain_conversation
from glm5.errors import DataError
from glm5.eval.players import Player
from glm5.files import atomic_write, exclusive, read_rows
from glm5.records import Outcome
from glm5.tasks.difficulty import PassCount
from glm5.tasks.families import make_family
from glm5.tasks.judged import is_judged


def sample_attempts(
    player: Player,
    part: SuitePart,
    suite: Suite,
    out: Path,
    model: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, PassCount]:
    """Play `suite.problems` problems of the split "train", `suite.repeats` times each, into `out` (JSONL for
    `glm5.data.sft_select`). What is there already is not played again. Returns pass counts by problem index.

    Raises DataError if `out` has attempts at other problems, of another model or with other settings, or if a judge
    would be needed; EndpointError if the server does not answer.
    """
    family = make_family(part.family, **part.options)
    problems = [family.problem("train", index) for index in range(suite.problems)]
    if any(map(is_judged, problems)):
        raise DataError(f"{part.family}: its answers need a judge; sample a family that grades them itself.")
    asked = suite.model_dump(mode="json", exclude={"title", "source", "note", "problems", "repeats", "parts"})
    settings = json.dumps({"model": model, "part": part.model_dump(mode="json"), "suite": asked}, sort_keys=True)
    with exclusive(out.with_name(out.name + ".work"), f"Another process writes {out}; wait for it."):
        path = out.with_name(out.name + ".settings")
        if out.exists() and (not path.exists() or path.read_text(encoding="utf-8") != settings):
            raise DataError(
                f"{out} has other attempts, or those of another model or other settings; choose another --out."
            )
        atomic_write(path, settings)
        rows = list(read_rows(out))
        known = {(row["index"], row["repeat"]) for row in rows}
        spots = [(i, r) for r in range(suite.repeats) for i in range(len(problems)) if (i, r) not in known]
        numbered = [(place, problems[index]) for place, (index, _) in enumerate(spots)]
        for done, (place, played) in enumerate(player.play(numbered, suite, part, 0), 1):
            index, repeat = spots[place]
            problem = problems[index]
            messages = list(played.messages)
            tools = list(problem.tools) if suite.render_tools else []
            row: dict[str, Any] = plain_conversation(Conversation(messages, tools, problem.thinking))
            row |= {"problem": f"{part.family}/{problem.id}", "reward": played.reward, "outcome": played.outcome.value}
            row |= {"index": index, "repeat": repeat}
            rows.append(row)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            progress(done, len(spots))
    counted = [row for row in rows if row["outcome"] != Outcome.ENV_ERROR.value]
    passed = Counter(row["index"] for row in counted if row["outcome"] == Outcome.SOLVED.value)
    tries = Counter(row["index"] for row in counted)
    return {index: PassCount(passed[index], tries[index]) for index in sorted(tries)}
