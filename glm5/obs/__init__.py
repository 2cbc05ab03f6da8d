"""What a run tells: logs (`logs`), numbers (`metrics`) and where it stands (`progress`). Free of torch."""

from glm5.obs.logs import get_logger, setup_logging
from glm5.obs.metrics import MetricsWriter, read_metrics
from glm5.obs.progress import PipelineProgress

__all__ = ["MetricsWriter", "PipelineProgress", "get_logger", "read_metrics", "setup_logging"]
