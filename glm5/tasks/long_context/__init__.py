"""Long contexts made offline: RULER's thirteen tasks and conversations to recall, exact in length (§6)."""
