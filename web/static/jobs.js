// Finetuning jobs: start one, watch it, stop it, let it go on, try what it has made.

import { Poll, attempt, call, getJSON, post, quoted } from "./api.js";
import { Chart } from "./chart.js";
import * as examples from "./examples.js";
import { byId, download, el, say, table, tell } from "./dom.js";
import { ago, duration, number, plural, whole } from "./format.js";

const ENDED = ["succeeded", "failed", "cancelled"];
const PATH = "/v1/fine_tuning/jobs";
const PAUSE = 1000; // milliseconds in which a second click starts no second job
const NUMBERS = [ // of the form: the id of a field, the hyperparameter
  ["epochs", "n_epochs"],
  ["multiplier", "learning_rate_multiplier"],
  ["batch", "batch_size"],
];

const jobs = new Map(); // id -> {job, node, ...}: see `newJob`
const poll = new Poll(1000, load);
let wantedRun = null; // the run of a job to be shown as soon as it is in the list
let made = 0; // models of the jobs in the list

export function start({ worker }) {
  say(byId("worker"), worker);
  examples.start();
  byId("new-job").onsubmit = create;
  byId("new-job").oninput = () => say(byId("job-problem"), ""); // a preview is of another job
  byId("preview").onclick = preview;
}

export function show(parameters) {
  wantedRun = parameters.get("run");
  examples.loadChoices();
  poll.start();
}

export const hide = () => poll.stop();

// --- Jobs

// What the form asks for.
function asked() {
  const hyperparameters = {};
  for (const [id, name] of NUMBERS) {
    if (byId(id).value) hyperparameters[name] = Number(byId(id).value);
  }
  const body = {
    training_file: byId("training-file").value,
    model: byId("job-model").value,
    method: { type: "supervised", supervised: { hyperparameters } },
  };
  const suffix = byId("suffix").value.trim();
  if (suffix) Object.assign(body, { suffix, metadata: { suffix } }); // a job shows its metadata
  if (byId("validation-file").value) body.validation_file = byId("validation-file").value;
  if (byId("job-seed").value) body.seed = Number(byId("job-seed").value);
  return body;
}

async function create(event) {
  event.preventDefault();
  const button = byId("start-job");
  button.disabled = true;
  setTimeout(() => { button.disabled = false; }, PAUSE);
  await attempt(byId("job-problem"), async () => {
    await post(PATH, asked());
    tell(byId("job-problem"), "The job is in the list.");
    await poll.turn();
  });
}

// What the job would be, unless another one is asked for meanwhile.
async function preview() {
  if (!byId("new-job").reportValidity()) return;
  const status = byId("job-problem");
  const body = asked();
  tell(status, "Reading the examples …");
  await attempt(status, async () => {
    const plan = await post(`${PATH}/preview`, body);
    if (JSON.stringify(asked()) === JSON.stringify(body)) tell(status, wordsOf(plan));
  });
}

function wordsOf(plan) {
  const parts = [
    `${plural(plan.examples, "example")} to learn, ${whole(plan.held_out)} held out`
      + ` (${plan.held_out_lines})`,
    `${plural(plan.tokens, "token")}, the longest example has ${whole(plan.longest)}`,
    `${plural(plan.steps, "step")} of ${plural(plan.rows, "row")} of ${whole(plan.row_tokens)}`,
  ];
  if (plan.cut) parts.push(`${plural(plan.cut, "example")} will be cut`);
  if (plan.dropped) parts.push(`${plural(plan.dropped, "example")} will not be learned`);
  if (plan.minutes !== null) parts.push(`about ${duration(60 * plan.minutes)}`);
  return `${parts.join("; ")}.`;
}

async function load() {
  const data = [];
  let page = {};
  do { // newest first
    const after = page.last_id ? `&after=${page.last_id}` : "";
    page = await getJSON(`${PATH}?limit=100${after}`);
    data.push(...page.data);
  } while (page.has_more && !areOver(page.last_id));
  byId("no-job").hidden = data.length > 0;
  await examples.nameFiles(data.map((job) => job.training_file));
  for (const job of [...data].reverse()) {
    const one = jobs.get(job.id) ?? newJob(job);
    one.job = job;
    fillJob(one);
  }
  const ids = new Set(data.map(({ id }) => id));
  for (const [id, { node }] of jobs) { // those that somebody has deleted
    if (ids.has(id) || (page.has_more && id < page.last_id)) continue;
    node.parentNode.remove();
    jobs.delete(id);
  }
  const open = [...jobs.values()].filter(({ node, isRead }) => node.open && !isRead);
  await Promise.all(open.map(loadHistory));
  const count = data.filter(({ fine_tuned_model: model }) => model).length;
  if (count !== made) examples.loadChoices(); // a job may begin with what another one has made
  made = count;
}

// Are the jobs before this one here, and over? Ids sort by time.
const areOver = (id) => jobs.size > 0
  && [...jobs.values()].every(({ job }) => job.id >= id || ENDED.includes(job.status));

// A job's place on the page. The newest and those that run are open, and only these ask for events.
function newJob(job) {
  const one = { job, isRead: false, chart: null, loss: "", buttons: {} };
  one.name = el("strong", { class: "name" });
  one.state = el("span", { class: "state" });
  one.time = el("span", { class: "hint" });
  one.progress = el("progress", { "aria-label": `Progress of ${job.id}`, max: 1, value: 0 });
  one.problem = el("p", { class: "problem", role: "status" });
  one.refusal = el("p", { role: "status" });
  one.advice = el("p", { class: "hint", role: "status" });
  one.facts = el("span", {});
  one.run = el("a", { hidden: true }, "curves and settings");
  one.plot = el("div", { class: "chart low" });
  one.checkpoints = scrolled("Checkpoints");
  one.events = el("ol", { class: "events" });
  one.output = scrolled("Output of the training");
  one.node = el(
    "details",
    { open: !ENDED.includes(job.status) },
    el("summary", {}, one.name, one.state, one.time),
    one.progress,
    one.problem,
    one.advice,
    el("p", { class: "hint" }, one.facts, one.run),
    one.plot,
    one.checkpoints,
    scrolled("Events", one.events),
    one.output,
  );
  for (const [label, action] of Object.entries(ACTIONS)) {
    const button = { type: "button", class: label === "Try it" && "primary", hidden: true };
    one.buttons[label] = el("button", { ...button, onclick: () => act(one, label, action) }, label);
  }
  const buttons = el("div", { class: "buttons" }, Object.values(one.buttons));
  byId("job-list").prepend(el("li", {}, one.node, buttons, one.refusal));
  jobs.set(job.id, one);
  return one;
}

// A region of its own, which scrolls.
function scrolled(label, ...children) {
  const hidden = !children.length;
  const region = { class: "scroll low", tabindex: "0", role: "region", "aria-label": label };
  return el("div", { ...region, hidden }, children);
}

function fillJob(one) {
  const { job } = one;
  const isOver = ENDED.includes(job.status);
  const file = examples.fileName(job.training_file);
  say(one.name, job.fine_tuned_model ?? `${job.metadata?.suffix ?? job.model}, on ${file}`);
  say(one.state, job.paused ? "paused" : WORDS[job.status] ?? job.status);
  one.state.dataset.state = job.status;
  say(one.time, timeOf(one));
  say(one.advice, job.hint ?? "");
  say(one.problem, job.error?.message ?? "");
  for (const [label, button] of Object.entries(one.buttons)) button.hidden = !isPossible(label, job);
  one.isRead &&= isOver; // one that was resumed has new events
  one.progress.hidden = isOver;
  if (job.progress) one.progress.value = job.progress.step / job.progress.total_steps;
  const { n_epochs: epochs, learning_rate_multiplier: times } = job.hyperparameters ?? {};
  const facts = [job.id, `from ${job.model}`, `on ${file}`];
  if (epochs > 0) facts.push(`epochs: ${epochs}`); // not "auto"
  if (times > 0) facts.push(`learning rate × ${times}`);
  if (job.trained_tokens) facts.push(`${whole(job.trained_tokens)} tokens trained`);
  say(one.facts, facts.join(" · ") + (job.run ? " · " : ""));
  one.run.hidden = !job.run;
  one.run.href = `#runs?${new URLSearchParams({ run: job.run })}`;
  if (job.run && job.run === wantedRun) { // it was asked for: bring it into view
    wantedRun = null;
    one.node.open = true;
    one.node.firstChild.focus();
  }
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
  succeeded: "finished",
};

// --- What can be done with a job

const pathOf = ({ id }) => `${PATH}/${encodeURIComponent(id)}`;

const ACTIONS = {
  "Try it": tryIt,
  Pause: ({ job }) => post(`${pathOf(job)}/pause`),
  Resume: resume,
  Cancel: ({ job }) => post(`${pathOf(job)}/cancel`),
  "Download the adapter": async ({ job: { fine_tuned_model: name } }) => (
    download(await (await call(`/api/adapters/${quoted(name)}`)).blob(), `${name}.zip`)
  ),
  "Delete the model": ({ job: { fine_tuned_model: name } }) => (
    examples.remove(`/v1/models/${quoted(name)}`, `Delete the model ${name}?`)
  ),
  "Delete the job": ({ job }) => (
    examples.remove(pathOf(job), "Delete the job? A model that it has finished stays.")
  ),
};

function isPossible(label, { status, paused, run }) {
  const isOver = ENDED.includes(status);
  if (label === "Pause") return !isOver && !paused;
  if (label === "Resume") return paused || status === "failed" || status === "cancelled";
  if (label === "Cancel") return !isOver;
  if (label === "Delete the job") return isOver || paused;
  return status === "succeeded" && Boolean(run); // it has a model
}

// The training that was stopped may need some seconds to end: until then this is refused.
async function resume(one, tries = 40) {
  try {
    await post(`${pathOf(one.job)}/resume`);
  } catch (error) {
    if (error.status !== 409 || tries === 0) throw error;
    await new Promise((done) => { setTimeout(done, 500); });
    await resume(one, tries - 1);
  }
}

async function act(one, label, action) {
  one.buttons[label].disabled = true;
  tell(one.refusal, "");
  await attempt(one.refusal, async () => {
    await action(one);
    await poll.turn();
  });
  one.buttons[label].disabled = false;
}

// A model in the playground, beside the one that it was made from, with a question of its file.
async function tryIt({ job }, model = job.fine_tuned_model) {
  const question = await examples.firstQuestion(job.training_file);
  const query = new URLSearchParams({ model, beside: job.model, ...question });
  location.hash = `#playground?${query}`;
}

// --- Events, the curve of the losses, checkpoints, what the training has printed

async function loadHistory(one) {
  const { job } = one;
  const { data } = await getJSON(`${pathOf(job)}/events?limit=1000`); // newest first
  const shown = data.map(({ created_at: at, level, message }) => (
    el("li", { class: level }, el("time", {}, new Date(at * 1000).toLocaleString("sv")), ` ${message}`)
  ));
  if (one.events.children.length !== shown.length) one.events.replaceChildren(...shown);
  one.plot.hidden = !job.run;
  if (job.run) await showCurve(one, job.run);
  if (job.run) showCheckpoints(one, (await getJSON(`${pathOf(job)}/checkpoints?limit=1000`)).data);
  one.output.hidden = job.status !== "failed";
  if (job.status === "failed") await showOutput(one);
  one.isRead = ENDED.includes(job.status); // then no event comes after these
}

async function showOutput({ job, output }) {
  const text = await (await call(`${pathOf(job)}/log`)).text();
  output.replaceChildren(el("pre", {}, text.trimEnd() || "It has printed nothing."));
  output.scrollTop = output.scrollHeight;
}

async function showCurve(one, run) {
  const curve = await getJSON(`/api/runs/${quoted(run)}/curve?points=400`);
  one.chart ??= new Chart(one.plot, `Loss of ${one.job.id}`);
  one.chart.show([{ name: "loss", color: 0, ...curve }]);
  one.loss = curve.value === null ? "" : `loss ${number(curve.value)}`;
  say(one.time, timeOf(one));
}

// The best first: that with the lowest loss on held-out examples.
function showCheckpoints(one, checkpoints) {
  one.checkpoints.hidden = !checkpoints.length;
  const lossOf = ({ metrics }) => metrics.valid_loss ?? Infinity;
  const sorted = [...checkpoints].sort((a, b) => lossOf(a) - lossOf(b));
  const key = JSON.stringify(sorted);
  if (one.shownCheckpoints === key) return; // a button that has the focus stays
  one.shownCheckpoints = key;
  const rows = sorted.map((checkpoint, i) => {
    const { step_number: step, fine_tuned_model_checkpoint: name } = checkpoint;
    const attributes = { type: "button", class: "plain", onclick: () => tryIt(one, name) };
    const star = i === 0 && lossOf(checkpoint) < Infinity ? "★ " : "";
    const button = el("button", attributes, `Try step ${whole(step)}`);
    return [button, star + number(lossOf(checkpoint))];
  });
  const caption = "Rings of the curve: loss on held-out examples";
  one.checkpoints.replaceChildren(table(caption, ["Checkpoint", "Held-out loss"], rows));
}
