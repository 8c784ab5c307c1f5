// External servers: the rows of their models, and a table of the servers.

import { el, keyed, setAttribute, setText } from "./dom.js";
import { hueOf } from "./devices.js";
import { bytes, number } from "./format.js";

// [heading, text of the cell, class]
const COLUMNS = [
  ["Model", ({ model }) => model, "model"],
  ["Server", ({ url }) => url, "url"],
  ["State", serverState, "state"],
  ["Open", ({ load }) => number(load.requests), "number"],
  ["Device", (server) => devicesOf([server]).join(", ") || "–", "where"],
  ["KV held", (server) => memory(server, "held_bytes"), "number kv"],
  ["Static", (server) => memory(server, "static_bytes"), "number"],
  ["Minimum", (server) => memory(server, "min_bytes"), "number"],
  ["Limit", limit, "number"],
  ["Why", (server) => server.reason || server.no_sleep || server.unmanaged, "reason"],
];

/** Returns a Map of external model -> its servers. */
export function externalModels(status) {
  return Map.groupBy(status.external, (server) => server.model);
}

/** Returns the figures of an external model's row in the table of models. */
export function externalFigures(servers) {
  return {
    ...stateOf(servers),
    devices: devicesOf(servers),
    running: servers.reduce((total, { load }) => total + load.requests, 0),
    waiting: 0,
    weights: servers.reduce((total, server) => total + sum(server, "static_bytes"), 0),
    kv: servers.reduce((total, server) => total + sum(server, "held_bytes"), 0),
  };
}

function serverState({ problem, asleep }) {
  if (problem) return "problem";
  return asleep ? "asleep" : "answers";
}

function stateOf(servers) {
  const failing = servers.filter(({ problem }) => problem);
  if (failing.length === 0) {
    const state = servers.every(({ asleep }) => asleep) ? "asleep" : "external";
    return { state, why: "" };
  }
  const text = ({ url, problem }) => (servers.length > 1 ? `${url}: ${problem}` : problem);
  const state = failing.length === servers.length ? "down" : "degraded";
  return { state, why: failing.map(text).join("; ") };
}

function devicesOf(servers) {
  const clients = servers.flatMap((server) => server.clients);
  return [...new Set(clients.map(({ namespace, device }) => `${namespace}/${device}`))];
}

function sum({ clients }, field) {
  return clients.reduce((total, client) => total + client[field], 0);
}

function memory(server, field) {
  return server.clients.length > 0 ? bytes(sum(server, field)) : "–";
}

/** Returns the limit of all ranks together, which exists if each rank has one. */
function limit(server) {
  const limited = server.clients.every((client) => client.limit_bytes !== null);
  return limited ? memory(server, "limit_bytes") : "–";
}

export function makeServerHeadings(table) {
  const cells = COLUMNS.map(([text, , type]) => el("th", { scope: "col", class: type, text }));
  table.tHead.append(el("tr", {}, ...cells));
}

export function showServers(table, servers) {
  keyed(table.tBodies[0], servers, ({ url }) => url, create, update);
}

function create() {
  const made = el("tr");
  for (const [heading, , type] of COLUMNS)
    made.append(el("td", { class: type, "data-heading": heading }, el("span", { class: "text" })));
  made.querySelector(".model").prepend(el("i", { class: "swatch" }));
  made.querySelector(".state .text").className = "text pill";
  made.querySelector(".reason").prepend(el("span", { class: "why" }));
  made.querySelector(".kv").append(el("span", { class: "evictable" }));
  return made;
}

function update(node, server) {
  COLUMNS.forEach(([, text], column) =>
    setText(node.cells[column].querySelector(".text"), text(server)),
  );
  setAttribute(node.querySelector(".model"), "title", server.model);
  node.querySelector(".swatch").style.setProperty("--hue", hueOf(server.model));
  const pill = node.querySelector(".pill");
  setAttribute(pill, "data-state", pill.textContent);
  setText(node.querySelector(".why"), server.problem);
  const evictable = sum(server, "evictable_bytes");
  setText(
    node.querySelector(".evictable"),
    evictable > 0 ? `${bytes(evictable)} can be given up` : "",
  );
}
