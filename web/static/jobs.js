// Finetuning jobs: upload examples, start a job, watch it, stop it, try what it has made.

import { Failure, Poll, call, getJSON, post } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el, fillSelect, say, table } from "./dom.js";
import { ago, duration, number, size, whole } from "./format.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const LONGEST_LINE = 160; // characters that are shown of a wrong line
const PATIENCE = 15; // seconds after which a job that waits says how to start a worker

const jobs = new Map(); // id -> {job, node, ...}: see `newJob`
const fileNames = new Map(); // the id of a file -> its name, or the id if it is deleted
const poll = new Poll(1000, load);

export function start() {
  byId("upload").onchange = upload;
  byId("new-job").onsubmit = (event) => {
    event.preventDefault();
    create();
  };
  loadChoices();
}

export const show = () => poll.start();
export const hide = () => poll.stop();

function tell(node, text, isProblem = false) {
  node.className = isProblem ? "problem" : "";
  say(node, text);
}

// --- Files

async function upload() {
  const [file] = byId("upload").files;
  if (!file) return;
  const status = byId("upload-status");
  byId("upload-lines").replaceChildren();
  tell(status, `Uploading ${file.name} …`);
  const body = new FormData();
  body.append("purpose", "fine-tune");
  body.append("file", file, file.name);
  try {
    const made = await (await call("/v1/files", { method: "POST", body })).json();
    tell(status, `${made.filename} is uploaded (${size(made.bytes)}).`);
    await loadChoices();
    byId("training-file").value = made.id;
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    const hasTable = error.lines?.length > 0; // then a table has the reasons
    tell(status, hasTable ? error.message.split(",")[0] : error.message, true);
    if (hasTable) await showLines(file, error.lines);
  }
  byId("upload").value = ""; // so that the same file, mended, can be chosen again
}

// The wrong lines of a file, with the reasons and what they say.
async function showLines(file, wrong) {
  const lines = (await file.text()).split("\n");
  const rows = wrong.map(({ line, reason }) => {
    const text = lines[line - 1] ?? "";
    const shown = text.length > LONGEST_LINE ? `${text.slice(0, LONGEST_LINE)}…` : text;
    return [line, el("div", {}, reason, el("code", {}, shown))];
  });
  byId("upload-lines").replaceChildren(table(file.name, ["Line", "What is wrong"], rows));
}

async function loadChoices() {
  try {
    const [files, models] = await Promise.all([loadFiles(), getJSON("/v1/models")]);
    const newest = [...files].sort((a, b) => b.created_at - a.created_at);
    const named = newest.map(({ id, filename, bytes }) => [id, `${filename} (${size(bytes)})`]);
    fillSelect(byId("training-file"), named.length ? named : [["", "upload a file first"]]);
    const bases = models.data.filter(({ parent }) => !parent).map(({ id }) => [id, id]);
    fillSelect(byId("job-model"), bases);
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    tell(byId("job-problem"), error.message, true);
  }
}

async function loadFiles() {
  const { data } = await getJSON("/v1/files?purpose=fine-tune&limit=100");
  for (const { id, filename } of data) fileNames.set(id, filename);
  return data;
}

// --- Jobs

async function create() {
  const hyperparameters = {};
  if (byId("epochs").value) hyperparameters.n_epochs = Number(byId("epochs").value);
  if (byId("multiplier").value) {
    hyperparameters.learning_rate_multiplier = Number(byId("multiplier").value);
  }
  const body = {
    training_file: byId("training-file").value,
    model: byId("job-model").value,
    method: { type: "supervised", supervised: { hyperparameters } },
  };
  const suffix = byId("suffix").value.trim();
  if (suffix) Object.assign(body, { suffix, metadata: { suffix } }); // a job shows its metadata
  try {
    await post("/v1/fine_tuning/jobs", body);
    tell(byId("job-problem"), "The job is in the list.");
    await poll.turn();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    tell(byId("job-problem"), error.message, true);
  }
}

async function load() {
  const { data } = await getJSON("/v1/fine_tuning/jobs?limit=50");
  byId("no-job").hidden = data.length > 0;
  await nameFiles(data.map((job) => job.training_file));
  for (const job of [...data].reverse()) {
    const one = jobs.get(job.id) ?? newJob(job);
    one.job = job;
    fillJob(one);
  }
  const open = [...jobs.values()].filter(({ node, isRead }) => node.open && !isRead);
  await Promise.all(open.map(loadEvents));
}

// Learn the names of files that somebody else has uploaded.
async function nameFiles(ids) {
  const unknown = ids.filter((id) => !fileNames.has(id));
  if (!unknown.length) return;
  await loadFiles();
  for (const id of unknown) if (!fileNames.has(id)) fileNames.set(id, id);
}

// A job's place on the page. The newest and those that run are open, and only these ask for events.
function newJob(job) {
  const one = { job, events: new Map(), isRead: false, chart: null, far: "" };
  one.state = el("span", { class: "state" });
  one.time = el("span", { class: "hint" });
  one.progress = el("progress", { "aria-label": `Progress of ${job.id}`, max: 1, value: 0 });
  one.problem = el("p", { class: "problem", role: "status" });
  one.advice = el("p", { class: "hint", role: "status" });
  one.facts = el("p", { class: "hint" });
  one.cancel = el("button", { type: "button", onclick: () => cancel(one) }, "Cancel");
  const primary = { type: "button", class: "primary", onclick: () => tryIt(one) };
  one.tryIt = el("button", primary, "Try it");
  one.plot = el("div", { class: "chart low" });
  one.rings = el("p", { class: "hint" }, "Rings: loss on the examples that are held out.");
  one.log = el("ol", { class: "events" });
  const region = { class: "scroll low", tabindex: "0", role: "region", "aria-label": "Events" };
  one.name = el("strong", { class: "name" });
  one.node = el(
    "details",
    { open: !ENDED.includes(job.status) },
    el("summary", {}, one.name, one.state, one.time),
    one.progress,
    one.problem,
    one.advice,
    one.facts,
    one.plot,
    one.rings,
    el("div", region, one.log),
  );
  const buttons = el("div", { class: "buttons" }, one.tryIt, one.cancel);
  byId("job-list").prepend(el("li", {}, one.node, buttons));
  jobs.set(job.id, one);
  return one;
}

function fillJob(one) {
  const { job } = one;
  const isOver = ENDED.includes(job.status);
  const file = fileNames.get(job.training_file);
  say(one.name, job.fine_tuned_model ?? `${job.metadata?.suffix ?? job.model}, on ${file}`);
  say(one.state, WORDS[job.status] ?? job.status);
  one.state.dataset.state = job.status;
  say(one.time, timeOf(one));
  const isStuck = job.status === "queued" && waited(job) > PATIENCE;
  say(one.advice, isStuck ? "No worker has taken it yet: python -m web.worker jobs" : "");
  say(one.problem, job.error?.message ?? "");
  one.cancel.hidden = isOver;
  one.tryIt.hidden = job.status !== "succeeded";
  one.progress.hidden = isOver;
  const { n_epochs: epochs, learning_rate_multiplier: times } = job.hyperparameters ?? {};
  const facts = [job.id, `from ${job.model}`, `on ${file}`];
  if (epochs > 0) facts.push(`epochs: ${epochs}`); // not "auto"
  if (times > 0) facts.push(`learning rate × ${times}`);
  if (job.trained_tokens) facts.push(`${whole(job.trained_tokens)} tokens trained`);
  say(one.facts, facts.join(" · "));
}

// When it ended, how far it is, or for how long it has waited.
function timeOf({ job, far }) {
  if (ENDED.includes(job.status)) return ago(job.finished_at);
  return job.status === "running" ? far : `for ${duration(waited(job))}`;
}

const waited = (job) => Math.max(0, Date.now() / 1000 - job.created_at);

const WORDS = {
  validating_files: "checking the files",
  queued: "waiting for a worker",
  running: "running",
  succeeded: "finished",
  failed: "failed",
  cancelled: "cancelled",
};

async function cancel(one) {
  one.cancel.disabled = true;
  try {
    await post(`/v1/fine_tuning/jobs/${encodeURIComponent(one.job.id)}/cancel`);
    await poll.turn();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    say(one.problem, error.message);
  }
  one.cancel.disabled = false;
}

// The new model in the playground, beside the one that it was made from.
async function tryIt({ job }) {
  const names = { model: job.fine_tuned_model, beside: job.model };
  const kind = await kindOf(job.training_file);
  location.hash = `#playground?${new URLSearchParams({ ...names, kind })}`;
}

// What a file of examples teaches, by its first bytes: to go on with a text, or to chat.
async function kindOf(fileId) {
  try {
    const { body } = await call(`/v1/files/${encodeURIComponent(fileId)}/content`);
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    const { value } = await reader.read();
    await reader.cancel();
    return value.includes('"messages"') ? "chat" : "text";
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    return "text"; // the file is deleted
  }
}

// --- Events

async function loadEvents(one) {
  const isLast = ENDED.includes(one.job.status); // then no event comes after these
  const path = `/v1/fine_tuning/jobs/${encodeURIComponent(one.job.id)}/events?limit=1000`;
  const fresh = [];
  let after = "";
  for (;;) { // newest first
    const page = await getJSON(path + after);
    const unknown = page.data.filter(({ id }) => !one.events.has(id));
    fresh.push(...unknown);
    if (!page.has_more || !unknown.length) break;
    after = `&after=${encodeURIComponent(page.data.at(-1).id)}`;
  }
  for (const event of fresh.reverse()) {
    one.events.set(event.id, event);
    if (event.type !== "metrics") one.log.prepend(lineOf(event));
  }
  one.isRead = isLast;
  if (fresh.length) showMetrics(one);
}

function lineOf({ created_at: at, level, message }) {
  const time = new Date(at * 1000).toLocaleTimeString("en-GB");
  return el("li", { class: level }, el("time", {}, time), ` ${message}`);
}

// The curve of the losses, and how far it is.
function showMetrics(one) {
  const metrics = [...one.events.values()].filter(({ type }) => type === "metrics");
  const data = metrics.map((event) => event.data).filter(Boolean).sort((a, b) => a.step - b.step);
  one.plot.hidden = one.rings.hidden = !data.length;
  if (!data.length) return;
  one.chart ??= new Chart(one.plot, `Loss of ${one.job.id}`);
  const pairs = (name) => data.filter((row) => Number.isFinite(row[name]));
  const train = pairs("train_loss");
  const valid = pairs("valid_loss");
  const mean = train.map((row) => row.train_loss);
  one.chart.show([{
    name: "loss",
    color: 0,
    x: train.map(({ step }) => step),
    low: mean,
    mean,
    high: mean,
    val: { x: valid.map(({ step }) => step), y: valid.map((row) => row.valid_loss) },
    restarts: [],
  }]);
  const last = data.at(-1);
  if (last.total_steps) one.progress.value = last.step / last.total_steps;
  const done = last.total_steps ? `step ${whole(last.step)} of ${whole(last.total_steps)}` : "";
  const loss = train.length ? `loss ${number(mean.at(-1))}` : "";
  one.far = [done, loss].filter(Boolean).join(", ");
  say(one.time, timeOf(one));
}
