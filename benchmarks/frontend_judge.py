"""Agreement of a judge of frontends with the truth: references and mutants whose failing check-items are known.

    python benchmarks/frontend_judge.py [--numbers 1] [--judge URL [--judge-name NAME]] [--workers 2] [--record FILE]

Without a URL the scripted judge decides. The table has agreement per check-item with an interval that knows that items
of a page go together, how often a judge passes what is broken and fails what works, and items without a verdict.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm5.agents.endpoint import Endpoint
from glm5.eval.cc_bench.judge import FAIL, PASS, FrontendJudge
from glm5.eval.cc_bench.scripted_judge import scripted_judge
from glm5.stats import clustered_share, wilson
from glm5.tasks.cc_bench import page_seeds, page_seeds_data, page_seeds_show  # noqa: F401 - they register the seeds
from glm5.tasks.cc_bench.checks import PAGES, FrontendTask, frontend_task
from glm5.tasks.cc_bench.project import Project


def pages(numbers: int) -> Iterator[tuple[FrontendTask, str, Project]]:
    """Every reference ("") and every mutant."""
    for number in range(numbers):
        for name in sorted(PAGES):
            task = frontend_task(name, number)
            for mutant in ("", *sorted(task.mutants)):
                yield task, mutant, Project.of_html(task.mutated(mutant).html("Project"))


def measure(judge: FrontendJudge, numbers: int, workers: int, record: Path | None) -> None:
    agreed, totals, kinds, began = list[int](), list[int](), Counter[str](), time.monotonic()
    shown = list(pages(numbers))
    with ThreadPoolExecutor(workers) as pool:
        verdicts = pool.map(lambda page: judge.verdicts(page[0], page[2]), shown)
        for (task, mutant, _), found in zip(shown, verdicts, strict=True):
            truth, right = task.truth(mutant), 0
            for (number, one), wanted in zip(found.items(), truth, strict=True):
                right += one.verdict == ("pass" if wanted else "fail")
                kinds[f"{'works' if wanted else 'broken'}: {one.verdict}"] += 1
                if record is not None:
                    row = {"task": task.name, "mutant": mutant, "item": number, "truth": wanted, **vars(one)}
                    with record.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            agreed.append(right)
            totals.append(len(truth))
    share = clustered_share(agreed, totals)
    print(f"agreement: {share.value:.1%} [{share.low:.1%}, {share.high:.1%}] of {share.n} items, {len(totals)} pages")
    for truth_is, wrong in (("broken", PASS), ("works", FAIL)):
        n = sum(count for kind, count in kinds.items() if kind.startswith(truth_is))
        rate = wilson(kinds[f"{truth_is}: {wrong}"], n)
        print(f"{truth_is}, but judged {wrong}: {rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}] of {n}")
    print(f"no verdict: {sum(count for kind, count in kinds.items() if kind.endswith('error'))}")
    print(f"{(time.monotonic() - began) / sum(totals):.2f} s per item")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1)
    parser.add_argument("--judge", default="")
    parser.add_argument("--judge-name", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    judge = FrontendJudge.of(Endpoint(options.judge, options.judge_name), 1) if options.judge else scripted_judge()
    measure(judge, options.numbers, options.workers, options.record)


if __name__ == "__main__":
    main()
