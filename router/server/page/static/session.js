// State of this tab: prompts by request ID, and the target sent with requests.

const MOST = 200;
const prompts = new Map();

export function remember(id, messages) {
  prompts.set(id, messages);
  if (prompts.size > MOST) prompts.delete(prompts.keys().next().value);
}

export const remembered = (id) => prompts.get(id);

export function quality() {
  const kept = sessionStorage.getItem("updraft-quality");
  return kept === null ? null : Number(kept);
}

export function setQuality(value) {
  if (value === null) sessionStorage.removeItem("updraft-quality");
  else sessionStorage.setItem("updraft-quality", String(value));
}

/** Return the options of a request to `model`, with this tab's target. */
export function options(model) {
  const wanted = quality();
  return wanted === null || model !== "auto" ? {} : { updraft: { quality: wanted } };
}
