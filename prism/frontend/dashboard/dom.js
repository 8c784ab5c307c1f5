// DOM helpers. Text from the cluster is set only by textContent and attributes, never as HTML.

/** Returns an element with attributes (`text` sets its text) and children. */
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

/** Sets an attribute, or removes it if `value` is null. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Updates `parent` to hold one child per item, in this order. A child whose key remains is kept,
 * and with it the focus. */
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
