// Devices as memory maps: a bar of segments, grouped by model.

import { el, keyed, setAttribute, setText } from "./dom.js";
import { bytes, number } from "./format.js";

const KINDS = [
  ["weights", "weights"],
  ["used", "KV in use"],
  ["cached", "KV cached"],
  ["idle", "KV mapped, empty"],
];
const REST = [
  ["held", "reserved, not mapped"],
  ["free", "free"],
];
const HUES = 24;
const hues = new Map(); // model -> number of its hue

/** Gives each model a hue. It follows from the name, so that it is the same after a reload and in
 * every browser. If two names ask for the same hue, the later one gets another while any is free. */
export function assignHues(models) {
  const taken = new Set(hues.values());
  for (const model of models) {
    if (hues.has(model)) continue;
    let hue = hashOf(model) % HUES;
    while (taken.has(hue) && taken.size < HUES) hue = (hue + 7) % HUES;
    taken.add(hue);
    hues.set(model, hue);
  }
}

/** FNV-1a, with its upper half folded in: the lower bits of short names differ little. */
function hashOf(text) {
  let hash = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text))
    hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return (hash ^ (hash >>> 16)) >>> 0;
}

/** Returns the hue of a model in degrees. */
export function hueOf(model) {
  assignHues([model]);
  return (360 / HUES) * hues.get(model);
}

export function showDevices(parent, maps) {
  keyed(parent, maps, (map) => map.name, create, update);
}

function create(map) {
  const bar = el("div", { class: "bar", role: "list", "aria-label": `Memory of ${map.name}` });
  bar.addEventListener("keydown", (event) => walk(bar, event));
  for (const type of ["mouseover", "focusin"])
    bar.addEventListener(type, (event) => explain(bar, event.target));
  for (const type of ["mouseleave", "focusout"])
    bar.addEventListener(type, () => explain(bar, null));
  return el(
    "article",
    { class: "device", "aria-label": map.name },
    el(
      "div",
      { class: "head" },
      el("h3", { text: map.name }),
      el("span", { class: "pill drained" }),
      el("span", { class: "grow" }),
      el("span", { class: "facts" }),
    ),
    bar,
    el("p", { class: "detail faint", "aria-hidden": "true" }),
  );
}

function update(node, map) {
  setText(node.querySelector(".facts"), facts(map));
  const drained = node.querySelector(".drained");
  drained.hidden = map.drained === undefined;
  drained.dataset.state = map.drained ? "draining" : "";
  setText(drained, map.drained ? `draining: ${map.drained}` : "drained");
  const bar = node.querySelector(".bar");
  keyed(
    bar,
    parts(map),
    (part) => part.key,
    createPart,
    (each, part) => updatePart(each, part, map),
  );
  if (!bar.querySelector("[tabindex='0']"))
    bar.querySelector(".seg")?.setAttribute("tabindex", "0");
  const shown = bar.querySelector(".seg.shown");
  if (shown) setText(node.querySelector(".detail"), shown.getAttribute("aria-label"));
  else setText(node.querySelector(".detail"), summary(map));
  node.dataset.summary = summary(map);
}

function facts(map) {
  const { free, starting, total } = map.engines;
  const coming = starting ? `, ${starting} starting` : "";
  const engines = `${total - free - starting} of ${total} engines busy${coming}`;
  // JSON has no infinity; a device that is not alive has none.
  const pressure = map.kvpr === null ? "∞" : (map.kvpr?.toPrecision(2) ?? "–");
  return `KVPR ${pressure} · ${engines} · ${bytes(map.reserved)} of ${bytes(map.capacity)}`;
}

function summary(map) {
  const kv = (kind) => map.groups.reduce((sum, group) => sum + group[kind], 0);
  return (
    KINDS.slice(0, 3)
      .map(([kind, text]) => `${text} ${bytes(kv(kind))}`)
      .join(" · ") + ` · free ${bytes(map.free)}`
  );
}

function parts(map) {
  const groups = map.groups.map((group) => ({
    key: `model ${group.model}`,
    title: group.model,
    hue: hueOf(group.model),
    segments: KINDS.map(([kind, text]) => ({
      kind,
      text: `${group.model}: ${text}`,
      size: group[kind],
    })),
  }));
  const rest = REST.map(([kind, text]) => ({
    key: kind,
    title: "",
    hue: null,
    segments: [{ kind, text, size: map[kind] }],
  }));
  return [...groups, ...rest];
}

function createPart() {
  return el(
    "div",
    { class: "part" },
    el("div", { class: "segments" }),
    el("span", { class: "name", "aria-hidden": "true" }),
  );
}

function updatePart(node, part, map) {
  const size = part.segments.reduce((sum, segment) => sum + segment.size, 0);
  node.hidden = size === 0;
  grow(node, size);
  if (part.hue !== null) node.style.setProperty("--hue", part.hue);
  setText(node.querySelector(".name"), part.title);
  setAttribute(node, "title", part.title || null);
  const create = (segment) =>
    el("div", { class: `seg ${segment.kind}`, role: "listitem", tabindex: "-1" });
  keyed(
    node.querySelector(".segments"),
    part.segments,
    (segment) => segment.kind,
    create,
    (each, segment) => {
      each.hidden = segment.size === 0;
      grow(each, segment.size);
      const share = number((100 * segment.size) / map.capacity);
      setAttribute(
        each,
        "aria-label",
        `${segment.text} ${bytes(segment.size)} (${share} % of ${map.name})`,
      );
    },
  );
}

/** Sets the flex of a segment in MiB: flex factors with a sum below 1 would not fill the bar. */
function grow(node, size) {
  node.style.setProperty("flex", `${size / 2 ** 20} 1 0`);
}

/** Moves the focus between segments with arrow keys, Home and End. Tab moves to the next device. */
function walk(bar, event) {
  const all = [...bar.querySelectorAll(".seg")].filter((seg) => seg.offsetParent !== null);
  const at = all.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined || !all[to]) return;
  event.preventDefault();
  for (const seg of bar.querySelectorAll(".seg")) seg.tabIndex = -1;
  all[to].tabIndex = 0;
  all[to].focus();
}

function explain(bar, target) {
  const device = bar.closest(".device");
  const seg = target?.closest?.(".seg") ?? bar.querySelector(".seg:focus");
  for (const each of bar.querySelectorAll(".shown")) each.classList.remove("shown");
  seg?.classList.add("shown");
  setText(
    device.querySelector(".detail"),
    seg?.getAttribute("aria-label") ?? device.dataset.summary,
  );
}
