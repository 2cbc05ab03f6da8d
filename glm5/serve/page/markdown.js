"use strict";
// Markdown as DOM nodes. What a model writes becomes text nodes in elements of our choice: nothing is read as markup,
// and only links to web addresses become links. All scans are linear in the text, or bounded, whatever it holds.

const DEEPEST = 8; // lists and quotations inside each other
const MOST_OPEN = 16; // emphasis or brackets inside each other
const LONGEST_LINK = 2048;

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

const cloneOf = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

// ---- Blocks: lines in, records of type, first line and content out.

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^(?:-{3,}|\*{3,}|_{3,})$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)(.*)|)$/;
const CELL = /^:?-+:?$/;

const indentOf = (line) => line.length - line.trimStart().length;
const isRule = (line) => line.length < 200 && RULE.test(line.replace(/[ \t]/g, ""));

function closesFence(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && indentOf(line) < 4 && text === mark[0].repeat(text.length);
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "");
  return (text.endsWith("|") ? text.slice(0, -1) : text).split(/(?<!\\)\|/).map((cell) => cell.trim());
}

function startsTable(lines, i) {
  if (i + 1 >= lines.length || !lines[i].includes("|") || !lines[i + 1].includes("-")) return false;
  const rule = cells(lines[i + 1]);
  return rule.every((cell) => CELL.test(cell)) && rule.length === cells(lines[i]).length;
}

// Whether line i ends a paragraph by beginning something else.
function interrupts(lines, i) {
  const line = lines[i];
  if (FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || isRule(line) || startsTable(lines, i)) return true;
  const item = ITEM.exec(line);
  return item !== null && Boolean(item[4]) && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
}

function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i += 1; continue; }
    const block = readBlock(lines, i, depth);
    block.start = i;
    blocks.push(block);
    i = block.end;
  }
  return blocks;
}

function readBlock(lines, i, depth) {
  const line = lines[i], fence = FENCE.exec(line), heading = HEADING.exec(line);
  if (fence) return readFence(lines, i, fence);
  if (heading) return { type: "heading", level: heading[1].length, text: (heading[2] || "").trim(), end: i + 1 };
  if (isRule(line)) return { type: "rule", end: i + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return readQuote(lines, i, depth);
  if (depth < DEEPEST && ITEM.test(line)) return readList(lines, i, depth);
  if (startsTable(lines, i)) return readTable(lines, i);
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return { type: "paragraph", text: lines.slice(i, end).map((one) => one.trim()).join("\n"), end };
}

function readFence(lines, i, [, indent, mark, info]) {
  let end = i + 1;
  while (end < lines.length && !closesFence(lines[end], mark)) end += 1;
  const inner = lines.slice(i + 1, end).map((one) => one.slice(Math.min(indent.length, indentOf(one))));
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  return { type: "code", language, text: inner.join("\n"), closed: end < lines.length, mark, indent: indent.length, end: end + 1 };
}

function readQuote(lines, i, depth) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(i, end).map((one) => one.replace(/^ {0,3}> ?/, ""));
  return { type: "quote", blocks: blocksOf(inner, depth + 1), end };
}

function readTable(lines, i) {
  const aligned = cells(lines[i + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const rows = [cells(lines[i])];
  let end = i + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) rows.push(cells(lines[end++]));
  return { type: "table", aligned, rows, end };
}

// Models indent nested items by two, three or four places; anything deeper than the marker belongs to the item.
function readList(lines, i, depth) {
  const first = ITEM.exec(lines[i]), base = first[1].length, ordered = /\d/.test(first[2]);
  const items = [];
  let loose = false, blank = false, end = i;
  for (let at = i; at < lines.length; at += 1) {
    const line = lines[at];
    if (!line.trim()) { blank = true; continue; }
    const indent = indentOf(line), item = isRule(line) ? null : ITEM.exec(line);
    if (item && indent < base + 2) {
      if (/\d/.test(item[2]) !== ordered || indent < base - 1) break;
      if (blank && items.length) loose = true;
      items.push({ width: indent + item[2].length + 1, lines: [item[4] || ""] });
    } else {
      const within = items[items.length - 1];
      if (indent >= base + 2) {
        if (blank) within.lines.push("");
        within.lines.push(line.slice(Math.min(indent, within.width)));
      } else if (!blank && !interrupts(lines, at)) {
        within.lines.push(line.trim());
      } else break;
    }
    blank = false;
    end = at + 1;
  }
  const parsed = items.map((item) => blocksOf(item.lines, depth + 1));
  loose ||= parsed.some((blocks) => blocks.filter((block) => block.type === "paragraph").length > 1);
  return { type: "list", ordered, loose, end, number: ordered ? parseInt(first[2], 10) : 1, items: parsed };
}

function renderBlock(block) {
  switch (block.type) {
    case "code": {
      const figure = cloneOf("t-code");
      figure.querySelector("figcaption span").textContent = block.language || "text";
      figure.querySelector("code").append(block.text);
      return figure;
    }
    case "heading": return make(`h${Math.min(6, block.level + 1)}`, `h${block.level}`, inline(block.text));
    case "rule": return make("hr");
    case "quote": return make("blockquote", "", ...block.blocks.map(renderBlock));
    case "table": return renderTable(block);
    case "list": {
      const list = make(block.ordered ? "ol" : "ul", block.loose ? "loose" : "");
      if (block.ordered && block.number !== 1) list.start = block.number;
      list.append(...block.items.map((blocks) => make("li", "", ...blocks.map((one) =>
        one.type === "paragraph" && !block.loose ? inline(one.text) : renderBlock(one)))));
      return list;
    }
    default: return make("p", "", inline(block.text));
  }
}

function renderTable({ rows: [head, ...body], aligned }) {
  const row = (texts, tag) => make("tr", "", ...aligned.map((align, k) => make(tag, align, inline(texts[k] || ""))));
  const table = make("table", "", make("thead", "", row(head, "th")), make("tbody", "", ...body.map((one) => row(one, "td"))));
  const frame = make("div", "table", table);
  frame.tabIndex = 0;
  return frame;
}

// ---- Inline: one pass, with a stack of what is open.

const NOTABLE = /[\\`*_~[\]!<]|\bhttp(?:s)?:[/]{2}/gi;
const ADDRESS = /http(?:s)?:\/\/[^\s<>"`*\u3000-\u303f\uff00-\uffef]+/iy;
const WORD = /[\p{L}\p{N}]/u;

function inline(text) {
  const scan = new InlineScan(text);
  let at = 0;
  for (;;) {
    NOTABLE.lastIndex = at;
    const found = NOTABLE.exec(text);
    scan.literal(text.slice(at, found ? found.index : text.length));
    if (!found) return scan.fragment();
    at = scan.take(found.index);
  }
}

class InlineScan {
  constructor(text) {
    this.text = text;
    this.out = []; // strings, nodes, and marks that may still find their partner
    this.open = { "*": [], _: [], "~": [], "[": [] }; // places of such marks in out
    this.unclosed = new Set(); // lengths of backtick runs that find no partner any more
  }

  literal(text) {
    if (text) this.out.push(text);
  }

  // Takes what stands at a notable place; returns where to go on.
  take(at) {
    const { text } = this, sign = text[at];
    if (sign === "\\") return this.escape(at);
    if (sign === "`") return this.code(at);
    if (sign === "*" || sign === "_" || sign === "~") return this.emphasis(at, sign);
    if (sign === "[" || (sign === "!" && text[at + 1] === "[")) return this.bracket(at, sign === "!" ? 2 : 1);
    if (sign === "]") return this.link(at);
    if (sign === "h" || sign === "H") return this.address(at);
    if (sign === "<") {
      const end = text.slice(at, at + LONGEST_LINK).indexOf(">");
      const link = end > 0 ? webLink(text.slice(at + 1, at + end), text.slice(at + 1, at + end)) : null;
      if (link) { this.out.push(link); return at + end + 1; }
    }
    this.literal(sign);
    return at + 1;
  }

  escape(at) {
    const next = this.text[at + 1] || "";
    const escaped = /[!-/:-@[-`{-~]/.test(next);
    this.literal(escaped ? next : "\\");
    return at + (escaped ? 2 : 1);
  }

  code(at) {
    const { text } = this, length = runOf(text, at), run = text.slice(at, at + length);
    let end = this.unclosed.has(length) ? -1 : text.indexOf(run, at + length);
    while (end >= 0 && runOf(text, end) !== length) end = text.indexOf(run, end + runOf(text, end));
    if (end < 0) {
      this.unclosed.add(length);
      this.literal(run);
      return at + length;
    }
    const inner = text.slice(at + length, end).replace(/\n/g, " ");
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
    this.out.push(make("code", "", padded ? inner.slice(1, -1) : inner));
    return end + length;
  }

  emphasis(at, sign) {
    const { text, out } = this, run = runOf(text, at), stack = this.open[sign];
    const before = text[at - 1] || " ", after = text[at + run] || " ";
    let opens = /\S/.test(after), closes = /\S/.test(before), count = run;
    if (sign === "_") {
      opens &&= !WORD.test(before);
      closes &&= !WORD.test(after);
    }
    if (count > 3 || (sign === "~" && count !== 2)) opens = closes = false;
    while (closes && count && stack.length) {
      const place = stack[stack.length - 1], mark = out[place];
      const taken = mark.count >= 2 && count >= 2 ? 2 : 1;
      const tag = sign === "~" ? "del" : taken === 2 ? "strong" : "em";
      if (place === out.length - 1) break; // nothing in between
      mark.count -= taken;
      count -= taken;
      this.wrap(mark.count ? place + 1 : place, place + 1, tag);
    }
    if (count && opens && stack.length < MOST_OPEN) {
      stack.push(out.length);
      out.push({ sign, count });
    } else this.literal(sign.repeat(count));
    return at + run;
  }

  bracket(at, length) {
    if (this.open["["].length >= MOST_OPEN) this.literal(this.text.slice(at, at + length));
    else {
      this.open["["].push(this.out.length);
      this.out.push({ sign: length === 2 ? "![" : "[", count: 1 });
    }
    return at + length;
  }

  link(at) {
    const place = this.open["["].pop();
    const target = place === undefined || this.text[at + 1] !== "(" ? null : targetOf(this.text, at + 1);
    const link = target && webLink(target.address);
    if (!link) {
      if (place !== undefined) this.out[place] = this.out[place].sign;
      this.literal("]");
      return at + 1;
    }
    this.forget(place);
    const children = this.out.splice(place).slice(1).map(plain);
    link.append(...(children.length ? children : [target.address]));
    this.out.push(link);
    for (const outer of this.open["["].splice(0)) this.out[outer] = this.out[outer].sign; // no link inside a link
    return target.end;
  }

  address(at) {
    ADDRESS.lastIndex = at;
    const found = ADDRESS.exec(this.text);
    let address = found && !this.open["["].length ? found[0].slice(0, LONGEST_LINK) : "";
    while (/[.,;:!?'\]}_~]$/.test(address) || (address.endsWith(")") && !address.includes("("))) address = address.slice(0, -1);
    const link = address && webLink(address, address);
    if (link) this.out.push(link);
    else this.literal(address = this.text.slice(at, at + 4));
    return at + address.length;
  }

  // Puts what stands from `inner` on into an element, which takes the place of everything from `from` on.
  wrap(from, inner, tag) {
    this.forget(from);
    const children = this.out.splice(inner).map(plain);
    this.out.length = from;
    this.out.push(make(tag, "", ...children));
  }

  // Marks from a place on have missed their partner.
  forget(place) {
    for (const stack of Object.values(this.open)) while (stack.length && stack[stack.length - 1] >= place) stack.pop();
  }

  fragment() {
    const fragment = document.createDocumentFragment();
    for (const item of this.out) fragment.append(plain(item));
    fragment.normalize();
    return fragment;
  }
}

const plain = (item) => (typeof item === "string" || item instanceof Node ? item : item.sign.repeat(item.count));

function runOf(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

// The address in the parentheses that begin at a place; a title behind it is dropped.
function targetOf(text, at) {
  const most = Math.min(text.length, at + LONGEST_LINK);
  for (let i = at + 1, depth = 0; i < most && text[i] !== "\n"; i += 1) {
    if (text[i] === "(") depth += 1;
    else if (text[i] === ")" && depth === 0) {
      return { address: text.slice(at + 1, i).trim().split(/\s/)[0].replace(/^<|>$/g, ""), end: i + 1 };
    } else if (text[i] === ")") depth -= 1;
  }
  return null;
}

// A link, or null for anything that is no full web address.
function webLink(address, ...children) {
  if (!/^http(?:s)?:\/\/[^\s<>]+$/i.test(address) || !URL.canParse(address)) return null;
  const link = make("a", "", ...children);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

// ---- An answer that grows: settled blocks are never touched again, only the last one is made anew.

class MarkdownView {
  constructor(root) {
    this.root = root;
    this.at = 0; // where the first block begins that has not settled
    this.tail = []; // nodes of such blocks
    this.fence = null; // an open code block at the end: its text node, and what of the text is in it
  }

  update(text) {
    if (this.fence && this.grow(text)) return;
    this.fence = null;
    const lines = text.slice(this.at).split("\n"), blocks = blocksOf(lines);
    for (const node of this.tail) node.remove();
    const nodes = blocks.map(renderBlock);
    this.root.append(...nodes);
    // A block settles once a later one has begun with a whole line: until then that line could still become its own.
    let settled = Math.max(0, blocks.length - 1);
    if (settled && blocks[settled].start === lines.length - 1) settled -= 1;
    if (settled) this.at += lines.slice(0, blocks[settled].start).reduce((sum, line) => sum + line.length + 1, 0);
    this.tail = nodes.slice(settled);
    const last = blocks[blocks.length - 1];
    if (last && last.type === "code" && !last.closed && !last.indent && settled === blocks.length - 1) {
      const node = nodes[settled].querySelector("code").firstChild;
      if (node) this.fence = { node, mark: last.mark, at: text.lastIndexOf("\n") + 1, length: text.length };
    }
  }

  // Appends to an open code block; false where it may have ended.
  grow(text) {
    const { fence } = this, fresh = text.slice(fence.at);
    if (fresh.split("\n").some((line) => closesFence(line, fence.mark))) return false;
    fence.node.appendData(text.slice(fence.length));
    fence.at += fresh.lastIndexOf("\n") + 1;
    fence.length = text.length;
    return true;
  }
}
