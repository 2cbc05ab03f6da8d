"""OpenAI: chat completions, completions, responses, models."""
