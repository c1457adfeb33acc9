"""Engines are verified before use, `auto` takes the fastest and remembers it, and a wrong engine is never used."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from convolve.errors import ConfigError, ConvolveError, ExtraError
from convolve.inference.engines import base, choice, factory
from convolve.inference.engines.factory import EngineSet, open_engine
from convolve.inference.engines.probe import TOLERANCE, compare, sample_pixels


@dataclass
class LinearEngine:
    """Logits are sums over the halves of an image, times `gain`."""

    name: str
    gain: float = 1.0
    version: str = "1"
    calls: list = field(default_factory=list)

    def run(self, pixels):
        self.calls.append(len(pixels))
        return np.float32(self.gain) * pixels.reshape(len(pixels), 2, -1).sum(axis=2, dtype=np.float32)


@dataclass
class Source:
    """A model whose onnxruntime engine may be wrong or broken."""

    gain: float = 1.0
    fails: bool = False
    label: str = "linear"
    threads: int = 1
    shape: tuple = (1, 4, 4)
    tolerance: float = TOLERANCE
    names: tuple = ("torch", "onnxruntime")
    quick_names: tuple = ("torch", "onnxruntime")
    structure: str = "linear 4 4"

    def reference(self):
        return LinearEngine("torch").run

    def open(self, name, batch_size):
        if name == "onnxruntime" and self.fails:
            raise RuntimeError("no kernel\nfor Resize")
        return LinearEngine(name, self.gain if name == "onnxruntime" else 1.0)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(factory, "measure", measure_names)


def measure_names(engines, pixels, *, seconds):
    """Stand in for the clock: later engines are faster."""
    rates = {name: 1000.0 * number for number, name in enumerate(engines, 1)}
    return choice.Choice(max(rates, key=rates.get), rates)


def test_an_engine_is_used_by_name_after_its_logits_matched():
    lines = []
    engine = open_engine("onnxruntime", Source(gain=1 + TOLERANCE / 10), lines.append, (4,))
    assert engine.name == "onnxruntime" and engine.calls == [1, 2, 7]
    assert lines == ["engine onnxruntime 1, 1 thread"]


@pytest.mark.parametrize("gain", [1.01, -1.0, float("nan"), float("inf")])
def test_a_wrong_engine_is_rejected_in_one_line(gain):
    with pytest.raises(ConvolveError, match=r"^--engine onnxruntime: logits of linear differ.*use --engine torch$"):
        open_engine("onnxruntime", Source(gain=gain), print)


def test_a_failing_engine_is_rejected_in_one_line():
    with pytest.raises(ConvolveError, match=r"^--engine onnxruntime: cannot run linear \(RuntimeError: no kernel"):
        open_engine("onnxruntime", Source(fails=True), print)


@pytest.mark.parametrize("source", [Source(gain=1.01), Source(fails=True)], ids=["wrong", "failing"])
def test_auto_logs_a_rejected_engine_and_skips_it(source):
    lines = []
    engine = open_engine("auto", source, lines.append, (4,))
    assert engine.name == "torch"
    assert lines[0].startswith("engine onnxruntime: skipped (--engine onnxruntime: ")
    assert lines[1] == "engine torch 1 at batch size 4, 1 thread: 1,000 images/s"


def test_an_incomplete_measurement_is_not_remembered():
    open_engine("auto", Source(fails=True), print, (4,))
    lines = []
    assert open_engine("auto", Source(), lines.append, (4,)).name == "onnxruntime"
    assert lines == ["engine onnxruntime 1 at batch size 4, 1 thread: 2,000 images/s (torch 1,000)"]


def test_auto_measures_once_for_a_model_batch_size_and_thread_count(monkeypatch):
    assert open_engine("auto", Source(), print, (4,)).name == "onnxruntime"
    monkeypatch.setattr(factory, "measure", lambda *engines, seconds: pytest.fail("measured again"))
    lines = []
    assert open_engine("auto", Source(), lines.append, (4,)).name == "onnxruntime"
    assert lines[0].endswith("(torch 1,000, measured earlier)")
    for other, size in ((Source(threads=2), 4), (Source(structure="other"), 4), (Source(), 8)):
        with pytest.raises(pytest.fail.Exception, match="measured again"):
            open_engine("auto", other, print, (size,))


def test_a_remembered_engine_is_verified_again():
    open_engine("auto", Source(), print, (4,))
    lines = []
    assert open_engine("auto", Source(gain=1.01), lines.append, (4,)).name == "torch"
    assert "skipped" in lines[0]


def test_auto_chooses_for_each_batch_size(monkeypatch):
    monkeypatch.setattr(factory, "measure", lambda engines, pixels, *, seconds: measure_by_size(len(pixels)))
    engine = open_engine("auto", Source(), print, (1, 64))
    assert isinstance(engine, EngineSet) and list(engine.engines) == [1, 64]
    for size in (1, 7, 9, 200):
        engine.run(np.zeros((size, 4, 4, 1), np.uint8))
    assert engine.engines[1].calls[-2:] == [1, 7] and engine.engines[64].calls[-2:] == [9, 200]
    assert (engine.name, engine.version) == ("torch, onnxruntime", "1, 1")


class CompiledEngine:
    """Returns the first byte of each image, and records its batch sizes."""

    name, version = "openvino", "1"

    def __init__(self):
        self.calls = []

    def run(self, pixels):
        self.calls.append(len(pixels))
        return pixels[:, 0, 0, :].astype(np.float32)


def test_auto_does_not_measure_large_batches_of_a_slow_model(monkeypatch):
    """They would delay the start by seconds; larger batches run with the engine of the largest size measured."""
    sizes = []

    def measure_slowly(engines, pixels, *, seconds):
        sizes.append(len(pixels))
        return choice.Choice("onnxruntime", dict.fromkeys(engines, 100.0))

    monkeypatch.setattr(factory, "measure", measure_slowly)
    lines = []
    engine = open_engine("auto", Source(), lines.append, (1, 8, 64), longest_seconds=0.1)
    assert sizes == [1, 8]
    assert lines[-1] == "engine at batch size 64: as at 8, not measured (about 0.6 s a batch)"
    assert len(engine.run(sample_pixels(4, 4, 1, 64))) == 64
    open_engine("auto", Source(structure="other"), print, (1, 8, 64))
    assert sizes == [1, 8, 1, 8, 64]


@pytest.mark.parametrize(
    ("count", "calls"),
    [(0, {1: [0]}), (3, {1: [1, 1, 1]}), (8, {8: [8]}), (19, {1: [1, 1, 1], 8: [8, 8]}), (70, {1: [1] * 6, 64: [64]})],
)
def test_engines_that_are_compiled_for_a_size_run_other_batches_in_pieces(count, calls):
    engines = {size: CompiledEngine() for size in (1, 8, 64)}
    pixels = np.arange(count, dtype=np.uint8).reshape(count, 1, 1, 1)
    assert EngineSet(engines).run(pixels)[:, 0].tolist() == list(range(count))
    assert {size: engine.calls for size, engine in engines.items() if engine.calls} == calls


def measure_by_size(size):
    """Stand in for the clock: torch is faster for one image, onnxruntime for batches."""
    name = "torch" if size == 1 else "onnxruntime"
    return choice.Choice(name, {name: 1000.0})


def test_an_engine_for_any_batch_size_is_opened_and_verified_once():
    engine = open_engine("auto", Source(), print, (1, 64))
    assert engine.name == "onnxruntime" and engine.calls == [1, 2, 7]


def test_an_engine_is_verified_at_the_batch_size_that_it_is_compiled_for(monkeypatch):
    monkeypatch.setattr(factory, "COMPILED_FOR_SIZE", ("onnxruntime",))
    assert open_engine("onnxruntime", Source(), print, (64,)).calls == [1, 2, 7, 64]


def test_auto_does_not_measure_for_a_few_images(monkeypatch):
    monkeypatch.setattr(factory, "measure", lambda *engines, seconds: pytest.fail("measured"))
    assert open_engine("auto", Source(), print, expected_images=5).name == "torch"
    monkeypatch.setattr(factory, "PAYOFF_SECONDS", 0.0)
    with pytest.raises(pytest.fail.Exception, match="measured"):
        open_engine("auto", Source(), print, expected_images=5)


def test_an_unknown_engine_is_rejected_with_a_suggestion():
    with pytest.raises(ConfigError, match="--engine onnxrt: unknown engine; .*onnxruntime"):
        open_engine("onnxrt", Source(), print)
    with pytest.raises(ConfigError, match="--engine aoti: cannot run linear; "):
        open_engine("aoti", Source(), print)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    for name, extra in (("openvino", "openvino"), ("onnxruntime", "export")):
        with pytest.raises(ExtraError, match=rf"--engine {name} needs .*pip install 'convolve\[{extra}\]'"):
            open_engine(name, Source(), print)
    lines = []
    assert open_engine("auto", Source(), lines.append, (4,)).name == "torch" and len(lines) == 1


def test_probe_images_differ_and_a_wrong_shape_is_an_error():
    pixels = sample_pixels(4, 4, 1)
    assert len({image.tobytes() for image in pixels}) == len(pixels) == 10
    with pytest.raises(ConvolveError, match="output has shape"):
        compare(lambda batch: np.zeros((1, 2), np.float32), LinearEngine("torch").run, pixels)
