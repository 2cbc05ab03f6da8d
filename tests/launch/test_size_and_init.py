"""`glm5 size` and `glm5 init` for presets that are not MLA, or not for this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5.config.model import GLM5Config
from glm5.model.glm5 import GLM5ForCausalLM

SMALL = [
    "hidden_size=32", "intermediate_size=48", "num_hidden_layers=4", "first_k_dense_replace=4", "head_dim=8",
    "num_attention_heads=4", 'attention_pattern="interleave"', 'efficient_attention="gdn"',
]  # fmt: skip


def test_size_prints_a_line_per_number(shell: Any) -> None:
    lines = dict(line.split(None, 1) for line in shell.invoke("size", "glm5", "--context", 131_072).out.splitlines())
    assert lines["total_params"] == "743,911,218,432" and lines["components.attention"] == "165,022,208"
    assert lines["layers.moe"] == "75" and lines["context"] == "131,072"
    report = shell.invoke("size", "glm4.5", "--json").json()
    assert report["components"]["expert"] == 3 * 5120 * 1536 and report["context"] == 4096


def test_init_of_a_hybrid(shell: Any, tmp_path: Path) -> None:
    done = shell.invoke("init", "glm9b", "--out", tmp_path / "variant", sets=SMALL)
    assert done.code == 0, done.err
    assert GLM5Config.load(tmp_path / "variant").attention_pattern == "SFSF"
    assert GLM5ForCausalLM.from_pretrained(tmp_path / "variant").census["generated"] == 0
    wrong = shell.invoke("init", "glm9b", "--out", tmp_path / "no", sets=[*SMALL, "attention_pattern=FS"])
    assert wrong.code == 1 and "for each of 4 layers" in wrong.err and not (tmp_path / "no").exists()


def test_init_of_what_no_machine_holds(shell: Any, tmp_path: Path) -> None:
    done = shell.invoke("init", "glm5", "--out", tmp_path / "huge")
    assert done.code == 2 and "glm5 takes 3,0" in done.err and "choose a smaller preset" in done.err
    assert not (tmp_path / "huge").exists()
