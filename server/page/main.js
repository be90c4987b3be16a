// Puts the page together: the theme, the key, whether the server is there, and the two halves.

import { json, key, phase, Refused } from "./api.js";
import { reload } from "./colours.js";
import { $ } from "./dom.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";

const THEME = "cellserve-theme";
const RETRY_MS = 1500;

const playground = new Playground();
const live = new Live();
let wake = () => {};

/** For a while, or until something happened that makes it worth trying again. */
const pause = (ms) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });

function state(text, kind) {
  $("state").textContent = text;
  $("state").className = `state is-${kind}`;
  document.body.classList.toggle("is-stale", kind !== "ready");
}

/** Follow the server through its life: loading, ready, gone and back. */
async function follow() {
  while (true) {
    // A page that nobody sees asks for nothing.
    while (document.hidden) await pause(60_000);
    await attempt();
    await pause(RETRY_MS);
  }
}

async function attempt() {
  const now = await phase();
  if (now === null) return state("no answer", "bad");
  if (now.phase !== "ready") {
    const counted = now.of ? ` ${now.done} of ${now.of}` : "";
    return state(`${now.phase ?? "not ready"}${counted}`, "busy");
  }
  try {
    const { data } = await json("v1/models");
    playground.model = data[0].id;
    $("model").textContent = data[0].id;
    $("key-form").classList.remove("is-wanted");
    state("ready", "ready");
    await live.watch();
  } catch (error) {
    if (!(error instanceof Refused)) return state("no answer", "bad");
    $("key-form").classList.toggle("is-wanted", error.status === 401);
    if (error.status === 401) $("key").placeholder = "needed";
    state(error.status === 401 ? "give an API key" : error.message, "bad");
  }
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  reload();
  live.redraw();
}

const system = matchMedia("(prefers-color-scheme: light)");
theme(localStorage.getItem(THEME) ?? (system.matches ? "light" : "dark"));
$("theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, next);
  theme(next);
});

$("key").value = key.get();
function take() {
  key.set($("key").value.trim());
  live.stop();
  wake();
}
$("key").addEventListener("change", take);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  take();
});
document.addEventListener("visibilitychange", () => (document.hidden ? live.stop() : wake()));

follow();
