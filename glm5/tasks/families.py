"""The register of task families. Add your own with `FAMILIES.add` or an entry point in "glm5.families"."""

from __future__ import annotations

from typing import Any

from glm5.register import Register
from glm5.tasks.agents import AgentFamily
from glm5.tasks.cc_bench.chained import ChainedFamily
from glm5.tasks.cc_bench.exploration import ExplorationFamily
from glm5.tasks.cc_bench.frontend import FrontendFamily
from glm5.tasks.coding.benchmark import EvalPlusFamily, LiveCodeFamily
from glm5.tasks.coding.bugfix import BugfixFamily
from glm5.tasks.coding.generation import CodeFamily
from glm5.tasks.contract import Family
from glm5.tasks.dialogue.family import DialogueFamily
from glm5.tasks.general.family import AssistantFamily
from glm5.tasks.harbor.family import RoomFamily, SweFamily
from glm5.tasks.instructions.family import InstructionFamily
from glm5.tasks.instructions.general import GeneralFamily
from glm5.tasks.judged_rows import JudgedFamily
from glm5.tasks.long_context.families import MrcrFamily, RulerFamily
from glm5.tasks.mathematics.arithmetic import ArithmeticFamily
from glm5.tasks.mathematics.family import MathFamily
from glm5.tasks.mcp.atlas import AtlasFamily
from glm5.tasks.mcp.decathlon import DecathlonFamily
from glm5.tasks.questions import QuestionsFamily
from glm5.tasks.remote import RemoteFamily
from glm5.tasks.science.family import ScienceFamily
from glm5.tasks.search.benchmark import BrowseCompFamily
from glm5.tasks.search.family import SearchFamily
from glm5.tasks.slides.family import SlidesFamily
from glm5.tasks.tools.python_tool import PythonToolFamily
from glm5.tasks.tools.rows import ToolRowsFamily
from glm5.tasks.tools.toolcall import ToolCallFamily
from glm5.tasks.vending.family import VendingFamily
from glm5.tasks.verifiers_adapter import VerifiersFamily

FAMILIES: Register[Family] = Register(
    "glm5.families",
    "task family",
    Family,
    {
        "agent": AgentFamily,
        "arithmetic": ArithmeticFamily,
        "assistant": AssistantFamily,
        "browsecomp": BrowseCompFamily,
        "bugfix": BugfixFamily,
        "chained": ChainedFamily,
        "code": CodeFamily,
        "dialogue": DialogueFamily,
        "evalplus": EvalPlusFamily,
        "exploration": ExplorationFamily,
        "frontend": FrontendFamily,
        "general": GeneralFamily,
        "instructions": InstructionFamily,
        "judged": JudgedFamily,
        "livecodebench": LiveCodeFamily,
        "math": MathFamily,
        "mcp_atlas": AtlasFamily,
        "mrcr": MrcrFamily,
        "python_tool": PythonToolFamily,
        "questions": QuestionsFamily,
        "remote": RemoteFamily,
        "ruler": RulerFamily,
        "science": ScienceFamily,
        "search": SearchFamily,
        "slides": SlidesFamily,
        "swe": SweFamily,
        "terminal": RoomFamily,
        "tool_decathlon": DecathlonFamily,
        "toolcall": ToolCallFamily,
        "toolcall_rows": ToolRowsFamily,
        "vending": VendingFamily,
        "verifiers": VerifiersFamily,
    },
)


def make_family(name: str, seed: int = 0, **options: Any) -> Family:
    """The family `name` with its own options (see its class). Raises ConfigError for an unknown name, and for options
    that the family does not accept."""
    return FAMILIES.make(name, lambda family: family(seed, **options), options)  # type: ignore[call-arg]
