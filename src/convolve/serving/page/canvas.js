// A drawing area for mouse, touch, pen and keyboard. It stores strokes, not pixels, to support undo.
const PEN = 26;
const STEP = 12;

export class Drawing {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.strokes = [];
    this.current = null;
    this.cursor = { x: canvas.width / 2, y: canvas.height / 2 };
    this.keyboard = false;
    canvas.addEventListener("pointerdown", (event) => this.pointerDown(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => this.end());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => { this.keyboard = false; this.end(); });
    this.paint();
  }

  get empty() { return this.strokes.length === 0; }

  position(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  }

  pointerDown(event) {
    if (event.button > 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.keyboard = false;
    this.start(this.position(event));
  }

  start(point) {
    this.current = [point];
    this.strokes.push(this.current);
    this.paint();
    this.changed();
  }

  move(event) {
    if (!this.current || this.keyboard) return;
    for (const point of event.getCoalescedEvents?.() ?? [event]) this.current.push(this.position(point));
    this.paint();
    this.changed();
  }

  end() {
    this.current = null;
    this.paint();
  }

  key(event) {
    const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const direction = directions[event.key];
    if (direction) {
      const limit = (value, max) => Math.max(0, Math.min(max, value));
      this.cursor = {
        x: limit(this.cursor.x + direction[0] * STEP, this.canvas.width),
        y: limit(this.cursor.y + direction[1] * STEP, this.canvas.height),
      };
      this.keyboard = true;
      if (this.current) { this.current.push({ ...this.cursor }); this.changed(); }
      this.paint();
    } else if (event.key === " ") {
      this.keyboard = true;
      if (this.current) this.end(); else this.start({ ...this.cursor });
    } else if (event.key.toLowerCase() === "z") this.undo();
    else if (event.key.toLowerCase() === "c") this.clear();
    else return;
    event.preventDefault();
  }

  undo() { this.strokes.pop(); this.current = null; this.paint(); this.changed(); }

  clear() { this.strokes = []; this.current = null; this.paint(); this.changed(); }

  lines(context) {
    context.fillStyle = "#fff";
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    context.strokeStyle = context.fillStyle = "#111";
    context.lineWidth = PEN;
    context.lineCap = context.lineJoin = "round";
    for (const stroke of this.strokes) {
      context.beginPath();
      context.arc(stroke[0].x, stroke[0].y, stroke.length > 1 ? 0 : PEN / 2, 0, 7);
      context.fill();
      context.beginPath();
      context.moveTo(stroke[0].x, stroke[0].y);
      for (const point of stroke.slice(1)) context.lineTo(point.x, point.y);
      context.stroke();
    }
  }

  paint() {
    const context = this.canvas.getContext("2d");
    this.lines(context);
    if (!this.keyboard) return;
    context.strokeStyle = this.current ? "#d13c1f" : "#2566a8";
    context.lineWidth = 3;
    context.beginPath();
    context.arc(this.cursor.x, this.cursor.y, PEN / 2 + 3, 0, 7);
    context.stroke();
  }

  // The drawing as a PNG, without the keyboard cursor.
  blob() {
    const copy = document.createElement("canvas");
    copy.width = this.canvas.width;
    copy.height = this.canvas.height;
    this.lines(copy.getContext("2d"));
    return new Promise((done) => copy.toBlob(done, "image/png"));
  }
}
