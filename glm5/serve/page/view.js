// How turns look. A view shows one turn and is told when it has changed.

const views = new WeakMap(); // of their elements

function setIcon(button, name) {
  button.querySelector("use").setAttribute("href", `#i-${name}`);
}

function copied(button) {
  setIcon(button, "done");
  announce("Copied.");
  setTimeout(() => setIcon(button, "copy"), 1500);
}

async function copyText(value, button) {
  try {
    await navigator.clipboard.writeText(value);
  } catch { // pages that came over plain HTTP have no clipboard
    const hidden = make("textarea", "unseen");
    hidden.value = value;
    (button.closest("dialog") || document.body).append(hidden);
    hidden.select();
    const done = document.execCommand("copy");
    hidden.remove();
    button.focus();
    if (!done) { announce("This browser does not allow copying."); return; }
  }
  copied(button);
}

function announce(message) {
  $("announce").textContent = message;
}

const seconds = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
const brief = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : seconds(value));
const count = (value, word) => `${value.toLocaleString("en")} ${word}${value === 1 ? "" : "s"}`;

class UserView {
  constructor(turn) {
    this.turn = turn;
    this.root = cloneOf("t-user");
    this.root.querySelector(".bubble").append(turn.content);
    views.set(this.root, this);
  }

  get copy() { return this.turn.content; }

  edit() {
    if (this.editor) return;
    this.editor = cloneOf("t-edit");
    this.root.classList.add("editing");
    this.root.append(this.editor);
    const area = this.editor.querySelector("textarea");
    area.value = this.turn.content;
    fit(area);
    area.focus();
  }

  closeEditor() {
    this.editor?.remove();
    this.editor = null;
    this.root.classList.remove("editing");
  }
}

class AssistantView {
  constructor(turn) {
    this.turn = turn;
    this.root = cloneOf("t-assistant");
    const part = (selector) => this.root.querySelector(selector);
    this.thinking = part(".thinking");
    this.label = part("summary span");
    this.thought = part(".thought");
    this.markdown = new MarkdownView(part(".md"));
    this.cards = [];
    this.told = { reasoning: 0, content: 0 }; // characters that are on the page
    this.touched = false; // whether the reader has folded or unfolded the thinking
    this.cost = 0; // of the last update, in milliseconds
    this.planned = false;
    part("summary").addEventListener("click", () => { this.touched = true; });
    views.set(this.root, this);
    this.update();
  }

  get copy() { return this.turn.content || this.turn.reasoning; }

  // An update with the next frame. Costly ones come seldom, so that the page always has most of its time for itself.
  schedule() {
    if (this.planned) return;
    this.planned = true;
    const draw = () => requestAnimationFrame(() => {
      this.planned = false;
      const start = performance.now();
      this.update();
      follow();
      this.cost = performance.now() - start;
    });
    if (this.cost > 4) setTimeout(draw, Math.min(1000, this.cost * 6));
    else draw();
  }

  update() {
    const { turn, root } = this, running = turn.state === "running";
    root.setAttribute("aria-busy", String(running));
    root.querySelector(".waiting").hidden = !running || Boolean(turn.reasoning || turn.content || turn.calls.length);
    this.updateThinking(running);
    if (turn.content.length > this.told.content) {
      this.markdown.update(turn.content);
      this.told.content = turn.content.length;
    }
    this.updateCalls(running);
    root.querySelector(".failure").hidden = turn.state !== "failed";
    if (turn.state === "failed") root.querySelector(".failure p").textContent = turn.error;
    root.querySelector(".stats").textContent = turn.stats;
    root.querySelector("[data-action=copy]").hidden = !this.copy;
  }

  updateThinking(running) {
    const { turn, thought } = this;
    if (!turn.reasoning) return;
    const thinks = running && !turn.content && !turn.calls.length;
    const atEnd = thought.scrollHeight - thought.scrollTop - thought.clientHeight < 24;
    if (this.told.reasoning < turn.reasoning.length) {
      if (!thought.firstChild) thought.append("");
      thought.firstChild.appendData(turn.reasoning.slice(this.told.reasoning));
      this.told.reasoning = turn.reasoning.length;
      if (atEnd) thought.scrollTop = thought.scrollHeight;
    }
    this.thinking.hidden = false;
    this.thinking.classList.toggle("live", thinks);
    this.label.textContent = thinks ? "Thinking" : turn.thought || "Thoughts";
    if (!this.touched && this.thinking.open !== thinks) this.thinking.open = thinks;
  }

  updateCalls(running) {
    const { turn } = this, holder = this.root.querySelector(".calls");
    turn.calls.forEach((call, i) => {
      this.cards[i] ||= new CallCard(call, holder);
      this.cards[i].update(running, turn.finish === "tool_calls", !this.root.nextElementSibling);
    });
    const wanted = awaits(turn) && !this.root.nextElementSibling;
    const button = holder.querySelector("[data-action=results]");
    if (wanted && !button) holder.append(cloneOf("t-results"));
    else if (!wanted) button?.remove();
  }
}

class CallCard {
  constructor(call, parent) {
    this.call = call;
    this.root = cloneOf("t-call");
    this.area = this.root.querySelector("textarea");
    this.area.value = call.draft || "";
    this.area.addEventListener("input", () => { call.draft = this.area.value; });
    parent.append(this.root);
    this.shown = null;
  }

  // `whole` says that the call is complete, `last` that the conversation waits behind it.
  update(running, whole, last) {
    const { call, root } = this, pending = whole && call.result === null && last;
    const state = running ? "is being written" : !whole ? "cut off" : call.result !== null ? "answered" : last ? "waits for its result" : "not run";
    root.setAttribute("aria-label", `Call of ${call.name}, ${state}`);
    root.querySelector("strong").textContent = call.name;
    root.querySelector("header .soft").textContent = state;
    const shown = running ? call.arguments : pretty(call.arguments);
    if (shown !== this.shown) root.querySelector(".arguments").textContent = this.shown = shown;
    root.querySelector("label").hidden = !pending;
    this.area.setAttribute("aria-label", `Result of ${call.name}`);
    const result = root.querySelector(".result");
    result.hidden = call.result === null;
    if (call.result !== null) result.textContent = pretty(call.result);
  }
}

// JSON on one line where it is short, else indented; anything else as it is. Only space moves: a number that JavaScript
// cannot hold stays what it is.
function pretty(written) {
  try { JSON.parse(written); } catch { return written; }
  const tokens = written.match(/"(?:[^"\\]|\\.)*"|[^\s"{}[\],:]+|[{}[\],:]/g);
  const line = tokens.map((token) => (token === "," || token === ":" ? `${token} ` : token)).join("");
  if (line.length < 68) return line;
  let depth = 0, lines = "";
  tokens.forEach((token, i) => {
    const before = tokens[i - 1] || "", empty = /[{[]/.test(before) && /^[}\]]$/.test(token) && before.length === 1;
    if (/^[}\]]$/.test(token)) depth -= 1;
    if (i && !empty && (/^[{[,]$/.test(before) || /^[}\]]$/.test(token))) lines += `\n${"  ".repeat(Math.min(depth, 40))}`;
    if (/^[{[]$/.test(token)) depth += 1;
    lines += token === ":" ? ": " : token;
  });
  return lines;
}

const viewOf = (turn) => (turn.role === "user" ? new UserView(turn) : new AssistantView(turn));

// ---- The page around them

let pinned = true; // whether the reader is at the end, where new text should stay in sight

function follow() {
  const log = $("log");
  if (pinned) log.scrollTop = log.scrollHeight;
  else watchScroll();
}

function watchScroll() {
  const log = $("log"), below = log.scrollHeight - log.scrollTop - log.clientHeight;
  pinned = below < 40;
  $("latest").hidden = below < 200;
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function showNotice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}
