"""The first step of a part: read its planned inputs."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.extractors.base import ExtractorSandbox

from glm5.config.corpus import FilterConfig, LimitConfig, SourceConfig
from glm5.data.corpus.filters import rule_set
from glm5.data.corpus.inputs import documents
from glm5.data.corpus.licenses import tagged
from glm5.data.corpus.plan import GIT, Input, planned, repository_key
from glm5.data.corpus.repository import Paths, concatenated
from glm5.data.corpus.samples import Samples
from glm5.data.corpus.spdx import all_of, allowed
from glm5.data.corpus.text import Extract, Extracted, Found, Skipped, Text, extract_here
from glm5.data.corpus.tokens import load_tokenizer
from glm5.data.swe.inputs import rows
from glm5.data.swe.issues import read_issues
from glm5.data.swe.rows import Rows
from glm5.errors import DataError

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_START = 300.0  # seconds that the start of a process may take on a busy machine


class ReadInputs(PipelineStep):
    """Yields the documents of a part, with source, kind, format and license as metadata. What is not used is counted as
    `dropped_REASON`: files that cannot be read, and source code by its license and by the rules for code, so that one
    bad file does not take its repository with it."""

    type = "read"
    name = "inputs"

    def __init__(
        self, out: Path, sources: list[SourceConfig], limits: LimitConfig, filters: FilterConfig, samples: Samples,
        tokenizer: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out, self.limits, self.filters, self.samples, self.tokenizer = out, limits, filters, samples, tokenizer
        self.sources = {source.name: source for source in sources}
        self.code_rules = rule_set("code", filters.options.get("code", {}))
        self._makers: dict[str, Rows] = {}

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        with ExitStack() as stack:
            extract = sandboxed(stack, self.limits)
            samples = stack.enter_context(self.samples.part("read", rank))
            for one in planned(self.out, rank):
                one.check()
                self.stat_update("bytes", value=one.bytes)
                changes = self.sources[one.source].changes is not None
                repositories = one.path.startswith(GIT) and self.sources[one.source].repositories
                joined = not changes and (bool(one.members) or repositories)
                prefix = "/".join(one.members[0].name.split("/")[:2] if one.members else [one.name]) + "/"
                code: dict[str, Text] = {}
                paths = Paths()
                for member in (one,) if changes else one.members or (one,):
                    self.stat_update("files", value=len(member.members) or 1)
                    for found in self._found(member, extract):
                        reason = found.reason if isinstance(found, Skipped) else self._unwanted(found, member)
                        self.stat_update("total")
                        if isinstance(found, Skipped) or reason:
                            self.stat_update("dropped", f"dropped_{reason}")
                            samples.add(reason, found.name, found.text if isinstance(found, Text) else "")
                        elif joined and found.code:
                            code[paths.unlike(found.name.removeprefix(prefix))] = found
                        else:
                            self.stat_update("forwarded")
                            for name, value in found.more.pop("counts", {}).items():
                                self.stat_update(f"swe_{name}", value=value)
                            self.stat_update("formulas", value=found.more.get("formulas", 0))
                            yield _document(found, member)
                one.check()  # a file that grew meanwhile is not the planned one
                if code:
                    yield from self._repository(one, code)

    def _found(self, one: Input, extract: Extract) -> Iterator[Found]:
        """The documents of an input; SWE rows of a source with `changes`."""
        source = self.sources[one.source]
        if source.changes is None:
            return documents(one, source, self.limits, extract)
        if source.name not in self._makers:
            issues = read_issues(source.changes.issues, 2 * self.limits.document_bytes)
            self._makers[source.name] = Rows(source.changes, issues, load_tokenizer(self.tokenizer))
        return rows(one, self._makers[source.name], self.limits)

    def _unwanted(self, found: Text, one: Input) -> str:
        """Why source code is not used: its license, or what shows only file by file."""
        if found.kind not in ("code", "swe"):
            return ""
        if self.filters.licenses and not allowed(_license(found, one), self.filters.licenses):
            return "license"
        if found.kind == "swe" or "code" not in self.filters.rules.get("code", []):
            return ""
        kept = self.code_rules.filter(Document(found.text, found.name))
        return "" if kept is True else f"code_{kept[1]}"

    def _repository(self, one: Input, files: dict[str, Text]) -> Iterator[Document]:
        """The source files of a repository as documents. Counts files as `joined`, documents as
        `joined_documents`."""
        plain = {path: (found.text, found.code or "") for path, found in files.items()}
        for number, (paths, text) in enumerate(concatenated(plain, self.limits.repository_characters), 1):
            self.stat_update("joined", value=len(paths))
            self.stat_update("forwarded", "joined_documents")
            languages = Counter(files[path].code for path in paths)
            more = {"license": all_of(_license(files[path], one) for path in paths), "files": len(paths)}
            first = files[paths[0]]
            yield _document(
                replace(first, name=f"{one.name}#{number}", text=text, code=languages.most_common(1)[0][0], more=more),
                one,
            )


def _license(found: Text, one: Input) -> str:
    return str(found.more.get("license") or (tagged(found.text) if found.code else "") or one.license)


def _document(found: Text, one: Input) -> Document:
    archive = found.name.startswith(f"{one.name}!") and found.code  # the code of an archive is that of one repository
    repository = one.repository or (repository_key(one.name.rpartition("/")[2]) if archive else "")
    metadata = found.more | {
        "source": one.source,
        "kind": found.kind,
        "format": found.format,
        "license": _license(found, one),
        **({"code": found.code} if found.code else {}),
        **({"repository": repository} if repository else {}),
    }
    return Document(found.text, found.name, metadata=metadata)


def sandboxed(stack: ExitStack, limits: LimitConfig) -> Extract:
    """`extract_here` in a process that may take `limits.seconds` and `limits.memory` per document. A document that ends
    it is skipped, and the next one gets a new process."""
    setup = "", (os.getpid(), limits.memory)
    sandbox = stack.enter_context(ExtractorSandbox(_START, warmup_text=setup))

    def start() -> None:
        sandbox._cleanup_process()
        for process in sandbox.all_processes:  # they have been killed
            process.join()
        sandbox.all_processes.clear()  # if processes are spawned, the sandbox is pickled, and they cannot be
        sandbox.timeout = _START
        try:
            sandbox.process_document(setup, _in_sandbox)
        except Exception as error:
            raise DataError(f"The process that reads pages does not start: {type(error).__name__}: {error}") from error
        sandbox.timeout = limits.seconds

    def extract(format: str, raw: bytes) -> Extracted | str:
        if sandbox.process is None or not sandbox.process.is_alive():
            start()  # this is not the document's fault, however long it takes
        try:
            found: Extracted | str = sandbox.process_document((format, raw), _in_sandbox)
        except TimeoutError:
            return "timeout"
        except (EOFError, OSError):
            sandbox._cleanup_process()
            return "crashed"
        return found

    return extract


def _in_sandbox(format: str, content: Any) -> Extracted | str | None:
    if not format:  # the first call sets the process up
        parent, memory = content
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
            if os.getppid() != parent:  # it died before that
                os._exit(1)
            memory += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        return None
    try:
        return extract_here(format, content)
    except MemoryError:
        return "crashed"
    except Exception:
        return "damaged"
