// The conversation: questions and answers, and everything that can be pressed.

let chat = null;
let running = null; // { controller, turn, chat } of the answer that is streaming

// Streams an answer to the conversation as it stands.
async function answer() {
  const body = JSON.stringify(requestBody(chat.turns)), turn = newAnswer(), own = chat;
  const clock = new Clock(), controller = new AbortController();
  chat.turns.push(turn);
  const view = addView(turn);
  pinned = true;
  setRunning({ controller, turn, chat });
  follow();
  announce("The model is at work.");
  let status = 0, saving = setInterval(() => keep(own), 2000);
  try {
    await stream(turn, view, body, controller.signal, clock);
    turn.state = "done";
  } catch (error) {
    status = error.status ?? 0;
    turn.state = controller.signal.aborted ? "stopped" : "failed";
    turn.error = sentence(error);
  }
  clearInterval(saving);
  turn.stats = clock.stats(turn);
  turn.thought = clock.thought();
  own.updated = Date.now();
  if (running?.turn === turn) setRunning(null);
  keep(own);
  view.update();
  if (own !== chat) return;
  markLast();
  follow();
  announceEnd(turn);
  if (status === 401) openSettings("key");
  else if (awaits(turn) && document.activeElement === $("ask") && !$("ask").value) view.cards[0].area.focus();
}

function announceEnd(turn) {
  const words = { failed: "", stopped: "The answer was stopped.", done: "The answer is complete." };
  if (awaits(turn)) announce(`The model calls ${turn.calls.map((call) => call.name).join(", ")} and waits for the result.`);
  else announce(turn.state === "done" && turn.content.length < 300 ? turn.content || words.done : words[turn.state]);
}

const stop = () => running?.controller.abort();

function setRunning(what) {
  running = what;
  document.body.classList.toggle("running", Boolean(what));
  $("send").setAttribute("aria-label", what ? "Stop" : "Send");
  $("send").title = what ? "Stop" : "Send";
  setIcon($("send"), what ? "stop" : "send");
}

function keep(which) {
  if (!saveChat(which)) showNotice("This browser's storage is full or switched off; the conversation will not survive a reload.");
}

// ---- What the user does

// Whether a request may go out now; where a setting is in the way, it is shown.
function ready() {
  const invalid = running ? null : checkSettings();
  if (invalid) openSettings(invalid.dataset.field);
  return !running && !invalid;
}

function ask(content) {
  if (!content.trim() || !ready()) return;
  chat.turns.push({ role: "user", content });
  addView(chat.turns.at(-1));
  answer();
}

function send() {
  const content = $("ask").value;
  if (!content.trim() || !ready()) return;
  $("ask").value = "";
  fit($("ask"));
  ask(content);
}

// Drops a turn and all behind it.
function cut(at) {
  for (const element of [...$("turns").children].slice(at)) element.remove();
  chat.turns.length = at;
}

const ACTIONS = {
  copy: (button, view) => copyText(view.copy, button),
  "copy-code": (button) => copyText(button.closest("figure").querySelector("code").textContent, button),
  retry(button, view) {
    if (view.turn !== chat.turns.at(-1) || !ready()) return;
    cut(chat.turns.length - 1);
    $("ask").focus();
    answer();
  },
  edit: (button, view) => { if (!running) view.edit(); },
  "cancel-edit"(button, view) {
    view.closeEditor();
    view.root.querySelector("[data-action=edit]").focus();
  },
  "save-edit"(button, view) {
    const content = view.editor.querySelector("textarea").value;
    if (!content.trim() || !ready()) return;
    cut(chat.turns.indexOf(view.turn));
    $("ask").focus();
    ask(content);
  },
  results(button, view) {
    const empty = view.cards.find((card) => card.call.result === null && !card.area.value.trim());
    if (!ready()) return;
    if (empty) { empty.area.focus(); announce("Type what the tool returned."); return; }
    for (const card of view.cards) card.call.result ??= card.area.value;
    $("ask").focus();
    answer();
    view.update();
  },
};

function onAction(event) {
  const button = event.target.closest("[data-action]");
  if (button) ACTIONS[button.dataset.action]?.(button, views.get(button.closest(".turn")));
}

// Enter in a text of a turn does what its main button does; with several results, the next empty one comes first.
function onTurnKey(event) {
  if (event.target.tagName !== "TEXTAREA") return;
  const view = views.get(event.target.closest(".turn"));
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ACTIONS[view.editor ? "save-edit" : "results"](null, view);
  } else if (event.key === "Escape" && view.editor) {
    event.stopPropagation();
    ACTIONS["cancel-edit"](null, view);
  }
}

// ---- Views of the chat

function addView(turn) {
  const view = viewOf(turn), before = $("turns").lastElementChild;
  $("turns").append(view.root);
  if (before) views.get(before).update?.(); // what waited at the end waits no more
  view.update?.();
  markLast();
  return view;
}

function markLast() {
  $("empty").hidden = chat.turns.length > 0;
  const mine = chat.turns.findLastIndex((turn) => turn.role === "user");
  [...$("turns").children].forEach((element, i) => {
    element.classList.toggle("last", i === chat.turns.length - 1);
    element.classList.toggle("editable", i === mine);
  });
}

function show(which) {
  if (running) stop();
  setRunning(null);
  chat = which;
  storage.write("sessionStorage", "glm5.current", chat.id);
  $("turns").replaceChildren();
  showNotice("");
  chat.turns.forEach(addView);
  markLast();
  pinned = true;
  follow();
  watchScroll();
}

function listChats() {
  const chats = allChats();
  $("no-chats").hidden = chats.length > 0;
  $("clear-all").hidden = !chats.length;
  resetClear();
  $("chat-list").replaceChildren(...chats.map((one) => {
    const item = cloneOf("t-chat"), [open, bin] = item.querySelectorAll("button"), title = titleOf(one);
    item.querySelector("span").textContent = title;
    item.querySelector("small").textContent = new Date(one.updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    if (one.id === chat.id) open.setAttribute("aria-current", "true");
    bin.setAttribute("aria-label", `Delete ${title}`);
    open.addEventListener("click", () => { if (one.id !== chat.id) show(one); $("chats").close(); });
    bin.addEventListener("click", () => { forgetChat(one.id); listChats(); ($("chat-list").querySelector("button") || $("chats").querySelector("[data-close]")).focus(); });
    return item;
  }));
}

function forgetChat(id) {
  storage.remove("localStorage", PREFIX + id);
  if (id !== chat.id) return;
  chat.deleted = true; // an answer that still streams must not bring it back
  show(newChat());
}

function resetClear() {
  $("clear-all").textContent = "Delete all chats";
  delete $("clear-all").dataset.sure;
}

function clearAll() {
  if (!$("clear-all").dataset.sure) {
    $("clear-all").dataset.sure = "yes";
    $("clear-all").textContent = "Really delete all? Press again";
    return;
  }
  for (const one of allChats()) forgetChat(one.id);
  $("chats").close();
}

// ---- Settings and theme

function openSettings(name) {
  if (!$("settings").open) $("settings").showModal();
  field(name)?.focus();
  if (name === "key") field(name).select();
}

function onSettings() {
  checkSettings();
  saveSettings();
  showSettings();
}

function showSettings() {
  $("thinking-chip").setAttribute("aria-pressed", String(valueOf("thinking")));
  let tools = 0;
  try { tools = parseTools().length; } catch { tools = -1; }
  $("tools-chip").hidden = !tools;
  $("tools-chip").lastElementChild.textContent = tools < 0 ? "Tools: not JSON" : count(tools, "tool");
  $("json-chip").hidden = !valueOf("json");
}

function resetSettings() {
  for (const input of fields()) {
    if (input.type === "checkbox") input.checked = input.defaultChecked;
    else if (input.dataset.field !== "key") input.value = "";
  }
  onSettings();
  announce("The settings are back to the server's defaults.");
}

function showTheme(choice) {
  const dark = applyTheme(choice);
  $("theme").setAttribute("aria-pressed", String(dark));
  setIcon($("theme"), dark ? "sun" : "moon");
}

function turnTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches;
  const dark = $("theme").getAttribute("aria-pressed") !== "true";
  const choice = dark === system ? null : dark ? "dark" : "light"; // back at the system's: follow it again
  if (choice) storage.write("localStorage", "glm5.theme", choice);
  else storage.remove("localStorage", "glm5.theme");
  showTheme(choice);
}

// ---- Start

const savedTheme = () => storage.read("localStorage", "glm5.theme");

function start() {
  loadSettings();
  checkSettings();
  showSettings();
  showTheme(savedTheme());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showTheme(savedTheme()));
  const current = storage.read("sessionStorage", "glm5.current"), found = allChats();
  show(found.find((one) => one.id === current) || (current ? null : found[0]) || newChat());
  wire();
}

function wire() {
  const on = (id, kind, action) => $(id).addEventListener(kind, action);
  on("composer", "submit", (event) => { event.preventDefault(); if (running) stop(); else send(); });
  on("ask", "keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  on("ask", "input", () => fit($("ask")));
  on("turns", "click", onAction);
  on("turns", "keydown", onTurnKey);
  on("turns", "input", (event) => { if (event.target.tagName === "TEXTAREA") fit(event.target); });
  on("turns", "change", () => keep(chat));
  on("empty", "click", (event) => { if ("starter" in event.target.dataset) { $("ask").focus(); ask(event.target.textContent); } });
  on("new", "click", () => { show(newChat()); $("ask").focus(); });
  on("theme", "click", turnTheme);
  on("log", "scroll", watchScroll);
  on("log", "wheel", (event) => { if (event.deltaY < 0) pinned = false; });
  on("latest", "click", () => { pinned = true; follow(); watchScroll(); $("ask").focus(); });
  on("open-chats", "click", () => { listChats(); $("chats").showModal(); });
  on("open-settings", "click", () => openSettings("system"));
  on("tools-chip", "click", () => openSettings("tools"));
  on("json-chip", "click", () => openSettings("json"));
  on("thinking-chip", "click", () => { field("thinking").checked = !valueOf("thinking"); onSettings(); });
  on("settings", "input", onSettings);
  on("reset", "click", resetSettings);
  on("clear-all", "click", clearAll);
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) stop();
  });
  addEventListener("pagehide", () => keep(chat));
}

applyTheme(savedTheme());
document.addEventListener("DOMContentLoaded", start);
