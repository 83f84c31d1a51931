// plan.py as a form: what a training run needs and how fast it will be.

import { getJSON, post } from "./api.js";
import { byId, el, fillSelect, say } from "./dom.js";
import { NOTHING, compact, duration, energy, number, percent, short, whole } from "./format.js";

const FIELDS = ["model", "device", "devices", "seq_len", "global_batch_size", "tokens", "price"];
const WORDS = ["model", "device"]; // all other fields are numbers
const TIMES = { "": 1, K: 1e3, M: 1e6, B: 1e9, T: 1e12 };
const WARNING = /EXTRAPOLATED|DOUBTFUL|not in the model/; // in a line of what was assumed

let isFilled = false;

export function start() {
  byId("plan").onsubmit = (event) => {
    event.preventDefault();
    plan();
  };
}

export async function show() {
  if (isFilled) return;
  try {
    const { models, devices } = await getJSON("/api/plan/choices");
    fillSelect(byId("plan-model"), models.map((name) => [name, name]));
    fillSelect(byId("plan-device"), devices.map((name) => [name, name]));
    isFilled = true;
  } catch (error) {
    complain(error);
  }
}

export function hide() {}

function complain(error) {
  byId("plan-status").className = "problem";
  say(byId("plan-status"), error.message);
}

// 20,000,000 or 2e7 or 20M; NaN for anything else.
function numberOf(text) {
  const [, digits, suffix] = text.replaceAll(",", "").match(/^(.*?)\s*([KMBT]?)$/i);
  return Number(digits) * TIMES[suffix.toUpperCase()];
}

async function plan() {
  const body = {};
  for (const name of FIELDS) {
    const text = byId(`plan-${name}`).value.trim();
    if (text) body[name] = WORDS.includes(name) ? text : numberOf(text);
  }
  byId("plan-status").className = "";
  if (Number.isNaN(body.tokens)) {
    return complain(new Error("Tokens to train on: write a number, such as 20B or 2e10."));
  }
  say(byId("plan-status"), "Planning …");
  byId("plan-answer").replaceChildren();
  try {
    const answer = await post("/api/plan", body);
    say(byId("plan-status"), "");
    byId("plan-answer").replaceChildren(...tables(answer));
  } catch (error) {
    complain(error);
  }
}

// A value, and below it the range in which it is expected.
function banded(row, name, words = number) {
  if (row[name] === null) return NOTHING;
  const band = row.band?.[name];
  if (!band || !row[name]) return words(row[name]);
  return [words(row[name]), el("span", { class: "band-of" }, band.map(words).join(" to "))];
}

const COLUMNS = [
  ["Time", (row) => banded(row, "days", (days) => duration(86_400 * days, short))],
  ["Cost", (row) => banded(row, "cost")],
  ["Layout", (row) => row.layout_text || row.label],
  ["Fits", (row) => (row.fits === null ? NOTHING : row.fits ? "yes" : "no")],
  ["Memory of a device", (row) => `${number(row.gb)} GB, ${percent(row.share_of_memory)}`],
  ["Tokens/s", (row) => banded(row, "tokens_per_second")],
  ["MFU", (row) => percent(row.mfu)],
  ["Energy", (row) => banded(row, "kwh", energy)],
];

function tables({ rows, text, command }) {
  const possible = rows.filter((row) => !row.problem);
  const columns = COLUMNS.filter(([, show]) => possible.some((row) => show(row) !== NOTHING));
  const problems = rows.map(({ problem }) => problem).filter(Boolean);
  const nodes = problems.map((problem) => el("p", { class: "problem" }, problem));
  const cells = (row) => columns.map(([, show]) => el("td", {}, show(row)));
  if (possible.length) {
    const warnings = possible[0].assumed.filter((line) => WARNING.test(line));
    nodes.push(...warnings.map((line) => el("p", { class: "problem" }, line)));
    const region = { class: "scroll", tabindex: "0", role: "region", "aria-label": "Plans" };
    nodes.push(el("div", region, el(
      "table",
      {},
      el("caption", {}, summary(possible[0])),
      el("thead", {}, el("tr", {}, columns.map(([head]) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, possible.map((row) => el("tr", {}, cells(row)))),
    )));
    nodes.push(el("p", { class: "hint" }, rangeOf(possible[0])));
    nodes.push(el("h2", {}, "Flags for fsdp_train.py"), block(possible[0].flags));
    const assumed = possible[0].assumed.map((one) => el("li", {}, one));
    nodes.push(el("details", {}, el("summary", {}, "What was assumed"), el("ul", {}, assumed)));
  }
  if (text) {
    const detail = [el("summary", {}, "In detail"), block(command), block(text)];
    nodes.push(el("details", {}, detail));
  }
  return nodes;
}

// What a range says. certainty: the kind of published runs that it comes from.
function rangeOf({ band, certainty }) {
  if (!band) return "";
  if (certainty === "anything else") {
    return "Below a number is a wide range: no published run is like this one.";
  }
  return `Below a number: 8 of 10 runs fall in this range (published runs, ${certainty}).`;
}

// Lines to copy. They may be wider than the page, and a keyboard can scroll them.
const block = (text) => el("pre", { tabindex: "0" }, text);

function summary(row) {
  const parts = [`${whole(row.devices)} × ${row.device}`];
  if (row.n_params) parts.unshift(`${compact(row.n_params)} parameters`);
  if (row.tokens) parts.push(`${compact(row.tokens)} tokens`);
  if (row.max_steps) parts.push(`${whole(row.max_steps)} steps`);
  return parts.join(", ");
}
