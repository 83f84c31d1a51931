// The views and the address: #runs?run=a&run=b shows the view `runs` with two runs chosen.

import { attempt, forgetKey, getJSON, hasKey } from "./api.js";
import { byId, say } from "./dom.js";
import * as evaluation from "./evaluation.js";
import * as jobs from "./jobs.js";
import * as playground from "./playground.js";
import * as runs from "./runs.js";

// Each view has start(about), once, then show(parameters) and hide().
const VIEWS = { playground, runs, evaluation, jobs };
const NEEDS = { // what a view shows, and how to start a server that has it
  playground: ["model", "python serve.py RUN --runs=FOLDER"],
  runs: ["runs", "python serve.py --runs=runs"],
  evaluation: ["runs", "python serve.py --runs=runs"],
  jobs: ["jobs", "python serve.py runs/demo --jobs=jobs\npython -m web.worker jobs"],
};

let about = null;
let shown = null;
const started = new Set();

const isThere = (name) => Boolean(about[NEEDS[name][0]]);

function route() {
  const [wanted, query] = location.hash.slice(1).split("?");
  const first = Object.keys(VIEWS).find(isThere);
  const name = Object.hasOwn(VIEWS, wanted) ? wanted : first;
  if (shown && shown !== name && started.has(shown)) VIEWS[shown].hide();
  shown = name;
  for (const other of Object.keys(VIEWS)) {
    byId(other).hidden = other !== name;
    const link = document.querySelector(`nav a[href="#${other}"]`);
    if (other === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("missing").hidden = isThere(name);
  say(byId("missing-part"), NEEDS[name][0]);
  say(byId("missing-command"), NEEDS[name][1]);
  byId(name).hidden = !isThere(name);
  document.title = `${byId(name).querySelector("h1").textContent} · MPT`;
  if (!isThere(name)) return;
  if (!started.has(name)) VIEWS[name].start(about);
  started.add(name);
  VIEWS[name].show(new URLSearchParams(query ?? ""));
}

async function main() {
  const forget = byId("forget-key");
  forget.onclick = () => {
    forgetKey();
    location.reload();
  };
  await attempt(byId("notice"), async () => {
    about = await getJSON("/api/about");
  });
  if (!about) return;
  forget.hidden = !hasKey();
  byId("model-name").textContent = about.model ?? "";
  addEventListener("hashchange", route);
  addEventListener("invalid", ({ target }) => { // a closed section would hide what is wrong
    target.closest("details")?.setAttribute("open", "");
  }, true);
  route();
}

main();
