// Savings against sending every request to the cloud. Refreshed every few seconds while visible.

import { chart, get } from "./api.js";
import { dollars, el, failure, percent, seconds, table } from "./dom.js";

const EVERY_MS = 5000;

export async function show(place) {
  const figures = el("div");
  const picture = el("div");
  place.append(figures, el("h2", {}, "By day"), picture);

  async function load() {
    try {
      const savings = await get("/updraft/savings?days=30");
      figures.replaceChildren(...shown(savings));
    } catch (error) {
      figures.replaceChildren(failure(error));
    }
  }

  await load();
  const timer = setInterval(() => document.hidden || load(), EVERY_MS);
  picture.append(await chart("savings", "US dollars spent and saved, by day. The table has the figures."));
  return () => clearInterval(timer);
}

function shown({ total, by_day: byDay, recent, escalated, abandoned, fallbacks, latency, days }) {
  const card = (label, value) => el("div", {}, el("dt", {}, label), el("dd", {}, value));
  return [
    el("p", { className: "muted" }, `The last ${days} days. Updated every ${EVERY_MS / 1000} seconds.`),
    el("dl", { className: "cards" },
      card("saved against all-cloud", dollars(total.saved_usd ?? null)),
      card("spent", dollars(total.cost_usd)),
      card("requests", String(total.requests)),
      card("answered on device", percent(total.local_share)),
      card("escalated", `${escalated} of ${recent}`),
      card("abandoned", `${abandoned} of ${recent}`),
      card("fallbacks", `${fallbacks} of ${recent}`)),
    total.unpriced ? el("p", { className: "muted" },
      `Requests to a model without a price: ${total.unpriced}. Set prices to count their cost.`) : null,
    table("Latency of the newest 1,000 requests", [
      ["tier", (row) => (row.tier === "local" ? "on device" : "in cloud")],
      ["requests", (row) => String(row.requests), true],
      ["median", (row) => seconds(row.p50_ms), true],
      ["95th percentile", (row) => seconds(row.p95_ms), true],
    ], latency),
    table("Days", [
      ["day", (row) => row.group],
      ["requests", (row) => String(row.requests), true],
      ["on device", (row) => percent(row.local_share), true],
      ["cloud tokens", (row) => row.cloud_tokens.toLocaleString(), true],
      ["spent", (row) => dollars(row.cost_usd), true],
      ["saved", (row) => dollars(row.saved_usd), true],
    ], byDay),
  ].filter(Boolean);
}
