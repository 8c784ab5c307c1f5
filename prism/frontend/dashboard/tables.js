// Tables of models and decisions, and the totals.

import { el, keyed, setAttribute, setText, svg } from "./dom.js";
import { hueOf } from "./devices.js";
import { ago, bytes, number, percent, seconds } from "./format.js";

// [heading, text of the cell, sort key, whether it is a number]
const COLUMNS = [
  ["Model", (row) => row.name, (row) => row.name, false],
  ["State", (row) => row.state, (row) => row.state, false],
  ["Device", (row) => row.devices.join(", ") || "–", (row) => row.devices.join(), false],
  ["Running", (row) => number(row.running), (row) => row.running, true],
  ["Waiting", (row) => number(row.waiting), (row) => row.waiting, true],
  ["Requests/s", (row) => number(row.requests), (row) => row.requests ?? -1, true],
  ["Tokens/s", (row) => number(row.tokens), (row) => row.tokens ?? -1, true],
  ["TTFT met", (row) => percent(row.ttft.part), (row) => row.ttft.part ?? 2, true],
  ["TPOT met", (row) => percent(row.tpot.part), (row) => row.tpot.part ?? 2, true],
  ["Weights", (row) => bytesOrNone(row.weights), (row) => row.weights, true],
  ["KV", (row) => bytesOrNone(row.kv), (row) => row.kv, true],
];
const GOOD = 0.99;
const FAIR = 0.9;
const sorted = { column: 0, descending: false };

/** Adds headings that sort the table. `changed` is called when the order changes. */
export function makeHeadings(table, changed) {
  const row = el("tr");
  COLUMNS.forEach(([heading, , , isNumber], column) => {
    const button = el("button", { type: "button", text: heading });
    button.addEventListener("click", () => {
      sorted.descending = sorted.column === column ? !sorted.descending : isNumber;
      sorted.column = column;
      changed();
    });
    row.append(el("th", { scope: "col", ...(isNumber && { class: "number" }) }, button));
  });
  table.tHead.append(row);
}

export function showModels(table, rows, filter) {
  const wanted = rows.filter((row) => row.name.toLowerCase().includes(filter.toLowerCase()));
  const by = COLUMNS[sorted.column][2];
  wanted.sort((a, b) => compare(by(a), by(b)) * (sorted.descending ? -1 : 1) || compare(a.name, b.name));
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const order = sorted.descending ? "descending" : "ascending";
    setAttribute(cell, "aria-sort", column === sorted.column ? order : null);
  });
  keyed(table.tBodies[0], wanted, (row) => row.name, createModel, updateModel);
  return wanted.length;
}

function bytesOrNone(count) {
  return count > 0 ? bytes(count) : "–";
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function createModel(row) {
  const made = el("tr");
  for (const [, , , isNumber] of COLUMNS)
    made.append(el("td", isNumber ? { class: "number" } : {}));
  const swatch = el("i", { class: "swatch" });
  swatch.style.setProperty("--hue", hueOf(row.name));
  made.cells[0].className = "model";
  made.cells[0].append(swatch, el("span"));
  made.cells[1].append(el("span", { class: "pill" }), el("span", { class: "why" }));
  return made;
}

function updateModel(node, row) {
  COLUMNS.forEach(([, text], column) => {
    if (column > 1) setText(node.cells[column], text(row));
  });
  setText(node.cells[0].lastChild, row.name);
  setAttribute(node.cells[0], "title", row.name);
  const [pill, why] = node.cells[1].children;
  setText(pill, row.state);
  setAttribute(pill, "data-state", row.state);
  setText(why, row.why);
  [row.ttft, row.tpot].forEach((met, place) => {
    setAttribute(node.cells[7 + place], "data-grade", grade(met.part));
    setAttribute(
      node.cells[7 + place],
      "title",
      met.part === null ? "no request ended" : met.since,
    );
  });
  setAttribute(node.cells[4], "data-grade", row.waiting > 0 ? "fair" : null);
}

function grade(part) {
  if (part === null) return null;
  return part >= GOOD ? "good" : part >= FAIR ? "fair" : "poor";
}

export function showDecisions(table, decisions, nowS) {
  // Decisions of the same time differ in their model.
  const key = (each) => `${each.time_unix_s} ${each.kind} ${each.model}`;
  keyed(table.tBodies[0], [...decisions].reverse(), key, createDecision, (node, each) =>
    updateDecision(node, each, nowS),
  );
}

function createDecision(each) {
  const where = each.target ? `${each.device} → ${each.target}` : each.device;
  const when = new Date(each.time_unix_s * 1000);
  return el(
    "tr",
    {},
    el("td", { class: "faint", title: when.toLocaleString() }),
    el(
      "td",
      {},
      el("span", { class: "pill", "data-kind": each.kind, text: each.kind.replace("_", " ") }),
    ),
    el("td", { class: "model", title: each.model, text: each.model }),
    el("td", { text: where }),
    el("td", { class: "reason" }, el("span", { text: each.reason }), el("span", { class: "why" })),
    el("td", { class: "number" }),
  );
}

function updateDecision(node, each, nowS) {
  setText(node.cells[0], ago(nowS - each.time_unix_s));
  setText(node.cells[4].lastChild, each.problem && `failed: ${each.problem}`);
  setText(node.cells[5], each.seconds === null ? "in progress" : seconds(each.seconds));
}

/** Shows `totals`, each {name, value, line, grade, title}. A line is a list of figures, or null. */
export function showTotals(parent, totals) {
  const create = (total) =>
    el("div", { class: "total" }, el("dt", { text: total.name }), el("dd"), sparkline());
  keyed(
    parent,
    totals,
    (total) => total.name,
    create,
    (node, total) => {
      setText(node.children[1], total.value);
      setAttribute(node, "data-grade", total.grade ?? null);
      setAttribute(node, "title", total.title ?? null);
      draw(node.children[2], total.line);
    },
  );
}

function sparkline() {
  const made = svg("svg", {
    viewBox: "0 0 100 24",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  made.append(svg("polyline", { "vector-effect": "non-scaling-stroke" }));
  return made;
}

function draw(node, line) {
  const figures = (line ?? []).filter((each) => each !== null);
  const most = Math.max(1e-9, ...figures);
  const step = 100 / Math.max(1, figures.length - 1);
  const points = figures.map(
    (each, i) => `${(i * step).toFixed(1)},${(23 - (22 * each) / most).toFixed(1)}`,
  );
  node.firstChild.setAttribute("points", figures.length > 1 ? points.join(" ") : "");
}

export function totalsOf(rows, history, lines) {
  const sum = (field) => rows.reduce((total, row) => total + row[field], 0);
  const met = { ttft: history.attainment("ttft", null), tpot: history.attainment("tpot", null) };
  const attained = (slo) => ({
    name: `${slo.toUpperCase()} SLO met`,
    value: percent(met[slo].part),
    grade: grade(met[slo].part),
    title: met[slo].since,
  });
  return [
    { name: "Requests/s", value: number(lines.requests.at(-1)), line: lines.requests },
    { name: "Output tokens/s", value: number(lines.tokens.at(-1)), line: lines.tokens },
    { name: "Running", value: number(sum("running")), line: lines.running },
    {
      name: "Waiting",
      value: number(sum("waiting")),
      line: lines.waiting,
      grade: sum("waiting") ? "fair" : null,
    },
    attained("ttft"),
    attained("tpot"),
  ];
}
