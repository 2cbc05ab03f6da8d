"""Whole decoding steps and chains of drafts in one compiled call, beside the same in torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.engine.runner import Feed
from glm5.model.decode_step import DecodeStep
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.native import available
from glm5.records import Completion, SamplingParams

pytestmark = pytest.mark.skipif(not available(), reason="needs compiled kernels")
VOCAB = 40
SHARED = {"index_topk_freq": 2, "index_skip_topk_offset": 2}


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> GLM5ForCausalLM:
    config = GLM5Config.preset("nano", index_topk=8, num_nextn_predict_layers=1, vocab_size=VOCAB, **changes)
    return GLM5ForCausalLM(config, seed=3).cast(dtype).eval()


def prompts(count: int) -> list[list[int]]:
    """Of different lengths, up to two pages."""
    return [[(7 * i + j * j) % VOCAB for j in range(1 + 17 * i % 90)] for i in range(count)]


def fixed(engine: Engine) -> Engine:
    """An engine whose number of drafts does not follow the clock."""
    engine.steps.draft_count.adapts = False
    return engine


def generate(model: GLM5ForCausalLM, params: list[SamplingParams], drafts: int, compiled: bool) -> list[Completion]:
    engine = fixed(Engine(model, exact=False, speculative=drafts))
    # The same seed draws the same tokens after the same drafts, so these are not rounded to int8 here.
    engine.runner.step = DecodeStep(model, engine.pool.cache, round_drafts=False) if compiled else None
    done = engine.generate(prompts(len(params)), params)
    assert not drafts or (engine.rounds > 0 and engine.accepted[0] > 0)
    return done


KINDS = [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0, "top_logprobs": 2}]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, SHARED), (torch.bfloat16, {"n_shared_experts": 2})],
    ids=["fp32", "bf16", "IndexShare", "two shared"],
)
def test_equals_torch(dtype: torch.dtype, changes: dict[str, Any], drafts: int) -> None:
    """The same tokens for the same seeds, greedy or drawn, verified or not, in one batch."""
    model = build(dtype, **changes)
    for kinds in (KINDS[:1], KINDS[:3], KINDS):  # greedy only; all by the compiled call; some by torch
        params = [
            SamplingParams(max_tokens=24, ignore_eos=True, seed=i, **kinds[i % len(kinds)])  # type: ignore[arg-type]
            for i in range(6)
        ]
        found, expected = (generate(model, params, drafts, compiled) for compiled in (True, False))
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("drafts", [0, 2])
def test_many_rows(drafts: int) -> None:
    """More rows than the small-batch kernels take, also windows of drafts."""
    model = build()
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engines = [fixed(Engine(model, exact=False, max_batch=70, speculative=drafts)) for _ in range(2)]
    engines[1].runner.step = None
    found, expected = (engine.generate(prompts(70), params) for engine in engines)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


class Drafting:
    """A request in an engine, read up to its last token."""

    def __init__(self, compiled: bool) -> None:
        self.engine = fixed(Engine(build(), exact=False, speculative=3))
        if not compiled:
            self.engine.runner.step = None
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
        (self.request,) = self.engine.submit([5, 1, 7, 2, 9, 4], params)
        self.engine.step()

    def latents(self) -> Tensor:
        """What the MTP layer has cached for the tokens so far, and whose place is not one of a draft: [n, width]."""
        cache, request = self.engine.pool.cache, self.request
        rows = cache.latents[-1, request.pages].flatten(0, 1)
        return rows[1 : request.length - 1]


@torch.no_grad()
def test_drafts_read_the_state_before_it_is_overwritten() -> None:
    """Each draft's state is the MTP layer's input for the next one, in the memory that receives the next state."""
    found = []
    for compiled in (True, False):
        case = Drafting(compiled)
        runner, request = case.engine.runner, case.request
        carried = request.carried
        assert carried is not None
        before = carried.clone()
        request.pages += case.engine.pool.alloc(1)
        if compiled:
            tokens = runner.drafts([request], carried.unsqueeze(0), 3, ((), ()))
            assert tokens is not None
            found.append(tokens.ids)
        else:
            weight, hidden, ids = runner.model.lm_head.weight, carried.unsqueeze(0), []
            for k in range(3):
                if k:
                    hidden = runner.mtp([Feed(request, request.length + k - 1, ids[-1:])], hidden)
                ids.append(int((hidden @ weight.T).argmax()))
            found.append(ids)
        assert torch.equal(carried, before)
    assert found[0] == found[1]


@torch.no_grad()
def test_the_mtp_layer_keeps_no_leftovers_of_drafts() -> None:
    """After rounds with rejected drafts, its cache has what reading the accepted tokens in one go gives."""
    case = Drafting(compiled=True)
    while not case.request.done and case.request.length < 26:
        case.engine.step()
    engine, request = case.engine, case.request
    assert engine.rounds > sum(engine.accepted)  # some drafts were rejected
    kept = case.latents().clone()
    fresh = fixed(Engine(engine.model, exact=False, speculative=3))
    (again,) = fresh.submit(request.tokens[:-1], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    fresh.step()
    expected = fresh.pool.cache.latents[-1, again.pages].flatten(0, 1)[1 : 1 + len(kept)]
    torch.testing.assert_close(kept, expected, rtol=0, atol=2e-5)


THREADS = """
import ctypes, os, sys, threading, torch
from glm5.config.model import GLM5Config
from glm5.engine.engine import Engine
from glm5.model.decode_step import DecodeStep
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.ops.native import kernels
from glm5.records import SamplingParams

torch.set_num_threads(3)
model = GLM5ForCausalLM(GLM5Config.preset("nano", index_topk=8), seed=3).cast(torch.bfloat16)
engines = [Engine(model, exact=False) for _ in range(3)]
params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ask = lambda engine: [c.token_ids for c in engine.generate([[1, 2, 3], [4] * 40], params)]
known = ask(engines[0])
assert len(os.listdir("/proc/self/task")) >= 3
found = {}
work = [threading.Thread(target=lambda i=i: found.update({i: ask(engines[i])})) for i in range(3)]
[thread.start() for thread in work]
[thread.join() for thread in work]
assert all(found[i] == known for i in range(3)), found
child = os.fork()
if not child:
    torch.set_num_threads(2)
    same = ask(engines[1]) == known
    sys.stdout.flush()
    os._exit(0 if same else 1)
assert os.waitpid(child, 0)[1] == 0
torch.set_num_threads(1)
assert ask(engines[2]) == known
x, w, out = torch.ones(4, 2048), torch.ones(4096, 2048), torch.zeros(4, 4096)
products = lambda: [kernels(x).thin_linear(x, w, out, 4, 4096, 2048, 3) for _ in range(10_000)]
threading.Thread(target=products, daemon=True).start()
while not out.all():
    pass
print("well", flush=True)
# Not Python's own exit: it ends the daemon within torch's code, which then calls std::terminate, with any kernels. For
# the same reason the daemon calls nothing of torch's: what that allocates with is gone before it ends.
ctypes.CDLL(None).exit(0)
"""


def test_threads_forks_and_exits() -> None:
    """Three threads share the workers, a child of fork has its own, and a process may exit during a step."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "well" and done.returncode == 0, done.stderr[-2000:]
