"""Counters and histograms in the Prometheus text format."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from convolve.inference.engines.base import Engine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Cumulative histogram with fixed bounds, and the sum of all values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the text format."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{"+Inf" if bound == float("inf") else format(bound, "g")}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        self._requests: dict[Labels, int] = defaultdict(int)
        self._images: dict[Labels, int] = defaultdict(int)
        self.latency = Histogram(SECONDS)
        self.batches = Histogram(SIZES)
        self.accepted = 0
        self.reloads = 0

    def count_response(self, path: str, status: int, seconds: float) -> None:
        """Count a response and, for /predict, its latency."""
        self._requests[(("path", path), ("status", str(status)))] += 1
        if path == "/predict":
            self.latency.observe(seconds)

    def count_images(self, model: str, images: int) -> None:
        self._images[(("model", model),)] += images

    def render(self, gauges: dict[str, float], engines: Mapping[str, Engine]) -> str:
        """Return all metrics as text; `gauges` are current values, `engines` those of the models by name."""
        lines = []
        for name, description, series in (
            ("convolve_requests_total", "responses by path and status", self._requests),
            ("convolve_images_total", "images classified by model", self._images),
        ):
            lines += [f"# HELP {name} {description}", f"# TYPE {name} counter"]
            lines += [f"{name}{_render_labels(labels)} {value}" for labels, value in sorted(series.items())]
        for name, count in (("accepted", self.accepted), ("reloads", self.reloads)):
            lines += [f"# TYPE convolve_{name}_total counter", f"convolve_{name}_total {count}"]
        for name, histogram in (("latency_seconds", self.latency), ("batch_images", self.batches)):
            lines += [f"# TYPE convolve_{name} histogram", *histogram.lines(f"convolve_{name}")]
        for name, value in gauges.items():
            lines += [f"# TYPE convolve_{name} gauge", f"convolve_{name} {value:g}"]
        lines += ["# HELP convolve_engine_info inference engine by model", "# TYPE convolve_engine_info gauge"]
        for model, engine in engines.items():
            labels = (("model", model), ("engine", engine.name), ("version", engine.version))
            lines.append(f"convolve_engine_info{_render_labels(labels)} 1")
        return "\n".join(lines) + "\n"


def _render_labels(labels: Labels) -> str:
    inner = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
    return f"{{{inner}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
