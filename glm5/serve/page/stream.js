// One answer from the server: its events, what they add, and how long they took.

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") { yield null; return; }
      yield JSON.parse(data);
    }
  }
}

// Takes one delta into the answer; returns whether it holds anything.
function take(turn, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  turn.reasoning += reasoning;
  turn.content += delta.content ?? "";
  for (const part of delta.tool_calls ?? []) {
    let call = turn.calls.find((one) => one.index === part.index);
    if (!call) turn.calls.push(call = { index: part.index, id: part.id ?? "", name: "", arguments: "", draft: "", result: null });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new Failure(body?.error?.message || `The server answered ${response.status}.`, response.status);
}

async function stream(turn, view, body, signal, clock) {
  const response = await fetch("v1/chat/completions", { method: "POST", headers: requestHeaders(), body, signal });
  if (!response.ok) throw await refusal(response);
  let whole = false;
  for await (const chunk of events(response)) {
    if (chunk === null) { whole = true; break; }
    if (chunk.error) throw new Failure(chunk.error.message || "The server failed.");
    clock.usage = chunk.usage ?? clock.usage;
    for (const choice of chunk.choices ?? []) {
      if (take(turn, choice.delta ?? {})) clock.tick(turn);
      turn.finish = choice.finish_reason ?? turn.finish;
    }
    turn.thought = clock.thought();
    turn.stats = clock.live();
    view.schedule();
  }
  if (!whole && !turn.finish) throw new Failure("The connection ended before the answer was complete.");
}

// Times of one answer.
class Clock {
  constructor() {
    this.start = performance.now();
    this.first = this.last = this.answered = 0; // first and last piece, first piece behind the thinking
    this.pieces = 0;
    this.usage = null;
  }

  tick(turn) {
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
    if (turn.content || turn.calls.length) this.answered ||= this.last;
  }

  thought() {
    const tokens = this.usage?.completion_tokens_details?.reasoning_tokens;
    const lasted = seconds(((this.answered || this.last) - this.first) / 1000);
    return `Thought for ${lasted}${tokens ? ` · ${count(tokens, "token")}` : ""}`;
  }

  // Tokens a second between the first piece and the last; the first is what prefill gives.
  rate(tokens) {
    const span = (this.last - this.first) / 1000;
    return tokens > 1 && span > 0.02 ? `${((tokens - 1) / span).toFixed(1)} tokens/s` : "";
  }

  live() {
    const rate = this.rate(this.pieces);
    return rate && `≈ ${rate}`;
  }

  stats(turn) {
    const { usage } = this, ends = { length: "cut off at the token limit", abort: "ended by the server" };
    const parts = [turn.state === "stopped" ? "stopped" : ends[turn.finish] || ""];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens, details = usage.completion_tokens_details;
      parts.push(count(usage.completion_tokens, "token"), this.rate(usage.completion_tokens));
      if (this.first) parts.push(`first after ${brief((this.first - this.start) / 1000)}`);
      parts.push(`prompt ${usage.prompt_tokens.toLocaleString("en")}${cached ? ` (${cached.toLocaleString("en")} cached)` : ""}`);
      if (details?.draft_tokens) parts.push(`drafts ${Math.round((100 * details.accepted_draft_tokens) / details.draft_tokens)}% accepted`);
    } else if (this.first) parts.push(this.live(), `first after ${brief((this.first - this.start) / 1000)}`);
    return parts.filter(Boolean).join(" · ");
  }
}

function sentence(error) {
  if (error instanceof Failure) return error.message;
  if (error instanceof SyntaxError) return "The server sent something that cannot be read.";
  return "The server cannot be reached. See whether it still runs, then try again.";
}
