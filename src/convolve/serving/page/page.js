// The page at /: draw a digit, or drop, choose, paste or take photos, and see the predictions.
import { Drawing } from "/page/canvas.js";
import { fetchModels, predict } from "/page/client.js";
import { at, button, element } from "/page/dom.js";
import { Classes } from "/page/samples.js";
import { Webcam } from "/page/webcam.js";

const BARS = 10;
const MAX_FILES = 24;
const LIVE_MS = 300;
let models = [];

const model = () => models.find((entry) => entry.name === at("model").value) ?? models[0];
const classify = (blob, name, options) => predict(blob, name, { model: model()?.name ?? "", ...options });
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const percent = (probability) => `${(100 * probability).toFixed(probability > 0.0995 ? 0 : 1)}%`;

function showMessage(text) {
  at("message").textContent = text ?? "";
  at("message").hidden = !text;
}

function showError(error) {
  if (error.status === 401) at("token-form").hidden = false;
  showMessage(error.message);
}

// A model of several labels per image predicts any number of them.
const predicted = (prediction) => prediction.labels ?? [prediction.label];
const headline = ({ labels, label, probability }) =>
  labels ? labels.join(", ") || "no label" : `${label}, ${percent(probability)}`;

// With few classes, bars stay in class order and do not jump while the user draws.
function showBars(list, prediction, classes) {
  const entries = Object.entries(prediction.probabilities);
  const shown = classes.length <= BARS ? classes.map((name) => [name, prediction.probabilities[name] ?? 0]) : entries.slice(0, 5);
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
    item.classList.toggle("first", predicted(prediction).includes(name));
    item.querySelector(".name").textContent = name;
    item.querySelector(".name").title = name;
    item.querySelector(".fill").style.width = `${100 * probability}%`;
    item.querySelector(".probability").textContent = percent(probability);
  });
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
      const prediction = await classify(await drawing.blob(), "The drawing", { input: 1 });
      if (drawing.empty) { stale = true; continue; }
      at("headline").textContent = headline(prediction);
      showBars(at("bars"), prediction, model().classes);
      at("input").src = prediction.input;
      at("input").hidden = false;
      showMessage();
    } catch (error) {
      showError(error);
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

function originalOf(blob, name) {
  const figure = figureOf(URL.createObjectURL(blob), name, false);
  const image = figure.querySelector("img");
  for (const event of ["load", "error"]) image.addEventListener(event, () => URL.revokeObjectURL(image.src));
  return figure;
}

function showPrediction(item, file, used, prediction) {
  const small = used.height < 112;
  const shots = element("div", "shots");
  shots.append(originalOf(prediction.sent ?? file, "photo"), figureOf(prediction.input, "model input", small));
  shots.append(figureOf(prediction.explanation, `saliency (${used.saliency.replace("-", "\u2011")})`, small));
  const details = element("div");
  const title = element("h3", "", `${headline(prediction)} `);
  const note = prediction.sent ? `${file.name}, sent as a smaller JPEG` : file.name;
  title.append(element("small", "", note));
  const bars = element("ol", "bars");
  bars.setAttribute("aria-label", "Probabilities");
  details.append(title, bars);
  showBars(bars, prediction, used.classes);
  item.replaceChildren(shots, details);
  classes.mark(predicted(prediction));
}

function showFailure(item, file, error) {
  const text = element("p", "error", error.message);
  text.setAttribute("role", "alert");
  item.replaceChildren(text);
  if (error.retry) text.append(" ", button("Try again", () => run(item, file)));
  if (error.status === 401) at("token-form").hidden = false;
}

async function run(item, file) {
  const used = model();
  item.replaceChildren(element("p", "hint", `Classifying ${file.name}...`));
  try {
    showPrediction(item, file, used, await classify(file, file.name, { input: 1, explain: 1 }));
  } catch (error) {
    showFailure(item, file, error);
  }
}

async function showFile(file) {
  const item = element("li");
  at("results").prepend(item);
  await run(item, file);
}

async function showFiles(files) {
  showMessage(files.length > MAX_FILES ? `Only the first ${MAX_FILES} of ${files.length} images are shown; choose the others again.` : "");
  for (const file of [...files].slice(0, MAX_FILES)) await showFile(file);
}

const classes = new Classes(at("classes"), (file) => {
  at("photos").scrollIntoView({ block: "nearest" });
  return showFile(file);
});

// Frames are classified one after the other while the webcam runs; a photo becomes a result with its saliency map.
const webcam = new Webcam(at("video"), (text) => { closeWebcam(); showMessage(text); });

function showWebcam(open) {
  at("camera").hidden = !open;
  at("webcam").setAttribute("aria-expanded", open);
  at("webcam").disabled = open;
}

async function openWebcam() {
  showMessage();
  showWebcam(true);
  at("live").textContent = "Starting the webcam...";
  at("live-bars").replaceChildren();
  try {
    await webcam.start();
  } catch (error) {
    showWebcam(false);
    showMessage(error.message);
    return;
  }
  at("shot").focus();
  while (webcam.running) {
    if (!document.hidden) await showFrame();
    await pause(LIVE_MS);
  }
}

async function showFrame() {
  const used = model();
  const frame = await webcam.frame();
  if (!frame) return;
  try {
    const prediction = await classify(frame, "The webcam image", {});
    if (!webcam.running) return;
    at("live").textContent = headline(prediction);
    showBars(at("live-bars"), prediction, used.classes);
  } catch (error) {
    at("live").textContent = error.message;
  }
}

function closeWebcam() {
  webcam.stop();
  showWebcam(false);
}

async function takePhoto() {
  const frame = await webcam.frame();
  if (frame) await showFile(new File([frame], `webcam at ${new Date().toLocaleTimeString("en")}`, { type: frame.type }));
}

function selectModel() {
  const digits = model()?.fit === "digit";
  at("draw").hidden = !digits;
  at("photo-title").textContent = digits ? "Images" : "Photos";
  at("call").textContent = `Drop ${digits ? "images" : "photos"} here, paste one, or`;
  classes.show(model());
  update();
}

async function start() {
  try {
    models = await fetchModels();
    at("model").replaceChildren(...models.map(({ name }) => new Option(name, name)));
    at("token-form").hidden = true;
    showMessage();
    selectModel();
  } catch (error) {
    showError(error);
  }
}

function paste(event) {
  if (event.target instanceof HTMLInputElement) return;
  const files = [...event.clipboardData.files];
  if (files.length) showFiles(files);
  else showMessage("The clipboard contains no image; copy an image or an image file first.");
}

function drop(event) {
  event.preventDefault();
  const files = [...event.dataTransfer.files];
  if (files.length) showFiles(files);
  else showMessage("Only files can be dropped; save the image first, then drop or choose the file.");
}

at("undo").addEventListener("click", () => drawing.undo());
at("clear").addEventListener("click", () => drawing.clear());
at("model").addEventListener("change", selectModel);
at("files").addEventListener("change", (event) => { const files = [...event.target.files]; event.target.value = ""; showFiles(files); });
at("webcam").addEventListener("click", openWebcam);
at("shot").addEventListener("click", takePhoto);
at("stop").addEventListener("click", () => { closeWebcam(); at("webcam").focus(); });
at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value);
  start();
});
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => { event.preventDefault(); at("drop").classList.add("over"); });
}
for (const name of ["dragleave", "drop"]) document.addEventListener(name, () => at("drop").classList.remove("over"));
document.addEventListener("drop", drop);
document.addEventListener("paste", paste);
start();
