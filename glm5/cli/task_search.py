"""`glm5 task build search`, `glm5 task serve` and the check of a build of search tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from glm5.cli.options import DialectName, Json, Out, Port, show, told
from glm5.cli.task import build_app, task_app
from glm5.errors import UsageError

if TYPE_CHECKING:
    from glm5.agents.endpoint import Dialect
    from glm5.tasks.search.checks import Question


@build_app.command("search")
def build_search(
    out: Out,
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 5000,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
    source: Annotated[list[str], typer.Option("--source", help="Source to use; may be repeated. Default: all.")] = [],  # noqa: B006
    root: Annotated[
        list[Path], typer.Option("--root", help="Folder with unpacked packages, looked at before this machine's own.")
    ] = [],  # noqa: B006
    download: Annotated[
        bool,
        typer.Option("--download", help="Get missing packages with pip and apt-get into OUT."),
    ] = False,
    depth: Annotated[list[int], typer.Option("--depth", help="Depth; may be repeated. Default: 2 to 6.")] = [],  # noqa: B006
    answers: Annotated[list[str], typer.Option("--type", help="Type of answers, such as city; may be repeated.")] = [],  # noqa: B006
    kinds: Annotated[
        list[str], typer.Option("--kind", help="tree, superlative, difference or union; may be repeated.")
    ] = [],  # noqa: B006
    filters: Annotated[int, typer.Option(min=0, max=8, help="Most blurred constraints of a question.")] = 4,
    per_shape: Annotated[int, typer.Option(min=0, help="Most questions of one form; 0: one in a hundred.")] = 0,
    per_answer: Annotated[int, typer.Option(min=1, help="Most questions with the same answer.")] = 2,
    results: Annotated[int, typer.Option(help="Results of a search that may not show the answer.")] = 10,
    snippet: Annotated[int, typer.Option(help="Characters of their snippets.")] = 300,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that make questions.")] = 2,
    model: Annotated[
        str | None, typer.Option(help="Server's URL or checkpoint directory of a model that filters the questions.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model; default: the server's first.")] = "",
    dialect: DialectName = "openai",
    api_key_file: Annotated[Path | None, typer.Option(help="File with the server's API key; or GLM5_API_KEY.")] = None,
    paraphrase: Annotated[bool, typer.Option("--paraphrase", help="Let the model write the questions anew.")] = False,
    as_json: Json = False,
) -> None:
    """Build a web of pages and facts from installed packages, and questions over it that are unique and without
    shortcuts by query. A build that was stopped goes on; one that is there is refreshed."""
    from glm5.tasks.search.build import build
    from glm5.tasks.search.draw import DEPTHS
    from glm5.tasks.search.questions import Rules

    if paraphrase and model is None:
        raise UsageError("--paraphrase needs --model.")
    depths = tuple(depth) or DEPTHS
    rules = Rules(count, seed, depths, tuple(answers), filters, per_shape, tuple(kinds), results, snippet, per_answer)
    found = build(out, rules, only=source, roots=root, download=download, jobs=jobs, told=told)
    if model is not None:
        found["model"] = _filtered(out, model, name, dialect, api_key_file, paraphrase)
    show(found if as_json else _short(found), as_json)


def _short(found: dict[str, Any]) -> dict[str, Any]:
    """The parts of a manifest that fit on a screen."""
    web, questions = found["web"], found["questions"]
    shown = {"pages": web["pages_with_lists"], "facts": web["facts"], "added": web["added"], "changed": web["changed"],
             "removed": web["removed"]}  # fmt: skip
    for step, numbers in web["steps"].items():
        shown[step] = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
    states = {name: state["state"] for name, state in web["sources"].items()}
    shown |= {"sources": ", ".join(f"{name} {state}" for name, state in states.items())}
    shown |= {key: questions[key] for key in ("questions", "depths", "kinds", "draws")}
    shown["rejected"] = ", ".join(f"{reason} {number:,}" for reason, number in questions["rejects"].items())
    return shown | {"seconds": found["seconds"]} | ({"model": found["model"]} if "model" in found else {})


def _filtered(
    out: Path, model: str, name: str, dialect: str, key_file: Path | None, paraphrase: bool
) -> dict[str, Any]:
    from glm5.agents.models import open_model
    from glm5.agents.search import Limits, SearchAgent
    from glm5.files import exclusive
    from glm5.records import Message
    from glm5.serve.keys import find_key
    from glm5.tasks.search.browser import Browser
    from glm5.tasks.search.checks import Checker
    from glm5.tasks.search.filters import Judges, filter_questions, paraphrase_questions
    from glm5.tasks.search.query import Evaluator
    from glm5.tasks.search.questions import read_questions, read_view
    from glm5.tasks.search.web import Web
    from glm5.tasks.tools.python_tool import default_programs

    web, key, found = Web(out), find_key("api", None, key_file), dict[str, Any]()
    with (
        exclusive(out, f"another build writes to {out}."),
        open_model(model, name, cast("Dialect", dialect), key) as (endpoint, measure),
    ):

        def ask(prompt: str) -> str:
            return endpoint.complete([Message("user", prompt)], []).message.content or ""

        def play(question: Question, prompt: str, turns: int) -> str:
            agent = SearchAgent(endpoint, limits=Limits(turns or 30), count=measure.count, overhead=measure.overhead)
            return agent.run(prompt, Browser(web, (question.asked,), programs=default_programs)).answer

        questions = read_questions(out)
        if paraphrase:
            graph = web.graph()
            questions = paraphrase_questions(out, questions, ask, Checker(web, graph, Evaluator(graph), read_view(out)))
            found["paraphrased"] = sum(bool(question.paraphrase) for question in questions)
        return found | filter_questions(out, questions, Judges(ask, play), told)


@task_app.command("serve")
def serve_search(
    folder: Annotated[Path, typer.Argument(help="Folder of a build of search tasks.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Port = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="File with clients' key; or GLM5_API_KEY.")] = None,
) -> None:
    """Serve a web's search over HTTP: Search-R1's /retrieve, BrowseComp-Plus's search and get_document, and MCP."""
    from glm5.serve.keys import find_key
    from glm5.serve.retrieval import run

    run(folder, host, port, find_key("api", None, api_key_file))


def check_search(folder: Path, sample: int, as_json: bool) -> bool:
    """Check a build of search tasks and print what was found; whether all is well."""
    from glm5.tasks.search.audit import audit

    found = audit(folder, sample, told=told)
    show(found, as_json)
    return bool(found["ok"])
