// Requests: the ledger, newest first. It holds no prompts, so only prompts of this tab can be repeated.

import { get, stream } from "./api.js";
import { badge, clock, decisionList, dollars, el, failure, percent, seconds, table } from "./dom.js";
import { options, remembered } from "./session.js";
import { thumbs } from "./chat.js";

export async function show(place) {
  const tier = el("select", { id: "tier", onchange: load }, ...[["", "all"], ["local", "on device"], ["cloud", "in cloud"],
    ["none", "no answer"]].map(([value, label]) => el("option", { value }, label)));
  const words = el("input", { id: "words", type: "search", oninput: draw });
  const list = el("div");
  const detail = el("section", { "aria-label": "Request", tabIndex: -1 });
  let rows = [];

  async function load() {
    const asked = tier.value;
    try {
      const { requests } = await get(`/updraft/requests?limit=200${asked && `&tier=${asked}`}`);
      if (asked !== tier.value) return; // a slow answer does not replace the rows of the tier chosen since
      rows = requests;
      draw();
    } catch (error) {
      list.replaceChildren(failure(error));
    }
  }

  function draw() {
    const wanted = words.value.toLowerCase();
    const matching = rows.filter((row) =>
      [row.id, row.model, row.cloud_model, row.reason, row.route, String(row.status), row.failure]
        .some((text) => text.toLowerCase().includes(wanted)));
    list.replaceChildren(table(`Requests: ${matching.length}`, [
      ["time", (row) => el("button", { type: "button", onclick: () => open(row) }, clock(row.started_at))],
      ["tier", (row) => badge(row.tier)],
      ["route", (row) => row.route],
      ["status", (row) => String(row.status), true],
      ["P(gain)", (row) => row.p_gain === null ? null : row.p_gain.toFixed(3), true],
      ["threshold", (row) => row.threshold === null ? null : row.threshold.toFixed(3), true],
      ["tokens", (row) => `${row.local_tokens} + ${row.cloud_tokens}`, true],
      ["cost", (row) => dollars(row.cost_usd), true],
      ["latency", (row) => seconds(row.latency_ms), true],
    ], matching));
  }

  function open(row) {
    const replayed = el("div");
    const prompt = remembered(row.id);
    detail.replaceChildren(el("h2", {}, row.id), el("p", {}, badge(row.tier), ` ${row.reason}`),
      row.failure ? el("p", { className: "bad" }, row.failure) : null, decisionList(row.decisions),
      el("p", {}, `P(gain) ${row.p_gain === null ? "unknown" : percent(row.p_gain)}, `
        + `cost ${dollars(row.cost_usd)}, saved ${dollars(row.saved_usd)}.`),
      el("div", { className: "row" }, ...thumbs(row.id)),
      prompt ? el("button", { type: "button", onclick: () => replay(prompt, replayed) }, "Ask again")
        : el("p", { className: "muted" }, "The prompt is not kept, so the request cannot be repeated."), replayed);
    detail.focus();
  }

  place.append(el("div", { className: "row" }, el("label", { htmlFor: "tier" }, "Tier"), tier,
    el("label", { htmlFor: "words" }, "Search"), words, el("button", { type: "button", onclick: load }, "Refresh")),
  list, detail);
  await load();
}

async function replay(messages, place) {
  const text = el("div", { className: "plain" });
  const foot = el("p");
  place.replaceChildren(text, foot);
  try {
    await stream("/v1/chat/completions", { model: "auto", messages, stream: true, ...options("auto") }, (chunk) => {
      text.textContent += chunk.choices?.[0]?.delta?.content ?? "";
      if (chunk.updraft) foot.replaceChildren(badge(chunk.updraft.tier), ` ${chunk.updraft.reason}`);
    });
  } catch (error) {
    place.append(failure(error));
  }
}
