"use strict";
// One page, one state: the pair on show. Every vote is stored by the server before the next pair is asked for.
const $ = (id) => document.getElementById(id);
const NAME = "glm5-prefer-rater";
const KEYS = { 1: "left", 2: "right", 3: "tie", t: "tie", s: "skip" };
let consent = null;  // {text, hash, rater}
let rater = "";
let card = null;
let since = 0;
let busy = false;

function remember(name) {
  try { name ? localStorage.setItem(NAME, name) : localStorage.removeItem(NAME); } catch { /* a private window */ }
}

function remembered() {
  try { return localStorage.getItem(NAME) || ""; } catch { return ""; }
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// The server's answer; null after a problem, which is shown and leaves the page as it is.
async function call(path, body) {
  busy = true;
  for (const button of document.querySelectorAll("nav button, form button")) button.disabled = true;
  try {
    const options = body && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
    const answer = await fetch(path, options);
    const found = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(found.error || `The server answered with status ${answer.status}.`);
    problem("");
    return found;
  } catch (error) {
    const lost = error instanceof TypeError;
    problem(lost ? "Not saved: the server does not answer. Start glm5 prefer again, then press the key again." : error.message);
    return null;
  } finally {
    busy = false;
    for (const button of document.querySelectorAll("nav button, form button")) button.disabled = false;
  }
}

function only(name) {
  for (const part of ["consent", "work", "end"]) $(part).hidden = part !== name;
  $("keys").hidden = name === "consent";
  $("leave").hidden = $("forget").hidden = name === "consent";
  for (const button of document.querySelectorAll("nav [data-side]")) button.hidden = name !== "work";
}

function show(state) {
  const { progress } = state;
  $("who").textContent = rater ? `Voting as ${rater}` : "";
  $("count").textContent = state.agreed ? `${progress.done} of ${progress.pairs}` : "";
  $("progress").hidden = !state.agreed;
  $("progress").setAttribute("aria-valuemax", progress.pairs);
  $("progress").setAttribute("aria-valuenow", progress.done);
  $("progress").firstElementChild.style.width = `${progress.pairs ? (100 * progress.done) / progress.pairs : 0}%`;
  card = state.card;
  if (!state.agreed) return askConsent();
  if (!card) return showEnd(progress);
  only("work");
  $("prompt").textContent = card.prompt;
  $("left").textContent = card.left;
  $("right").textContent = card.right;
  $("why").value = card.why;
  for (const side of ["left", "right"]) $(`box-${side}`).classList.toggle("chosen", card.choice === side);
  for (const button of document.querySelectorAll("nav [data-side]"))
    button.setAttribute("aria-pressed", String(card.choice === button.dataset.side));
  since = performance.now();
  window.scrollTo(0, 0);
  if (document.activeElement && document.activeElement.id === "why") $("prompt").focus({ preventScroll: true });
}

function askConsent() {
  only("consent");
  $("terms").replaceChildren(...consent.text.split("\n\n").map((text) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = text.replaceAll("\n", " ");
    return paragraph;
  }));
  $("rater").value = rater || consent.rater;
  $("rater").focus();
}

function showEnd(progress) {
  only("end");
  const skipped = progress.skipped ? ` You skipped ${progress.skipped}.` : "";
  $("end-text").textContent = `You have seen all ${progress.pairs} pairs.${skipped} Go back with b, or close this page.`;
  $("unskip").hidden = !progress.skipped;
  $("end-title").focus();
}

async function move(path, body) {
  if (busy) return;
  const state = await call(path, body);
  if (state) show(state);
}

function vote(side) {
  if (!card) return;
  const seconds = Math.min(1e6, (performance.now() - since) / 1000);
  move("/api/vote", { rater, pair: card.id, side, why: $("why").value.trim(), seconds });
}

const back = () => move("/api/back", { rater, pair: card ? card.id : null });

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || $("sure").open) return;
  if (event.target.id === "why" && event.key === "Escape") return void $("prompt").focus();
  if (["INPUT", "TEXTAREA"].includes(event.target.tagName) || $("keys").hidden || event.repeat) return;
  const key = event.key.toLowerCase();
  const acts = { w: () => card && $("why").focus(), b: back };
  if (KEYS[key]) acts[key] = () => vote(KEYS[key]);
  if (!acts[key]) return;
  event.preventDefault();
  acts[key]();
}

async function begin() {
  document.addEventListener("keydown", onKey);
  for (const button of document.querySelectorAll("nav [data-side]"))
    button.addEventListener("click", () => vote(button.dataset.side));
  $("back").addEventListener("click", back);
  $("unskip").addEventListener("click", () => move("/api/unskip", { rater }));
  $("agree").addEventListener("submit", (event) => {
    event.preventDefault();
    rater = $("rater").value.trim();
    remember(rater);
    move("/api/agree", { rater, consent: consent.hash });
  });
  $("leave").addEventListener("click", () => {
    rater = "";
    remember("");
    card = null;
    show({ card: null, agreed: false, progress: { pairs: 0, done: 0, skipped: 0 } });
  });
  $("forget").addEventListener("click", () => $("sure").showModal());
  $("sure").addEventListener("close", async () => {
    if ($("sure").returnValue !== "yes") return;
    if (await call("/api/forget", { rater })) $("leave").click();
  });
  consent = await call("/api/consent");
  if (!consent) return;
  rater = remembered();
  if (!rater) return show({ card: null, agreed: false, progress: { pairs: 0, done: 0, skipped: 0 } });
  await move("/api/next", { rater });
}

document.addEventListener("DOMContentLoaded", begin);
