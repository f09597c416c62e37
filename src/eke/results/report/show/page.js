"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const narrow = window.matchMedia("(max-width: 700px)");

const element = (name, text, className) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

// Tables. Names are set as text and cannot become markup.
const FEW = narrow.matches ? 4 : 8;              // rows above the charts before "show more"
const PAGE = 200;

function build(place) {
  const all = place.classList.contains("all");
  const { columns, rows } = data.tables[Number(place.dataset.number)];
  const shown = columns.map((_, n) => n).filter(n => !n || columns[n].main !== all);
  const state = { column: -1, down: false, most: FEW };
  const haystacks = rows.map(row => [row.full, ...row.cells.flat()].join(" ").toLowerCase());
  const text = (number, n) => [rows[number].cells[n]].flat()[0];
  const search = element("input"), count = element("span", "", "quiet"), more = element("button", "show more");
  Object.assign(search, { type: "search", placeholder: "search", ariaLabel: "search the table" });
  count.ariaLive = "polite";
  const table = element("table", undefined, all ? "" : "main cards");
  table.append(element("thead"), element("tbody"));

  function order(first, second) {
    const [a, b] = [first, second].map(n => rows[n].values[state.column]);
    const [s, t] = [first, second].map(n => text(n, state.column));
    const numeric = columns[state.column].number;
    const missing = numeric ? (a === null) - (b === null) : (s === "") - (t === "");
    if (missing) return missing;                   // missing values come last in both directions
    const found = a !== null && b !== null ? a - b : s.localeCompare(t, undefined, { numeric: true });
    return (state.down ? -found : found) || first - second;
  }

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.map((_, n) => n).filter(n => words.every(word => haystacks[n].includes(word)));
    if (state.column >= 0) found.sort(order);
    const body = element("tbody");
    for (const number of found.slice(0, state.most)) {
      const line = element("tr", undefined, rows[number].class);
      for (const n of shown) {
        const [main, note, tone] = [rows[number].cells[n]].flat();
        const cell = element("td", undefined, tone);
        cell.dataset.title = columns[n].title;
        if (main) cell.append(element("span", main));
        if (note) cell.append(element("small", note));
        line.append(cell);
      }
      line.firstChild.title = rows[number].full;
      body.append(line);
    }
    table.tBodies[0].replaceWith(body);
    more.hidden = found.length <= state.most;
    count.textContent = `${Math.min(state.most, found.length)} of ${rows.length} rows`;
  }

  const head = element("tr");
  for (const n of shown) {
    const cell = element("th"), button = element("button", columns[n].title);
    cell.scope = "col";
    if (columns[n].help) button.title = columns[n].help;
    button.addEventListener("click", () => {
      // The first click shows the highest number first.
      state.down = state.column === n ? !state.down : columns[n].number;
      state.column = n;
      for (const other of head.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      draw();
    });
    cell.append(button);
    head.append(cell);
  }
  table.tHead.append(head);
  search.addEventListener("input", draw);
  const grow = () => { state.most = state.most < PAGE ? PAGE : state.most + 5 * PAGE; draw(); };
  more.addEventListener("click", grow);
  window.addEventListener("beforeprint", () => { if (state.most < PAGE) grow(); });
  const box = element("div", undefined, all ? "scroll" : "");
  if (all) Object.assign(box, { tabIndex: 0, role: "region", ariaLabel: "all columns" });
  box.append(table);
  const tools = element("p", undefined, "tools");
  tools.append(search, count, more);
  place.append(box, ...(rows.length > FEW ? [tools] : []));
  draw();
}
document.querySelectorAll(".table").forEach(build);

const copy = document.getElementById("copy");
if (copy && navigator.clipboard) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(copy.previousSibling.textContent);
    copy.textContent = "copied";
  });
}

// Charts. Colors are variables of the style sheet, which follow the theme and print.
const config = {
  background: "transparent",
  font: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
  axis: { labelColor: "var(--quiet)", titleColor: "var(--quiet)", titleFontWeight: "normal", gridColor: "var(--line)",
    domainColor: "var(--line)", tickColor: "var(--line)", labelFontSize: 12, titleFontSize: 12 },
  text: { fontSize: 12, fill: "var(--ink)" },
  rule: { color: "var(--quiet)" },
  view: { stroke: "transparent" },
};
// Labels of points move to free places. Vega-Lite has no property for it.
function patch(spec) {
  const labels = spec.marks.find(mark => mark.name === "labels_marks");
  if (!labels) return spec;
  labels.from = { data: "points_marks" };
  labels.encode = { update: { text: { signal: narrow.matches ? "datum.datum.number <= 12 ? datum.datum.number : ''" : "datum.datum.label" }, fill: { value: "var(--ink)" }, fontSize: { value: 12 } } };
  const avoidMarks = spec.marks.map(mark => mark.name).filter(name => name === "front_marks");
  labels.transform = [{ type: "label", size: { signal: "[max(1, width), height]" }, offset: [7], avoidMarks, padding: 2,
    anchor: ["right", "left", "top-right", "top-left", "bottom-right", "bottom-left", "top", "bottom"] }];
  return spec;
}
async function paint() {
  for (const place of document.querySelectorAll(".picture")) {
    const spec = data.specs[Number(place.dataset.number)], figure = place.closest("figure");
    const names = spec.layer?.find(layer => layer.name === "labels")?.transform[0].filter.oneOf ?? [];
    if (narrow.matches) {                            // numbers, as names would overlap
      spec.layer = spec.layer?.filter(layer => layer.name !== "ends");
      const known = new Map(spec.data.values.map(each => [each.name, each]));
      for (const name of names) figure.querySelector(".legend").append(element("span", `${known.get(name).number} ${known.get(name).label}`));
    } else if (spec.layer?.some(layer => layer.name === "ends")) figure.classList.add("labelled");
    await window.vegaEmbed(place, spec, { actions: false, renderer: "svg", config, patch, tooltip: { theme: "custom" } });
  }
  document.body.dataset.painted = "yes";
}
window.addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
paint();
