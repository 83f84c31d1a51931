// Elements, made without markup: whatever a text contains, it is shown as text.

// An element with attributes ("on..." are listeners; false and null: left out) and children.
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// The same for SVG.
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.flat());
  return node;
}

export const byId = (id) => document.getElementById(id);

// Set a text, if it is another one: screens and screen readers are left in peace.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Say how something ended.
export function tell(node, text, isProblem = false) {
  node.className = isProblem ? "problem" : "";
  say(node, text);
}

// Fill a <select> with [value, text] pairs, if they are new: a list that is open would close.
// What was chosen stays chosen, if it is still there.
export function fillSelect(select, pairs) {
  const present = Array.from(select.options, (option) => [option.value, option.text]);
  if (JSON.stringify(present) === JSON.stringify(pairs)) return;
  const chosen = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => el("option", { value }, text)));
  if (pairs.some(([value]) => value === chosen)) select.value = chosen;
}

// A table. heads and cells: texts or elements; a cell that is a number is aligned right.
export function table(caption, heads, rows) {
  const cell = (value) => {
    const number = typeof value === "number";
    return el("td", { class: number && "number" }, number ? String(value) : value);
  };
  return el(
    "table",
    {},
    caption ? el("caption", {}, caption) : [],
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))),
  );
}

// Offer a file to the browser's downloads.
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
