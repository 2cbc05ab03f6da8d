"""Tools of the desk."""


def get_member(db, member_id: str) -> dict:
    """Name and loans of a member."""
    if member_id not in db["members"]:
        raise ValueError(f"there is no member {member_id}")
    return db["members"][member_id]


def renew_loan(db, member_id: str, book: str, days: int = 21) -> str:
    """Renew a loan; answers with the new date."""
    loan = get_member(db, member_id)["loans"][book]
    if loan["renewed"]:
        raise ValueError(f"{book} was renewed before")
    loan["renewed"], loan["due"] = True, loan["due"] + days
    print("not an answer")
    return f"due on day {loan['due']}"


def transfer_to_librarian(db, summary: str) -> str:
    """Give the member to the librarian."""
    return "transferred"


def card_works(db):
    return db["card"]["works"]


def lock_card(db):
    db["card"]["works"] = False
