"""Formulas of web pages as TeX: extraction of text would drop them, or leave their letters without structure.

What is found: MathML (its TeX annotation, else its `alttext`, else the elements themselves), scripts of MathJax, what
MathJax and KaTeX have rendered, pictures of formulas with their source as `alt` (LaTeX2HTML, Sphinx, Doxygen,
MediaWiki), `<sub>` and `<sup>`. TeX between `\\(` and `\\)` is text already. Runs where pages are parsed, with the
limits on time and memory of that.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any

_RENDERED = ("mjx-container", ".katex-display", ".katex", ".mwe-math-element", ".MathJax", ".MathJax_SVG", ".mjx-chtml")
"""Elements of a rendered formula; most have MathML for screen readers inside."""
_PREVIEWS = ".MathJax_Preview, .MathJax_Display, .MathJax, .MathJax_SVG, .mjx-chtml"
"""Rendered beside a script with the source."""
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
_MOST = 20_000
"""Characters of one formula."""


def show_formulas(tree: Any) -> int:
    """Replace the formulas of a page (resiliparse's HTMLTree), in place, by text: TeX between $ or $$. Returns their
    number; indices of <sub> and <sup> do not count."""
    page = _Page(tree)
    if tree.body is None:
        return 0
    scripts = tree.body.query_selector_all('script[type^="math/tex"]')
    if scripts:
        for node in list(tree.body.query_selector_all(_PREVIEWS)):
            page.remove(node)
    for selector in _RENDERED:
        page.each(selector, _rendered)
    page.each('script[type^="math/tex"]', lambda node: _marked(node.text, "display" in (node.getattr("type") or "")))
    page.each("math", _mathml)
    page.each("img", _picture)
    found = page.count
    page.each("sub", lambda node: _index(node, "_"), inner=True)
    page.each("sup", lambda node: _index(node, "^"), inner=True)
    return found


class _Page:
    def __init__(self, tree: Any) -> None:
        self._tree, self.count = tree, 0

    def each(self, selector: str, text: Callable[[Any], str | None], inner: bool = False) -> None:
        """Replace the elements for which `text` returns one; `inner`: those inside of others, too."""
        within = 0
        for node in list(self._tree.body.query_selector_all(selector)):  # an element comes before those inside
            if within:
                within -= 1
                continue
            within = 0 if inner else len(node.query_selector_all(selector))
            if node.parent is not None and (shown := text(node)):
                node.parent.replace_child(self._tree.create_text_node(shown), node)
                self.count += 1

    def remove(self, node: Any) -> None:
        if node.parent is not None:
            node.parent.remove_child(node)


def _marked(tex: str, display: bool) -> str | None:
    """A formula between its marks; it may have some already."""
    tex = " ".join(tex.replace("% <![CDATA[", "").replace("%]]>", "").split())
    if not tex or len(tex) > _MOST:
        return None
    if "$" in tex or tex.startswith(("\\(", "\\[")):
        return tex
    return f"$${tex}$$" if display else f"${tex}$"


def _rendered(node: Any) -> str | None:
    math = node.query_selector("math")
    if math is None:
        return None
    display = "display" in (node.getattr("class") or "") or node.getattr("display") == "true"
    return _mathml(math, display)


def _mathml(math: Any, display: bool = False) -> str | None:
    display = display or math.getattr("display") == "block" or math.getattr("mode") == "display"
    for note in math.query_selector_all("annotation"):
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


def _index(node: Any, sign: str) -> str | None:
    """An index or exponent; notes with links, ordinals and long texts stay as they are."""
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
