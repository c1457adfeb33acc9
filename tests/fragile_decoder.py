"""A decoder for a sandbox, which dies of images named "die"."""

import os

from convolve.inference.decoding import decode_inputs


def decode_or_die(payload: bytes) -> bytes:
    if b'"die"' in payload:
        os._exit(1)
    return decode_inputs(payload)
