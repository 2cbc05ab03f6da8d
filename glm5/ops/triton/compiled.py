"""Compile the kernels for targets that this machine does not have, and read what the compilers made of them.

The compilers and disassemblers are in Triton's wheel, so neither a GPU nor a driver is needed. Triton caches compiled
kernels (`~/.triton`, TRITON_CACHE_DIR).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from glm5.config import devices
from glm5.errors import MissingExtraError, UsageError
from glm5.ops.triton import TARGETS, Case, Shape

KERNELS = (
    "mla_latents",
    "mla_absorb",
    "sparse_forward",
    "sparse_decode",
    "attention_target",
    "sparse_backward",
    "sparse_backward_q",
    "index_select",
    "selected_scores",
    "indexer_kl",
    "range_attention",
    "range_attention_backward",
    "grouped_matmul",
    "integer_rows",
    "rms_norm",
    "swiglu",
    "rope",
    "route",
    "expert_layout",
    "combine",
    "token_logits",
    "sampling",
)
"""Modules in `glm5.ops.triton.kernels` with `case`."""

_TENSOR_CORES = re.compile(r"\b(HGMMA|UTC\w*MMA|HMMA|[QI]GMMA|IMMA|v_mfma)")
_LOCAL_MEMORY = re.compile(r"\b(?:STL|LDL)\b")
_TRAP = re.compile(r"^\s*(?:trap;|s_trap)", re.MULTILINE)


DEVICES = {name.upper(): devices.DEVICES[name] for name in ("h100", "h200", "b200", "mi300x")}
"""By the names that the drivers use."""


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a kernel. `spills` counts what goes through memory: instructions that move registers to
    and from local memory (NVIDIA), spilled vector registers (AMD). `scalar_spills` are scalar registers kept in lanes
    of vector registers (AMD). `problem` says why the kernel cannot run on the target, if so."""

    registers: int = 0
    spills: int = 0
    scalar_spills: int = 0
    shared_bytes: int = 0
    tensor_core_instructions: dict[str, int] = field(default_factory=dict)
    problem: str | None = None


def require_triton() -> Any:
    """Triton, ready to compile. Raises MissingExtraError without it, UsageError if it interprets."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UsageError("TRITON_INTERPRET is set: nothing can be compiled. Unset it.")
    try:
        return importlib.import_module("triton")
    except ImportError:
        raise MissingExtraError("triton", "triton") from None


def cases(name: str, shape: Shape, target: str) -> list[Case]:
    """The kernel of a module, and the small ones that its launcher also calls. Needs Triton."""
    require_triton()
    module = importlib.import_module(f"glm5.ops.triton.kernels.{name}")
    found = [module.case(shape, target), *(module.helpers(shape, target) if hasattr(module, "helpers") else ())]
    kind = f"*{'fp32' if shape.bits == 32 else 'bf16'}"
    return [replace(c, types={n: kind if t == "*bf16" else t for n, t in c.types.items()}) for c in found]


def build(case: Case, target: str) -> Compiled:
    """Compile a kernel for a target and measure it. A kernel that does not fit gets a `problem`, not an exception."""
    triton = require_triton()
    compiler, backends = (importlib.import_module(f"triton.{name}.compiler") for name in ("compiler", "backends"))
    kind = TARGETS[target]
    signature = {**case.types, **dict.fromkeys(case.constants, "constexpr")}
    names = case.function.arg_names
    signature = {name: signature[name] for name in names}
    multiples = {name for name in names if signature[name].startswith("*")} | set(case.aligned)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in multiples}
    source = compiler.ASTSource(case.function, signature, dict(case.constants), aligned)
    where = backends.GPUTarget(kind.backend, kind.arch, kind.warp_size)
    try:
        built = triton.compile(source, target=where, options=dict(case.options))
    except Exception as error:  # the compilers raise whatever their passes raise
        reason = str(error).strip().splitlines() or [""]
        return Compiled(problem=f"does not compile: {type(error).__name__}: {reason[-1][:300]}")
    found = _cubin(built) if kind.backend == "cuda" else _hsaco(built)
    return Compiled(**found, shared_bytes=built.metadata.shared, problem=_problem(built, found, target))


def _problem(built: Any, found: dict[str, Any], target: str) -> str | None:
    """Why a compiled kernel cannot run: the compilers accept some that do not fit, and make them trap."""
    limits, memory = TARGETS[target], built.metadata
    if memory.shared > limits.shared_limit:
        return f"needs {memory.shared:,} bytes of shared memory; {target} has {limits.shared_limit:,}"
    if getattr(memory, "tmem_size", 0) > limits.tensor_limit:
        return f"needs {memory.tmem_size} columns of tensor memory; {target} has {limits.tensor_limit}"
    if _TRAP.search(built.asm.get("ptx") or built.asm["amdgcn"]):
        return "was compiled to a trap"
    return None


def _cubin(built: Any) -> dict[str, Any]:
    tool = Path(importlib.import_module("triton.backends.nvidia").__file__ or "").parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True, timeout=120).stdout
            for option in ("-res-usage", "-sass")
        )
    registers = max(int(number) for number in re.findall(r"\bREG:(\d+)", usage))
    return _counted(code, registers, len(_LOCAL_MEMORY.findall(code)))


def _hsaco(built: Any) -> dict[str, Any]:
    code = built.asm["amdgcn"]

    def most(name: str) -> int:
        return max(int(number) for number in re.findall(rf"\.{name}:\s+(\d+)", code))

    counted = _counted(code, most("vgpr_count"), most("vgpr_spill_count"))
    return {**counted, "scalar_spills": most("sgpr_spill_count")}


def _counted(code: str, registers: int, spills: int) -> dict[str, Any]:
    cores = Counter(_TENSOR_CORES.findall(code))
    return {"registers": registers, "spills": spills, "tensor_core_instructions": dict(cores)}


def report(case: Case, target: str, made: Compiled) -> dict[str, Any]:
    """A row of `glm5 kernels`. `roofline_us` predicts the shortest time of a launch on each GPU from peak rates."""
    times = {
        name: round(1e6 * max(case.flops / (case.rate * device.flops), case.bytes / device.bandwidth), 2)
        for name, device in DEVICES.items()
    }
    intensity = round(case.flops / case.bytes, 2)
    work = {
        "bytes": case.bytes,
        "flops": case.flops,
        "rate": case.rate,
        "arithmetic_intensity": intensity,
        "roofline_us": times,
    }
    kind = {"name": case.name, "target": target, "wants_tensor_cores": case.tensor_cores}
    return {**kind, **asdict(made), **work}


def measure(name: str, shape: Shape, target: str) -> list[dict[str, Any]]:
    """Compile the kernels of a module at one shape for one target, and report them. Results are remembered for this
    version of Triton and of the kernels' source."""
    kept = _memory() / f"{name}-{target}-{hashlib.sha256(repr(shape).encode()).hexdigest()[:12]}.json"
    if kept.exists():
        rows: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8"))
        return rows
    rows = [report(case, target, build(case, target)) for case in cases(name, shape, target)]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=kept.parent, delete=False) as file:
        json.dump(rows, file)
    os.replace(file.name, kept)
    return rows


def remembered() -> list[dict[str, Any]]:
    """What `measure` found before with this version of Triton and of the kernels' source."""
    return [row for file in sorted(_memory().glob("*.json")) for row in json.loads(file.read_text(encoding="utf-8"))]


def _memory() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm5"
    sources = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
    identity = b"".join((importlib.metadata.version("triton").encode(), *sources))
    return root / f"gpu-kernels-{hashlib.sha256(identity).hexdigest()[:16]}"
