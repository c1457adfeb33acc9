// The classes of a model, with sample images of its run.
import { button, element } from "/page/dom.js";
import { fetchSamples } from "/page/client.js";

const OPEN_CLASSES = 40;

function toFile(url, name) {
  const [head, body] = url.split(",");
  const bytes = Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0));
  return new File([bytes], name, { type: head.slice(5).split(";")[0] });
}

function sampleButton(url, name, number, small, classify) {
  const choose = button("", () => classify(toFile(url, `sample ${number} of ${name}`)), "sample");
  choose.setAttribute("aria-label", `Classify sample ${number} of ${name}`);
  const image = element("img", small ? "pixels" : "");
  image.src = url;
  image.alt = "";
  choose.append(image);
  return choose;
}

export class Classes {
  constructor(box, classify) {
    this.box = box;
    this.classify = classify;
    this.shown = "";
  }

  async show(model) {
    this.shown = model.name;
    this.render(model, {});
    try {
      const samples = await fetchSamples(model.name);
      if (this.shown === model.name) this.render(model, samples);
    } catch (error) {
      this.box.append(element("p", "hint", `No sample images: ${error.message}`));
    }
  }

  render(model, samples) {
    const count = model.classes.length;
    const list = element("ul", Object.keys(samples).length ? "classes" : "classes plain");
    list.append(...model.classes.map((name) => this.entry(name, samples[name] ?? [], model.height < 112)));
    const parts = [element("h2", "", `${count.toLocaleString("en")} ${count === 1 ? "class" : "classes"}`)];
    if (Object.keys(samples).length) parts.push(element("p", "hint", "Test images that this model recognizes best. Choose one to classify it."));
    if (count > OPEN_CLASSES) {
      const details = element("details");
      details.append(element("summary", "", "Show all"), list);
      parts.push(details);
    } else parts.push(list);
    this.box.replaceChildren(...parts);
    this.box.querySelector("h2").id = "classes-title";
  }

  entry(name, urls, small) {
    const item = element("li");
    item.dataset.name = name;
    item.append(element("span", "name", name));
    if (urls.length) {
      const row = element("div", "sample-row");
      row.append(...urls.map((url, index) => sampleButton(url, name, index + 1, small, this.classify)));
      item.append(row);
    }
    return item;
  }

  // Mark the class of the newest prediction.
  mark(labels) {
    for (const item of this.box.querySelectorAll(".classes li")) item.classList.toggle("predicted", labels.includes(item.dataset.name));
  }
}
