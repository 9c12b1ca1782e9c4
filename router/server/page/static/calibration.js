// Calibration: what is promised, how well P(gain) fits, and whether requests still look like the calibration's.

import { chart, get } from "./api.js";
import { el, percent, table } from "./dom.js";

export async function show(place) {
  const report = await get("/updraft/policy");
  place.append(
    el("p", {}, `${report.models.local} with ${report.models.cloud}, calibrated on ${report.date || "an unknown day"}.`),
    el("h2", {}, "The promise"), el("ul", {}, ...report.promise.map((line) => el("li", {}, line))),
    el("h2", {}, "Does it hold?"), ...drift(report.drift),
    el("h2", {}, "Reliability"), await chart("reliability", "How often the cloud gains, by P(gain). The table has the figures."),
    table("Calibration rows by P(gain) of the last gate", [
      ["P(gain)", (row) => row.predicted.toFixed(3), true],
      ["cloud gained", (row) => row.observed.toFixed(3), true],
      ["rows", (row) => String(row.rows), true],
    ], report.reliability));
}

function drift(found) {
  if (!found) return [el("p", {}, "Nothing is compared: the policy is of another pair.")];
  const verdict = found.alarm ? el("p", { className: "bad", role: "alert" }, `Drift: ${found.alarm}. The gates are more cautious until it ends.`)
    : el("p", {}, found.requests < 100 ? `No alarm. ${found.requests} of the 100 requests that a verdict takes have come.`
      : "No alarm: requests look like those of the calibration.");
  const graded = found.graded ? `${found.graded} answers were graded: the cloud gained on ${percent(found.observed_gain)}, `
    + `expected were ${percent(found.expected_gain)}.` : "No answer was graded yet: exploration or shadow grades some.";
  return [verdict, el("p", {}, found.distance === null ? "" : `Distance from the calibration: ${found.distance.toFixed(2)} `
    + `(Kolmogorov-Smirnov; requests: ${found.requests}).`), el("p", {}, graded)];
}
