// What is remembered and what is sent. Chats and settings live in this browser's storage, the API key in this tab's.

const $ = (id) => document.getElementById(id);
const PREFIX = "glm5.chat.";
const NUMBERS = [
  "temperature", "max_tokens", "top_p", "top_k", "min_p", "seed",
  "presence_penalty", "frequency_penalty", "repetition_penalty",
];

// Storage may be switched off, full, or hold what another version wrote.
const storage = {
  read(kind, name) {
    try { return JSON.parse(window[kind].getItem(name)); } catch { return null; }
  },
  write(kind, name, value) {
    try { window[kind].setItem(name, JSON.stringify(value)); return true; } catch { return false; }
  },
  remove(kind, name) {
    try { window[kind].removeItem(name); } catch { /* nothing is there to remove */ }
  },
  names() {
    try { return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)); } catch { return []; }
  },
};

// ---- Chats. A turn is a question {role, content}, or an answer {role, content, reasoning, calls, state, ...}.

const text = (value) => (typeof value === "string" ? value : "");

function newChat() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, updated: Date.now(), turns: [] };
}

function titleOf(chat) {
  const first = chat.turns.find((turn) => turn.role === "user");
  return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 80) : "New chat";
}

function loadChat(name) {
  const found = storage.read("localStorage", name);
  if (!found || !Array.isArray(found.turns) || PREFIX + found.id !== name) return null;
  return { id: found.id, updated: Number(found.updated) || 0, turns: found.turns.map(loadTurn).filter(Boolean) };
}

function loadTurn(turn) {
  if (turn?.role === "user") return { role: "user", content: text(turn.content) };
  if (turn?.role !== "assistant") return null;
  const calls = (Array.isArray(turn.calls) ? turn.calls : []).map((call) => ({
    id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments), draft: text(call?.draft),
    result: typeof call?.result === "string" ? call.result : null,
  }));
  return {
    ...newAnswer(), content: text(turn.content), reasoning: text(turn.reasoning), calls, error: text(turn.error),
    finish: text(turn.finish), stats: text(turn.stats), thought: text(turn.thought),
    state: turn.state === "done" || turn.state === "failed" ? turn.state : "stopped", // a reload ends an answer too
  };
}

function newAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], state: "running", error: "", finish: "", stats: "", thought: "" };
}

function allChats() {
  return storage.names().map(loadChat).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

// Keeps a chat; where storage is full, the oldest others make room. False where there is none.
function saveChat(chat) {
  if (chat.deleted || !chat.turns.length) return true;
  const kept = () => storage.write("localStorage", PREFIX + chat.id, chat);
  if (kept()) return true;
  return allChats().reverse().some((other) => {
    if (other.id !== chat.id) storage.remove("localStorage", PREFIX + other.id);
    return kept();
  });
}

// ---- Settings

const fields = () => [...document.querySelectorAll("[data-field]")];
const field = (name) => document.querySelector(`[data-field="${name}"]`);
const valueOf = (name) => (field(name).type === "checkbox" ? field(name).checked : field(name).value);

function loadSettings() {
  const saved = storage.read("localStorage", "glm5.settings") || {};
  for (const input of fields()) {
    const name = input.dataset.field, value = name === "key" ? storage.read("sessionStorage", "glm5.key") : saved[name];
    if (input.type === "checkbox") input.checked = typeof value === "boolean" ? value : input.defaultChecked;
    else input.value = text(value);
  }
}

function saveSettings() {
  const names = fields().map((input) => input.dataset.field).filter((name) => name !== "key");
  storage.write("localStorage", "glm5.settings", Object.fromEntries(names.map((name) => [name, valueOf(name)])));
  if (valueOf("key")) storage.write("sessionStorage", "glm5.key", valueOf("key"));
  else storage.remove("sessionStorage", "glm5.key");
}

// Tools from their field: a list of specifications; throws a sentence.
function parseTools() {
  const written = valueOf("tools").trim();
  if (!written) return [];
  let found;
  try { found = JSON.parse(written); } catch (error) { throw new Error(`The tools are not JSON: ${error.message}.`); }
  const tools = (Array.isArray(found) ? found : [found]).map((tool) =>
    tool?.function || !tool?.name ? tool : { type: "function", function: tool });
  const names = tools.map((tool) => tool?.function?.name);
  names.forEach((name, i) => {
    if (typeof name !== "string" || !name) throw new Error(`Tool ${i + 1} needs a "function" with a "name".`);
    if (names.indexOf(name) !== i) throw new Error(`Two tools are named "${name}".`);
  });
  return tools;
}

function problemOf(input) {
  const { validity } = input, name = input.closest("label").firstChild.textContent.trim();
  if (input.dataset.field === "tools") {
    try { parseTools(); } catch (error) { return error.message; }
  }
  if (validity.badInput) return `${name} must be a number.`;
  if (validity.stepMismatch) return `${name} must be a whole number.`;
  if (validity.rangeUnderflow) return `${name} must be at least ${input.min}.`;
  if (validity.rangeOverflow) return `${name} must be at most ${input.max}.`;
  return "";
}

// Marks what cannot be sent; returns the first such field.
function checkSettings() {
  let first = null;
  for (const input of fields()) {
    const problem = problemOf(input), label = input.closest("label");
    let note = label.querySelector(".problem");
    if (problem && !note) note = label.appendChild(make("span", "problem"));
    if (problem) note.textContent = problem;
    else note?.remove();
    input.setAttribute("aria-invalid", String(Boolean(problem)));
    if (problem) first ||= input;
  }
  return first;
}

// ---- Requests

const NOT_RUN = "The user did not run this call.";
const awaits = (turn) => turn?.role === "assistant" && turn.finish === "tool_calls" && turn.calls.some((call) => call.result === null);

// The conversation in OpenAI form. Calls that were cut off cannot be sent back; whole ones need a result each.
function messagesOf(turns) {
  const messages = valueOf("system").trim() ? [{ role: "system", content: valueOf("system") }] : [];
  for (const turn of turns) {
    if (turn.role === "user") { messages.push({ role: "user", content: turn.content }); continue; }
    const calls = turn.finish === "tool_calls" ? turn.calls : [];
    if (!turn.content && !turn.reasoning && !calls.length) continue;
    const message = { role: "assistant", content: turn.content };
    if (turn.reasoning) message.reasoning_content = turn.reasoning;
    if (calls.length) {
      message.tool_calls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    }
    messages.push(message);
    for (const call of calls) messages.push({ role: "tool", tool_call_id: call.id, content: call.result ?? NOT_RUN });
  }
  return messages;
}

function requestBody(turns) {
  const body = {
    messages: messagesOf(turns), stream: true, stream_options: { include_usage: true },
    chat_template_kwargs: { enable_thinking: valueOf("thinking") },
  };
  if (valueOf("keep")) body.chat_template_kwargs.clear_thinking = false;
  for (const name of NUMBERS) if (valueOf(name) !== "") body[name] = Number(valueOf(name));
  const stops = valueOf("stop").split("\n").filter(Boolean), tools = parseTools();
  if (stops.length) body.stop = stops;
  if (tools.length) body.tools = tools;
  if (valueOf("json")) body.response_format = { type: "json_object" };
  return body;
}

function requestHeaders() {
  const headers = { "Content-Type": "application/json" };
  if (valueOf("key").trim()) headers.Authorization = `Bearer ${valueOf("key").trim()}`;
  return headers;
}

// ---- Theme: that of the system until someone chooses.

function applyTheme(choice) {
  const dark = choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
  return dark;
}
