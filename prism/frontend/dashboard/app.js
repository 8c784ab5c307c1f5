// Polls the status and the counters every two seconds, and shows them.

import { assignHues, showDevices } from "./devices.js";
import { el, keyed, setAttribute, setText } from "./dom.js";
import { externalModels, makeServerHeadings, showServers } from "./external.js";
import { ago } from "./format.js";
import { deviceMaps, modelRows } from "./memory.js";
import { History, NAMES, parseMetrics } from "./series.js";
import { makeHeadings, showDecisions, showModels, showTotals, totalsOf } from "./tables.js";

const EVERY_MS = 2000;
const TIMEOUT_MS = 5000;
const SLOWEST_MS = 15_000;
const POINTS = 150;
const STALE_S = 15;

const $ = (id) => document.getElementById(id);
const query = NAMES.map((name) => `name[]=${name}`).join("&");
const history = new History();
const lines = { requests: [], tokens: [], running: [], waiting: [] };
let status = null;
let paused = false;
let failures = 0;
let timer = 0;

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(await reasonOf(answer));
  return answer;
}

async function reasonOf(answer) {
  const body = await answer.json().catch(() => ({}));
  return body.reason ?? body.error?.message ?? `HTTP ${answer.status}`;
}

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    await refresh();
    failures = 0;
  } catch (error) {
    failures += 1;
    showHealth(`no answer: ${error.message}`, "poor");
  }
  timer = setTimeout(poll, Math.min(SLOWEST_MS, EVERY_MS * (1 + failures)));
}

async function refresh() {
  const [found, metrics] = await Promise.all([
    ask("../status").then((answer) => answer.json()),
    ask(`../metrics?${query}`).then((answer) => answer.text()),
  ]);
  status = found;
  assignHues([...status.models, ...externalModels(status).keys()]);
  history.add(performance.now(), parseMetrics(metrics));
  addPoints();
  show();
}

function addPoints() {
  const rows = modelRows(status, history);
  const sum = (field) => rows.reduce((total, row) => total + row[field], 0);
  const point = {
    requests: history.rate("prism_requests_total", null, 10_000),
    tokens: history.rate("prism_output_tokens_total", null, 10_000),
    running: sum("running"),
    waiting: sum("waiting"),
  };
  for (const [name, line] of Object.entries(lines)) {
    line.push(point[name]);
    if (line.length > POINTS) line.shift();
  }
}

function show() {
  if (!status) return;
  const rows = modelRows(status, history);
  showTotals($("totals"), totalsOf(rows, history, lines));
  $("devices-section").hidden = status.agents.length === 0 && status.external.length > 0;
  showDevices($("devices"), deviceMaps(status));
  const shown = showModels($("models"), rows, $("filter").value);
  setText(
    $("models-shown"),
    shown === rows.length ? `${rows.length}` : `${shown} of ${rows.length}`,
  );
  $("external-section").hidden = status.external.length === 0;
  showServers($("external"), status.external);
  showDecisions($("decisions"), status.decisions, Date.now() / 1000);
  showTroubles();
  setText($("policy"), `policy ${status.policy}`);
  const trouble = Object.keys(status.degraded).length > 0;
  if (!status.ready) showHealth("starting", "fair");
  else showHealth(trouble ? "degraded" : "ready", trouble ? "fair" : "good");
  showAge();
}

function showHealth(text, grade) {
  setText($("health"), text);
  setAttribute($("health"), "data-grade", grade);
}

function showAge() {
  if (!status) return;
  const age = Math.max(0, Date.now() / 1000 - status.time_unix_s);
  setText($("age"), paused ? "paused" : `reported ${ago(age)}`);
  setAttribute($("age"), "data-grade", age > STALE_S && !paused ? "poor" : null);
}

function showTroubles() {
  const parts = Object.entries(status.degraded).map(([part, why]) => ({ part, why }));
  $("troubles").hidden = parts.length === 0;
  const create = () => el("li", {}, el("strong"), " ", el("span"));
  keyed(
    $("troubles"),
    parts,
    ({ part }) => part,
    create,
    (node, { part, why }) => {
      setText(node.children[0], part);
      setText(node.children[1], why);
    },
  );
}

function setPaused(value) {
  paused = value;
  setAttribute($("pause"), "aria-pressed", paused);
  setText($("pause").firstChild, paused ? "Resume " : "Pause ");
  showAge();
  poll();
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  setAttribute(document.documentElement, "data-theme", theme === "auto" ? null : theme);
  setText($("theme").querySelector("span"), theme);
  localStorage.setItem("prism-theme", theme);
}

function nextTheme() {
  const at = THEMES.indexOf(localStorage.getItem("prism-theme") ?? "auto");
  setTheme(THEMES[(at + 1) % THEMES.length]);
}

function onKey(event) {
  const types = event.target.matches?.("input");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && types) event.target.blur();
  if (types) return;
  const actions = { p: () => setPaused(!paused), t: nextTheme, "/": () => $("filter").focus() };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

makeHeadings($("models"), show);
makeServerHeadings($("external"));
setTheme(localStorage.getItem("prism-theme") ?? "auto");
$("pause").addEventListener("click", () => setPaused(!paused));
$("theme").addEventListener("click", nextTheme);
$("filter").addEventListener("input", show);
document.addEventListener("keydown", onKey);
document.addEventListener("visibilitychange", poll);
setInterval(showAge, 1000);
poll();
