// The webcam: a live image whose frames can be classified. Frames stay in the browser until they are sent.
const SENT_SIDE = 640;
const ERRORS = {
  NotAllowedError: "The browser blocked the webcam; allow it for this page beside the address, then try again.",
  NotFoundError: "No webcam was found; connect one, or choose a file.",
  NotReadableError: "The webcam is in use by another program; close it, then try again.",
};
const INSECURE = "Browsers allow a webcam only at 127.0.0.1 or over HTTPS; open the page there, or choose a file.";
const OTHER = "The webcam did not start; connect it again, or choose a file.";

export class Webcam {
  constructor(video, ended) {
    this.video = video;
    this.ended = ended;
    this.stream = null;
  }

  get running() { return this.stream !== null; }

  async start() {
    if (!navigator.mediaDevices) throw new Error(INSECURE);
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    } catch (error) {
      throw new Error(ERRORS[error.name] ?? OTHER);
    }
    for (const track of this.stream.getTracks()) track.addEventListener("ended", () => this.lose());
    this.video.srcObject = this.stream;
    await this.video.play().catch(() => {});
  }

  stop() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.stream = null;
    this.video.srcObject = null;
  }

  lose() {
    if (!this.running) return;
    this.stop();
    this.ended("The webcam was disconnected; connect it again, or choose a file.");
  }

  // The current frame as a JPEG; null before the first one.
  frame() {
    const { videoWidth: width, videoHeight: height } = this.video;
    if (!width) return Promise.resolve(null);
    const scale = Math.min(1, SENT_SIDE / Math.max(width, height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.getContext("2d").drawImage(this.video, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
  }
}
