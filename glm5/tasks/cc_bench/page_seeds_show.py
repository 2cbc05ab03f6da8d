"""Seeds of frontend tasks: showcases and themes."""

from __future__ import annotations

import json
import random

from glm5.tasks.cc_bench.checks import (
    CheckItem,
    FrontendTask,
    Mutant,
    Page,
    click,
    inspect,
    look,
    page_seed,
    press,
    write,
)
from glm5.tasks.cc_bench.page_seeds import filled_task


@page_seed
def carousel(rng: random.Random) -> FrontendTask:
    subject, slides = rng.choice(
        (
            ("Lighthouses", ("Bremen Pier", "Skagen", "Cape Hope", "Old Head")),
            ("Bicycles", ("Falcon", "Heron", "Kestrel", "Osprey", "Plover")),
            ("Teas", ("Assam", "Keemun", "Sencha", "Rooibos")),
        )
    )
    start = rng.choice((1, len(slides)))
    values = {"subject": subject, "slides": json.dumps(slides), "start": start - 1}
    count = len(slides)

    def at(number: int) -> str:
        return slides[(number - 1) % count]

    statement = f"""\
Build a showcase "{subject}" of {count} slides: {", ".join(slides)}. One slide is shown at a time, at first {at(start)}:
its name is a heading of level 2, and a line of text says "N of {count}". Buttons "Next" and "Previous" go to the
neighbours; after the last comes the first, before the first the last. For each slide there is a button named as the
slide; it goes there, and the button of the slide shown has aria-pressed "true", the others "false". The right arrow key
does what "Next" does, wherever the focus is."""
    page = Page(
        """\
<h1>@subject@</h1>
<h2 id="name"></h2>
<p id="place"></p>
<button id="previous">Previous</button> <button id="next">Next</button>
<div id="dots"></div>
""",
        """\
const slides = @slides@;
let now = @start@;
const go = (to) => { now = (to + slides.length) % slides.length; show(); };
const show = () => {
  document.getElementById("name").textContent = slides[now];
  document.getElementById("place").textContent = (now + 1) + " of " + slides.length;
  document.getElementById("dots").replaceChildren(...slides.map((name, i) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.setAttribute("aria-pressed", String(i === now));
    button.onclick = () => go(i);
    return button;
  }));
};
document.getElementById("next").onclick = () => go(now + 1);
document.getElementById("previous").onclick = () => go(now - 1);
document.addEventListener("keydown", (event) => { if (event.key === "ArrowRight") go(now + 1); });
show();
""",
    )

    def shown(number: int) -> str:
        return f'(?s)heading "{at(number)}" \\[level=2\\].*{(number - 1) % count + 1} of {count}'

    next_one, before = 'button "Next"', 'button "Previous"'
    third = 2 if start != 2 else 3
    items = (
        CheckItem(f"At first {at(start)} is shown.", (look(shown(start)),)),
        CheckItem('"Next" goes through all slides and then begins again.',
                  (*(click(next_one) for _ in range(count - 1)), click(next_one, shown(start)),
                   click(next_one, shown(start + 1)))),
        CheckItem('"Previous" goes back, from the first slide to the last one.',
                  (*(click(before, shown(start - step)) for step in range(1, count + 1)),)),
        CheckItem(f'The button "{at(third)}" goes to that slide.', (click(f'button "{at(third)}"', shown(third)),)),
        CheckItem("The button of the slide shown is pressed, and no other.",
                  (look(f'button "{at(start)}" \\[pressed\\]', r'(?s)\[pressed\].*\[pressed\]'),
                   click(next_one, f'button "{at(start + 1)}" \\[pressed\\]', f'button "{at(start)}" \\[pressed\\]'))),
        CheckItem("The right arrow key goes to the next slide.", (press("ArrowRight", shown(start + 1)),)),
    )  # fmt: skip
    mutants = {
        "ends": Mutant("script", "(to + slides.length) % slides.length",
                       "Math.max(0, Math.min(to, slides.length - 1))",
                       (1, 2, 4, 5) if start == count else (1, 2)),
        "back-is-next": Mutant("script", "go(now - 1)", "go(now + 1)", (2,)),
        "dead-buttons": Mutant("script", "    button.onclick = () => go(i);\n", "", (3,)),
        "none-pressed": Mutant("script", "String(i === now)", '"false"', (4,)),
        "no-keys": Mutant("script", '"ArrowRight"', '"ArrowUp"', (5,)),
        "late-start": Mutant("script", "let now = @start@", "let now = @start@ ? 0 : 1", (0, 1, 2, 4, 5)),
    }  # fmt: skip
    return filled_task("carousel", "Showcase", statement, items, page, mutants, values)


@page_seed
def theme(rng: random.Random) -> FrontendTask:
    dark, dark_code = rng.choice((("#102030", "16, 32, 48"), ("#202020", "32, 32, 32"), ("#301020", "48, 16, 32")))
    light, light_code = rng.choice((("#ffffff", "255, 255, 255"), ("#f0f8ff", "240, 248, 255")))
    size, step, most = rng.choice((14, 16, 18)), rng.choice((2, 3)), 3
    verse = rng.choice(("The pond is quiet.", "A kite over the roofs.", "Rain, then the smell of stone."))
    values = {"dark": dark, "light": light, "size": size, "step": step, "largest": size + most * step, "verse": verse}
    statement = """\
Build a page that shows the line "@verse@" in a paragraph of id "verse". A button "Dark" gives the page (the body) the
background @dark@ and the line a white colour; its name is then "Light", and it goes back to background @light@, which
the page has at first, and a black line. Buttons "Larger" and "Smaller" change the line's font size, at first @size@
pixels, by @step@ pixels; it never exceeds @largest@ pixels, and never falls below @size@. The page says "Size: N". A
text field labelled "Line" replaces the line's text while one types; if it is empty, the line is "@verse@" again."""
    page = Page(
        """\
<p id="verse">@verse@</p>
<button id="mode">Dark</button> <button id="larger">Larger</button> <button id="smaller">Smaller</button>
<label>Line <input id="line"></label>
<p id="told"></p>
""",
        """\
const get = (id) => document.getElementById(id);
let dark = false, size = @size@;
const show = () => {
  document.body.style.background = dark ? "@dark@" : "@light@";
  get("verse").style.color = dark ? "white" : "black";
  get("verse").style.fontSize = size + "px";
  get("mode").textContent = dark ? "Light" : "Dark";
  get("told").textContent = "Size: " + size;
};
const change = (by) => { size = Math.max(@size@, Math.min(@largest@, size + by)); show(); };
get("mode").onclick = () => { dark = !dark; show(); };
get("larger").onclick = () => change(@step@);
get("smaller").onclick = () => change(-@step@);
get("line").oninput = () => { get("verse").textContent = get("line").value || "@verse@"; };
show();
""",
    )
    larger, mode = 'button "Larger"', 'button "Dark"'
    full = size + most * step
    items = (
        CheckItem(f'"Dark" makes the page {dark} and the line white.',
                  (click(mode), inspect("body", f"background-color: rgb\\({dark_code}\\)"),
                   inspect("#verse", "; color: rgb\\(255, 255, 255\\)"))),
        CheckItem(f'"Light", which "Dark" has become, makes the page {light} and the line black again.',
                  (click(mode, 'button "Light"'), click('button "Light"', 'button "Dark"'),
                   inspect("body", f"background-color: rgb\\({light_code}\\)"),
                   inspect("#verse", "; color: rgb\\(0, 0, 0\\)"))),
        CheckItem(f'"Larger" makes the line {size + step} pixels large, and the page says so.',
                  (click(larger, f"Size: {size + step}\\b"), inspect("#verse", f"font-size: {size + step}px"))),
        CheckItem(f"The size never exceeds {full}.",
                  (*(click(larger) for _ in range(most)), click(larger, f"Size: {full}\\b"),
                   inspect("#verse", f"font-size: {full}px"))),
        CheckItem(f'The size never falls below {size}.', (click('button "Smaller"', f"Size: {size}\\b"),)),
        CheckItem("What is typed into the field replaces the line, and an empty field brings it back.",
                  (write('textbox "Line"', "Hello there", "(paragraph|text): Hello there"),
                   write('textbox "Line"', "", f"(paragraph|text): {verse}"))),
    )  # fmt: skip
    mutants = {
        "line-stays": Mutant("script", 'dark ? "white" : "black"', '"black"', (0,)),
        "one-way": Mutant("script", "dark = !dark", "dark = true", (1,)),
        "only-told": Mutant("script", '  get("verse").style.fontSize = size + "px";\n', "", (2, 3)),
        "no-limit": Mutant("script", "Math.min(@largest@, size + by)", "size + by", (3,)),
        "no-floor": Mutant("script", "Math.max(@size@, Math.min(@largest@, size + by))",
                           "Math.min(@largest@, size + by)", (4,)),
        "stays-empty": Mutant("script", 'get("line").value || "@verse@"', 'get("line").value', (5,)),
    }  # fmt: skip
    return filled_task("theme", "Creative", statement, items, page, mutants, values)
