"""A chat in the terminal; the engine runs in the same process."""
