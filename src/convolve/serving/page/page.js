// The page at /: draw a digit or drop images, and see the predictions.
import { Drawing } from "/page/canvas.js";

const at = (id) => document.getElementById(id);
const SHOWN = 10;
const MAX_FILES = 24;
let models = [];

const headers = () => {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
};

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch {
    throw new Error("The server is not responding.");
  }
  if (response.status === 401) at("token-form").hidden = false;
  const body = await response.json().catch(() => ({ error: `The server returned status ${response.status}.` }));
  if (!response.ok) throw new Error(body.error);
  return body;
}

const predict = (blob, options) => {
  const query = new URLSearchParams({ model: at("model").value, ...options });
  return request(`/predict?${query}`, {
    method: "POST", body: blob, headers: { "Content-Type": blob.type || "application/octet-stream" },
  });
};

function element(name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

const percent = (probability) => `${(100 * probability).toFixed(probability > 0.0995 ? 0 : 1)}%`;

// With few classes, bars stay in class order and do not jump while the user draws.
function showBars(list, prediction, classes) {
  const entries = Object.entries(prediction.probabilities);
  const shown = classes.length <= SHOWN ? classes.map((name) => [name, prediction.probabilities[name] ?? 0]) : entries.slice(0, 5);
  while (list.children.length > shown.length) list.lastChild.remove();
  while (list.children.length < shown.length) {
    const item = element("li");
    const track = element("div", "track");
    track.append(element("div", "fill"));
    item.append(element("span", "name"), track, element("span", "probability"));
    list.append(item);
  }
  shown.forEach(([name, probability], index) => {
    const item = list.children[index];
    item.classList.toggle("first", name === prediction.label);
    item.querySelector(".name").textContent = name;
    item.querySelector(".name").title = name;
    item.querySelector(".fill").style.width = `${100 * probability}%`;
    item.querySelector(".probability").textContent = percent(probability);
  });
}

const model = () => models.find((entry) => entry.name === at("model").value) ?? models[0];

function showMessage(text) {
  at("message").textContent = text ?? "";
  at("message").hidden = !text;
}

// One request at a time; changes made meanwhile are sent in the next one.
let busy = false;
let stale = false;
async function update() {
  stale = true;
  if (busy) return;
  busy = true;
  while (stale) {
    stale = false;
    if (drawing.empty) {
      at("headline").textContent = "Nothing drawn yet";
      at("bars").replaceChildren();
      at("input").hidden = true;
      continue;
    }
    try {
      const [prediction] = (await predict(await drawing.blob(), { input: 1 })).predictions;
      if (drawing.empty) { stale = true; continue; }
      at("headline").textContent = `${prediction.label}, ${percent(prediction.probability)}`;
      showBars(at("bars"), prediction, model().classes);
      at("input").src = prediction.input;
      at("input").hidden = false;
      showMessage();
    } catch (error) {
      showMessage(error.message);
    }
  }
  busy = false;
}

const drawing = new Drawing(at("canvas"), update);

function figureOf(url, caption, pixelated) {
  const figure = element("figure");
  const image = element("img", pixelated ? "pixels" : "");
  image.src = url;
  image.alt = caption;
  figure.append(image, element("figcaption", "", caption));
  return figure;
}

async function showFile(file) {
  const item = element("li");
  at("results").prepend(item);
  const shots = element("div", "shots");
  const details = element("div");
  const title = element("h3", "", file.name);
  details.append(title);
  item.append(shots, details);
  try {
    const [prediction] = (await predict(file, { input: 1, explain: 1 })).predictions;
    const small = model().height < 112;
    const original = figureOf(URL.createObjectURL(file), "image", false);
    original.querySelector("img").addEventListener("load", (event) => URL.revokeObjectURL(event.target.src));
    shots.append(original, figureOf(prediction.input, "model input", small), figureOf(prediction.explanation, "Grad-CAM", small));
    title.textContent = `${prediction.label}, ${percent(prediction.probability)} `;
    title.append(element("small", "", file.name));
    const bars = element("ol", "bars");
    bars.setAttribute("aria-label", "Probabilities");
    details.append(bars);
    showBars(bars, prediction, model().classes);
  } catch (error) {
    const text = element("p", "error", error.message);
    text.setAttribute("role", "alert");
    details.append(text);
  }
}

async function showFiles(files) {
  showMessage(files.length > MAX_FILES ? `Only the first ${MAX_FILES} of ${files.length} images are shown.` : "");
  for (const file of [...files].slice(0, MAX_FILES)) await showFile(file);
}

function selectModel() {
  const digits = model()?.fit === "digit";
  at("draw").hidden = !digits;
  update();
}

async function start() {
  try {
    ({ models } = await request("/models"));
    at("model").replaceChildren(...models.map(({ name }) => new Option(name, name)));
    at("token-form").hidden = true;
    showMessage();
    selectModel();
  } catch (error) {
    showMessage(error.message);
  }
}

at("undo").addEventListener("click", () => drawing.undo());
at("clear").addEventListener("click", () => drawing.clear());
at("model").addEventListener("change", selectModel);
at("files").addEventListener("change", (event) => { const files = [...event.target.files]; event.target.value = ""; showFiles(files); });
at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  start();
});
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => { event.preventDefault(); at("drop").classList.add("over"); });
}
for (const name of ["dragleave", "drop"]) document.addEventListener(name, () => at("drop").classList.remove("over"));
document.addEventListener("drop", (event) => { event.preventDefault(); showFiles(event.dataTransfer.files); });
start();
