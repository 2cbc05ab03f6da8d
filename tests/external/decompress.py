"""Run by test_compressed_tensors.py with the package compressed-tensors: what it reads in a folder that we wrote.

Usage: decompress.py FOLDER OUT. Writes every quantised matrix, dequantised, to the safetensors file OUT.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file


def matches(target: str, name: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module, leaf = name.rsplit(".", 1)
            modules.setdefault(module, {})[leaf] = tensor
    found = {}
    for module, state in modules.items():
        groups = [s for s in config.config_groups.values() if any(matches(t, module) for t in s.targets)]
        ignored = any(matches(target, module) for target in config.ignore)
        quantised = "weight_scale" in state
        if quantised != (bool(groups) and not ignored):
            raise SystemExit(f"{module}: quantised is {quantised}, the configuration says otherwise")
        if quantised:
            (scheme,) = groups
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            found[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].float().contiguous()
    save_file(found, out)


main()
