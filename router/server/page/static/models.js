// Models: installed and known models; pull, remove, and memory control.

import { get, post, remove, stream } from "./api.js";
import { bytes, el, failure, say, table } from "./dom.js";

export async function show(place) {
  const words = el("input", { id: "words", type: "search", oninput: () => draw() });
  const list = el("div");
  const memory = el("div");
  const told = el("div", { "aria-live": "polite" });
  const pulling = el("div");
  const name = el("input", { id: "name", required: true, placeholder: "smollm2, hf:owner/repo, pypi:package" });
  let overview = null;

  async function act(work, done) {
    try {
      const answer = await work();
      told.replaceChildren(done);
      return answer;
    } catch (error) {
      told.replaceChildren(failure(error));
      return null;
    }
  }

  async function load() {
    overview = await get("/updraft/models");
    draw();
  }

  function draw() {
    const wanted = words.value.toLowerCase();
    const rows = overview.models.filter((model) => `${model.name} ${model.source} ${model.licence}`.toLowerCase().includes(wanted));
    list.replaceChildren(table(`Models: ${rows.length}`, [
      ["name", (row) => row.name + (row.running ? " (runs)" : "")],
      ["state", (row) => row.state],
      ["size", (row) => bytes(row.size), true],
      ["memory", (row) => (row.memory === null ? null : bytes(row.memory)), true],
      ["fits", (row) => (row.fits === null ? null : row.fits ? "yes" : "not now")],
      ["licence", (row) => row.licence],
      ["action", action],
    ], rows));
    memory.replaceChildren(el("p", {}, `${bytes(overview.free_memory)} of memory are free. The running model is `
      + `${overview.loaded ? "in memory" : "asleep: the next request loads it"}${overview.pinned ? ", and pinned" : ""}.`),
    el("div", { className: "row" },
      el("button", { type: "button", disabled: !overview.loaded, onclick: () => set("sleep", "The model sleeps.") }, "Sleep now"),
      el("button", { type: "button",
        onclick: () => set(overview.pinned ? "unpin" : "pin", `The model ${overview.pinned ? "may sleep" : "stays in memory"}.`) },
      overview.pinned ? "Unpin" : "Pin in memory")));
  }

  async function set(action, done) {
    overview = (await act(() => post("/updraft/models/memory", { action }), done)) ?? overview;
    draw();
  }

  function action(row) {
    if (row.state === "known" || row.state === "partial") {
      return el("button", { type: "button", onclick: () => pull(row.state === "known" ? row.name : row.source) }, `Pull ${row.name}`);
    }
    if (row.running) return null;
    const button = el("button", {
      type: "button",
      onclick: async () => {
        if (!button.dataset.sure) {
          button.dataset.sure = "yes";
          button.textContent = `Really remove ${row.name}?`;
          return;
        }
        await act(() => remove(`/updraft/models/${encodeURIComponent(row.name)}`), `${row.name} is removed.`);
        await load();
      },
    }, `Remove ${row.name}`);
    return button;
  }

  async function pull(model) {
    const bar = el("progress", { "aria-label": `Pulling ${model}` });
    const line = el("span", {}, "finding");
    const controller = new AbortController();
    pulling.replaceChildren(el("div", { className: "row" }, bar, line,
      el("button", { type: "button", onclick: () => controller.abort() }, "Stop the pull")));
    try {
      await stream("/updraft/models/pull", { model }, (event) => {
        if (event.name) told.replaceChildren(`${event.name} is ready.`);
        else if (event.total) {
          bar.max = event.total;
          bar.value = event.done;
          line.textContent = `${bytes(event.done)} of ${bytes(event.total)} ${event.message}`;
        } else line.textContent = event.message || bytes(event.done);
      }, controller.signal);
      say("The model is ready.");
    } catch (error) {
      told.replaceChildren(error.name === "AbortError" ? "Stopped. Pull again to resume." : failure(error));
    }
    pulling.replaceChildren();
    await load();
  }

  place.append(memory, el("div", { className: "row" }, el("label", { htmlFor: "words" }, "Search"), words), list,
    el("h2", {}, "Pull another"), el("form", { className: "row",
      onsubmit: (event) => { event.preventDefault(); pull(name.value.trim()); } },
    el("label", { htmlFor: "name" }, "Name"), name, el("button", { type: "submit", className: "first" }, "Pull")), pulling, told);
  await load();
}
