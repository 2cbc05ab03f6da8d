"""`GLM5Config`: the architecture in Hugging Face key names, and strict reading of a foreign `config.json`.

Sources: Table 10 of the paper and the released configurations. A value that a checkpoint defines has no silent default
if implementations are known to disagree (RoPE base, sparse attention on or off): it must be present or derivable.

Three kinds of file exist: `glm_moe_dsa` (MLA, with or without DSA), `glm4_moe` (the GQA model before it), and
`glm5_hybrid` for the efficient-attention variants of §2.1.2. The last is our own type, so no other tool takes a hybrid
model for one with full attention in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from glm5.config.keys import (
    ARCHITECTURES,
    BOOKKEEPING_KEYS,
    GQA_KEYS,
    GQA_SIZES,
    GQA_TYPE,
    HYBRID_TYPE,
    MLA_KEYS,
    MLA_SIZES,
    MODEL_TYPE,
    MOE_SIZES,
    MOST_EXPERTS,
    MOST_LAYERS,
    VARIANT_KEYS,
    Layers,
    Size,
    SizeOrNone,
)
from glm5.config.presets import PRESETS, SEARCHED_PATTERN
from glm5.config.rope import head_dim_of, rope_of
from glm5.errors import ConfigError, nearest
from glm5.files import read_small


class GLM5Config(BaseModel):
    """One GLM-5 model. Sizes are in elements; `rope_theta` is the RoPE base; token ids are vocabulary rows.

    `use_dsa=False` is the dense MLA model of pre-training: it has no indexer weights, and saves `index_topk: null`.
    `indexer_adapted=False` has indexers that no DSA stage has trained yet: attention is dense until one does (§2.1.1).
    `latent_norm_eps` is the epsilon of the two latent norms; public implementations disagree on it (1e-5 in serving
    stacks, 1e-6 in transformers).

    `attention_type="gqa"` is GLM-4.5's attention. Only it uses `num_key_value_heads`, `head_dim`, `use_qk_norm`,
    `partial_rotary_factor` and `attention_bias`; only MLA uses the latent and indexer sizes.

    `attention_pattern` has one letter per layer, F for full attention and S for `efficient_attention`; "interleave"
    (SFSF…) and "searched" (the paper's layout for 40 layers) are names for patterns. The efficient forms (§2.1.2) are a
    sliding window of `sliding_window` keys ("swa"), Gated DeltaNet ("gdn", with convolutions of `gdn_conv_kernel` taps)
    and SimpleGDN ("simple_gdn": decay and writing strength are the constants `simple_gdn_alpha`, `simple_gdn_beta`).

    `rotated_residual`: the residual stream is rotated, and the final norms turn it back (see `glm5.quant.rotation`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    moe_intermediate_size: SizeOrNone = 0
    num_hidden_layers: Layers
    num_attention_heads: Size
    attention_type: Literal["mla", "gqa"] = "mla"
    q_lora_rank: SizeOrNone = 0
    kv_lora_rank: SizeOrNone = 0
    qk_nope_head_dim: SizeOrNone = 0
    qk_rope_head_dim: SizeOrNone = 0
    v_head_dim: SizeOrNone = 0
    num_key_value_heads: SizeOrNone = 0
    head_dim: SizeOrNone = 0
    use_qk_norm: bool = False
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    first_k_dense_replace: int
    n_routed_experts: SizeOrNone = 0
    num_experts_per_tok: SizeOrNone = 0
    n_shared_experts: SizeOrNone = 1
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    scoring_func: Literal["sigmoid"] = "sigmoid"
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    use_dsa: bool = True
    index_n_heads: Size = 32
    index_head_dim: Size = 128
    index_topk: Size | None = 2048
    indexer_adapted: bool = True
    indexer_types: tuple[Literal["full", "shared"], ...] = ()
    index_topk_freq: Size = 1
    index_skip_topk_offset: int = 2
    index_topk_pattern: str | None = None
    rope_theta: PositiveFloat
    rope_interleave: Literal[True] = True
    indexer_rope_interleave: Literal[True] = True
    max_position_embeddings: Size
    rms_norm_eps: PositiveFloat = 1e-5
    latent_norm_eps: PositiveFloat = 1e-5
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    tie_word_embeddings: Literal[False] = False
    initializer_range: NonNegativeFloat = 0.02
    num_nextn_predict_layers: int = 0
    eos_token_id: tuple[NonNegativeInt, ...] = ()
    pad_token_id: NonNegativeInt | None = None
    attention_pattern: str = ""
    efficient_attention: Literal["swa", "gdn", "simple_gdn"] | None = None
    sliding_window: Size = 4096
    gdn_conv_kernel: Size = 4
    simple_gdn_alpha: Annotated[float, Field(gt=0, le=1)] = 1.0
    simple_gdn_beta: Annotated[NonNegativeFloat, Field(le=2)] = 1.0
    rotated_residual: bool = False

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, values: Any) -> Any:
        """Turn DSA off for GQA, and named patterns into letters."""
        if not isinstance(values, dict):
            return values
        if values.get("attention_type") == "gqa":
            values = {"use_dsa": False, "index_topk": None, **values}
        pattern, layers = values.get("attention_pattern"), values.get("num_hidden_layers")
        if pattern == "interleave" and isinstance(layers, int) and layers <= MOST_LAYERS:
            values = {**values, "attention_pattern": ("SF" * layers)[: max(layers, 0)]}
        elif pattern == "searched":
            values = {**values, "attention_pattern": SEARCHED_PATTERN}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.attention_type == "gqa":
            self._check_gqa()
        else:
            self._check_mla()
        self._check_variant()
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError("first_k_dense_replace must be between 0 and num_hidden_layers")
        if self.num_nextn_predict_layers not in (0, 1):
            raise ValueError("num_nextn_predict_layers must be 0 or 1: GLM-5 shares one MTP layer over all depths")
        if self.first_k_dense_replace < self.num_hidden_layers or self.num_nextn_predict_layers:
            self._require(MOE_SIZES)
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError("num_experts_per_tok cannot exceed n_routed_experts")
        if self.num_hidden_layers * self.n_routed_experts > MOST_EXPERTS:
            raise ValueError(f"num_hidden_layers * n_routed_experts cannot exceed {MOST_EXPERTS:,}")
        cached = self.cache_values_per_token + (self.index_head_dim if self.use_dsa else 0)
        if cached > 16 * self.hidden_size + 1024:  # a file of some kilobytes could ask for gigabytes of cache
            raise ValueError(
                f"a layer caches {cached:,} numbers per token, far too many for hidden_size {self.hidden_size}"
            )
        return self

    def _require(self, names: tuple[str, ...]) -> None:
        """Raise ValueError for one of these sizes that is 0 or not given: this architecture needs them."""
        for name in names:
            if not getattr(self, name):
                given = name in self.model_fields_set
                raise ValueError(f"{name}: " + ("Input should be greater than 0" if given else "Field required"))

    def _forbid(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} is not allowed if attention_type is "{self.attention_type}"')

    def _check_gqa(self) -> None:
        if self.use_dsa:
            raise ValueError('use_dsa: sparse attention selects MLA latents; attention_type "gqa" has none')
        self._require(GQA_SIZES)
        self._forbid(MLA_SIZES)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError("head_dim * partial_rotary_factor must be a positive even number")

    def _check_mla(self) -> None:
        self._require(MLA_SIZES)
        self._forbid(GQA_KEYS)
        if self.attention_bias:
            raise ValueError('attention_bias: Input should be False if attention_type is "mla" (got True)')
        if self.use_dsa and self.index_topk is None:
            raise ValueError("index_topk must be a number if use_dsa is true")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ValueError("qk_rope_head_dim must be even and at most index_head_dim")
        if self.indexer_types and len(self.indexer_types) != self.num_hidden_layers:
            raise ValueError("indexer_types needs one entry per layer")
        pattern = self.index_topk_pattern
        if pattern is not None and (len(pattern) != self.num_hidden_layers or set(pattern) - {"F", "S"}):
            raise ValueError("index_topk_pattern needs one letter, F or S, per layer")
        if self.use_dsa and not self.computes_topk(0):
            raise ValueError('layer 0 cannot be "shared": no layer before it computes top-k indices')

    def _check_variant(self) -> None:
        if bool(self.attention_pattern) != bool(self.efficient_attention):
            raise ValueError("attention_pattern and efficient_attention need each other: set both or neither")
        if not self.attention_pattern:
            return
        if len(self.attention_pattern) != self.num_hidden_layers or set(self.attention_pattern) - {"F", "S"}:
            raise ValueError(
                f"attention_pattern needs one letter, F (full) or S (efficient), for each of {self.num_hidden_layers} "
                f'layers, or "interleave", or for 40 layers "searched"; it has {len(self.attention_pattern)} letters'
            )
        if self.use_dsa:
            raise ValueError("attention_pattern goes with dense attention; set use_dsa to false")
        if self.efficient_attention != "swa" and self.attention_type != "gqa":
            raise ValueError(f'efficient_attention "{self.efficient_attention}" needs attention_type "gqa"')

    @property
    def selects_keys(self) -> bool:
        """Whether attention is sparse: there are indexers, and a DSA stage has trained them."""
        return self.use_dsa and self.indexer_adapted

    @property
    def qk_head_dim(self) -> int:
        """Width of one query/key head: non-rotary plus rotary part."""
        return self.head_dim if self.attention_type == "gqa" else self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """How many elements of a query/key head RoPE rotates: the first ones for GQA, the last ones for MLA."""
        gqa = self.attention_type == "gqa"
        return int(self.head_dim * self.partial_rotary_factor) if gqa else self.qk_rope_head_dim

    @property
    def cache_values_per_token(self) -> int:
        """Elements that one attention layer caches per token: keys and values (GQA) or one latent (MLA)."""
        if self.attention_type == "gqa":
            return 2 * self.num_key_value_heads * self.head_dim
        return self.kv_lora_rank + self.qk_rope_head_dim

    def attention_kind(self, layer: int) -> str:
        """One of "full", "swa", "gdn", "simple_gdn"; the MTP layer (index num_hidden_layers) is always "full"."""
        efficient = self.attention_pattern[layer : layer + 1] == "S"
        return self.efficient_attention if efficient and self.efficient_attention else "full"

    def window(self, layer: int) -> int | None:
        """How many keys, its own included, a query of this layer attends to; None = all."""
        return self.sliding_window if self.attention_kind(layer) == "swa" else None

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps one state and caches no keys."""
        return self.attention_kind(layer) in ("gdn", "simple_gdn")

    @property
    def has_recurrent_layers(self) -> bool:
        """Such models cannot return to an earlier position: no shared prefixes, no rejected drafts."""
        return any(self.is_recurrent(layer) for layer in range(self.num_hidden_layers))

    @property
    def model_type(self) -> str:
        """The model type in `config.json`."""
        if self.attention_pattern:
            return HYBRID_TYPE
        return GQA_TYPE if self.attention_type == "gqa" else MODEL_TYPE

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
        return self._by_frequency(layer)

    def _by_frequency(self, layer: int) -> bool:
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def caches_index_keys(self, layer: int) -> bool:
        """Whether a layer selects keys itself, and so caches an index key of every token."""
        return self.selects_keys and self.computes_topk(layer) and not self.is_recurrent(layer)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GLM5Config:
        """A named architecture, e.g. `GLM5Config.preset("tiny", vocab_size=4096)`."""
        if name not in PRESETS:
            raise ConfigError(f'Unknown preset "{name}"{nearest(name, PRESETS)}; known: {", ".join(sorted(PRESETS))}.')
        return cls.build({**PRESETS[name], **overrides}, where=f'preset "{name}"')

    @classmethod
    def build(cls, values: Mapping[str, Any], where: str) -> GLM5Config:
        """Validate a mapping of our own keys; every error is one sentence that names `where`."""
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

        Bookkeeping keys are ignored; any other unknown key is an error unless `strict=False`. `overrides` win.
        """
        kind = raw.get("model_type", MODEL_TYPE)
        if kind not in (MODEL_TYPE, GQA_TYPE, HYBRID_TYPE):
            types = f"{MODEL_TYPE}, {GQA_TYPE} or {HYBRID_TYPE}"
            raise ConfigError(f'{where}: model_type "{kind}" is not {types}; the checkpoint has another architecture.')
        gqa = kind == GQA_TYPE or (kind == HYBRID_TYPE and raw.get("attention_type") == "gqa")
        fields = cls.model_fields.keys() - (MLA_KEYS if gqa else GQA_KEYS)
        fields -= VARIANT_KEYS if kind != HYBRID_TYPE else set()
        values = {key: value for key, value in raw.items() if key in fields}
        unknown = [key for key in raw if key not in fields and key not in BOOKKEEPING_KEYS]
        unknown = [key for key in unknown if key not in ("rope_parameters", "qk_head_dim", "strict_config")]
        if unknown and strict:
            known = [*fields, *BOOKKEEPING_KEYS]
            raise ConfigError(
                f'{where}: unknown key "{unknown[0]}"{nearest(unknown[0], known)}; strict_config=False ignores it.'
            )
        values.update(rope_of(raw, where, gqa))
        nope, rope, whole = (raw.get(f"qk_{part}head_dim") for part in ("nope_", "rope_", ""))
        if whole is not None and isinstance(nope, int) and isinstance(rope, int) and whole != nope + rope:
            raise ConfigError(f"{where}: qk_head_dim is not qk_nope_head_dim + qk_rope_head_dim.")
        if gqa:
            values = {"head_dim": head_dim_of(raw), "routed_scaling_factor": 1.0, **values, "attention_type": "gqa"}
        else:
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
            raw = json.loads(read_small(path, _MAX_FILE_BYTES).decode("utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{path} does not exist; give a checkpoint directory that contains config.json."
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path} is not valid JSON ({error}).") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must contain one JSON object.")
        return cls.from_dict(raw, str(path), strict=strict, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that other tools read: Hugging Face names, redundant keys kept consistent."""
        gqa = self.attention_type == "gqa"
        foreign = MLA_KEYS if gqa else GQA_KEYS | {"use_dsa", "indexer_adapted", "indexer_types", "latent_norm_eps"}
        values = self.model_dump(exclude={"rope_theta", "rotated_residual", *VARIANT_KEYS, *foreign})
        if self.rotated_residual:
            values["rotated_residual"] = True
        values["rope_parameters"] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        values["eos_token_id"] = list(self.eos_token_id) or None
        if gqa:
            values["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
        elif not self.use_dsa:
            values["index_topk"] = None
            values["use_dsa"] = False
        else:
            layers = range(self.num_hidden_layers)
            own = [self.computes_topk(layer) for layer in layers]
            values["indexer_types"] = ["full" if full else "shared" for full in own]
            if own != [self._by_frequency(layer) for layer in layers]:  # vLLM reads the pattern, not the types
                values["index_topk_pattern"] = "".join("F" if full else "S" for full in own)
            elif self.indexer_types:
                values["index_topk_pattern"] = None
            if not self.indexer_adapted:
                values["indexer_adapted"] = False
        if self.latent_norm_eps != 1e-5 and not gqa:
            values["latent_norm_eps"] = self.latent_norm_eps
        values |= {"architectures": [ARCHITECTURES[self.model_type]], "model_type": self.model_type}
        if not gqa:
            values["num_key_value_heads"] = self.num_attention_heads
            values["qk_head_dim"] = self.qk_head_dim
            values["head_dim"] = self.qk_rope_head_dim
            values["moe_layer_freq"] = 1  # SGLang does not start without it
        values["attention_dropout"] = 0.0
        if self.attention_pattern:
            values |= self.model_dump(include=set(VARIANT_KEYS))
        return values


_MAX_FILE_BYTES = 4 << 20
_NULLABLE = ("index_topk", "pad_token_id", "index_topk_pattern")
