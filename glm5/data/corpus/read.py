"""The first step of a part: read its planned inputs."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.extractors.base import ExtractorSandbox

from glm5.config.corpus import LimitConfig, SourceConfig
from glm5.data.corpus.formats import Extract, Extracted, Skipped, extract_here, texts
from glm5.data.corpus.plan import planned
from glm5.data.corpus.samples import Samples

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_START = 300.0  # seconds that the start of a process may take on a busy machine


class ReadInputs(PipelineStep):
    """Yields the documents of a part, with source, kind, format and license as metadata.
    What is skipped is counted as `skipped_REASON`."""

    type = "read"
    name = "inputs"

    def __init__(
        self, out: Path, sources: list[SourceConfig], limits: LimitConfig, samples: Samples, licenses: Any = None
    ) -> None:
        super().__init__()
        self.out, self.limits, self.samples = out, limits, samples
        self.sources = {source.name: source for source in sources}

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        with ExitStack() as stack:
            extract = sandboxed(stack, self.limits)
            samples = stack.enter_context(self.samples.part("read", rank))
            for one in planned(self.out, rank):
                one.check()
                source = self.sources[one.source]
                self.stat_update("files")
                self.stat_update("bytes", value=one.bytes)
                for found in texts(Path(one.path), one.name, self.limits, source.field, extract):
                    if isinstance(found, Skipped):
                        self.stat_update("total", "dropped", f"dropped_{found.reason}")
                        samples.add(found.reason, found.name, "")
                        continue
                    self.stat_update("total", "forwarded")
                    metadata = {
                        "source": one.source,
                        "kind": source.kind or found.kind,
                        "format": found.format,
                        "license": found.more.get("license") or source.license or "",
                        **({"code": found.code} if found.code else {}),
                        **{key: value for key, value in found.more.items() if key != "license"},
                    }
                    yield Document(found.text, found.name, metadata=metadata)


def sandboxed(stack: ExitStack, limits: LimitConfig) -> Extract:
    """`extract_here` in a process that may take `limits.seconds` and `limits.memory` per document. A document that ends
    it is skipped, and the next one gets a new process."""
    setup = "", (os.getpid(), limits.memory)
    sandbox = stack.enter_context(ExtractorSandbox(_START, warmup_text=setup))

    def extract(format: str, raw: bytes) -> Extracted | str:
        if sandbox.process is None:  # a start is not the document's fault, however long it takes
            sandbox.timeout = _START
            sandbox.process_document(setup, _in_sandbox)
            sandbox.timeout = limits.seconds
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
