"""An engine over two processes is the engine in one process: tokens, log-probabilities up to rounding, failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import GLM5Config
from glm5.engine import tensor_parallel_group
from glm5.engine.engine import Engine
from glm5.engine.page_hash import fingerprint
from glm5.engine.tensor_parallel import TpEngine
from glm5.engine.tensor_parallel_group import Collectives, Group, load_part
from glm5.engine.weight_group import Assembly, pack
from glm5.engine.weights import apply, stage
from glm5.errors import CheckpointError, ConfigError, EngineError, EngineLost, RequestFailed
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.parallel.tensor import check_divisible, cut_of, division_of
from glm5.records import Completion, GrammarSpec, SamplingParams
from tests.engine.test_variants import make
from tests.model.test_fp8 import WIDE, quantise_folder

pytestmark = pytest.mark.long

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5, top_p=0.9, frequency_penalty=0.5, top_logprobs=2, n=2)
PREFIX = [3, 1, 4, 1, 5, 9, 2, 6] * 5
PROMPTS = [PREFIX + [7], [2, 7, 1, 8] * 20, PREFIX + [8, 8], [5]]
ROUNDING = 2e-5
KINDS: dict[str, dict[str, Any]] = {"sparse": {}, "dense": {"use_dsa": False}}

Small = Callable[..., GLM5ForCausalLM]


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """Two ranks, on which every test loads its own model."""
    group = Group(2)
    yield group
    group.close()
    assert [follower.process.returncode is not None for follower in group.followers] == [True]


@pytest.fixture
def both(group: Group, tmp_path: Path) -> Callable[..., tuple[TpEngine, Engine]]:
    """The same model in an engine over two processes, and in one process."""

    def start(model: GLM5ForCausalLM, tokenizer: Tokenizer | None = None, **options: Any) -> tuple[TpEngine, Engine]:
        model.save_pretrained(tmp_path / "model")
        part = group.load(tmp_path / "model", str(model.dtype).removeprefix("torch."))
        return TpEngine(group, part, tokenizer, **options), Engine(model, tokenizer, **options)

    return start


def check_same(found: list[Completion], expected: list[Completion], tolerance: float = ROUNDING) -> None:
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.finish_reason == b.finish_reason and len(a.logprobs) == len(b.logprobs)
        assert a.logprobs == pytest.approx(b.logprobs, abs=tolerance)
        assert [list(row) for row in a.top_logprobs] == [list(row) for row in b.top_logprobs]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "exact"),
    [
        ("sparse", True),
        ("sparse", False),
        ("gqa", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dense", True), ("dense", False), ("gqa", True))),
        *(pytest.param("swa", exact, marks=pytest.mark.slow) for exact in (True, False)),
    ],
)
def test_tokens_are_those_of_one_process(both: Any, small: Small, kind: str, exact: bool) -> None:
    """With drafts, shared prefixes, preemption for want of pages, penalties, and scores between them."""
    model = small(**KINDS[kind]) if kind in KINDS else make(kind)
    two, one = both(model, exact=exact, speculative=2, cache_tokens=448, max_length=128)
    one.steps.draft_count.adapts = False  # the number of its drafts would follow the clock
    for params in (GREEDY, SAMPLED):
        check_same(two.generate(PROMPTS, params), one.generate(PROMPTS, params))
    for mine, other in zip(two.score(PROMPTS), one.score(PROMPTS), strict=True):
        assert mine == pytest.approx(other, abs=ROUNDING)
    told, expected = ({k: v for k, v in engine.stats().items() if k != "seconds"} for engine in (two, one))
    assert told == expected and told["hit_tokens"] > 0 and told["rounds"] > 0
    if model.config.attention_type == "mla":
        assert len(set(two.digests())) == 1


@pytest.mark.dist
def test_grammars_and_requests_that_fail_alone(both: Any, small: Small, tokenizer: Tokenizer) -> None:
    model = small(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.stop_token_ids)
    two, one = both(model, tokenizer)
    form = replace(SAMPLED, grammar=GrammarSpec("choice", '["yes", "no"]'), stop=("e",), ignore_eos=False)
    check_same(two.generate([PREFIX], form), one.generate([PREFIX], form))
    plain = one.generate(PROMPTS[:2], GREEDY)
    good, bad, other = (two.submit(prompt, GREEDY)[0] for prompt in (PROMPTS[0], [1, 2, 3], PROMPTS[1]))
    two.step()

    def fails(count: int) -> bool:
        raise ValueError("no mask today")

    bad.state.adjusts = fails  # type: ignore[method-assign]
    with pytest.raises(RequestFailed):
        two.step()
    two.abort(two.submit([4, 4], GREEDY)[0])
    while two.busy:
        two.step()
    assert bad.error is not None
    check_same([good.completion, other.completion], plain)
    two.rebuild()
    check_same(two.generate(PROMPTS[:2], GREEDY), plain)
    assert len(set(two.digests())) == 1


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_new_weights_and_pages_from_the_host(
    both: Any, small: Small, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, one = both(small(dtype=dtype), cache_tokens=384, host_cache_bytes=1 << 20)
    new = small(seed=8, dtype=dtype)
    new.save_pretrained(tmp_path / "new")
    with pytest.raises(CheckpointError, match="different architecture"):
        small(num_attention_heads=4).save_pretrained(tmp_path / "other")
        stage(two.model, tmp_path / "other")
    before = two.generate(PROMPTS, GREEDY)
    known, digests = fingerprint(two), two.weight_digests()
    assert len(set(digests)) == 2
    monkeypatch.setattr(two, "weight_digests", lambda: [digests[0], digests[1] + 1])
    assert fingerprint(two) != known  # it covers all ranks
    monkeypatch.undo()
    (request,) = two.submit(PREFIX, GREEDY)
    two.step()
    update = apply(two, stage(two.model, tmp_path / "new"), 3)
    assert update.tensors == len(new.state_dict())
    while two.busy:
        two.step()
    assert request.completion.weight_versions == [0, *[3] * 7]
    assembly = Assembly(two.model)  # what a trainer sends over torch.distributed
    for part, flat in pack(new):
        assembly.check(part)
        assembly.add(part, flat)
    apply(two, assembly.staged(), 4)
    apply(one, stage(one.model, tmp_path / "new"), 4)
    for _ in range(2):
        for prompt in ([n] * 150 for n in (1, 2, 3)):  # each displaces the pages of another
            found = two.generate([prompt], GREEDY)
            if dtype == torch.float32:
                check_same(found, one.generate([prompt], GREEDY))
    assert two.stats()["restored_pages"] > 0 and len(set(two.digests())) == 1
    assert two.generate(PROMPTS, GREEDY)[0].token_ids != before[0].token_ids


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["wide", "narrow", pytest.param("gqa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exact", [True, False])
def test_sums_in_two_halves(group: Group, small: Small, tmp_path: Path, kind: str, exact: bool) -> None:
    """FlashComm: prompts are computed with the same bits in exact mode, and steps of decoding as before."""
    model = make("gqa") if kind == "gqa" else small(**({"hidden_size": 128} if kind == "wide" else {}))
    model.save_pretrained(tmp_path)
    found, scores, sent = [], [], []
    for form in (None, "plain", *([] if exact else ["int8"])):
        engine = TpEngine(group, group.load(tmp_path, "float32", form), exact=exact, speculative=1, chunk=96)
        group.collectives.sent.clear()
        scores.append(torch.tensor(engine.score([[*PREFIX * 4, 5]])[0]))
        sent.append(dict(group.collectives.sent))
        found.append([engine.generate(PROMPTS, params) for params in (GREEDY, SAMPLED)])
        assert group.collectives.sent["sum"] > sent[-1].get("sum", 0)
    for first, second in zip(*found[:2], strict=True):
        check_same(second, first, 0.0 if exact else 2e-4)
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0.0 if exact else 2e-4)
    # All that was sent are sums of two passes, of 96 tokens and of 64.
    assert set(sent[0]) == {"sum"} and set(sent[1]) == {"reduce-scatter", "gather"}
    if kind == "wide":  # whose products are narrower than the tokens
        assert sum(sent[1].values()) < sum(sent[0].values())
    if not exact:
        assert sum(sent[2].values()) < sum(sent[1].values())
        assert 0 < float((scores[2] - scores[0]).abs().mean()) < 0.1


def test_what_flash_comm_needs() -> None:
    for options, error, text in (
        ({"flash_comm": "plain"}, EngineError, "give --tp too"),
        ({"flash_comm": "plain", "ep": 2}, EngineError, "give --tp too"),
        ({"flash_comm": "fp4", "tp": 2}, ConfigError, "plain or int8, not 'fp4'"),
        ({"flash_comm": "int8", "tp": 2}, ConfigError, "--fast instead of --exact"),
    ):
        with pytest.raises(error, match=text):
            Engine.from_pretrained("anywhere", device="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_four_ranks(small: Small, tmp_path: Path, exact: bool) -> None:
    model = small(num_attention_heads=8, n_routed_experts=8)
    model.save_pretrained(tmp_path)
    four = Engine.from_pretrained(tmp_path, tp=4, device="cpu", exact=exact, speculative=1)
    one = Engine(model, exact=exact, speculative=1)
    one.steps.draft_count.adapts = False  # the number of its drafts would follow the clock
    try:
        for params in (GREEDY, SAMPLED):
            check_same(four.generate(PROMPTS, params), one.generate(PROMPTS, params))
        assert isinstance(four, TpEngine) and len(set(four.digests())) == 1
        if exact:  # no result depends on its batch
            alone = [four.generate([prompt], GREEDY)[0].logprobs for prompt in PROMPTS]
            assert alone == [done.logprobs for done in four.generate(PROMPTS, GREEDY)]
    finally:
        four.close()


@pytest.mark.parametrize("kind", ["plain", "shards", "fp8", "gqa"])
def test_every_rank_loads_its_part(small: Small, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5.parallel.tensor.READ_BYTES", 1 << 10)  # columns are read in several blocks
    sizes = {**WIDE, "n_routed_experts": 4, "num_attention_heads": 4, "kv_lora_rank": 32}
    model = make("gqa") if kind == "gqa" else small(**(sizes if kind == "fp8" else {}))
    if kind == "fp8":
        quantise_folder(model, tmp_path, (32, 48), 2)
    else:
        model.save_pretrained(tmp_path, max_shard_size=20_000 if kind == "shards" else "1GB")
    whole = GLM5ForCausalLM.from_pretrained(tmp_path)
    parts = []
    for rank in range(2):
        deferred = GLM5ForCausalLM.from_pretrained(tmp_path, device="meta")
        parts.append(load_part(deferred, Collectives(rank, 2, torch.device("cpu"))))
    for name, tensor in whole.state_dict().items():
        division = division_of(parts[1])
        assert division is not None and division.config == whole.config
        pieces = [part.state_dict()[name] for part in parts]
        for rank, piece in enumerate(pieces):
            assert torch.equal(piece, division.part(name, tensor, rank)), (name, rank)
        cut = cut_of(name, tensor.shape, 1, 2)
        divided = any(
            word in name for word in (".q_", "k_proj", "v_proj", "o_proj", "kv_b", "gate_up", "down", "lm_head")
        )
        divided &= not any(word in name for word in ("q_a", "_norm"))
        assert (cut is not None) == divided, name
        assert sum(piece.numel() for piece in pieces) == tensor.numel() * (1 if divided else 2)


@pytest.mark.parametrize(
    ("changes", "world", "text"),
    [
        ({}, 3, "num_attention_heads is 2"),
        ({"num_attention_heads": 3}, 3, "intermediate_size"),
        ({"num_attention_heads": 8}, 8, "n_routed_experts is 4"),
    ],
)
def test_what_cannot_be_divided(small: Small, changes: dict[str, Any], world: int, text: str) -> None:
    config = small(**({"intermediate_size": 50 if world == 3 else 48} | changes)).config
    with pytest.raises(ConfigError, match=rf"--tp {world} does not divide this model: its {text}"):
        check_divisible(config, world)


def test_recurrent_layers_and_divided_keys_on_the_host_are_refused(small: Small) -> None:
    with pytest.raises(ConfigError, match="recurrent state"):
        check_divisible(make("gdn").config, 2)
    with pytest.raises(ConfigError, match="num_key_value_heads is 2"):
        check_divisible(make("gqa").config, 4)
    with pytest.raises(EngineError, match=r"--host-cache-mb.*needs MLA"):
        TpEngine(None, make("gqa"), host_cache_bytes=1)  # type: ignore[arg-type]
    check_divisible(GLM5Config.preset("glm5"), 8)


ENDINGS = {
    "sys.exit(3)": "ended with code 3;",
    "os.kill(os.getpid(), 9)": "ended with SIGKILL;",
    """socket.socket(fileno=job["socket"]).sendall(b'{"error":"CheckpointError: no file"}\\n'); sys.exit(1)""": (
        "ended with code 1: CheckpointError: no file;"
    ),
}


@pytest.mark.parametrize("code", ENDINGS)
def test_the_end_of_a_rank_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Whether or not rank 0 waits for an answer."""
    script = f"import json, os, signal, socket, sys; job = json.loads(sys.stdin.readline()); sys.stdin.read(1); {code}"
    monkeypatch.setattr(tensor_parallel_group, "COMMAND", (sys.executable, "-c", script))
    group, told = Group(2), threading.Event()
    reasons: list[str] = []
    group.on_loss(lambda reason: (reasons.append(reason), told.set()))  # type: ignore[func-returns-value]
    stdin = group.followers[0].process.stdin
    assert stdin is not None
    stdin.write(b"x")
    stdin.flush()
    if "error" in code:
        with pytest.raises(EngineLost, match="no file"):
            group.answers()
    assert told.wait(60)
    assert len(reasons) == 1 and reasons[0].startswith("Rank 1 of --tp 2 (process ") and ENDINGS[code] in reasons[0]
    with pytest.raises(EngineLost, match="Rank 1"):
        group.tell({"do": "anything"})
    group.close()
