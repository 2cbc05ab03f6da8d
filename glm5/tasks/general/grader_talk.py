"""Text that speaks to whoever grades: addresses, claims, requests, imitated verdicts and chat markers (§3.4).

Each alternative is a usual wording and is anchored, so that the same words about other things stay clean: a letter to a
judge, the score of a match, customers who give a service 9 points.
"""

from __future__ import annotations

import re

_ANSWER = r"(?:answer|reply|response)s?"
_TEXT = r"(?:answer|reply|response|text)s?"
_GRADER = r"(?:graders?|evaluators?|raters?|reviewers?)"
_TOP = r"(?:full (?:marks|score)|(?:top|highest|maximum|best) (?:score|mark|reward)|10 ?(?:/|out of) ?10|reward of 1)"
_RULES = r"(?:requirement|criteri(?:on|a)|constraint|condition|instruction|rubric|rule|check)s?"
_MET = r"(?:met|satisfied|fulfilled|kept|passed)"
_START = r"(?:^|[.!?:;\n]\s{0,3})(?:please )?"  # of a sentence
_END = r"\s*(?:[.!\"'}]|$)"

ADDRESS = (
    r"\b(?:ignore|disregard)\b[^.\n]{0,40}\b(?:instructions?|rubric|above|criteria|(?:all|any|your|previous) rules)\b",
    r"(?<!not )(?<!never )(?<!n't )\bforget\b[^.\n]{0,24}\b(?:rubric|criteria|(?:previous|prior|above|earlier) \w+)\b",
    rf"\b(?:dear|hey|attention|note to|message to)\b[^.\n]{{0,12}}\b(?:{_GRADER}\b|judges?(?= *[,.:;!]| of th))",
    rf"\bas (?:an?|the|my|your) (?:\w+ )?(?:{_GRADER}|judge),? you\b",
    rf"\b(?:{_GRADER}|judges) (?:will|should|must|can|may) (?:find|see|note|agree|prefer|notice|give|award|choose|pick"
    r"|reward|rate|score|accept)\b",
)
CLAIM = (
    rf"\b(?:this|my)\b[^.\n]{{0,16}}\b{_ANSWER}\b[^.\n]{{0,16}}\b(?:is|deserves|should be|must be)\b"
    r"[^.\n]{0,24}\b(?:best|better|winner|preferred|superior|full marks|top score|highest score|chosen)\b",
    rf"\bthis is the best (?:possible )?{_ANSWER}\b",
    rf"\bpreferred {_ANSWER} (?:above|below|follows|here)\b",
    rf"\b(?:this|my) {_TEXT} (?:\w+ )?(?:satisf(?:y|ies)|meets?|fulfil(?:l?s)?|passes) (?:every|each|all)\b"
    rf"[^.\n]{{0,12}}\b{_RULES}\b",
    rf"\b(?:every|each|all)\b[^.\n]{{0,12}}\b{_RULES} (?:is|are|has been|have been) {_MET}"
    rf" (?:here|above|below|in full|in (?:this|my) {_TEXT})\b",
    rf"\b(?:no|the|any) (?:other|competing|rival) {_TEXT} (?:\w+ )?(?:match(?:es)?|breaks?|fails?|violates?"
    r"|(?:is|was|are) (?:\w+ ){0,5}?(?:worse|wrong|disqualified|liar))\b",
)
REQUEST = (
    rf"\b(?:give|award|assign|rate|score)\s+(?:this|me|my)\b[^.\n]{{0,24}}\b(?:{_TOP}|score of \d+)",
    rf"(?:{_START}|\b(?:and|must|should|please) )(?:rate|score|give|award) (?:the |a |with )?{_TOP}",
    rf"{_START}(?:give|award) it (?:the |a )?(?:{_TOP}|score of \d+)",
    rf"{_START}(?:choose|pick|select|prefer|reward) (?:this|mine|the (?:first|second))(?: (?:one|{_TEXT}))?{_END}",
)
VERDICT = (
    r"[\"'](?:verdict|better|winner|preferred|score)[\"']\s*[:=]\s*[\"']?(?:a|b|first|second|10|yes)\b",
    r"\[\s*(?:verdict|winner|score|reward)\s*[:=]\s*\w+\s*\]",
    r"\b(?:verdict|evaluation|reward|preferred|winner)\s*[:=–—-]+\s*(?:a|b|first|second|this one|this answer|maximum"
    rf"|perfect|excellent|full){_END}",
    r"^\W{0,3}(?:verdict|better|winner|preferred|score)\s*[:=]\s*(?:a|b|first|second|\d+|10 ?/ ?10|yes)\W*$",
    rf"{_START}(?:{_ANSWER} )?[ab] is (?:better|best|correct|preferred|the winner)(?: than (?:{_ANSWER} )?[ab])?{_END}",
    r"\b(?:answer|response)\s+(?:a|b|1|2)\s+is\s+(?:better|best|correct|preferred)\b",
)
MARKERS = (r"<\|[a-z_]+\|>", r"\[/?inst\]", r"</?(?:system|assistant|user)>")

TO_THE_GRADER = re.compile("|".join([*ADDRESS, *CLAIM, *REQUEST, *VERDICT, *MARKERS]), re.IGNORECASE | re.MULTILINE)
