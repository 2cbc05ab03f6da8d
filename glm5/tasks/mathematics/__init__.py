"""Mathematics and arithmetic with exact answers (§3.2)."""
