// Calibration: the promise, the reliability of P(gain), and drift since calibration.

import { chart, get } from "./api.js";
import { el, percent, table } from "./dom.js";

export async function show(place) {
  const report = await get("/updraft/policy");
  place.append(
    el("p", {}, `${report.models.local} with ${report.models.cloud}, calibrated on ${report.date || "an unknown day"}.`),
    el("h2", {}, "The promise"), el("ul", {}, ...report.promise.map((line) => el("li", {}, line))),
    el("h2", {}, "Does the promise hold?"), ...drift(report.drift),
    el("h2", {}, "Reliability"), await chart("reliability", "How often the cloud gains, by P(gain). The table has the figures."),
    table("Calibration rows by P(gain) of the last gate", [
      ["P(gain)", (row) => row.predicted.toFixed(3), true],
      ["cloud gained", (row) => row.observed.toFixed(3), true],
      ["rows", (row) => String(row.rows), true],
    ], report.reliability));
}

function drift(report) {
  if (!report) return [el("p", {}, "No drift check: the policy belongs to another pair of models.")];
  const verdict = report.alarm ? el("p", { className: "bad", role: "alert" }, `Drift: ${report.alarm}. The gates are more cautious until the drift ends.`)
    : el("p", {}, report.requests < 100 ? `No alarm. ${report.requests} of the 100 requests needed for a verdict have arrived.`
      : "No alarm: requests resemble those of the calibration.");
  const graded = report.graded ? `${report.graded} answers were graded: the cloud gained on ${percent(report.observed_gain)}, `
    + `${percent(report.expected_gain)} expected.` : "No answers graded yet. Exploration or shadow mode grades some.";
  return [verdict, el("p", {}, report.distance === null ? "" : `Distance from the calibration: ${report.distance.toFixed(2)} `
    + `(Kolmogorov-Smirnov; requests: ${report.requests}).`), el("p", {}, graded)];
}
