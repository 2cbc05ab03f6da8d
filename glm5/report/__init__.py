"""What a run gave, for people: one self-contained HTML page and a table for the terminal. Free of torch."""

from glm5.report.report import build_report
from glm5.report.skills import forgetting, recovered
from glm5.report.terminal import summary_table

__all__ = ["build_report", "forgetting", "recovered", "summary_table"]
