"""A quantised copy of a checkpoint, layer by layer: rotate, observe, smooth, round, write (§5).

One layer is in memory at a time, in fp32, beside the residual stream of the calibration text. Every finished layer is
a file of its own in a work folder, so an interrupted run goes on after the last one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm5.errors import CheckpointError, ConfigError
from glm5.files import MANIFEST, atomic_write, exclusive, publish_dir
from glm5.model.ascend_files import DESCRIPTION
from glm5.model.context import ForwardContext
from glm5.model.disk_names import disk_rows
from glm5.model.glm5 import Block, GLM5ForCausalLM
from glm5.model.hf_weights import verify_checkpoint
from glm5.model.layers import Embedding, Linear, final_norm
from glm5.model.mtp import MTPLayer
from glm5.model.tensor_files import INDEX, Stored, open_tensors, read_folder, read_header, read_tensor, save_file
from glm5.model.weight_source import WeightSource, allocate, whole
from glm5.ops.quantisers import Quantised
from glm5.quant.calibration import observe
from glm5.quant.formats import format_named
from glm5.quant.rotation import Rotations, rotate_block, rotate_columns, rotate_end, rotate_mtp_inputs
from glm5.quant.schemes import Form, Scheme, round_weight
from glm5.quant.smoothing import smooth

REPORT = "quantization.json"
WORKING = torch.float32
CALIBRATED = ("awq", "smooth")
"""Steps that need activations of real text."""

Progress = Callable[[str, int, int], None]


@dataclass
class _Piece:
    """A part of the model that is converted at once. `modules` makes them, by their names in the model, without
    memory."""

    name: str
    modules: Callable[[], dict[str, nn.Module]]


@dataclass
class _Stream:
    """The residual stream of the calibration text before the next layer: a flat tensor per row, which exact mode
    may fill up with more tokens, and the keys that the last indexer selected."""

    ids: Tensor
    x: list[Tensor] = field(default_factory=list)
    indices: list[Tensor | None] = field(default_factory=list)

    def contexts(self) -> Iterator[tuple[int, ForwardContext]]:
        """One exact context per row: only there every module of a layer is called by itself."""
        for row in range(len(self.ids)):
            positions = torch.arange(self.ids.shape[1]).unsqueeze(0)
            yield row, ForwardContext(positions=positions, exact=True)


class Conversion:
    """One run of `quantise_checkpoint`."""

    def __init__(self, source: Path, scheme: Scheme, ids: Tensor | None, seed: int, layout: str) -> None:
        self.base = GLM5ForCausalLM.from_pretrained(source, device="meta")
        scheme.check(self.base)
        self.layout, self.format = layout, format_named(layout)
        self.format.check(scheme, self.base)
        self.scheme, self.seed, config = scheme, seed, self.base.config
        assert self.base.weight_source is not None
        self.weights: WeightSource = self.base.weight_source
        rotated = "quarot" in scheme.steps
        self.rotations = Rotations.of(config, seed) if rotated else None
        turned_back = rotated and bool(config.num_nextn_predict_layers)
        self.config = config.replace(rotated_residual=turned_back) if turned_back else config
        needed = [step for step in scheme.steps if step in CALIBRATED]
        if needed and ids is None:
            raise ConfigError(f'scheme "{scheme.name}" needs calibration text for its step "{needed[0]}".')
        self.stream = _Stream(ids) if needed and ids is not None else None
        self.dtype = stored_dtype(source)

    def pieces(self) -> list[_Piece]:
        """Embedding, layers, end and MTP layer: the order in which a forward pass needs them."""
        c, depth = self.config, self.config.num_hidden_layers

        def block(layer: int) -> dict[str, nn.Module]:
            return {f"model.layers.{layer}": Block(c, layer)}

        def end() -> dict[str, nn.Module]:
            return {"model.norm": final_norm(c), "lm_head": Linear(c.hidden_size, c.vocab_size)}

        pieces = [_Piece("embedding", lambda: {"model.embed_tokens": Embedding(c.vocab_size, c.hidden_size)})]
        pieces += [_Piece(f"layer {layer}", partial(block, layer)) for layer in range(depth)]
        pieces.append(_Piece("end", end))
        if c.num_nextn_predict_layers:
            pieces.append(_Piece("MTP layer", lambda: {"mtp": MTPLayer(c, Block(c, depth))}))
        return pieces

    @torch.no_grad()
    def convert(self, piece: _Piece) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of a piece as they are stored, by their names there, and what was measured on the way."""
        with torch.device("meta"):
            modules = piece.modules()
        for prefix, module in modules.items():
            allocate(module.to(WORKING), torch.device("cpu"))
            state = module.state_dict()
            if self.rotations is not None:  # the source has none
                state = {name: tensor for name, tensor in state.items() if not name.endswith("norm.rotation")}
            self.weights.fill({f"{prefix}.{name}": whole(tensor) for name, tensor in state.items()})
        begin = time.monotonic()
        report: dict[str, Any] = {"junctions": []}
        if piece.name == "embedding":
            self._embedding(*modules.values())
        elif piece.name == "end":
            self._end(*modules.values())
        else:
            self._layer(modules, report)
        tensors, report["tensors"] = self._round(modules)
        report["seconds"] = round(time.monotonic() - begin, 3)
        return tensors, report

    def _embedding(self, table: Any) -> None:
        if self.rotations is not None:
            rotate_columns(table.weight, self.rotations.hidden)
        if self.stream is not None:
            self.stream.x = [ctx.flat(table(self.stream.ids[row : row + 1])) for row, ctx in self.stream.contexts()]
            self.stream.indices = [None] * len(self.stream.ids)

    def _end(self, norm: Any, head: Any) -> None:
        if self.rotations is not None:
            rotate_end(norm, head.weight, self.rotations)

    def _layer(self, modules: dict[str, nn.Module], report: dict[str, Any]) -> None:
        ((prefix, module),) = modules.items()
        block: Any = module.block if isinstance(module, MTPLayer) else module
        if self.rotations is not None:
            if isinstance(module, MTPLayer):
                rotate_mtp_inputs(module, self.rotations)
                rotate_end(module.shared_head.norm, torch.empty(0), self.rotations)
            rotate_block(block, self.rotations)
        stream = self.stream
        # The MTP layer would need the final norm and embedding once more; no scheme with calibration quantises it.
        if stream is None or isinstance(module, MTPLayer):
            return
        with observe(block, stream.ids.shape[1], self.seed) as observed:
            outputs = [block(stream.x[row], ctx, stream.indices[row]) for row, ctx in stream.contexts()]
        report["junctions"] = smooth(
            block, self.config, observed, lambda name: self._form(f"{prefix}.{name}"), self.scheme.steps
        )
        stream.x, stream.indices = [x for x, _ in outputs], [indices for _, indices in outputs]

    def keep(self, state: Path) -> None:
        """Write the residual stream, so that the next piece can follow in another process."""
        if self.stream is not None and self.stream.x:
            tensors = {f"x {row}": x for row, x in enumerate(self.stream.x)}
            tensors |= {f"keys {row}": keys for row, keys in enumerate(self.stream.indices) if keys is not None}
            save_file(tensors, str(state), {})

    def restore(self, state: Path) -> None:
        """Read what `keep` wrote, if it is still there; it is removed after the piece that needs it."""
        if self.stream is not None and state.exists():
            found = {name: read_stored(stored) for name, stored in read_header(state).items()}
            rows = range(len(self.stream.ids))
            self.stream.x = [found[f"x {row}"] for row in rows]
            self.stream.indices = [found.get(f"keys {row}") for row in rows]

    def _form(self, disk_name: str) -> Form | None:
        return self.scheme.form(disk_name, self.config)

    _rounded_form = _form

    def _round(self, modules: dict[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Every tensor as it is stored, and the relative squared error of each that was rounded."""
        tensors: dict[str, Tensor] = {}
        errors: dict[str, float] = {}
        for prefix, module in modules.items():
            for inner, tensor in module.state_dict().items():
                name = f"{prefix}.{inner}"
                for disk, view, _ in disk_rows(name, self.config, tensor, 0, tensor.shape[0]):
                    form = self._rounded_form(disk)
                    if form is None or not view.numel():
                        tensors[disk] = view if "e_score_correction_bias" in disk else view.to(self.dtype)
                        continue
                    rounded = self._rounded(disk, view, form)
                    tensors |= self.format.encode(disk, rounded)
                    size = float(view.square().sum())
                    errors[disk] = float((rounded.dequantise() - view).square().sum()) / size if size else 0.0
        return tensors, errors

    def _rounded(self, disk: str, weight: Tensor, form: Form) -> Quantised:
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f'tensor "{disk}" holds numbers that are not finite; such a model cannot be quantised.'
            )
        return round_weight(weight, form, ssz="ssz" in self.scheme.steps)


def quantise_checkpoint(
    source: Path,
    out: Path,
    scheme: Scheme,
    ids: Tensor | None = None,
    *,
    seed: int = 0,
    layout: str = "compressed-tensors",
    progress: Progress = lambda name, done, total: None,
) -> dict[str, Any]:
    """Write a quantised copy of the checkpoint `source` to the folder `out`, and return its report.

    ids [rows, length] is calibration text, for schemes whose steps need it. `layout` is a key of `formats.FORMATS`.
    Tokenizer and other small files are copied. An interrupted conversion goes on if it is called with the same
    arguments. Raises ConfigError for a scheme that does not fit the model, CheckpointError for files that cannot be
    read or for another conversion into `out`.
    """
    source, out = source.resolve(), out.resolve()
    if out == source or source in out.parents or out in source.parents:
        raise CheckpointError(f"{out} contains the checkpoint {source}, or is inside it; choose another folder.")
    conversion = Conversion(source, scheme, ids, seed, layout)
    verify_checkpoint(source)
    work = out.with_name(f".{out.name}.quantising")
    work.mkdir(parents=True, exist_ok=True)
    with exclusive(work / "lock", f"another process is writing {out}; wait for it, or choose another folder."):
        _settle(work, conversion, source, ids)
        pieces = conversion.pieces()
        reports = []
        for number, piece in enumerate(pieces):
            progress(piece.name, number, len(pieces))
            reports.append(_one(work, conversion, piece, number))
        progress("writing", len(pieces), len(pieces))
        report = _report(conversion, source, pieces, reports)
        _publish(work, out, source, conversion, len(pieces), report)
        shutil.rmtree(work)
    return report


def read_stored(stored: Stored) -> Tensor:
    with open_tensors(stored.file, stored.stamp) as handle:
        return read_tensor(handle, stored)


def stored_dtype(source: Path) -> torch.dtype:
    """The dtype for tensors that are not rounded: that of the embedding in the files, at most fp32."""
    dtype = read_folder(source)["model.embed_tokens.weight"].dtype
    return torch.float32 if dtype == torch.float64 else dtype


def _settle(work: Path, conversion: Conversion, source: Path, ids: Tensor | None) -> None:
    """Keep the pieces of an earlier call with the same arguments, remove any others."""
    text = "" if ids is None else hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    stamps = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in sorted(source.glob("*.safetensors"))]
    scheme = conversion.scheme
    settings = {"scheme": scheme.name, "steps": list(scheme.steps), "seed": conversion.seed, "text": text}
    settings |= {"layout": conversion.layout, "config": config, "files": stamps}
    wanted = json.dumps(settings, sort_keys=True)
    note = work / "settings.json"
    if not note.exists() or note.read_text(encoding="utf-8") != wanted:
        for old in work.glob("piece-*"):
            old.unlink()
        atomic_write(note, wanted)


def _one(work: Path, conversion: Conversion, piece: _Piece, number: int) -> dict[str, Any]:
    """Convert a piece, or find what an earlier call did."""
    done, file, state = (work / f"piece-{number:05}{end}" for end in (".json", ".safetensors", ".stream"))
    if done.exists():
        conversion.restore(state)
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    tensors, report = conversion.convert(piece)
    save_file(tensors, str(file), {"format": "pt"})
    conversion.keep(state)
    atomic_write(done, json.dumps(report))
    before = work / f"piece-{number - 1:05}.stream"
    if state.exists() and before.exists():
        before.unlink()
    return report


def _report(
    conversion: Conversion, source: Path, pieces: list[_Piece], reports: list[dict[str, Any]]
) -> dict[str, Any]:
    scheme = conversion.scheme
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    rotations = conversion.rotations
    return {
        "scheme": scheme.name,
        "format": conversion.layout,
        "steps": list(scheme.steps),
        "rotation": None if rotations is None else rotations.contract(conversion.seed),
        "bytes_before": size,
        "pieces": {piece.name: report for piece, report in zip(pieces, reports, strict=True)},
    }


def _publish(work: Path, out: Path, source: Path, conversion: Conversion, count: int, report: dict[str, Any]) -> None:
    config = conversion.config.to_dict() | {"dtype": str(conversion.dtype).removeprefix("torch.")}
    config |= conversion.format.settings(conversion.scheme, conversion.config)
    config |= {"glm5_quantization": {key: report[key] for key in ("scheme", "steps", "rotation")}}
    with publish_dir(out, unlike="shards.json") as folder:
        for file in source.iterdir():
            if file.is_file() and not _replaced(file):
                shutil.copyfile(file, folder / file.name)
        where: dict[str, str] = {}
        total = 0
        for number in range(count):
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            (folder / name).hardlink_to(work / f"piece-{number:05}.safetensors")
            header = read_header(folder / name)
            where |= dict.fromkeys(header, name)
            total += sum(stored.size for stored in header.values())
        report["bytes_after"] = total
        index = {"metadata": {"total_size": total}, "weight_map": where}
        for name, value in (("config.json", config), (INDEX, index), (REPORT, report)):
            (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        conversion.format.finish(folder, conversion.scheme, conversion.config, where)


def _replaced(file: Path) -> bool:
    return file.suffix == ".safetensors" or file.name in (INDEX, MANIFEST, REPORT, DESCRIPTION, "config.json")
