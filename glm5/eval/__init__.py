"""Evaluation suites over a model or its engine; every score comes with an interval."""
