// Requests to the server. The API key stays in this tab.

const KEY = "updraft-key";

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

let asking = null;

/** Ask the user for the API key, once for all pending requests. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const input = document.getElementById("key-value");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value);
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.showModal();
  });
  return asking;
}

async function send(method, path, body, signal) {
  for (;;) {
    const response = await fetch(path, {
      method, signal,
      headers: headers(body === undefined ? {} : { "content-type": "application/json" }),
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.status === 401) {
      await askForKey();
      continue;
    }
    if (!response.ok) {
      const said = await response.json().catch(() => null);
      throw new Error(said?.error?.message ?? `The server answered ${response.status}.`);
    }
    return response;
  }
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body) => (await send("POST", path, body)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

/** Call `onEvent` with each event of a stream as it arrives. Throws the stream's error. */
export async function stream(path, body, onEvent, signal) {
  const response = await send("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const payload = JSON.parse(data);
      if (payload.error) throw new Error(payload.error.message);
      onEvent(payload);
    }
  }
}

/** Return a chart as an image for light or dark mode, or a line with the error. */
export async function chart(name, alt) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "?dark" : "";
  const picture = document.createElement("img");
  picture.className = "chart";
  picture.alt = alt;
  try {
    const svg = await (await send("GET", `/updraft/charts/${name}${dark}`)).text();
    picture.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
    return picture;
  } catch (error) {
    const line = document.createElement("p");
    line.className = "muted";
    line.textContent = error.message;
    return line;
  }
}

/** Return Markdown as nodes; the server removes HTML tags written by the model. */
export async function markdown(text) {
  const { html } = await post("/updraft/markdown", { text });
  const nodes = new DOMParser().parseFromString(html, "text/html").body;
  for (const link of nodes.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const code of nodes.querySelectorAll("pre")) code.tabIndex = 0;
  return [...nodes.childNodes];
}
