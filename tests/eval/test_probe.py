"""What a stage looks at while it runs: its samples outlast a full disk and a file that was cut off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import CheckpointError
from glm5.eval.probe import Probe


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_full_disk_costs_no_samples(
    small: Any, shard: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, probe = small(), Probe(shard, tokenizer, 32, 60, tmp_path)
    for step in (1, 2, 3):
        assert probe(model, step).keys() == {"held_out_bits_per_byte", "reference_bits_per_byte"}
    assert steps(tmp_path) == [1, 2, 3]

    def full(path: Path, text: str, **_: Any) -> int:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(CheckpointError, match="No space left"):
            probe(model, 4)
    assert steps(tmp_path) == [1, 2, 3]
    probe(model, 2)  # a stage that goes on from step 1
    assert steps(tmp_path) == [1, 2]


def test_a_line_that_was_cut_off_is_left_out(
    small: Any, shard: Any, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, probe = small(), Probe(shard, tokenizer, 32, 60, tmp_path)
    probe(model, 1)
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write('{"step": 2, "prompt": "ü'.encode()[:-1])
    probe(model, 3)
    assert steps(tmp_path) == [1, 3] and "samples.jsonl:2 is not a sample" in caplog.text
