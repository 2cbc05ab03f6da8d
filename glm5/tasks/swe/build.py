"""Builds tasks from a list of packages: `tasks/ID/` folders, `manifest.jsonl`, `rejects.jsonl`, `packages.jsonl`.

A build resumes: what a row of one of the files names is not tried again, unusable packages included. Packages are built
side by side; which tasks come out depends only on the packages, the seed and the rules, unless a test's time decides.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.errors import DataError, Glm5Error, GradingError
from glm5.files import exclusive, read_rows
from glm5.tasks.swe.candidate import Candidate, Repository, Source
from glm5.tasks.swe.derived import pick_patch, write_test
from glm5.tasks.swe.driver import DRIVERS, IN_ROOM, Driver
from glm5.tasks.swe.validate import Baseline, Rejected, Rules, baseline, no_test_fails, validate
from glm5.tasks.swe.written import Ask

MOST_TRIES = 6  # candidates per wanted task
MOST_MISSES = 8
"""Candidates of a file that may fall one after another. The file's others are left out: its tests do not look there."""
MOST_NAMED = 1000  # candidates of a source, if the tasks are named
ODD = (ValueError, LookupError, TypeError, AttributeError, RecursionError, FileNotFoundError)
"""What the files of a package may cause where they are read: a setting that is no JSON, a missing file."""
MOST_FAULTS = 5
"""Candidates in a row that the machine may fail to judge before the build ends. Another run of it tries them again."""


@dataclass(frozen=True)
class Job:
    """A repository that `opened` prepares, and the sources to draw from. The jobs of a `series` give as many tasks
    together as one of others."""

    name: str
    opened: Callable[[], tuple[Repository, Sequence[Source]]]
    series: str = ""


@dataclass
class Build:
    """One build in the folder `out`; `work` holds downloads and baselines, which builds may share. `derived` asks for
    the two further tasks of each, in `tasks/ID-write-test` and `tasks/ID-pick`. With `named`, the id and digest of
    another build's tasks, only these are built. `ask` is a model that writes the texts. `audit` tries a written task
    with everything; its row goes to `audit.jsonl` and the task stays, whatever it says: the tasks whose `drawn` is less
    than `audited` are a sample of the list."""

    out: Path
    work: Path
    seed: int = 0
    rules: Rules = field(default_factory=Rules)
    driver: Driver = DRIVERS["python"]
    derived: bool = False
    named: Mapping[str, str] | None = None
    told: Callable[[str], None] = lambda line: None
    ask: Ask | None = None
    audit: Callable[[Path], dict[str, Any]] | None = None
    audited: float = 0.0

    def __post_init__(self) -> None:
        self._lock, self._faults, self._stopping = threading.Lock(), 0, False
        self._claimed: set[str] = set()
        self._series = Counter[str]()
        self._read()

    def _read(self) -> None:
        self._rows: dict[str, list[dict[str, Any]]] = {
            name: list(read_rows(self.out / f"{name}.jsonl")) for name in ("manifest", "rejects", "packages", "audit")
        }
        self._known = {row["id"]: name for name in ("manifest", "rejects") for row in self._rows[name]}
        self._silent = {row["id"]: row["reason"] == "no failing test" for row in self._rows["rejects"]}

    def run(self, jobs: Sequence[Job], per_package: int, count: int | None, at_once: int) -> dict[str, Any]:
        """Build up to `per_package` tasks from each job and source, `count` in all, `at_once` jobs at a time.

        Returns the table of `summary`. Raises GradingError if rooms do not work, CheckpointError if another build
        runs here."""
        with exclusive(self.out, f"another build writes to {self.out}."):
            self._read()  # another build may have ended since
            (self.out / "tasks").mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(at_once) as pool, self._all_stop():
                futures = [pool.submit(self._all_stop()(self._build), job, per_package, count) for job in jobs]
                for future in futures:
                    future.result()
        return self.summary()

    @contextlib.contextmanager
    def _all_stop(self) -> Iterator[None]:
        """What ends one thread by an error ends the others at their next candidate, before it takes another job."""
        try:
            yield
        except BaseException:
            self._stopping = True
            raise

    def _build(self, job: Job, wanted: int, count: int | None) -> None:
        if self._full(count) or self._stopping:
            return
        if job.series and self.named is None:
            wanted -= self._series[job.series]
            if wanted <= 0:
                return
        name = job.name
        if any(row["package"] == name and "reason" in row for row in list(self._rows["packages"])):
            self.told(f"{name}: unusable before; to try it again, delete its row in {self.out / 'packages.jsonl'}")
            return
        (self.work / "bytecode").mkdir(parents=True, exist_ok=True)
        try:
            try:
                repository, sources = job.opened()
            except Glm5Error:
                raise
            except ODD as error:  # what nobody expected in a package ends this package, not the build
                raise DataError(f"{name} cannot be read: {error!r:.300}") from error
            with tempfile.TemporaryDirectory(dir=self.work / "bytecode") as scratch:
                if repository.language == "python":
                    repository = replace(repository, bytecode=f"{scratch}/kept")
                clean = functools.cache(lambda: self._usable(name, repository))  # only for a candidate that is new
                for source in sources:
                    made = self._draw(name, source.candidates(repository, self.seed), clean, wanted, count)
                    with self._lock:
                        self._series[job.series] += made
                    self.told(f"{name}: {made} tasks from {source.name}")
        except DataError as error:
            self._write("packages", {"package": name, "reason": str(error)[:500]})
            self.told(f"{name}: {error}")

    def _usable(self, name: str, repository: Repository) -> Baseline:
        """The baseline, with its row of `packages.jsonl`. Raises DataError if the tests are of no use."""
        clean = self._baseline(repository)
        self._write("packages", {"package": name, "version": repository.version, "licence": repository.licence,
                                 "origin": repository.origin, "stable_tests": len(clean.stable), "flaky": clean.flaky,
                                 "suite_s": round(clean.wall_s, 2)})  # fmt: skip
        return clean

    def _draw(
        self, name: str, candidates: Iterator[Candidate], clean: Callable[[], Baseline], wanted: int, count: int | None
    ) -> int:
        """The number of tasks among the candidates of one source. Raises DataError if the tests are of no use."""
        made, misses, named = 0, Counter[str](), self.named
        candidates = itertools.islice(candidates, wanted * MOST_TRIES if named is None else MOST_NAMED)
        while (made < wanted or named is not None) and not self._full(count) and not self._stopping:
            candidate = self._next(candidates, name)  # only if it is wanted, for a session may be played for it
            if candidate is None:
                break
            if named is not None:
                if candidate.id not in named:
                    continue
            elif all(misses[path] >= MOST_MISSES for path in candidate.changes):
                continue
            good = self._known.get(candidate.id) == "manifest"
            if candidate.id not in self._known:
                good = self._try(candidate, clean(), count)
            made += good
            misses.update({path: -misses[path] if good else 1 for path in candidate.changes})
        return made

    @property
    def stopping(self) -> bool:
        """Whether an error or an interrupt ends the build."""
        return self._stopping

    def _next(self, candidates: Iterator[Candidate], name: str) -> Candidate | None:
        try:
            return next(candidates, None)
        except Exception as error:  # of a model, the machine, or a source that nobody expected
            self._fault(f"{name}: the other candidates are left out: {error or repr(error)}", error)
            return None

    def _fault(self, line: str, error: Exception) -> None:
        """The machine or a model has failed; another run tries again. Raises `error` after too many in a row."""
        self._faults += 1
        if self._faults > MOST_FAULTS:
            raise error
        self.told(line)

    def _full(self, count: int | None) -> bool:
        return count is not None and len(self._rows["manifest"]) >= count

    def _baseline(self, repository: Repository) -> Baseline:
        """The stored baseline of this state, or a new one."""
        key = json.dumps([repository.origin, repository.packages, repository.test_files, vars(self.rules), 4])
        path = self.work / "baselines" / (hashlib.sha256(key.encode()).hexdigest()[:24] + ".json")
        if path.is_file():
            clean = Baseline.from_json(json.loads(path.read_text(encoding="utf-8")))
            if repository.bytecode:  # this run writes it
                self.driver.run(repository, {}, repository.test_files, self.rules.suite_s, clean.stable)
            return clean
        clean = baseline(repository, self.driver, self.rules)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(clean.to_json()), encoding="utf-8")
        return clean

    def _try(self, candidate: Candidate, clean: Baseline, count: int | None) -> bool:
        with self._lock:  # two sources may have the same candidate
            if candidate.id in self._claimed:
                return False
            self._claimed.add(candidate.id)
        repository, folder = candidate.repository, self.out / "tasks" / candidate.id
        common = {"id": candidate.id, "package": repository.name, "version": repository.version,
                  "source": candidate.source, "kind": candidate.kind, "tier": candidate.tier}  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)  # a build that was stopped may have left it
        keys = ("package", "version", "source")
        rows = list(self._rows["manifest"]) if candidate.source != "mutate" else []
        same = [row.get("failing", "") for row in rows if all(row[key] == common[key] for key in keys)]
        try:
            # What breaks nothing as a whole can break something in part, so what another build has made is tried.
            if self.named is None and self._nothing_fails(candidate.within, clean):
                raise Rejected("no failing test")
            row = validate(candidate, clean, self.driver, self.rules, folder, same, self.ask)
        except Rejected as reason:
            self._faults, self._silent[candidate.id] = 0, str(reason) == "no failing test"
            self._write("rejects", {**common, "reason": str(reason), "notes": candidate.notes})
            return False
        except GradingError as error:
            self._fault(f"{repository.name}: a candidate is left out, for the machine failed: {error}", error)
            return False
        except Exception as error:  # what nobody expected in a package's source ends this candidate, not the build
            self._fault(f"{repository.name}: candidate {candidate.id} is left out: {error!r}", error)
            self._write("rejects", {**common, "reason": "error", "notes": [repr(error)[:500]]})
            return False
        self._faults = 0
        if self.derived:
            row["derived"] = self._derive(candidate, clean, folder)
        row |= {"licence": repository.licence, "origin": repository.origin, "fixed_copy": repository.fixed_copy,
                "notes": candidate.notes, "sha256": digest(folder)}  # fmt: skip
        if self._write("manifest", {**common, **row}, count):
            if self.audit is not None and drawn(candidate.id, self.seed) < self.audited:
                self._write("audit", self.audit(folder))
            return True
        for path in self.out.glob(f"tasks/{candidate.id}*"):
            shutil.rmtree(path)
        return False

    def _nothing_fails(self, wider: Candidate | None, clean: Baseline) -> bool:
        """Whether no test fails with a change, or with one that it is a part of itself. Tried once, in one run."""
        if wider is None:
            return False
        if wider.id not in self._silent:
            self._silent[wider.id] = self._nothing_fails(wider.within, clean) or no_test_fails(
                wider, clean, self.driver
            )
        return self._silent[wider.id]

    def _derive(self, candidate: Candidate, clean: Baseline, folder: Path) -> dict[str, str]:
        """What became of the two further tasks: their digest, or why there is none."""
        makers: dict[str, Callable[[Path], None]] = {
            "write-test": lambda target: write_test(candidate, folder, target),
            "pick": lambda target: pick_patch(candidate, clean, self.driver, folder, target),
        }
        found = {}
        for name, maker in makers.items():
            target = folder.with_name(f"{folder.name}-{name}")
            shutil.rmtree(target, ignore_errors=True)
            try:
                maker(target)
                found[name] = digest(target)
            except Rejected as reason:
                found[name] = f"none: {reason}"
        return found

    def _write(self, name: str, row: dict[str, Any], most: int | None = None) -> bool:
        """Append a row that is new. False if another thread was faster and the file has `most` rows."""
        with self._lock:
            if most is not None and len(self._rows[name]) >= most:
                return False
            if row not in self._rows[name]:
                self._rows[name].append(row)
                with (self.out / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        return True

    def summary(self) -> dict[str, Any]:
        """Counts of tasks and of reject reasons by source, and the share of each source."""
        tasks, rejects = self._rows["manifest"], self._rows["rejects"]
        table = {
            source: {
                "tasks": sum(row["source"] == source for row in tasks),
                "rejects": dict(Counter(row["reason"] for row in rejects if row["source"] == source)),
            }
            for source in sorted({row["source"] for row in [*tasks, *rejects]})
        }
        unusable = [row for row in self._rows["packages"] if "reason" in row]
        digests = {row["id"]: row.get("sha256", "") for row in tasks}
        compared = {} if self.named is None else {
            "not_built": sorted(self.named.keys() - digests.keys()),
            "differ": sorted(i for i, sha256 in self.named.items() if digests.get(i, sha256) != sha256),
        }  # fmt: skip
        return compared | {
            "tasks": len(tasks), "packages": len({row["package"] for row in tasks}),
            "kinds": dict(Counter(row["kind"] for row in tasks)), "tiers": dict(Counter(row["tier"] for row in tasks)),
            "sources": table, "unusable_packages": {row["package"]: row["reason"] for row in unusable},
        }  # fmt: skip


def drawn(name: str, seed: int) -> float:
    """A number from 0 to 1 for a task's id. A sample by it stays one while the list grows, and needs no list."""
    return int.from_bytes(hashlib.sha256(f"audit {seed} {name}".encode()).digest()[:6]) / 2**48


def digest(folder: Path) -> str:
    """SHA-256 over the paths and contents of a task's files, without the grader's programs: they are the same in all
    tasks, and a later version of them does not make another task."""
    found, programs = hashlib.sha256(), {"test.sh", *(path.name for path in IN_ROOM.iterdir())}
    for path in sorted(folder.rglob("*")):
        top, *below = path.relative_to(folder).parts
        if path.is_file() and not (top == "tests" and below[0] in programs):
            found.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
