// One prompt or conversation for one model, or for two side by side. Answers stream.

import { Poll, getJSON, hasKey, quoted, stream } from "./api.js";
import { byId, el, fillSelect, say } from "./dom.js";
import { number, plural, whole } from "./format.js";

const EXAMPLE = {
  type: "object",
  properties: { answer: { type: "string", maxLength: 60 }, sure: { type: "boolean" } },
  required: ["answer", "sure"],
  additionalProperties: false, // a small model would invent some for ever
};
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "seed"];

let columns = []; // of answers, one for each model that was asked
let controller = null; // of the requests that run
let names = []; // of the models
let wanted = {}; // models to choose as soon as the server has them, by the id of their list

const models = new Poll(3000, loadModels);

export function start(about) {
  if (matchMedia("(max-width: 760px)").matches) byId("sampling").open = false;
  byId("kind").onchange = showKind;
  byId("ask").onsubmit = (event) => {
    event.preventDefault();
    ask();
  };
  byId("prompt").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  };
  byId("model-a").onchange = fillBeside;
  byId("stop").onclick = () => controller?.abort();
  byId("clear").onclick = clear;
  byId("curl").onclick = showAsCurl;
  byId("schema").oninput = schemaOf;
  byId("structure").ontoggle = schemaOf;
  byId("schema-example").onclick = () => {
    byId("schema").value = JSON.stringify(EXAMPLE, null, 2);
    schemaOf();
  };
  setKind(about.chat ? "chat" : "text");
}

export function show(parameters) {
  if (parameters.has("kind")) {
    setKind(parameters.get("kind"));
    byId("structure").open = false; // so no schema of before is sent
  }
  for (const id of ["prompt", "system"]) {
    if (parameters.has(id)) byId(id).value = parameters.get(id);
  }
  for (const [id, name] of [["model-a", "model"], ["model-b", "beside"]]) {
    if (parameters.has(name)) wanted[id] = parameters.get(name);
  }
  models.start();
}

export function hide() {
  models.stop();
}

async function loadModels() {
  const { data } = await getJSON("/v1/models");
  names = data.map(({ id }) => id);
  fillSelect(byId("model-a"), names.map((name) => [name, name]));
  fillBeside();
  for (const [id, name] of Object.entries(wanted)) {
    if (!Array.from(byId(id).options).some((option) => option.value === name)) continue;
    byId(id).value = name;
    delete wanted[id];
    fillBeside();
  }
  const missing = Object.values(wanted)[0];
  // A checkpoint is in the list once it was asked for.
  if (missing?.includes("/")) await getJSON(`/v1/models/${quoted(missing)}`).catch(() => null);
  if (missing) say(byId("ask-status"), `The server does not have the model ${missing} yet.`);
  else if (byId("ask-status").textContent.endsWith(" yet.")) say(byId("ask-status"), "");
}

// The models that the first one can be compared with: all others.
function fillBeside() {
  const others = names.filter((name) => name !== byId("model-a").value);
  fillSelect(byId("model-b"), [["", "none"], ...others.map((name) => [name, name])]);
}

const isChat = () => byId("kind").value === "chat";

function setKind(kind) {
  byId("kind").value = kind;
  showKind();
}

function showKind() {
  const chat = isChat();
  byId("system-label").hidden = !chat;
  say(byId("prompt-label"), chat ? "Message" : "Prompt");
  say(byId("send"), chat ? "Send" : "Generate");
  say(byId("prompt-hint"), chat ? "Ctrl + Enter sends" : "Ctrl + Enter generates");
  if (chat) byId("prompt").closest("label").before(byId("answers"));
  else byId("ask-status").after(byId("answers"));
  clear();
}

function clear() {
  controller?.abort();
  columns = [];
  byId("answers").replaceChildren();
  byId("curl-text").hidden = true;
  say(byId("ask-status"), "");
}

// The schema as an object; null for none, if its section is closed, or if it is wrong: then the form
// cannot be sent, and the browser says why.
function schemaOf() {
  const field = byId("schema");
  const text = byId("structure").open ? field.value.trim() : "";
  field.setCustomValidity("");
  try {
    const schema = text ? JSON.parse(text) : null;
    if (typeof schema === "object") return schema;
    field.setCustomValidity("A schema is an object.");
  } catch (error) {
    field.setCustomValidity(`This is not JSON yet: ${error.message}`);
  }
  return null;
}

// A request's body. messages: the conversation, its last message included; null: no chat.
function bodyOf(model, prompt, messages) {
  const body = messages ? { model, messages } : { model, prompt };
  for (const id of NUMBERS) {
    const text = byId(id).value;
    if (text !== "") body[id] = Number(text);
  }
  const schema = schemaOf();
  if (schema) {
    const named = { name: "answer", schema, strict: true };
    body.response_format = { type: "json_schema", json_schema: named };
  }
  return body;
}

const pathOf = (body) => (body.messages ? "/v1/chat/completions" : "/v1/completions");

function chosenModels() {
  return [byId("model-a").value, byId("model-b").value].filter(Boolean);
}

// What is sent to a model: in a chat what was said before, and the message of the user.
function requestOf(model, column) {
  const prompt = byId("prompt").value;
  if (!isChat()) return bodyOf(model, prompt, null);
  const system = byId("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  const before = column?.messages ?? [];
  return bodyOf(model, prompt, [...first, ...before, { role: "user", content: prompt }]);
}

async function ask() {
  if (controller) return;
  const asked = chosenModels();
  const prompt = byId("prompt").value;
  if (isChat() && !prompt.trim()) return say(byId("ask-status"), "Write a message first.");
  const areSame = asked.join("\n") === columns.map(({ model }) => model).join("\n");
  if (!isChat() || !areSame) {
    columns = asked.map(columnOf);
    byId("answers").replaceChildren(...columns.map(({ node }) => node));
  }
  setBusy(new AbortController());
  const { signal } = controller;
  const bodies = columns.map((column) => requestOf(column.model, column));
  if (isChat()) byId("prompt").value = "";
  const answers = columns.map((column, i) => answer(column, bodies[i], signal));
  const outcomes = await Promise.all(answers);
  setBusy(null);
  say(byId("ask-status"), outcomes.find((outcome) => outcome !== "Done.") ?? "Done.");
  const isLost = !outcomes.includes("Done.") && !signal.aborted; // to be mended and sent again
  if (isLost && !byId("prompt").value) byId("prompt").value = prompt;
}

function setBusy(one) {
  controller = one;
  byId("send").disabled = Boolean(one);
  byId("stop").disabled = !one;
  if (one) say(byId("ask-status"), `Asking ${columns.map(({ model }) => model).join(" and ")} …`);
}

// Where the answers of one model appear.
function columnOf(model) {
  const label = `Answers of ${model}`;
  const region = { class: "texts", tabindex: "0", role: "region", "aria-label": label };
  const texts = el("div", region);
  const state = el("p", { class: "hint" });
  const node = el("article", { class: "answer" }, el("h2", {}, model), texts, state);
  return { model, messages: [], node, texts, state };
}

// Ask one model, and show its answer as it comes. Returns how it ended, in a word. Never throws:
// a fault is shown in the column.
async function answer(column, body, signal) {
  const made = document.createTextNode("");
  const isText = !body.messages;
  const prompt = isText ? body.prompt : body.messages.at(-1).content;
  column.state.className = "hint";
  say(column.state, "waiting …");
  if (isText) {
    column.texts.replaceChildren(el("p", { class: "text" }, el("span", { class: "given" }, prompt),
      el("span", { class: "made" }, made)));
  } else {
    column.texts.append(el("p", { class: "text said" }, prompt), el("p", { class: "text" }, made));
  }
  const begun = performance.now();
  const counted = { text: "", tokens: null, reason: null };
  let outcome = "Done.";
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  try {
    for await (const chunk of stream(pathOf(body), streamed, signal)) {
      takeIn(chunk, counted);
      made.data = isText ? counted.text : counted.text.replace(/^\s*\n|\s+$/g, "");
      say(column.state, `${((performance.now() - begun) / 1000).toFixed(1)} s`);
      scroll(column.texts, isText);
    }
    say(column.state, summary(counted, (performance.now() - begun) / 1000, body));
  } catch (error) {
    const isStopped = error.name === "AbortError";
    column.state.className = isStopped ? "hint" : "problem";
    say(column.state, isStopped ? "stopped" : error.message);
    if (isStopped) outcome = "Stopped.";
    else outcome = error.status >= 400 && error.status < 500 ? "Refused." : "Failed.";
  }
  if (!isText && counted.text) {
    column.messages.push(body.messages.at(-1), { role: "assistant", content: counted.text });
  } else if (!isText && outcome !== "Done.") {
    for (const node of [...column.texts.children].slice(-2)) node.remove(); // it was not said
  }
  return outcome;
}

// Follow the text that comes; in a chat at most until its question is at the top.
function scroll(texts, isText) {
  const question = texts.children[texts.children.length - 2];
  texts.scrollTop = isText ? texts.scrollHeight : question.offsetTop - texts.offsetTop;
}

// A chunk of a stream: a piece of text, why it ended, or how many tokens there were.
function takeIn(chunk, counted) {
  const choice = chunk.choices[0];
  counted.text += choice?.delta?.content ?? choice?.text ?? "";
  counted.reason = choice?.finish_reason ?? counted.reason;
  counted.tokens = chunk.usage?.completion_tokens ?? counted.tokens;
}

function summary({ tokens, reason }, seconds, body) {
  const parts = [`${seconds.toFixed(1)} s`];
  if (tokens !== null) {
    parts.unshift(plural(tokens, "token"));
    parts.push(`${number(tokens / seconds)} tokens/s`);
  }
  if (reason === "length") parts.push(`stopped at the limit of ${whole(tokens)} new tokens`);
  if (body.response_format) parts.push(reason === "stop" ? "valid JSON" : "not complete JSON");
  return parts.join(" · ");
}

function showAsCurl() {
  if (!byId("ask").reportValidity()) return;
  const body = requestOf(byId("model-a").value, columns[0]);
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const lines = [
    `curl ${location.origin}${pathOf(body)}`,
    ...(hasKey() ? ['-H "Authorization: Bearer $KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d ${quote(JSON.stringify(body, null, 2))}`,
  ];
  const shown = byId("curl-text");
  shown.textContent = lines.join(" \\\n  ");
  shown.hidden = false;
  getSelection().selectAllChildren(shown);
  say(byId("ask-status"), "The command is selected below: copy it.");
}
