"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

// The table. Everything is set as text: no name can become markup.
const PAGE = 200;
const table = document.getElementById("main");
const search = document.getElementById("search");
const more = document.getElementById("more");
const state = { column: -1, down: false, shown: PAGE };

const element = (name, text, className) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

const haystacks = data.table.rows.map(row => [row.full, ...row.texts].join(" ").toLowerCase());

function order(first, second) {
  const [a, b] = [first, second].map(n => data.table.rows[n].values[state.column]);
  const [s, t] = [first, second].map(n => data.table.rows[n].texts[state.column]);
  const numeric = data.table.columns[state.column].number;
  const missing = numeric ? (a === null) - (b === null) : (s === "") - (t === "");
  if (missing) return missing;                     // what is absent comes last, either way
  const found = a !== null && b !== null ? a - b : s.localeCompare(t, undefined, { numeric: true });
  return (state.down ? -found : found) || first - second;
}

function draw() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.table.rows.map((_, n) => n).filter(n => words.every(word => haystacks[n].includes(word)));
  if (state.column >= 0) found.sort(order);
  const body = element("tbody");
  for (const number of found.slice(0, state.shown)) {
    const row = data.table.rows[number];
    const line = element("tr", undefined, row.class);
    row.texts.forEach((text, n) => line.append(element("td", text, data.table.columns[n].number ? "number" : "")));
    line.firstChild.title = row.full;
    body.append(line);
  }
  table.tBodies[0].replaceWith(body);
  more.hidden = found.length <= state.shown;
  const total = data.table.rows.length;
  document.getElementById("count").textContent = found.length === total ? `${total} rows` : `${found.length} of ${total} rows`;
}

const head = element("tr");
data.table.columns.forEach((column, n) => {
  const cell = element("th", undefined, column.number ? "number" : "");
  const button = element("button", column.title);
  if (column.help) button.title = column.help;
  button.addEventListener("click", () => {
    // The first click shows the highest number first: the fastest, or what takes most.
    state.down = state.column === n ? !state.down : column.number;
    state.column = n;
    for (const other of head.children) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    draw();
  });
  cell.append(button);
  head.append(cell);
});
table.tHead.append(head);
search.addEventListener("input", () => { state.shown = PAGE; draw(); });
more.addEventListener("click", () => { state.shown += 5 * PAGE; draw(); });
draw();

// The pictures, drawn again when the page turns dark or light.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function look() {
  const style = getComputedStyle(document.documentElement);
  const [ink, quiet, line] = ["--ink", "--quiet", "--line"].map(name => style.getPropertyValue(name).trim());
  const labelLimit = window.innerWidth < 600 ? 110 : 230;
  return {
    background: "transparent",
    font: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    axis: { labelColor: quiet, titleColor: ink, gridColor: line, domainColor: line, tickColor: line, labelLimit },
    legend: { labelColor: ink, titleColor: ink },
    rule: { color: quiet },
    view: { stroke: "transparent" },
  };
}
async function paint() {
  for (const place of document.querySelectorAll(".picture")) {
    const spec = data.specs[Number(place.dataset.number)];
    const options = { actions: false, renderer: "svg", config: look(), tooltip: { theme: dark.matches ? "dark" : "light" } };
    await window.vegaEmbed(place, spec, options);
  }
  document.body.dataset.painted = "yes";
}
if (data.specs.length) {
  paint();
  dark.addEventListener("change", paint);
}
