import asyncio

import numpy as np
import pytest

from convolve.serving.requests import BodyReader, Limits, RequestError, clean_name, parse_uploads


def test_a_rejected_body_frees_its_memory():
    reader, bodies = BodyReader(Limits(body_bytes=100)), []

    async def receive():
        return {"type": "http.request", "body": b"x" * 40, "more_body": True}

    async def read():
        return await reader.read(asyncio.current_task(), receive, None)

    with pytest.raises(RequestError) as caught:
        asyncio.run(read())
    trace = caught.value.__traceback__
    while trace is not None:
        bodies += [value for value in trace.tb_frame.f_locals.values() if isinstance(value, bytearray)]
        trace = trace.tb_next
    assert caught.value.status == 413
    assert reader.held == 0 and bodies and not any(bodies)


def test_client_file_names_become_labels():
    assert clean_name("../../etc/passwd") == "passwd"
    assert clean_name("C:\\x\\y\x00z.png") == "yz.png"
    assert clean_name("..") == ".." and clean_name("") == "image"


def test_random_bodies_are_rejected_with_a_status():
    random = np.random.default_rng(0)
    content_types = [
        "application/json",
        "multipart/form-data; boundary=a",
        "image/png",
        "",
        ";",
        "multipart/form-data; boundary=",
    ]
    for number in range(600):
        body = bytes(random.integers(0, 256, random.integers(0, 80), dtype=np.uint8))
        body += b'--a\r\n{"image"' * (number % 3)
        try:
            parse_uploads(body, content_types[number % len(content_types)], Limits())
        except RequestError as error:
            assert error.status in (400, 413, 415)
