"""`glm5 eval URL|DIR --suite browse`: options from the command line to the evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.errors import GradingError, UsageError
from glm5.obs.progress import QuietConsole

if TYPE_CHECKING:
    from glm5.agents.endpoint import Endpoint
    from glm5.eval.answer_judge import AnswerJudge

OPTIONS: dict[str, Any] = {"context": "none", "keep": 5, "limit": 0, "split": "heldout", "dialect": "openai",
                           "judge": "", "judge_name": "", "session_tokens": 0}  # fmt: skip
"""Options of the evaluation with their defaults; others are the family's."""
LIMITS = {"max_tokens": 8192, "max_turns": 100}
MOST = 2**31 - 1
"""Of a limit; endpoints refuse larger numbers."""
NOT_TAKEN = {
    "max_turns": "use --limit max_turns", "strict": "a wrong call ends no session", "plain": "agents chat",
    "stop": "replies end by themselves",
}  # fmt: skip
"""Options of the family and of suites that are of no use here, and why."""


def browse(
    model: str, problems: int, options: dict[str, Any], limits: dict[str, Any], out: Path | None, *, name: str = "",
    at_once: int = 8, seed: int = 0, temperature: float | None = None, key_file: Path | None = None,
    render_tools: bool = True, template: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Play and score. `judge` is the URL of a model that decides on answers which are not exactly a name. `out` gets
    `episodes.jsonl`, from which the next run goes on, and `result.json`. `render_tools` and `template` are as in
    `Endpoint.prompted`, and so is the family's option `thinking`, if it is given. Raises UsageError for a wrong option,
    ConfigError and DataError by the family."""
    from glm5.agents.context import ContextPolicy
    from glm5.agents.models import open_model
    from glm5.agents.search import DEFAULT_TOOLS, Limits, SearchAgent
    from glm5.eval.answer_judge import AnswerJudge
    from glm5.eval.browse import evaluate
    from glm5.files import atomic_write
    from glm5.serve.keys import find_key
    from glm5.tasks.families import make_family
    from glm5.tasks.search.browser import View
    from glm5.tasks.search.family import SearchFamily

    own = OPTIONS | {option: value for option, value in options.items() if option in OPTIONS}
    _check(own, options, limits)
    bounds, policy = LIMITS | limits, ContextPolicy(own["context"], own["keep"], own["limit"])
    given = {option: value for option, value in options.items() if option not in OPTIONS}
    family = make_family("search", seed, **given)
    assert isinstance(family, SearchFamily)
    if out is not None and out.resolve() == Path(given["folder"]).resolve():
        raise UsageError(f"{out} is the build itself; take another folder for the answers.")
    settings = {"own": own, "family": given, "limits": bounds, "seed": seed, "temperature": temperature,
                "web": family.web.digest}  # fmt: skip
    settings |= {} if render_tools else {"render_tools": False}
    settings |= {} if template else {"template_kwargs": False}
    tools = tuple(given.get("tools", DEFAULT_TOOLS))
    shown = View(numbered=given.get("numbered", False)).tools(tools) if render_tools else ()
    key = find_key("api", None, key_file)
    opened = open_model(
        model, name, own["dialect"], key, bounds["max_tokens"], tools=shown, temperature=temperature
    )  # fmt: skip
    with opened as (endpoint, measure), QuietConsole().status("starting") as status:
        if out is not None:
            _same_settings(out, settings | _player(model, endpoint))
        asker = None
        if own["judge"]:
            asker = AnswerJudge.at(own["judge"], own["judge_name"], find_key("judge", None, None))
        turns = Limits(bounds["max_turns"], own["session_tokens"])
        asked, sent = endpoint.prompted(given.get("thinking"), render_tools, template)
        agent = SearchAgent(asked, policy, turns, measure.count, measure.overhead, tools=tools, sends_tools=sent)
        found = evaluate(
            family, own["split"], problems, agent, judge=None if asker is None else _judge(asker), at_once=at_once,
            log=out / "episodes.jsonl" if out is not None else None,
            endpoints=(endpoint,) if asker is None else (endpoint, asker.endpoint),
            told=lambda done, total: status.update(f"{done} of {total} questions"),
        )  # fmt: skip
    found |= {"context": own["context"]}
    if out is not None:
        atomic_write(out / "result.json", json.dumps(found, indent=1) + "\n")
    return found


def _check(own: dict[str, Any], options: dict[str, Any], limits: dict[str, Any]) -> None:
    """Raises UsageError for options of the wrong kind, or that are of no use here."""
    from glm5.tasks.contract import SPLITS

    for option, default in OPTIONS.items():
        if type(own[option]) is not type(default):
            kind = "a text" if isinstance(default, str) else "a whole number"
            raise UsageError(f"--set {option}={own[option]!r:.40} is not {kind}.")
    for limit, number in limits.items():
        if limit not in LIMITS:
            raise UsageError(f"--limit {limit}: browse takes {' and '.join(LIMITS)}; the model has its own context.")
        if type(number) is not int or not 1 <= number <= MOST:
            raise UsageError(f"--limit {limit}={number!r:.40} is not a whole number from 1 to {MOST}.")
    if own["split"] not in SPLITS:
        raise UsageError(f"--set split={own['split']}: it is one of {', '.join(SPLITS)}.")
    if own["session_tokens"] < 0:
        raise UsageError(f"--set session_tokens={own['session_tokens']}: it is not negative; 0 is no limit.")
    for option, why in NOT_TAKEN.items():
        if option in options:
            raise UsageError(f"--set {option}: browse does not take it; {why}.")


def _player(model: str, endpoint: Endpoint) -> dict[str, Any]:
    """What tells a model from others: a checkpoint's files, or the address and the name of a served one."""
    from glm5.eval.suite import fingerprint

    if Path(model).is_dir():
        return {"checkpoint": model, "files": fingerprint(Path(model))}
    return {"url": endpoint.base, "name": endpoint.name}


def _same_settings(out: Path, settings: dict[str, Any]) -> None:
    """Store the settings of a run, or refuse to go on with another's answers."""
    from glm5.files import atomic_write

    out.mkdir(parents=True, exist_ok=True)
    path, text = out / "settings.json", json.dumps(settings, indent=1, sort_keys=True) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise UsageError(
            f"{out} has answers that were given with other settings, or by another model ({path}); take another folder."
        )
    atomic_write(path, text)


def _judge(asked: AnswerJudge) -> Callable[[str, str, Sequence[str]], bool]:
    def judge(question: str, answer: str, names: Sequence[str]) -> bool:
        found = asked.verdict(question, names, answer)
        if isinstance(found, str):
            raise GradingError(f"The judge gave no verdict: {found}")
        return found

    return judge
