"""Values of `config.json` that files write in several ways: the head width of GQA, and RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.errors import ConfigError

_PLAIN_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def head_dim_of(raw: Mapping[str, Any]) -> int | None:
    """The meaning of an absent `head_dim` in GQA files."""
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def rope_of(raw: Mapping[str, Any], where: str, gqa: bool) -> dict[str, Any]:
    """The RoPE base from its nested or top-level key. Refuses scaling types that GLM-5 does not use."""
    nested = raw.get("rope_parameters") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{where}: rope_parameters must be an object.")
    scaled = [key for key in nested if key not in _PLAIN_ROPE and nested[key] is not None]
    kinds = {nested.get(key) or "default" for key in ("rope_type", "type")}  # older files say "type"
    if kinds != {"default"} or scaled or raw.get("rope_scaling"):
        raise ConfigError(
            f"{where}: only plain RoPE (rope_type default) is supported for this architecture"
            + (f", so remove {scaled[0]}." if scaled else ".")
        )
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{where}: rope_theta is missing and has no default; set it in rope_parameters.")
    if not gqa:
        return {"rope_theta": theta}
    # An absent factor means 0.5 in these files: reading it as 1 would rotate the wrong half of every head.
    return {
        "rope_theta": theta,
        "partial_rotary_factor": nested.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.5)),
    }
