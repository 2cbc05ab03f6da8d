"""Traces every kernel as Triton does where integers are 1: it makes such arguments constants. Prints what failed as
JSON. With "each", one integer at a time too. With a target, compiles every kernel for it in fp32 instead."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from glm5.launch.kernels import shape_of
from glm5.ops.triton import TARGETS, Case
from glm5.ops.triton.compiled import KERNELS, build, cases

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


def trace(case: Case, ones: Iterable[str]) -> None:
    constants = {**case.constants, **dict.fromkeys(ones, 1)}
    signature = {**case.types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(case.function, {name: signature[name] for name in case.function.arg_names}, constants, {})
    options, context = BACKEND.parse_options(dict(case.options)), ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    source.make_ir(TARGET, options, BACKEND.get_codegen_implementation(options), BACKEND.get_module_map(), context)


def in_fp32(target: str) -> list[str]:
    shape = replace(shape_of("glm5"), bits=32)
    work = (case for name in KERNELS for case in cases(name, shape, target) if case.rate == 1)
    found = [(case.name, build(case, target)) for case in work]
    return [f"{name} for {target}: {made.problem}" for name, made in found if made.problem]


def with_ones(each: bool) -> list[str]:
    failed = []
    for case in (case for name in KERNELS for case in cases(name, shape_of("glm5"), "sm_90")):
        whole = [name for name, kind in case.types.items() if kind in ("i32", "i64")]
        for ones in [whole, *([name] for name in whole if each)]:
            try:
                trace(case, ones)
            except Exception as error:  # whatever the compiler raises
                failed.append(f"{case.name} with {', '.join(ones)} = 1: {error}")
    return failed


if __name__ == "__main__":
    what = sys.argv[1]
    print(json.dumps(in_fp32(what) if what in TARGETS else with_ones(what == "each")))
