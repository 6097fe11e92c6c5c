// Unpacks the page's libraries and data, draws the figures, and makes the table. It makes no request.
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

function theme(width) {
  const [ink, muted, line] = dark.matches ? ["#e6ebf0", "#a3afbb", "#333d47"] : ["#1f2933", "#55616e", "#d9dfe5"];
  const font = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  return {
    background: null,
    font,
    text: { color: ink, fontSize: 12 },
    rule: { color: ink },
    view: { stroke: null },
    axis: {
      labelColor: muted, titleColor: muted, gridColor: line, domain: false, ticks: false, titleFontWeight: "normal",
      labelFontSize: 12, titleFontSize: 12, labelPadding: 6,
    },
    legend: { labelColor: ink, labelFontSize: 12, labelLimit: Math.max(120, width - 60), symbolType: "circle",
      layout: { bottom: { anchor: "start", direction: "vertical" } } },
  };
}

// Parts of a concatenated chart do not know the width of the page, so they get it as a number. So does a chart its height
// where it has a step for each name, because Vega-Lite warns of steps beside a width that fits.
function sized(spec, width, rows) {
  const copy = structuredClone(spec);
  const names = new Set(rows.map((row) => row.arm ?? row.gate)).size;
  for (const part of [copy, ...(copy.vconcat ?? [])]) if (part.height?.step) part.height = part.height.step * names;
  for (const part of copy.vconcat ?? []) part.width = Math.max(160, width - 80);
  const kinds = new Set(rows.map((row) => row.kind));
  for (const layer of copy.layer ?? []) {
    const colour = layer.encoding?.color;
    if (colour?.field === "kind") {
      const known = colour.scale.domain.map((kind, at) => [kind, colour.scale.range[at]]).filter(([kind]) => kinds.has(kind));
      if (width < 500) colour.legend.columns = 1;
      colour.scale = { domain: known.map(([kind]) => kind), range: known.map(([, value]) => value) };
    }
    if (layer.mark?.type === "text" && layer.mark.align === "left") layer.mark.limit = width - 110; // a number is beside it
  }
  return copy;
}

async function draw(figure, panel, ids, place) {
  const chart = place.querySelector(".chart");
  const width = chart.clientWidth;
  const rows = panel.rows.map((row) => ("point" in row ? { ...row, point: ids[row.point] } : row));
  const spec = { ...sized(figure.spec, width, rows), datasets: { rows } };
  chart.removeAttribute("style");
  figure.view?.finalize();
  figure.view = await window.vegaEmbed(chart, spec, {
    renderer: "svg", actions: false, config: theme(width), tooltip: { theme: dark.matches ? "dark" : "light" },
    logLevel: 1, // errors alone: a layer without data warns of that
  });
  chart.querySelector("svg")?.setAttribute("aria-hidden", "true");
}

function caption(panel, ids, show) {
  const parts = panel.note ? [panel.note + " "] : [];
  if (panel.points.length) {
    const days = [...new Set(panel.points.map((at) => ids[at].split("-")[1]))].sort();
    const when = days.map((day) => `${day.slice(0, 4)}-${day.slice(4, 6)}-${day.slice(6)}`);
    const origin = `${panel.points.length} point${panel.points.length > 1 ? "s" : ""}, measured ${when[0]}${when.length > 1 ? ` to ${when.at(-1)}` : ""}`;
    const button = made("button", { type: "button", className: "link", textContent: "show these points in the table" });
    button.addEventListener("click", () => show(panel.points));
    parts.push(`From ${origin}: `, button, ".");
  }
  return parts;
}

async function figureIn(figure, ids, show) {
  const place = byId(figure.name);
  const select = place.querySelector("select");
  if (select) {
    const groups = new Map();
    figure.panels.forEach((panel, at) => {
      if (!groups.has(panel.group)) groups.set(panel.group, panel.group ? made("optgroup", { label: panel.group }) : select);
      groups.get(panel.group).append(made("option", { value: at, textContent: panel.name }));
    });
    for (const group of groups.values()) if (group !== select) select.append(group);
  }
  const again = async () => {
    const panel = figure.panels[select ? Number(select.value) : 0];
    await draw(figure, panel, ids, place);
    place.querySelector("figcaption").replaceChildren(...caption(panel, ids, show));
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

function pairs(entries) {
  const shown = (value) => (value === null ? "not set" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const list = made("dl");
  for (const [name, value] of entries) list.append(made("dt", { textContent: name }), made("dd", { textContent: shown(value) }));
  return list;
}

function times(repeats) {
  const milli = (micros) => (micros / 1000).toFixed(2);
  return repeats.map(([seconds, speed, requests], at) => {
    const title = `repeat ${at + 1}: ${speed} tokens a second, ${seconds} s`;
    if (!requests) return made("p", { className: "small", textContent: title });
    const lines = requests.map(([tokens, arrival, ...steps], n) =>
      `request ${n + 1}: ${tokens} tokens, arrived at ${milli(arrival)} ms, outputs after ${steps.map(milli).join(" ")} ms`);
    const opened = made("details", {}, [made("summary", { textContent: title }), made("pre", { textContent: lines.join("\n") })]);
    opened.firstChild.className = "small";
    return opened;
  });
}

function opened(data, at) {
  const { pool, rows, level } = data.details;
  const row = rows[at];
  const id = data.table.points[at];
  const folder = pool[row.folder] === "." ? "" : `${pool[row.folder]}/`;
  const box = made("div", { className: "opened" });
  const head = (text) => box.append(made("h3", { textContent: text }));
  head("Command");
  box.append(made("pre", { textContent: pool[row.command] || "not kept" }));
  head("Provenance");
  const git = pool[row.git];
  box.append(pairs([
    ["point", `${folder}runs/${id}.json`], ["run", pool[row.run]], ["time", row.time],
    ...(git ? [["git revision", git.revision + (git.dirty ? ", with changes" : "")]] : []),
    ...Object.entries(pool[row.versions] ?? {}), ...Object.entries(pool[row.hardware] ?? {}),
    ...Object.entries(pool[row.digests] ?? {}).map(([name, value]) => [`digest of ${name}`, value]),
  ]));
  head("Configuration");
  const flat = row.config.flatMap((place) => {
    const [key, value] = pool[place];
    const nested = value !== null && typeof value === "object" && !Array.isArray(value);
    return nested ? Object.entries(value).map(([name, inner]) => [`${key}.${name}`, inner]) : [[key, value]];
  });
  box.append(flat.length ? pairs(flat) : made("p", { textContent: "not kept" }));
  if (row.engine.length) {
    head("Engine");
    box.append(pairs(row.engine.map((place) => pool[place])));
  }
  if (row.against) {
    head("Compared with");
    box.append(pairs([["baseline", row.against[0]], ["measured by an earlier command", row.against[1] ? "yes" : "no"],
      ["its tokens a second", row.against[2].join(", ") || "not kept"]]));
  }
  head("Raw times");
  const kept = { events: "each output's time since the one before", requests: "the first and the last output of each request; the point's file has all",
    repeats: "of each repeat; the point's file has those of each output", none: "only in the point's file" }[level];
  box.append(made("p", { className: "small", textContent: row.repeats || level === "none" ? kept : "were not kept" }), ...times(row.repeats ?? []));
  return box;
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
    else row.child(opened(data, row.data()[0])).show();
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

// ---- while a sweep runs

// What a reader has chosen stays: where the page is scrolled to, which panel each figure shows, how the table is sorted
// and searched. A browser that keeps nothing for files begins anew each time.
function keepUp() {
  const notice = byId("watched");
  const table = window.selfspecTable;
  const place = `selfspec ${location.pathname}`;
  const storage = (action) => { try { return action(sessionStorage); } catch { return null; } };
  const kept = JSON.parse(storage((found) => found.getItem(place)) ?? "null");
  storage((found) => found.removeItem(place));
  if (kept) {
    table.search(kept.search).order(kept.order).draw();
    for (const [id, name] of Object.entries(kept.panels)) {
      const option = [...(byId(id)?.options ?? [])].find((one) => one.textContent === name);
      if (option && !option.selected) {
        option.selected = true;
        option.parentElement.closest("select").dispatchEvent(new Event("change"));
      }
    }
    scrollTo({ top: kept.scroll, behavior: "instant" });
  }
  if (!notice) return;
  const timer = setInterval(() => {
    if (document.hidden || document.querySelector("[aria-expanded=true]")) return;
    const panels = Object.fromEntries([...document.querySelectorAll("select[id$=-panel]")].map((one) => [one.id, one.selectedOptions[0].textContent]));
    const all = JSON.stringify({ scroll: scrollY, panels, search: table.search(), order: table.order() });
    storage((found) => found.setItem(place, all));
    location.reload();
  }, 1000 * Number(notice.dataset.seconds));
  notice.querySelector("button").addEventListener("click", () => { clearInterval(timer); notice.hidden = true; });
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
  const paint = () => document.documentElement.classList.toggle("dark", dark.matches);
  paint();
  const limit = tableIn(DataTable, data);
  const drawn = [];
  for (const figure of data.figures) drawn.push(await figureIn(figure, data.table.points, limit));
  let waiting = 0;
  let width = innerWidth;
  const again = () => { paint(); clearTimeout(waiting); waiting = setTimeout(async () => { for (const one of drawn) await one(); }, 150); };
  dark.addEventListener("change", again);
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; again(); } });
  keepUp();
  document.documentElement.dataset.ready = "true";
} catch (error) {
  byId("problem").hidden = false;
  byId("problem").textContent = `The figures and the table could not be made: ${error.message}`;
  throw error;
}
