"""The HTTP application: right answers, right refusals, whatever a client sends."""

import base64
import io
import json
import re
import shutil
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection

import numpy as np
import pytest
from PIL import Image

from convolve.data.lookup import load_digits
from convolve.errors import ConfigError
from convolve.loggers.base import SilentConsole
from convolve.serving.server import ServeOptions, check, parse_named, serve
from forked_commands import Running

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
    """A server in a process of its own."""

    def __init__(self, *words):
        super().__init__("serve", *words, "--port", "0", "--threads", "1")
        self.lines = []
        for line in self.stdout:
            self.lines.append(line)
            if found := re.search(r"http://\S+:(\d+)/", line):
                self.port = int(found[1])
                break
        self._listener = threading.Thread(target=lambda: self.lines.extend(self.stdout), daemon=True)
        self._listener.start()

    def ask(self, method, path, body=None, headers=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            # A refused body is not read to its end: the answer is there though the sending broke off.
            with suppress(BrokenPipeError):
                connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def predict(self, body, kind="image/png", query=""):
        status, answer = self.ask("POST", f"/predict{query}", body, {"Content-Type": kind})
        return status, json.loads(answer)

    def memory_mb(self):
        with open(f"/proc/{self.pid}/status") as file:
            return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024

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


def test_a_picture_gets_its_class_in_every_way_of_sending_it(server):
    plain, form = digit(7), b""
    for name in ("../../etc/passwd", "b.png"):
        form += b'--xx\r\nContent-Disposition: form-data; name="p"; filename="' + name.encode() + b'"\r\n\r\n'
        form += plain + b"\r\n"
    text = base64.b64encode(plain).decode()
    answers = [
        server.predict(plain),
        server.predict(plain, "application/octet-stream"),
        server.predict(form + b"--xx--\r\n", "multipart/form-data; boundary=xx"),
        server.predict(json.dumps({"image": text}), "application/json"),
        server.predict(json.dumps({"images": [f"data:image/png;base64,{text}"]}), "application/json"),
    ]
    for status, answer in answers:
        assert status == 200, answer
        assert [one["label"] for one in answer["predictions"]] == ["7"] * len(answer["predictions"])
    assert [one["name"] for one in answers[2][1]["predictions"]] == ["passwd", "b.png"]
    shares = answers[0][1]["predictions"][0]["probabilities"]
    assert len(shares) == 10 and sum(shares.values()) == pytest.approx(1, abs=1e-5)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


def test_input_and_explanation_come_back_as_pictures(server):
    _, answer = server.predict(digit(3), query="?input=1&explain=1&top=2&model=again")
    (one,) = answer["predictions"]
    assert answer["model"] == "again" and len(one["probabilities"]) == 2
    for key in ("input", "explanation"):
        with Image.open(io.BytesIO(base64.b64decode(one[key].partition(",")[2]))) as picture:
            assert picture.size == (224, 224)


def huge_png():
    file = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("body", "kind", "query", "status", "reason"),
    [
        (b"not a picture", "image/png", "", 400, "not an image of a known format"),
        (b"", "image/png", "", 400, "no picture"),
        (b"x", "text/html", "", 415, "content type text/html"),
        (b"x", "", "", 415, "content type missing"),
        (b"{", "application/json", "", 400, "not JSON"),
        (b"[" * 100_000, "application/json", "", 400, "not JSON"),
        (b"NaN", "application/json", "", 400, "must be an object"),
        (b'{"image": "http://localhost/x.png"}', "application/json", "", 400, "not fetched"),
        (b'{"image": "/etc/passwd"}', "application/json", "", 400, "paths are not fetched"),
        (b'{"images": [1]}', "application/json", "", 400, "JSON needs"),
        (b"x", "multipart/form-data", "", 400, "without a boundary"),
        (b"x", "multipart/form-data; boundary=yy", "", 400, "closing boundary"),
        (b"--yy\r\n\r\n--yy--", "multipart/form-data; boundary=yy", "", 400, "no head"),
        (digit(1), "image/png", "?model=none", 404, "no model has that name"),
        (digit(1), "image/png", "?top=many", 400, "top must be"),
        (b"x" * 2_000_000, "image/png", "", 413, "at most 1048576"),
        (huge_png(), "image/png", "", 413, "more than the 25000000 pixels"),
        (json.dumps({"images": ["aGk="] * 65}).encode(), "application/json", "", 413, "at most 64"),
    ],
    ids=lambda value: str(value)[:24] if not isinstance(value, bytes) else str(len(value)),
)  # fmt: skip
def test_what_is_wrong_is_refused_with_a_reason(server, body, kind, query, status, reason):
    found, answer = server.predict(body, kind, query)
    assert found == status
    assert reason in answer["error"]


def test_one_broken_picture_among_good_ones_is_named(server):
    texts = [base64.b64encode(data).decode() for data in (digit(1), b"broken", digit(7))]
    status, answer = server.predict(json.dumps({"images": texts}), "application/json")
    assert status == 200
    assert [("error" in one, one.get("label")) for one in answer["predictions"]] == [
        (False, answer["predictions"][0]["label"]),
        (True, None),
        (False, "7"),
    ]


def test_the_other_addresses_answer(server):
    assert server.ask("GET", "/healthz") == (200, b"ok\n")
    assert server.ask("GET", "/readyz") == (200, b"ready\n")
    _, models = server.ask("GET", "/models")
    assert [one["name"] for one in json.loads(models)["models"]] == ["digits-1", "again"]
    _, description = server.ask("GET", "/openapi.json")
    assert set(json.loads(description)["paths"]) >= {"/predict", "/healthz", "/readyz", "/metrics", "/models"}
    _, text = server.ask("GET", "/metrics")
    assert b'convolve_requests_total{path="/healthz",status="200"}' in text
    for page, mark in (("/", b"Draw a digit"), ("/runs", b"Training runs"), ("/page/page.js", b"predict")):
        status, body = server.ask("GET", page)
        assert status == 200 and mark in body
    status, found = server.ask("GET", "/runs.json")
    assert status == 200 and json.loads(found)["run"]["curves"]["validation_accuracy"]
    assert server.ask("GET", "/runs.json?run=../..")[0] == 404
    assert server.ask("GET", "/page/../../../etc/passwd")[0] == 404
    assert server.ask("GET", "/predict")[0] == 405


def test_a_foreign_host_name_is_refused(server):
    assert server.ask("GET", "/models", headers={"Host": "evil.example"})[0] == 403
    assert server.ask("GET", "/models", headers={"Host": "localhost:1"})[0] == 200


def drip(port, head, pieces, pause):
    """Send a request slowly; returns the first line of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(head)
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        except OSError:
            pass
        return connection.recv(4096).split(b"\r\n")[0]


def test_slow_and_endless_bodies_are_ended(server):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
    began = time.perf_counter()
    slow = drip(server.port, head + b"Content-Length: 1000\r\n\r\n", [b"x"] * 25, 0.1)
    assert b"408" in slow and time.perf_counter() - began < 10
    chunk = b"10000\r\n" + b"-" * 65536 + b"\r\n"
    form = head.replace(b"image/png", b"multipart/form-data; boundary=x") + b"Transfer-Encoding: chunked\r\n\r\n"
    assert b"413" in drip(server.port, form, [chunk] * 40, 0)
    assert server.predict(digit(7))[1]["predictions"][0]["label"] == "7"


def test_a_thousand_idle_connections_hurt_nobody(server):
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


def test_a_better_checkpoint_goes_into_service(server):
    checkpoints = server.run / "checkpoints"
    _, answer = server.predict(digit(7))
    paths = sorted(checkpoints.glob("step-*"))
    other = next(path for path in paths if path.name != answer["version"])
    (checkpoints / "best.txt").write_text(other.name + "\n")
    end = time.monotonic() + 20
    while server.predict(digit(7))[1]["version"] != other.name:
        assert time.monotonic() < end, "the new checkpoint did not go into service"
        time.sleep(0.1)
    (checkpoints / "best.txt").write_text("nonsense\n")
    time.sleep(1)
    assert server.predict(digit(7))[1]["version"] == other.name
    assert any("stays in service" in line for line in server.lines)


def test_a_signal_under_load_loses_no_request(digits_run):
    running = Serving(digits_run)
    lost, answered, body = [], [], digit(7)
    stop = threading.Event()

    def client():
        connection = HTTPConnection("127.0.0.1", running.port, timeout=30)
        while not stop.is_set():
            try:
                if connection.sock is None:
                    connection.connect()
            except OSError:
                return  # nobody listens any more
            try:
                connection.request("POST", "/predict?top=1", body, {"Content-Type": "image/png"})
                response = connection.getresponse()
                answered.append((response.status, response.read()))
                if response.getheader("Connection") == "close":
                    connection.close()
            except OSError as error:
                lost.append(error)
                return

    threads = [threading.Thread(target=client) for _ in range(12)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    before = len(answered)
    code = running.stop()
    stop.set()
    for thread in threads:
        thread.join(30)
    assert code == 0 and before > 20 and len(answered) > before
    assert not lost
    assert {status for status, _ in answered} == {200}


def test_beyond_this_machine_a_token_is_needed(digits_run):
    with pytest.raises(ConfigError, match="others could reach the server; give --token"):
        serve([str(digits_run)], ServeOptions(host="0.0.0.0"), SilentConsole())
    running = Serving(digits_run, "--token", "open-sesame")
    try:
        assert running.ask("GET", "/healthz")[0] == 200
        assert running.predict(digit(7))[0] == 401
        for word, status in (("open-sesame", 200), ("open-sesam", 401), ("", 401)):
            assert running.ask("GET", "/models", headers={"Authorization": f"Bearer {word}"})[0] == status
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"token": "short"}, "8 characters or more"),
        ({"port": 70000}, "must be 0 to 65535"),
        ({"queue": 0}, "--queue 0: must be greater than 0"),
        ({"max_delay_ms": -1}, "must be 0 or more"),
    ],
)
def test_impossible_options_are_one_line(options, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check(ServeOptions(**options))


def test_models_get_names():
    assert list(parse_named(["a=x", "runs/b-1", "runs/c/checkpoints/step-000000001"])) == ["a", "b-1", "c"]
    for words in (["a=x", "a=y"], ["a b=x"]):
        with pytest.raises(ConfigError, match="model name"):
            parse_named(words)


def test_small_and_large_pictures_get_the_same_answer(server):
    """Small ones are decoded where they arrive, large ones in a thread."""
    small = Image.open(io.BytesIO(digit(7)))
    large = small.resize((28 * 40, 28 * 40), Image.Resampling.NEAREST)
    answers = [server.predict(png(np.array(picture)))[1]["predictions"][0]["label"] for picture in (small, large)]
    assert answers == ["7", "7"]
    assert server.predict(png(np.zeros((70, 70), np.uint8)))[0] == 200, "more pixels than are decoded at once"
