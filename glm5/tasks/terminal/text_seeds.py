"""Seeds about text files: logs, encodings, names, templates, settings."""

from __future__ import annotations

import json
import random

from glm5.tasks.terminal.harness import Tests
from glm5.tasks.terminal.seed import Draft, python, seed
from glm5.tasks.terminal.words import NOUNS, WORDS, person, sentence


@seed("text")
def top_addresses(rng: random.Random) -> Draft:
    """The addresses of a web server's log that received most bytes with a given status."""
    addresses = [f"10.{rng.randint(0, 9)}.{rng.randint(0, 99)}.{rng.randint(1, 254)}" for _ in range(14)]
    status, count = rng.choice((200, 206, 404)), rng.randint(3, 6)
    sums, lines = dict[str, int](), list[str]()
    for number in range(rng.randint(600, 900)):
        address, code = rng.choice(addresses), rng.choice((200, 200, 206, 301, 404, 500))
        size = "-" if code == 301 else str(rng.randint(100, 90_000))
        path = f"/{rng.choice(NOUNS)}/{rng.randint(1, 400)}"
        if rng.random() < 0.1:
            path += f"?status={status}"
        stamp = f"12/Mar/2026:{number // 60 % 24:02}:{number % 60:02}:00 +0000"
        lines.append(f'{address} - {rng.choice(("-", "bob"))} [{stamp}] "GET {path} HTTP/1.1" {code} {size}')
        if code == status:
            sums[address] = sums.get(address, 0) + int(size)
    ranked = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:count]
    return Draft(
        instruction=f"""
        /app/access.log is a web server's log in the common log format. The last two fields of a line are the status and
        the number of bytes.

        Find the {count} client addresses that received the most bytes in answers with status {status}. Write them to
        /app/top.txt, one line each, as `ADDRESS TOTAL` with one space between, largest total first. Equal totals are
        ordered by address, as text.
        """,
        files={"/app/access.log": "\n".join(lines) + "\n"},
        solution=f"""
        cd /app
        awk '$(NF-1) == {status} {{ sum[$1] += $NF }} END {{ for (a in sum) print a, sum[a] }}' access.log |
            LC_ALL=C sort -k2,2nr -k1,1 | head -n {count} > top.txt
        """,
        data={"/app/top.txt": [f"{address} {total}" for address, total in ranked]},
        packages=("mawk",),
    )


@seed("text", level=2)
def encodings(rng: random.Random) -> Draft:
    """Files in several encodings and line endings become UTF-8 with plain line feeds."""
    letters, wanted, files = "äöüßéèñçåøæ", dict[str, str](), dict[str, str | bytes]()
    listing = list[str]()
    for number in range(rng.randint(8, 12)):
        text = "".join(
            f"{sentence(rng)} {rng.choice(letters)}{rng.choice(letters)}\n" for _ in range(rng.randint(3, 9))
        )
        encoding = rng.choice(("latin-1", "utf-16", "utf-8", "utf-8-sig", "cp1252"))
        if encoding == "cp1252":
            text += "price “5 €” – ok\n"
        name = f"{rng.choice(NOUNS)}-{number}.txt"
        ending = rng.choice(("\n", "\r\n", "\r"))
        files[f"/app/texts/{name}"] = text.replace("\n", ending).encode(encoding)
        listing.append(f"{name}\t{encoding.removesuffix('-sig')}")
        wanted[name] = text
    return Draft(
        instruction="""
        The files in /app/texts have different encodings and different line endings (LF, CR LF or CR alone).
        /app/encodings.tsv names the encoding of each file, as Python and iconv call it.

        Convert every file in place to UTF-8 without a byte order mark, with LF line endings. Change nothing else, and
        leave no other files in /app/texts.
        """,
        files={**files, "/app/encodings.tsv": "\n".join(listing) + "\n"},
        solution=python("""
        from pathlib import Path
        for line in Path("encodings.tsv").read_text().splitlines():
            name, encoding = line.split("\\t")
            path = Path("texts", name)
            text = path.read_bytes().decode(encoding).removeprefix("\\ufeff")
            path.write_bytes(text.replace("\\r\\n", "\\n").replace("\\r", "\\n").encode())
        """),
        data={"/app/texts/": wanted},
    )


@seed("text", level=2)
def settings(rng: random.Random) -> Draft:
    """Layers of INI files and environment settings are merged into JSON."""
    sections = rng.sample(NOUNS, 4)
    layers, merged = list[str](), dict[str, dict[str, str]]()
    for layer in range(3):
        text = f"# layer {layer}\n"
        for section in sections[: 4 - (layer == 1)]:
            text += f"\n[{section}]\n"
            for key in rng.sample(WORDS[:10], rng.randint(2, 5)):
                value = rng.choice((str(rng.randint(1, 999)), sentence(rng, 4), "", "a=b;c"))
                text += f"{key}{rng.choice((' = ', '=', ': '))}{value}\n"
                merged.setdefault(section, {})[key] = value
        layers.append(text)
    overrides = list[str]()
    for section in rng.sample(sections, 2):
        key, value = rng.choice(WORDS[:10]), str(rng.randint(1000, 9999))
        overrides.append(f"APP__{section.upper()}__{key.upper()}={value}")
        merged.setdefault(section, {})[key] = value
    return Draft(
        instruction="""
        A program reads its settings from /app/conf/00-base.ini, then 10-site.ini, then 20-local.ini in the same folder;
        a later file replaces values of earlier ones key by key. After that, lines of /app/conf/override.env of the form
        APP__SECTION__KEY=VALUE replace single values; section and key are the lower-case form of what the line says.

        Write the settings that result to /app/settings.json: an object of sections, each an object of keys, all values
        strings. Names of keys and sections are lower case. Values have no white space around them; an empty value is
        the empty string.
        """,
        files={
            "/app/conf/00-base.ini": layers[0],
            "/app/conf/10-site.ini": layers[1],
            "/app/conf/20-local.ini": layers[2],
            "/app/conf/override.env": "\n".join(overrides) + "\n",
        },
        solution=python("""
        import configparser, json
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(["conf/00-base.ini", "conf/10-site.ini", "conf/20-local.ini"])
        merged = {name: dict(parser[name]) for name in parser.sections()}
        for line in open("conf/override.env"):
            name, _, value = line.rstrip("\\n").partition("=")
            _, section, key = name.lower().split("__")
            merged.setdefault(section, {})[key] = value
        json.dump(merged, open("settings.json", "w"))
        """),
        data={"/app/settings.json": merged},
    )


@seed("text")
def file_names(rng: random.Random) -> Draft:
    """Files with awkward names are renamed by a rule, with numbers for names that would be equal."""
    files, wanted, listed = dict[str, str | bytes](), dict[str, str](), list[tuple[str, str]]()
    for number in range(rng.randint(14, 20)):
        words = [rng.choice(WORDS[:4]).capitalize(), rng.choice(("IMG", "img", "Scan"))]
        name = rng.choice((" ", "  ", " - ")).join(words) + rng.choice((".JPG", ".jpg", ".Jpeg"))
        while any(name == known for known, _ in listed):
            name = " " + name
        listed.append((name, f"photo {number} {rng.random()}\n"))
    taken = dict[str, int]()
    for name, content in sorted(listed):
        files[f"/app/photos/{name}"] = content
        stem = "_".join("".join(c if c.isalnum() else " " for c in name.rpartition(".")[0].lower()).split())
        taken[stem] = taken.get(stem, 0) + 1
        suffix = f"_{taken[stem]}" if taken[stem] > 1 else ""
        wanted[f"{stem}{suffix}.jpg"] = content
    return Draft(
        instruction="""
        Rename the files in /app/photos, in the byte order of their present names:

        - the part before the last dot becomes lower case; every run of characters that are not letters or digits
          becomes one underscore, and there is none at the start or the end;
        - the extension becomes .jpg;
        - if an earlier file already has the name, the second one gets _2 before the extension, the third _3, and so on.

        Do not change what is in the files, and leave no other files there.
        """,
        files=files,
        solution=python(
            """
        import os, re
        taken = {}
        os.mkdir("../new")
        for name in sorted(os.listdir(".")):
            stem = re.sub("[^a-z0-9]+", "_", name.rpartition(".")[0].lower()).strip("_")
            taken[stem] = taken.get(stem, 0) + 1
            suffix = f"_{taken[stem]}" if taken[stem] > 1 else ""
            os.rename(name, f"../new/{stem}{suffix}.jpg")
        for name in os.listdir("../new"):
            os.rename(f"../new/{name}", name)
        os.rmdir("../new")
        """,
            "/app/photos",
        ),
        data={"/app/photos/": wanted},
    )


def _check_letters(t: Tests) -> None:
    t.equal(sorted(t.tree("/app/out")), sorted(t.data), "the files of /app/out")
    for name, wanted in t.data.items():
        t.equal(t.text(f"/app/out/{name}").rstrip("\n"), wanted.rstrip("\n"), f"/app/out/{name}")


@seed("text")
def letters(rng: random.Random) -> Draft:
    """A template is filled from a table, one file per row."""
    rows, wanted = list[dict[str, str]](), dict[str, str]()
    template = "Dear {{name}},\n\nyour order of {{count}} {{item}}(s) costs {{total}} EUR.\nReference: {{{{id}}}}\n"
    for number in range(rng.randint(6, 10)):
        count, cents = rng.randint(1, 9), rng.randint(100, 9999)
        row = {"id": f"o{number:03}", "name": person(rng), "item": rng.choice(NOUNS), "count": str(count)}
        row["price"] = f"{cents / 100:.2f}"
        rows.append(row)
        text = template.replace("{{{{id}}}}", "{{" + row["id"] + "}}")
        total = count * cents
        for key, value in {**row, "total": f"{total // 100}.{total % 100:02}"}.items():
            text = text.replace("{{" + key + "}}", value)
        wanted[f"{row['id']}.txt"] = text
    return Draft(
        instruction="""
        Fill the template /app/letter.txt once per line of /app/orders.jsonl (one JSON object a line) and write the
        result to /app/out/ID.txt, where ID is the order's `id`.

        `{{key}}` stands for the value of the key; `{{total}}` is count times price with two decimals. Four braces are
        two literal ones: `{{{{id}}}}` becomes the id between two pairs of braces.
        """,
        files={
            "/app/letter.txt": template,
            "/app/orders.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        },
        solution="""
        cd /app; mkdir -p out
        python3 - <<'END'
        import json, re
        from decimal import Decimal
        template = open("letter.txt").read()
        for line in open("orders.jsonl"):
            row = json.loads(line)
            row["total"] = str((Decimal(row["price"]) * int(row["count"])).quantize(Decimal("0.01")))
            text = template.replace("{{{{", "\\0").replace("}}}}", "\\1")
            text = text.replace("\\0id\\1", "\\0" + row["id"] + "\\1")
            text = re.sub(r"\\{\\{(\\w+)\\}\\}", lambda m: row[m[1]], text)
            open(f"out/{row['id']}.txt", "w").write(text.replace("\\0", "{{").replace("\\1", "}}"))
        END
        """,
        check=_check_letters,
        data=wanted,
    )
