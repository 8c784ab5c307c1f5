// Small helpers. Text from the cluster goes in by textContent and attributes alone, never as HTML.

/** An element; `attributes` by name (`text` is its text), children behind them. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set it, or remove it where `value` is null. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Make `parent` hold one child for each item, in this order. A child whose key stays is kept, and
 * with it the focus. */
export function keyed(parent, items, keyOf, create, update) {
  parent.prismChildren ??= new Map();
  const before = parent.prismChildren;
  const now = new Map();
  for (const item of items) {
    const key = keyOf(item);
    const node = before.get(key) ?? create(item);
    now.set(key, node);
    update(node, item);
  }
  for (const [key, node] of before) if (!now.has(key)) node.remove();
  let place = parent.firstElementChild;
  for (const node of now.values()) {
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  parent.prismChildren = now;
}
