// The page at /runs: training curves of a run, refreshed while it trains. Read-only.
const at = (id) => document.getElementById(id);
const SECONDS = 2;
const PLOTS = [
  { title: "Loss", training: "loss", validation: "validation_loss", show: (v) => String(+v.toPrecision(4)) },
  { title: "Accuracy", training: "accuracy", validation: "validation_accuracy", show: (v) => `${(100 * v).toFixed(1)}%` },
  { title: "Learning rate", training: "learning_rate", show: (v) => String(+v.toPrecision(3)) },
  { title: "Images per second", training: "images_per_second", show: (v) => Math.round(v).toLocaleString("en") },
];
const BOX = { width: 520, height: 260, left: 58, right: 10, top: 10, bottom: 28 };
let selected = null;

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

function plot({ title, training, validation, show }, curves) {
  const series = [["training", curves[training] ?? []], ["validation", curves[validation] ?? []]];
  const points = series.flatMap(([, curve]) => curve);
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  figure.append(caption);
  if (!points.length) { caption.textContent += ": no data yet"; return figure; }
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const end = Math.max(...xs) || 1;
  const margin = 0.05 * (Math.max(...ys) - Math.min(...ys) || 1);
  const low = Math.max(0, Math.min(...ys) - margin);
  const high = Math.max(...ys) + margin;
  const across = (x) => BOX.left + (BOX.width - BOX.left - BOX.right) * x / end;
  const down = (y) => BOX.height - BOX.bottom - (BOX.height - BOX.top - BOX.bottom) * (y - low) / (high - low || 1);
  const chart = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": `${title} over epochs` });
  for (const y of ticks(low, high)) {
    chart.append(svg("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: down(y), y2: down(y) }));
    chart.append(svg("text", { class: "tick", x: BOX.left - 6, y: down(y) + 4, "text-anchor": "end" }, show(y)));
  }
  for (const x of ticks(0, end)) {
    chart.append(svg("text", { class: "tick", x: across(x), y: BOX.height - 8, "text-anchor": "middle" }, +x.toPrecision(3)));
  }
  for (const [kind, curve] of series) {
    chart.append(svg("polyline", { class: `line ${kind}`, points: curve.map(([x, y]) => `${across(x)},${down(y)}`).join(" ") }));
    if (kind === "validation") for (const [x, y] of curve) chart.append(svg("circle", { class: "dot", cx: across(x), cy: down(y), r: 3 }));
  }
  figure.append(chart);
  if (validation) {
    const key = document.createElement("p");
    key.className = "key";
    const mark = document.createElement("b");
    const last = series[1][1].at(-1);
    mark.textContent = last ? `validation ${show(last[1])}` : "no validation yet";
    key.append(mark, ` at epoch ${last ? +last[0].toFixed(2) : 0}`);
    figure.append(key);
  }
  return figure;
}

async function refresh() {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const query = selected === null ? "" : `?${new URLSearchParams({ run: selected })}`;
  try {
    const response = await fetch(`/runs.json${query}`, { headers });
    const content = await response.json();
    if (!response.ok) throw new Error(content.error);
    draw(content);
    at("message").hidden = true;
  } catch (error) {
    at("message").textContent = error.message;
    at("message").hidden = false;
  }
  setTimeout(refresh, 1000 * SECONDS);
}

function draw({ runs, run }) {
  const list = at("run");
  if ([...list.options].map((option) => option.value).join() !== runs.join()) {
    list.replaceChildren(...runs.map((name) => new Option(name, name)));
  }
  if (!run) { at("state").textContent = "No runs yet."; return; }
  list.value = run.name;
  at("state").textContent = run.finished ? "finished" : "running or stopped; curves refresh every 2 seconds";
  at("plots").replaceChildren(...PLOTS.map((spec) => plot(spec, run.curves)));
}

at("run").addEventListener("change", (event) => { selected = event.target.value; });
refresh();
