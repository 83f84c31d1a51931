// Files of examples: upload them, mend wrong lines in the page, choose them for a job.

import { Failure, attempt, call, getJSON } from "./api.js";
import { byId, el, fillSelect, table, tell } from "./dom.js";
import { size } from "./format.js";

const LONGEST_LINE = 160; // characters that are shown of a wrong line
const MOST_EDITED = 1e6; // bytes of a file that is mended in the page
const LONGEST_QUESTION = 4000; // characters, which an address can hold

const names = new Map(); // the id of a file -> its name, or the id if it is deleted
let choices = Promise.resolve(); // the last filling of the form: one after the other

export function start() {
  byId("upload").onchange = async () => {
    const [file] = byId("upload").files;
    if (file) await upload(file);
    byId("upload").value = ""; // so that the same file, mended, can be chosen again
  };
  byId("send-lines").onclick = () => {
    const { value, dataset } = byId("lines");
    return upload(new File([value], dataset.name ?? "lines.jsonl"));
  };
  byId("delete-file").onclick = deleteFile;
}

async function upload(file) {
  const status = byId("upload-status");
  byId("upload-lines").replaceChildren();
  tell(status, `Uploading ${file.name} …`);
  const body = new FormData();
  body.append("purpose", "fine-tune");
  body.append("file", file, file.name);
  try {
    const made = await (await call("/v1/files", { method: "POST", body })).json();
    await loadChoices();
    byId("training-file").value = made.id; // before it is told, for a quick click
    byId("new-job").oninput();
    tell(status, `${made.filename} is uploaded (${size(made.bytes)}).`);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    const hasTable = error.lines?.length > 0; // then a table has the reasons
    if (hasTable) showLines(file, await file.text(), error.lines);
    tell(status, hasTable ? error.message.split(",")[0] : error.message, true);
  }
}

// The wrong lines of a file, with the reasons and what they say; and the file, to be mended.
function showLines(file, text, wrong) {
  const lines = text.split("\n");
  const canMend = file.size <= MOST_EDITED;
  if (canMend) {
    byId("lines").value = text;
    byId("lines").dataset.name = file.name;
    byId("write").open = true;
  }
  const rows = wrong.map(({ line, reason }) => {
    const mend = { type: "button", class: "plain", onclick: () => select(line) };
    const number = canMend ? el("button", mend, `Mend ${line}`) : String(line);
    return [number, el("div", {}, ...explained(lines[line - 1] ?? "", reason))];
  });
  byId("upload-lines").replaceChildren(table(file.name, ["Line", "What is wrong"], rows));
}

// Why a line cannot be used, and what it says around the place where its JSON breaks.
function explained(text, reason) {
  let why = reason;
  let at = 0;
  try {
    JSON.parse(text);
  } catch ({ message }) {
    why = `it is not JSON: ${message}`;
    at = Number(/column (\d+)/.exec(message)?.[1] ?? 1) - 1;
  }
  const begin = Math.max(0, at - LONGEST_LINE / 2);
  const end = begin + LONGEST_LINE;
  const before = (begin ? "…" : "") + text.slice(begin, at);
  const after = text.slice(at + 1, end) + (text.length > end ? "…" : "");
  return [why, el("code", {}, before, el("mark", {}, text.charAt(at)), after)];
}

// Select a line of those that are mended.
function select(number) {
  const field = byId("lines");
  const lines = field.value.split("\n");
  const begin = lines.slice(0, number - 1).join("\n").length + (number > 1);
  byId("write").open = true;
  field.focus();
  field.setSelectionRange(begin, begin + (lines[number - 1] ?? "").length);
  field.scrollTop = (field.scrollHeight * (number - 3)) / lines.length;
}

// --- The form

// Fill the lists of the form, once what was asked before has come.
export function loadChoices() {
  choices = choices.then(fillChoices);
  return choices;
}

function fillChoices() {
  return attempt(byId("job-problem"), async () => {
    const [files, models] = await Promise.all([loadFiles(), getJSON("/v1/models")]);
    const newest = [...files].sort((a, b) => b.created_at - a.created_at);
    const named = newest.map(({ id, filename, bytes }) => [id, `${filename} (${size(bytes)})`]);
    fillSelect(byId("training-file"), named.length ? named : [["", "upload a file first"]]);
    fillSelect(byId("validation-file"), [["", "some lines of the training file"], ...named]);
    fillSelect(byId("job-model"), models.data.map(({ id }) => [id, id]));
    byId("delete-file").disabled = !named.length;
  });
}

async function loadFiles() {
  const { data } = await getJSON("/v1/files?purpose=fine-tune"); // all of them
  for (const { id, filename } of data) names.set(id, filename);
  return data;
}

// Learn the names of files that somebody else has uploaded.
export async function nameFiles(ids) {
  const unknown = ids.filter((id) => !names.has(id));
  if (!unknown.length) return;
  await loadFiles();
  for (const id of unknown) if (!names.has(id)) names.set(id, id);
}

export const fileName = (id) => names.get(id);

// Delete something, if that is meant.
export async function remove(path, question) {
  if (confirm(question)) await call(path, { method: "DELETE" });
}

async function deleteFile() {
  const { value: id, selectedOptions: [{ text }] } = byId("training-file");
  await attempt(byId("upload-status"), async () => {
    await remove(`/v1/files/${encodeURIComponent(id)}`, `Delete ${text}?`);
    await loadChoices();
  });
}

// --- What a file asks

// The first question of a file, as the playground takes it: to go on with a text, or to chat.
export async function firstQuestion(fileId) {
  let row = {};
  try {
    row = JSON.parse(await firstLine(fileId));
  } catch (error) {
    if (!(error instanceof Failure)) throw error; // else the file is deleted
  }
  const textOf = (role) => row.messages.find((message) => message.role === role)?.content ?? "";
  const question = row.messages
    ? { kind: "chat", prompt: textOf("user"), system: textOf("system") }
    : { kind: "text", prompt: row.prompt ?? "" };
  return JSON.stringify(question).length > LONGEST_QUESTION ? { kind: question.kind } : question;
}

async function firstLine(fileId) {
  const { body } = await call(`/v1/files/${encodeURIComponent(fileId)}/content`);
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (!text.trimStart().includes("\n")) {
    const { value, done } = await reader.read();
    if (done) break;
    text += value;
  }
  await reader.cancel();
  return text.trimStart().split("\n")[0];
}
