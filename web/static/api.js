// Requests to the server: the key, errors in its words, streams, and what is asked again and again.

import { byId, say, tell } from "./dom.js";

const KEY = "mpt-key"; // of sessionStorage: it is forgotten with the tab

export class Failure extends Error {
  constructor(status, message, lines = []) {
    super(message);
    this.status = status;
    this.lines = lines; // of an upload: [{line, reason}]
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

let question = null; // the promise of a key, shared by all requests that wait for it

function askForKey(wasWrong) {
  question ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    byId("key-problem").hidden = !wasWrong;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("key").value.trim());
      dialog.close();
    };
    dialog.onclose = () => {
      byId("key").value = "";
      question = null;
      resolve();
    };
    dialog.showModal();
  });
  return question;
}

// The server's answer. Failure for an error, in the server's words; asks for a key if it wants one.
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  const used = sessionStorage.getItem(KEY);
  if (used !== null) headers.Authorization = `Bearer ${used}`;
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["Content-Type"] = "application/json";
  const content = body && !isForm ? JSON.stringify(body) : body;
  let response;
  try {
    response = await fetch(path, { method, headers, body: content, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  if (response.status === 401) {
    const isStale = used !== sessionStorage.getItem(KEY); // another request has asked meanwhile
    if (!isStale) await askForKey(used !== null);
    return call(path, { method, body, signal });
  }
  throw await failureOf(response);
}

async function failureOf(response) {
  try {
    const { error } = await response.json();
    return new Failure(response.status, error.message, error.lines);
  } catch {
    return new Failure(response.status, `The server answered with status ${response.status}.`);
  }
}

// Do a task. A failure is told in an element.
export async function attempt(node, task) {
  try {
    await task();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    tell(node, error.message, true);
  }
}

export async function getJSON(path) {
  return (await call(path)).json();
}

export async function post(path, body = {}) {
  return (await call(path, { method: "POST", body })).json();
}

// A path's part: a name's slashes stay, all else is quoted.
export const quoted = (name) => name.split("/").map(encodeURIComponent).join("/");

// The JSON of each event of a stream.
export async function* stream(path, body, signal) {
  const response = await call(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      const message = JSON.parse(event.slice(6));
      if (message.error) throw new Failure(500, message.error.message);
      yield message;
    }
  }
}

// Does a task now and every so often, never twice at once, and only while somebody looks.
export class Poll {
  constructor(milliseconds, task) {
    this.milliseconds = milliseconds;
    this.task = task;
    this.timer = null;
    this.isOn = false;
    this.isBusy = false;
  }

  start() {
    if (this.isOn) return;
    this.isOn = true;
    this.turn();
  }

  stop() {
    this.isOn = false;
    clearTimeout(this.timer);
  }

  async turn() {
    if (this.isBusy) return;
    this.isBusy = true;
    try {
      if (!document.hidden) await this.task();
      say(byId("notice"), "");
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      say(byId("notice"), error.message);
    } finally {
      this.isBusy = false;
      clearTimeout(this.timer);
      if (this.isOn) this.timer = setTimeout(() => this.turn(), this.milliseconds);
    }
  }
}
