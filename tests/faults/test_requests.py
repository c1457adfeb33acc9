"""A server that gets thousands of mutated requests answers each with a status, and still classifies afterward."""

import base64
import io
import json
import os
import random
import re
import socket

import numpy as np
import pytest
from PIL import Image

from forked_commands import Running
from mutations import mutate

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")

ROUNDS = 2000 if "FAULTS_COMPLETE" in os.environ else 60


@pytest.fixture(scope="module")
def server(digits_run):
    running = Running("serve", digits_run, "--port", "0", "--threads", "1", "--engine", "torch", "--body-seconds", "2")
    port = next(int(match[1]) for line in running.stdout if (match := re.search(r"http://\S+:(\d+)/", line)))
    yield port
    assert running.stop() == 0
    rest = running.stdout.read()
    assert "Traceback" not in rest and "internal error" not in rest, rest[-2000:]
    running.stdout.close()


def png():
    file = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(file, "PNG")
    return file.getvalue()


def requests():
    """Return valid requests of every form: (head, body)."""
    image = png()
    form = b'--xx\r\nContent-Disposition: form-data; name="p"; filename="a.png"\r\n\r\n' + image + b"\r\n--xx--\r\n"
    text = json.dumps({"image": base64.b64encode(image).decode(), "top": 2}).encode()
    bodies = [("image/png", image), ("multipart/form-data; boundary=xx", form), ("application/json", text)]
    heads = [(f"POST /predict?top=3&explain=1 HTTP/1.1\r\nContent-Type: {kind}", body) for kind, body in bodies]
    return [*heads, ("GET /healthz HTTP/1.1", b""), ("GET /metrics HTTP/1.1", b""), ("GET / HTTP/1.1", b"")]


def send(port, data, *, give_up=60):
    """Return the status of the response; None if there is none, or the server waits for the rest of the request."""
    with socket.create_connection(("127.0.0.1", port), timeout=give_up) as connection:
        try:
            connection.sendall(data)
            response = connection.recv(1 << 16)
        except (ConnectionError, TimeoutError):
            return None
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", response)
    return int(match[1]) if match else None


def pack(head, body, length):
    return f"{head}\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


def test_mutated_requests_get_a_status_below_500_and_the_server_survives(server, counted):
    draw, valid = random.Random(5), requests()
    statuses = set()
    for number in counted.each("hostile request", range(ROUNDS)):
        head, body = draw.choice(valid)
        if number % 2:
            changed = mutate(body, draw)
            data = pack(head, changed, draw.choice([len(changed), len(changed), len(body), "-1", "9" * 40, "0x10"]))
        else:
            data = mutate(pack(head, body, len(body)), draw)
        status = send(server, data, give_up=0.5)
        statuses.add(status)
        assert status is None or status < 500, (status, data[:300])
    assert {200, 400} <= statuses
    for head, body in valid:
        assert send(server, pack(head, body, len(body))) == 200
