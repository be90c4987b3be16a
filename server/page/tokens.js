// An answer token by token: each with its probability as a tint, and what else might have come when pointed at.

import { element, hint, unhint } from "./dom.js";

/** [{text, p, top: [{text, p}]}] of a chunk of a chat; null without log probabilities. */
export function ofChat(choice) {
  const entries = choice.logprobs?.content;
  if (!entries) return null;
  return entries.map((entry) => ({
    text: entry.token,
    bytes: entry.bytes,
    p: Math.exp(entry.logprob),
    top: entry.top_logprobs.map((other) => ({ text: other.token, p: Math.exp(other.logprob) })),
  }));
}

/** The same of a chunk of a completion. */
export function ofCompletion(choice) {
  const logprobs = choice.logprobs;
  if (!logprobs) return null;
  return logprobs.tokens.map((text, i) => ({
    text,
    p: Math.exp(logprobs.token_logprobs[i]),
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({
      text: other,
      p: Math.exp(logprob),
    })),
  }));
}

/**
 * Grows an element by what the server said. The text is the server's; tokens only divide it, so where they do not spell
 * it (a stop string held back, half a character) the whole piece stands for its least likely token.
 */
export class TokenText {
  constructor(target) {
    this.target = target;
    this.pending = [];
    this.decoder = new TextDecoder();
  }

  push(text, tokens) {
    if (tokens === null) {
      this.target.append(text);
      return;
    }
    for (const token of tokens) {
      const spelled = token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.text;
      this.pending.push({ ...token, spelled });
    }
    if (!text) return;
    let spelled = "";
    let used = 0;
    while (used < this.pending.length && spelled.length < text.length) spelled += this.pending[used++].spelled;
    const pieces = this.pending.splice(0, used);
    if (spelled === text) {
      for (const piece of pieces) this.append(piece.spelled, piece);
    } else {
      this.append(text, pieces.reduce((a, b) => (a && a.p < b.p ? a : b), null));
    }
  }

  append(text, token) {
    if (!text) return;
    if (token === null) {
      this.target.append(text);
      return;
    }
    const span = element("span", { className: "token", text, style: { "--p": token.p.toFixed(4) } });
    span.addEventListener("pointermove", (event) => hint(event, (box) => describe(box, token)));
    span.addEventListener("pointerleave", unhint);
    this.target.append(span);
  }
}

function describe(box, token) {
  const others = token.top.some((other) => other.text === token.text) ? token.top : [token, ...token.top];
  const table = element("table");
  for (const other of [...others].sort((a, b) => b.p - a.p)) {
    const meter = element("div", { className: "meter" }, element("i", { style: { width: `${100 * other.p}%` } }));
    const row = element(
      "tr",
      { className: other.text === token.text ? "is-drawn" : "" },
      element("td", { text: visible(other.text) }),
      element("td", { text: `${(100 * other.p).toFixed(other.p < 0.0995 ? 2 : 1)} %` }),
      element("td", {}, meter),
    );
    table.append(row);
  }
  box.append(table);
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
