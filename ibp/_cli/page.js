"use strict";
// Draws the data of the page. Text from the files only becomes text nodes and attributes, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
const tensors = data.files.flatMap((file) =>
  file.tensors.map((tensor) => ({ kind: "table", scheme: "", dtype: "?", ...tensor, file })),
);
const NAMESPACE = "http://www.w3.org/2000/svg";
const COLUMNS = [
  ["tensor", (t) => t.name, ""],
  ["dtype", (t) => t.dtype, "optional"],
  ["scheme", (t) => t.scheme, ""],
  ["before", (t) => t.original_bytes, "number optional"],
  ["after", (t) => t.stored_bytes, "number"],
  ["saved", saved, "number"],
];
const PART_COLORS = {
  residuals: "kept",
  "kept bits": "agreeing",
  signs: "signs",
  "digits of plane 0": "plane0",
  "digits of plane 1": "plane1",
  "digits of plane 2": "plane2",
  "digits of plane 3": "plane3",
  "participation bits": "flags",
  "raw symbols": "symbols",
  "chunks kept whole": "chunks",
  "raw rows": "rows",
  header: "header",
  positions: "positions",
  index: "index",
  codebook: "book",
  "cluster numbers": "clusters",
  plain: "plain",
  "coded blocks": "blocks",
  "coded rows": "uncounted",
  "rounding to bytes": "rounding",
  "unused room": "left",
};
const PART_ORDER = [
  "residuals",
  "kept bits",
  "signs",
  "digits of plane",
  "participation bits",
  "raw symbols",
  "chunks kept whole",
  "header",
  "positions",
];
const USES = [["kept as it is", "kept"], ["ranked symbol", "ranked"], ["left out", "left"]];
const MARGIN = 44; // Width in pixels of the margin to the left of a chart, for its labels.
const MOST_KINDS = 24;
let sorting = { column: null, down: false };
let shown = [];
let drawnWidth = 0;
let current = -1; // The position in `tensors` of the tensor that is shown. -1: all tensors are shown.

// ---- elements ----

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}, text = null) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function color(kind) {
  return `var(--${kind})`;
}

// Draws a rectangle: a bar, a column or a strip. hint: the text that appears when the mouse is over the rectangle, and
// that screen readers read.
function box(svg, kind, x, y, width, height, hint) {
  const made = drawn("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height) });
  made.style.fill = color(kind);
  made.append(drawn("title", {}, hint));
  svg.append(made);
}

function label(svg, x, y, text, anchor = "start") {
  svg.append(drawn("text", { x, y, "text-anchor": anchor }, text));
}

// Makes an empty chart. One unit is one pixel, so text in the chart has the same size as other text of the page.
function chart(width, height, label) {
  return drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

function chartWidth() {
  const style = getComputedStyle(document.getElementById("detail"));
  const inside = document.getElementById("detail").clientWidth - 2 * parseFloat(style.paddingLeft);
  return Math.max(240, Math.min(900, inside));
}

function caption(text) {
  return element("p", { class: "soft" }, text);
}

// Returns a name with line break opportunities after dots and slashes, and after underscores in words of more than 20
// characters.
function broken(name) {
  const words = name.split(/(?<=[./])/).flatMap((word) => (word.length > 20 ? word.split(/(?<=_)/) : [word]));
  return words.flatMap((word, at) => (at ? [element("wbr"), word] : [word]));
}

function keys(entries) {
  const line = element("div", { class: "keys" });
  for (const [text, kind] of entries) {
    const swatch = element("i");
    swatch.style.background = color(kind);
    line.append(element("span", {}, swatch, text));
  }
  return line;
}

// ---- numbers ----

function saved(tensor) {
  return tensor.original_bytes ? 1 - tensor.stored_bytes / tensor.original_bytes : 0;
}

function percent(share) {
  return `${(100 * share).toFixed(1).replace(/^-0\.0$/, "0.0")} %`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(bytes) >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit && Math.abs(bytes) < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

function count(number) {
  return number.toLocaleString("en");
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// ---- the list ----

function showList() {
  const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  shown = tensors.map((tensor, at) => at).filter((at) => {
    const text = `${tensors[at].name} ${tensors[at].dtype} ${tensors[at].scheme}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  if (sorting.column !== null) shown.sort(compare);
  const rows = shown.map((at) => row(at, COLUMNS.map(([, value]) => value(tensors[at]))));
  rows.unshift(row(-1, totals()));
  document.querySelector("#list tbody").replaceChildren(...rows);
  document.getElementById("count").textContent = `${count(shown.length)} of ${count(tensors.length)}`;
}

function compare(a, b) {
  const value = COLUMNS[sorting.column][1];
  const [first, second] = [value(tensors[a]), value(tensors[b])];
  const order = typeof first === "number" ? first - second : first.localeCompare(second, "en", { numeric: true });
  return (sorting.down ? -order : order) || a - b;
}

function totals() {
  const [before, after] = ["original_bytes", "stored_bytes"].map((key) => sum(data.files.map((file) => file[key])));
  return ["in all, with headers", "", "", before, after, before ? 1 - after / before : 0];
}

function row(at, values) {
  const cells = values.map((value, column) => {
    const text = column === 5 ? percent(value) : typeof value === "number" ? size(value) : value;
    return element("td", { class: COLUMNS[column][2] }, ...(column ? [text] : broken(text)));
  });
  const made = element("tr", { tabindex: "0", "data-at": at, "aria-selected": at === current }, ...cells);
  if (at < 0) made.classList.add("total");
  return made;
}

function showHeads() {
  const heads = COLUMNS.map(([name, , style], column) => {
    const isSorted = sorting.column === column;
    const mark = isSorted ? (sorting.down ? " \u25be" : " \u25b4") : "";
    const button = element("button", { type: "button" }, name + mark);
    button.addEventListener("click", () => {
      sorting = { column, down: isSorted ? !sorting.down : style.includes("number") };
      showHeads();
      showList();
      document.querySelectorAll("#list th button")[column].focus();
    });
    const order = isSorted ? (sorting.down ? "descending" : "ascending") : "none";
    return element("th", { class: style, scope: "col", "aria-sort": order }, button);
  });
  document.querySelector("#list thead tr").replaceChildren(...heads);
}

// ---- the details of one tensor, or of all tensors ----

function showDetail() {
  const back = element("button", { type: "button", id: "back" }, "Back to the list");
  back.addEventListener("click", close);
  drawnWidth = chartWidth();
  const parts = current < 0 ? overview() : tensorPage(tensors[current]);
  document.getElementById("detail").replaceChildren(back, ...parts);
  for (const made of document.querySelectorAll("#list tbody tr")) {
    made.setAttribute("aria-selected", Number(made.dataset.at) === current);
  }
}

function overview() {
  const parts = {};
  for (const tensor of tensors) {
    for (const [part, bytes] of Object.entries(tensor.parts)) parts[part] = (parts[part] || 0) + bytes;
  }
  const made = [element("h2", {}, "All tensors"), ...data.files.map(fileFacts)];
  made.push(...partsOf(parts), ...savingsOf());
  const groups = {};
  for (const tensor of tensors) {
    if (tensor.entropy.length) (groups[`${tensor.dtype} ${tensor.entropy.length}`] ||= []).push(tensor);
  }
  for (const group of Object.values(groups)) made.push(...bitsOf(mean(group), `${group[0].dtype}: bits, by bytes`));
  return made;
}

function fileFacts(file) {
  const facts = [
    ["file", file.path],
    ["format", file.format],
    ["size", `${size(file.file_bytes)} (${count(file.file_bytes)} bytes)`],
  ];
  if (file.estimate) facts.push(["note", "an ordinary file: what compressing it would give, by samples of rows"]);
  for (const [key, value] of Object.entries(file.metadata)) facts.push([key, value.slice(0, 300)]);
  return factList(facts);
}

function factList(facts) {
  return element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

// Returns, for each bit, the means of `entropy`, `left_out` and `ranked` over a group of tensors. Tensors are weighted
// by their sizes.
function mean(group) {
  const total = sum(group.map((t) => t.original_bytes)) || 1;
  const ofBit = (key, bit) => sum(group.map((t) => ((t[key] || [])[bit] || 0) * t.original_bytes)) / total;
  const of = (key) => group[0].entropy.map((_, bit) => ofBit(key, bit));
  return { dtype: group[0].dtype, entropy: of("entropy"), left_out: of("left_out"), ranked: of("ranked") };
}

function tensorPage(tensor) {
  const facts = [
    ["dtype", tensor.dtype],
    ["shape", `[${tensor.shape.join(", ")}]`],
    ["scheme", tensor.scheme + ({ estimate: ", by estimate", delta: ", a table of differences" }[tensor.kind] || "")],
    [
      "bytes",
      `${size(tensor.original_bytes)} before, ${size(tensor.stored_bytes)} after: ${percent(saved(tensor))} saved`,
    ],
  ];
  if (tensor.num_rows) facts.push(["rows", rowFacts(tensor)]);
  if (tensor.sampled_rows < tensor.num_rows) {
    facts.push(["counted", `${count(tensor.sampled_rows)} of the rows, as a sample`]);
  }
  if (tensor.note) facts.push(["note", tensor.note]);
  const made = [element("h2", {}, ...broken(tensor.name)), factList(facts), ...partsOf(tensor.parts)];
  if (tensor.entropy.length) made.push(...bitsOf(tensor, "bits"));
  if (tensor.lengths && tensor.codebook != null) made.push(...lengthsOf(tensor));
  if (tensor.entries) made.push(...entriesOf(tensor));
  if (tensor.codebook != null) {
    made.push(element("h3", {}, "codebook"), element("code", {}, data.codebooks[tensor.codebook]));
  }
  return made;
}

function rowFacts(tensor) {
  const facts = [`${count(tensor.num_rows)} of ${count(tensor.row_bytes)} bytes`];
  if (tensor.raw_rows) facts.push(`${count(tensor.raw_rows)} raw`);
  if (tensor.default_rows) facts.push(`${count(tensor.default_rows)} without bytes`);
  if (tensor.clusters > 1) facts.push(`${tensor.clusters} clusters`);
  return facts.join(", ");
}

function partColor(part) {
  return PART_COLORS[part] || "other";
}

function partRank(part) {
  const rank = PART_ORDER.findIndex((start) => part.startsWith(start));
  return rank < 0 ? PART_ORDER.length : rank;
}

function partsOf(parts) {
  const entries = Object.entries(parts).sort((a, b) => partRank(a[0]) - partRank(b[0]) || a[0].localeCompare(b[0]));
  const total = sum(entries.map(([, bytes]) => bytes));
  if (!total) return [];
  const all = chartWidth();
  const svg = chart(all, 30, "bytes by part");
  let x = 0;
  for (const [part, bytes] of entries) {
    const width = (all * bytes) / total;
    box(svg, partColor(part), x, 2, Math.max(0.5, width - 1), 26, `${part}: ${percent(bytes / total)}`);
    x += width;
  }
  const lines = entries.map(([part, bytes]) => {
    const swatch = keys([[part, partColor(part)]]);
    const cells = [count(bytes), percent(bytes / total)].map((text) => element("td", { class: "number" }, text));
    return element("tr", {}, element("td", {}, swatch), ...cells);
  });
  const table = element("table", {}, element("tbody", {}, ...lines));
  const said = "Each strip is a part of the bytes, as wide as its share. The colours are named below.";
  return [element("h3", {}, "what the bytes are"), caption(said), svg, element("div", { class: "wide" }, table)];
}

// Groups tensors whose names differ only in numbers. Returns [name, tensors] for each group, the largest first. If
// there are more than MOST_KINDS groups, the smallest ones are joined into "others".
function kinds() {
  const found = new Map();
  for (const tensor of tensors.filter((t) => t.original_bytes)) {
    const kind = tensor.name.replace(/(?<![^._/])\d+(?![^._/])/g, "*");
    found.set(kind, [...(found.get(kind) || []), tensor]);
  }
  const named = [...found].map(([kind, own]) => [own.length > 1 ? kind : own[0].name, own]);
  named.sort((a, b) => sum(b[1].map((t) => t.original_bytes)) - sum(a[1].map((t) => t.original_bytes)));
  const others = named.splice(named.length > MOST_KINDS ? MOST_KINDS - 1 : MOST_KINDS).flatMap(([, own]) => own);
  return others.length ? [...named, ["others", others]] : named;
}

function savingsOf() {
  const lines = kinds().map(([name, own]) => {
    const [before, after] = [sum(own.map((t) => t.original_bytes)), sum(own.map((t) => t.stored_bytes))];
    const share = 1 - after / before;
    const svg = drawn("svg", { width: 100, height: 12, "aria-hidden": "true" });
    box(svg, "amount", 0, 2, 100 * Math.max(0, share), 10, percent(share));
    const cells = [count(own.length), size(before), percent(share)].map((text) => element("td", { class: "number" }, text));
    return element("tr", {}, element("td", { class: "name" }, ...broken(name)), ...cells, element("td", {}, svg));
  });
  if (!lines.length) return [];
  const said = "Tensors whose names differ in numbers only: how many, their bytes before, and the share that is saved.";
  const table = element("table", {}, element("tbody", {}, ...lines));
  return [element("h3", {}, "savings"), caption(said), element("div", { class: "wide" }, table)];
}

function bitsOf(tensor, title) {
  const width = tensor.entropy.length;
  const all = chartWidth();
  const step = (all - MARGIN) / width;
  const svg = chart(all, 196, "entropy of each bit, and how it is coded");
  const used = new Set();
  tensor.entropy.forEach((entropy, bit) => {
    const [left, ranked] = [(tensor.left_out || [])[bit] || 0, (tensor.ranked || [])[bit] || 0];
    const x = MARGIN + bit * step;
    const name = `bit ${width - 1 - bit}`;
    box(svg, "amount", x, 92 - 76 * entropy, step * 0.88, 76 * entropy, `${name}: entropy ${entropy.toFixed(3)} bits`);
    let y = 100;
    [1 - left - ranked, ranked, left].forEach((share, use) => {
      if (share < 0.0005) return;
      used.add(use);
      box(svg, USES[use][1], x, y, step * 0.88, 60 * share, `${name}: ${percent(share)} ${USES[use][0]}`);
      y += 60 * share;
    });
    if (width <= 16 || bit % 8 === 0) label(svg, x + step * 0.44, 174, width - 1 - bit, "middle");
  });
  label(svg, 0, 24, "1 bit");
  label(svg, 0, 92, "0");
  label(svg, 0, 134, "use");
  const fields = data.fields[tensor.dtype] || [];
  fields.forEach(([start, field], at) => {
    const x = MARGIN - 1 + start * step;
    const room = ((at + 1 < fields.length ? fields[at + 1][0] : width) - start) * step;
    label(svg, x + (start ? 3 : 1), 190, room < 8 * field.length ? field[0] : field);
    if (start) svg.append(drawn("line", { x1: x, x2: x, y1: 12, y2: 190, stroke: "currentColor" }));
  });
  const said = "A column is a bit, the most significant one first. Above: its entropy. Below: in what share of elements";
  const legend = keys([["entropy", "amount"], ...USES.filter((_, use) => used.has(use))]);
  return [element("h3", {}, title), caption(`${said} it is kept, part of a ranked symbol, or left out.`), svg, legend];
}

function lengthsOf(tensor) {
  const all = chartWidth();
  const svg = chart(all, 130, "rows by their stored bytes");
  const most = Math.max(...tensor.lengths);
  const step = (all - MARGIN) / tensor.lengths.length;
  tensor.lengths.forEach((rows, bin) => {
    const [first, end] = [bin, bin + 1].map((edge) => Math.round((edge * tensor.row_bytes) / tensor.lengths.length));
    const [height, hint] = [(88 * rows) / most, `${first} to ${end} bytes: ${count(rows)} rows`];
    box(svg, "amount", MARGIN + bin * step, 104 - height, step * 0.9, height, hint);
  });
  svg.append(drawn("line", { x1: MARGIN, x2: all, y1: 104.5, y2: 104.5, stroke: "currentColor" }));
  label(svg, 0, 24, count(most));
  label(svg, 0, 106, "0");
  label(svg, MARGIN, 122, "0");
  label(svg, all, 122, `${count(tensor.row_bytes)} bytes`, "end");
  const said = "Number of rows by their stored size. The size of a raw row is on the right.";
  return [element("h3", {}, "rows by their stored bytes"), caption(said), svg];
}

function entryColor(meaning) {
  const plane = /^plane \d+/.exec(meaning);
  return plane ? partColor(`digits of ${plane[0]}`) : meaning.startsWith("raw symbol") ? "symbols" : "amount";
}

function entriesOf(tensor) {
  const most = Math.max(...tensor.entries.map(([, , share]) => share));
  const lines = tensor.entries.map(([name, meaning, share]) => {
    const svg = drawn("svg", { width: 100, height: 12, "aria-hidden": "true" });
    box(svg, entryColor(meaning), 0, 2, (100 * share) / most, 10, percent(share));
    const cells = [element("code", {}, name), meaning].map((text) => element("td", {}, text));
    return element("tr", {}, ...cells, element("td", { class: "number" }, percent(share)), element("td", {}, svg));
  });
  const [title, said] = tensor.scheme === "ibp"
    ? ["pairs of mask and value", "The share of chunks that have the invariant bits of the pair."]
    : ["symbols", "The share of elements that have the symbol, in the colour of its plane."];
  const table = element("table", {}, element("tbody", {}, ...lines));
  return [element("h3", {}, title), caption(said), element("div", { class: "wide" }, table)];
}

// ---- navigation ----

function open(at) {
  location.hash = at < 0 ? "all" : `t${at}`;
}

function close() {
  history.replaceState(null, "", location.pathname + location.search);
  document.body.classList.remove("open");
  const made = document.querySelector(`#list tr[data-at="${current}"]`) || document.querySelector("#list tbody tr");
  made.focus();
}

function followHash() {
  const found = /^#t(\d+)$/.exec(location.hash);
  current = found && Number(found[1]) < tensors.length ? Number(found[1]) : -1;
  document.body.classList.toggle("open", location.hash.length > 1);
  showDetail();
  if (matchMedia("(max-width: 860px)").matches && location.hash.length > 1) scrollTo(0, 0);
}

function step(by) {
  const rows = [...document.querySelectorAll("#list tbody tr")];
  const at = rows.indexOf(document.activeElement);
  const opened = rows.findIndex((made) => Number(made.dataset.at) === current);
  const next = rows[Math.min(rows.length - 1, Math.max(0, at < 0 ? opened : at + by))];
  next.focus();
  if (!matchMedia("(max-width: 860px)").matches) open(Number(next.dataset.at));
}

document.querySelector("#list tbody").addEventListener("click", (event) => {
  const made = event.target.closest("tr");
  if (made) open(Number(made.dataset.at));
});
document.getElementById("search").addEventListener("input", showList);
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.id === "search";
  const isInList = event.target === document.body || event.target.closest("nav") !== null;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !isTyping) document.getElementById("search").focus();
  else if (isInList && (event.key === "ArrowDown" || (event.key === "j" && !isTyping))) step(1);
  else if (isInList && (event.key === "ArrowUp" || (event.key === "k" && !isTyping))) step(-1);
  else if (event.key === "Enter" && event.target.dataset.at !== undefined) open(Number(event.target.dataset.at));
  else if (event.key === "Escape" && isTyping && event.target.value) (event.target.value = ""), showList();
  else if (event.key === "Escape") close();
  else return;
  event.preventDefault();
});
addEventListener("hashchange", followHash);
addEventListener("resize", () => chartWidth() !== drawnWidth && showDetail());

const [, , , before, after, share] = totals();
document.getElementById("summary").textContent =
  `${data.files.map((file) => file.path).join(", ")}: ${count(tensors.length)} tensors, ${size(before)} before, ` +
  `${size(after)} after${data.files.some((file) => file.estimate) ? " by estimate" : ""}, ${percent(share)} saved`;
showHeads();
showList();
followHash();
