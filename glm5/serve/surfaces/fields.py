"""The fields of requests. Every field of every object of a body is implemented, accepted or refused.

Client metadata and options of hosted services are accepted without effect. A field that asks for a change of the answer
that this server cannot make is refused by name; a neutral value, which asks for nothing, is allowed. An unknown field
is refused too, with the nearest known name. Only these parts are not checked: JSON schemas, arguments of tools,
metadata.

The request classes are the only list of all fields. `Fields.INSIDE` names the classes of the objects in a request.
`docs/serving.md` shows the list as tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from glm5.errors import nearest
from glm5.serve.errors import ApiError

LEAVE_OUT = "leave it out"
LONGEST_NAME = 100
"""Maximum characters of a field's name in an error."""


@dataclass(frozen=True)
class Refused:
    """A refused field. `neutral` are values that ask for nothing, `instead` is the advice in the error, `code` names
    the error for programs."""

    neutral: tuple[Any, ...] = ()
    instead: str = LEAVE_OUT
    code: str = "unsupported"


def no(*neutral: Any, instead: str = LEAVE_OUT, code: str = "unsupported") -> Refused:
    return Refused(neutral, instead, code)


class Fields(BaseModel):
    """Base of all requests and their parts. A null field counts as absent.

    Some fields keep an object, or a list of objects, as the client wrote it; `INSIDE` maps them to the class that
    checks these objects. Fields with a `Fields` type need no entry.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    __hash__ = object.__hash__  # pydantic copies defaults without a hash, deeply, for every request

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    REFUSED: ClassVar[Mapping[str, Refused]] = {}
    INSIDE: ClassVar[Mapping[str, type[Fields]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


@cache
def implemented(kind: type[Fields]) -> Mapping[str, str]:
    """The fields that have an effect: their names in requests, mapped to their names in the class."""
    return {field.alias or name: name for name, field in kind.model_fields.items()}


@cache
def parts(kind: type[Fields]) -> Mapping[str, type[Fields]]:
    """The classes of the objects in a request, by the names of their fields."""
    found = {alias: _of(kind.model_fields[name].annotation) for alias, name in implemented(kind).items()}
    return {name: part for name, part in (found | dict(kind.INSIDE)).items() if part is not None}


def _of(annotation: Any) -> type[Fields] | None:
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        return annotation
    return next((part for one in get_args(annotation) if (part := _of(one)) is not None), None)


def check(body: Fields, where: str = "") -> None:
    """Raise ApiError 400 for a field of `body`, or of an object in it, that is refused or unknown."""
    kind = type(body)
    for name, value in (body.model_extra or {}).items():
        _judge(kind, name, value, where)
    for name, part in parts(kind).items():
        attribute = implemented(kind)[name]
        if attribute in body.model_fields_set:
            _look(part, getattr(body, attribute), where + name)


_PLAIN = (str, int, bool, type(None))


def finite(value: Any) -> bool:
    """Whether all numbers in an object, a list or a `Fields` are valid JSON. Parts without a class may contain NaN, or
    overflow to infinity."""
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)
        for part in one.values() if kind is dict else one if kind is list else (one.__dict__, one.model_extra):
            kind = type(part)
            if kind is float:
                if not math.isfinite(part):
                    return False
            elif kind is dict or kind is list or (kind not in _PLAIN and isinstance(part, Fields)):
                left.append(part)
    return True


def _look(kind: type[Fields], value: Any, where: str) -> None:
    """Check a `Fields`, an object kept as it came, or a list of them."""
    if isinstance(value, Fields):
        check(value, where + ".")
    elif isinstance(value, list):
        for i, one in enumerate(value):
            _look(kind, one, f"{where}[{i}]")
    elif isinstance(value, dict):
        known, inside = implemented(kind), parts(kind)
        for name, one in value.items():
            if one is None:
                continue
            if name not in known:
                _judge(kind, name, one, where + ".")
            elif name in inside and not isinstance(one, str):
                _look(inside[name], one, f"{where}.{name}")


def _judge(kind: type[Fields], name: str, value: Any, where: str) -> None:
    """Check a field that is not implemented. Raises ApiError 400 for a refused or unknown one."""
    if name in kind.IGNORED:
        return
    short = name[:LONGEST_NAME].encode("utf-8", "replace").decode()
    path = where + short
    refused = kind.REFUSED.get(name)
    if refused is None:
        known = nearest(short, {*implemented(kind), *kind.IGNORED, *kind.REFUSED})
        raise ApiError(400, f"{path} is not a field of this request{known}; leave it out.", param=path, code="unknown")
    if not any(_same(value, neutral) for neutral in refused.neutral):
        raise ApiError(400, f"{path} is not supported; {refused.instead}.", param=path, code=refused.code)


def _same(value: Any, neutral: Any) -> bool:
    """Equality that distinguishes 0 from false."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def objects(kind: type[Fields], path: str = "") -> Iterator[tuple[str, type[Fields]]]:
    """Dotted path and class of a request ("") and of all objects in it."""
    yield path, kind
    for name, part in parts(kind).items():
        yield from objects(part, f"{path}.{name}" if path else name)


def table(kind: type[Fields], shown: set[type[Fields]]) -> str:
    """The table of one request in Markdown: a row per object that is not in `shown`. Adds these objects to `shown`."""
    lines = ["| Object | Implemented | Accepted, no effect | Refused |", "|---|---|---|---|"]
    for path, part in objects(kind):
        if part in shown:
            continue
        shown.add(part)
        cells = [f"`{path}`" if path else "the body"]
        cells += [", ".join(f"`{name}`" for name in sorted(names)) for names in (implemented(part), part.IGNORED)]
        cells.append("; ".join(_told(part.REFUSED)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _told(refused: Mapping[str, Refused]) -> Iterator[str]:
    """Refused fields, grouped by advice."""
    groups: dict[str, list[str]] = {}
    for name in sorted(refused):
        groups.setdefault(refused[name].instead, []).append(f"`{name}`")
    for instead, names in sorted(groups.items(), key=lambda group: group[0] != LEAVE_OUT):
        yield ", ".join(names) + ("" if instead == LEAVE_OUT else f": {instead}")


# Lists of fields that other servers know and this one does not implement. Sources: the APIs of OpenAI and Anthropic,
# and the extensions of vLLM, SGLang, llama.cpp, z.ai and OpenRouter.

TEXT_ONLY = "the model accepts text only"
NO_STORE = "this server stores nothing between requests; send the whole conversation"

HOSTED = frozenset(
    """user user_id metadata store service_tier safety_identifier prompt_cache_key prompt_cache_options
    prompt_cache_retention prompt_cache_breakpoint prediction verbosity moderation priority request_id rid session_id
    provider route models transforms plugins usage extra_headers access_programs
    cache_control vllm_xargs kv_transfer_params stream_interval data_parallel_rank routed_dp_rank bootstrap_host
    bootstrap_port bootstrap_room log_metrics custom_params cache_prompt id_slot
    guided_decoding_backend tool_stream stream_reasoning spaces_between_special_tokens timings_per_token
    return_progress mm_processor_kwargs media_io_kwargs""".split()
)
"""Client metadata and service options: storage, queue, caches and transport."""

SAMPLER_DETAILS = frozenset(
    """mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold
    dynatemp_exponent repeat_last_n length_penalty early_stopping smoothing_curve""".split()
)
"""Parameters of `SAMPLERS`, without meaning on their own."""

SAMPLERS: Mapping[str, Refused] = {
    "typical_p": no(1),
    "tfs_z": no(1),
    "top_a": no(0),
    "top_n_sigma": no(-1, 0),
    "mirostat": no(0),
    "dry_multiplier": no(0),
    "xtc_probability": no(0),
    "dynatemp_range": no(0),
    "smoothing_factor": no(0),
    "epsilon_cutoff": no(0),
    "eta_cutoff": no(0),
    "repeat_penalty": no(1, instead="use repetition_penalty"),
    "use_beam_search": no(False),
    "samplers": no([]),
    "custom_logit_processor": no(""),
    "logits_processors": no([]),
    "repetition_detection": no(),
    "min_keep": no(0, 1),
}
"""Samplers that change which tokens are drawn."""

REPORTS: Mapping[str, Refused] = {
    "prompt_logprobs": no(0, False, instead="use echo with logprobs on /v1/completions, or /generate"),
    "logprob_token_ids": no([]),
    "token_ids_logprob": no([]),
    "n_probs": no(0, instead="use logprobs"),
    "post_sampling_probs": no(False),
    "return_tokens_as_token_ids": no(False, instead="use return_token_ids"),
    "return_prompt_token_ids": no(False, instead="use return_token_ids"),
    "return_prompt_text": no(False),
    "return_hidden_states": no(False),
    "return_routed_experts": no(False),
    "return_indexer_topk": no(False),
    "return_meta_info": no(False),
    "return_cached_tokens_details": no(False),
    "routed_experts_prompt_start": no(0),
}
"""Extra information in an answer besides its text."""

PROMPTS: Mapping[str, Refused] = {
    "truncate_prompt_tokens": no(instead="shorten the prompt"),
    "prompt_embeds": no(),
    "input_embeds": no(),
    "image_data": no([], instead=TEXT_ONLY),
    "video_data": no([], instead=TEXT_ONLY),
    "audio_data": no([], instead=TEXT_ONLY),
    "lora_path": no(),
    "lora": no([]),
    "n_keep": no(0),
}
"""Changes to the prompt or the model."""

ENDINGS: Mapping[str, Refused] = {
    "stop_regex": no([], "", instead="use stop"),
    "structural_tag": no("", instead="use a JSON schema, a grammar, or tools with tool_choice"),
    "n_predict": no(-1, instead="use max_tokens"),
    "t_max_predict_ms": no(0, -1),
}
"""How an answer ends, or its form."""

COMMON: Mapping[str, Refused] = {**SAMPLERS, **REPORTS, **PROMPTS, **ENDINGS}
