// The page at /: draw a digit, drop pictures, see what the network thinks.
import { Drawing } from "/page/canvas.js";

const at = (id) => document.getElementById(id);
const SHOWN = 10;
const MOST_FILES = 24;
let models = [];

const headers = () => {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
};

async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  } catch {
    throw new Error("The server does not answer.");
  }
  if (response.status === 401) at("token-form").hidden = false;
  const body = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(body.error);
  return body;
}

const predict = (blob, wishes) => {
  const query = new URLSearchParams({ model: at("model").value, ...wishes });
  return ask(`/predict?${query}`, {
    method: "POST", body: blob, headers: { "Content-Type": blob.type || "application/octet-stream" },
  });
};

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

const percent = (share) => `${(100 * share).toFixed(share > 0.0995 ? 0 : 1)}%`;

// Bars keep their place (class order for few classes), so that they follow the strokes without jumping about.
function showBars(list, prediction, classes) {
  const entries = Object.entries(prediction.probabilities);
  const shown = classes.length <= SHOWN ? classes.map((name) => [name, prediction.probabilities[name] ?? 0]) : entries.slice(0, 5);
  while (list.children.length > shown.length) list.lastChild.remove();
  while (list.children.length < shown.length) {
    const item = element("li");
    const track = element("div", "track");
    track.append(element("div", "fill"));
    item.append(element("span", "name"), track, element("span", "share"));
    list.append(item);
  }
  shown.forEach(([name, share], index) => {
    const item = list.children[index];
    item.classList.toggle("first", name === prediction.label);
    item.querySelector(".name").textContent = name;
    item.querySelector(".name").title = name;
    item.querySelector(".fill").style.width = `${100 * share}%`;
    item.querySelector(".share").textContent = percent(share);
  });
}

const model = () => models.find((one) => one.name === at("model").value) ?? models[0];

function say(text) {
  at("message").textContent = text ?? "";
  at("message").hidden = !text;
}

// One question at a time; what was drawn meanwhile is asked next.
let busy = false;
let stale = false;
async function follow() {
  stale = true;
  if (busy) return;
  busy = true;
  while (stale) {
    stale = false;
    if (drawing.empty) {
      at("verdict").textContent = "Nothing drawn yet";
      at("bars").replaceChildren();
      at("seen").hidden = true;
      continue;
    }
    try {
      const [prediction] = (await predict(await drawing.blob(), { input: 1 })).predictions;
      if (drawing.empty) { stale = true; continue; }
      at("verdict").textContent = `${prediction.label}, ${percent(prediction.probability)} sure`;
      showBars(at("bars"), prediction, model().classes);
      at("seen").src = prediction.input;
      at("seen").hidden = false;
      say();
    } catch (error) {
      say(error.message);
    }
  }
  busy = false;
}

const drawing = new Drawing(at("canvas"), follow);

function shot(address, caption, pixels) {
  const figure = element("figure");
  const image = element("img", pixels ? "pixels" : "");
  image.src = address;
  image.alt = caption;
  figure.append(image, element("figcaption", "", caption));
  return figure;
}

async function showFile(file) {
  const item = element("li");
  at("results").prepend(item);
  const shots = element("div", "shots");
  const facts = element("div");
  const title = element("h3", "", file.name);
  facts.append(title);
  item.append(shots, facts);
  try {
    const [prediction] = (await predict(file, { input: 1, explain: 1 })).predictions;
    const small = model().height < 112;
    const own = shot(URL.createObjectURL(file), "picture", false);
    own.querySelector("img").addEventListener("load", (event) => URL.revokeObjectURL(event.target.src));
    shots.append(own, shot(prediction.input, "what the network sees", small), shot(prediction.explanation, "where it looks", small));
    title.textContent = `${prediction.label}, ${percent(prediction.probability)} `;
    title.append(element("small", "", file.name));
    const bars = element("ol", "bars");
    bars.setAttribute("aria-label", "Probabilities");
    facts.append(bars);
    showBars(bars, prediction, model().classes);
  } catch (error) {
    const text = element("p", "error", error.message);
    text.setAttribute("role", "alert");
    facts.append(text);
  }
}

async function showFiles(files) {
  say(files.length > MOST_FILES ? `Only the first ${MOST_FILES} of ${files.length} pictures are shown.` : "");
  for (const file of [...files].slice(0, MOST_FILES)) await showFile(file);
}

function choose() {
  const digits = model()?.fit === "digit";
  at("draw").hidden = !digits;
  follow();
}

async function start() {
  try {
    ({ models } = await ask("/models"));
    at("model").replaceChildren(...models.map((one) => new Option(one.name, one.name)));
    at("token-form").hidden = true;
    say();
    choose();
  } catch (error) {
    say(error.message);
  }
}

at("undo").addEventListener("click", () => drawing.undo());
at("clear").addEventListener("click", () => drawing.clear());
at("model").addEventListener("change", choose);
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
