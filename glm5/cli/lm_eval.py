"""`glm5 eval MODEL --suite lm-eval`: lm-eval's own tasks on a checkpoint or a server, for the rows of Table 11 (§6.3).

lm-eval is a program of its own, in whatever environment it is installed. It asks a server for continuations and for
log-probabilities of text (`/v1/completions` with `echo`); a checkpoint is served by a child process meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from glm5.errors import DataError, EngineError, UsageError, nearest

OPTIONS: dict[str, Any] = {"tasks": [], "program": "lm_eval", "include": "", "arguments": []}
"""Options with their defaults: the tasks, by default those of Table 11; lm-eval's program; a folder with more tasks;
and more arguments of the program."""


def lm_eval(
    model: str, options: dict[str, Any], out: Path | None, problems: int | None, name: str, concurrency: int,
    tokenizer: Path | None, key_file: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """Run the tasks and return their scores, and the path of lm-eval's results for `glm5 table`. Raises UsageError for
    an option that does not fit or a missing program, EngineError if it fails."""
    from glm5.agents.endpoint import Endpoint
    from glm5.agents.models import served
    from glm5.config.model import GLM5Config
    from glm5.serve.keys import find_key

    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise UsageError(f"--set {unknown[0]}: lm-eval takes {', '.join(OPTIONS)}{nearest(unknown[0], OPTIONS)}.")
    chosen = OPTIONS | options
    tasks = [*map(str, chosen["tasks"])] if isinstance(chosen["tasks"], list) else str(chosen["tasks"]).split(",")
    if out is None:
        raise UsageError("lm-eval writes its results: name a folder with --out.")
    program = shutil.which(str(chosen["program"]))
    if program is None:
        raise UsageError(
            f"There is no program {chosen['program']}: pip install 'lm_eval[api]', in an environment of its own if you "
            "like, and name it with --set program=PATH."
        )
    before = set(results_below(out))
    with contextlib.ExitStack() as stack:
        if "://" in model:
            key, url, length = find_key("api", None, key_file), model, None
        else:
            key, tokenizer = secrets.token_urlsafe(24), tokenizer or Path(model)
            length = GLM5Config.load(Path(model)).max_position_embeddings
            url = stack.enter_context(served(Path(model), key))
        endpoint = Endpoint(url, name, key=key)
        stack.callback(endpoint.close)
        told = {"model": endpoint.name, "base_url": f"{endpoint.base}/v1/completions", "num_concurrent": concurrency}
        told |= {"tokenizer": tokenizer} if tokenizer else {}
        told |= {"max_length": length} if length else {}
        if any("," in str(value) for value in told.values()):
            raise UsageError("lm-eval cannot take a name, URL or path with a comma.")
        arguments = ",".join(f"{key}={value}" for key, value in told.items())
        command = [program, "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", ",".join(tasks or table_tasks()), "--output_path", str(out)]
        command += ["--include_path", str(chosen["include"])] if chosen["include"] else []
        command += ["--limit", str(problems)] if problems else []
        env = dict(os.environ) | ({"OPENAI_API_KEY": key} if key else {})
        done = subprocess.run([*command, *map(str, chosen["arguments"])], stdout=sys.stderr, env=env, check=False)
    if done.returncode:
        raise EngineError(f"lm-eval ended with status {done.returncode}; see its message above.")
    made = sorted(set(results_below(out)) - before, key=lambda path: path.stat().st_mtime)
    if not made:
        raise DataError(f"lm-eval wrote no results below {out}.")
    found = json.loads(made[-1].read_text(encoding="utf-8"))["results"]
    scores = {task: scores_of(values) for task, values in found.items()}
    return {"results": str(made[-1]), **scores}


def scores_of(values: dict[str, Any]) -> dict[str, float]:
    """The numbers of a task's results by metric, with the filter of lm-eval that the answers went through, if one did:
    "acc", "exact_match,strict-match"."""
    numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
    return {key.removesuffix(",none"): value for key, value in numbers.items()}


def results_below(folder: Path) -> list[Path]:
    return list(folder.rglob("results_*.json")) if folder.is_dir() else []


def table_tasks() -> list[str]:
    """lm-eval's tasks among the rows of Table 11."""
    from glm5.eval.tables import TABLES

    rows = tomllib.loads(TABLES.read_text(encoding="utf-8"))["11"]["rows"]
    return [row["lm_eval"][0] for row in rows if "lm_eval" in row]
