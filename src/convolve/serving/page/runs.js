// The page at /runs: training curves of one run or several, refreshed while they train. Read-only.
import { request } from "/page/client.js";
import { at, element } from "/page/dom.js";

const SECONDS = 2;
const MAX_RUNS = 6;
const PLOTS = [
  { title: "Loss", training: "loss", validation: "validation_loss", show: (v) => String(+v.toPrecision(3)) },
  { title: "Accuracy", training: "accuracy", validation: "validation_accuracy", show: (v) => `${+(100 * v).toFixed(1)}%` },
  { title: "Mean average precision", validation: "validation_mean_average_precision", show: (v) => `${+(100 * v).toFixed(1)}%`, optional: true },
  { title: "Learning rate", training: "learning_rate", show: (v) => String(+v.toPrecision(3)) },
  { title: "Images per second", training: "images_per_second", show: (v) => Math.round(v).toLocaleString("en") },
];
const ERRORS = {
  401: "The server requires a token; sign in on the page Classify first.",
  404: "A run was removed; select another one.",
};
const BOX = { width: 520, height: 260, left: 64, right: 12, top: 10, bottom: 30 };
let selected = null;
let shown = [];

function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function ticks(low, high, count = 4) {
  const span = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(span / count));
  step *= [1, 2, 5, 10].find((factor) => span / (step * factor) <= count) ?? 10;
  const values = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) values.push(value);
  return values;
}

function logTicks(low, high) {
  const marks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 5]) marks.push(factor * 10 ** power);
  }
  const inside = marks.filter((mark) => mark >= low && mark <= high);
  return inside.length <= 7 ? inside : inside.filter((mark) => /^1(e|$)/.test(mark.toExponential().replace(/\.?0*e/, "e")));
}

// A vertical axis over all values: its range, its ticks and the position of a value.
function verticalAxis(values, log) {
  const height = BOX.height - BOX.top - BOX.bottom;
  const least = Math.min(...values);
  const most = Math.max(...values);
  if (log) {
    const [low, high] = [Math.log10(least / 1.1), Math.log10(most * 1.1)];
    const down = (y) => BOX.height - BOX.bottom - (height * (Math.log10(y) - low)) / (high - low || 1);
    return { marks: logTicks(least / 1.1, most * 1.1), down };
  }
  const margin = 0.05 * (most - least || Math.abs(most) || 1);
  const [low, high] = [least >= 0 ? Math.max(0, least - margin) : least - margin, most + margin];
  return { marks: ticks(low, high), down: (y) => BOX.height - BOX.bottom - (height * (y - low)) / (high - low || 1) };
}

// Every run has a color. Validation is a solid line with dots, training a thin one.
function linesOf({ training, validation }, runs, log) {
  const lines = runs.flatMap((run, color) => [
    { run, color, kind: "training", points: run.curves[training] ?? [] },
    { run, color, kind: "validation", points: run.curves[validation] ?? [] },
  ]);
  const drawn = lines.map((line) => ({ ...line, points: line.points.filter(([, y]) => Number.isFinite(y) && (!log || y > 0)) }));
  return drawn.filter((line) => line.points.length);
}

function drawAxes(chart, { marks, down }, end, across, show) {
  for (const y of marks) {
    chart.append(svg("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: down(y), y2: down(y) }));
    chart.append(svg("text", { class: "tick", x: BOX.left - 6, y: down(y) + 4, "text-anchor": "end" }, show(y)));
  }
  for (const x of ticks(0, end)) {
    chart.append(svg("text", { class: "tick", x: across(x), y: BOX.height - 8, "text-anchor": "middle" }, +x.toPrecision(3)));
  }
}

function plot(spec, runs, log) {
  const figure = element("figure");
  figure.append(element("figcaption", "", `${spec.title} over epochs`));
  const lines = linesOf(spec, runs, log);
  if (!lines.length) { figure.append(element("p", "hint", "No data yet")); return figure; }
  const points = lines.flatMap((line) => line.points);
  const end = Math.max(...points.map(([x]) => x)) || 1;
  const axis = verticalAxis(points.map(([, y]) => y), log);
  const across = (x) => BOX.left + ((BOX.width - BOX.left - BOX.right) * x) / end;
  const chart = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": `${spec.title} over epochs` });
  drawAxes(chart, axis, end, across, spec.show);
  for (const { color, kind, points: curve } of lines) {
    const place = ([x, y]) => `${across(x).toFixed(1)},${axis.down(y).toFixed(1)}`;
    chart.append(svg("polyline", { class: `line ${kind} run${color}`, points: curve.map(place).join(" ") }));
    if (kind === "validation" || curve.length === 1) {
      for (const [x, y] of curve) chart.append(svg("circle", { class: `dot run${color}`, cx: across(x), cy: axis.down(y), r: 3 }));
    }
  }
  figure.append(chart, legend(lines, runs, spec.show));
  return figure;
}

function legend(lines, runs, show) {
  const list = element("ul", "legend");
  for (const { run, color, kind, points } of lines) {
    const item = element("li");
    const name = runs.length > 1 ? `${run.name}, ${kind}` : kind;
    item.append(element("i", `swatch ${kind} run${color}`), `${name} `, element("b", "", show(points.at(-1)[1])));
    list.append(item);
  }
  return list;
}

function fetchRun(name) {
  return request(`/runs.json${name === null ? "" : `?${new URLSearchParams({ run: name })}`}`);
}

async function refresh() {
  try {
    const contents = await Promise.all((selected?.length ? selected : [null]).map(fetchRun));
    if (selected === null && contents[0].run) selected = [contents[0].run.name];
    showRuns(contents[0].runs);
    shown = contents.map((content) => content.run).filter((run) => run && selected?.includes(run.name));
    draw();
    at("message").hidden = true;
  } catch (error) {
    at("message").textContent = ERRORS[error.status] ?? error.message;
    at("message").hidden = false;
    selected = null;
  }
  setTimeout(refresh, 1000 * SECONDS);
}

// Boxes to select runs. They are replaced only if the list of runs changed, to keep the focus.
function showRuns(names) {
  const box = at("runs");
  const boxes = [...box.querySelectorAll("input")];
  if (boxes.map((input) => input.value).join("\n") !== names.join("\n")) {
    box.querySelectorAll("label").forEach((label) => label.remove());
    for (const name of names) {
      const label = element("label", "check");
      const input = element("input");
      Object.assign(input, { type: "checkbox", value: name });
      input.addEventListener("change", select);
      label.append(input, name);
      box.append(label);
    }
  }
  for (const input of box.querySelectorAll("input")) {
    input.checked = selected?.includes(input.value) ?? false;
    input.disabled = !input.checked && (selected?.length ?? 0) >= MAX_RUNS;
  }
}

function select() {
  selected = [...at("runs").querySelectorAll("input:checked")].map((input) => input.value);
  shown = shown.filter((run) => selected.includes(run.name));
  draw();
}

function draw() {
  const names = at("runs").querySelectorAll("input").length;
  const running = shown.filter((run) => !run.finished).map((run) => run.name);
  const state = running.length ? `${running.join(", ")}: running or stopped; refreshed every ${SECONDS} seconds` : "finished";
  at("state").textContent = names ? (shown.length ? state : "Select a run.") : "No runs yet.";
  const log = at("log").checked;
  const plots = PLOTS.filter((spec) => !spec.optional || linesOf(spec, shown, log).length);
  at("plots").replaceChildren(...(shown.length ? plots.map((spec) => plot(spec, shown, log)) : []));
}

at("log").addEventListener("change", draw);
refresh();
