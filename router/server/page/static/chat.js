// Chat: each answer with its tier, P(gain), cost and reason.

import { get, markdown, post, stream } from "./api.js";
import { badge, decisionList, dollars, el, failure, percent, say, seconds } from "./dom.js";
import { options, remember, setQuality } from "./session.js";

const MOST_IMAGE_BYTES = 4e6;
const talk = { messages: [], place: el("ol", { className: "turns", "aria-label": "Conversation" }), stop: null };
let image = null;

export async function show(place) {
  const status = await get("/updraft/status");
  if (!status.calibrated) setQuality(null);
  const input = el("textarea", { id: "question", rows: 3, required: true });
  const model = el("select", { id: "model" },
    ...[["auto", "Let Updraft decide"], status.local && ["local", `On device: ${status.local}`],
      status.cloud && ["cloud", `In cloud: ${status.cloud}`]].filter(Boolean)
      .map(([value, label]) => el("option", { value }, label)));
  const file = el("input", { type: "file", id: "image", accept: "image/png,image/jpeg,image/webp,image/gif",
    onchange: async () => { image = await readImage(file.files[0]); } });
  const submit = el("button", { type: "submit", className: "first" }, "Send");
  const stop = el("button", { type: "button", disabled: !talk.stop, id: "stop", onclick: () => talk.stop?.abort() }, "Stop");
  const form = el("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      const text = input.value.trim();
      if (!text || talk.stop) return;
      const content = image ? [{ type: "text", text }, { type: "image_url", image_url: { url: image } }] : text;
      input.value = file.value = "";
      image = null;
      talk.messages.push({ role: "user", content });
      talk.place.append(userTurn(content));
      await answer(model.value);
      input.focus();
    },
  }, el("label", { htmlFor: "question" }, "Your message"), input,
  el("div", { className: "row" }, submit, stop,
    el("button", { type: "button", onclick: clear }, "New conversation"),
    el("label", { htmlFor: "model" }, "Answered by"), model),
  status.cloud && !status.offline
    ? el("div", { className: "row" }, el("label", { htmlFor: "image" }, "Image, for the cloud"), file) : null);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  place.append(el("p", { className: "muted" }, tiersOf(status)), talk.place, form);
  input.focus();
}

function tiersOf(status) {
  const local = status.local ? `On device: ${status.local}.` : `No model on this device. ${status.local_missing}`;
  const cloud = status.cloud ? ` In cloud: ${status.cloud}.` : " No cloud is configured.";
  return `${local}${cloud} Enter sends, Shift+Enter begins a new line.`;
}

function clear() {
  talk.stop?.abort();
  talk.messages = [];
  talk.place.replaceChildren();
  say("The conversation is empty.");
}

function readImage(chosen) {
  if (!chosen) return null;
  if (chosen.size > MOST_IMAGE_BYTES) {
    say("The image is larger than 4 MB: choose a smaller one.");
    return null;
  }
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.readAsDataURL(chosen);
  });
}

function userTurn(content) {
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  return el("li", { className: "turn user" }, el("h2", {}, "You"), ...parts.map((part) =>
    part.type === "text" ? el("div", { className: "plain" }, part.text)
      : el("img", { src: part.image_url.url, alt: "Your image" })));
}

/** Request the next answer of the conversation and show it as it arrives. */
async function answer(model) {
  const messages = structuredClone(talk.messages);
  const body = el("div", { className: "plain" });
  const foot = el("div", { className: "row" });
  const turn = el("li", { className: "turn" }, el("h2", {}, "Answer"), body, foot);
  talk.place.append(turn);
  const controller = talk.stop = new AbortController();
  setBusy(true);
  let text = "", info = null;
  try {
    await stream("/v1/chat/completions", { model, messages, stream: true, ...options(model) }, (chunk) => {
      text += chunk.choices?.[0]?.delta?.content ?? "";
      info = chunk.updraft ?? info;
      body.textContent = text;
    }, controller.signal);
  } catch (error) {
    foot.append(error.name === "AbortError" ? el("p", { className: "muted" }, "Stopped.") : failure(error));
    say(error.name === "AbortError" ? "Stopped." : "The request failed.");
  }
  talk.stop = null;
  setBusy(false);
  if (text) {
    talk.messages.push({ role: "assistant", content: text });
    const shown = await markdown(text).catch(() => null);
    if (shown) {
      body.className = "";
      body.replaceChildren(...shown);
    }
  }
  if (info) {
    remember(info.request_id, messages);
    foot.append(...facts(info, messages, turn));
    say(`Answered ${info.tier === "local" ? "on device" : "in the cloud"}.`);
  }
}

function setBusy(busy) {
  const stop = document.getElementById("stop");
  if (stop) stop.disabled = !busy;
  talk.place.setAttribute("aria-busy", String(busy));
}

function facts(info, messages, turn) {
  const sure = info.confidence === null ? ["P(gain)", info.p_gain] : ["confidence", info.confidence];
  const judged = sure[1] === null ? null : el("span", {}, `${sure[0]} ${percent(sure[1])}`);
  const retry = el("button", {
    type: "button",
    onclick: async () => {
      if (talk.stop) return;
      retry.disabled = true;
      talk.messages = structuredClone(messages);
      while (turn.nextSibling) turn.nextSibling.remove();
      await answer("cloud");
    },
  }, "Retry in the cloud");
  return [badge(info.tier), judged, el("span", {}, dollars(info.cost_usd)),
    el("span", {}, `saved ${dollars(info.saved_usd)}`), el("span", {}, seconds(info.latency_ms)),
    whyOf(info), info.tier === "local" ? retry : null, ...thumbs(info.request_id)].filter(Boolean);
}

function whyOf(info) {
  const place = el("div", {}, el("p", {}, info.reason));
  const details = el("details", {}, el("summary", {}, "Why"), place);
  details.addEventListener("toggle", async () => {
    if (!details.open || place.childElementCount > 1) return;
    try {
      place.append(decisionList((await get(`/updraft/requests/${info.request_id}`)).request.decisions));
    } catch (error) {
      place.append(failure(error));
    }
  });
  return details;
}

export function thumbs(id) {
  const said = el("span", { role: "status" });
  const button = (thumb, label, shown) => el("button", {
    type: "button", "aria-label": label,
    onclick: async () => {
      try {
        await post(`/updraft/requests/${encodeURIComponent(id)}/feedback`, { thumb });
        said.textContent = "Noted.";
      } catch (error) {
        said.textContent = error.message;
      }
    },
  }, shown);
  return [button("up", "Good answer", "Good"), button("down", "Bad answer", "Bad"), said];
}
