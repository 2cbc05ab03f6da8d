"""Results of a run for readers: one self-contained HTML page and a table for the terminal. Does not import torch."""

from glm5.report.report import build_report
from glm5.report.skills import forgetting, recovered
from glm5.report.terminal import summary_table

__all__ = ["build_report", "forgetting", "recovered", "summary_table"]
