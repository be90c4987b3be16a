// One colour for each sequence, for as long as it lives, and the theme's own ones for canvases.

const GOLDEN_ANGLE = 137.508;

let theme = null;

/** Reads the sheet's variables anew; after the theme has changed. */
export function reload() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  theme = {
    free: of("--cell-free"),
    kept: of("--cell-kept"),
    claimed: of("--cell-claimed"),
    mark: of("--shared-mark"),
    accent: of("--accent"),
    line: of("--line"),
    faint: of("--faint"),
    light: Number(of("--session-light")),
    chroma: Number(of("--session-chroma")),
  };
}

export function themed() {
  if (theme === null) reload();
  return theme;
}

/** Neighbouring numbers lie far apart on the wheel. */
export function ofSession(id) {
  const { light, chroma } = themed();
  return `oklch(${light} ${chroma} ${((id * GOLDEN_ANGLE + 155) % 360).toFixed(1)})`;
}
