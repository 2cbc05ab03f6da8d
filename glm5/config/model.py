"""`GLM5Config`: the architecture in Hugging Face key names, the presets, and strict reading of a foreign `config.json`.

Sources: Table 10 of the paper and the released configurations. A value that a checkpoint defines has no silent default
where implementations are known to disagree (RoPE base, sparse attention on or off): it must be present or derivable.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from glm5.errors import ConfigError, nearest

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsaForCausalLM"

# Keys that released or re-saved configurations carry and that do not change the forward pass.
BOOKKEEPING_KEYS = frozenset(
    "architectures model_type transformers_version dtype torch_dtype use_cache ep_size pretraining_tp moe_layer_freq "
    "moe_router_dtype num_key_value_heads head_dim mlp_layer_types mlp_bias num_experts layer_types attention_dropout "
    "bos_token_id index_share_for_mtp_iteration auto_map quantization_config output_hidden_states return_dict "
    "output_attentions chunk_size_feed_forward is_encoder_decoder problem_type id2label label2id _name_or_path "
    "output_router_logits router_aux_loss_coef use_sliding_window partial_rotary_factor num_local_experts "
    "rope_scaling add_cross_attention cross_attention_hidden_size".split()
)


class GLM5Config(BaseModel):
    """One GLM-5 model. Sizes are in elements; `rope_theta` is the RoPE base; token ids are vocabulary rows.

    `use_dsa=False` is the dense MLA model of pre-training: it has no indexer weights, and saves `index_topk: null`.
    `latent_norm_eps` is the epsilon of the two latent norms, where public implementations disagree (1e-5 in serving
    stacks, 1e-6 in transformers).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    first_k_dense_replace: int
    n_routed_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    n_shared_experts: NonNegativeInt = 1
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    use_dsa: bool = True
    index_n_heads: PositiveInt = 32
    index_head_dim: PositiveInt = 128
    index_topk: PositiveInt | None = 2048
    indexer_types: tuple[Literal["full", "shared"], ...] = ()
    index_topk_freq: PositiveInt = 1
    index_skip_topk_offset: int = 2
    index_topk_pattern: str | None = None
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rope_interleave: Literal[True] = True
    indexer_rope_interleave: Literal[True] = True
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-5
    latent_norm_eps: PositiveFloat = 1e-5
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    tie_word_embeddings: Literal[False] = False
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 0
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.use_dsa and self.index_topk is None:
            raise ValueError("index_topk must be a number where use_dsa is true")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ValueError("qk_rope_head_dim must be even and at most index_head_dim")
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError("first_k_dense_replace must lie between 0 and num_hidden_layers")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError("num_experts_per_tok cannot exceed n_routed_experts")
        if self.num_nextn_predict_layers not in (0, 1):
            raise ValueError("num_nextn_predict_layers must be 0 or 1: GLM-5 shares one MTP layer over all depths")
        if self.indexer_types and len(self.indexer_types) != self.num_hidden_layers:
            raise ValueError("indexer_types needs one entry per layer")
        pattern = self.index_topk_pattern
        if pattern is not None and (len(pattern) != self.num_hidden_layers or set(pattern) - {"F", "S"}):
            raise ValueError("index_topk_pattern needs one letter, F or S, per layer")
        if self.use_dsa and not self.computes_topk(0):
            raise ValueError('layer 0 cannot be "shared": no layer before it computes top-k indices')
        return self

    @property
    def qk_head_dim(self) -> int:
        """Width of one query/key head: non-rotary plus rotary part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_dense_layer(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is one dense MLP; the MTP layer (index num_hidden_layers) never is."""
        return layer < self.first_k_dense_replace

    def computes_topk(self, layer: int) -> bool:
        """Whether a layer runs its own indexer (IndexShare "full"); the MTP layer always does."""
        if layer >= self.num_hidden_layers:
            return True
        if self.indexer_types:
            return self.indexer_types[layer] == "full"
        if self.index_topk_pattern:
            return self.index_topk_pattern[layer] == "F"
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GLM5Config:
        """A named architecture, e.g. `GLM5Config.preset("tiny", vocab_size=4096)`."""
        if name not in PRESETS:
            raise ConfigError(f'Unknown preset "{name}"{nearest(name, PRESETS)}; known: {", ".join(sorted(PRESETS))}.')
        return cls.build({**PRESETS[name], **overrides}, where=f'preset "{name}"')

    @classmethod
    def build(cls, values: Mapping[str, Any], where: str) -> GLM5Config:
        """Validate a mapping of our own keys; every problem becomes one sentence that names `where`."""
        for key in values:
            if key not in cls.model_fields:
                raise ConfigError(f'{where}: unknown key "{key}"{nearest(key, cls.model_fields)}.')
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Value error, ")
            if first["loc"]:
                got = "" if first["type"] == "missing" else f" (got {first['input']!r:.80})"
                message = f"{'.'.join(str(part) for part in first['loc'])}: {message}{got}"
            raise ConfigError(f"{where}: {message}.") from None

    def replace(self, **changes: Any) -> GLM5Config:
        """A copy with some keys changed, validated again."""
        return type(self).build({**self.model_dump(), **changes}, where="configuration")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str, *, strict: bool = True, **overrides: Any) -> GLM5Config:
        """Read a Hugging Face `config.json` object.

        Bookkeeping keys are ignored, any other unknown key is an error unless `strict=False`. `overrides` win.
        """
        if raw.get("model_type", MODEL_TYPE) != MODEL_TYPE:
            raise ConfigError(f'{where}: model_type "{raw["model_type"]}" is not {MODEL_TYPE}; this is another model.')
        values = {key: value for key, value in raw.items() if key in cls.model_fields}
        unknown = [key for key in raw if key not in cls.model_fields and key not in BOOKKEEPING_KEYS]
        unknown = [key for key in unknown if key not in ("rope_parameters", "qk_head_dim", "strict_config")]
        if unknown and strict:
            known = [*cls.model_fields, *BOOKKEEPING_KEYS]
            raise ConfigError(
                f'{where}: unknown key "{unknown[0]}"{nearest(unknown[0], known)}; strict_config=False ignores it.'
            )
        values.update(_rope(raw, where))
        nope, rope, whole = (raw.get(f"qk_{part}head_dim") for part in ("nope_", "rope_", ""))
        if whole is not None and isinstance(nope, int) and isinstance(rope, int) and whole != nope + rope:
            raise ConfigError(f"{where}: qk_head_dim is not qk_nope_head_dim + qk_rope_head_dim.")
        values.setdefault("use_dsa", values.get("index_topk", 2048) is not None)
        eos = values.get("eos_token_id")
        if isinstance(eos, int):
            values["eos_token_id"] = (eos,)
        elif eos is None:
            values.pop("eos_token_id", None)
        return cls.build({**{k: v for k, v in values.items() if v is not None or k in _NULLABLE}, **overrides}, where)

    @classmethod
    def load(cls, directory: str | Path, *, strict: bool = True, **overrides: Any) -> GLM5Config:
        """Read `directory/config.json`."""
        path = Path(directory) / "config.json"
        try:
            if path.stat().st_size > 4 << 20:
                raise ConfigError(f"{path} is larger than 4 MiB; this is not a model configuration.")
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path} does not exist; name a checkpoint directory that holds config.json.") from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON ({error}).") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold one JSON object.")
        return cls.from_dict(raw, str(path), strict=strict, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that other tools read: Hugging Face names, redundant keys kept consistent."""
        values = self.model_dump(exclude={"rope_theta", "use_dsa", "indexer_types", "latent_norm_eps"})
        values["rope_parameters"] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        values["eos_token_id"] = list(self.eos_token_id) or None
        if not self.use_dsa:
            values["index_topk"] = None
            values["use_dsa"] = False
        else:
            layers = range(self.num_hidden_layers)
            values["indexer_types"] = ["full" if self.computes_topk(layer) else "shared" for layer in layers]
        if self.latent_norm_eps != 1e-5:
            values["latent_norm_eps"] = self.latent_norm_eps
        values |= {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_head_dim,
            "head_dim": self.qk_rope_head_dim,
            "attention_dropout": 0.0,
        }
        return values


_NULLABLE = ("index_topk", "pad_token_id", "index_topk_pattern")


def _rope(raw: Mapping[str, Any], where: str) -> dict[str, float]:
    """The RoPE base from its nested or top-level key; scaling types that GLM-5 does not use are refused."""
    nested = raw.get("rope_parameters") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"{where}: rope_parameters must be an object.")
    if nested.get("rope_type", "default") != "default" or raw.get("rope_scaling"):
        raise ConfigError(f"{where}: only plain RoPE (rope_type default) exists for this architecture.")
    theta = nested.get("rope_theta", raw.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{where}: rope_theta is missing; no default is safe, so set it in rope_parameters.")
    return {"rope_theta": theta}


_GLM5: dict[str, Any] = dict(
    vocab_size=154_880,
    hidden_size=6144,
    intermediate_size=12_288,
    moe_intermediate_size=2048,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    first_k_dense_replace=3,
    n_routed_experts=256,
    num_experts_per_tok=8,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    rope_theta=1e6,
    max_position_embeddings=202_752,
    num_nextn_predict_layers=1,
    eos_token_id=(154_820, 154_827, 154_829),
    pad_token_id=154_820,
)

PRESETS: dict[str, dict[str, Any]] = {
    "glm5": _GLM5,
    "glm5.2": {
        **_GLM5,
        "rope_theta": 8e6,
        "max_position_embeddings": 1_048_576,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    },
    "glm4.7-flash": {
        **_GLM5,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "q_lora_rank": 768,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "use_dsa": False,
        "index_topk": None,
    },
    "tiny": dict(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=4,
        index_n_heads=16,
        index_head_dim=64,
        index_topk=256,
        rope_theta=1e4,
        max_position_embeddings=16_384,
        num_nextn_predict_layers=1,
    ),
    "nano": dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=320,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=32,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=32,
        rope_theta=1e4,
        max_position_embeddings=4096,
        num_nextn_predict_layers=1,
    ),
}
