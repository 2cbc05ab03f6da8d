"""What an English sentence does, by small grammars: deny, refuse, advise, promise a date (§3.4).

They see verbs and negations, not meaning: each has the usual wordings and refuses what only looks like one ("I cannot
wait" is no refusal, "I am just listening" no advice). Every pattern reads the form of `in_full`.
"""

from __future__ import annotations

import functools
import re

from glm5.tasks.instructions.text_units import words_of

_TELL = (
    r"(?:say|said|mention|state|specify|specified|tell|told|give|gave|contain|provide|include|indicate|reveal|disclose"
    r"|record|written|know|clear|determine|answer|find|found)\w*"
)
_COME = (
    r"(?:come|coming|attend|attending|join|joining|go|going|be (?:there|present|at)|make (?:it|the|your)|making it"
    r"|accept|participate|take part|(?:be )?able)"
)
_DO = (
    r"(?:get|stop|try|call|see an?|consult|buy|sleep|rest(?! assured)|ask|forget|look(?!,)|think|remember|find|start"
    r"|write|speak|move|make|avoid|calm|report|sue|visit|relax|breathe|ignore|talk|accept(?! my)|cheer|do not"
    r"|go(?! on| ahead)|keep(?! talking| going)|take(?! care| your time| all)|let(?! me| it out))\b(?! (?:to )?me\b)"
)
_TIME = (
    r"(?:today|tonight|tomorrow|weekend|weeks?|hours?|days?|months?|monday|tuesday|wednesday|thursday|friday|saturday"
    r"|sunday|january|february|march|april|may|june|july|august|september|october|november|december)"
)

NOT_TOLD = re.compile(
    rf"\bnot (?:\w+ ){{0,2}}?(?:{_TELL}|in the note|part of the note)\b|\bno \w+ (?:is|was) {_TELL}\b"
    r"|\b(?:no|not any) (?:\w+ )?(?:information|details?|mention|answer|data|statement|word|indication)\b"
    r"|\b(?:(?:note|text|it) (?:leaves? (?:\w+ ){1,2}out|lacks|omits)|(?:information|detail|that) is missing"
    r"|nothing (?:on|about))\b"
    r"|\b(?:unknown|unstated|unspecified|unclear|unable to (?:tell|say|answer|know|determine))\b"
    rf"|\b(?:says? nothing|is silent|nothing (?:is|was) {_TELL})\b"
    r"|\b(?:without|never) (?:say|mention|stat|specify|tell)\w*"
)
"""That a note does not have an answer: "the note does not mention it", "it isn't stated", "I cannot tell"."""
REFUSAL = re.compile(
    r"(?:\b(?:can|could|will|would|shall|may|do|am|is|be|rather)|'m) not "
    rf"(?:possible (?:for me )?to |(?:\w+ ){{0,2}}?(?:be )?{_COME}\b)"
    r"|\b(?:can|could|will|would|shall) not\s*(?:[.,;!]|$)"
    rf"|\bunable to (?:\w+ )?{_COME}\b|(?:^|[.!?] )no,? thank|\bbut no\b"
    r"|(?<!not )(?<!not have to )(?<!never )\b(?:declin(?:e|ing)|say(?:ing)? no|turn (?:it|this|you|the \w+) down)\b"
    r"|\b(?:have to|must|will) (?:pass on|skip|miss)\b"
)
"""A no to an invitation."""
ACCEPTANCE = re.compile(
    r"\bnot (?:(?:really|possibly|ever|even|just|simply) )?(?:wait|miss|resist|refuse|decline|say no|fail|help|but)\b"
    r"|\bcount me in\b|\bsee you there\b"
    r"|\bi(?: will| ?'ll| shall) (?:be there|come|attend|join)\b(?! in spirit| in thought| next| another| some other)"
)
"""A yes, also one with a "not" in it."""
ADVICE = re.compile(
    r"\byou (?:should|need to|must(?! be| feel| have| miss)|have to(?! be| feel)|ought to|could(?! not| never)"
    r"|had better|might want)\b|\b(?:try to|have you (?:tried|considered|thought)|why do not you|my advice|make sure"
    r"|next time)\b"
    r"|\bi(?: would|'d)? (?:suggest|recommend|advise)\b|\b(?:how|what) about an?\b|\bhelps? (?:you )?to\b"
    rf"|(?:^|[.!?;:] )(?:so |then |now |please |maybe |perhaps )?(?:just )?{_DO}"
    rf"|(?<!\bi )(?<!they )(?<!we )\bjust {_DO}"
)
"""What somebody should do, or an imperative. "You must be sad" is none."""
PROMISE = re.compile(
    r"(?:\b(?:will|shall|should(?! have)|going to|arrives?|comes?|promise|guarantee|can expect|have it)|'ll)\b"
    rf"[^.!?]{{0,40}}\b{_TIME}\b(?! late| ago| overdue)"
)
"""A date or a span of time that is promised."""
_TAKEN_BACK = re.compile(
    r"\b(?:not|never|no way|nobody|neither|nor|hardly|but|except|excluding|besides|without|false|untrue|wrong"
    r"|instead of|rather than|other than|apart from|unlike|anyone|anybody|everyone|everybody|anywhere|everywhere)\b"
)
_NEGATED = (
    r"\b(?:not|no|never|hardly)(?: (?:at|all|very|so|really|even|that|an?|any|the|be|been|being|feel|feeling|need|to"
    r"|one|bit|in|least|reason|great|real|particularly))* "
)
_OPEN = re.compile(r"(?:what|whether|if|who|about|of|which|on|regarding|when|how)\b")


@functools.lru_cache(maxsize=1024)
def in_full(text: str) -> str:
    """A text in small letters, single spaces, and with every "not" in full: "can't" and "cannot" are "can not"."""
    text = " ".join(text.lower().replace("’", "'").split())
    for short, full in (("won't", "will not"), ("can't", "can not"), ("cannot", "can not"), ("shan't", "shall not")):
        text = text.replace(short, full)
    return text.replace("n't", " not")


def _has(text: str, phrase: str) -> bool:
    return f" {' '.join(words_of(phrase))} " in f" {' '.join(words_of(text))} "


def affirms(text: str, *phrases: str) -> bool:
    """Whether the text says every phrase, and no sentence that says one has a negation or an exception."""
    saying = [
        sentence
        for sentence in re.split(r"(?<![.;!?])[.;!?]+(?: |$)", in_full(text))
        if any(_has(sentence, phrase) for phrase in phrases)
    ]
    return all(_has(text, phrase) for phrase in phrases) and not any(map(_TAKEN_BACK.search, saying))


def means_one(text: str, *phrases: str) -> bool:
    """Whether the text says one of the phrases without denying it ("not sorry", "no loss")."""
    words = " ".join(words_of(in_full(text)))
    return any(_has(re.sub(rf"{_NEGATED}{re.escape(phrase)}\b", " ", words), phrase) for phrase in phrases)


def tells_nothing_of(text: str, name: str) -> bool:
    """Whether every clause with the name says of it only that something is not told, or asks: "what Mia bought"."""
    clauses = re.split(r"(?<![.;:!?,])[.;:!?,]+(?: |$)|\bbut\b|\bhowever\b|\band\b|\bthough\b", in_full(text))
    named = [clause.strip() for clause in clauses if _has(clause, name)]
    return all(NOT_TOLD.search(clause) or _OPEN.match(clause) for clause in named)


def not_told(text: str) -> bool:
    return NOT_TOLD.search(in_full(text)) is not None


def refuses(text: str) -> bool:
    """A no to an invitation, and no yes."""
    return REFUSAL.search(in_full(text)) is not None and ACCEPTANCE.search(in_full(text)) is None


def advises(text: str) -> bool:
    return ADVICE.search(in_full(text)) is not None


def promises_a_date(text: str) -> bool:
    return PROMISE.search(in_full(text)) is not None
