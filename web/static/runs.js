// The list of runs, and the curves of those that are chosen: hundreds of runs, live.

import { Poll, attempt, call, getJSON, quoted } from "./api.js";
import { Chart, colorOf, nearest } from "./chart.js";
import { byId, download, el, say, table } from "./dom.js";
import { NOTHING, ago, number, plural, whole } from "./format.js";

const LIST_MS = 2000;
const LIVE_MS = 1000;
const POINTS = 400; // of a curve, from the server: more than a screen can show
const HEADS = [
  ["name", "Run"],
  ["state", "State"],
  ["loss", "Loss"],
  ["val_loss", "Val. loss"],
  ["step", "Step"],
  ["updated", "Updated"],
];
const MOST_AT_ONCE = 20; // curves

const rows = new Map(); // a run's name -> {run, node, cells, box, reason}: its line in the list
const chosen = new Map(); // a run's name -> {name, color, curve, about, problem, node}
let order = { by: "updated", isDown: true };
let chart = null;
let isFirst = true; // is the list still to be read?
let drawn = ""; // which runs the table of differences shows

const list = new Poll(LIST_MS, loadList);
const live = new Poll(LIVE_MS, followCurves);

export function start() {
  chart = new Chart(byId("run-chart"), "Curves of the chosen runs");
  const cells = HEADS.map(([by, text]) => el(
    "th", { scope: "col", class: by, "data-by": by },
    el("button", { type: "button", class: "plain", onclick: () => sortBy(by) }, text),
  ));
  const first = el("th", { scope: "col" }, el("span", { class: "unseen" }, "Chosen"));
  byId("run-table").tHead.rows[0].append(first, ...cells);
  byId("run-filter").oninput = filter;
  byId("choose-all").onclick = () => firstSeen().forEach(({ run }) => choose(run.name));
  byId("choose-none").onclick = () => [...chosen.keys()].forEach(drop);
  byId("column").onchange = reloadCurves;
  byId("smoothing").oninput = draw;
  byId("log").onchange = draw;
  byId("axis").onchange = reloadCurves;
  draw();
}

export function show(parameters) {
  const names = parameters.getAll("run");
  if (names.length) {
    for (const name of chosen.keys()) if (!names.includes(name)) drop(name);
    names.forEach(choose);
  }
  list.start();
  live.start();
}

export function hide() {
  list.stop();
  live.stop();
}

// --- The list

async function loadList() {
  const { runs } = await getJSON("/api/runs");
  const names = new Set(runs.map(({ name }) => name));
  for (const [name, row] of rows) {
    if (names.has(name)) continue;
    row.node.remove();
    rows.delete(name);
  }
  let isNew = false;
  for (const run of runs) {
    isNew ||= !rows.has(run.name);
    const row = rows.get(run.name) ?? newRow(run.name);
    row.run = run;
    fillRow(row);
    tick(row);
  }
  if (isNew) sort();
  filter();
  const [newest] = runs.filter(({ state }) => state !== "damaged" && state !== "empty");
  if (isFirst && newest && !chosen.size) choose(newest.name);
  isFirst = false;
}

function newRow(name) {
  const box = el("input", {
    type: "checkbox",
    "aria-label": `Choose ${name}`,
    onchange: () => (box.checked ? choose(name) : drop(name)),
  });
  const cells = HEADS.map(([by]) => el("td", { class: by }));
  const node = el("tr", {}, el("td", {}, box), ...cells);
  cells[0].onclick = () => box.click();
  const reason = el("div", { class: "hint" });
  cells[0].append(name, reason);
  const row = { node, cells, box, reason, run: { name } };
  rows.set(name, row);
  return row;
}

function fillRow({ node, cells, reason, run }) {
  const isWhole = !run.max_steps || run.step === run.max_steps;
  const steps = isWhole ? whole(run.step) : `${whole(run.step)} / ${whole(run.max_steps)}`;
  const losses = [number(run.loss), number(run.val_loss)];
  const texts = [run.state, ...losses, steps, ago(run.updated)];
  texts.forEach((text, i) => say(cells[i + 1], text));
  node.dataset.state = run.state;
  say(reason, run.problem ?? "");
}

function sortBy(by) {
  const isText = by === "name" || by === "state";
  order = { by, isDown: order.by === by ? !order.isDown : !isText && by === "updated" };
  sort();
}

function sorted() {
  const { by, isDown } = order;
  const compare = ({ run: { [by]: a } }, { run: { [by]: b } }) => {
    if (a === b) return 0;
    if (a === null || a === undefined) return 1; // what is not known comes last
    if (b === null || b === undefined) return -1;
    return (a < b ? -1 : 1) * (isDown ? -1 : 1);
  };
  return [...rows.values()].sort(compare);
}

function sort() {
  const { by, isDown } = order;
  byId("run-table").tBodies[0].append(...sorted().map(({ node }) => node));
  for (const head of byId("run-table").tHead.querySelectorAll("[data-by]")) {
    if (head.dataset.by !== by) head.removeAttribute("aria-sort");
    else head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  }
}

// Show the runs whose name or state has each word of the filter.
function filter() {
  const words = byId("run-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { node, cells, run } of rows.values()) {
    const text = `${run.name} ${cells[1].textContent}`.toLowerCase();
    const isSeen = words.every((word) => text.includes(word));
    if (node.hidden === isSeen) node.hidden = !isSeen;
    count += isSeen;
  }
  const all = plural(rows.size, "run");
  const seen = count === rows.size ? all : `${whole(count)} of ${all}`;
  say(byId("run-count"), rows.size ? seen : "There are no runs yet: train one into this folder.");
}

// --- Which are chosen

const firstSeen = () => sorted().filter(({ node }) => !node.hidden).slice(0, MOST_AT_ONCE);

function choose(name) {
  if (chosen.has(name)) return;
  const used = new Set(Array.from(chosen.values(), ({ color }) => color));
  let color = 0;
  while (used.has(color)) color++;
  const one = { name, color, curve: null, about: null, problem: null };
  one.node = legendOf(one);
  chosen.set(name, one);
  byId("legend").append(one.node);
  markChosen(name);
  loadCurve(one);
  loadAbout(one);
}

function drop(name) {
  chosen.get(name).node.remove();
  chosen.delete(name);
  markChosen(name);
  draw();
}

// Tick a row's box, in the color of its curve.
function tick({ box, run }) {
  const one = chosen.get(run.name);
  box.checked = Boolean(one);
  box.className = one ? colorOf(one) : "";
}

// Tick its box, and write the choice into the address.
function markChosen(name) {
  if (rows.has(name)) tick(rows.get(name));
  const query = new URLSearchParams([...chosen.keys()].map((key) => ["run", key]));
  history.replaceState(null, "", chosen.size ? `#runs?${query}` : "#runs");
}

function legendOf(one) {
  const state = el("span", { class: "hint" }, "loading …");
  one.state = state;
  const card = el("button", { type: "button", class: "plain", onclick: () => saveCard(one) },
    "Model card");
  const away = el("button", {
    type: "button",
    class: "plain",
    "aria-label": `Remove ${one.name}`,
    onclick: () => drop(one.name),
  }, "×");
  const name = el("div", { class: "name" }, one.name);
  const job = el("a", { href: `#jobs?${new URLSearchParams({ run: one.name })}` }, "Job");
  const link = one.name.startsWith("jobs/") ? [job] : [];
  const swatch = el("span", { class: `swatch ${colorOf(one)}` });
  return el("li", {}, swatch, name, state, link, card, away);
}

async function saveCard(one) {
  say(one.state, "making the card …");
  await attempt(one.state, async () => {
    const response = await call(`/api/runs/${quoted(one.name)}/card`);
    download(await response.blob(), `${one.name.replaceAll("/", "-")}-card.md`);
    sayState(one);
  });
}

// --- Curves

async function loadCurve(one) {
  const column = byId("column").value;
  try {
    const path = `/api/runs/${quoted(one.name)}/curve?points=${POINTS}&column=`;
    const isTimed = byId("axis").value === "seconds";
    const speed = isTimed ? await getJSON(`${path}tokens_per_second`) : null;
    const curve = await getJSON(path + column);
    const isSame = isTimed === (byId("axis").value === "seconds");
    if (!isSame || column !== byId("column").value) return; // others were chosen meanwhile
    Object.assign(one, { curve, speed });
    one.problem = curve.problem;
  } catch (error) {
    one.problem = error.message;
  }
  sayState(one);
  draw();
}

function reloadCurves() {
  for (const one of chosen.values()) {
    one.curve = null;
    loadCurve(one);
  }
  draw();
}

// Ask for more steps of the runs that are written at the moment, or were not read to their end.
async function followCurves() {
  const growing = [...chosen.values()].filter(({ name, curve }) => {
    const run = rows.get(name)?.run;
    if (!curve || !run) return false;
    return run.state === "running" || (run.state !== "damaged" && curve.last < run.step);
  });
  await Promise.all(growing.map(loadCurve));
}

// The last value, or what is wrong.
function sayState(one) {
  const { curve, problem } = one;
  const last = curve?.x.length ? `${number(curve.value)} at step ${whole(curve.last)}` : "";
  const empty = curve && !last && !problem ? `no values of ${byId("column").value}` : "";
  say(one.state, [last || empty, problem].filter(Boolean).join(" · "));
  one.state.className = problem ? "problem" : "hint";
}

function draw() {
  const loaded = [...chosen.values()].filter(({ curve }) => curve);
  const xLabel = byId("axis").value;
  const series = loaded.map((one) => seriesOf(one, xLabel)).filter(Boolean);
  const smoothing = Number(byId("smoothing").value);
  chart.show(series, { log: byId("log").checked, smoothing, xLabel });
  const rings = series.some(({ val }) => val.x.length) ? "Rings: validation losses. " : "";
  const hint = `${rings}Drag over steps, or press + and -, to zoom; Escape shows all.`;
  say(byId("run-hint"), chosen.size ? hint : "Choose one run or several to see their curves.");
  showDifferences();
}

// A curve as the chart draws it; null if the places of its steps are not known (yet).
function seriesOf(one, axis) {
  const { name, color, curve } = one;
  const place = placeOf(one, axis);
  if (!place) return null;
  const val = { x: curve.val.x.map(place), y: curve.val.y };
  const restarts = curve.restarts.map(({ x, label }) => ({ x: place(x), label }));
  return { name, color, ...curve, x: curve.x.map(place), val, restarts };
}

// Step -> tokens or seconds of the training: so far each stretch of steps had its mean speed.
function placeOf({ about, speed }, axis) {
  if (axis === "step") return (step) => step;
  const { global_batch_size: rows, max_seq_len: length } = about?.settings ?? {};
  const tokens = rows * length; // of a step
  if (!(tokens > 0) || (axis === "seconds" && !speed?.x.length)) return null;
  if (axis === "tokens") return (step) => step * tokens;
  let sum = 0;
  const seconds = speed.x.map((step, i) => {
    sum += ((step - (speed.x[i - 1] ?? 0)) * tokens) / speed.mean[i];
    return sum;
  });
  return (step) => (step ? seconds[nearest(speed.x, step)] : 0);
}

// --- Settings

async function loadAbout(one) {
  try {
    one.about = await getJSON(`/api/runs/${quoted(one.name)}/about`);
  } catch (error) {
    one.about = { settings: {}, launches: [], problem: error.message };
  }
  draw();
}

// A table of the settings in which the chosen runs differ; of a single run all of them.
function showDifferences() {
  const known = [...chosen.values()].filter(({ about }) => about);
  const key = known.map(({ name }) => name).join("\n");
  if (key === drawn) return;
  drawn = key;
  const place = byId("differences");
  if (!known.length) return place.replaceChildren();
  const names = [...new Set(known.flatMap(({ about }) => Object.keys(about.settings)))];
  const text = ({ about: { settings } }, name) => (
    Object.hasOwn(settings, name) ? shown(settings[name]) : NOTHING
  );
  const lines = names
    .filter((name) => name !== "run_dir") // what tells runs apart anyway
    .map((name) => [name, ...known.map((one) => text(one, name))])
    .filter(([, ...values]) => known.length === 1 || new Set(values).size > 1);
  const single = known.length === 1;
  const title = single ? `Settings of ${known[0].name}` : "Settings that differ";
  const runNames = known.map((one) => el(
    "span", {}, el("span", { class: `swatch ${colorOf(one)}` }), one.name,
  ));
  if (!lines.length) {
    return place.replaceChildren(el("p", { class: "hint" }, "These runs have the same settings."));
  }
  const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": title };
  const made = el("div", region, table("", ["Setting", ...runNames], lines));
  place.replaceChildren(el("details", { open: !single }, el("summary", {}, title), made));
}

const shown = (value) => (typeof value === "string" ? value || "(empty)" : JSON.stringify(value));
