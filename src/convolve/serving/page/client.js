// Requests to the server. Every failure is an Error with one sentence that says what to do.
const SENT_SIDE = 2048;
const UNKNOWN_TO_SERVER = /\.(heic|heif|avif)$/i;
let limits = { bytes: Infinity, pixels: Infinity };

const ERRORS = {
  0: () => "The server is not responding; check that `convolve serve` is running.",
  400: (name) => `${name} is broken or not an image; choose a JPEG, PNG or WebP file.`,
  401: () => "The server requires a token; sign in at the top of the page.",
  403: () => "The server rejected the address of this page; open the one that `convolve serve` printed.",
  404: () => "The server does not know this model; reload the page.",
  408: (name) => `${name} took too long to send; try again, or choose a smaller file.`,
  413: (name) => `${name} is too large; choose an image with at most ${describeLimits()}.`,
  415: (name) => `${name} is not an image; choose a JPEG, PNG or WebP file.`,
  429: () => "The server is busy; try again in a moment.",
  500: (name) => `${name} could not be classified; try again, or see the terminal of the server.`,
  503: () => "The server is stopping or took too long; try again in a moment.",
};
const RETRY = new Set([0, 408, 429, 500, 503]);

function describeLimits() {
  const parts = [];
  if (Number.isFinite(limits.bytes)) parts.push(`${+(limits.bytes / 2 ** 20).toFixed(1)} MB`);
  if (Number.isFinite(limits.pixels)) parts.push(`${Math.round(limits.pixels / 1e6)} million pixels`);
  return parts.join(" and ");
}

export class RequestError extends Error {
  constructor(status, name = "The request") {
    super(ERRORS[status]?.(name) ?? `The server returned status ${status}; see its terminal.`);
    this.status = status;
    this.retry = RETRY.has(status);
  }
}

const authorization = () => {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
};

export async function request(path, options = {}, name = undefined) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...authorization(), ...options.headers } });
  } catch {
    throw new RequestError(0);
  }
  if (!response.ok) throw new RequestError(response.status, name);
  return response.json();
}

export async function fetchModels() {
  const content = await request("/models");
  limits = content.limits;
  return content.models;
}

export const fetchSamples = async (model) => (await request(`/samples?${new URLSearchParams({ model })}`)).samples;

async function send(blob, name, options) {
  // The server would close the connection before the browser could read why.
  if (blob.size > limits.bytes) throw new RequestError(413, name);
  const headers = { "Content-Type": blob.type.startsWith("image/") ? blob.type : "application/octet-stream" };
  const query = new URLSearchParams(options);
  return (await request(`/predict?${query}`, { method: "POST", body: blob, headers }, name)).predictions[0];
}

// Classify an image. One that is too large, or of a format that only browsers read, is sent as a smaller JPEG.
export async function predict(blob, name, options) {
  try {
    return await send(blob, name, options);
  } catch (error) {
    const shrinkable = error.status === 413 || (error.status === 400 && UNKNOWN_TO_SERVER.test(name));
    const smaller = shrinkable ? await shrink(blob) : null;
    if (!smaller) throw error;
    return { ...(await send(smaller, name, options)), sent: smaller };
  }
}

async function shrink(blob) {
  try {
    const image = await createImageBitmap(blob);
    const scale = Math.min(1, SENT_SIDE / Math.max(image.width, image.height));
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(image.width * scale));
    canvas.height = Math.max(1, Math.round(image.height * scale));
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
  } catch {
    return null;
  }
}
