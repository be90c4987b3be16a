// The live view: reads /v1/live while the page is looked at, and keeps what rates need of the last minute.

import { events } from "./api.js";
import { CellMap } from "./cell_map.js";
import { ofSession, themed } from "./colours.js";
import { $, bytes, canvas, count, element, percent } from "./dom.js";
import { Steps } from "./steps.js";

const MINUTE = 60;
const RATE_S = 2;
const SEQUENCES_SHOWN = 10;

export class Live {
  constructor() {
    this.map = new CellMap();
    this.steps = new Steps();
    this.history = [];
    this.stopping = null;
    new ResizeObserver(() => this.redraw()).observe($("map"));
  }

  /** Show what comes until the stream ends. Raises Refused when it may not be read. */
  async watch() {
    this.stopping = new AbortController();
    this.history = [];
    this.steps.clear();
    try {
      for await (const frame of events("v1/live", { signal: this.stopping.signal })) this.show(frame);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      this.stopping = null;
    }
  }

  stop() {
    this.stopping?.abort();
  }

  show(frame) {
    this.frame = frame;
    this.history.push({ at: frame.at, tiers: frame.tiers, ...frame.stats });
    while (this.history[0].at < frame.at - MINUTE) this.history.shift();
    this.map.show(frame.cells, frame.sessions);
    this.steps.add(frame.steps);
    this.tiles(frame);
    this.sequences(frame.sessions);
    this.queue(frame);
    this.tiers(frame.tiers);
  }

  redraw() {
    if (!this.frame) return;
    this.map.draw();
    this.steps.draw();
    this.sequences(this.frame.sessions);
    this.spark();
  }

  /** What happened in the last RATE_S seconds: the differences of all sums, and the seconds. */
  recent() {
    const last = this.history.at(-1);
    const first = this.before(last);
    const since = (name) => last[name] - first[name];
    return { seconds: last.at - first.at, since };
  }

  /** The newest entry that is at least RATE_S older, or the oldest there is. */
  before(entry) {
    return this.history.findLast((other) => other.at <= entry.at - RATE_S) ?? this.history[0];
  }

  tiles({ cells, stats, sessions }) {
    const { seconds, since } = this.recent();
    const rate = (name) => (seconds > 0 ? since(name) / seconds : 0);
    $("t-rate").textContent = seconds > 0 ? count(rate("generated_tokens")) : "–";
    $("t-prefill").textContent = `${count(rate("prompt_tokens"))} prompt tokens / s`;
    $("t-running").textContent = count(stats.running);
    $("t-waiting").textContent = stats.waiting ? `${count(stats.waiting)} waiting` : "none waiting";
    const used = cells.private + cells.shared + cells.claimed;
    $("t-used").textContent = percent(used, cells.total);
    $("t-total").textContent = `${count(cells.kept)} kept`;
    $("t-shared").textContent = count(cells.shared);
    const held = sessions.reduce((sum, session) => sum + session[3], 0);
    const saved = Math.max(0, held - cells.private - cells.shared);
    $("t-saved").textContent = saved ? `saves ${count(saved)} cells` : "cells of several";
    const steps = since("steps");
    if (steps > 0) {
      $("t-step").textContent = milliseconds((1000 * since("step_time_s")) / steps);
      const tokens = since("prompt_tokens") + since("generated_tokens");
      $("t-padding").textContent = `${percent(since("padding_rows"), since("padding_rows") + tokens)} padding`;
    }
    this.spark();
  }

  spark() {
    const made = canvas($("spark"));
    if (made === null || this.history.length < 3) return;
    const { context, width, height } = made;
    const rates = smoothed(this.history);
    const most = Math.max(1, ...rates.map(([, rate]) => rate));
    const now = this.history.at(-1).at;
    const x = (at) => width - ((now - at) / MINUTE) * width;
    const y = (rate) => height - 4 - (rate / most) * (height - 16);
    context.beginPath();
    rates.forEach(([at, rate], i) => (i ? context.lineTo(x(at), y(rate)) : context.moveTo(x(at), y(rate))));
    context.strokeStyle = themed().accent;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(rates.at(-1)[0]), height);
    context.lineTo(x(rates[0][0]), height);
    context.globalAlpha = 0.14;
    context.fillStyle = themed().accent;
    context.fill();
    context.globalAlpha = 1;
  }

  sequences(sessions) {
    const rows = [];
    const longest = Math.max(1, ...sessions.map(([, prompt, , , generated]) => prompt + generated));
    for (const [id, prompt, cached, computed, generated, isDecoding] of sessions.slice(0, SEQUENCES_SHOWN)) {
      const part = (value) => `${(100 * value) / longest}%`;
      const done = Math.min(computed, prompt);
      const colour = { "--colour": ofSession(id) };
      const swatch = element("span", { className: "swatch", style: colour }, element("i"), String(id));
      const track = element(
        "span",
        { className: "track", style: colour, title: `${cached} of ${prompt} prompt tokens were there already` },
        element("i", { className: "prompt", style: { width: part(done) } }),
        element("i", { className: "cached", style: { width: part(Math.min(cached, done)) } }),
        element("i", { className: "drawn", style: { left: part(prompt), width: part(generated) } }),
      );
      const counts = isDecoding ? `${count(prompt)} + ${count(generated)}` : `${count(done)} of ${count(prompt)}`;
      for (const each of [swatch, track]) {
        each.addEventListener("pointerenter", () => this.map.emphasise(id));
        each.addEventListener("pointerleave", () => this.map.emphasise(null));
      }
      rows.push(swatch, track, element("span", { className: "counts", text: counts }));
    }
    $("sequences").replaceChildren(...rows);
    const more = sessions.length - SEQUENCES_SHOWN;
    $("more").textContent = more > 0 ? `${count(more)} more` : "";
  }

  queue({ waiting, stats }) {
    $("queue").hidden = !stats.waiting;
    const items = waiting.map((tokens) =>
      element("i", { title: `${count(tokens)} tokens`, style: { width: `${4 + 3 * Math.log2(1 + tokens)}px` } }),
    );
    const said = `${count(stats.waiting)} in the queue`;
    $("queue").replaceChildren(element("span", { text: said }), element("div", { className: "items" }, ...items));
  }

  tiers(tiers) {
    $("tiers").hidden = !tiers.length;
    const rows = tiers.flatMap((tier) => {
      const part = tier.capacity_bytes ? (100 * (tier.used_bytes ?? 0)) / tier.capacity_bytes : 0;
      const { up, down } = this.traffic(tier);
      const held = tier.used_bytes === null ? "" : `${bytes(tier.used_bytes)} · `;
      return [
        element("span", { text: tier.name }),
        element("span", { className: "track" }, element("i", { style: { width: `${part}%` } })),
        element("span", { text: `${held}↑ ${bytes(up)}/s ↓ ${bytes(down)}/s`, title: `${count(tier.hits)} hits` }),
      ];
    });
    $("tiers").replaceChildren(...rows);
  }

  /** Bytes a second that came up from the tier, and went down to it. */
  traffic(tier) {
    const now = this.history.at(-1);
    const before = this.before(now);
    const was = before.tiers?.find((other) => other.name === tier.name);
    if (!was || now.at <= before.at) return { up: 0, down: 0 };
    const seconds = now.at - before.at;
    return {
      up: (tier.loaded_bytes - was.loaded_bytes) / seconds,
      down: (tier.stored_bytes - was.stored_bytes) / seconds,
    };
  }
}

const milliseconds = (value) => (value < 100 ? `${value.toFixed(1)} ms` : `${count(value)} ms`);

/** [when, tokens a second over the RATE_S before it, or since the entry before]. */
function smoothed(history) {
  const rates = [];
  let from = 0;
  history.slice(1).forEach((entry) => {
    while (history[from + 1].at <= entry.at - RATE_S) from += 1;
    const seconds = entry.at - history[from].at;
    const drawn = entry.generated_tokens - history[from].generated_tokens;
    if (seconds > 0) rates.push([entry.at, drawn / seconds]);
  });
  return rates;
}
