"""Formulas of web pages as TeX: extraction of text would drop them, or leave their letters without structure.

What is found: MathML (its TeX annotation, else its `alttext`, else the elements themselves), scripts of MathJax, what
MathJax and KaTeX have rendered, pictures of formulas with their source as `alt` (LaTeX2HTML, Sphinx, Doxygen,
MediaWiki), `<sub>` and `<sup>`. TeX between `\\(` and `\\)` is text already. Runs where pages are parsed, with the
limits on time and memory of that.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

_RENDERED = ("mjx-container", ".katex-display", ".katex", ".mwe-math-element", ".MathJax", ".MathJax_SVG", ".mjx-chtml")
"""Elements of a rendered formula; most have MathML for screen readers inside."""
_PREVIEWS = (".MathJax_Preview", ".MathJax_Display", ".MathJax", ".MathJax_SVG", ".mjx-chtml")
"""Rendered beside a script with the source."""
_SCRIPT = "math/tex"
_NAMES = frozenset(("math", "annotation", "img", "sub", "sup", _SCRIPT, *_RENDERED, *_PREVIEWS))
"""Tags, classes and the type of scripts that matter here."""
_PICTURE = re.compile(r"\b(math|tex|latex|formula(Inl|Dsp)?|mwe-math-fallback-image-\w+|equation)\b", re.IGNORECASE)
_SOURCE = re.compile(r"(^|/)(math|latex|tex|imgmath)/|form_\d+\.(png|svg)|latex\.php|mathtex\.cgi", re.IGNORECASE)
_TEX = re.compile(r"[\\^_{}$=<>+]|^\w$|^[\w\s,()|/*-]{1,40}$")
_DISPLAY = re.compile(r"\b(display|block)\b|formulaDsp", re.IGNORECASE)
_DISPLAYED = re.compile(r"\\begin\{(equation|align|displaymath|eqnarray|gather)")
_DELIMITED = re.compile(r"\$.+\$|\\\(.+\\\)|\\\[.+\\\]|\\begin\{", re.DOTALL)
_INDEX = re.compile(r"[+\-−]?[^\W_][\w+\-−*/=(),.∞′' ]{0,19}|[+\-−*′]")
_ORDINAL = re.compile(r"st|nd|rd|th|TM|SM|[ivx]{2,}", re.IGNORECASE)
_INVISIBLE = dict.fromkeys(map(ord, "\u2061\u2062\u2063\u2064\u200b"))
_ACCENTS = {"¯": "bar", "‾": "bar", "^": "hat", "ˆ": "hat", "~": "tilde", "˜": "tilde", "→": "vec", "⃗": "vec"}
_ACCENTS |= {"˙": "dot", "¨": "ddot", "\\to": "vec", "\\sim": "tilde"}
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan exp log ln lim min max sup inf det dim ker gcd "
    "arg deg Pr".split()
)
_GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi chi psi "
    "omega".split()
)
_SYMBOLS = {
    "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx", "≡": "equiv", "∼": "sim", "∝": "propto", "±": "pm", "∓": "mp",
    "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div", "∑": "sum", "∏": "prod", "∫": "int", "∮": "oint",
    "∂": "partial", "ϕ": "phi", "ϵ": "epsilon", "≪": "ll", "≫": "gg", "′": "prime", "″": "prime\\prime",
    "∇": "nabla", "∞": "infty", "√": "surd", "∈": "in", "∉": "notin", "⊂": "subset", "⊆": "subseteq", "∪": "cup",
    "∩": "cap", "∅": "emptyset", "∀": "forall", "∃": "exists", "¬": "neg", "∧": "wedge", "∨": "vee", "→": "to",
    "⇒": "Rightarrow", "⇔": "Leftrightarrow", "↦": "mapsto", "…": "dots", "⋯": "cdots", "∘": "circ", "⊗": "otimes",
    "⊕": "oplus", "ℝ": "mathbb{R}", "ℕ": "mathbb{N}", "ℤ": "mathbb{Z}", "ℂ": "mathbb{C}", "ℚ": "mathbb{Q}", "ℓ": "ell",
    "⟨": "langle", "⟩": "rangle", "‖": "|",
}  # fmt: skip
_DEEPEST = 60
_MOST, _MOST_IN_INDEX = 20_000, 50
"""Characters of one formula, and elements; elements of an index."""


def show_formulas(tree: Any) -> int:
    """Replace the formulas of a page (resiliparse's HTMLTree), in place, by text: TeX between $ or $$. Returns their
    number; indices of <sub> and <sup> do not count."""
    if tree.body is None:
        return 0
    page = _Page(tree)
    if page.named[_SCRIPT]:
        page.each(_PREVIEWS, lambda one: "", inner=True)
    for name in _RENDERED:
        page.each((name,), _rendered)
    page.each((_SCRIPT,), lambda one: _marked(one.node.text, "display" in (one.node.getattr("type") or "")))
    page.each(("math",), _mathml)
    page.each(("img",), lambda one: _picture(one.node))
    found = page.count
    page.each(("sub",), lambda one: _index(one, "_"), inner=True)
    page.each(("sup",), lambda one: _index(one, "^"), inner=True)
    return found


@dataclass
class _Element:
    """An element of a page, and the places of it and of the end of what it contains, among all elements in order."""

    node: Any
    page: _Page
    start: int
    end: int = 0

    def inside(self, name: str) -> list[_Element]:
        """The elements of this name that it still contains."""
        found = self.page.named[name]
        low, high = (bisect_left(found, place, key=lambda one: one.start) for place in (self.start, self.end))
        return [one for one in found[low:high] if not self.page.gone[one.start]]


class _Page:
    """The elements of a page by name, from one walk: resiliparse's lists of elements look for each of their elements
    from the start, which takes minutes for some thousand."""

    def __init__(self, tree: Any) -> None:
        self._tree, self.count = tree, 0
        self.named: dict[str, list[_Element]] = {name: [] for name in _NAMES}
        self.gone = bytearray(self._walk(tree.body))

    def _walk(self, body: Any) -> int:
        count, stack = 0, list[tuple[Any, _Element | None]]()
        node = body.first_element_child
        while node is not None or stack:
            if node is None:
                node, element = stack.pop()
                if element is not None:
                    element.end = count
                node = node.next_element_sibling
                continue
            element = None
            if names := _names(node):
                element = _Element(node, self, count)
                for name in names:
                    self.named[name].append(element)
            count += 1
            stack.append((node, element))
            node = node.first_element_child
        return count

    def each(self, names: Sequence[str], text: Callable[[_Element], str | None], inner: bool = False) -> None:
        """Replace the elements for which `text` returns one, remove those for which it returns ""; `inner`: those
        inside of others, too."""
        end = 0
        for one in chain.from_iterable(self.named[name] for name in names):
            if self.gone[one.start] or (not inner and one.start < end):
                continue
            end = one.end
            shown = text(one) if one.node.parent is not None else None
            if shown is None:
                continue
            if shown:
                one.node.parent.replace_child(self._tree.create_text_node(shown), one.node)
                self.count += 1
            else:
                one.node.parent.remove_child(one.node)
            self.gone[one.start : one.end] = b"\1" * (one.end - one.start)


def _names(node: Any) -> set[str]:
    """The names of an element that are in _NAMES."""
    found = {node.tag} | {f".{name}" for name in (node.getattr("class") or "").split()}
    if node.tag == "script" and (node.getattr("type") or "").startswith(_SCRIPT):
        found.add(_SCRIPT)
    return found & _NAMES


def _marked(tex: str, display: bool) -> str | None:
    """A formula between its marks; it may have some already."""
    tex = " ".join(tex.replace("% <![CDATA[", "").replace("%]]>", "").split())
    if not tex or len(tex) > _MOST:
        return None
    if "$" in tex or tex.startswith(("\\(", "\\[")):
        return tex
    return f"$${tex}$$" if display else f"${tex}$"


def _rendered(one: _Element) -> str | None:
    math = next(iter(one.inside("math")), None)
    if math is None:
        return None
    display = "display" in (one.node.getattr("class") or "") or one.node.getattr("display") == "true"
    return _mathml(math, display)


def _mathml(one: _Element, display: bool = False) -> str | None:
    math = one.node
    display = display or math.getattr("display") == "block" or math.getattr("mode") == "display"
    for note in (inner.node for inner in one.inside("annotation")):
        if "tex" in (note.getattr("encoding") or "").lower():
            return _marked(_without_style(note.text), display)
    if (said := math.getattr("alttext")) and said.strip():
        return _marked(_without_style(said), display)
    return _marked(_tex(math, 0), display)


def _without_style(tex: str) -> str:
    """TeX of MediaWiki without the braces around it."""
    found = re.fullmatch(r"\s*\{\\(?:displaystyle|textstyle)\s(.*)\}\s*", tex, re.DOTALL)
    return found[1] if found else tex


def _picture(node: Any) -> str | None:
    said = (node.getattr("alt") or "").strip()
    kind = node.getattr("class") or ""
    known = _PICTURE.search(kind) or _SOURCE.search(node.getattr("src") or "")
    if not said or not ((known and _TEX.search(said)) or _DELIMITED.search(said)):
        return None
    return _marked(_without_style(said), bool(_DISPLAY.search(kind) or _DISPLAYED.search(said)))


def _index(one: _Element, sign: str) -> str | None:
    """An index or exponent; notes with links, ordinals and long texts stay as they are."""
    if one.end - one.start > _MOST_IN_INDEX:  # it has no short text, and elements may be inside of each other
        return None
    node = one.node
    text = " ".join(node.text.split())
    above = node.parent
    linked = node.query_selector("a") is not None or (above is not None and above.tag == "a")
    if linked or not _INDEX.fullmatch(text) or _ORDINAL.fullmatch(text):
        return None
    return sign + (text if len(text) == 1 else f"{{{text}}}")


def _tex(node: Any, depth: int) -> str:
    """Presentation MathML as TeX."""
    if depth > _DEEPEST or node.tag is None:
        return ""
    name = node.tag.rpartition(":")[2]
    if name in ("mi", "mn", "mo", "mtext", "ms"):
        return _leaf(node, name)
    parts = [_tex(child, depth + 1) for child in node.child_nodes if child.tag is not None and child.tag[:1] != "#"]
    if name in ("annotation", "annotation-xml", "mphantom", "none", "mprescripts"):
        return ""
    if name == "mspace":
        return " "
    if name == "semantics":
        return parts[0] if parts else ""
    if name == "mfenced":
        marks = node.getattr("open") or "(", node.getattr("close") or ")", node.getattr("separators") or ","
        return marks[0] + f"{marks[2][0]} ".join(parts) + marks[1]
    if name == "mtable":
        return "\\begin{matrix} " + " \\\\ ".join(parts) + " \\end{matrix}"
    if name == "mtr":
        return " & ".join(parts)
    form = _FORMS.get((name, len(parts)))
    if name == "mover" and len(parts) == 2 and (accent := _ACCENTS.get(parts[1].strip())):
        return f"\\{accent}{{{parts[0].strip()}}}"
    if form is not None:
        return form(*(part.strip() for part in parts))
    joined = "".join(parts)
    return f"\\sqrt{{{joined.strip()}}}" if name == "msqrt" else joined


def _leaf(node: Any, name: str) -> str:
    """An identifier, number, operator or text."""
    text = node.text.translate(_INVISIBLE).strip()
    if name == "mtext" and text:
        return f"\\text{{{text}}}"
    if len(text) > 1 and text.isalpha():
        return f"\\{text} " if text in _FUNCTIONS else f"\\mathrm{{{text}}}"
    shown = "".join(_symbol(char) for char in text)
    if node.getattr("mathvariant") == "double-struck" and text:
        return f"\\mathbb{{{shown.strip()}}}"
    return f" {shown.strip()} " if name == "mo" and text and text not in "()[]{}|,.!′/" else shown


def _symbol(char: str) -> str:
    """TeX of a symbol; others stay Unicode."""
    if char in _SYMBOLS:
        return f"\\{_SYMBOLS[char]} "
    if "α" <= char.lower() <= "ω":
        words = unicodedata.name(char, "").split()
        greek = words[3].lower() if len(words) == 4 and words[0] == "GREEK" else ""
        return f"\\{greek.capitalize() if words[1] == 'CAPITAL' else greek} " if greek in _GREEK else char
    return {"−": "-", "{": "\\{", "}": "\\}"}.get(char, char)


def _scripts(base: str, low: str = "", high: str = "") -> str:
    base = base if re.fullmatch(r"\S?|\\\w+(\{.*\})?|\([^()]*\)|[\w.]+", base) else f"{{{base}}}"
    return base + "".join(f"{sign}{_group(part)}" for sign, part in (("_", low), ("^", high)) if part)


def _group(text: str) -> str:
    return text if len(text) == 1 else f"{{{text}}}"


_FORMS: dict[tuple[str, int], Callable[..., str]] = {
    ("mfrac", 2): lambda a, b: f"\\frac{{{a}}}{{{b}}}",
    ("mroot", 2): lambda a, n: f"\\sqrt[{n}]{{{a}}}",
    ("msup", 2): lambda a, b: _scripts(a, high=b),
    ("msub", 2): lambda a, b: _scripts(a, b),
    ("mover", 2): lambda a, b: _scripts(a, high=b),
    ("munder", 2): lambda a, b: _scripts(a, b),
    ("msubsup", 3): _scripts,
    ("munderover", 3): _scripts,
}
