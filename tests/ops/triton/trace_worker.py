"""Traces every kernel as Triton does where integers are 1: it makes such arguments constants. Prints what failed as
JSON. With "each", one integer at a time too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from glm5.launch.kernels import shape_of
from glm5.ops.triton import Case
from glm5.ops.triton.compiled import KERNELS, cases

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


if __name__ == "__main__":
    shape, failed = shape_of("glm5"), []
    for case in (case for name in KERNELS for case in cases(name, shape, "sm_90")):
        whole = [name for name, kind in case.types.items() if kind in ("i32", "i64")]
        for ones in [whole, *([name] for name in whole if "each" in sys.argv)]:
            try:
                trace(case, ones)
            except Exception as error:  # whatever the compiler raises
                failed.append(f"{case.name} with {', '.join(ones)} = 1: {error}")
    print(json.dumps(failed))
