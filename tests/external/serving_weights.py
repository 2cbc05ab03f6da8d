"""Builds vLLM's or SGLang's classes for `glm_moe_dsa`, trunk and MTP layer, on the CPU, and gives them the tensors of
checkpoints:

    python serving_weights.py vllm|sglang FOLDER RESULT CHECKPOINT...

FOLDER has their unpacked files. What would run is left out: attention, activations, kernels. Layers, quantisation
schemes with their parameters, and loaders are their own, vLLM's as it chooses them for an H100. RESULT gets, by the
name of each checkpoint: what refused it, or the tensors that no parameter got and the parameters that got none.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.external.serving_parsers import Absent

ABSENT = {
    "vllm": "aiohttp openai_harmony vllm.distributed.kv_transfer vllm.entrypoints vllm.parser vllm.vllm_flash_attn "
    "vllm.v1.structured_output xgrammar",
    "sglang": "IPython aiohttp sgl_kernel torchvision tvm_ffi",
}


class Anything(types.SimpleNamespace):
    """Settings of which only some matter; the others are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Operations:
    """Stands for compiled operations, which nobody calls."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Operations()


class Empty(torch.nn.Module):
    """Stands for a module without parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def pretend() -> None:
    """The platform is an H100 without any compiled code."""
    platforms, interface = map(importlib.import_module, ("vllm.platforms", "vllm.platforms.interface"))

    class Hopper(interface.Platform):
        _enum = interface.PlatformEnum.CUDA
        device_name, device_type, dispatch_key, dist_backend = "cuda", "cpu", "CUDA", "gloo"
        supported_quantization: list[str] = []
        get_device_capability = classmethod(lambda cls, device_id=0: interface.DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        check_and_update_config = classmethod(lambda cls, config: None)

    platforms._current_platform = Hopper()
    operations = importlib.import_module("vllm._custom_ops")
    for name in dir(operations):
        if "supports" in name:
            setattr(operations, name, lambda *_: True)
    torch.cuda.Stream = torch.cuda.Event = Anything  # type: ignore[misc, assignment]
    torch.ops._C = Operations()  # type: ignore[assignment]


@contextlib.contextmanager
def copies() -> Iterator[tuple[set[int], set[int]]]:
    """The addresses of the memory that tensors were copied from, and of that which they were copied to."""
    sources, targets = set[int](), set[int]()
    copy, put = torch.Tensor.copy_, torch.Tensor.__setitem__

    def note(target: torch.Tensor, source: Any) -> None:
        if isinstance(source, torch.Tensor):
            sources.add(source.untyped_storage().data_ptr())
            targets.add(target.untyped_storage().data_ptr())

    def noted(self: torch.Tensor, source: torch.Tensor, *more: Any) -> torch.Tensor:
        note(self, source)
        return copy(self, source, *more)

    def noted_put(self: torch.Tensor, place: Any, source: Any) -> None:
        note(self, source)
        put(self, place, source)

    torch.Tensor.copy_, torch.Tensor.__setitem__ = noted, noted_put  # type: ignore[assignment, method-assign]
    try:
        yield sources, targets
    finally:
        torch.Tensor.copy_, torch.Tensor.__setitem__ = copy, put  # type: ignore[method-assign]


@contextlib.contextmanager
def derived() -> Iterator[dict[int, list[torch.Tensor]]]:
    """By the address of a tensor that was joined or laid out anew: it, and what it was made of."""
    found: dict[int, list[torch.Tensor]] = {}
    cat, contiguous = torch.cat, torch.Tensor.contiguous

    def note(made: torch.Tensor, parts: Any) -> torch.Tensor:
        found[made.untyped_storage().data_ptr()] = [made, *parts]
        return made

    def noted_cat(parts: Any, *more: Any, **named: Any) -> torch.Tensor:
        return note(cat(parts, *more, **named), parts)

    def noted_contiguous(self: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return note(contiguous(self, *more, **named), [self])

    torch.cat, torch.Tensor.contiguous = noted_cat, noted_contiguous  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        torch.cat, torch.Tensor.contiguous = cat, contiguous  # type: ignore[method-assign]


def load(model: Any, tensors: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """(tensors that went nowhere, parameters that got nothing)."""
    with copies() as (sources, targets), derived() as made:
        model.load_weights(iter(tensors.items()))
    used = {part.untyped_storage().data_ptr() for whole in sources & made.keys() for part in made[whole]} | sources
    left = [name for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() not in used]
    own = {name: parameter.untyped_storage().data_ptr() for name, parameter in model.named_parameters()}
    return left, sorted(name for name, address in own.items() if address not in targets)


def read(folder: Path) -> tuple[Any, dict[str, Any] | None, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(configuration, its quantisation, tensors of the trunk, those of the MTP layer)."""
    config = AutoConfig.from_pretrained(folder)
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    last = f"model.layers.{config.num_hidden_layers}."
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(last)}
    raw = json.loads((folder / "config.json").read_text()).get("quantization_config")
    return config, raw, trunk, {name: tensor for name, tensor in tensors.items() if name not in trunk}


def schemes(model: torch.nn.Module) -> dict[str, str]:
    """By module, what takes its weights."""
    return {
        name: type(getattr(module, "scheme", None) or module.quant_method).__name__
        for name, module in model.named_modules()
        if getattr(module, "quant_method", None) is not None
    }


def quantisation(package: str, raw: dict[str, Any] | None) -> Any:
    """The package's own configuration of a checkpoint's quantisation."""
    if raw is None:
        return None
    place, name = "fp8", "Fp8Config"
    if raw["quant_method"] == "compressed-tensors":
        place, name = "compressed_tensors.compressed_tensors", "CompressedTensorsConfig"
    return getattr(importlib.import_module(f"{package}.{place}"), name).from_config(raw)


def vllm_classes() -> dict[str, tuple[Any, Any]]:
    """The classes of the trunk and of the MTP layer: those for any platform, and those for CUDA."""
    places = ("model_executor.models.deepseek_v2", "model_executor.models.deepseek_mtp")
    v2, mtp = (importlib.import_module(f"vllm.{place}") for place in places)
    v2.SiluAndMul = v2.SparseAttnIndexer = v2.MultiHeadLatentAttentionWrapper = Empty
    names = ("attention", "nvidia.model", "nvidia.mtp")
    attention, model, draft = (importlib.import_module(f"vllm.models.deepseek_v32.{name}") for name in names)
    attention.SparseAttnIndexer = Empty

    def begin(self: Any, *, kv_b_proj: Any, prefix: str, **_: Any) -> None:
        torch.nn.Module.__init__(self)
        self.kv_b_proj, self.layer_name, self.kv_cache_dtype, self.impl = kv_b_proj, prefix, "auto", Anything()
        self.use_pcp = self.supports_dense_mha_prefill = False

    attention.MLAAttention.__init__ = begin
    for module in (model, draft):
        module.SparseMLAIndexGroupBuilder = Empty
        module.get_sparse_mla_index_group_max_rows = module.enable_glm52_low_latency_gemm = lambda *_: None
    draft.build_glm52_plan = lambda *_: None
    return {
        "": (v2.GlmMoeDsaForCausalLM, mtp.DeepSeekMTP),
        " for CUDA": (model.DeepseekV32ForCausalLM, draft.DeepseekV32MTP),
    }


def in_vllm(folder: Path, config: Any) -> dict[str, Any]:
    hf, raw, trunk, draft = read(folder)
    model = {"hf_config": hf, "hf_text_config": hf, "dtype": torch.bfloat16, "max_model_len": 4096, "is_moe": True}
    config.model_config = Anything(use_mla=True, is_deepseek_mla=True, enforce_eager=True, model=str(folder), **model)
    config.speculative_config = Anything(draft_model_config=config.model_config)
    embedding = {name: tensor for name, tensor in trunk.items() if "embed_tokens" in name}
    found: dict[str, Any] = {}
    for kind, (whole, mtp) in vllm_classes().items():
        config.quant_config = quantisation("vllm.model_executor.layers.quantization", raw)
        if raw is not None:
            config.quant_config.packed_modules_mapping = whole.packed_modules_mapping
        for part, made, tensors in (("trunk", whole, trunk), ("mtp", mtp, draft | embedding)):
            config.compilation_config.static_forward_context.clear()
            built = made(vllm_config=config)
            found |= {part + kind: load(built, tensors)} | ({} if found else {"schemes": schemes(built)})
    return found


def in_sglang(folder: Path, _: Any) -> dict[str, Any]:
    models = importlib.import_module("sglang.srt.models.glm4_moe")
    for place in ("models.deepseek_v2", "layers.attention.dsa.dsa_indexer"):
        importlib.import_module(f"sglang.srt.{place}").get_rope_wrapper = Empty
    hf, raw, trunk, draft = read(folder)
    settings = quantisation("sglang.srt.layers.quantization", raw)
    found: dict[str, Any] = {}
    for part, kind, tensors in (
        ("trunk", models.GlmMoeDsaForCausalLM, trunk),
        ("mtp", models.GlmMoeDsaForCausalLMNextN, draft),
    ):
        model = kind(hf, settings, prefix="")
        model.post_load_weights = lambda **_: None
        found |= {part: load(model, tensors)} | ({"schemes": schemes(model)} if part == "trunk" else {})
    return found


def attempt(one: Any, folder: Path, config: Any) -> dict[str, Any]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        found: dict[str, Any] = one(folder, config)
        return found
    except Exception as error:
        traceback.print_exc()
        return {"refused": f"{type(error).__name__}: {error}"[:400]}


@contextlib.contextmanager
def started(which: str, place: str) -> Iterator[Any]:
    """Process groups of one rank, and the server's settings."""
    if which == "vllm":
        pretend()
        settings, distributed = map(importlib.import_module, ("vllm.config", "vllm.distributed"))
        device = importlib.import_module("vllm.config.device").DeviceConfig("cpu")
        config = settings.VllmConfig(device_config=device)
        config.attention_config.sparse_mla_prefill_workspace_factor = 1
        config.model_config = Anything(is_moe=True)
        with settings.set_current_vllm_config(config):
            distributed.init_distributed_environment(1, 0, f"file://{place}/store", 0, "gloo")
            distributed.initialize_model_parallel(1)
            yield config
        return
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    places = (f"sglang.srt.{name}" for name in ("runtime_context", "distributed.parallel_state"))
    context, state = map(importlib.import_module, places)
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs(model_path="dummy", device="cpu")
    context.publish(arguments, role="test", ranks=context.SpawnRanks(world_rank=0, dp_rank=None))
    store = f"file://{place}/store"
    state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=store, backend="gloo"
    )
    state.initialize_model_parallel(backend="gloo")
    yield None


def main() -> None:
    which, source, result, *folders = sys.argv[1:]
    importlib.import_module("transformers.image_transforms")  # it looks whether there is torchvision
    sys.meta_path.insert(0, Absent(ABSENT[which].split()))
    sys.path.insert(0, source)
    one = {"vllm": in_vllm, "sglang": in_sglang}[which]
    with tempfile.TemporaryDirectory() as place, started(which, place) as config:
        found = {Path(folder).name: attempt(one, Path(folder), config) for folder in folders}
    Path(result).write_text(json.dumps(found))


main()
