"""What a store of preferences says: votes per rater and class, agreement, and whether the left answer wins more."""

from __future__ import annotations

from typing import Any

from glm5.preferences.agreement import krippendorff_alpha, pairwise_kappas
from glm5.preferences.store import PreferenceStore, swaps
from glm5.stats import wilson


def agreement_report(store: PreferenceStore) -> dict[str, Any]:
    """Numbers for `glm5 prefer --agreement`. `left_share` is the share of the left answer among votes for one, with its
    95 % interval: far from 0.5, raters follow the side rather than the text."""
    votes = store.votes()
    whole = [(pair, rater, choice) for pair, given in votes.items() for rater, choice in given.items()]
    sided = [(choice == "second") == swaps(rater, pair) for pair, rater, choice in whole if choice != "tie"]
    left = wilson(sum(sided), len(sided)) if sided else None
    alpha = krippendorff_alpha(votes)  # type: ignore[arg-type]
    kappas = pairwise_kappas(votes)  # type: ignore[arg-type]
    return {
        "pairs": len(votes),
        "votes": len(whole),
        "raters": len({rater for _, rater, _ in whole}),
        "ties": sum(choice == "tie" for _, _, choice in whole),
        "voted_by_several": sum(len(given) > 1 for given in votes.values()),
        "krippendorff_alpha": alpha,
        "cohen_kappa": [{"raters": [*raters], "kappa": k, "pairs": n} for raters, (k, n) in kappas.items()],
        "left_share": None if left is None else {"share": left.value, "low": left.low, "high": left.high},
    }
