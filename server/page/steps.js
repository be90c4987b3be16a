// The packed axis of the last steps: whose tokens ran side by side, in which forward, and how much of it was padding.

import { ofSession, themed } from "./colours.js";
import { $, canvas, count, element } from "./dom.js";

const SHOWN = 16;
const BETWEEN_FORWARDS = 3;

export class Steps {
  constructor() {
    this.steps = [];
    this.lines = [];
  }

  /** steps: of a frame of /v1/live, oldest first. */
  add(steps) {
    if (!steps.length) return;
    this.steps = [...[...steps].reverse(), ...this.steps].slice(0, SHOWN);
    this.draw();
  }

  clear() {
    this.steps = [];
    this.lines = [];
    $("steps").replaceChildren();
  }

  draw() {
    while (this.lines.length < this.steps.length) this.lines.push(line());
    const widest = Math.max(...this.steps.map(rowsOf));
    this.steps.forEach((step, i) => {
      const { method, bar, rows, ms } = this.lines[i];
      const tokens = step.counts.reduce((a, b) => a + b, 0);
      method.textContent = methodsOf(step);
      rows.firstChild.textContent = count(tokens);
      rows.lastChild.textContent = ` of ${count(rowsOf(step))}`;
      ms.textContent = step.ms < 100 ? `${step.ms.toFixed(1)} ms` : `${count(step.ms)} ms`;
      bar.title = describe(step);
      paint(bar, step, widest);
    });
  }
}

function line() {
  const bar = element("canvas");
  const made = {
    method: element("span", { className: "method" }),
    bar,
    rows: element("span", { className: "rows" }, element("b"), element("span")),
    ms: element("span", { className: "ms" }),
  };
  $("steps").append(made.method, made.bar, made.rows, made.ms);
  return made;
}

const rowsOf = (step) => step.forwards.reduce((sum, [, , width]) => sum + width, 0);

function methodsOf(step) {
  const names = step.forwards.map(([name]) => name);
  return names.length > 2 ? `${names[0]} +${names.length - 1}` : names.join(" + ");
}

function describe(step) {
  const decodes = `${step.decodes} decoded`;
  const prefill = step.counts.slice(step.decodes).reduce((a, b) => a + b, 0);
  const ran = step.forwards.map(([name, tokens, width]) => `${name}: ${tokens} of ${width} rows`).join("\n");
  return `step ${step.number}\n${decodes}, ${prefill} prompt tokens\n${ran}`;
}

/** Lengths grow with the square root of the rows: a step of 1 and one of 512 are both to be seen. */
function paint(target, step, widest) {
  const made = canvas(target);
  if (made === null) return;
  const { context, width, height } = made;
  const theme = themed();
  const total = rowsOf(step);
  const gaps = BETWEEN_FORWARDS * (step.forwards.length - 1);
  const scale = (Math.sqrt(total / widest) * width - gaps) / Math.max(1, total);
  let [chunk, left] = [0, step.counts[0] ?? 0];
  let x = 0;
  for (const [, tokens, rows] of step.forwards) {
    let open = tokens;
    let at = x;
    while (open > 0 && chunk < step.counts.length) {
      const taken = Math.min(open, left);
      const size = taken * scale;
      context.fillStyle = ofSession(step.sessions[chunk]);
      context.fillRect(at, 0, size > 4 ? size - 1 : size, height);
      if (chunk >= step.decodes && size > 6) stripe(context, at, size > 4 ? size - 1 : size, height);
      at += size;
      open -= taken;
      left -= taken;
      if (left === 0) left = step.counts[++chunk] ?? 0;
    }
    if (rows > tokens) hatch(context, at, (rows - tokens) * scale, height, theme);
    x += rows * scale + BETWEEN_FORWARDS;
  }
}

/** A dark line at the foot: prompt tokens. */
function stripe(context, x, width, height) {
  context.fillStyle = "rgb(0 0 0 / 0.28)";
  context.fillRect(x, height - 3, width, 3);
}

function hatch(context, x, width, height, theme) {
  context.save();
  context.beginPath();
  context.rect(x, 0, width, height);
  context.clip();
  context.strokeStyle = theme.faint;
  context.lineWidth = 1.1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 4) {
    context.moveTo(at, height);
    context.lineTo(at + height, 0);
  }
  context.stroke();
  context.restore();
}
