"""A decoder for a sandbox, which dies of images named "die" and sleeps at those named "sleep"."""

import os
import time

from convolve.inference.decoding import decode_inputs


def decode_or_die(payload: bytes) -> bytes:
    if b'"die"' in payload:
        os._exit(1)
    if b'"sleep"' in payload:
        time.sleep(30)
    return decode_inputs(payload)
