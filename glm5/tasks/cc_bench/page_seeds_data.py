"""Seeds of frontend tasks: charts, tables and forms."""

from __future__ import annotations

import json
import random

from glm5.tasks.cc_bench.checks import (
    CheckItem,
    Do,
    FrontendTask,
    Mutant,
    Page,
    click,
    inspect,
    look,
    page_seed,
    write,
)
from glm5.tasks.cc_bench.page_seeds import filled_task

SERIES = (
    ("Rain in millimetres", ("Oslo", "Bergen", "Kiel", "Cadiz")),
    ("Visitors in thousands", ("March", "April", "May", "June")),
    ("Loaves sold", ("Rye", "Wheat", "Spelt", "Oat")),
    ("Kilometres run", ("Ada", "Hugo", "Ines", "Tara")),
)
PEOPLE = ("Brandt", "Costa", "Duarte", "Eriksen", "Fischer", "Gupta", "Hansen", "Ivanov", "Jensen", "Larsen")
PLACES = ("Aarhus", "Dresden", "Fano", "Genoa", "Halle", "Lund", "Nantes", "Porto")


@page_seed
def bars(rng: random.Random) -> FrontendTask:
    title, names = rng.choice(SERIES)
    heights = rng.sample(range(2, 19), len(names))
    scale = rng.choice((5, 8, 10))
    top = max(heights)
    first, best = names[0], names[heights.index(top)]
    grown = heights[0] + 1
    order = [name for _, name in sorted(zip(heights, names, strict=True), reverse=True)]
    rows = json.dumps([[name, value] for name, value in zip(names, heights, strict=True)])
    values = {"title": title, "rows": rows, "scale": scale, "first": first}
    listed = ", ".join(f"{name} {value}" for name, value in zip(names, heights, strict=True))
    statement = f"""\
Build a bar chart with the heading "{title}" of these values: {listed}. It is an svg element with one rect element per
value, from left to right in the order given; a value's bar is {scale} pixels high per unit, and the bars stand on one
line. Below each bar an svg text element has the name. A click on a bar shows "NAME: VALUE" in the line of text below
the chart. The page says "Total: N", the sum of the values. A button "Sort" orders the bars by value, the greatest
first. A button "{first} +1" adds one to the value of {first}: bar and total change."""
    page = Page(
        """\
<h1>@title@</h1>
<svg id="chart" width="400" height="260"></svg>
<p id="told">Nothing chosen</p>
<p id="total"></p>
<button id="sort">Sort</button> <button id="more">@first@ +1</button>
""",
        """\
const rows = @rows@, chart = document.getElementById("chart");
const made = (tag, values, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
};
const draw = () => {
  chart.replaceChildren(...rows.flatMap(([name, value], i) => {
    const bar = made("rect", { x: 20 + 80 * i, y: 220 - @scale@ * value, width: 60, height: @scale@ * value });
    bar.onclick = () => { document.getElementById("told").textContent = name + ": " + value; };
    return [bar, made("text", { x: 20 + 80 * i, y: 240 }, name)];
  }));
  document.getElementById("total").textContent = "Total: " + rows.reduce((sum, row) => sum + row[1], 0);
};
document.getElementById("sort").onclick = () => { rows.sort((a, b) => b[1] - a[1]); draw(); };
document.getElementById("more").onclick = () => { rows.find((row) => row[0] === "@first@")[1] += 1; draw(); };
draw();
""",
    )
    boxes = [f"box: [\\d.]+, [\\d.]+, [\\d.]+, {scale * value}\\b" for value in heights]
    more = f'button "{first} +1"'
    ordered = "(?s)" + ".*".join(order)
    items = (
        CheckItem(f"The chart has {len(names)} bars with the heights of the values, in the order given.",
                  (inspect("svg rect", f"(?s){len(names)} elements.*{'.*'.join(boxes)}"),)),
        CheckItem(f'A click on the bar of {best} shows "{best}: {top}".',
                  (click(f"css=svg rect >> nth={names.index(best)}", f"{best}: {top}"),)),
        CheckItem("The page shows the total of the values.", (look(f"Total: {sum(heights)}\\b"),)),
        CheckItem(f'"Sort" orders the bars: {", ".join(order)}.',
                  (click('button "Sort"'), inspect("svg text", ordered))),
        CheckItem(f'"{first} +1" makes the bar higher by {scale} pixels.',
                  (click(more), inspect("svg rect >> nth=0", boxes[0].replace(f"{scale * heights[0]}",
                                                                              f"{scale * grown}")))),
        CheckItem(f'"{first} +1" makes the total greater by one.', (click(more, f"Total: {sum(heights) + 1}\\b"),)),
    )  # fmt: skip
    mutants = {
        "cut": Mutant("script", "height: @scale@ * value", "height: @scale@ * Math.min(value, 1)", (0, 4)),
        "silent": Mutant("script", 'textContent = name + ": " + value', 'textContent = "Nothing chosen"', (1,)),
        "counts": Mutant("script", "sum + row[1]", "sum + 1", (2, 5)),
        "upside-down": Mutant("script", "b[1] - a[1]", "a[1] - b[1]", (3,)),
        "no-growth": Mutant("script", "[1] += 1; draw();", "[1] += 1;", (4, 5)),
    }  # fmt: skip
    return filled_task("bars", "DataViz", statement, items, page, mutants, values)


@page_seed
def table(rng: random.Random) -> FrontendTask:
    people, noun = rng.sample(PEOPLE, 5), rng.choice(("Members", "Suppliers", "Drivers", "Tenants"))
    cities, ages = rng.sample(PLACES, 4), rng.sample(range(20, 80), 5)
    rows = [(name, cities[min(i, 3)], age) for i, (name, age) in enumerate(zip(people, ages, strict=True))]
    by_age, by_name = sorted(rows, key=lambda row: row[2]), sorted(rows)
    shared, alone = cities[3], rows[0]
    values = {"noun": noun, "rows": json.dumps(rows)}
    listed = "; ".join(f"{name}, {city}, {age}" for name, city, age in rows)
    statement = f"""\
Build a page "{noun}" with a table of the columns "Name", "City" and "Age" and these rows, in this order at first:
{listed}. In the heads of the columns are buttons "Name" and "Age". A click on one sorts the rows by that column,
ascending; a second click in a row on the same one sorts descending. Ages sort as numbers. A text field labelled
"Filter" keeps only the rows whose name or city contains its text, whatever the case, while one types. The page says "N
rows", the number of rows that are shown. If no row is left, the page says "Nothing found"."""
    page = Page(
        """\
<h1>@noun@</h1>
<label>Filter <input id="filter"></label>
<table>
<thead><tr><th><button id="name">Name</button></th><th>City</th><th><button id="age">Age</button></th></tr></thead>
<tbody id="rows"></tbody></table>
<p id="count"></p>
<p id="none" hidden>Nothing found</p>
""",
        """\
const rows = @rows@, filter = document.getElementById("filter");
let column = -1, down = false;
const draw = () => {
  const wanted = filter.value.toLowerCase();
  const found = rows.filter((row) => (row[0] + "|" + row[1]).toLowerCase().includes(wanted));
  if (column >= 0) found.sort((a, b) => (a[column] < b[column] ? -1 : 1) * (down ? -1 : 1));
  document.getElementById("rows").replaceChildren(...found.map((row) => {
    const line = document.createElement("tr");
    line.replaceChildren(...row.map((text) => {
      const cell = document.createElement("td");
      cell.textContent = text;
      return cell;
    }));
    return line;
  }));
  document.getElementById("count").textContent = found.length + " rows";
  document.getElementById("none").hidden = found.length > 0;
};
const sort = (number) => { down = column === number && !down; column = number; draw(); };
document.getElementById("name").onclick = () => sort(0);
document.getElementById("age").onclick = () => sort(2);
filter.oninput = draw;
draw();
""",
    )

    def ordered(found: list[tuple[str, str, int]]) -> str:
        return "(?s)" + ".*".join(row[0] for row in found)

    age, field = 'button "Age"', 'textbox "Filter"'
    items = (
        CheckItem("All rows are there in the order given, and counted.",
                  (look(ordered(rows) + ".*\\b5 rows"),)),
        CheckItem('"Age" sorts ascending by age.', (click(age, ordered(by_age)),)),
        CheckItem('A second click on "Age" sorts descending.', (click(age), click(age, ordered(by_age[::-1])))),
        CheckItem('"Name" after "Age" sorts ascending by name.',
                  (click(age), click('button "Name"', ordered(by_name)))),
        CheckItem(f'The filter "{alone[0].lower()}" leaves one row, though the name is written {alone[0]}.',
                  (write(field, alone[0].lower(), f"(?s){alone[0]}.*\\b1 rows", people[2]),)),
        CheckItem(f'The filter "{shared}" looks at cities too and leaves two rows.',
                  (write(field, shared, f"(?s){people[3]}.*{people[4]}.*\\b2 rows"),)),
        CheckItem('A filter that fits nothing shows "Nothing found".',
                  (look("", "Nothing found"), write(field, "zzz", "(?s)0 rows.*Nothing found"))),
    )  # fmt: skip
    mutants = {
        "never-down": Mutant("script", "down = column === number && !down", "down = false", (2,)),
        "stays-down": Mutant("script", "down = column === number && !down", "down = true", (1, 3)),
        "by-city": Mutant("script", 'getElementById("name").onclick = () => sort(0)',
                          'getElementById("name").onclick = () => sort(2)', (3,)),
        "case": Mutant("script", "filter.value.toLowerCase()", "filter.value", (5,)),
        "no-filter": Mutant("script", "filter.oninput = draw;\n", "", (4, 5, 6)),
        "names-only": Mutant("script", 'row[0] + "|" + row[1]', "row[0]", (5,)),
        "no-note": Mutant("script", ".hidden = found.length > 0", ".hidden = true", (6,)),
    }  # fmt: skip
    return filled_task("table", "Forms-Tables", statement, items, page, mutants, values)


@page_seed
def signup(rng: random.Random) -> FrontendTask:
    least, limit = rng.choice((6, 8, 10)), rng.choice((16, 18, 21))
    name = rng.choice(PEOPLE)
    good = "k" * (least - 1) + "7"
    values = {"least": least, "limit": limit}
    statement = f"""\
Build a page "Join" with a form: text fields labelled "Name", "Email" and "Password", a number field labelled "Age", a
checkbox "I agree" and a button "Join". When the button is pressed, the page shows one element of role alert with the
first of these messages that applies: "Name is missing"; "Email is not valid" (it needs one @ with text before it, and
after it text with a point inside); "Password needs {least} characters" (fewer than {least}, or no digit); "You must be
{limit}" (no age, or below {limit}); "Please agree" (the box is not checked). If none applies, there is no alert; the
form disappears and the page says "Welcome, NAME". The browser's own messages are not used."""
    page = Page(
        """\
<h1>Join</h1>
<form id="form" novalidate>
<label>Name <input id="name"></label>
<label>Email <input id="email"></label>
<label>Password <input id="password" type="text"></label>
<label>Age <input id="age" type="number"></label>
<label><input id="agree" type="checkbox"> I agree</label>
<button>Join</button>
</form>
<div id="answer"></div>
""",
        """\
const value = (id) => document.getElementById(id).value.trim(), answer = document.getElementById("answer");
const wrong = () => {
  if (!value("name")) return "Name is missing";
  if (!/^[^@ ]+\\u0040[^@ ]+[.][^@ ]+$/.test(value("email"))) return "Email is not valid";
  const password = value("password");
  if (password.length < @least@ || !/[0-9]/.test(password)) return "Password needs @least@ characters";
  if (Number(value("age")) < @limit@) return "You must be @limit@";
  if (!document.getElementById("agree").checked) return "Please agree";
  return "";
};
document.getElementById("form").onsubmit = (event) => {
  event.preventDefault();
  const line = document.createElement("p"), message = wrong();
  if (message) line.setAttribute("role", "alert");
  line.textContent = message || "Welcome, " + value("name");
  answer.replaceChildren(line);
  document.getElementById("form").hidden = !message;
};
""",
    )
    join, agree = 'button "Join"', 'checkbox "I agree"'

    def given(email: str = "a@b.org", password: str = good, age: int = limit, agreed: bool = True) -> tuple[Do, ...]:
        fields = (("Name", name), ("Email", email), ("Password", password))
        wrote = [write(f'textbox "{label}"', text) for label, text in fields]
        return (*wrote, write('spinbutton "Age"', str(age)), *([click(agree)] if agreed else []))

    items = (
        CheckItem('An empty form shows "Name is missing" and no other message.',
                  (click(join, "alert: Name is missing", "Email is not|Welcome"),)),
        CheckItem('The address "a@b" is refused: "Email is not valid".',
                  (*given(email="a@b"), click(join, "alert: Email is not valid"))),
        CheckItem(f"A password of {least - 1} characters is refused.",
                  (*given(password=good[1:]), click(join, f"alert: Password needs {least}"))),
        CheckItem(f"A password of {least} letters without a digit is refused.",
                  (*given(password="k" * least), click(join, f"alert: Password needs {least}"))),
        CheckItem(f"An age of {limit - 1} is refused.", (*given(age=limit - 1), click(join, f"You must be {limit}"))),
        CheckItem('Without the check mark the page says "Please agree".',
                  (*given(agreed=False), click(join, "alert: Please agree"))),
        CheckItem(f'With all in order and an age of {limit}, the page says "Welcome, {name}" and the form is gone.',
                  (*given(), click(join, f"Welcome, {name}", "alert|Password"))),
    )  # fmt: skip
    mutants = {
        "no-name": Mutant("script", '  if (!value("name")) return "Name is missing";\n', "", (0,)),
        "any-host": Mutant("script", "[^@ ]+[.][^@ ]+$/", "[^@ ]+$/", (1,)),
        "short": Mutant("script", ".length < @least@", ".length < @least@ - 1", (2,)),
        "no-digit": Mutant("script", " || !/[0-9]/.test(password)", "", (3,)),
        "older": Mutant("script", '("age")) < @limit@', '("age")) <= @limit@', (5, 6)),
        "no-box": Mutant(
            "script", '  if (!document.getElementById("agree").checked) return "Please agree";\n', "", (5,)
        ),
        "form-stays": Mutant("script", '  document.getElementById("form").hidden = !message;\n', "", (6,)),
    }
    return filled_task("signup", "Forms-Tables", statement, items, page, mutants, values)
