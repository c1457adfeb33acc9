"""Resizing: the written arithmetic, torch and native code, with and without vectors, give the same bytes."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from convolve.kernels import build
from convolve.kernels.resize import ResizeJob, bind, load, plan_axis, resize, resize_by_torch
from forked_commands import FORKS

SIZES = [
    ((1, 1), (5, 7)),
    ((3, 2), (1, 1)),
    ((17, 40), (24, 24)),
    ((64, 64), (64, 64)),
    ((61, 64), (64, 31)),
    ((100, 33), (32, 34)),
    ((224, 150), (224, 224)),
    ((257, 511), (128, 130)),
    ((700, 900), (32, 32)),
]


def make_image(size, seed=0):
    """Noise between pixels that are black or white, inside a larger image, which leaves gaps between rows."""
    chance = np.random.default_rng([*size, seed])
    pixels = chance.integers(0, 256, (size[0] + 2, size[1] + 5, 3), np.uint8)
    extremes = chance.integers(0, 2, pixels.shape, np.uint8) * 255
    return np.where(chance.random(pixels.shape) < 0.5, pixels, extremes).astype(np.uint8)[1:-1, 3:-2]


def native_forms():
    libraries = [build.load("resize.c", options) for options in ((), ("-DPLAIN",), ("-O0", "-DPLAIN"))]
    if isinstance(libraries[0], build.Unavailable):
        pytest.skip(libraries[0].reason)
    return [bind(library) for library in libraries]


def done(form, pixels, size, flip):
    """The result, and proof that nothing beside the target was touched."""
    around = torch.full((3, *size, 3), 77, dtype=torch.uint8)
    form([ResizeJob(pixels, around[1], flip)])
    assert (around[0] == 77).all() and (around[2] == 77).all()
    return around[1].clone()


def resize_as_written(pixels, size, flip):
    """The arithmetic of the module's first lines, in whole numbers."""
    for axis, mirrored in ((1, flip), (0, False)):
        plan = plan_axis(pixels.shape[axis], size[axis], mirrored=mirrored)
        matrix = np.zeros((size[axis], pixels.shape[axis] + plan.weights.shape[1]), np.int64)
        np.put_along_axis(matrix, plan.first[:, None] + np.arange(plan.weights.shape[1]), plan.weights, 1)
        sums = np.tensordot(matrix[:, : pixels.shape[axis]], pixels.astype(np.int64), (1, axis))
        sums = np.moveaxis(sums + (1 << (plan.bits - 1)), 0, axis)
        pixels = np.minimum(sums >> plan.bits, 255)
    return torch.from_numpy(pixels.astype(np.uint8))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("size", "target"), SIZES)
def test_all_forms_have_the_bytes_of_the_written_arithmetic(size, target, flip):
    pixels = make_image(size)
    expected = resize_as_written(pixels, target, flip)
    for form in (resize_by_torch, *native_forms()):
        assert torch.equal(done(form, pixels, target, flip), expected)


def test_native_code_equals_torch_on_random_sizes():
    chance = np.random.default_rng(0)
    for number in range(150):
        size = tuple(int(side) for side in chance.integers(1, 400, 2))
        target = tuple(int(side) for side in chance.choice((24, 32, 37, 96, 128, 224), 2))
        pixels, flip = make_image(size, number), bool(number & 1)
        expected = done(resize_by_torch, pixels, target, flip)
        assert all(torch.equal(done(form, pixels, target, flip), expected) for form in native_forms()), (size, target)


def test_a_batch_of_images_equals_each_image_alone():
    pixels = [make_image((20 + number, 50 - number)) for number in range(9)]
    targets = torch.zeros((9, 24, 24, 3), dtype=torch.uint8)
    resize(
        [
            ResizeJob(one, target, number % 2 == 0)
            for number, (one, target) in enumerate(zip(pixels, targets, strict=True))
        ]
    )
    for number, (one, target) in enumerate(zip(pixels, targets, strict=True)):
        assert torch.equal(target, done(resize_by_torch, one, (24, 24), number % 2 == 0))


def test_a_constant_image_stays_constant_and_a_mirrored_one_is_mirrored():
    white = np.full((50, 60, 3), 255, np.uint8)
    assert (done(resize, white, (33, 77), False) == 255).all()
    pixels = make_image((40, 40))
    assert torch.equal(done(resize, pixels, (40, 40), False), torch.from_numpy(pixels.copy()))
    assert torch.equal(done(resize, pixels, (40, 40), True), torch.from_numpy(pixels[:, ::-1].copy()))


def test_weights_are_never_negative_and_sum_to_one():
    for inputs in (1, 2, 3, 31, 224, 225, 1000):
        for mirrored in (False, True):
            axis = plan_axis(inputs, 224, mirrored=mirrored)
            assert (axis.first >= 0).all() and (axis.first < inputs).all() and (axis.weights >= 0).all()
            assert axis.weights.max() < 1 << 15
            assert np.abs(axis.weights.sum(1) / (1 << axis.bits) - 1).max() < 1e-3


def digest_resized(native, settings):
    """Return a hash of downscaled images, computed in a new process with or without native code."""
    os.environ.update(settings)
    assert (load() is not None) == native
    pixels = np.random.default_rng(0).integers(0, 256, (3, 90, 70, 3), np.uint8)
    targets = torch.empty((3, 48, 48, 3), dtype=torch.uint8)
    resize([ResizeJob(one, target, True) for one, target in zip(pixels, targets, strict=True)])
    return hashlib.sha256(targets.numpy().tobytes()).hexdigest()


def test_neither_the_compiler_nor_the_vectors_of_torch_change_a_byte():
    """Torch chooses its vector instructions at import, so a new interpreter is needed."""
    native_forms()
    off = {"CONVOLVE_KERNEL": "torch"}
    with FORKS.Pool(2, maxtasksperchild=1) as pool:
        hashes = pool.starmap(digest_resized, [(True, {}), (False, off)], chunksize=1)
    words = [sys.executable, "-c", f"from {__name__} import digest_resized; print(digest_resized(False, {off}))"]
    given = {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(words, env={**os.environ, **given}, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert {*hashes, ended.stdout.strip()} == {hashes[0]}
