// Draws the pool: a square a cell, or a square every so many cells of a large pool. Codes are those of engine/view.py.

import { ofSession, themed } from "./colours.js";
import { $, canvas, count, hint, unhint } from "./dom.js";

const [FREE, KEPT, CLAIMED, FIRST_SESSION, SHARED] = [0, 1, 2, 3, 0x8000];
const LARGEST_CELL = 18;
const TALLEST = 300;

export class CellMap {
  constructor() {
    this.frame = null;
    this.layout = null;
    this.marked = null;
    const target = $("map");
    target.addEventListener("pointermove", (event) => this.point(event));
    target.addEventListener("pointerleave", () => this.leave());
  }

  /** cells: of a frame of /v1/live. sessions: its sessions, in the order that codes count. */
  show(cells, sessions) {
    const raw = Uint8Array.from(atob(cells.codes), (letter) => letter.charCodeAt(0));
    const codes = new Uint16Array(raw.length / 2);
    for (let i = 0; i < codes.length; i++) codes[i] = raw[2 * i] | (raw[2 * i + 1] << 8);
    this.frame = { cells, sessions, codes, shown: Math.ceil(cells.total / cells.stride) };
    const every = cells.stride > 1 ? `, every ${count(cells.stride)}th is shown` : "";
    $("map-note").textContent = `${count(cells.total)}${every}`;
    this.draw();
  }

  draw() {
    if (this.frame === null) return;
    const { codes, shown, sessions } = this.frame;
    const wide = $("map").clientWidth;
    const step = pitch(wide, TALLEST, shown);
    const columns = Math.max(1, Math.floor((wide + gap(step)) / step));
    const side = step - gap(step);
    $("map").style.height = `${Math.ceil(Math.ceil(shown / columns) * step - gap(step))}px`;
    const made = canvas($("map"));
    if (made === null) return;
    const { context } = made;
    this.layout = { step, columns };
    const theme = themed();
    const colours = sessions.map((session) => ofSession(session[0]));
    let last = null;
    const shared = [];
    for (let i = 0; i < shown; i++) {
      const code = i < codes.length ? codes[i] : FREE;
      const owner = code & ~SHARED;
      const colour =
        owner >= FIRST_SESSION
          ? colours[owner - FIRST_SESSION]
          : owner === KEPT
            ? theme.kept
            : owner === CLAIMED
              ? theme.claimed
              : theme.free;
      if (colour !== last) context.fillStyle = last = colour;
      context.fillRect((i % columns) * step, Math.floor(i / columns) * step, side, side);
      if (code & SHARED) shared.push(i);
    }
    this.outline(context, shared, columns, step, side, theme.mark);
    if (this.marked !== null) this.mark(context, columns, step, side, theme.mark);
  }

  /** Shared cells carry a bright frame, or where they are too small for one, a bright corner. */
  outline(context, shared, columns, step, side, colour) {
    context.strokeStyle = context.fillStyle = colour;
    for (const i of shared) {
      const [x, y] = [(i % columns) * step, Math.floor(i / columns) * step];
      if (side >= 6) {
        context.lineWidth = side >= 11 ? 2 : 1.25;
        const inset = context.lineWidth / 2;
        context.strokeRect(x + inset, y + inset, side - 2 * inset, side - 2 * inset);
      } else {
        const size = Math.max(1, Math.round(side / 2));
        context.fillRect(x, y, size, size);
      }
    }
  }

  mark(context, columns, step, side, colour) {
    const index = this.frame.sessions.findIndex((session) => session[0] === this.marked);
    if (index < 0) return;
    context.globalAlpha = 0.72;
    context.fillStyle = themed().free;
    this.frame.codes.forEach((code, i) => {
      if ((code & ~SHARED) === FIRST_SESSION + index) return;
      context.fillRect((i % columns) * step, Math.floor(i / columns) * step, side, side);
    });
    context.globalAlpha = 1;
  }

  /** Let the cells of one session stand out; null: none. */
  emphasise(id) {
    if (this.marked === id) return;
    this.marked = id;
    this.draw();
  }

  point(event) {
    if (this.layout === null) return;
    const { step, columns } = this.layout;
    const [column, row] = [Math.floor(event.offsetX / step), Math.floor(event.offsetY / step)];
    const i = row * columns + column;
    if (column >= columns || i >= this.frame.shown) return this.leave();
    const code = this.frame.codes[i] ?? FREE;
    const owner = code & ~SHARED;
    const session = owner >= FIRST_SESSION ? this.frame.sessions[owner - FIRST_SESSION] : null;
    this.emphasise(session && !(code & SHARED) ? session[0] : null);
    hint(event, (box) => {
      const name = { [FREE]: "free", [KEPT]: "kept by the prefix tree", [CLAIMED]: "in flight" }[owner];
      const whose = session ? `sequence ${session[0]}${code & SHARED ? " and others" : ""}` : name;
      box.append(`cell ${count(i * this.frame.cells.stride)} · ${whose}`);
    });
  }

  leave() {
    unhint();
    this.emphasise(null);
  }
}

const gap = (step) => (step >= 5 ? 1 : step >= 3 ? 0.5 : 0);

/** The largest square, at most LARGEST_CELL, with which all fit. */
function pitch(width, height, cells) {
  let step = Math.min(LARGEST_CELL, Math.sqrt((width * height) / Math.max(1, cells)));
  step = step >= 3 ? Math.floor(step) : Math.floor(step * 2) / 2;
  while (step > 1 && Math.ceil(cells / Math.floor((width + gap(step)) / step)) * step > height + gap(step)) {
    step -= step > 3 ? 1 : 0.5;
  }
  return Math.max(1, step);
}
