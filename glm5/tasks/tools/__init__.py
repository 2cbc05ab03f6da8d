"""Questions that need a tool: one function call, or Python (§3.2, §4.2)."""
