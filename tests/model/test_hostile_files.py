"""Checkpoint files whose author means harm: each is one clear error, and nothing is opened or allocated on its word."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5.cli import main
from glm5.errors import CheckpointError, ConfigError
from glm5.files import MANIFEST
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.model.tensor_files import INDEX, MAX_HEADER, MAX_INDEX, SINGLE

TINY = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def pristine(build: Callable[..., GLM5ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "model"
    build(1, **TINY).save_pretrained(path)
    (path / MANIFEST).unlink()
    return path


def write(folder: Path, header: object, data: bytes = b"", file: str = SINGLE) -> None:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def header_with(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the real header and keep the real data."""
    raw = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write(folder, header, raw[8 + length :])


def shard(folder: Path) -> dict[str, str]:
    """Split the single file into two and return the index's map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    where = {}
    for number in range(2):
        part = names[number::2]
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
        where |= dict.fromkeys(part, f"model-{number}.safetensors")
    index(folder, where)
    return where


def index(folder: Path, where: object) -> None:
    (folder / INDEX).write_text(where if isinstance(where, str) else json.dumps({"weight_map": where}))


def sharded(change: Callable[[Path, dict[str, str]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        change(folder, shard(folder))

    return apply


def config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def many_experts(folder: Path) -> None:
    """As many tensors as layers and one as long as the experts are many, all of them together 4 KB."""
    config(num_hidden_layers=50, n_routed_experts=1000, indexer_types=None)(folder)
    header = {f"t{i}": entry([1], [4000 + 4 * i, 4004 + 4 * i]) for i in range(60)}
    write(folder, header | {"long": entry([1000], [0, 4000])}, b"0" * 4240)


def swap(folder: Path, make: Callable[[Path], object], file: str = SINGLE) -> None:
    (folder / file).unlink()
    make(folder / file)


def move_out(folder: Path, file: str = SINGLE) -> None:
    """The weights lie outside, and a link leads there."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (folder / file).rename(outside / file)
    (folder / file).symlink_to(outside / file)


def stale_shard(folder: Path) -> None:
    save_file({NORM: torch.zeros(40)}, folder / "model-00001-of-00009.safetensors")


def second_copy(folder: Path, where: dict[str, str]) -> None:
    """Both shards hold a tensor that the index places in one of them."""
    file = next(f"model-{n}.safetensors" for n in range(2) if where[NORM] != f"model-{n}.safetensors")
    tensors = load_file(folder / file)
    save_file({**tensors, NORM: torch.zeros(40)}, folder / file)


def lose(folder: Path, where: dict[str, str]) -> None:
    tensors = load_file(folder / where[NORM])
    del tensors[NORM]
    save_file(tensors, folder / where[NORM])


BAD_FILE = "is damaged or not a safetensors file"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    # headers
    "header of 2^62 bytes": (
        lambda p: (p / SINGLE).write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        "does not fit the file's 10 bytes",
    ),
    "header of 2^64 - 1 bytes": (lambda p: (p / SINGLE).write_bytes(b"\xff" * 8 + b"{}"), BAD_FILE),
    "header that is real and too large": (
        lambda p: (write(p, b" "), os.truncate(p / SINGLE, MAX_HEADER + 100), patch_length(p, MAX_HEADER + 1)),
        "the header is larger than 32 MiB",
    ),
    "header of no bytes": (lambda p: write(p, b""), BAD_FILE),
    "seven bytes": (lambda p: (p / SINGLE).write_bytes(b"\2\0\0\0\0\0\0"), BAD_FILE),
    "header not JSON": (lambda p: write(p, b"{'a': 1}"), "the header is not JSON"),
    "header not UTF-8": (lambda p: write(p, b'{"\xff": 1}'), "the header is not JSON"),
    "header is a list": (lambda p: write(p, []), "the header is not a JSON object"),
    "header nested deeply": (lambda p: write(p, b"[" * 200_000), "nested too deeply"),
    "number of 5000 digits": (lambda p: write(p, b'{"a": ' + b"9" * 5000 + b"}"), "the header is not JSON"),
    "duplicate keys": (
        lambda p: write(p, b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), b"\0" * 8),
        'the key "a" appears twice',
    ),
    "duplicate keys in an entry": (
        lambda p: write(p, b'{"a": {"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 8]}}', b"\0" * 8),
        'the key "shape" appears twice',
    ),
    "entry is a number": (lambda p: write(p, {"a": 5}), "unknown type None"),
    "entry without offsets": (lambda p: write(p, {"a": {"dtype": "F32", "shape": [2]}}), "no valid data_offsets"),
    "unknown type": (lambda p: write(p, {"a": entry(dtype="PICKLE")}, b"\0" * 8), "unknown type 'PICKLE'"),
    "type is a list": (lambda p: write(p, {"a": entry(dtype=["F32"])}, b"\0" * 8), "unknown type"),
    "negative dimension": (lambda p: write(p, {"a": entry([-2])}, b"\0" * 8), "has no valid shape"),
    "fractional dimension": (lambda p: write(p, {"a": entry([2.0])}, b"\0" * 8), "has no valid shape"),
    "dimension true": (lambda p: write(p, {"a": entry([True, 2])}, b"\0" * 8), "has no valid shape"),
    "ninety dimensions": (lambda p: write(p, {"a": entry([1] * 89 + [2])}, b"\0" * 8), "has no valid shape"),
    "shape that overflows 64 bits": (
        lambda p: write(p, {"a": entry([2**32, 2**31, 2])}, b"\0" * 8),
        "the shape and the data_offsets .* disagree",
    ),
    "shape smaller than its bytes": (lambda p: write(p, {"a": entry([1])}, b"\0" * 8), "disagree"),
    "shape larger than its bytes": (lambda p: write(p, {"a": entry([3])}, b"\0" * 8), "disagree"),
    "offsets backwards": (lambda p: write(p, {"a": entry([2], [8, 0])}, b"\0" * 8), "disagree"),
    "offsets out of the file": (
        lambda p: write(p, {"a": entry([2**40], [0, 2**42])}, b"\0" * 8),
        "the header describes 4398046511... bytes, the file has",
    ),
    "negative offsets": (lambda p: write(p, {"a": entry([2], [-8, 0])}, b"\0" * 8), "no valid data_offsets"),
    "three offsets": (lambda p: write(p, {"a": entry([2], [0, 4, 8])}, b"\0" * 8), "no valid data_offsets"),
    "overlap": (
        lambda p: write(p, {"a": entry([2], [0, 8]), "b": entry([2], [4, 12])}, b"\0" * 12),
        'tensor "b" overlaps the one before it',
    ),
    "two names for the same bytes": (
        lambda p: write(p, {"a": entry([2], [0, 8]), "b": entry([2], [0, 8])}, b"\0" * 8),
        "overlaps the one before it",
    ),
    "gap": (
        lambda p: write(p, {"a": entry([2], [0, 8]), "b": entry([2], [12, 20])}, b"\0" * 20),
        'tensor "b" leaves a gap after the one before it',
    ),
    "bytes that no tensor owns": (lambda p: write(p, {"a": entry()}, b"\0" * 5000), "the header describes"),
    "truncated by one byte": (lambda p: os.truncate(p / SINGLE, (p / SINGLE).stat().st_size - 1), BAD_FILE),
    "name of a terminal command": (
        lambda p: header_with(p, lambda h: h.update({"\x1b[2J\n" + "x" * 5000: h.pop(NORM)})),
        r'tensor "\\x1b\[2J\\nx+" does not belong',
    ),
    # contents
    "integers": (lambda p: header_with(p, lambda h: h[NORM].update(dtype="I32")), "is stored as torch.int32"),
    "bits of another type": (
        lambda p: header_with(p, lambda h: h[NORM].update(dtype="U8", shape=[160])),
        r"has shape \[160\]",
    ),
    "scalar": (
        lambda p: write(
            p, {HEAD: entry([], [0, 4])} | {str(i): entry([], [4 + 4 * i, 8 + 4 * i]) for i in range(8)}, b"\0" * 36
        ),
        "no tensor in the weight files is that large",
    ),
    # configuration
    "billion layers": (config(num_hidden_layers=10**9, indexer_types=None), "num_hidden_layers|1000000000 layers"),
    "billion experts": (config(n_routed_experts=10**9), "n_routed_experts"),
    "experts and layers of a few numbers": (many_experts, "49,000 experts in all layers"),
    "billion heads": (config(num_attention_heads=10**9, num_key_value_heads=10**9), "num_attention_heads"),
    "hidden size beyond 64 bits": (config(hidden_size=10**30), "hidden_size|no model has the sizes of config.json"),
    "huge vocabulary": (config(vocab_size=10**12), r"vocab_size|config.json demands \[1000000000000, 40\]"),
    "huge indexer": (config(index_n_heads=10**9), r"index_n_heads|config.json demands \[1000000000, 40\]"),
    "foreign model": (config(model_type="llama"), 'model_type "llama" is not'),
    "unknown key": (config(hiden_size=40), r'unknown key "hiden_size" \(did you mean "hidden_size"\?\)'),
    "config nested deeply": (lambda p: (p / "config.json").write_text('{"a":' * 100_000), "is not valid JSON"),
    "config with a key twice": (
        lambda p: (p / "config.json").write_text((p / "config.json").read_text()[:-3] + ', "hidden_size": 40}'),
        "hidden_size",
    ),
    # places
    "weights are a pipe": (lambda p: swap(p, os.mkfifo), "is not a regular file"),
    "weights are a folder": (lambda p: swap(p, Path.mkdir), "is not a regular file"),
    "weights are a device": (lambda p: swap(p, lambda f: f.symlink_to("/dev/zero")), "is a link that leaves"),
    "config is a pipe": (lambda p: swap(p, os.mkfifo, "config.json"), "is not a regular file"),
    "config is a device": (lambda p: swap(p, lambda f: f.symlink_to("/dev/zero"), "config.json"), "not a regular file"),
    "manifest is a pipe": (lambda p: os.mkfifo(p / MANIFEST), "is not a regular file"),
    "manifest is huge": (lambda p: ((p / MANIFEST).touch(), os.truncate(p / MANIFEST, 1 << 40)), "larger than 64 MiB"),
    "index is a pipe": (lambda p: os.mkfifo(p / INDEX), "is not a regular file"),
    "index is huge": (lambda p: ((p / INDEX).touch(), os.truncate(p / INDEX, MAX_INDEX + 1)), "larger than 64 MiB"),
    "link out of the folder": (move_out, "is a link that leaves the checkpoint"),
    "link out of the folder, shard": (
        sharded(lambda p, w: move_out(p, "model-1.safetensors")),
        "is a link that leaves the checkpoint",
    ),
    "link to itself": (sharded(lambda p, w: swap(p, lambda f: f.symlink_to(f), w[NORM])), "cannot be read"),
    "link to nothing": (sharded(lambda p, w: swap(p, lambda f: f.symlink_to(p / "no"), w[NORM])), "is missing"),
    "shard is a pipe": (sharded(lambda p, w: swap(p, os.mkfifo, w[NORM])), "is not a regular file"),
    # index against files
    "index leaves the folder": (sharded(lambda p, w: index(p, w | {NORM: "../x.safetensors"})), "only plain"),
    "absolute path": (sharded(lambda p, w: index(p, w | {NORM: "/etc/x.safetensors"})), "only plain"),
    "null byte": (sharded(lambda p, w: index(p, w | {NORM: "x\0.safetensors"})), "only plain"),
    "newline": (sharded(lambda p, w: index(p, w | {NORM: "x\n.safetensors"})), "only plain"),
    "hidden file": (sharded(lambda p, w: index(p, w | {NORM: ".x.safetensors"})), "only plain"),
    "file is a list": (sharded(lambda p, w: index(p, w | {NORM: ["x"]})), "only plain"),
    "missing shard": (sharded(lambda p, w: (p / w[NORM]).unlink()), "is missing; the checkpoint is incomplete"),
    "shard lacks a tensor": (sharded(lose), f'places tensor "{NORM}" in .*, which does not hold it'),
    "tensor in the wrong shard": (
        sharded(
            lambda p, w: index(p, w | {NORM: w[HEAD]} if w[HEAD] != w[NORM] else w | {NORM: "model-1.safetensors"})
        ),
        "which does not hold it",
    ),
    "tensor that the index lacks": (
        sharded(lambda p, w: index(p, {k: v for k, v in w.items() if k != NORM})),
        f'holds tensor "{NORM}", which the index does not name',
    ),
    "tensor in two shards": (sharded(second_copy), f'Tensor "{NORM}" is stored twice'),
    "shard of an earlier save": (stale_shard, f'Tensor "{NORM}" is stored twice'),
    "single file beside shards": (
        lambda p: (shutil.copy(p / SINGLE, p / "x"), shard(p), (p / "x").rename(p / SINGLE)),
        "is stored twice",
    ),
    "index names a tensor twice": (
        sharded(lambda p, w: index(p, '{"weight_map": {"a": "model-0.safetensors", "a": "x"}}')),
        "appears twice",
    ),
    "index nested deeply": (sharded(lambda p, w: index(p, '{"weight_map":' * 100_000)), "nested too deeply"),
    "index without map": (sharded(lambda p, w: index(p, "{}")), "has no weight_map"),
}


def patch_length(folder: Path, length: int) -> None:
    with (folder / SINGLE).open("r+b") as file:
        file.write(struct.pack("<Q", length))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


# Configurations without a tensor of their last layer also lack the MTP layer, which is a warning of its own.
@pytest.mark.filterwarnings("ignore:.*announces an MTP layer:UserWarning")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", DAMAGE)
def test_one_clear_error(folder: Path, name: str, device: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        GLM5ForCausalLM.from_pretrained(folder, device=device)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text and text.isprintable() and len(text) < 500 and text.endswith(".")


def test_undamaged(folder: Path) -> None:
    """The copy and the sharded copy load, so that what fails above fails for its damage."""
    GLM5ForCausalLM.from_pretrained(folder)
    header_with(folder, lambda header: None)
    GLM5ForCausalLM.from_pretrained(folder)
    shard(folder)
    GLM5ForCausalLM.from_pretrained(folder)


def test_a_link_inside_the_folder_and_the_cache_of_the_hub_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).rename(folder / "weights.data")
    (folder / SINGLE).symlink_to("weights.data")
    GLM5ForCausalLM.from_pretrained(folder)
    snapshot = tmp_path / "models--x--y" / "snapshots" / "abc"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, real in (("config.json", "config.json"), (SINGLE, "weights.data")):
        shutil.copy(folder / real, blobs / real)
        (snapshot / name).symlink_to(f"../../blobs/{real}")
    GLM5ForCausalLM.from_pretrained(snapshot)


LIMITED = """
import resource, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from glm5.errors import CheckpointError, ConfigError
from glm5.model.glm5 import GLM5ForCausalLM
GLM5ForCausalLM.from_pretrained(sys.argv[1])  # what a first load imports
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (192 << 20),) * 2)
for folder in sys.argv[2:]:
    try:
        GLM5ForCausalLM.from_pretrained(folder)
    except (CheckpointError, ConfigError) as error:
        assert "no room" not in str(error), error
        print("refused")
"""


def test_nothing_is_allocated_on_the_word_of_a_file(pristine: Path, tmp_path: Path, forks: Any) -> None:
    """All of it again in a process that may grow by 192 MiB at most, which fails where a claim is believed."""
    folders = []
    for number, (damage, _) in enumerate(DAMAGE.values()):
        folders.append(Path(shutil.copytree(pristine, tmp_path / str(number) / "copy")))
        damage(folders[-1])
    assert forks.run(LIMITED, pristine, *folders).split() == ["refused"] * len(folders)


def test_a_file_that_changes_while_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5.model import hf_weights

    def meanwhile(*args: Any) -> None:
        real(*args)
        change()

    real = hf_weights.allocate
    monkeypatch.setattr(hf_weights, "allocate", meanwhile)
    tensors = load_file(folder / SINGLE)

    def change() -> None:
        save_file(tensors, folder / "aside")
        (folder / "aside").replace(folder / SINGLE)

    with pytest.raises(CheckpointError, match="changed while it was loaded"):
        GLM5ForCausalLM.from_pretrained(folder)


def test_no_room_for_the_model_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5.model import hf_weights

    def full(*args: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(hf_weights, "allocate", full)
    with pytest.raises(CheckpointError, match=r"no room for the model's .* on device cpu"):
        GLM5ForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["allow_missing", "allow_unexpected"])
def test_a_pattern_that_is_none(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is no regular expression"):
        GLM5ForCausalLM.from_pretrained(folder, **{name: "("})


SPOKEN = ["header of 2^62 bytes", "weights are a pipe", "billion layers", "foreign model", "tensor in two shards"]


@pytest.mark.filterwarnings("ignore:.*announces an MTP layer:UserWarning")
@pytest.mark.parametrize("name", SPOKEN)
def test_the_command_line_says_it_in_one_line(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGE[name][0](folder)
    monkeypatch.setattr(sys, "argv", ["glm5", "generate", str(folder), "1,2", "--ids"])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and not out
    assert err.startswith("Error: ") and len(err.splitlines()) == 1


def test_the_command_line_as_a_process(folder: Path, forks: Any) -> None:
    DAMAGE["truncated by one byte"][0](folder)
    done = forks.start("from glm5.cli import main\nmain()", "generate", folder, "1,2", "--ids")
    assert done.wait(120) == 1 and not done.out
    assert len(done.err.splitlines()) == 1 and "Traceback" not in done.err
