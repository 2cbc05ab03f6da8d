"""Compiled CPU kernels: from the wheel (`prebuilt`), or built from the C++ in this folder on first use and cached per
user. They are optional.

Operations use their torch reference if there are no kernels: neither wheel nor compiler, another device, float64, or
`GLM5_NATIVE=0`.
The kernels follow the same rule as the references (a row's result does not depend on its batch), but round differently.
In an exact run, learner and engine must both use them or both not.

The coarse kernels (attention, indexer, experts, fused decoding) are operators `torch.ops.glm5.*`, so fake tensors and
`torch.compile` see them. The small ones are called directly, because an operator call costs as much as their work; fake
tensors and `torch.compile` see their references instead. Fused decoding of plain tensors is called directly too: its
operator takes all weights of the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.ops.native import prebuilt
from glm5.ops.native.prebuilt import SOURCE
from glm5.ops.operators import LIBRARY, define

FLAGS = [*prebuilt.FLAGS, "-march=native"]
if prebuilt.processor_flags() >= prebuilt.SLOW_PAIRS:
    FLAGS.append(prebuilt.SLOW_PAIRS_FLAG)
COMPILE_SECONDS = 300


class _Address(ctypes.c_void_p):
    """Parameter type of a kernel: a tensor is passed as its address, None as a null pointer; numbers are addresses.
    A tensor whose memory was given back is refused (ctypes.ArgumentError)."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return ctypes.c_void_p(value)
        address = value.data_ptr()
        if not address and value.numel():
            raise RuntimeError(f"a tensor of {tuple(value.shape)} has no memory: its storage was freed.")
        return ctypes.c_void_p(address)


_P, _I, _F = _Address, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "select": (_P, _P, _P, _P, _I, _I, _I, _P, _P, _P, _P, *[_I] * 6, _F),
    "selected": (_P, _P, _P, _P, _P, *[_I] * 6, _F),
    "selected_backward": (_P, _P, _P, _P, _P, _P, _P, _P, *[_I] * 6, _F),
    "attend": (_P, _P, _P, _P, _I, _I, _I, _P, _P, _P, *[_I] * 7, _F),
    "attend_backward": (_P, _P, _P, _P, _P, _P, *[_I] * 7, _F),
    "range_softmax": (_P, _P, _P, _P, *[_I] * 7, _F),
    "range_softmax_backward": (_P, _P, _P, _P, _P, *[_I] * 7, _F),
    "rope": (_P, _P, _P, _P, *[_I] * 7, _F),
    "rms_norm": (_P, _P, _P, _P, _I, _I, _I, _F),
    "rms_norm_backward": (_P, _P, _P, _P, _P, _P, _I, _I, _I),
    "swiglu": (_P, _P, _I, _I),
    "swiglu_backward": (_P, _P, _P, _I, _I),
    "product": (_P, _P, _P, _P, *[_I] * 11),
    "thin_linear": (_P, _P, _P, *[_I] * 4),
    "thin_wide_linear": (_P, _P, _P, *[_I] * 4),
    "thin_mlp": (_P, _P, _P, _P, *[_I] * 4),
    "thin_moe": (*[_P] * 8, *[_I] * 7, _F, _I),
    "fused_blocks": (ctypes.c_void_p,),
    "decode_step": (ctypes.c_void_p,),
    "verify": (*[_P] * 8, *[_I] * 4),
    "combine": (_P, _P, _P, _P, _I, _I, _I),
    "combine_backward": (_P, _P, _P, _P, _P, _P, _I, _I, _I),
    "logsumexp": (_P, _P, _P, _I, _I, _F),
    "integer_product": (*[_P] * 6, *[_I] * 7),
    "nll_backward": (_P, _P, _P, _P, _I, _I, _F),
}
_CHECKED = ("fused_blocks", "decode_step")
_FP32 = ("verify",)  # one function for all element types


class Kernels:
    """The kernels for one element type. Callers check shapes and contiguity."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"glm5_{name}" if name in _FP32 else f"glm5_{name}_{suffix}")
            function.argtypes, function.restype = arguments, ctypes.c_int if name in _CHECKED else None
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


def kernels(x: Tensor) -> Kernels | None:
    """Compiled kernels to call directly on `x`; None for another dtype or device, and for tensors without memory (fake
    tensors, `torch.compile`)."""
    return kernels_of(x, x.dtype)


def kernels_of(x: Tensor, dtype: torch.dtype) -> Kernels | None:
    """`kernels` for numbers of `dtype` where `x` is, which may have another dtype (a packed cache)."""
    if not x.is_cpu or type(x) not in _PLAIN or torch.compiler.is_compiling():
        return None
    return _by_dtype().get(dtype)


_PLAIN = (Tensor, torch.nn.Parameter)


def registered(x: Tensor) -> bool:
    """Whether there are compiled CPU kernels for tensors like `x`, fake ones too."""
    return x.is_cpu and x.dtype in _by_dtype()


def by_operator(x: Tensor) -> bool:
    """Whether a function calls its operator on tensors like `x`: always on an accelerator, whose torch form or kernel
    the dispatcher finds; on a CPU if there are compiled kernels."""
    return not x.is_cpu or x.dtype in _by_dtype()


def register(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function (kernels, *arguments) as the CPU form of the operator `schema`, and return the
    operator. `fake` takes the arguments and returns empty results of the right shapes."""
    name = schema[: schema.index("(")]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Tensor, *rest: Any) -> Any:
            return function(_by_dtype()[first.dtype], first, *rest)

        operator = define(schema, fake)
        LIBRARY.impl(name, run, "CPU")
        return operator

    return decorate


def available() -> bool:
    """Whether compiled kernels are in use in this process."""
    return bool(_by_dtype())


_loaded: dict[torch.dtype, Kernels] | None = None


def _by_dtype() -> dict[torch.dtype, Kernels]:
    global _loaded
    if _loaded is None:
        _loaded = _load()
    return _loaded


def _load() -> dict[torch.dtype, Kernels]:
    if os.environ.get("GLM5_NATIVE", "1") == "0":
        return {}
    try:
        library = _prebuilt() or _compiled()
        if library is None:
            return {}
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home
        detail = getattr(error, "stderr", "") or str(error)
        warnings.warn(f"CPU kernels could not be built, using torch alone: {str(detail)[:300]}", stacklevel=2)
        return {}
    return {torch.float32: Kernels(library, "f32"), torch.bfloat16: Kernels(library, "bf16")}


def _prebuilt() -> ctypes.CDLL | None:
    """The kernels of the wheel, unless there are none or they need a newer C library than this machine has."""
    found = prebuilt.find()
    with contextlib.suppress(OSError):
        return None if found is None else ctypes.CDLL(str(found))
    return None


def _compiled() -> ctypes.CDLL | None:
    """The kernels, built by this machine's compiler; None without GCC."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    if "clang" in version:  # the source uses GCC's vector shuffles
        return None
    library = _build(compiler, version)
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # damaged, as after a loss of power
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(_build(compiler, version)))


def _build(compiler: str, version: str) -> Path:
    """Path of the shared library for this source, compiler and processor; compiled if it does not exist."""
    identity = "\n".join((*prebuilt.sources(), " ".join(FLAGS), version, _processor()))
    target = _cache_dir() / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "kernels.so"
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, target)
    return target


def _cache_dir() -> Path:
    """A folder that only this user can write to: its files are loaded as code. Raises PermissionError if it is not."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm5"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    info = root.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{root} belongs to or can be written by others; make it private (chmod 700)")
    return root


def _processor() -> str:
    """The processor that -march=native compiles for: a shared home directory may serve different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
