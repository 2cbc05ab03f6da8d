"""Sampling parameters in the form of SGLang's native API."""

from __future__ import annotations

from typing import Any

from glm5.records import SamplingParams
from glm5.serve.errors import ApiError


def native_params(params: SamplingParams, every: int = 1) -> dict[str, Any]:
    """Convert to `sampling_params` of SGLang's `/generate`. Raises ApiError for a parameter that it does not
    support. `every`: number of tokens per event of a stream."""
    if params.grammar is not None and params.grammar.kind != "any":  # "any" only limits thinking
        text = "With engines over HTTP, an output format or a forced tool is not supported; remove it."
        raise ApiError(400, text, param="response_format", code="unsupported")
    for name in ("logit_bias", "allowed_token_ids", "bad_words"):
        if getattr(params, name):
            text = f"With engines over HTTP, {name} is not supported; remove it."
            raise ApiError(400, text, param=name, code="unsupported")
    sent: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    for name in ("presence_penalty", "frequency_penalty"):
        sent |= {name: value} if (value := getattr(params, name)) else {}
    sent |= {"repetition_penalty": params.repetition_penalty} if params.repetition_penalty != 1 else {}
    sent |= {"stream_interval": every} if every > 1 else {}
    sent |= {"min_new_tokens": params.min_tokens} if params.min_tokens else {}
    return sent | ({} if params.seed is None else {"sampling_seed": params.seed})
