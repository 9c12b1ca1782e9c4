// DOM elements built without HTML strings, and formats of figures.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** `columns`: the heading, a function that shows a row's cell, and true for a number. */
export function table(caption, columns, rows) {
  const side = (numeric) => (numeric ? "number" : "");
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
    el("table", {},
      el("caption", { className: "muted" }, caption),
      el("thead", {}, el("tr", {}, ...columns.map(([heading, , numeric]) =>
        el("th", { scope: "col", className: side(numeric) }, heading)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...columns.map(([, show, numeric]) =>
        el("td", { className: side(numeric) }, show(row) ?? "–")))))));
}

export function say(text) {
  document.getElementById("status").textContent = text;
}

export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "unknown" : `${(100 * value).toFixed(digits)} %`;
export const dollars = (value) =>
  value === null || value === undefined ? "no price" : `$${value.toFixed(Math.abs(value) >= 1 ? 2 : 6)}`;
export const seconds = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`);
export const bytes = (count) =>
  count === null || count === undefined ? "unknown"
    : count >= 1e9 ? `${(count / 1e9).toFixed(2)} GB` : `${(count / 1e6).toFixed(1)} MB`;
export const clock = (ts) => new Date(1000 * ts).toLocaleString();

const GATES = ["rules", "before generation", "while generating", "after generation"];

export function decisionList(decisions) {
  return el("ol", { className: "trace" }, ...decisions.map((each) => el("li", {},
    el("strong", {}, `Gate ${each.gate}, ${GATES[each.gate]}: `),
    badge(each.escalate ? "cloud" : "local"), ` ${each.reason}`)));
}

export function badge(tier) {
  return el("span", { className: `badge ${tier}` },
    tier === "local" ? "On device" : tier === "cloud" ? "In cloud" : "No answer");
}

export function failure(error) {
  return el("p", { className: "bad", role: "alert" }, error.message);
}
