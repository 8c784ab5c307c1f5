// The cluster's status as memory maps of its devices and rows of its models.

import { externalFigures, externalModels } from "./external.js";

/** Returns per device: {name, capacity, reserved, groups, held, free, kvpr, engines, drained}.
 * groups: one model's memory on the device, in bytes by kind.
 * held: bytes granted by the ledger and not mapped.
 * drained: remaining models of a device that is being drained; undefined for other devices. */
export function deviceMaps(status) {
  return status.agents.map((agent) => {
    const groups = modelsOn(status, agent.device).map(groupOf);
    const shown = groups.reduce((sum, g) => sum + g.weights + g.used + g.cached + g.idle, 0);
    const reserved = Math.max(agent.reserved_bytes, shown);
    return {
      name: agent.device,
      capacity: Math.max(agent.capacity_bytes, reserved),
      reserved,
      groups,
      held: reserved - shown,
      free: Math.max(0, agent.capacity_bytes - reserved),
      kvpr: status.kvpr[agent.device],
      drained: status.drained[agent.device],
      engines: {
        free: agent.engines_free,
        starting: agent.engines_starting,
        total: agent.engines_total,
      },
    };
  });
}

/** Returns the models on a device. A model has one report, which holds for each of its devices. */
function modelsOn(status, device) {
  const here = (agent, model) => agent.device === device || model.peers.includes(device);
  return status.agents.flatMap((agent) => agent.models.filter((model) => here(agent, model)));
}

function groupOf(report) {
  const mapped = report.kv_mapped_bytes;
  const cached = Math.min(report.kv_cached_bytes, mapped);
  const idle = Math.min(report.kv_idle_bytes, mapped - cached);
  return {
    model: report.model,
    state: report.state,
    weights: report.static_bytes,
    used: mapped - cached - idle,
    cached,
    idle,
  };
}

/** Returns a row for each configured or reported model, ordered by name. */
export function modelRows(status, history) {
  const reports = status.agents.flatMap((agent) => agent.models.map((model) => ({ agent, model })));
  const external = externalModels(status);
  const seen = [
    ...status.models,
    ...external.keys(),
    ...reports.map(({ model }) => model.model),
    ...Object.keys(status.unplaced),
  ];
  return [...new Set(seen)].sort().map((name) => ({
    name,
    ...(external.has(name)
      ? externalFigures(external.get(name))
      : figures(
          status,
          name,
          reports.filter(({ model }) => model.model === name),
        )),
    requests: history.rate("prism_requests_total", name, 10_000),
    tokens: history.rate("prism_output_tokens_total", name, 10_000),
    ttft: history.attainment("ttft", name),
    tpot: history.attainment("tpot", name),
  }));
}

function figures(status, name, mine) {
  const sum = (field) => mine.reduce((total, { model }) => total + model[field], 0);
  return {
    ...stateOf(status, name, mine),
    devices: [...new Set(mine.flatMap(({ agent, model }) => [agent.device, ...model.peers]))],
    running: sum("running"),
    waiting: sum("waiting") + (status.unplaced[name] ?? 0),
    weights: sum("static_bytes"),
    kv: sum("kv_mapped_bytes"),
  };
}

const ORDER = ["active", "activating", "draining", "failed"];

function stateOf(status, name, mine) {
  const states = mine.map(({ model }) => model.state);
  const state = ORDER.find((each) => states.includes(each));
  const error = mine.map(({ model }) => model.error).find((text) => text);
  const why = error ?? status.refusals[name] ?? "";
  if (state) return { state, why };
  if (status.overload.includes(name)) return { state: "refused", why };
  return { state: status.unplaced[name] ? "waiting for placement" : "not loaded", why };
}
