"""Formulas of pages become TeX: forms that real sites write, and pages that only look like them."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("resiliparse")

from glm5.data.corpus.text import Extracted, extract_here

MATH = '<math xmlns="http://www.w3.org/1998/Math/MathML"{}>{}</math>'
SQUARE = "<msup><mi>x</mi><mn>2</mn></msup>"
NOTED = f'<semantics><mrow>{SQUARE}</mrow><annotation encoding="application/x-tex">x^2</annotation></semantics>'
TEXT = "This page has a text that is long enough to be its main content, with one formula in it, as follows:"


def extracted(inner: str) -> Extracted:
    found = extract_here("html", f"<html><body><main><p>{TEXT}</p><p>Let {inner} be.</p></main></body></html>".encode())
    assert isinstance(found, Extracted)
    return found


MI, MO, MN = "<mi>{}</mi>".format, "<mo>{}</mo>".format, "<mn>{}</mn>".format
ROOT = f"<msqrt>{MI('a')}{MO('+')}{MN(1)}</msqrt>"
SUM = f"<munderover>{MO('∑')}<mrow>{MI('i')}{MO('=')}{MN(0)}</mrow>{MI('n')}</munderover>"
VECTOR = f"<mover>{MI('v')}{MO('→')}</mover>{MI('f')}{MO(chr(0x2061))}<mfenced>{MI('x')}</mfenced>"
TABLE = f"<mtable><mtr><mtd>{MN(1)}</mtd><mtd>{MN(2)}</mtd></mtr></mtable>"
PLAIN, SCRIPT = MATH.format("", SQUARE), '<script type="math/tex{}">{}</script>'
KATEX = f'<span class="katex"><span>{MATH.format("", NOTED)}</span><span class="katex-html">x2</span></span>'


@pytest.mark.parametrize(
    ("inner", "shown"),
    [
        (MATH.format("", NOTED), "$x^2$"),
        (MATH.format(' display="block"', NOTED), "$$x^2$$"),
        (MATH.format(' alttext="x^{2}"', SQUARE), "$x^{2}$"),
        (PLAIN, "$x^2$"),
        (f'<span class="MathJax">if <mjx-container>{PLAIN}</mjx-container> is</span>', "if $x^2$ is"),
        (f'<span class="katex">{PLAIN}<annotation encoding="application/x-tex">y</annotation></span>', "$x^2$"),
        (MATH.format("", f"<mfrac>{SQUARE}{ROOT}</mfrac>"), r"$\frac{x^2}{\sqrt{a + 1}}$"),
        (MATH.format("", SUM), r"$\sum_{i = 0}^n$"),
        (MATH.format("", VECTOR), r"$\vec{v}f(x)$"),
        (MATH.format("", f"{MI('sin')}{MI('α')}{MO('≤')}{MO('−')}{MN(1)}"), r"$\sin \alpha \le - 1$"),
        (MATH.format("", f"{MI('Ω')}{MI('rank')}{MO('/')}{MI('Ж')}"), r"$\Omega \mathrm{rank}/Ж$"),
        (MATH.format("", TABLE), r"$\begin{matrix} 1 & 2 \end{matrix}$"),
        ('<i class="MathJax_Preview">x2</i><i class="MathJax">x2</i>' + SCRIPT.format("", "x^2"), "$x^2$"),
        (SCRIPT.format("; mode=display", r"\int_0^1 f"), r"$$\int_0^1 f$$"),
        (f'<span class="MathJax"><nobr>x2</nobr><span>{PLAIN}</span></span>', "$x^2$"),
        (
            f"<mjx-container><mjx-math>x2</mjx-math><mjx-assistive-mml>{PLAIN}</mjx-assistive-mml></mjx-container>",
            "$x^2$",
        ),
        (KATEX, "$x^2$"),
        (f'<span class="katex-display">{KATEX}</span>', "$$x^2$$"),
        ('<img class="math" src="_images/math/1.png" alt="\\int f"/>', r"$\int f$"),
        ('<img class="formulaDsp" src="form_1.png" alt="\\[ a^2 \\]"/>', r"\[ a^2 \]"),
        ('<img src="img1.png" alt="$\\alpha$"/>', r"$\alpha$"),
        ('<img class="mwe-math-fallback-image-inline" alt="{\\displaystyle x^{2}}"/>', "$x^{2}$"),
        ("x<sup>2</sup> + a<sub>ij</sub>", "x^2 + a_{ij}"),
        ("10<sup>-3</sup>", "10^{-3}"),
        ('<i class="math">\\(a_i\\)</i>', r"\(a_i\)"),
    ],
)
def test_formulas_become_tex(inner: str, shown: str) -> None:
    found = extracted(inner)
    assert f"Let {shown} be." in found.text
    assert found.formulas == (0 if inner.startswith(("x<", "10", '<i class="math"')) else 1)


@pytest.mark.parametrize(
    ("inner", "shown"),
    [
        ('<img src="cat.png" alt="a cat"/> it', "Let it be."),
        ('<img src="cat.png" alt="C:\\temp"/> it', "Let it be."),
        ("the 1<sup>st</sup>", "Let the 1st be."),
        ('it<sup><a href="#n">1</a></sup>', "Let it1 be."),
        ("it<sup>see the notes below the table</sup>", "Let itsee the notes below the table be."),
        ("<math></math>it", "Let it be."),
    ],
)
def test_what_is_no_formula_stays(inner: str, shown: str) -> None:
    found = extracted(inner)
    assert shown in found.text and not found.formulas


def test_hostile_formulas_are_text() -> None:
    deep = "<mrow>" * 5000 + "<mi>x</mi>" + "</mrow>" * 5000
    nested = MATH.format("", "<mi>y</mi>" * 2) + "<math>" * 300 + "<mi>z</mi>" + "</math>" * 300
    for inner in (MATH.format("", deep), nested, MATH.format("", "<msup>" * 9), "<sup>" * 999, "<img alt='$'>" * 99):
        found = extracted(inner)
        assert TEXT in found.text
    assert extracted(f"<math>{PLAIN}{PLAIN}</math> and {PLAIN}").formulas == 2


@pytest.mark.parametrize(
    ("inner", "formulas"),
    [
        (PLAIN * 3000, 3000),
        ("<math>" * 3000, 0),
        ("<math>" * 3000 + PLAIN, 0),
        ("x<sub>1</sub>" * 3000, 0),
        ("<sub>" * 3000, 0),
        ('<span class="katex">' * 3000 + PLAIN, 1),
        ("<math><annotation>" * 3000, 0),
        ('<img class="math" alt="$x$">' * 3000, 3000),
    ],
)
def test_thousands_of_formulas_take_seconds(inner: str, formulas: int) -> None:
    began = time.process_time()
    assert extracted(inner).formulas == formulas
    assert time.process_time() - began < 3
