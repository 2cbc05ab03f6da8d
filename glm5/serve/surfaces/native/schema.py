"""Requests of the native surface, compatible with SGLang."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, StringConstraints, model_validator

from glm5.records import GrammarSpec
from glm5.serve.prompts import Prompt
from glm5.serve.surfaces.fields import COMMON, HOSTED, PROMPTS, REPORTS, SAMPLER_DETAILS, Fields, no
from glm5.serve.surfaces.schema import MAX_ROWS, Ids, Prompts, Rows, Sampling, Stop, Stops, Texts

Version = Annotated[int, Field(ge=0, lt=2**63)] | Annotated[str, StringConstraints(pattern=r"^\d{1,18}$")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
GROUP = "weight_update_group"
Rid = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class NativeSampling(Sampling):
    """`sampling_params`. With `no_stop_trim` the stop string or token stays in the text. `stream_interval`: tokens
    between two events of a stream."""

    IGNORED = SAMPLER_DETAILS | {"custom_params", "spaces_between_special_tokens", "temperature_last"}
    REFUSED = {**COMMON, "max_tokens": no(instead="use max_new_tokens")}
    EACH_TOKEN = True

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = 128
    n: int = Field(default=1, ge=1, le=128)
    stream_interval: int | None = Field(default=None, ge=1, lt=2**31)
    stop: Stop | Stops = Field(default_factory=list)
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    json_schema: Annotated[str, StringConstraints(min_length=1)] | None = None
    regex: Annotated[str, StringConstraints(min_length=1)] | None = None
    ebnf: Annotated[str, StringConstraints(min_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len([form for form in (self.json_schema, self.regex, self.ebnf) if form is not None]) > 1:
            raise ValueError("only one of json_schema, regex and ebnf may be given")
        self.seed = self.sampling_seed if self.seed is None else self.seed
        return self

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def samples(self) -> int:
        return self.n

    def limit(self) -> int | None:
        return self.max_new_tokens

    def grammar(self, prompt: Prompt) -> GrammarSpec | None:
        if self.json_schema is not None:
            return GrammarSpec("json_schema", self.json_schema)
        if self.ebnf is not None:
            return GrammarSpec("grammar", self.ebnf)
        return None if self.regex is None else GrammarSpec("regex", self.regex)


class GenerateRequest(Fields):
    """POST /generate: `text` or `input_ids`, one or a batch; `sampling_params` for all, or one per prompt.

    Events of a stream contain the whole sample so far; with `incremental_streaming_output`, only its new part.
    """

    IGNORED = HOSTED - {"rid"}
    REFUSED = {
        **REPORTS,
        **PROMPTS,
        "custom_logit_processor": no(""),
        "return_text_in_logprobs": no(False),
        "model": no(instead="this server has one model"),
    }

    text: str | Texts | None = None
    input_ids: Ids | Rows | None = Field(default=None, union_mode="left_to_right")
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(fail_fast=True, max_length=MAX_ROWS)] = (
        NativeSampling()
    )
    rid: Rid | Annotated[list[Rid], Field(fail_fast=True, max_length=MAX_ROWS)] | None = None
    return_logprob: bool = False
    logprob_start_len: int = Field(default=-1, ge=-1, lt=2**31)
    top_logprobs_num: int = Field(default=0, ge=0, le=20)
    stream: bool = False
    incremental_streaming_output: bool = False
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    extra_key: Annotated[str, StringConstraints(max_length=256)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give either text or input_ids")
        count = len(self.prompts())
        for name in ("sampling_params", "rid"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != count:
                raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        if isinstance(self.rid, str) and count > 1:
            raise ValueError("rid must be a list for a batch")
        if any(p.max_new_tokens == 0 and (self.stream or p.n > 1) for p in self.each()):
            raise ValueError("max_new_tokens: 0 needs n: 1 and no stream")
        for params in self.each():
            params.cache_salt = params.cache_salt or self.cache_salt or self.extra_key
        return self

    @property
    def batched(self) -> bool:
        """Whether the answer is a list even for one prompt."""
        if self.text is not None:
            return isinstance(self.text, list)
        return bool(self.input_ids) and isinstance(cast(list[Any], self.input_ids)[0], list)

    def prompts(self) -> Prompts:
        """One entry per prompt."""
        given = self.input_ids if self.text is None else self.text
        return cast(Prompts, given if self.batched else [given])

    def each(self) -> list[NativeSampling]:
        """The sampling parameters, per prompt."""
        one = self.sampling_params
        return one if isinstance(one, list) else [one] * len(self.prompts())


class UpdateRequest(Fields):
    """POST /update_weights_from_disk. Caches are always recomputed. A paused server stays paused. `any_version` (ours)
    takes a `weight_version` that is not greater than the present one, too: a trainer takes the server over."""

    IGNORED = frozenset(
        """manifest is_async torch_empty_cache recapture_cuda_graph token_step flush_cache keep_pause""".split()
    )

    model_path: str = Field(min_length=1, max_length=4096)
    load_format: Literal["auto", "safetensors"] = "auto"
    weight_version: Version | None = None
    any_version: bool = False
    abort_all_requests: bool = False


class InitGroup(Fields):
    """POST /init_weights_update_group: the address of the trainer's TCP store, and our rank. Rank 0 sends."""

    master_address: str = Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9._:-]+$")
    master_port: int = Field(ge=1, lt=1 << 16)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2, le=1 << 16)
    group_name: GroupName = GROUP
    backend: Literal["gloo", "nccl"] = "nccl"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rank_offset >= self.world_size:
            raise ValueError(f"rank_offset must be less than world_size, not {self.rank_offset} of {self.world_size}")
        return self


class PartRequest(Fields):
    """POST /update_weights_from_distributed: names on disk, types and shapes of the tensors that rank 0 sends now: one
    after the other, or as the bytes of all in one buffer ("flattened_bucket"). `hashes` are SHA-256 of their bytes. The
    weights are replaced once all tensors with the same `weight_version` have arrived."""

    IGNORED = frozenset({"flush_cache", "torch_empty_cache"})

    names: Annotated[list[Annotated[str, Field(max_length=512)]], Field(fail_fast=True, min_length=1)]
    dtypes: Annotated[list[Annotated[str, Field(max_length=64)]], Field(fail_fast=True)]
    shapes: Annotated[list[Annotated[list[int], Field(max_length=8)]], Field(fail_fast=True)]
    hashes: Annotated[list[Annotated[str, Field(max_length=64)]], Field(fail_fast=True)] | None = None
    group_name: GroupName = GROUP
    load_format: Literal["flattened_bucket"] | None = None
    weight_version: Version | None = None
    any_version: bool = False
    abort_all_requests: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("dtypes", "shapes", "hashes"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.names):
                raise ValueError(f"{name} has {len(value)} entries for {len(self.names)} names")
        return self


class DestroyGroup(Fields):
    """POST /destroy_weights_update_group."""

    group_name: GroupName = GROUP


class PagePlace(Fields):
    """Where the bytes of pages go: `stream` is within the answer, `memory` the shared memory at `path`."""

    kind: Annotated[str, StringConstraints(max_length=32)]
    path: Annotated[str, StringConstraints(max_length=64)] = ""


class PrefillRequest(Fields):
    """POST /prefill, from an engine that decodes: the pages of `input_ids` from page number `first_page` on, computed
    with these weights, to be written to `place` (see `page_transfer.PageReceiver`)."""

    input_ids: Ids
    first_page: int = Field(default=0, ge=0, lt=2**31)
    namespace: Annotated[str, StringConstraints(max_length=256)] = ""
    fingerprint: Annotated[str, StringConstraints(max_length=64)]
    weight_version: int = Field(ge=0, lt=2**63)
    place: PagePlace


class PauseRequest(Fields):
    """POST /pause_generation. `abort` ends running requests; the other modes, which are equal here, keep them."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class AbortRequest(Fields):
    """POST /abort_request."""

    IGNORED = frozenset({"abort_message"})

    rid: str | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.rid and not self.abort_all:
            raise ValueError("give a rid, or abort_all: true")
        return self


class NoFields(Fields):
    """A body that may be empty and has no meaningful fields."""

    IGNORED = frozenset({"torch_empty_cache"})
