"""What goes wrong in runs: each case ends with one clear sentence, and loses nothing that was finished."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glm5.chat import Tokenizer
from glm5.data.sources import Document
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.obs.metrics import MetricsWriter

STAGE = '[[stages]]\nname = "{name}"\nkind = "pretrain"\nrows = 2\nrow_length = 64\noptim = {{steps = {steps}, '
STAGE += "save_every = {every}, lr = 1e-3}}\n"


def write_recipe(path: Path, start: Path, data: Path, steps: int = 2, every: int = 1, **head: str) -> Path:
    """A recipe of two short training stages, whose runs go beside it."""
    lines = {"name": "short", "runs": str(path.parent), "start": str(start), "data": str(data), **head}
    text = "".join(f'{key} = "{value}"\n' for key, value in lines.items() if value)
    path.write_text(text + "".join(STAGE.format(name=n, steps=steps, every=every) for n in ("one", "two")), "utf-8")
    return path


@pytest.fixture(scope="module")
def start(tiny: Any, small: Callable[..., GLM5ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the tokenizer of the shared run, and smaller."""
    folder = tmp_path_factory.mktemp("start") / "model"
    tokenizer = Tokenizer.load(tiny.final)
    small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def recipe(tiny: Any, start: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe of two short training stages on the shared run's data."""

    def write(**options: Any) -> Path:
        return write_recipe(tmp_path / "short.toml", **{"start": start, "data": tiny.data} | options)

    return write


@pytest.fixture(scope="module")
def finished(shell: Any, tiny: Any, start: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, run) of a run that has both stages. Tests leave it as it was."""
    path = write_recipe(tmp_path_factory.mktemp("finished") / "short.toml", start, tiny.data)
    assert shell.invoke("train", path).code == 0
    return path, path.parent / "short"


@pytest.fixture(scope="module")
def four_steps(shell: Any, tiny: Any, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of stages that took four steps each and were left alone."""
    path = write_recipe(tmp_path_factory.mktemp("whole") / "short.toml", start, tiny.data, steps=4)
    assert shell.invoke("train", path).code == 0
    return json.loads((path.parent / "short" / "results.json").read_text(encoding="utf-8"))["stages"]


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_nonsense(path: Path) -> None:
    path.write_text('{"kind": ', encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("00-one/model/model.safetensors", flip_a_byte),
        ("01-two/model/model.safetensors", cut_in_half),
        ("01-two/model/config.json", Path.unlink),
        ("00-one/stage.json", write_nonsense),
        ("00-one/model/manifest.json", write_nonsense),
    ],
)
def test_damage_to_a_finished_stage_is_found(
    shell: Any, finished: tuple[Path, Path], file: str, damage: Callable[[Path], None]
) -> None:
    path, run = finished
    before = (run / file).read_bytes()
    damage(run / file)
    try:
        shell.fails(1, [str(run / file), "damaged"], "train", path, "--resume")
    finally:
        (run / file).write_bytes(before)


def test_a_finished_run_keeps_what_was_added_to_it(shell: Any, finished: tuple[Path, Path]) -> None:
    path, run = finished
    (run / "final" / "README.md").write_text("mine")
    assert shell.invoke("train", path, "--resume").code == 0
    assert (run / "final" / "README.md").read_text() == "mine"
    (run / "final" / "README.md").unlink()


def test_one_kind_of_folder_does_not_replace_another(shell: Any, finished: tuple[Path, Path], tiny: Any) -> None:
    model, weights = finished[1] / "final", (finished[1] / "final" / "model.safetensors").read_bytes()
    words = [str(model), "holds"]
    shell.fails(
        1, [*words, "model.safetensors"], "data", "build", "--tokenizer", tiny.final, "--out", model, tiny.corpus
    )
    shell.fails(2, words, "tokenizer", "train", "--out", model, "--vocab-size", 400, tiny.corpus)
    assert (model / "model.safetensors").read_bytes() == weights
    shards = [str(tiny.data), "holds shards.json"]
    shell.fails(1, shards, "init", "nano", "--out", tiny.data)


def test_stages_that_were_deleted_run_again(shell: Any, finished: tuple[Path, Path]) -> None:
    path, run = finished
    expected = json.loads((run / "results.json").read_text(encoding="utf-8"))
    for stage in ("00-one", "01-two"):
        shutil.rmtree(run / stage)
    assert shell.invoke("train", path, "--resume").code == 0
    again = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert again["stages"] == expected["stages"]


@pytest.mark.long
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "state.json", "manifest.json"])
def test_damage_to_a_state_is_found(
    shell: Any,
    recipe: Callable[..., Path],
    tmp_path: Path,
    interrupt_at: Callable[..., Any],
    four_steps: Any,
    file: str,
) -> None:
    """The state before takes its place; where there is none, the stage does not begin again by itself."""
    path, states = recipe(steps=4), tmp_path / "short" / "00-one" / "state"
    with interrupt_at(MetricsWriter, "write", lambda writer, stage, step, *_: step == 4):
        assert shell.invoke("train", path).code == 1
    newest, before = states / "step-00000003", states / "step-00000002"
    cut_in_half(newest / file)
    shutil.copytree(tmp_path / "short", tmp_path / "kept")
    resumed = shell.invoke("train", path, "--resume")
    assert resumed.code == 0 and (newest / file).exists()
    results = json.loads((tmp_path / "short" / "results.json").read_text(encoding="utf-8"))
    assert results["stages"] == four_steps

    shutil.rmtree(tmp_path / "short")
    (tmp_path / "kept").rename(tmp_path / "short")
    cut_in_half(before / file)
    shell.fails(1, [str(newest / file), "damaged", f"Delete {states}"], "train", path, "--resume")
    shutil.rmtree(states)
    assert shell.invoke("train", path, "--resume").code == 0


def test_the_recipe_of_a_run_cannot_change(shell: Any, finished: tuple[Path, Path]) -> None:
    path, run = finished
    shell.fails(1, [str(run), "another recipe", "name"], "train", path, "--resume", sets=["stages.two.rows=3"])
    assert shell.invoke("train", path, "--resume").code == 0


def test_damage_to_the_data_of_a_run_is_found(shell: Any, tiny: Any, tmp_path: Path) -> None:
    stage = tmp_path / "runs" / "tiny" / "00-tokenizer"
    shutil.copytree(tiny.run / stage.name, stage)
    tokens = stage / "data" / "train.tokens"
    flip_a_byte(tokens)
    words = [str(tokens), "damaged", f"Delete {stage} to build the data again"]
    shell.fails(1, words, "pipeline", tiny.again(tmp_path), sets=tiny.sets)


def test_a_run_that_never_began_takes_another_recipe(shell: Any, recipe: Callable[..., Path], tmp_path: Path) -> None:
    sources = '[[stages]]\nname = "t"\nkind = "tokenizer"\nvocab_size = 300\nsources = ["{}"]\n'
    path = tmp_path / "corrected.toml"
    head = f'name = "corrected"\nruns = "{tmp_path}"\n'
    path.write_text(head + sources.format("/nowhere/texts"), encoding="utf-8")
    shell.fails(1, ["/nowhere/texts", "stdlib"], "train", path)
    text = tmp_path / "text.txt"
    text.write_text("some words " * 50, encoding="utf-8")
    path.write_text(head + sources.format(text), encoding="utf-8")
    assert shell.invoke("train", path, "--resume").code == 0


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"start": "/nowhere/model"}, ["/nowhere/model", "checkpoint"]),
        ({"start": "", "preset": "nanoo"}, ["short", "tokenizer"]),
        ({"data": "/nowhere/shards"}, ["/nowhere/shards", "glm5 data build"]),
        ({"data": ""}, ["short", "no token shards", "data"]),
        ({"tokenizer": "/nowhere/tokenizer"}, ["/nowhere/tokenizer"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_missing_parts(shell: Any, recipe: Callable[..., Path], head: dict[str, str], words: list[str]) -> None:
    shell.fails(1, words, "train", recipe(**head))


def test_unknown_preset_in_a_recipe(shell: Any, recipe: Callable[..., Path], tiny: Any) -> None:
    path = recipe(start="", preset="nanoo", tokenizer=str(tiny.final))
    shell.fails(1, ["nanoo", '"nano"'], "train", path)


def test_shards_of_another_tokenizer(shell: Any, recipe: Callable[..., Path], tmp_path: Path, tiny: Any) -> None:
    assert shell.invoke("init", "nano", "--out", tmp_path / "bytes").code == 0
    shell.fails(1, [str(tiny.data), "another tokenizer"], "train", recipe(start=str(tmp_path / "bytes")))


def test_wrong_skills_are_found_before_anything_runs(shell: Any, tiny: Any, tmp_path: Path) -> None:
    recipe = tiny.again(tmp_path)
    for wrong, words in (
        ('stages.agentic-rl.families=[{name = "arithmetik"}]', ["arithmetik", "arithmetic"]),
        ("evaluation.families=[{name = 'general', options = {form = 1}}]", ["general", "form"]),
    ):
        shell.fails(1, words, "pipeline", recipe, sets=[wrong])
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("held_out", ["", "x = 1\n", "def f(a, b):\n    return a + b\n" * 3])
def test_a_corpus_with_little_or_no_held_out_text(shell: Any, tiny: Any, tmp_path: Path, held_out: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    trained = next(file for file in sorted(tiny.corpus.iterdir()) if not Document(file.name, "").held_out)
    shutil.copy(trained, corpus)
    name = next(file.name for file in tiny.corpus.glob("keyword*"))
    if held_out:
        (corpus / name).write_text(held_out, encoding="utf-8")
    path = tmp_path / "small.toml"
    path.write_text(
        f'name = "small"\nruns = "{tmp_path}"\n[model]\nhidden_size = 32\nnum_hidden_layers = 2\n'
        "[evaluation]\nmtp_prompts = 9\nmtp_tokens = 2\n"
        f'[[stages]]\nname = "t"\nkind = "tokenizer"\nvocab_size = 300\nsources = ["{corpus}"]\n'
        + STAGE.format(name="one", steps=1, every=0),
        encoding="utf-8",
    )
    done = shell.invoke("pipeline", path)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "small" / "results.json").read_text(encoding="utf-8"))["stages"][1]["evaluation"]
    assert ("text" in found) == bool(held_out) and ("mtp" in found) == (len(held_out) > 48)


def test_a_context_without_room_for_answers(shell: Any, tiny: Any, tmp_path: Path) -> None:
    stage = '[[stages]]\nname = "narrow"\nkind = "reasoning"\nprompts = 1\ngroup = 2\nmax_context = 4\n'
    stage += 'families = [{name = "arithmetic"}]\noptim = {steps = 1, lr = 1e-3}\n'
    shell.fails(1, ["narrow", "max_context = 4"], "rl", tiny.one_more(tmp_path, "sft", stage))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "{final}", "--suite", "aritmetic"], ["aritmetic", '"arithmetic"']),
        (["eval", "{final}", "--suite", "arithmetic", "--set", "levels=[7]"], ["levels", "7"]),
        (["eval", "/nowhere", "--suite", "arithmetic"], ["/nowhere"]),
        (["generate", "/nowhere", "x"], ["/nowhere"]),
        (["generate", "{final}", "x", "--tokenizer", "/nowhere"], ["/nowhere"]),
        (["generate", "{final}", "999999", "--ids"], ["0 to 399"]),
        (["generate", "{final}", ""], ["empty"]),
        (["generate", "{final}", "x", "--max-tokens", "0"], ["max_tokens"]),
        (["adapt", "{final}", "--data", "/nowhere", "--out", "{tmp}/out"], ["/nowhere"]),
        (["adapt", "/nowhere", "--data", "{data}", "--out", "{tmp}/out"], ["/nowhere"]),
        (["init", "nanoo", "--out", "{tmp}/out"], ["nanoo", '"nano"']),
        (["init", "nano", "--out", "{tmp}/out", "--set", "hiden_size=64"], ["hiden_size", '"hidden_size"']),
        (["init", "nano", "--out", "{tmp}/out", "--set", "num_hidden_layers=-1"], ["num_hidden_layers"]),
        (["init", "nano", "--out", "{tmp}/out", "--set", "hidden_size=big"], ["hidden_size", "big"]),
        (["init", "nano", "--out", "{corpus}"], ["{corpus}", "glm5"]),
        (["data", "build", "--tokenizer", "{final}", "--out", "{corpus}", "{corpus}"], ["{corpus}", "glm5"]),
        (["data", "build", "--tokenizer", "{final}", "--out", "{tmp}/out", "/nowhere"], ["/nowhere"]),
        (["data", "build", "--tokenizer", "/nowhere", "--out", "{tmp}/out", "{corpus}"], ["/nowhere"]),
        (["tokenizer", "train", "--out", "{tmp}/out", "--vocab-size", "9", "{corpus}"], ["9"]),
        (["serve", "/nowhere", "--port", "0"], ["/nowhere"]),
        (["report", "{corpus}"], ["{corpus}", "results.json"]),
    ],
    ids=lambda value: " ".join(value[:2] + value[-2:]) if "{" in str(value) or "nowhere" in str(value) else "",
)
def test_wrong_arguments(shell: Any, tiny: Any, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    places = {"final": tiny.final, "data": tiny.data, "corpus": tiny.corpus, "tmp": tmp_path}
    before = sorted(tiny.corpus.iterdir())
    shell.fails(1, [w.format(**places) for w in words], *(a.format(**places) for a in arguments))
    assert not (tmp_path / "out").exists() and sorted(tiny.corpus.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "{final}", "a,b", "--ids"], ["--ids", "a,b"]),
        (["eval", "{final}", "--suite", "arithmetic", "--set", "levels"], ["--set", "levels"]),
        (["serve", "{final}", "--port", "{port}"], ["{port}", "in use", "--port"]),
        (["serve", "{final}", "--host", "0.0.0.0"], ["0.0.0.0", "API key"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_usage_errors_that_need_the_model(shell: Any, tiny: Any, arguments: list[str], words: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {"final": tiny.final, "port": taken.getsockname()[1]}
        shell.fails(2, [w.format(**places) for w in words], *(a.format(**places) for a in arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts an empty file system of so many kilobytes."""
    place = tmp_path / "disk"

    def mount(kilobytes: int) -> Path:
        place.mkdir()
        order = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(place)]
        if os.geteuid() or not shutil.which("mount") or subprocess.run(order, capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


def last_checkpoint_loads(run: Path) -> None:
    models = sorted(run.glob("*/model"))
    assert models and not list(run.glob("*/.*"))
    assert sum(p.numel() for p in GLM5ForCausalLM.from_pretrained(models[-1]).parameters()) > 0


def test_a_full_disk_keeps_the_last_checkpoint(
    shell: Any, recipe: Callable[..., Path], start: Path, small_disk: Callable[[int], Path]
) -> None:
    """There is room for the first stage's checkpoint, but not for the second's beside it."""
    size = sum(file.stat().st_size for file in start.iterdir())
    disk = small_disk(int(1.7 * size) >> 10)
    path = recipe(runs=str(disk), every=0)
    shell.fails(1, [str(disk), "No space left", "intact", "again"], "train", path)
    last_checkpoint_loads(disk / "short")
    assert (disk / "short" / "00-one" / "stage.json").exists() and not (disk / "short" / "01-two" / "model").exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    assert shell.invoke("train", path, "--resume").code == 0


def test_a_disk_too_full_for_metrics(
    shell: Any, recipe: Callable[..., Path], small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_disk(64)
    (disk / "filler").write_bytes(bytes(52 << 10))
    shell.fails(1, ["No space left", "intact", "again"], "train", recipe(runs=str(disk), steps=200, every=0))


def test_a_limit_on_file_sizes_is_a_full_disk(
    shell: Any, recipe: Callable[..., Path], start: Path, tmp_path: Path
) -> None:
    """The states are larger than the checkpoints, so a limit between the two stops the second stage's first state."""
    path = recipe(every=0)
    text = path.read_text(encoding="utf-8")
    path.write_text("save_every = 1".join(text.rsplit("save_every = 0", 1)), encoding="utf-8")
    most = int(1.3 * (start / "model.safetensors").stat().st_size)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        stopped = shell.invoke("train", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    stopped.check_failure(1, [str(tmp_path / "short" / "01-two" / "state"), "No space left", "intact"])
    last_checkpoint_loads(tmp_path / "short")
    assert shell.invoke("train", path, "--resume").code == 0
