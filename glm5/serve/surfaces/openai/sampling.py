"""Fields that both OpenAI endpoints share: sampling, streaming and the form of the answer."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import Field, model_validator

from glm5.records import GrammarSpec
from glm5.serve.errors import ApiError
from glm5.serve.surfaces.fields import Fields, no
from glm5.serve.surfaces.schema import Count, Sampling, Stop, Stops, Texts


class StreamOptions(Fields):
    """`stream_options` of the OpenAI surface. `continuous_usage_stats` puts the usage so far into every chunk."""

    IGNORED = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Fields):
    """`structured_outputs` of vLLM: at most one of its fields. JSON here never contains free white space."""

    IGNORED = frozenset({"disable_any_whitespace", "disable_fallback", "backend"})
    REFUSED = {
        "structural_tag": no("", instead="use a JSON schema, a grammar, or tools with tool_choice"),
        "whitespace_pattern": no(""),
        "disable_additional_properties": no(False, instead="set additionalProperties in the schema"),
    }

    schema_text: dict[str, Any] | str = Field(default="", alias="json")
    regex: str = ""
    choice: Texts | None = None
    grammar: str = ""
    json_object: bool = False


class OpenAISampling(Sampling):
    """Common fields of both OpenAI endpoints: sampling, streaming and the form of the answer. The form can also be
    given by fields of other servers: `structured_outputs`, `guided_*` (vLLM), `regex`, `ebnf` (SGLang), `grammar`,
    `json_schema` (llama.cpp). Grammars are in Lark's notation or in GBNF. `do_sample: false` (z.ai) is greedy."""

    max_tokens: Count | None = None
    n: int = Field(default=1, ge=1, le=128)
    stop: Stop | Stops = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    do_sample: bool = True
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: dict[str, Any] | str = ""
    guided_regex: str = ""
    guided_choice: Texts | None = None
    guided_grammar: str = ""
    regex: str = ""
    ebnf: str = ""
    grammar_text: str = Field(default="", alias="grammar")
    schema_object: dict[str, Any] | str = Field(default="", alias="json_schema")

    def form(self) -> GrammarSpec | None:
        """The grammar of these fields. Raises ApiError for more than one."""
        asked = self.structured_outputs
        schemas = (asked.schema_text, self.guided_json, self.schema_object)
        choices, grammars = (asked.choice, self.guided_choice), (asked.grammar, self.guided_grammar)
        found = [GrammarSpec("json_schema", s if isinstance(s, str) else json.dumps(s)) for s in schemas if s != ""]
        found += [GrammarSpec("regex", r) for r in (asked.regex, self.guided_regex, self.regex) if r]
        found += [GrammarSpec("choice", json.dumps(c)) for c in choices if c is not None]
        found += [GrammarSpec("grammar", g) for g in (*grammars, self.ebnf, self.grammar_text) if g]
        found += [GrammarSpec("json")] * asked.json_object
        if len(found) > 1:
            text = "An answer can have one output format; give one of json, regex, choice, grammar and json_object."
            raise ApiError(400, text, param="structured_outputs")
        return found[0] if found else None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def samples(self) -> int:
        return self.n

    def limit(self) -> int | None:
        return self.max_tokens

    @model_validator(mode="after")
    def _consistent_options(self) -> Self:
        if (self.stream_options.include_usage or self.stream_options.continuous_usage_stats) and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if not self.do_sample:
            self.temperature = 0.0
        return self
