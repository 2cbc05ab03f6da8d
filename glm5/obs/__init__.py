"""Observability of a run: logs (`logs`), metrics (`metrics`, `sinks`) and progress (`progress`). No import of torch."""

from glm5.obs.logs import get_logger, logged, setup_logging
from glm5.obs.metrics import Metrics, MetricsLog, MetricsWriter, NullMetrics, open_metrics, read_metrics
from glm5.obs.progress import PipelineProgress
from glm5.obs.sinks import check_sinks

__all__ = [
    "Metrics",
    "MetricsLog",
    "MetricsWriter",
    "NullMetrics",
    "PipelineProgress",
    "check_sinks",
    "get_logger",
    "logged",
    "open_metrics",
    "read_metrics",
    "setup_logging",
]
