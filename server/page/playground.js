// Chats and completions with what the server streams back. Owns the conversation; nothing of it is stored.

import { events, Refused } from "./api.js";
import { $, count, element } from "./dom.js";
import { ofChat, ofCompletion, TokenText } from "./tokens.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const ALTERNATIVES = 5;
const EMPTY = {
  chat: "Every token of the answer carries its probability: point at one to see what else might have come.",
  completion: "The model goes on where the text ends.",
};

export class Playground {
  constructor() {
    this.mode = "chat";
    this.model = "";
    this.messages = [];
    this.running = null;
    for (const mode of ["chat", "completion"]) $(`tab-${mode}`).addEventListener("click", () => this.choose(mode));
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("composer").requestSubmit();
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => this.clear());
    $("tint").addEventListener("change", () => this.tint());
    this.tint();
    this.choose("chat");
  }

  tint() {
    $("thread").classList.toggle("is-tinted", $("tint").checked);
  }

  choose(mode) {
    this.mode = mode;
    for (const each of ["chat", "completion"]) $(`tab-${each}`).setAttribute("aria-selected", String(each === mode));
    $("parameters").classList.toggle("is-completion", mode === "completion");
    this.clear();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    $("thread").replaceChildren();
    $("thread").dataset.empty = EMPTY[this.mode];
    $("figures").textContent = "";
    this.complain(null);
  }

  complain(message) {
    $("said").hidden = message === null;
    $("said").textContent = message ?? "";
  }

  /** The fields that were filled in. Raises SyntaxError for JSON that is none. */
  fields() {
    const fields = {};
    for (const name of NUMBERS) {
      const value = $(`p-${name}`).value.trim();
      if (value !== "") fields[name] = Number(value);
    }
    if ($("p-stop").value) fields.stop = [$("p-stop").value];
    const extra = $("extra").value.trim();
    const more = extra ? JSON.parse(extra) : {};
    if (more === null || typeof more !== "object" || Array.isArray(more)) {
      throw new SyntaxError("the further fields must be one JSON object");
    }
    return { ...fields, ...more };
  }

  request(fields, text) {
    const common = { model: this.model, stream: true, stream_options: { include_usage: true }, ...fields };
    if (this.mode === "completion") return ["v1/completions", { prompt: text, logprobs: ALTERNATIVES, ...common }];
    const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
    const body = { messages: [...system, ...this.messages], logprobs: true, top_logprobs: ALTERNATIVES, ...common };
    return ["v1/chat/completions", body];
  }

  async send() {
    const text = $("prompt").value;
    if (this.running || !text) return;
    this.complain(null);
    let fields;
    try {
      fields = this.fields();
    } catch (error) {
      this.complain(`The further fields are no JSON: ${error.message}`);
      return;
    }
    const before = this.messages.length;
    if (this.mode === "chat") this.messages.push(this.said(text));
    const asked = this.mode === "chat" ? this.turn("you", text, "is-user") : null;
    const turn = this.turn(this.mode === "chat" ? this.model : "", "", "is-growing");
    if (this.mode === "completion") turn.text.append(text);
    $("prompt").value = "";
    this.begin();
    try {
      await this.receive(turn, ...this.request(fields, text));
    } catch (error) {
      if (error.name !== "AbortError") this.complain(error instanceof Refused ? error.message : "The server is gone.");
      if (!turn.answer && error.name !== "AbortError") {
        // Nothing came: the words go back to where they were typed.
        turn.element.remove();
        asked?.remove?.();
        asked?.element.remove();
        this.messages.length = before;
        if (!$("prompt").value) $("prompt").value = text;
      }
    } finally {
      turn.element.classList.remove("is-growing");
      if (this.mode === "chat" && this.messages.length > before) this.messages.push(this.answered(turn));
      this.end();
    }
  }

  /** What was typed, as a message: the result of a call where the model waits for one. */
  said(text) {
    const last = this.messages.at(-1);
    const open = this.openCalls(last);
    return open ? { role: "tool", tool_call_id: open.id, content: text } : { role: "user", content: text };
  }

  openCalls(last) {
    const index = this.messages.findLastIndex((message) => message.tool_calls);
    if (index < 0 || (last.role !== "tool" && last !== this.messages[index])) return null;
    const done = new Set(this.messages.slice(index + 1).map((message) => message.tool_call_id));
    return this.messages[index].tool_calls.find((call) => !done.has(call.id)) ?? null;
  }

  answered(turn) {
    const calls = turn.calls.filter(Boolean).map(({ shown, ...call }) => call);
    const message = { role: "assistant", content: turn.answer };
    return calls.length ? { ...message, tool_calls: calls } : message;
  }

  turn(who, text, kind) {
    const body = element("div", { className: "text", text });
    const made = element("div", { className: `turn ${kind}` });
    if (who) made.append(element("div", { className: "who", text: who }));
    made.append(body);
    $("thread").append(made);
    this.follow(true);
    return { element: made, text: body, answer: "", calls: [] };
  }

  async receive(turn, path, body) {
    const begun = performance.now();
    const tokens = new TokenText(turn.text);
    let first = null;
    let ending = "";
    for await (const chunk of events(path, { body, signal: this.running.signal })) {
      if (chunk.usage) this.figure({ begun, first, ending, usage: chunk.usage });
      const choice = chunk.choices[0];
      if (!choice || choice.index !== 0) continue;
      const delta = this.mode === "chat" ? choice.delta : { content: choice.text };
      if (first === null && (delta.content || delta.tool_calls)) first = performance.now();
      for (const call of delta.tool_calls ?? []) this.call(turn, call);
      turn.answer += delta.content ?? "";
      tokens.push(delta.content ?? "", this.mode === "chat" ? ofChat(choice) : ofCompletion(choice));
      ending = choice.finish_reason ?? ending;
      this.follow(false);
    }
  }

  call(turn, part) {
    let call = turn.calls[part.index];
    if (!call) {
      const shown = element("code");
      const name = element("b", { text: part.function.name });
      turn.element.append(element("div", { className: "call" }, name, " ", shown));
      call = { id: part.id, type: "function", function: { name: part.function.name, arguments: "" }, shown };
      turn.calls[part.index] = call;
    }
    call.function.arguments += part.function.arguments ?? "";
    call.shown.textContent = call.function.arguments;
  }

  figure({ begun, first, ending, usage }) {
    const now = performance.now();
    const parts = [`${count(usage.prompt_tokens)} + ${count(usage.completion_tokens)} tokens`];
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${count(cached)} cached`);
    if (first !== null) {
      parts.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
      if (usage.completion_tokens > 1) {
        parts.push(`${((1000 * (usage.completion_tokens - 1)) / (now - first)).toFixed(1)} tokens/s`);
      }
    }
    if (ending) parts.push(ending);
    $("figures").textContent = parts.join(" · ");
  }

  follow(always) {
    const thread = $("thread");
    const isNear = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
    if (always || isNear) thread.scrollTop = thread.scrollHeight;
  }

  begin() {
    this.running = new AbortController();
    $("send").disabled = true;
    $("stop").hidden = false;
    $("figures").textContent = "";
  }

  end() {
    this.running = null;
    $("send").disabled = false;
    $("stop").hidden = true;
    const open = this.mode === "chat" ? this.openCalls(this.messages.at(-1) ?? {}) : null;
    $("prompt").placeholder = open ? `The result of ${open.function.name}` : "Say something";
  }
}
