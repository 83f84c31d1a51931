// Finetuning jobs: upload examples, start a job, watch it, stop it, try what it has made.

import { Failure, Poll, call, getJSON, post, quoted } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el, fillSelect, say, table } from "./dom.js";
import { ago, duration, number, size, whole } from "./format.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const LONGEST_LINE = 160; // characters that are shown of a wrong line
const PAUSE = 1000; // milliseconds in which a second click starts no second job

const jobs = new Map(); // id -> {job, node, ...}: see `newJob`
const fileNames = new Map(); // the id of a file -> its name, or the id if it is deleted
const poll = new Poll(1000, load);
let firstChoices; // a promise that is kept when the form has the files of before

export function start({ worker }) {
  say(byId("worker"), worker);
  byId("upload").onchange = upload;
  byId("new-job").onsubmit = create;
  firstChoices = loadChoices();
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
    await firstChoices; // these would otherwise replace the new ones
    await loadChoices();
    byId("training-file").value = made.id; // before it is told, for a quick click
    tell(status, `${made.filename} is uploaded (${size(made.bytes)}).`);
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
  const { data } = await getJSON("/v1/files?purpose=fine-tune"); // all of them
  for (const { id, filename } of data) fileNames.set(id, filename);
  return data;
}

// --- Jobs

async function create(event) {
  event.preventDefault();
  const hyperparameters = {};
  for (const [id, name] of [["epochs", "n_epochs"], ["multiplier", "learning_rate_multiplier"]]) {
    if (byId(id).value) hyperparameters[name] = Number(byId(id).value);
  }
  const body = {
    training_file: byId("training-file").value,
    model: byId("job-model").value,
    method: { type: "supervised", supervised: { hyperparameters } },
  };
  const suffix = byId("suffix").value.trim();
  if (suffix) Object.assign(body, { suffix, metadata: { suffix } }); // a job shows its metadata
  const button = byId("start-job");
  button.disabled = true;
  setTimeout(() => { button.disabled = false; }, PAUSE);
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
  const data = [];
  let page = {};
  do { // newest first
    const after = page.last_id ? `&after=${page.last_id}` : "";
    page = await getJSON(`/v1/fine_tuning/jobs?limit=100${after}`);
    data.push(...page.data);
  } while (page.has_more && !areOver(page.last_id));
  byId("no-job").hidden = data.length > 0;
  await nameFiles(data.map((job) => job.training_file));
  for (const job of [...data].reverse()) {
    const one = jobs.get(job.id) ?? newJob(job);
    one.job = job;
    fillJob(one);
  }
  const open = [...jobs.values()].filter(({ node, isRead }) => node.open && !isRead);
  await Promise.all(open.map(loadHistory));
}

// Are the jobs before this one here, and over? Ids sort by time.
const areOver = (id) => jobs.size > 0
  && [...jobs.values()].every(({ job }) => job.id >= id || ENDED.includes(job.status));

// Learn the names of files that somebody else has uploaded.
async function nameFiles(ids) {
  const unknown = ids.filter((id) => !fileNames.has(id));
  if (!unknown.length) return;
  await loadFiles();
  for (const id of unknown) if (!fileNames.has(id)) fileNames.set(id, id);
}

// A job's place on the page. The newest and those that run are open, and only these ask for events.
function newJob(job) {
  const one = { job, isRead: false, chart: null, loss: "", best: null };
  one.state = el("span", { class: "state" });
  one.time = el("span", { class: "hint" });
  one.progress = el("progress", { "aria-label": `Progress of ${job.id}`, max: 1, value: 0 });
  one.problem = el("p", { class: "problem", role: "status" });
  one.advice = el("p", { class: "hint", role: "status" });
  one.facts = el("p", { class: "hint" });
  one.cancel = el("button", { type: "button", onclick: () => cancel(one) }, "Cancel");
  const primary = { type: "button", class: "primary", onclick: () => tryIt(one) };
  one.tryIt = el("button", primary, "Try it");
  one.tryBest = el("button", { type: "button", hidden: true, onclick: () => tryIt(one, one.best) });
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
  const buttons = el("div", { class: "buttons" }, one.tryIt, one.tryBest, one.cancel);
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
  say(one.advice, job.hint ?? "");
  say(one.problem, job.error?.message ?? "");
  one.cancel.hidden = isOver;
  one.tryIt.hidden = job.status !== "succeeded";
  one.progress.hidden = isOver;
  if (job.progress) one.progress.value = job.progress.step / job.progress.total_steps;
  const { n_epochs: epochs, learning_rate_multiplier: times } = job.hyperparameters ?? {};
  const facts = [job.id, `from ${job.model}`, `on ${file}`];
  if (epochs > 0) facts.push(`epochs: ${epochs}`); // not "auto"
  if (times > 0) facts.push(`learning rate × ${times}`);
  if (job.trained_tokens) facts.push(`${whole(job.trained_tokens)} tokens trained`);
  say(one.facts, facts.join(" · "));
}

// When it ended, how far it is, or for how long it has waited.
function timeOf({ job, loss }) {
  if (ENDED.includes(job.status)) return ago(job.finished_at);
  const seconds = Date.now() / 1000;
  if (job.status !== "running") return `for ${duration(Math.max(0, seconds - job.created_at))}`;
  const { step, total_steps: steps } = job.progress ?? {};
  const left = job.estimated_finish && `${duration(job.estimated_finish - seconds)} left`;
  return [steps && `step ${whole(step)} of ${whole(steps)}`, loss, left].filter(Boolean).join(", ");
}

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
async function tryIt({ job }, model = job.fine_tuned_model) {
  const names = { model, beside: job.model };
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

// --- Events, the curve of the losses, the best checkpoint

async function loadHistory(one) {
  const { id, status, run } = one.job;
  const path = `/v1/fine_tuning/jobs/${encodeURIComponent(id)}`;
  const { data } = await getJSON(`${path}/events?limit=1000`); // newest first
  const shown = data.map(lineOf);
  if (one.log.children.length !== shown.length) one.log.replaceChildren(...shown);
  one.plot.hidden = one.rings.hidden = !run;
  if (run) await showCurve(one, run);
  if (status === "succeeded") findBest(one, (await getJSON(`${path}/checkpoints?limit=1000`)).data);
  one.isRead = ENDED.includes(status); // then no event comes after these
}

function lineOf({ created_at: at, level, message }) {
  const time = new Date(at * 1000).toLocaleTimeString("en-GB");
  return el("li", { class: level }, el("time", {}, time), ` ${message}`);
}

async function showCurve(one, run) {
  const curve = await getJSON(`/api/runs/${quoted(run)}/curve?points=400`);
  one.chart ??= new Chart(one.plot, `Loss of ${one.job.id}`);
  one.chart.show([{ name: "loss", color: 0, ...curve }]);
  one.loss = curve.value === null ? "" : `loss ${number(curve.value)}`;
  say(one.time, timeOf(one));
}

// Offer the checkpoint with the lowest loss on held-out examples, if it is not the last one.
function findBest(one, checkpoints) {
  const lossOf = ({ metrics }) => metrics.valid_loss ?? Infinity;
  const [best] = [...checkpoints].sort((a, b) => lossOf(a) - lossOf(b));
  one.tryBest.hidden = !best || best === checkpoints[0] || lossOf(best) === Infinity;
  if (one.tryBest.hidden) return;
  one.best = best.fine_tuned_model_checkpoint;
  say(one.tryBest, `Try step ${best.step_number}, lowest held-out loss: ${number(lossOf(best))}`);
}
