"""Several ranks compute what one does: losses, gradients, states on disk that fit any layout, and a common end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.model.glm5 import GLM5ForCausalLM

pytestmark = [pytest.mark.dist, pytest.mark.long]

STEPS = 5


@pytest.fixture(scope="module")
def results(job: Any, start: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All tasks of this file by name, in three jobs: loading torch takes longer than the work."""
    folder = tmp_path_factory.mktemp("ranks")

    def task(kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "start": start, **more}

    def resumed(name: str, **more: Any) -> dict[str, Any]:
        return task("run", copy=str(folder / "four"), out=str(folder / name), **more)

    lines = [{"messages": [{"role": role, "content": "x" * n} for role in ("user", "assistant")]} for n in range(1, 20)]
    data = folder / "talks.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    one = {
        "sft": task("sft_rows", data=str(data)),
        "follow": task("follow", export=str(folder / "one")),
        "warmup": task("follow", warmup=True, steps=2),
        "bf16": task("gradients", options={"dtype": "bfloat16"}),
        "gradients": task("gradients"),
        "kl gradients": task("gradients", warmup=True),
    }
    four = {
        "cut": task("run", ep=2, stop=3, out=str(folder / "four")),
        "same": resumed("same", ep=2),
        "follow 4": task("follow", ep=2, export=str(folder / "four-model")),
        "gradients 4": task("gradients", ep=2, options={"recompute": True, "micro_rows": 1}),
        "gradients 4 dense": task("gradients", ep=1),
        "kl gradients 4": task("gradients", ep=2, warmup=True, options={"recompute": True}),
    }
    found = dict(zip(one, job(1, *one.values()), strict=True))
    found |= zip(four, job(4, *four.values()), strict=True)
    two = {
        "sft 2": task("sft_rows", data=str(data)),
        "two": resumed("two", ep=1),
        "follow 2": task("follow", options={"micro_rows": 1}),
        "follow 2 ep": task("follow", ep=2),
        "warmup 2": task("follow", warmup=True, steps=2, ep=2, options={"recompute": True}),
        "bf16 2": task("gradients", ep=2, options={"dtype": "bfloat16", "recompute": True}),
        "gradients 2": task("gradients", options={"micro_rows": 1}),
        "gradients 2 each": task("gradients", options={"micro_rows": 1}, layout={"reduce_once": False}),
        "refuse": task("refuse", ep=2),
    }
    found |= zip(two, job(2, *two.values()), strict=True)
    found["single"] = job(1, resumed("single"))[0]
    return found | {"folder": folder}


def losses(result: Any) -> list[float]:
    return [numbers["loss"] for numbers in result["numbers"]]


def flips(one: Any, other: Any, world: int) -> int:
    """Tokens, over all layers and steps, that chose other experts on several ranks than on one."""
    count = 0
    passes = len(other["routes"][0]) // STEPS  # micro-batches of a step
    for step in range(STEPS):
        reference = [torch.tensor(layer) for layer in one["routes"][0][step]]
        for layer, expected in enumerate(reference):
            rows = [
                torch.tensor(other["routes"][rank][step * passes + part][layer])
                for rank in range(world)
                for part in range(passes)
            ]
            count += int((torch.cat(rows)[: expected.shape[0]] != expected).any(-1).sum())
    return count


@pytest.mark.parametrize(("name", "world"), [("follow 4", 4), ("follow 2", 2), ("follow 2 ep", 2)])
def test_ranks_follow_one_process(results: dict[str, Any], name: str, world: int) -> None:
    one, other = results["follow"], results[name]
    flipped = flips(one, other, world)
    assert losses(other) == pytest.approx(losses(one), abs=1e-4), f"{flipped} tokens chose other experts"
    assert losses(one)[0] - losses(one)[-1] > 0.2  # something was learnt
    assert flipped == 0
    for key in ("grad_norm", "load_max", "mtp1_loss", "mtp2_loss", "indexer_kl", "tokens"):
        values = [[numbers[key] for numbers in result["numbers"]] for result in (one, other)]
        assert values[1] == pytest.approx(values[0], rel=1e-3), key
    assert other["scores"]["held_out"] == pytest.approx(one["scores"]["held_out"], abs=1e-4)


def test_indexer_warm_up_follows_one_process(results: dict[str, Any]) -> None:
    values = [[n["indexer_kl"] for n in results[name]["numbers"]] for name in ("warmup", "warmup 2")]
    assert values[1] == pytest.approx(values[0], abs=1e-6)
    assert values[0][-1] < values[0][0]


def test_bf16_computes_like_the_twin(results: dict[str, Any]) -> None:
    """Both compute in bf16 and add up in fp32, on batches of other shapes: what differs is the last rounding of each
    micro-batch's gradient, at most half an epsilon (2^-8). Some tokens choose other experts and keys than in fp32."""
    twin, ranks, exact = (flat(results[name]) for name in ("bf16", "bf16 2", "gradients"))
    assert results["bf16 2"]["loss"] == pytest.approx(results["bf16"]["loss"], abs=1e-5)
    assert float((ranks - twin).norm() / twin.norm()) < 2**-8
    assert 1e-3 < float((twin - exact).norm() / exact.norm()) < 0.2


def flat(result: Any) -> torch.Tensor:
    return torch.cat([torch.tensor(values).flatten() for values in result["gradients"].values()])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("gradients 4", "gradients"),
        ("gradients 4 dense", "gradients"),
        ("gradients 2", "gradients"),
        ("gradients 2 each", "gradients"),
        ("kl gradients 4", "kl gradients"),
    ],
)
def test_gradients_are_those_of_the_whole_batch(results: dict[str, Any], name: str, reference: str) -> None:
    expected, found = results[reference], results[name]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["loads"] == expected["loads"]
    assert found["gradients"].keys() == expected["gradients"].keys() and len(expected["gradients"]) > 5
    for parameter, values in expected["gradients"].items():
        wanted, got = torch.tensor(values), torch.tensor(found["gradients"][parameter])
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * max(1.0, float(wanted.abs().max())), msg=parameter)


def test_gradients_are_summed_once_per_step(results: dict[str, Any]) -> None:
    """Five rows on two ranks are three micro-batches of one row. The MTP layer runs at two depths: after the backward
    of the first, the gradients of earlier micro-batches are summed apart."""
    once, each = (results[name]["reductions"] for name in ("gradients 2", "gradients 2 each"))
    assert each == 3 * (once - 1) > 0


def test_a_state_of_four_ranks_resumes_on_four_two_and_one(results: dict[str, Any]) -> None:
    whole = losses(results["follow 4"])
    assert len(whole) == STEPS and results["cut"]["losses"] == whole[:3]
    assert results["same"]["losses"] == whole[2:]  # the last state before step 3 is that of step 2
    assert results["same"]["export"] == results["follow 4"]["export"]
    for name in ("two", "single"):
        assert results[name]["losses"] == pytest.approx(whole[2:], abs=1e-5), name
        for tensor, numbers in results["follow 4"]["export"].items():
            assert results[name]["export"][tensor] == pytest.approx(numbers, rel=1e-4, abs=1e-3), tensor
    folders = {name: sorted(p.name for p in (results["folder"] / name / "state").iterdir()) for name in ("two", "same")}
    assert folders["two"] == folders["same"] == ["step-00000002", "step-00000004"]
    files = sorted(p.name for p in (results["folder"] / "two" / "state" / "step-00000004").glob("rank-*"))
    assert files == ["rank-00000.safetensors", "rank-00001.safetensors"]


def test_the_export_is_that_of_one_process(results: dict[str, Any]) -> None:
    one, four = (GLM5ForCausalLM.from_pretrained(results["folder"] / name) for name in ("one", "four-model"))
    theirs = four.state_dict()
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-5, msg=name)
    declared = [(n, p.muon_split) for n, p in one.named_parameters() if hasattr(p, "muon_split")]
    assert declared and all(four.get_parameter(n).muon_split == split for n, split in declared)


def test_a_rank_that_cannot_save_stops_all_and_changes_nothing(results: dict[str, Any]) -> None:
    refused = results["refuse"]
    assert all("No space left" in text for text in refused["said"]), refused["said"]
    assert refused["said"][0].startswith("Glm5Error: Rank 1 failed")
    assert refused["left"] == ["step-00000001"] and refused["resumed"] == 1
    assert all("No space left while writing" in text for text in refused["export"]), refused["export"]
    assert refused["exported"] == ["state"]


@pytest.mark.slow
@pytest.mark.parametrize("seen", [".step-00000002.writing", "step-00000002", ".step-00000004.writing"])
def test_a_job_killed_while_it_saves_ends_as_if_untouched(
    results: dict[str, Any], job: Any, start: str, tmp_path: Path, seen: str
) -> None:
    """Both ranks are killed as soon as a folder of a state is seen; the job that goes on has the same weights."""
    task = {"kind": "run", "start": start, "ep": 2, "out": str(tmp_path / "out")}
    ranks = job.start(2, [dict(task)])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "out" / "state" / seen).exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
    finally:
        for rank in ranks:
            rank.kill()
    assert not (tmp_path / "out-export").exists()
    assert job(2, dict(task))[0]["export"] == results["follow 2 ep"]["export"]


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_one_rank_ends_all(job: Any, start: str, how: str) -> None:
    timeout = 2 if how == "hang" else 60
    ranks = job.start(2, [{"kind": "fail", "how": how, "start": start, "ep": 2, "timeout": timeout}])
    try:
        assert ranks[0].wait(240) != 0
        if how == "raise":
            assert ranks[1].wait(240) != 0 and "this rank breaks" in ranks[1].err
    finally:
        for rank in ranks:
            rank.kill()


def test_sft_is_tokenised_by_one_rank_and_divided_among_all(results: dict[str, Any]) -> None:
    one, two = results["sft"], results["sft 2"]
    assert two["sha256"] == one["sha256"] and two["counts"] == one["counts"] * 2
    for step in range(3):
        parts = [torch.cat([torch.tensor(rows[step][k]) for rows in two["rows"]]) for k in range(3)]
        whole = [torch.tensor(part) for part in one["rows"][0][step]]
        assert all(torch.equal(part[:5], expected) for part, expected in zip(parts, whole, strict=True))
        assert len(parts[1]) == 6 and (parts[1][5] == -1).all()  # the row that no batch has


def test_expert_sets_that_differ_are_counted(results: dict[str, Any]) -> None:
    one = results["follow"]
    changed = [[[list(map(list, layer)) for layer in step] for step in one["routes"][0]]]
    changed[0][3][0][2][5] = [0, 0]
    assert flips(one, {"routes": changed}, 1) == 1
