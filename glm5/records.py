"""Records shared by packages: messages, samples, episodes and training rows. Plain data, no torch.

Token ids and log-probabilities are the ground truth from the moment a token is sampled until the gradient step; text is
only a view of them (token-in/token-out, §4.1 of the paper). Training never tokenises sampled text a second time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool. `arguments` keeps the order in which the model wrote them."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One message of a conversation in canonical form (see `glm5.chat.template.normalise` for foreign forms).

    `reasoning` is the text between `<think>` and `</think>`; None means that the turn has none. `train=False` keeps an
    assistant turn in the context but out of the loss (erroneous segments, §3.1).
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    train: bool = True


GrammarKind = Literal["json", "json_schema", "regex", "choice", "grammar", "tools", "any"]


@dataclass(frozen=True)
class GrammarSpec:
    """Required form of the answer. Plain text, so it can cross processes; `glm5.engine.grammar` compiles it.

    `value` is the JSON schema (as text), the regular expression, a JSON list of the choices, a grammar in the notation
    of Lark or in GBNF (`root ::= ...`), or a JSON list of tools in OpenAI function format, one of which must be called.
    It is empty for "json", which is any JSON object, and for "any", which only limits thinking. `many` allows several
    calls. `after_thinking` means that the prompt ends inside a think block: the grammar then starts after `</think>`,
    which is forced after at most `thinking_tokens` tokens (None: no limit, 0: at once).
    """

    kind: GrammarKind
    value: str = ""
    many: bool = False
    after_thinking: bool = False
    thinking_tokens: int | None = None


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature=0` is greedy; `top_k=0` means no limit. Stops are token ids or text.

    `seed=None` draws from the engine's own stream; with a seed the result is a function of (seed, sample index) alone.

    Applied in this order:
    - `repetition_penalty` divides positive and multiplies negative logits of all tokens so far (prompt too; 1: off);
    - `presence_penalty` is subtracted from logits of tokens in the answer so far, `frequency_penalty` per occurrence;
    - `logit_bias` adds to single ids (pairs of id and bias);
    - `grammar` allows only tokens that fit, `allowed_token_ids` only its ids (None: all); the two exclude each other;
    - no token may complete one of `bad_words` in the text of the answer, however that is cut into tokens; in the first
      `min_tokens` tokens there is no stop token and no stop string begins; both rules yield if no other token fits;
    - temperature, min_p, top_k, top_p.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None


@dataclass
class Completion:
    """The engine's output for one sample of one prompt.

    `token_ids` includes the stop token. `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution
    it was sampled from (after temperature); `weight_versions[i]` is the version of the weights that produced it.
    `finish_reason` is "stop" (a stop id or string), "length" (max_tokens or the context limit), "abort", or "error"
    (the engine could not compute it). `drafted` tokens were proposed by the MTP layer, `accepted` of them are in the
    sample.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_len: int = 0
    drafted: int = 0
    accepted: int = 0


class Outcome(enum.StrEnum):
    """How an episode ended. Only `ENV_ERROR` says nothing about the policy; such episodes are not trained on (§4.1)."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    ENV_ERROR = "env_error"


@dataclass(frozen=True)
class Turn:
    """One generation inside an episode, exactly as the engine saw it: ids in, ids out."""

    context_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: str


@dataclass
class Trajectory:
    """The record of one episode. `group` joins the samples of one problem; `detail` is for readers and reports;
    `teacher` names the prompt's teacher in distillation."""

    problem: str
    domain: str
    group: int
    turns: list[Turn]
    reward: float
    outcome: Outcome
    detail: dict[str, Any] = field(default_factory=dict)
    teacher: str = ""

    @property
    def weight_versions(self) -> tuple[int, ...]:
        return tuple(v for turn in self.turns for v in turn.weight_versions)


@dataclass
class TrainSample:
    """One token row for the learner. All lists have the length of `ids`.

    `loss_mask[i]` is True if the policy sampled token i (or it is a target in SFT) and it counts in the loss; otherwise
    `rollout_logprobs[i]` and `advantages[i]` are 0.0. `teacher_logprobs` is empty outside distillation. Token i is
    predicted from ids[:i].
    """

    ids: list[int]
    loss_mask: list[bool]
    rollout_logprobs: list[float]
    advantages: list[float]
    weight_versions: list[int]
    group: int = 0
    domain: str = ""
    teacher: str = ""
    teacher_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """Answer of an environment to one assistant message: new messages for the policy, or the end with a reward."""

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float = 0.0
    outcome: Outcome = Outcome.FAILED
    detail: Mapping[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One problem being solved. Single use: `start` once, then `step` until `done`."""

    problem: str
    domain: str

    def start(self) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]], bool]:
        """Opening messages, tool specifications (OpenAI function format) and whether the policy should think."""
        ...

    def step(self, message: Message | None) -> StepResult:
        """React to the policy's message; None means output that could not be parsed or was cut off. An environment with
        an attribute `takes_cut = True` gets what was cut off as a message."""
        ...


class Completer(Protocol):
    """Continues token ids: our engine, or a server over HTTP."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]: ...
