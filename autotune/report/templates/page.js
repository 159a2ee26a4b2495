"use strict";
// Tables, and figures that are drawn when they come into view.
const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

function element(tag, text = "", properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text) made.textContent = text;
  return made;
}

async function unpack(id) {
  const packed = Uint8Array.from(atob(one(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const data = unpack("#data").then(JSON.parse);

// Plotly is large: it is unpacked once, when the first figure needs it.
let plotly;
function loadPlotly() {
  plotly ??= unpack("#plotly").then((code) => {
    document.head.append(element("script", code));
    return window.Plotly;
  });
  return plotly;
}

// Tables

const cellValue = (tbody, column) => {
  const cell = tbody.rows[0].cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  const number = parseFloat(text);
  return /^[-+]?[\d.]+/.test(text) ? number : text === "-" || text === "" ? -Infinity : text.toLowerCase();
};

const compare = (a, b) =>
  typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;

function sortBy(head) {
  const table = head.closest("table");
  const column = head.cellIndex;
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const rows = [...table.tBodies].map((tbody) => [cellValue(tbody, column), tbody]);
  rows.sort((a, b) => sign * compare(a[0], b[0]));
  table.append(...rows.map(([, tbody]) => tbody));
}

function search(input) {
  const box = document.getElementById(input.dataset.search);
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...one("table.sortable", box).tBodies];
  let shown = 0;
  for (const tbody of rows) {
    const text = tbody.rows[0].textContent.toLowerCase();
    tbody.hidden = !words.every((word) => text.includes(word));
    shown += !tbody.hidden;
  }
  one("output", box).textContent = `${shown} of ${rows.length}`;
}

function tableOf({ heads, rows, numeric = [], marked = [] }) {
  const table = element("table");
  const row = table.createTHead().insertRow();
  const kind = (k) => (numeric[k] ? "number" : "");
  heads.forEach((head, k) => row.append(element("th", head, { scope: "col", className: kind(k) })));
  const body = table.createTBody();
  rows.forEach((cells, r) => {
    const made = body.insertRow();
    if (marked.includes(r)) made.className = "marked";
    cells.forEach((cell, k) => made.append(element("td", String(cell), { className: kind(k) })));
  });
  return table;
}

function scrolling(table, label) {
  const box = element("div", "", { className: "scroll", tabIndex: 0 });
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", label);
  box.append(table);
  return box;
}

async function openLayer(button) {
  const tbody = button.closest("tbody");
  const opened = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!opened));
  if (opened) {
    tbody.rows[1].remove();
    return;
  }
  const { notes, tables } = (await data).layers[tbody.dataset.layer];
  const row = element("tr", "", { className: "detail" });
  const cell = element("td", "", { colSpan: tbody.rows[0].cells.length });
  if (notes) cell.append(element("p", notes, { className: "hint" }));
  const box = element("div", "", { className: "tables" });
  for (const table of tables) {
    const part = element("div");
    part.append(element("h4", table.title), scrolling(tableOf(table), table.title));
    box.append(part);
  }
  cell.append(box);
  row.append(cell);
  tbody.append(row);
}

// Figures

const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = () => innerWidth < 600;
const touched = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, and zooms nothing

function themed(layout = {}) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = (more = {}) => ({
    gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line"), automargin: true, ...more,
  });
  return {
    ...layout,
    dragmode: touched ? false : "zoom",
    paper_bgcolor: of("--paper"), plot_bgcolor: of("--paper"),
    font: { color: of("--ink"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: of("--raised"), bordercolor: of("--line"), font: { color: of("--ink") } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 12 } },
    margin: { l: 60, r: 16, t: 30, b: 48 },
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
  };
}

const CONFIG = {
  responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: touched ? false : "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

// On a phone the rank alone names a device: its name would take half of the width.
function compact(layout, [trace]) {
  if (!narrow() || layout.yaxis?.type !== "category") return layout;
  const ranks = trace.y.map((name) => name.split(":")[0]);
  return {
    ...layout,
    xaxis: { ...layout.xaxis, nticks: 6 },
    yaxis: { ...layout.yaxis, tickvals: trace.y, ticktext: ranks.length > 16 ? ranks.map((r) => (r % 4 ? "" : r)) : ranks },
  };
}

const drawn = new Map(); // from the element of a figure to what draws it again

async function draw(figure) {
  const [plot, found] = [one(".plot", figure), (await data).figures[figure.dataset.figure]];
  const Plotly = await loadPlotly();
  const again = () => Plotly.react(plot, found.data, themed(compact(found.layout, found.data)), CONFIG);
  drawn.set(figure, again);
  await again();
  figure.dataset.drawn = figure.dataset.figure;
}

const plain = (text) => new DOMParser().parseFromString(text ?? "", "text/html").body.textContent;
const shown = (value) =>
  value === null || value === undefined ? "-" : typeof value === "number" ? String(+value.toPrecision(6)) : plain(value);

// What a figure shows as a table: a matrix as itself, anything else point by point.
function numbersOf({ data: traces, layout }) {
  if (traces[0].type === "heatmap") {
    const { x, y, z } = traces[0];
    const rows = z.map((cells, k) => [plain(y[k]), ...cells.map(shown)]);
    return { heads: ["from", ...x.map((rank) => `to ${rank}`)], rows, numeric: [false, ...x.map(() => true)] };
  }
  const title = (axis) => layout[axis]?.title?.text ?? "";
  const rows = traces.flatMap((t) =>
    t.x.map((x, k) => [plain(t.name), shown(t.text?.[k] ?? ""), shown(x), shown(t.y[k])]));
  const kept = rows.some((row) => row[1]) ? [0, 1, 2, 3] : [0, 2, 3];
  return {
    heads: kept.map((k) => ["", "", title("xaxis"), title("yaxis")][k]),
    rows: rows.map((row) => kept.map((k) => row[k])),
    numeric: kept.map((k) => k > 1 && traces[0].type !== "bar"),
  };
}

async function fillNumbers(details, table) {
  const box = one(".scroll", details);
  if (details.open) box.replaceChildren(tableOf(await table()));
}

function start() {
  for (const head of all("table.sortable thead th")) one("button", head)?.addEventListener("click", () => sortBy(head));
  for (const input of all("input[data-search]")) input.addEventListener("input", () => search(input));
  for (const button of all(".open")) button.addEventListener("click", () => openLayer(button));
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries)
      if (isIntersecting) {
        seen.unobserve(target);
        draw(target);
      }
  }, { rootMargin: "300px" });
  for (const figure of all("figure[data-figure]")) {
    seen.observe(figure);
    const details = one("details", figure);
    const numbers = async () => numbersOf((await data).figures[figure.dataset.figure]);
    details.addEventListener("toggle", () => fillNumbers(details, numbers));
  }
  one("#curve")?.addEventListener("change", async ({ target }) => {
    const figure = one("#curves figure");
    const { title, about } = (await data).figures[target.value];
    figure.dataset.figure = target.value;
    one("figcaption", figure).replaceChildren(element("strong", title), ` ${about}`);
    one(".plot", figure).setAttribute("aria-label", `${title}: ${about}`);
    await draw(figure);
    one("details", figure).dispatchEvent(new Event("toggle"));
  });
  dark.addEventListener("change", () => drawn.forEach((again) => again()));
}

start();
