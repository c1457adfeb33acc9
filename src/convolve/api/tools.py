"""Functions of the commands plan, align, doctor, convert, predict, serve, cache and validate --weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from convolve.api.progress import open_progress
from convolve.api.session import session
from convolve.cache import CacheEntry, find_entries, list_cache, remove_entries
from convolve.config.schema import Config
from convolve.errors import ConfigError
from convolve.loggers.base import Console

if TYPE_CHECKING:
    import signal

    from typing_extensions import Unpack

    from convolve.alignment.align import AlignPlan, AlignReport
    from convolve.api.run import Engines
    from convolve.checkpoint.convert import ConvertReport
    from convolve.doctor.machine import DoctorReport
    from convolve.inference.classifier import PredictReport
    from convolve.planning.plan import Hardware, Plan
    from convolve.runs.score import WeightsScore
    from convolve.serving.server import ServeOptions, ServerInfo


def plan(config: str | Path | Config, hardware: Hardware | None = None, *, timetable: str | Path | None = None) -> Plan:
    """Estimate memory, pipeline schedule and speed of a run without the hardware.

    Args:
        hardware: hosts and devices, a `convolve.planning.plan.Hardware` [this host].
        timetable: SVG file for a drawing of one step.
    """
    with session():
        from convolve.planning import plan as planning

        resolved = config if isinstance(config, Config) else Config.read(config)
        result, schedule = planning.plan(resolved, hardware or planning.Hardware())
        if timetable is not None:
            planning.write_schedule(result, schedule, Path(timetable))
        return result


def align(
    config: str | Path | Config | Sequence[Path],
    comparison: AlignPlan | None = None,
    *,
    output: str | Path = "align",
    progress: bool | Console | None = None,
) -> AlignReport:
    """Train one config in several number formats, or compare finished runs, and find where and why they diverge.

    Args:
        config: a config, or the folders of finished runs.
        comparison: policies, seeds and tolerances, a `convolve.alignment.align.AlignPlan`.
        output: folder of the report.
    """
    with session(), open_progress(progress) as console:
        from convolve.alignment import align as alignment

        chosen = comparison or alignment.AlignPlan()
        if isinstance(config, str | Path):
            config = Config.read(config)
        if isinstance(config, Config):
            return alignment.align(config, chosen, Path(output), console)
        return alignment.compare_runs(list(config), chosen, Path(output))


def doctor(
    *, device: str | None = None, seconds: float = 120.0, progress: bool | Console | None = False
) -> DoctorReport:
    """Check what works on this machine.

    Args:
        device: a device to test, or "auto": trains, restores, validates, communicates, compares with the CPU, measures.
        seconds: limit of the test.
    """
    with session(), open_progress(progress) as console:
        from convolve.doctor import machine

        report = machine.run(console)
        if device is None:
            return report
        from convolve.doctor import device_test

        return replace(report, device_test=device_test.run(device, console, seconds))


def convert(source: str | Path, target: str | Path) -> ConvertReport:
    """Convert a pickled state dict of another library to a safetensors file, in a sandbox."""
    from convolve.checkpoint.convert import convert as convert_file

    return convert_file(Path(source), Path(target))


def predict(
    run: str | Path,
    images: Sequence[str | Path],
    *,
    invert: bool | None = None,
    explain: str | Path | None = None,
    engine: Engines = "auto",
    progress: bool | Console | None = False,
) -> PredictReport:
    """Classify image files and folders of them. To classify images in memory, or repeatedly, use `convolve.load`.

    Args:
        run: run (its best checkpoint) or checkpoint folder, or exported ONNX file or OpenVINO IR.
        invert: for digits, True if the ink is darker than the paper [detected].
        explain: folder for images with heat maps.
    """
    with _session([run]), open_progress(progress) as console:
        from convolve.inference import classifier

        folder = None if explain is None else Path(explain)
        paths = [Path(image) for image in images]
        return classifier.predict(Path(run), paths, console, invert=invert, explain_dir=folder, engine=engine)


class ScoreOptions(TypedDict, total=False):
    """The options of `convolve.validate`, as in `train`."""

    model: str
    image_size: int | None
    normalization: str
    batch_size: int
    device: str
    threads: int | None
    weights_dir: str | Path | None
    weights_mirror: str | None


def validate(
    weights: str | Path,
    data_dir: str | Path | None = None,
    *,
    class_names: str | Path | None = None,
    progress: bool | Console | None = False,
    **options: Unpack[ScoreOptions],
) -> WeightsScore:
    """Compute the accuracy of weights on a folder of labeled images, without a run. For a run, use `Run.validate`.

    Args:
        weights: name of published weights, or a file of them; a file needs `model`.
        data_dir: folder with the images: its test or validation split, or all without splits.
        class_names: file with the name of each output [class folders in alphabetical order].
        options: those of `ScoreOptions`. The size of a batch does not change the result.
    """
    with session(), open_progress(progress) as console:
        from convolve.checkpoint.weights_table import find_info
        from convolve.config.loading import resolve
        from convolve.runs.score import score_weights

        given: dict[str, Any] = {**options, "weights": str(weights), "data_dir": data_dir}
        given["valid_batch_size"] = given.pop("batch_size", None)
        published = find_info(str(weights))
        if "model" not in given:
            if published is None:
                raise ConfigError(f"--weights {weights}: which model has these weights? add --model NAME")
            given["model"] = published.model
        names = None if class_names is None else Path(class_names)
        return score_weights(resolve(None, None, given).config, console, names)


def cache(*names: str, kind: str | None = None, remove: bool = False) -> list[CacheEntry]:
    """Return the entries of the cache, the most recently used first in each kind.

    Args:
        names: only entries with these names; all without names.
        kind: only entries of this kind, such as weights or datasets.
        remove: remove these entries.
    """
    entries = list_cache() if kind is None else list_cache([kind])
    if names:
        entries = find_entries(names, entries)
    if remove:
        remove_entries(entries)
    return entries


def _session(models: Sequence[str | Path]) -> AbstractContextManager[None]:
    """Return a session, which imports torch, unless all models are exported files, which do not need it."""
    from convolve.inference.exported import is_exported

    return nullcontext() if all(is_exported(Path(model)) for model in models) else session()


def serve(
    *runs: str | Path,
    options: ServeOptions | None = None,
    on_start: Callable[[ServerInfo], object] | None = None,
    progress: bool | Console | None = None,
) -> signal.Signals | None:
    """Serve trained models over HTTP until a signal arrives, and return it.

    Args:
        runs: run folders, exported ONNX files or OpenVINO IRs, each as `RUN` or `NAME=RUN`.
        options: address, limits and token, a `convolve.serving.server.ServeOptions`.
        on_start: receives the address once the server listens.
    """
    with _session(runs), open_progress(progress) as console:
        from convolve.serving import server

        listening = on_start or (lambda info: None)
        return server.serve([str(run) for run in runs], options or server.ServeOptions(), console, listening)
