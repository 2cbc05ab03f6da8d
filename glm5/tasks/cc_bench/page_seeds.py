"""Seeds of frontend tasks: lists, invoices, games and drawings."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from glm5.tasks.cc_bench.checks import (
    CheckItem,
    Do,
    FrontendTask,
    Mutant,
    Page,
    click,
    fill,
    inspect,
    look,
    page_seed,
    press,
    write,
)

THINGS = (
    ("Groceries", "Item", "Add", "Bought", ("flour", "plums", "rice")),
    ("Chores", "Chore", "Note", "Done with", ("sweep stairs", "water ferns", "oil hinges")),
    ("Reading list", "Title", "Keep", "Finished", ("Emma", "Walden", "Ulysses")),
    ("Packing", "Thing", "Pack", "Unpack", ("socks", "lamp", "atlas")),
    ("Repairs", "Job", "Record", "Repaired", ("left door", "gutter", "pump")),
    ("Guests", "Name", "Invite", "Remove", ("Ada", "Ben", "Carla")),
)


@page_seed
def task_list(rng: random.Random) -> FrontendTask:
    title, label, add, finish, (first, second, third) = rng.choice(THINGS)
    unit = rng.choice(("open", "left", "to go"))
    values = {"title": title, "label": label, "add": add, "finish": finish, "unit": unit}
    statement = """\
Build a page "@title@" that keeps a list. It has a heading "@title@", a text field labelled "@label@", a button "@add@"
and a list. The button, and the Enter key in the field, add the field's text as a new entry at the end of the list and
empty the field. Nothing is added if the field is empty or has only spaces. Every entry shows its text and a button
"@finish@ TEXT" (TEXT is the entry's text), which removes the entry. Below, the page says "N @unit@", with the number of
entries now."""
    page = Page(
        """\
<h1>@title@</h1>
<label>@label@ <input id="entry"></label> <button id="add">@add@</button>
<ul id="list"></ul>
<p id="count"></p>
""",
        """\
const list = document.getElementById("list"), entry = document.getElementById("entry");
const show = () => { document.getElementById("count").textContent = list.children.length + " @unit@"; };
const add = () => {
  const text = entry.value.trim();
  if (text === "") return;
  const item = document.createElement("li"), button = document.createElement("button");
  item.textContent = text + " ";
  button.textContent = "@finish@ " + text;
  button.onclick = () => { item.remove(); show(); };
  item.append(button);
  list.append(item);
  entry.value = "";
  show();
};
document.getElementById("add").onclick = add;
entry.onkeydown = (event) => { if (event.key === "Enter") add(); };
show();
""",
    )
    field, button = f'textbox "{label}"', f'button "{add}"'
    items = (
        CheckItem(f'"{add}" adds the text of the field as an entry, after the entries that are there.',
                  (write(field, first), click(button, first), write(field, second),
                   click(button, f"(?s){first}.*listitem.*{second}"))),
        CheckItem(f'After "{add}" the field is empty.',
                  (write(field, first, first), click(button, f"(?s)listitem.*{first}",
                                                     rf'textbox "{label}": {first}'))),
        CheckItem("A field with spaces only adds nothing.",
                  (write(field, "   "), click(button, f"0 {unit}", "listitem"))),
        CheckItem("The Enter key in the field adds the entry.", (write(field, third), press("Enter", f"1 {unit}"))),
        CheckItem(f'"{finish} TEXT" removes its entry and no other.',
                  (write(field, first), click(button), write(field, second), click(button, f"{finish} {first}"),
                   click(f'button "{finish} {first}"', f"{finish} {second}", f"{finish} {first}"))),
        CheckItem(f'The page counts the entries, from "0 {unit}" on, also after one was removed.',
                  (look(f"\\b0 {unit}"), write(field, first), click(button, f"\\b1 {unit}"),
                   click(f'button "{finish} {first}"', f"\\b0 {unit}"))),
    )  # fmt: skip
    mutants = {
        "keeps-text": Mutant("script", '  entry.value = "";\n', "", (1,)),
        "takes-spaces": Mutant("script", '  if (text === "") return;\n', "", (2,)),
        "no-enter": Mutant("script", 'event.key === "Enter"', 'event.key === "Tab"', (3,)),
        "removes-none": Mutant("script", "item.remove(); ", "", (4, 5)),
        "stale-count": Mutant("script", "item.remove(); show();", "item.remove();", (5,)),
        "wrong-order": Mutant("script", "list.append(item)", "list.prepend(item)", (0,)),
    }
    return filled_task("task-list", "Business", statement, items, page, mutants, values)


@page_seed
def invoice(rng: random.Random) -> FrontendTask:
    least, share, tax = rng.choice((10, 20, 25, 50)), rng.choice((5, 10, 15)), rng.choice((7, 19, 20, 25))
    few, many, price = rng.randint(2, least - 1), least + rng.randint(1, 9), rng.choice((4, 8, 12, 20))

    def total(quantity: int, percent: int) -> str:
        hundredths, rest = divmod(quantity * price * (100 - percent) * (100 + tax), 100)
        hundredths += rest > 50
        return f"{hundredths // 100}.{hundredths % 100:02d}"

    values = {"least": least, "share": share, "tax": tax}
    statement = """\
Build a page "Invoice" with two number fields labelled "Quantity" and "Unit price", a button "Calculate" and a line for
the result. The button shows "Total: X", where X is quantity times unit price, with @share@ % discount for a quantity of
@least@ or more, and then @tax@ % tax on top; X always has two decimals and a point. For a quantity that is empty, zero
or negative the page shows an element of role alert with the text "Quantity must be at least 1" in place of a total. A
button "Clear" empties both fields and removes total and alert."""
    page = Page(
        """\
<h1>Invoice</h1>
<label>Quantity <input id="quantity" type="number"></label>
<label>Unit price <input id="price" type="number"></label>
<button id="run">Calculate</button> <button id="clear">Clear</button>
<div id="result"></div>
""",
        """\
const field = (id) => document.getElementById(id), result = field("result");
field("run").onclick = () => {
  const quantity = Number(field("quantity").value), price = Number(field("price").value);
  if (quantity < 1) {
    result.innerHTML = '<p role="alert">Quantity must be at least 1</p>';
    return;
  }
  let sum = quantity * price;
  if (quantity >= @least@) sum *= 1 - @share@ / 100;
  sum *= 1 + @tax@ / 100;
  result.innerHTML = "<p>Total: " + sum.toFixed(2) + "</p>";
};
field("clear").onclick = () => {
  result.innerHTML = "";
  for (const id of ["quantity", "price"]) field(id).value = "";
};
""",
    )
    quantity, cost, run = 'spinbutton "Quantity"', 'spinbutton "Unit price"', 'button "Calculate"'

    def asked(number: int, shows: str, lacks: str = "") -> tuple[Do, ...]:
        return (write(quantity, str(number)), write(cost, str(price)), click(run, shows, lacks))

    items = (
        CheckItem(f"A quantity of {few} at {price} costs {total(few, 0)}: tax, no discount.",
                  asked(few, f"Total: {total(few, 0)}".replace(".", r"\."))),
        CheckItem(f"A quantity of {many} at {price} costs {total(many, share)}: discount and tax.",
                  asked(many, f"Total: {total(many, share)}".replace(".", r"\."))),
        CheckItem(f"The discount begins with a quantity of exactly {least}: {total(least, share)} at {price}.",
                  asked(least, f"Total: {total(least, share)}".replace(".", r"\."))),
        CheckItem("A quantity of 0 shows an alert and no total.",
                  (*asked(few, "Total: "), *asked(0, "alert: Quantity must be at least 1", "Total:"))),
        CheckItem('"Clear" empties both fields and removes the total.',
                  (*asked(few, "Total: "), click('button "Clear"', "spinbutton",
                                                 f'Total|spinbutton "[^"]*": "?{few}|spinbutton "[^"]*": "?{price}'))),
    )  # fmt: skip
    mutants = {
        "no-tax": Mutant("script", "  sum *= 1 + @tax@ / 100;\n", "", (0, 1, 2)),
        "no-discount": Mutant("script", "1 - @share@ / 100", "1", (1, 2)),
        "late-discount": Mutant("script", "quantity >= @least@", "quantity > @least@", (2,)),
        "takes-zero": Mutant("script", "quantity < 1", "quantity < 0", (3,)),
        "keeps-fields": Mutant("script", 'field(id).value = "";', "field(id).focus();", (4,)),
    }
    return filled_task("invoice", "Business", statement, items, page, mutants, values)


@page_seed
def noughts(rng: random.Random) -> FrontendTask:
    first, second = rng.choice((("X", "O"), ("O", "X"), ("A", "B"), ("Red", "Blue")))
    values = {"first": first, "second": second}
    lines = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7)]
    line = rng.choice(lines)
    pairs = itertools.combinations([cell for cell in range(1, 10) if cell not in line], 2)
    others = next(p for p in pairs if not any(set(one) <= {*line[:2], *p} for one in lines))
    free = next(cell for cell in range(1, 10) if cell not in (*line, *others))
    statement = """\
Build the game of three in a row for two players, "@first@" and "@second@"; @first@ begins. The board is nine buttons in
a grid of three by three. The accessible name (aria-label) of an empty one is "Cell N", N from 1 (top left) to 9 (bottom
right, row by row); of a taken one it is "Cell N: PLAYER". A click on an empty cell takes it for the player whose turn
it is; a click on a taken cell does nothing. A line of text says "Turn: PLAYER". Three cells in a row, a column or a
diagonal win: the text is then "Winner: PLAYER", and no cell can be taken any more. If all cells are taken without a
winner, the text is "Draw". A button "New game" starts again."""
    page = Page(
        """\
<h1>Three in a row</h1>
<p id="status"></p>
<div id="board"></div>
<button id="again">New game</button>
""",
        """\
const lines = [[1,2,3],[4,5,6],[7,8,9],[1,4,7],[2,5,8],[3,6,9],[1,5,9],[3,5,7]];
const board = document.getElementById("board"), status_ = document.getElementById("status");
const say = (text) => { status_.textContent = text; };
let cells, turn, over;
const draw = () => {
  board.replaceChildren(...cells.map((player, i) => {
    const button = document.createElement("button");
    button.setAttribute("aria-label", "Cell " + (i + 1) + (player ? ": " + player : ""));
    button.textContent = player || "\\u00a0";
    button.onclick = () => take(i);
    return button;
  }));
};
const take = (i) => {
  if (over || cells[i]) return;
  cells[i] = turn;
  if (lines.some((line) => line.every((cell) => cells[cell - 1] === turn))) {
    over = true;
    say("Winner: " + turn);
  } else if (cells.every(Boolean)) {
    say("Draw");
  } else {
    turn = turn === "@first@" ? "@second@" : "@first@";
    say("Turn: " + turn);
  }
  draw();
};
const start = () => { cells = Array(9).fill(""); turn = "@first@"; over = false; say("Turn: " + turn); draw(); };
document.getElementById("again").onclick = start;
start();
""",
        "#board { display: grid; grid-template-columns: repeat(3, 4em); }\n",
    )

    def cell(number: int) -> str:
        return f'button "Cell {number}"'

    won = (click(cell(line[0])), click(cell(others[0])), click(cell(line[1])), click(cell(others[1])))
    items = (
        CheckItem(f"{first} begins, then it is {second}'s turn, then {first}'s again.",
                  (look(f"Turn: {first}"), click(cell(5), f"Turn: {second}"), click(cell(1), f"Turn: {first}"))),
        CheckItem("A click on a taken cell changes nothing.",
                  (click(cell(5), f"Cell 5: {first}"),
                   click(f'button "Cell 5: {first}"', f"(?s)Turn: {second}.*Cell 5: {first}"))),
        CheckItem(f"Cells {', '.join(map(str, line))} win for {first}.",
                  (*won, click(cell(line[2]), f"Winner: {first}"))),
        CheckItem("After a win no cell can be taken.",
                  (*won, click(cell(line[2]), f"Cell {line[2]}: {first}"),
                   click(cell(free), f'Cell {free}"', f"Cell {free}: "))),
        CheckItem('A full board without a line of three is a "Draw".',
                  tuple(click(cell(n)) for n in (1, 2, 3, 5, 4, 6, 8, 7)) + (click(cell(9), "Draw", "Winner"),)),
        CheckItem(f'"New game" empties the board and lets {first} begin.',
                  (click(cell(5), f"Cell 5: {first}"), click('button "New game"', f"Turn: {first}", "Cell 5: "))),
    )  # fmt: skip
    mutants = {
        "one-player": Mutant("script", 'turn = turn === "@first@" ? "@second@" : "@first@"', "turn = turn", (0, 1, 4)),
        "takes-taken": Mutant("script", "over || cells[i]", "over", (1,)),
        "goes-on": Mutant("script", "    over = true;\n", "", (3,)),
        "no-draw": Mutant("script", 'say("Draw")', 'say("Turn: " + turn)', (4,)),
        "keeps-turn": Mutant("script", 'turn = "@first@"; over', 'turn = turn || "@first@"; over', (5,)),
    }
    return filled_task("noughts", "Games", statement, items, page, mutants, values)


@page_seed
def sticks(rng: random.Random) -> FrontendTask:
    heap, most = rng.choice((15, 17, 21, 23)), rng.choice((3, 4))
    loser = rng.random() < 0.5  # whether who takes the last one loses
    values = {"heap": heap, "most": most, "rule": "loses" if loser else "wins"}
    values |= {"shift": "3 - player" if loser else "player"}
    statement = """\
Build a game for two players with a heap of @heap@ sticks. In turn, each player takes 1 to @most@ sticks with the
buttons "Take 1" to "Take @most@"; player 1 begins. The page says "Sticks: N" and "Player P". A button that would take
more sticks than there are is disabled. Who takes the last stick @rule@: the page then says "Player P wins" and all the
buttons "Take" are disabled. A button "Restart" begins a new game."""
    page = Page(
        """\
<h1>Sticks</h1>
<p id="heap"></p>
<p id="turn"></p>
<div id="moves"></div>
<button id="restart">Restart</button>
""",
        """\
let heap, player;
const show = () => {
  document.getElementById("heap").textContent = "Sticks: " + heap;
  document.getElementById("turn").textContent = heap ? "Player " + player : "Player " + (@shift@) + " wins";
  document.getElementById("moves").replaceChildren(...Array.from({ length: @most@ }, (_, i) => {
    const button = document.createElement("button");
    button.textContent = "Take " + (i + 1);
    button.disabled = i + 1 > heap;
    button.onclick = () => { heap -= i + 1; if (heap) player = 3 - player; show(); };
    return button;
  }));
};
const start = () => { heap = @heap@; player = 1; show(); };
document.getElementById("restart").onclick = start;
start();
""",
    )
    take = f'button "Take {most}"'
    rounds, rest = divmod(heap - 1, most)
    moves = [most] * rounds + ([rest] if rest else [])  # then one stick is left
    last = 1 + len(moves) % 2
    wins = 3 - last if loser else last
    to_one = tuple(click(f'button "Take {n}"') for n in moves)
    items = (
        CheckItem(f"The heap has {heap} sticks at first, and player 1 begins.",
                  (look(f"(?s)Sticks: {heap}.*Player 1"),)),
        CheckItem(f'"Take {most}" takes {most} sticks, and it is the other player\'s turn.',
                  (click(take, f"(?s)Sticks: {heap - most}.*Player 2"),
                   click('button "Take 1"', f"(?s)Sticks: {heap - most - 1}.*Player 1"))),
        CheckItem('With one stick left, only "Take 1" can be used.',
                  (*to_one, look(r'(?s)Sticks: 1\b.*"Take 2" \[disabled\]', r'"Take 1" \[disabled\]'))),
        CheckItem(f"Who takes the last stick {values['rule']}: here player {wins} wins.",
                  (*to_one, click('button "Take 1"', f"Player {wins} wins"))),
        CheckItem('"Restart" begins again with the whole heap and player 1.',
                  (click(take, "Player 2"), click('button "Restart"', f"(?s)Sticks: {heap}.*Player 1"))),
    )  # fmt: skip
    mutants = {
        "one-more": Mutant("script", "heap = @heap@;", "heap = @heap@ + 1;", (0, 1, 2, 3, 4)),
        "never-disabled": Mutant("script", "i + 1 > heap", "false", (2,)),
        "wrong-winner": Mutant("script", "(@shift@)", "(3 - (@shift@))", (3,)),
        "same-player": Mutant("script", "player = 3 - player", "player = 1", (1, 4) if last == 1 else (1, 3, 4)),
        "keeps-player": Mutant("script", "player = 1; show();", "player = player || 1; show();", (4,)),
    }
    return filled_task("sticks", "Games", statement, items, page, mutants, values)


@page_seed
def shapes(rng: random.Random) -> FrontendTask:
    size = rng.choice((20, 24, 30))
    colour, code = rng.choice((("tomato", "255, 99, 71"), ("teal", "0, 128, 128"), ("orchid", "218, 112, 214")))
    other, other_code = rng.choice((("navy", "0, 0, 128"), ("olive", "128, 128, 0"), ("gold", "255, 215, 0")))
    values = {"size": size, "colour": colour, "other": other}
    statement = """\
Build a drawing board of SVG. It has an svg element of 300 by 200 pixels, a selection labelled "Colour" with the options
"@colour@" (chosen at first) and "@other@", and buttons "Circle", "Square", "Undo" and "Clear". "Circle" adds a circle
element of radius @size@ to the svg, "Square" a rect element with sides of @size@; both are filled with the chosen
colour, and the n-th shape is further right than the one before. "Undo" removes the newest shape, "Clear" all of them.
The page says "Shapes: N"."""
    page = Page(
        """\
<h1>Board</h1>
<label>Colour <select id="colour"><option>@colour@</option><option>@other@</option></select></label>
<button id="circle">Circle</button> <button id="square">Square</button>
<button id="undo">Undo</button> <button id="clear">Clear</button>
<p id="count"></p>
<svg id="board" width="300" height="200"></svg>
""",
        """\
const board = document.getElementById("board"), on = (id, act) => {
  document.getElementById(id).onclick = () => { act(); show(); };
};
const show = () => { document.getElementById("count").textContent = "Shapes: " + board.children.length; };
const add = (tag, sizes) => {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", tag), at = 10 + 12 * board.children.length;
  const places = tag === "circle" ? { cx: at + @size@, cy: 100 } : { x: at, y: 100 };
  for (const [name, value] of Object.entries({ ...sizes, ...places })) shape.setAttribute(name, value);
  shape.setAttribute("fill", document.getElementById("colour").value);
  board.append(shape);
};
on("circle", () => add("circle", { r: @size@ }));
on("square", () => add("rect", { width: @size@, height: @size@ }));
on("undo", () => board.lastElementChild?.remove());
on("clear", () => board.replaceChildren());
show();
""",
    )
    circle, square = 'button "Circle"', 'button "Square"'
    items = (
        CheckItem(f'"Circle" adds a circle of radius {size} in the colour {colour}.',
                  (click(circle), inspect("svg circle", f'(?s)1 element.*r="{size}".*fill: rgb\\({code}\\)'))),
        CheckItem(f'"Square" adds a rect of {size} by {size}.',
                  (click(square), inspect("svg rect", f'(?s)1 element.*box: [\\d.]+, [\\d.]+, {size}, {size}'))),
        CheckItem(f'New shapes have the chosen colour; here {other}.',
                  (write('combobox "Colour"', other), click(circle),
                   inspect("svg circle", f"fill: rgb\\({other_code}\\)"))),
        CheckItem('"Undo" removes the newest shape alone.',
                  (click(circle), click(square, "Shapes: 2"), click('button "Undo"', "Shapes: 1"),
                   inspect("svg circle", "1 element"), inspect("svg rect", "0 elements"))),
        CheckItem('"Clear" removes all shapes.',
                  (click(circle), click(square), click('button "Clear"', "Shapes: 0"),
                   inspect("svg circle, svg rect", "0 elements"))),
    )  # fmt: skip
    mutants = {
        "small": Mutant("script", "{ r: @size@ }", "{ r: @size@ - 5 }", (0,)),
        "flat": Mutant("script", "height: @size@", "height: @size@ - 4", (1,)),
        "one-colour": Mutant("script", 'document.getElementById("colour").value', '"@colour@"', (2,)),
        "undo-oldest": Mutant("script", "board.lastElementChild", "board.firstElementChild", (3,)),
        "clear-one": Mutant("script", "board.replaceChildren()", "board.firstElementChild?.remove()", (4,)),
    }
    return filled_task("shapes", "SVG-Canvas", statement, items, page, mutants, values)


def filled_task(
    name: str, category: str, statement: str, items: tuple[CheckItem, ...], page: Page, mutants: dict[str, Mutant],
    values: Mapping[str, object],
) -> FrontendTask:  # fmt: skip
    """The task with its values filled in."""
    parts = Page(*(fill(part, **values) for part in (page.body, page.script, page.style)))
    filled = {key: Mutant(m.part, fill(m.old, **values), fill(m.new, **values), m.fails) for key, m in mutants.items()}
    return FrontendTask(name, category, fill(statement, **values), items, parts, filled)
