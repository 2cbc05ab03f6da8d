"""Quantization of checkpoints (§5): rotation, smoothing, calibration, schemes, formats."""
