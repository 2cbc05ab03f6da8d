"""Inference: token ids in; token ids, log-probabilities and weight versions out."""
