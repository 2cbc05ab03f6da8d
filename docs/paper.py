"""Make `docs/paper.md`, the paper's claims and what became of them, from `claims.toml` and the results of experiments.

.venv/bin/python docs/paper.py
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5.reproduce.card import CARD, command
from glm5.reproduce.verdict import outlook

HERE = Path(__file__).parent
VERDICTS = {
    "built": "built, tested",
    "measured": "measured",
    "apart": "cannot be tested here",
    "ready": "built, not run",
    "missing": "not built yet",
}
HEAD = """# The paper, claim by claim

Made by `docs/paper.py` from `docs/claims.toml` and the results in `docs/results`; do not edit it.

"Supported", "not supported" and "undecided" are verdicts of experiments at small scale, whose questions and sizes were
fixed before they ran; how many seeds would decide assumes that difference and spread stay. "Built, tested" is a part of
the system that does what the paper describes; "built, not run" is an experiment without a result. "Measured" are
figures of our own, in [docs/verified.md](verified.md). `glm5 reproduce NAME --seeds 8 --add --publish docs/results`
runs only the seeds that a published result lacks; the looks at it then share an error of 5 %, which widens intervals.
"""


def claims() -> list[dict[str, str]]:
    """The claims in the order of the file, each with exactly one answer; `since` says how the experiment of a card has
    changed after it."""
    found: list[dict[str, str]] = tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8"))["claims"]
    for claim in found:
        known = {"section", "claim", "since"} if "card" in claim else {"section", "claim"}
        if claim.keys() - known not in [{kind} for kind in ("card", *VERDICTS)]:
            raise ValueError(f"{claim}: a claim has section, claim and one of card, {', '.join(VERDICTS)}")
    return found


def result_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "results" / name / "result.json").read_text(encoding="utf-8"))
    return found


def row(claim: Mapping[str, str]) -> tuple[str, str]:
    """Verdict and answer."""
    if "card" not in claim:
        (kind,) = claim.keys() - {"section", "claim"}
        return VERDICTS[kind], claim[kind]
    result = result_of(claim["card"])
    main = [entry for entry in result["verdict"]["questions"] if entry["main"]]
    said = "; ".join(f"{entry['question']}: {_answer(entry, 'since' not in claim)}" for entry in main)
    card = f"[Card](results/{claim['card']}/{CARD})"
    if "since" in claim:
        now = f"`glm5 reproduce {claim['card']}` {claim['since']}"
        return result["verdict"]["claim"], f"{said}. {card} of an earlier design; {now}"
    return result["verdict"]["claim"], f"{said}. {card}: `{command(result)}`"


def _answer(entry: Mapping[str, Any], with_outlook: bool = True) -> str:
    found = entry["difference"]
    ends = "" if found["low"] is None else f" ({found['low']:+.3g} to {found['high']:+.3g})"
    more = outlook(entry) if with_outlook else ""
    return f"{found['mean']:+.3g}{ends}, {entry['verdict']}" + (f", {more}" if more else "")


def page() -> str:
    rows = [(claim["section"], claim["claim"], *row(claim)) for claim in claims()]
    counts = Counter(verdict for *_, verdict, _ in rows)
    lines = [HEAD, ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common()) + ".", ""]
    lines += ["| Section | Claim | Verdict | Where |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (HERE / "paper.md").write_text(page(), encoding="utf-8")
