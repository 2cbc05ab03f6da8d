"""What the member can do."""


def reset_card(db) -> str:
    """Reset your card."""
    db["card"]["works"] = True
    return "the card works"
