"""Run by test_gguf.py with the package gguf: reads a file with its own reader, and writes what it found.

    read_gguf.py FILE OUT

OUT gets the dequantised tensors in OUT.npz, and metadata and types of tensors in OUT.json.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from gguf import GGUFReader, dequantize


def main(file: str, out: str) -> None:
    reader = GGUFReader(file)
    values = {}
    for tensor in reader.tensors:
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values[tensor.name] = array.reshape([int(size) for size in reversed(tensor.shape)])
    np.savez(f"{out}.npz", **values)
    about = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    with open(f"{out}.json", "w") as handle:
        json.dump({"metadata": about, "types": types}, handle)


main(*sys.argv[1:])
