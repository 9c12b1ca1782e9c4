// Tasks: where each task's requests go, what its samples show, and a pin for each task.

import { get, post } from "./api.js";
import { el, failure, percent, say, table } from "./dom.js";

const PINS = { auto: "by evidence", local: "on device", cloud: "in cloud" };

export async function show(place) {
  const list = el("div");

  async function pin(task, tier) {
    try {
      draw(await post(`/updraft/tasks/${task.task}`, { pin: tier }));
      say(`${task.label}: ${PINS[tier]}.`);
    } catch (error) {
      list.append(failure(error));
    }
  }

  function draw({ learns, quality, tasks }) {
    if (!learns) {
      list.replaceChildren(el("p", {}, "This router learns no tasks. Set learn = true, a local model and a cloud."));
      return;
    }
    list.replaceChildren(table(`Tasks that keep ${percent(quality)} of the cloud's score move to the device`, [
      ["task", (task) => task.label],
      ["tier", (task) => (task.tier === "device" ? "on device" : "in cloud")],
      ["requests", (task) => task.requests.toLocaleString(), true],
      ["stayed on device", (task) => percent(task.local_share), true],
      ["samples", (task) => task.samples.toLocaleString(), true],
      ["device's score", (task) => percent(task.local_score), true],
      ["cloud's score", (task) => percent(task.cloud_score), true],
      ["missing samples", (task) => (task.missing === null ? "cannot tell" : task.missing.toLocaleString()), true],
      ["tier of requests", (task) => el("select", {
        "aria-label": `Tier of ${task.label}`, onchange: (event) => pin(task, event.target.value),
      }, ...Object.entries(PINS).map(([value, text]) => el("option", { value, selected: value === task.pin }, text)))],
    ], tasks));
  }

  place.append(list);
  draw(await get("/updraft/tasks"));
}
