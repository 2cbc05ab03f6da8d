"""Evaluation suites for a model or an engine; every score has a confidence interval."""
