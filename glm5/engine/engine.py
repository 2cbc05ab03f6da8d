"""The engine: continuous batching over a paged latent cache, with the same model class as the trainer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.device import AUTO
from glm5.engine.grammar import Compiled, Grammars
from glm5.engine.graphs import CudaCapture
from glm5.engine.kv_pool import PAGE, KVPool, token_bytes
from glm5.engine.page_files import PageFiles
from glm5.engine.page_hash import fingerprint, weights_digest
from glm5.engine.penalties import SamplerState, check_params
from glm5.engine.radix_cache import RadixCache
from glm5.engine.request import Request
from glm5.engine.runner import Runner
from glm5.engine.scheduler import Scheduler
from glm5.engine.steps import Counts, Steps
from glm5.engine.stops import StopStringDetector
from glm5.engine.weights import check_fit
from glm5.errors import EngineError, RequestFailed
from glm5.model.glm5 import GLM5ForCausalLM
from glm5.quant.in_place import NewWeights, load_for_inference, new_weights, take_weights
from glm5.records import Completion, SamplingParams
from glm5.seeds import derive_seed

CACHE_BYTES = 1 << 29
"""Default size of the pool; larger if one request of maximum length needs more. Memory is allocated on demand."""

CHUNK, CHUNK_ON_DEVICE = 512, 4096
"""Default limits of the tokens per step, prefill and decoding together: on a CPU, and on an accelerator, which a few
hundred tokens leave idle."""


class Engine:
    """Generates and scores token ids. Not thread-safe: one thread calls `submit`, `step` and `update_weights`.

    `submit` queues requests and `step` advances every running request by a token, so requests may join and leave at
    any step. `generate` steps until its own requests are done. Every token carries the weight version that produced it.
    In fp32 the log-probabilities of an MLA model, sparse or dense, are bit for bit those of a learner that runs the
    same weights over the packed sequence. GQA and recurrent layers agree with the learner up to rounding. `exact=False`
    is faster: small batches use fused kernels, and the last digits of a result may depend on the other requests in the
    batch.

    The cache holds `cache_tokens` tokens, in pages of latents and indexer keys. `prefix_cache` keeps the pages of
    finished requests for reuse. `host_cache_bytes` is the space in host memory for evicted pages; with 0 they are
    dropped. `disk_cache` is a folder of this engine alone, to which whole pages are written, at most
    `disk_cache_bytes`; they survive a restart. `speculative` is the number of tokens that the MTP layer drafts per
    step, with `exact=False` the largest (see `DraftCount`; the tokens of a seed then depend on measured times); it
    changes no distribution and no greedy
    token. `chunk` bounds the tokens of one step; None is `CHUNK`, and `CHUNK_ON_DEVICE` on an
    accelerator. `overlap` plans the next step while tokens are drawn; on an
    accelerator it is always on. While requests draft it has no effect, because the next plan depends on how many are
    accepted. `graphs` captures decoding on a CUDA device as CUDA graphs. `cache_dtype` "int8" keeps latents and index
    keys of a model with DSA in int8, with a scale per token and layer, on a CPU and with `exact=False`; None keeps the
    dtype of the model.
    """

    def __init__(
        self,
        model: GLM5ForCausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        max_batch: int = 64,
        max_length: int | None = None,
        seed: int = 0,
        exact: bool = True,
        cache_tokens: int | None = None,
        prefix_cache: bool = True,
        host_cache_bytes: int = 0,
        disk_cache: str | Path | None = None,
        disk_cache_bytes: int = 1 << 30,
        speculative: int = 0,
        chunk: int | None = None,
        overlap: bool = False,
        graphs: bool = True,
        cache_dtype: str | None = None,
    ) -> None:
        config = model.config
        self._packed = _packs(model, cache_dtype, exact)
        self.model = model.eval()
        self.exact = exact
        self.tokenizer = tokenizer
        self.max_batch = max_batch
        self.drafts = _drafts(model, speculative)
        self.max_length = min(max_length or config.max_position_embeddings, config.max_position_embeddings)
        ahead = 1 + self.drafts  # positions after the last token that a step may write to
        if cache_tokens is None:
            cache_tokens = min(
                CACHE_BYTES // token_bytes(config, model.dtype, self._packed), max_batch * (self.max_length + PAGE)
            )
            cache_tokens = max(cache_tokens, self.max_length + ahead)
        if chunk is None:
            chunk = CHUNK if model.device.type == "cpu" else CHUNK_ON_DEVICE
        if cache_tokens <= PAGE + ahead or chunk < 1 or max_batch < 1:
            raise EngineError(f"cache_tokens must be above {PAGE + ahead}, chunk and max_batch at least 1.")
        self.max_length = min(self.max_length, cache_tokens - ahead)
        self.cache_tokens, self.chunk = cache_tokens, chunk
        # A recurrent state cannot be rolled back to the end of a cached prefix.
        self._prefix_cache = prefix_cache and not config.has_recurrent_layers
        self._host_cache_bytes, self._overlap = host_cache_bytes, overlap
        if disk_cache is not None and not self._prefix_cache:
            raise EngineError("A cache on disk (--disk-cache) needs a prefix cache; recurrent layers have none.")
        self._files = None if disk_cache is None else PageFiles(Path(disk_cache), disk_cache_bytes)
        self._capture = partial(CudaCapture, model.device) if graphs and model.device.type == "cuda" else None
        self.weight_version = 0
        self.counts = Counts([0] * self.drafts, [0] * self.drafts)
        self._paused = False
        self._seed = seed
        self._submitted = self._numbered = 0
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._build()

    def _build(self) -> None:
        """Pages, prefix cache, scheduler and runner, all empty."""
        self.pool = self._new_pool()
        identity = partial(fingerprint, self)
        self.radix = (
            RadixCache(self.pool, self._host_cache_bytes, identity, self._files) if self._prefix_cache else None
        )
        batch, chunk, drafts = self.max_batch, self.chunk, self.drafts
        self.scheduler = Scheduler(
            self.pool, self.radix, max_batch=batch, chunk=chunk, drafts=drafts, bring_back=drafts > 0
        )
        self.runner = self._new_runner()
        self.steps = Steps(
            self.scheduler, self.runner, self.counts, drafts=drafts, max_length=self.max_length, overlap=self._overlap
        )

    def _new_pool(self) -> KVPool:
        model, states = self.model, self.max_batch + 1  # one for the runner's spare row
        return KVPool(
            model.config,
            self.cache_tokens,
            states=states,
            dtype=model.dtype,
            device=model.device,
            packed=self._packed,
        )

    def _new_runner(self) -> Runner:
        return Runner(
            self.model, self.pool, self.max_batch, self.exact, None if self._capture is None else self._capture()
        )

    @torch.no_grad()
    def rebuild(self) -> None:
        """Start over after a failure: fresh pages, cache and scheduler, same weights and version. Drops all requests;
        they stay unfinished. Raises EngineBroken if the engine still cannot compute."""
        for name in ("steps", "runner", "scheduler", "radix", "pool"):
            setattr(self, name, None)  # free the memory before allocating again
        self._build()
        self.steps.probe()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: str = AUTO,
        chat_template: str | None = None,
        tp: int = 1,
        ep: int = 1,
        ep_rank: int = 0,
        ep_meeting: str = "",
        quantize: str | None = None,
        flash_comm: str | None = None,
        **options: Any,
    ) -> Engine:
        """Load the model and, if the directory has one, the tokenizer. `device` goes to `choose_device`,
        `chat_template` to `Tokenizer.load`, `options` to the constructor. `tp` processes divide every layer (see
        `tensor_parallel.TpEngine`); `close` ends them. With `ep`, this is engine `ep_rank` of so many that divide the
        experts (see `expert_parallel`). `quantize` names a scheme whose rounding is done while loading ("int8", "int4",
        "fp8"; see `quant.in_place`). On CPUs and GPUs, integer matrices of checkpoints with int8 activations stay
        integers. `flash_comm` "plain" or "int8" makes the processes of `tp` divide the tokens of prompts between layers
        (see `parallel.tensor.SplitSums`)."""
        if flash_comm is not None and tp == 1:
            raise EngineError("--flash-comm is for the processes of --tp; give --tp too, or leave it out.")
        directory = Path(path)
        tokenizer = Tokenizer.load(directory, chat_template) if (directory / "tokenizer.json").exists() else None
        if ep > 1:
            if tp > 1 or quantize is not None:
                raise EngineError("--expert-parallel goes without --tp and --quantize; leave one out.")
            from glm5.engine.expert_parallel import ExpertParallelEngine

            options.pop("graphs", None)
            return ExpertParallelEngine.start(directory, tokenizer, ep_rank, ep, ep_meeting, dtype, device, **options)
        if tp > 1:
            if options.get("cache_dtype") is not None:
                raise EngineError("An int8 cache (--cache-dtype) needs an engine of one process; leave out --tp.")
            from glm5.engine.tensor_parallel import TpEngine

            return TpEngine.start(directory, tokenizer, tp, dtype, device, quantize, flash_comm, **options)
        return cls(load_for_inference(directory, dtype, device, quantize), tokenizer, **options)

    def weight_digests(self) -> list[int]:
        """The `weights_digest` of every process that computes with this engine."""
        return [weights_digest(self.model)]

    def close(self) -> None:
        """Write pages that wait for the disk. End the processes of a tensor-parallel engine."""
        if self._files is not None:
            self._files.close()

    def on_loss(self, act: Callable[[str], None]) -> None:
        """Call `act` with the reason, in another thread, if a process of a tensor-parallel engine ends too early."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completions in prompt order, the `n` samples of one prompt next to each other. Raises EngineError for a
        prompt that is too long, RequestFailed for one that cannot be computed."""
        self._check_going()
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        return self._run([r for prompt, p in zip(prompts, params, strict=True) for r in self.submit(prompt, p)])

    def _check_going(self) -> None:
        if self._paused:
            raise EngineError("The engine is paused; resume it first.")

    def _run(self, requests: Sequence[Request]) -> list[Completion]:
        """Step until all requests are done; after a failure, abort the others."""
        try:
            while not all(r.done for r in requests):
                self.step()
        except RequestFailed:
            for request in requests:
                self.abort(request)
            raise
        return [r.completion for r in requests]

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        namespace: str | None = "",
        grammar: Compiled | None = None,
    ) -> list[Request]:
        """Queue `params.n` samples of a prompt and return their requests. Requests share prefix-cache entries only
        within one `namespace`; with None a request neither reads nor writes the cache. `grammar` is the compiled
        form of `params.grammar`; with None, this call compiles it."""
        ids = self._checked(prompt)
        vocab = self.model.config.vocab_size
        if not ids:
            raise EngineError("The prompt is empty; give at least one token.")
        if len(ids) >= self.max_length:
            raise EngineError(f"The prompt has {len(ids)} tokens, the limit is {self.max_length - 1}; shorten it.")
        check_params(params, vocab)
        if params.stop and self.tokenizer is None:
            raise EngineError("Stop strings need a tokenizer; this model directory has none. Use stop_token_ids.")
        spelling = self.grammars.words.spelling(params.bad_words) if params.bad_words else None
        if grammar is None and params.grammar is not None:
            grammar = self.grammars.compile(params.grammar)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= set(self.model.config.eos_token_id)
        base = params.seed if params.seed is not None else derive_seed(self._seed, "request", self._submitted)
        self._submitted += 1
        requests = []
        for i in range(params.n):
            seed = derive_seed(base, "sample", i)
            own = None if grammar is None else grammar.state()
            state = SamplerState(
                params, seed, vocab_size=vocab, prompt=ids, stop_ids=stops, grammar=own, spelling=spelling
            )
            watch = None
            if params.stop and self.tokenizer is not None:
                watch = StopStringDetector(self.tokenizer, params.stop, silent=stops, min_tokens=params.min_tokens)
            self._numbered += 1
            requests.append(
                Request(ids, params, seed, frozenset(stops), state, watch, namespace, number=self._numbered)
            )
        self.scheduler.waiting.extend(requests)
        return requests

    def submit_score(self, row: Sequence[int], params: SamplingParams) -> Request:
        """Queue the scoring of a row. Of `params`, only temperature (0 means 1) and `top_logprobs` are used. The
        completion contains the row's tokens except the first. All their log-probabilities come from one weight version.
        The row is queued, chunked and preempted like a prompt, and is not inserted into the prefix cache."""
        ids = self._checked(row)
        if len(ids) > self.max_length:
            raise EngineError(f"A row to score has {len(ids)} tokens, the limit is {self.max_length}; shorten it.")
        check_params(params, self.model.config.vocab_size)
        self._numbered += 1
        state = SamplerState(params, 0, vocab_size=self.model.config.vocab_size)
        request = Request(ids, params, 0, frozenset(), state, namespace=None, number=self._numbered, score=True)
        if len(ids) < 2:
            request.finish("length")
        else:
            self.scheduler.waiting.append(request)
        return request

    def _checked(self, ids: Sequence[int]) -> list[int]:
        vocab = self.model.config.vocab_size
        if not all(0 <= token < vocab for token in ids):
            raise EngineError(f"The prompt has a token id outside the model's vocabulary, 0 to {vocab - 1}.")
        return list(ids)

    @property
    def grammars(self) -> Grammars:
        """The grammar compiler, created at first use. Raises EngineError without a tokenizer."""
        if self._grammars is None:
            if self.tokenizer is None:
                raise EngineError("Grammars and bad_words need a tokenizer; this model directory has none.")
            with self._grammars_lock:  # other threads may read this property too
                self._grammars = self._grammars or Grammars(self.tokenizer)
        return self._grammars

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return not self._paused and bool(self.scheduler.waiting or self.scheduler.running)

    @property
    def rounds(self) -> int:
        """Verifications of drafts so far."""
        return self.counts.rounds

    @property
    def accepted(self) -> list[int]:
        """Entry k (from 0): the number of verifications that accepted at least the first k + 1 drafts."""
        return self.counts.accepted

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Advance every running request by a token (with drafts, by one or more) and waiting prompts by a chunk.
        Returns the requests that got a token.

        Raises RequestFailed for a request that could not be computed. The others have advanced; the failed one is done,
        with the reason in its `error`. After any other exception, including EngineBroken, call `rebuild`.
        """
        if self._paused:
            return []
        fresh, failed = self.steps.advance(self.weight_version)
        if failed and failed[0].error is not None:
            raise failed[0].error
        return fresh

    def abort(self, request: Request) -> None:
        """End a request early; its completion keeps the tokens so far."""
        if request.done:
            return
        request.finish("abort")
        self.steps.leave(request)

    def abort_all(self) -> int:
        """End all requests early; returns how many there were."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        for request in requests:
            self.abort(request)
        return len(requests)

    def pause(self) -> None:
        """Make steps do nothing until `resume`. Requests may be submitted and aborted meanwhile."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def flush_cache(self) -> None:
        """Clear the prefix cache. Running requests keep their pages."""
        if self.radix is not None:
            self.radix.clear()

    def stats(self) -> dict[str, Any]:
        """Current values and counters since the start. `cached_tokens` are in the prefix cache. `hit_tokens` are prompt
        tokens that were not computed because the prefix cache had them. `accepted[k]` counts the `rounds` that accepted
        at least the first k + 1 drafts, `drafted[k]` those that had so many. `seconds` is the time by phase."""
        radix = self.radix
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "paused": self._paused,
            "total_pages": self.pool.total,
            "free_pages": self.pool.available,
            "unused_pages": self.pool.unused,
            "page_tokens": PAGE,
            "cached_tokens": radix.tokens if radix else 0,
            "hit_tokens": radix.hit_tokens if radix else 0,
            "host_bytes": radix.host_used if radix else 0,
            "spilled_pages": radix.spilled if radix else 0,
            "restored_pages": radix.restored if radix else 0,
            "damaged_pages": (radix.damaged if radix else 0) + (self._files.damaged if self._files else 0),
            "disk_bytes": self._files.used if self._files else 0,
            "disk_pages": radix.from_files if radix else 0,
            "preemptions": self.scheduler.preemptions,
            "generated_tokens": self.counts.generated,
            "failed_steps": self.counts.failed_steps,
            "failed_requests": self.counts.failed_requests,
            "rounds": self.rounds,
            "accepted": list(self.accepted),
            "drafted": list(self.counts.drafted),
            "weight_version": self.weight_version,
            "seconds": dict(self.counts.seconds),
        }

    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probability of every token given those before it: one list per row, one entry shorter than the row."""
        return [completion.logprobs for completion in self.scored(rows, temperature)]

    def scored(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0, top_logprobs: int = 0
    ) -> list[Completion]:
        """Score rows. The tokens of each completion are the row's tokens after the first (see `submit_score`), with
        log-probabilities of the `top_logprobs` likeliest tokens at each position. Raises EngineError for a row that is
        too long."""
        self._check_going()
        if not math.isfinite(temperature) or temperature <= 0:
            raise EngineError("Scoring needs a temperature above 0.")
        params = SamplingParams(temperature=temperature, top_logprobs=top_logprobs)
        return self._run([self.submit_score(row, params) for row in rows])

    @torch.no_grad()
    def update_weights(self, tensors: Mapping[str, Tensor] | NewWeights, version: int) -> None:
        """Replace all weights; `tensors` has the names of `state_dict`, or is what `new_weights` made of such.

        Running requests continue: their caches are recomputed with the new weights before their next token, so exactly
        one version produces each token.
        """
        if not isinstance(tensors, NewWeights):
            check_fit(self.model, tensors)
            tensors = new_weights(self.model, tensors)
        self._copy_weights(tensors)
        self.weight_version = version
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            if request.score:
                request.completion = Completion()  # a score must not mix two versions
        self.scheduler.requeue()
        self.flush_cache()

    def _copy_weights(self, new: NewWeights) -> None:
        take_weights(self.model, new)


def _packs(model: GLM5ForCausalLM, cache_dtype: str | None, exact: bool) -> bool:
    """Whether the cache is in int8. Raises EngineError for another dtype, and if this model or mode cannot have it."""
    if cache_dtype is None:
        return False
    if cache_dtype != "int8":
        raise EngineError(f"The cache cannot be in {cache_dtype!r}: --cache-dtype takes int8.")
    if exact:
        raise EngineError("Exact mode needs a cache in the model's dtype; leave out --cache-dtype or use --fast.")
    if model.device.type != "cpu":
        raise EngineError(f"An int8 cache works on a CPU only, not on {model.device}; leave out --cache-dtype.")
    if not model.config.selects_keys or model.config.has_recurrent_layers:
        raise EngineError("An int8 cache needs a model with sparse attention (DSA); leave out --cache-dtype.")
    return True


def _drafts(model: GLM5ForCausalLM, count: int) -> int:
    """Return `count`. Raises EngineError for a model that cannot draft that many tokens."""
    if count < 0:
        raise EngineError("The number of drafts per step must be at least 0.")
    if count and model.mtp is None:
        raise EngineError("Speculative decoding needs an MTP layer; this checkpoint has none.")
    if count and model.config.has_recurrent_layers:
        raise EngineError("Drafts: the engine does not support layers with a recurrent state; none can be taken back.")
    return count
