"""What people prefer: pairs of answers, votes, agreement between raters, and human answers as anchors (§3.4)."""
