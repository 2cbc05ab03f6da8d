"""An evaluation suite as data: which problems, asked how, and scored by what (§6, Appendix B)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from glm5.config.schema import Frozen


class SuitePart(Frozen):
    """Problems of one task family, scored together."""

    name: str
    family: str
    options: dict[str, Any] = {}
    max_tokens: int | None = Field(None, ge=1)
    """None: the suite's."""


class Suite(Frozen):
    """Parts of a suite, and how models are asked. Its score is the mean over the parts, each counted alike."""

    title: str
    source: str = ""
    """Where tasks and settings were published."""
    note: str = ""
    """What a reader of the scores must know."""
    measure: Literal["solved", "reward", "dollars"] = "solved"
    """Score of a problem: whether it was solved; its reward, from 0 to 1; or its reward as an amount without bounds."""
    problems: int = Field(100, ge=1)
    """Distinct held-out problems per part; of files with fewer, all."""
    repeats: int = Field(1, ge=1)
    """Answers per problem; a problem's score is their mean."""
    all_of: list[Annotated[int, Field(ge=1)]] = []
    """The k of pass^k, the share of problems that k answers in a row all solve; none may be above `repeats`."""
    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(1024, ge=1)
    """Of one reply, thoughts included."""
    plain: bool = False
    """Prompts are continued as text, without a chat template: for base models."""
    stop: list[str] = []
    """Texts that end a reply."""
    max_turns: int = Field(1, ge=1)
    max_context: int | None = Field(None, ge=2)
    """Prompt and replies together; None: as many positions as the model has. Servers have limits of their own."""
    context: Literal["none", "keep-recent", "discard-all", "hierarchical"] = "none"
    """What of a long conversation goes into the next prompt (`glm5.agents.context`)."""
    keep: int = Field(5, ge=0)
    """The latest results of tools that keep-recent and hierarchical leave in the prompt."""
    discard_above: int = Field(0, ge=0)
    """Tokens of a prompt above which discard-all and hierarchical start again; 0: the mode's default."""
    render_tools: bool = True
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    """Options whose values are all tried: every part is scored with each, and the results are told apart by them."""
    parts: list[SuitePart] = Field(min_length=1)

    @model_validator(mode="after")
    def _results_are_told_apart(self) -> Self:
        if max(self.all_of, default=1) > self.repeats:
            raise ValueError(f"pass^{max(self.all_of)} needs at least as many repeats, not {self.repeats}")
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise ValueError("two parts have the same name")
        for option, values in self.grid.items():
            if len({str(value) for value in values}) < len(values):
                raise ValueError(f"{option} has a value twice")
        return self
