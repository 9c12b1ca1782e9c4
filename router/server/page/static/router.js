// Router: the target with its curve, and a test prompt traced through the gates.

import { chart, get, post } from "./api.js";
import { badge, decisionList, el, failure, percent, say, seconds } from "./dom.js";
import { options, quality, setQuality } from "./session.js";

export async function show(place) {
  const status = await get("/updraft/status");
  const target = el("p", { className: "muted" });
  const tell = (now) => { target.textContent = `The router's target: ${now.target}.`; };
  tell(status);
  place.append(target, el("h2", {}, "Target"));
  if (status.calibrated) await showTarget(place, tell);
  else place.append(el("p", {}, "No policy is calibrated for this pair. Run ", el("code", {}, "updraft calibrate"),
    " to choose a target here."));
  showTrace(place);
}

async function showTarget(place, tellTarget) {
  const report = await get("/updraft/policy");
  const curve = report.curve;
  const at = quality() ?? report.quality;
  const nearest = curve.reduce((best, point, index) =>
    (Math.abs(point.target - (at ?? 0.98)) < Math.abs(curve[best].target - (at ?? 0.98)) ? index : best), 0);
  const said = el("output", { htmlFor: "target" });
  const slider = el("input", { type: "range", id: "target", min: 0, max: curve.length - 1, step: 1, value: nearest,
    oninput: () => { tell(); setQuality(curve[slider.value].target); } });

  function tell() {
    const point = curve[slider.value];
    slider.setAttribute("aria-valuetext", `quality ${point.target}`);
    said.textContent = `Quality ${percent(point.target)}: ${percent(point.cloud_share)} of the calibration's requests go to `
      + `the cloud, and ${percent(point.quality, 1)} of its score was kept.`;
  }

  const reset = el("button", { type: "button", onclick: () => { setQuality(null); say("The router's own target applies."); } },
    "Use the router's own target");
  const failed = el("div", { "aria-live": "polite" });
  const forAll = el("button", { type: "button", onclick: async () => {
    try {
      tellTarget(await post("/updraft/target", { quality: curve[slider.value].target }));
      setQuality(null);
      failed.replaceChildren();
      say("The target applies to all requests.");
    } catch (error) {
      failed.replaceChildren(failure(error));
    }
  } }, "Use this target for all requests");
  place.append(el("label", { htmlFor: "target" }, "Share of the cloud's quality to keep"), slider, said,
    el("p", { className: "muted" }, "The slider applies to requests from this tab. A target for all requests lasts until the "
      + "settings are reloaded. To keep it, set ", el("code", {}, "quality"), " in the settings."),
    el("div", { className: "row" }, forAll, reset), failed);
  tell();
  place.append(await chart("curve", "Quality kept, by the share of requests that go to the cloud."));
}

function showTrace(place) {
  const input = el("textarea", { id: "prompt", rows: 3, required: true });
  const result = el("div", { "aria-live": "polite" });
  const submit = el("button", { type: "submit", className: "first" }, "Trace");
  place.append(el("h2", {}, "Test prompt"), el("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      submit.disabled = true;
      result.replaceChildren("Tracing …");
      try {
        const messages = [{ role: "user", content: input.value }];
        const trace = await post("/updraft/trace", { model: "auto", messages, ...options("auto") });
        result.replaceChildren(el("p", {}, "Tier that would answer: ", badge(trace.tier), ` after ${seconds(trace.latency_ms)}.`),
          decisionList(trace.decisions), trace.local_text ? el("details", {}, el("summary", {}, "What the device wrote"),
            el("div", { className: "plain" }, trace.local_text)) : "");
      } catch (error) {
        result.replaceChildren(failure(error));
      }
      submit.disabled = false;
    },
  }, el("label", { htmlFor: "prompt" }, "Prompt"), input, el("div", { className: "row" }, submit),
  el("p", { className: "muted" }, "No cloud is asked, and no ledger row is written.")), result);
}
