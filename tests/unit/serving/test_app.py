"""The HTTP application in a server process: predictions, rejected requests, reload and draining."""

import base64
import io
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPConnection
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

import convolve
from convolve.checkpoint.store import Store, load
from convolve.data.lookup import load_digits
from convolve.run_files import SAMPLES_FILE
from forked_commands import Running
from labeled_shapes import write_folder

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def digit(number, index=0):
    test = load_digits().test
    return png(test.images[np.flatnonzero(test.labels == number)[index], :, :, 0])


class Serving(Running):
    """A server process."""

    def __init__(self, *arguments):
        super().__init__("serve", *arguments, "--port", "0", "--threads", "1", "--engine", "torch")
        self.lines = []
        for line in self.stdout:
            self.lines.append(line)
            if address := re.search(r"http://\S+:(\d+)/", line):
                self.port = int(address[1])
                break
        self._listener = threading.Thread(target=lambda: self.lines.extend(self.stdout), daemon=True)
        self._listener.start()

    def request(self, method, path, body=None, headers=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            # The server responds to a rejected body before it was sent completely.
            with suppress(BrokenPipeError):
                connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def predict(self, body, content_type="image/png", query=""):
        status, content = self.request("POST", f"/predict{query}", body, {"Content-Type": content_type})
        return status, json.loads(content)

    def memory_mb(self):
        with open(f"/proc/{self.pid}/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024

    def cpu_seconds(self):
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self, seconds=30):
        code = super().stop(seconds)
        self._listener.join(seconds)
        self.stdout.close()
        return code


@pytest.fixture(scope="module")
def server(digits_run, tmp_path_factory):
    run = tmp_path_factory.mktemp("served") / "digits-1"
    shutil.copytree(digits_run, run)
    running = Serving(run, f"again={run}", "--max-body-mb", "1", "--body-seconds", "1.5", "--reload", "0.3")
    running.run = run
    yield running
    assert running.stop() == 0


def test_an_image_is_classified_in_every_request_format(server):
    plain, form = digit(7), b""
    for name in ("../../etc/passwd", "b.png"):
        form += b'--xx\r\nContent-Disposition: form-data; name="p"; filename="' + name.encode() + b'"\r\n\r\n'
        form += plain + b"\r\n"
    text = base64.b64encode(plain).decode()
    responses = [
        server.predict(plain),
        server.predict(plain, "application/octet-stream"),
        server.predict(form + b"--xx--\r\n", "multipart/form-data; boundary=xx"),
        server.predict(json.dumps({"image": text}), "application/json"),
        server.predict(json.dumps({"images": [f"data:image/png;base64,{text}"]}), "application/json"),
    ]
    for status, content in responses:
        assert status == 200, content
        assert [prediction["label"] for prediction in content["predictions"]] == ["7"] * len(content["predictions"])
    assert [prediction["name"] for prediction in responses[2][1]["predictions"]] == ["passwd", "b.png"]
    probabilities = responses[0][1]["predictions"][0]["probabilities"]
    assert len(probabilities) == 10 and sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert list(probabilities.values()) == sorted(probabilities.values(), reverse=True)


def test_a_model_of_several_labels_predicts_those_that_reach_their_thresholds(tmp_path):
    shapes, run_dir = write_folder(tmp_path / "shapes", 60), tmp_path / "run"
    options = {"epochs": 2, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.003, "threads": 1}
    model = convolve.train(shapes, "cnn-wide", run_dir=run_dir, report=False, curves=False, **options).load()
    running = Serving(run_dir)
    found = set()
    for file in sorted((shapes / "images").glob("00*.png")):
        status, content = running.predict(file.read_bytes())
        (prediction,) = content["predictions"]
        expected = model.predict(file)
        assert status == 200 and prediction["labels"] == list(expected.labels)
        assert prediction["probabilities"] == pytest.approx(dict(expected.top), abs=1e-5)
        found.add(len(prediction["labels"]))
    assert len(found) > 1
    assert running.stop() == 0


def test_input_and_explanation_are_returned_as_images(server):
    _, content = server.predict(digit(3), query="?input=1&explain=1&top=2&model=again")
    (prediction,) = content["predictions"]
    assert content["model"] == "again" and len(prediction["probabilities"]) == 2
    for key in ("input", "explanation"):
        with Image.open(io.BytesIO(base64.b64decode(prediction[key].partition(",")[2]))) as image:
            assert image.size == (224, 224)


def huge_png():
    file = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "content_type", "query", "status", "reason"),
    [
        (b"not an image", "image/png", "", 400, "not an image of a known format"),
        (b"", "image/png", "", 400, "no image"),
        (b"x", "text/html", "", 415, "Content-Type text/html"),
        (b"x", "", "", 415, "Content-Type missing"),
        (b"{", "application/json", "", 400, "invalid JSON"),
        (b"[" * 100_000, "application/json", "", 400, "invalid JSON"),
        (b"NaN", "application/json", "", 400, "must be an object"),
        (b'{"image": "http://localhost/x.png"}', "application/json", "", 400, "not fetched"),
        (b'{"image": "/etc/passwd"}', "application/json", "", 400, "paths are not fetched"),
        (b'{"images": [1]}', "application/json", "", 400, "JSON needs"),
        (b"x", "multipart/form-data", "", 400, "without a boundary"),
        (b"x", "multipart/form-data; boundary=yy", "", 400, "closing boundary"),
        (b"--yy\r\n\r\n--yy--", "multipart/form-data; boundary=yy", "", 400, "without a header"),
        (digit(1), "image/png", "?model=none", 404, "unknown model"),
        (digit(1), "image/png", "?top=many", 400, "top: must be"),
        (b"x" * 2_000_000, "image/png", "", 413, "at most 1048576"),
        (huge_png(), "image/png", "", 413, "more than the 25000000 pixels"),
        (json.dumps({"images": ["aGk="] * 65}).encode(), "application/json", "", 413, "at most 64"),
    ],
    ids=lambda value: str(value)[:24] if not isinstance(value, bytes) else str(len(value)),
)  # fmt: skip
def test_invalid_requests_are_rejected_with_status_and_reason(server, body, content_type, query, status, reason):
    found_status, content = server.predict(body, content_type, query)
    assert found_status == status
    assert reason in content["error"]


def test_one_broken_image_among_valid_ones_is_reported(server):
    texts = [base64.b64encode(data).decode() for data in (digit(1), b"broken", digit(7))]
    status, content = server.predict(json.dumps({"images": texts}), "application/json")
    assert status == 200
    assert [("error" in prediction, prediction.get("label")) for prediction in content["predictions"]] == [
        (False, content["predictions"][0]["label"]),
        (True, None),
        (False, "7"),
    ]


def test_the_other_routes_respond(server):
    assert server.request("GET", "/healthz") == (200, b"ok\n")
    assert server.request("GET", "/readyz") == (200, b"ready\n")
    _, models = server.request("GET", "/models")
    assert [model["name"] for model in json.loads(models)["models"]] == ["digits-1", "again"]
    _, description = server.request("GET", "/openapi.json")
    assert set(json.loads(description)["paths"]) >= {
        "/predict",
        "/healthz",
        "/readyz",
        "/metrics",
        "/models",
        "/samples",
    }
    _, text = server.request("GET", "/metrics")
    assert b'convolve_requests_total{path="/healthz",status="200"}' in text
    for page, mark in (("/", b"Draw a digit"), ("/runs", b"Training runs"), ("/page/page.js", b"predict")):
        status, body = server.request("GET", page)
        assert status == 200 and mark in body
    status, content = server.request("GET", "/runs.json")
    assert status == 200 and json.loads(content)["run"]["curves"]["validation_accuracy"]
    assert server.request("GET", "/runs.json?run=../..")[0] == 404
    assert server.request("GET", "/page/../../../etc/passwd")[0] == 404
    assert server.request("GET", "/predict")[0] == 405


def test_sample_images_of_each_class_are_those_of_the_run(server):
    status, content = server.request("GET", "/samples?model=again")
    samples = json.loads(content)["samples"]
    assert status == 200 and list(samples) == list("0123456789")
    image = base64.b64decode(samples["7"][0].partition(",")[2])
    assert server.predict(image)[1]["predictions"][0]["label"] == "7"
    assert json.loads(server.request("GET", "/samples")[1])["samples"] == samples
    for name in ("../..", quote(str(server.run), safe=""), "samples.json"):
        assert server.request("GET", f"/samples?model={name}")[0] == 404
    file = server.run / SAMPLES_FILE
    stored = file.read_bytes()
    file.write_text("{}")
    status, content = server.request("GET", "/samples")
    assert status == 500 and "samples.json: damaged" in json.loads(content)["error"]
    file.write_bytes(stored)
    assert server.request("GET", "/samples", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_the_page_learns_the_limits_and_only_it_may_use_the_camera(server):
    _, content = server.request("GET", "/models")
    assert json.loads(content)["limits"] == {"bytes": 1 << 20, "pixels": 25_000_000}
    assert {model["saliency"] for model in json.loads(content)["models"]} == {"Grad-CAM"}
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", "/")
    headers = connection.getresponse().headers
    connection.close()
    assert headers["Permissions-Policy"] == "camera=(self), microphone=(), geolocation=()"
    assert "script-src 'self';" in headers["Content-Security-Policy"]


def test_a_foreign_host_header_is_rejected(server):
    assert server.request("GET", "/models", headers={"Host": "evil.example"})[0] == 403
    assert server.request("GET", "/models", headers={"Host": "localhost:1"})[0] == 200


def drip(port, head, pieces, pause):
    """Send a request slowly and return the status line of the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        except OSError:
            pass
        return connection.recv(4096).split(b"\r\n")[0]


def test_slow_and_endless_bodies_are_rejected(server):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    slow = drip(server.port, head + b"Content-Length: 1000\r\n\r\n", [b"x"] * 25, 0.1)
    assert b"408" in slow
    chunk = b"10000\r\n" + b"-" * 65536 + b"\r\n"
    form = head.replace(b"image/png", b"multipart/form-data; boundary=x") + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b"413" in drip(server.port, form, [chunk] * 40, 0)
    assert server.predict(digit(7))[1]["predictions"][0]["label"] == "7"


def read_to_end(connection):
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_requests_on_one_connection_get_their_responses_in_order(server):
    """All at once, with the last one closing the connection: the first bypasses the queue of the others."""
    data = b""
    for number in range(4):
        body = digit(number)
        close = b"Connection: close\r\n" if number == 3 else b""
        data += b"POST /predict?top=%d HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n" % (number + 1)
        data += close + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        responses = read_to_end(connection).split(b"HTTP/1.1 200 OK\r\n")[1:]
    heads, bodies = zip(*(response.split(b"\r\n\r\n") for response in responses), strict=True)
    predictions = [json.loads(body)["predictions"][0] for body in bodies]
    assert [len(prediction["probabilities"]) for prediction in predictions] == [1, 2, 3, 4]
    names = [{line.partition(b":")[0].lower() for line in head.split(b"\r\n")} for head in heads]
    assert names[0] == names[1] == names[3] - {b"connection"}
    assert b"content-security-policy" in names[0] and b"date" in names[0]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_connection_is_closed_after_the_response_if_the_client_wishes(server, version):
    body = digit(7)
    head = b"POST /predict HTTP/%b\r\nHost: localhost\r\nConnection: close\r\nContent-Type: image/png\r\n" % version
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        response = read_to_end(connection)
    assert b"200 OK" in response and b"connection: close" in response


def test_a_client_that_waits_for_permission_gets_it_before_it_sends_the_body(server):
    body = digit(7)
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nExpect: 100-continue\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body[:50])
        time.sleep(0.05)
        connection.sendall(body[50:])
        assert b"200 OK" in read_to_end(connection)


@pytest.mark.parametrize("line", [b"X-%d: %s\r\n", b"%d%s"], ids=["many headers", "one endless header"])
def test_headers_over_the_limit_are_rejected_before_they_fill_memory(server, line):
    before = server.memory_mb()
    lines = [line % (number, b"x" * 60_000) for number in range(200)]
    assert b"431" in drip(server.port, b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX-First: ", lines, 0)
    assert server.memory_mb() < before + 8
    assert server.predict(digit(7))[0] == 200


def test_endless_trailers_are_cut_off(server):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    before = server.memory_mb()
    drip(server.port, head + b"4\r\nabcd\r\n0\r\nX-Trailer: ", [b"x" * 65_536] * 400, 0)
    assert server.memory_mb() < before + 16
    assert server.predict(digit(7))[0] == 200


def test_millions_of_empty_images_are_rejected_without_parsing_them(server):
    used = server.cpu_seconds()
    for end in (b"]}", b"not JSON"):  # a parser would find the second one invalid
        status, content = server.predict(b'{"images": [' + b'"",' * 330_000 + b'""' + end, "application/json")
        assert status == 413 and "at most 64" in content["error"]
    assert server.cpu_seconds() - used < 0.5


@pytest.mark.parametrize("top", ["²", "٣", "0", "-1", "9" * 5000])
def test_a_number_of_classes_that_is_no_number_is_rejected(server, top):
    status, content = server.predict(digit(7), query=f"?top={quote(top)}")
    assert status == 400 and "positive integer" in content["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_cannot_post(server, headers):
    status, content = server.request("POST", "/predict", digit(7), {"Content-Type": "image/png", **headers})
    assert status == 403 and b"cross-origin" in content


def test_the_page_of_the_server_can_post(server):
    host = f"127.0.0.1:{server.port}"
    headers = {"Content-Type": "image/png", "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin", "Host": host}
    assert server.request("POST", "/predict", digit(7), headers)[0] == 200


def tiff_with_a_huge_tile(side=23_168):
    """A TIFF of 64 x 64 pixels stored in one tile of half a gigabyte."""
    tile = zlib.compress(bytes(side * side), 9)
    tags = [
        (256, 64),
        (257, 64),
        (258, 8),
        (259, 8),
        (262, 1),
        (277, 1),
        (322, side),
        (323, side),
        (324, 0),
        (325, len(tile)),
    ]
    size = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, size if tag == 324 else value) for tag, value in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + tile


def jpeg_with_many_scans(count=20_000, side=3000):
    """A progressive JPEG whose last scan is repeated: little data, a pass over the whole image for each scan."""
    file = io.BytesIO()
    Image.new("L", (side, side), 90).save(file, "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:]


@pytest.mark.parametrize("make", [tiff_with_a_huge_tile, jpeg_with_many_scans])
def test_an_image_that_needs_too_much_memory_or_time_is_rejected_and_the_next_one_is_served(digits_run, make):
    body = make()
    running = Serving(digits_run)
    before = running.memory_mb()
    status, content = running.predict(body, "application/octet-stream")
    assert status in (400, 413), content
    assert running.memory_mb() < before + 100
    assert running.predict(digit(7))[1]["predictions"][0]["label"] == "7"
    assert running.stop() == 0


def test_a_signal_stops_the_server_while_an_image_is_being_decoded(digits_run):
    running = Serving(digits_run)
    client = threading.Thread(target=running.predict, args=(jpeg_with_many_scans(), "image/jpeg"), daemon=True)
    client.start()
    time.sleep(1)
    assert running.stop() == 0
    client.join()


def test_a_thousand_idle_connections_do_no_harm(server):
    server.predict(digit(7))
    before = server.memory_mb()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    try:
        for _ in range(5):
            assert server.predict(digit(7))[0] == 200
        assert server.memory_mb() < before + 64
    finally:
        for connection in idle:
            connection.close()


def served_version(server):
    """The checkpoint that is served. On a busy machine a request can be too slow for the server, so it is repeated."""
    for _ in range(20):
        status, content = server.predict(digit(7))
        if status == 200:
            break
    assert status == 200, content
    return content["version"]


def test_a_better_checkpoint_is_served_and_a_broken_one_is_not(server):
    checkpoints = server.run / "checkpoints"
    version = served_version(server)
    other = next(path for path in sorted(checkpoints.glob("step-*")) if path.name != version)
    (checkpoints / "best.txt").write_text(other.name + "\n")
    end = time.monotonic() + 120
    while served_version(server) != other.name:
        assert time.monotonic() < end, "the new checkpoint is not served"
        time.sleep(0.1)
    diverged = checkpoints / f"step-{99:09d}"
    snapshot = load(other)
    snapshot.tensors["model"] = {name: tensor * float("nan") for name, tensor in snapshot.tensors["model"].items()}
    Store(checkpoints, keep=99).save(replace(snapshot, state={**snapshot.state, "step": 99}))
    (checkpoints / "best.txt").write_text(diverged.name + "\n")
    while not any("not finite" in line for line in server.lines):
        assert time.monotonic() < end, "the diverged checkpoint is not reported"
        time.sleep(0.1)
    assert served_version(server) == other.name
    (checkpoints / "best.txt").write_text("nonsense\n")
    while not any("still serving" in line for line in server.lines):
        assert time.monotonic() < end, "the failed reload is not reported"
        time.sleep(0.1)
    assert served_version(server) == other.name


def test_a_signal_under_load_loses_no_request(digits_run):
    running = Serving(digits_run)
    lost, completed, body = [], [], digit(7)
    stop = threading.Event()

    def client():
        connection = HTTPConnection("127.0.0.1", running.port, timeout=30)
        while not stop.is_set():
            try:
                if connection.sock is None:
                    connection.connect()
            except OSError:
                return  # the server no longer listens
            try:
                connection.request("POST", "/predict?top=1", body, {"Content-Type": "image/png"})
                response = connection.getresponse()
                completed.append((response.status, response.read()))
                if response.getheader("Connection") == "close":
                    connection.close()
            except OSError as error:
                lost.append(error)
                return

    threads = [threading.Thread(target=client) for _ in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    before = len(completed)
    code = running.stop()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert code == 0 and before > 20 and len(completed) > before
    assert not lost
    assert {status for status, _ in completed} == {200}


def test_a_token_is_required_if_one_is_set(digits_run):
    running = Serving(digits_run, "--token", "open-sesame")
    try:
        assert running.request("GET", "/healthz")[0] == 200
        assert running.predict(digit(7))[0] == 401
        for token, status in (("open-sesame", 200), ("open-sesam", 401), ("", 401)):
            for path in ("/models", "/samples"):
                assert running.request("GET", path, headers={"Authorization": f"Bearer {token}"})[0] == status
    finally:
        assert running.stop() == 0


def test_small_and_large_images_get_the_same_prediction(server):
    """A small image is decoded in the event loop, a large one in a thread."""
    small = Image.open(io.BytesIO(digit(7)))
    large = small.resize((28 * 40, 28 * 40), Image.Resampling.NEAREST)
    labels = [server.predict(png(np.array(image)))[1]["predictions"][0]["label"] for image in (small, large)]
    assert labels == ["7", "7"]
    assert server.predict(png(np.zeros((70, 70), np.uint8)))[0] == 200, "more pixels than are decoded in the event loop"


class Bands:
    """Bytes [16, 16, C]; the upper half is bright in one class."""

    classes = ("low", "high")

    def __init__(self, channels):
        self.channels = channels

    def __len__(self):
        return 8

    def __getitem__(self, index):
        image = np.full((16, 16, self.channels), 40, np.uint8)
        image[:8] += np.uint8(150 * (index % 2))
        return image, index % 2


def npy(pixels):
    file = io.BytesIO()
    np.save(file, pixels)
    return file.getvalue()


def test_images_of_4_and_13_channels_are_classified_over_http(tmp_path):
    options = {"iterations": 2, "batch_size": 4, "threads": 1, "report": False, "curves": False}
    runs = {}
    for count in (4, 13):
        runs[count] = convolve.train(
            (Bands(count), Bands(count)), "resnet20-cifar", run_dir=tmp_path / str(count), **options
        )
    running = Serving(*(f"bands{count}={run.path}" for count, run in runs.items()))
    try:
        for count, run in runs.items():
            pixels, query = Bands(count)[3][0], f"?model=bands{count}"
            larger = np.repeat(np.repeat(pixels, 2, 0), 2, 1)
            for image in (pixels, larger):
                status, found = running.predict(npy(image), "application/octet-stream", query)
                expected = run.load().predict(image)
                assert status == 200 and found["predictions"][0]["label"] == expected.label
                assert found["predictions"][0]["probability"] == pytest.approx(expected.probability, abs=1e-4)
            status, found = running.predict(npy(pixels[..., :2].copy()), "application/octet-stream", query)
            assert status in (400, 415, 422) and f"2 channels; the model takes {count}" in json.dumps(found)
        status, found = running.predict(png(Bands(4)[3][0]), "image/png", "?model=bands4")
        assert status == 200 and found["predictions"][0]["label"] == runs[4].load().predict(Bands(4)[3][0]).label
        status, found = running.predict(digit(7), "image/png", "?model=bands13")
        assert status in (400, 415, 422) and "1 channels; the model takes 13, give them as npy" in json.dumps(found)
    finally:
        assert running.stop() == 0
