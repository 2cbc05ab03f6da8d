"""Native, compatible with SGLang: generation on token ids, and control of the engine for a trainer."""
