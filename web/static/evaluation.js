// Scores of all runs on all tasks. The best of each task is marked.

import { Poll, getJSON } from "./api.js";
import { byId, el, say } from "./dom.js";
import { NOTHING, plural } from "./format.js";

const OWN = "held-out loss"; // each job's on its own examples: jobs cannot be compared by it

let answer = { tasks: [], rows: [] };
let sortedBy = null; // a task
let drawn = "";

const scores = new Poll(5000, load);

export function start() {
  byId("evaluation-filter").oninput = draw;
  say(byId("evaluation-status"), "Loading …");
}

export const show = () => scores.start();
export const hide = () => scores.stop();

async function load() {
  answer = await getJSON("/api/evaluations");
  draw();
}

function draw() {
  const wanted = byId("evaluation-filter").value.toLowerCase();
  const rows = answer.rows.filter(({ name }) => name.toLowerCase().includes(wanted));
  const key = JSON.stringify([answer, wanted, sortedBy]);
  if (key === drawn) return;
  drawn = key;
  const none = "No run has been evaluated yet: python -m evaluation RUN --tasks=FILE "
    + "--out=RUN/scores.json, or train with --icl_tasks.";
  const counts = `${plural(rows.length, "run")}, ${plural(answer.tasks.length, "task")}`;
  const legend = ["a star marks the best of a task"];
  if (answer.tasks.includes(OWN)) legend.push(`${OWN}: before → after, on a job's own examples`);
  const all = [counts, ...legend].join("; ");
  say(byId("evaluation-status"), answer.rows.length ? all : none);
  byId("scores").replaceChildren(...(answer.rows.length ? [head(), body(rows)] : []));
}

function head() {
  const cells = answer.tasks.map((task) => el(
    "th", { scope: "col", class: "number", "aria-sort": task === sortedBy && "descending" },
    el("button", { type: "button", class: "plain", onclick: () => sortBy(task) }, task),
  ));
  return el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Run"), ...cells));
}

function sortBy(task) {
  sortedBy = task;
  draw();
}

function body(rows) {
  const value = (row, task) => (has(row, task) ? merit(row.scores[task]) : -Infinity);
  const isBetter = (a, b) => value(b, sortedBy) - value(a, sortedBy);
  const sorted = sortedBy ? [...rows].sort(isBetter) : rows;
  const best = answer.tasks.map((task) => bestOf(rows, task));
  const scoreOf = (row, task) => (has(row, task) ? row.scores[task] : null);
  const cells = (row) => answer.tasks.map((task, i) => (
    task === OWN ? changeCell(scoreOf(row, task)) : scoreCell(scoreOf(row, task), best[i])
  ));
  const lines = sorted.map((row) => el(
    "tr", {}, el("th", { scope: "row" }, row.name), cells(row),
  ));
  return el("tbody", {}, baselines(rows), lines);
}

// The merit of a task's best score. Of a lone one there is none.
function bestOf(rows, task) {
  const known = rows.filter((row) => has(row, task)).map((row) => merit(row.scores[task]));
  return known.length > 1 ? Math.max(...known) : null;
}

// The line of what guessing reaches.
function baselines(rows) {
  const cells = answer.tasks.map((task) => {
    const rowsWithIt = task === OWN ? [] : rows.filter((row) => has(row, task));
    const known = rowsWithIt.map((row) => row.scores[task].baseline);
    const baseline = known.find((one) => one !== null && one !== undefined);
    return el("td", { class: "number" }, baseline === undefined ? NOTHING : baseline.toFixed(3));
  });
  return el("tr", { class: "baseline" }, el("th", { scope: "row" }, "baseline"), cells);
}

// A task may be named "constructor", which every object has.
const has = ({ scores }, task) => Object.hasOwn(scores, task);

// Larger is better: of nats per token the negative.
const merit = ({ score, measure }) => (measure === "accuracy" ? score : -score);

// What the base had before its finetuning, and what the adapters have after it.
function changeCell(one) {
  if (!one) return el("td", { class: "number" }, NOTHING);
  const { score, baseline } = one;
  const texts = [baseline, score].filter((value) => value !== null);
  const title = `${one.measure}: less is better`;
  const kind = `number ${baseline !== null && score >= baseline ? "guess" : ""}`;
  return el("td", { class: kind, title }, texts.map((value) => value.toFixed(3)).join(" → "));
}

function scoreCell(one, best) {
  if (!one) return el("td", { class: "number" }, NOTHING);
  const isBest = merit(one) === best;
  const isGuess = one.baseline !== null && merit(one) <= merit({ ...one, score: one.baseline });
  const title = [
    one.measure === "accuracy" ? one.measure : `${one.measure}: less is better`,
    ...(one.n === null ? [] : [plural(one.n, "question")]),
    ...(isGuess ? ["no better than the baseline"] : []),
  ].join("; ");
  const text = `${isBest ? "★ " : ""}${one.score.toFixed(3)}`;
  const kind = `number ${isBest ? "best" : ""} ${isGuess ? "guess" : ""}`;
  return el("td", { class: kind, title }, text);
}
