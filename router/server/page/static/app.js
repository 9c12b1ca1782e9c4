// Page shell: one view at a time, by the URL's hash. A view's `show(place)` may return a cleanup function.

import { el, failure } from "./dom.js";

const VIEWS = {
  chat: "Chat", router: "Router", savings: "Savings", tasks: "Tasks", models: "Models", requests: "Requests",
  calibration: "Calibration",
};
let leave = null;
let shown = 0;

async function open() {
  if (!location.hash.startsWith("#/") && location.hash !== "") return;
  const wanted = location.hash.slice(2).split("?")[0];
  const name = wanted in VIEWS ? wanted : "chat";
  const turn = ++shown;
  leave?.();
  leave = null;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[name]} · Updraft`;
  const view = document.getElementById("view");
  const place = el("div");
  view.replaceChildren(el("h1", {}, VIEWS[name]), place);
  view.setAttribute("aria-busy", "true");
  if (turn > 1) view.focus();
  try {
    const module = await import(`./${name}.js`);
    if (turn !== shown) return;
    const left = await module.show(place);
    if (turn === shown) leave = left ?? null;
    else left?.();
  } catch (error) {
    place.append(failure(error));
  }
  if (turn === shown) view.setAttribute("aria-busy", "false");
}

addEventListener("hashchange", open);
open();
