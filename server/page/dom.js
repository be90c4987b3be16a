// Small words for building the document. Text goes in as text, never as markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, { className, text, title, style } = {}, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  if (title) made.title = title;
  for (const [name, value] of Object.entries(style ?? {})) made.style.setProperty(name, value);
  made.append(...children);
  return made;
}

/** A canvas's 2d context, in CSS pixels, cleared; null while it has no size. */
export function canvas(target) {
  const { width, height } = target.getBoundingClientRect();
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (target.width !== w || target.height !== h) [target.width, target.height] = [w, h];
  const context = target.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const whole = new Intl.NumberFormat("en");

export const count = (value) => whole.format(Math.round(value));

export const percent = (part, of) => (of ? `${((100 * part) / of).toFixed(part && part / of < 0.0995 ? 1 : 0)} %` : "–");

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value.toFixed(unit && value < 10 ? 1 : 0)} ${units[unit]}`;
}

/** Shows a small box near the pointer; `fill` puts in what it says. */
export function hint(event, fill) {
  const box = $("hint");
  box.replaceChildren();
  fill(box);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
  const below = event.clientY + 18;
  const top = below + height > window.innerHeight - 8 ? event.clientY - height - 12 : below;
  box.style.left = `${Math.max(8, left)}px`;
  box.style.top = `${Math.max(8, top)}px`;
}

export const unhint = () => ($("hint").hidden = true);
