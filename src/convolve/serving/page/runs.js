// The page at /runs: curves of a training, drawn again while they grow. It reads, and changes nothing.
const at = (id) => document.getElementById(id);
const SECONDS = 2;
const PLOTS = [
  { title: "Loss", training: "loss", validation: "validation_loss", show: (v) => String(+v.toPrecision(4)) },
  { title: "Accuracy", training: "accuracy", validation: "validation_accuracy", show: (v) => `${(100 * v).toFixed(1)}%` },
  { title: "Learning rate", training: "learning_rate", show: (v) => String(+v.toPrecision(3)) },
  { title: "Images per second", training: "images_per_second", show: (v) => Math.round(v).toLocaleString("en") },
];
const BOX = { width: 520, height: 260, left: 58, right: 10, top: 10, bottom: 28 };
let wanted = null;

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(low, high, count = 4) {
  const span = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(span / count));
  step *= [1, 2, 5, 10].find((factor) => span / (step * factor) <= count) ?? 10;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

function plot({ title, training, validation, show }, curves) {
  const series = [["training", curves[training] ?? []], ["validation", curves[validation] ?? []]];
  const points = series.flatMap(([, one]) => one);
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  figure.append(caption);
  if (!points.length) { caption.textContent += ": nothing yet"; return figure; }
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const end = Math.max(...xs) || 1;
  const margin = 0.05 * (Math.max(...ys) - Math.min(...ys) || 1);
  const low = Math.max(0, Math.min(...ys) - margin);
  const high = Math.max(...ys) + margin;
  const across = (x) => BOX.left + (BOX.width - BOX.left - BOX.right) * x / end;
  const down = (y) => BOX.height - BOX.bottom - (BOX.height - BOX.top - BOX.bottom) * (y - low) / (high - low || 1);
  const picture = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": `${title} over epochs` });
  for (const y of ticks(low, high)) {
    picture.append(svg("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: down(y), y2: down(y) }));
    picture.append(svg("text", { class: "tick", x: BOX.left - 6, y: down(y) + 4, "text-anchor": "end" }, show(y)));
  }
  for (const x of ticks(0, end)) {
    picture.append(svg("text", { class: "tick", x: across(x), y: BOX.height - 8, "text-anchor": "middle" }, +x.toPrecision(3)));
  }
  for (const [kind, one] of series) {
    picture.append(svg("polyline", { class: `line ${kind}`, points: one.map(([x, y]) => `${across(x)},${down(y)}`).join(" ") }));
    if (kind === "validation") for (const [x, y] of one) picture.append(svg("circle", { class: "dot", cx: across(x), cy: down(y), r: 3 }));
  }
  figure.append(picture);
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
  const query = wanted === null ? "" : `?${new URLSearchParams({ run: wanted })}`;
  try {
    const response = await fetch(`/runs.json${query}`, { headers });
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    draw(found);
    at("message").hidden = true;
  } catch (error) {
    at("message").textContent = error.message;
    at("message").hidden = false;
  }
  setTimeout(refresh, 1000 * SECONDS);
}

function draw({ runs, run }) {
  const list = at("run");
  if ([...list.options].map((one) => one.value).join() !== runs.join()) {
    list.replaceChildren(...runs.map((name) => new Option(name, name)));
  }
  if (!run) { at("state").textContent = "There is no run yet."; return; }
  list.value = run.name;
  at("state").textContent = run.finished ? "finished" : "running, or stopped; the curves are read again every 2 seconds";
  at("plots").replaceChildren(...PLOTS.map((one) => plot(one, run.curves)));
}

at("run").addEventListener("change", (event) => { wanted = event.target.value; });
refresh();
