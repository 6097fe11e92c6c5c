// Unpacks the page's libraries and data, has Vega-Embed draw the figures and DataTables make the table. It makes no request.
const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (letter) => letter.charCodeAt(0));
  byId(id).remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function made(tag, properties = {}, children = []) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- figures

// The chart of a figure with a panel's names, colours and axis (`figures.base.with_panel`), in the width that there is.
// Parts of a concatenated chart do not know the width of the page, so they get it as a number. So does a chart its height
// where it has a step for each name, because Vega-Lite warns of steps beside a width that fits.
function chartOf(figure, panel, rows, width) {
  const words = { '["NAMES"]': Object.keys(panel.colours), '["COLOURS"]': Object.values(panel.colours), '"LOAD"': panel.axis };
  let text = JSON.stringify(figure.spec);
  for (const [word, value] of Object.entries(words)) text = text.replaceAll(word, () => JSON.stringify(value));
  text = text.replaceAll("LETTERS", Math.floor((width - 75) / 7.3)); // of a legend's line
  const spec = { ...JSON.parse(text), datasets: { rows } };
  const names = new Set(rows.map((row) => row.category ?? row.arm ?? row.gate)).size;
  for (const part of [spec, ...(spec.vconcat ?? [])]) {
    if (part.height?.step) part.height = (part.height.step + (width < 600 ? 14 : 0)) * names; // room for titles of two lines
  }
  for (const part of spec.vconcat ?? []) part.width = Math.max(160, width - 80);
  return spec;
}

async function draw(data, figure, panel, place) {
  const chart = place.querySelector(".chart");
  const ids = data.table.points;
  const rows = panel.rows.map((row) => ("point" in row ? { ...row, point: ids[row.point] } : row));
  const spec = chartOf(figure, panel, rows, chart.clientWidth);
  const config = { ...data.config, legend: { ...data.config.legend, labelLimit: chart.clientWidth - 75 } };
  chart.removeAttribute("style");
  figure.view?.finalize();
  // logLevel 1, errors alone: a layer without data warns of that
  figure.view = await window.vegaEmbed(chart, spec, { renderer: "svg", actions: false, config, logLevel: 1 });
  chart.querySelector("svg")?.setAttribute("aria-hidden", "true");
}

function caption(panel, show) {
  const button = made("button", { type: "button", className: "link", textContent: "Show these points in the table." });
  button.addEventListener("click", () => show(panel.points));
  const title = made("strong", { textContent: `${panel.title}.` });
  return [title, ` ${panel.note} `, ...(panel.points.length ? [`${panel.origin}. `, button] : [])];
}

async function figureIn(data, figure, show) {
  const place = byId(figure.name);
  const select = place.querySelector("select");
  const again = async () => {
    const panel = figure.panels[select ? Number(select.value) : 0];
    await draw(data, figure, panel, place);
    place.querySelector("figcaption").replaceChildren(...caption(panel, show));
  };
  select?.addEventListener("change", again);
  await again();
  return again;
}

// ---- the table

function shown(column, value) {
  if (value === null || value === undefined) return "";
  if (!column.number) return String(value);
  if (column.share) return `${(100 * value).toFixed(1)} %`;
  if (Number.isInteger(value)) return String(value);
  if (Math.abs(value) >= 100) return value.toFixed(1);
  const four = value.toPrecision(4); // with its zeros, so that a column lines up
  return Math.abs(value) < 1e-3 ? String(Number(four)) : four;
}

// What a row opens (`report/page.py`): sections of text and of pairs.
function opened(details, at) {
  const part = (value) => typeof value === "string"
    ? made("pre", { textContent: value })
    : made("dl", {}, value.flatMap(([name, text]) => [made("dt", { textContent: name }), made("dd", { textContent: text })]));
  const sections = details.rows[at].flatMap(([title, ...places]) => [made("h3", { textContent: title }), ...places.map((place) => part(details.pool[place]))]);
  return made("div", { className: "opened" }, sections);
}

function tableIn(DataTable, data) {
  const { columns, points } = data.table;
  const body = points.map((_, at) => [at, ...columns.map((column) => column.values[at])]);
  const status = columns.findIndex((column) => column.name === "status") + 1;
  const names = made("tr", {}, [made("th", { textContent: "Open" }), ...columns.map((column) => made("th", { textContent: column.title, title: column.about }))]);
  const element = made("table", { className: "display compact", id: "all" }, [made("thead", {}, [names])]);
  element.setAttribute("aria-labelledby", "points-title");
  byId("table").append(element);
  let only = null;
  DataTable.ext.search.push((settings, cells, at) => only === null || only.has(at));
  const table = new DataTable(element, {
    data: body,
    order: [],
    pageLength: 25,
    scrollX: true,
    autoWidth: false,
    stateSave: true, // a page that is loaded anew stays sorted and searched as it was
    stateDuration: -1, // for as long as the tab is open
    columnDefs: [
      { targets: 0, orderable: false, searchable: false, className: "open", columnControl: [],
        render: (at, type) => (type === "display" ? `<button type="button" aria-expanded="false" aria-label="Open point ${at + 1}">+</button>` : at) },
      ...columns.map((column, at) => ({
        targets: at + 1, visible: column.shown, className: column.number ? "dt-right" : column.name === "arm" ? "text" : "",
        type: column.number ? "num" : "string",
        render: (value, type) => (type === "display" || type === "filter" ? DataTable.util.escapeHtml(shown(column, value)) : value ?? (column.number ? -Infinity : "")),
      })),
    ],
    columnControl: ["order", ["search"]],
    ordering: { indicators: false, handler: true },
    layout: {
      topStart: { buttons: [{ extend: "colvis", text: "Columns", columns: ":gt(0)", fade: 0 }] },
      topEnd: { search: { placeholder: "any column" } },
      bottomStart: ["pageLength", "info"], bottomEnd: "paging",
    },
    createdRow: (line, row) => line.classList.toggle("failed", status > 0 && row[status] !== "ok"),
  });
  window.selfspecTable = table;
  // DataTables gives the list of columns a dialog without a name, and a menu whose buttons are no menu items.
  table.on("buttons-action", () => {
    for (const list of document.querySelectorAll("div.dt-button-collection")) {
      list.setAttribute("aria-label", "Columns to show");
      for (const menu of list.querySelectorAll("[role=menu]")) menu.setAttribute("role", "group");
    }
  });
  table.on("click", "td.open button", (event) => {
    const button = event.target.closest("button");
    const row = table.row(button.closest("tr"));
    const open = row.child.isShown();
    if (open) row.child.hide();
    else row.child(opened(data.details, row.data()[0])).show();
    button.textContent = open ? "+" : "−";
    button.setAttribute("aria-expanded", String(!open));
  });
  const limit = (places) => {
    only = places === null ? null : new Set(places);
    byId("only").hidden = only === null;
    byId("only").firstElementChild.textContent = only === null ? "" : `Only the ${only.size} points of one figure are shown.`;
    table.search("").columns().search("").draw();
    if (only !== null) byId("points").scrollIntoView();
  };
  byId("only").querySelector("button").addEventListener("click", () => limit(null));
  return limit;
}

// ---- all of it

try {
  const [vega, tables, style, text] = await Promise.all(["packed-vega", "packed-table", "packed-table-style", "packed-data"].map(unpacked));
  document.head.prepend(made("style", { textContent: style }));
  document.head.append(made("script", { textContent: vega }));
  const data = JSON.parse(text);
  const address = URL.createObjectURL(new Blob([tables], { type: "text/javascript" }));
  const { default: DataTable } = await import(address);
  URL.revokeObjectURL(address);
  const paint = () => document.documentElement.classList.toggle("dark", dark.matches); // DataTables' own colours
  paint();
  dark.addEventListener("change", paint);
  const limit = tableIn(DataTable, data);
  const drawn = [];
  for (const figure of data.figures) drawn.push(await figureIn(data, figure, limit));
  let waiting = 0;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(async () => { for (const again of drawn) await again(); }, 150);
  });
  document.documentElement.dataset.ready = "true";
} catch (error) {
  byId("problem").hidden = false;
  byId("problem").textContent = `The figures and the table could not be made: ${error.message}`;
  throw error;
}
