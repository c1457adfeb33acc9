"""Commands and functions are two faces of one thing: a flag is a parameter, and a command calls one function."""

import inspect
import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import pytest

import convolve
from convolve.alignment.align import AlignPlan, AlignReport
from convolve.api.sweep import SweepOptions
from convolve.cli.command import ON_PARSE
from convolve.cli.main import dispatch
from convolve.config.options import ConfigOptions, ResumeOptions
from convolve.config.schema import SECTION_OF, SECTIONS
from convolve.loggers.base import ValidationRecord
from convolve.planning.plan import Hardware
from convolve.runs.average import AverageReport
from convolve.runs.describe import ScheduleCurve
from convolve.runs.score import WeightsScore
from convolve.serving.server import ServeOptions

LAYOUT = {name for name, section in SECTION_OF.items() if section == "parallel"}
EVERYWHERE = {"help", "json", "plugin"}
# Code of the run's model and other parts, which the command passes to `convolve.open` or allows to be imported.
CODE = {"model", "optimizer", "augment", "loss"}


@dataclass(frozen=True)
class Face:
    """A command, the function behind it, and the flags that have another form in Python, with that form."""

    words: str
    function: object
    options: type | None = None
    config: bool = False
    differs: tuple[str, ...] = ()


FACES = {
    "train": Face("", convolve.train, config=True, differs=("config-path",)),
    "restore": Face("runs/x", convolve.Run.resume),
    "find-lr": Face("", convolve.find_lr, config=True, differs=("config-path", "plot")),
    "sweep": Face("--grid a=1", convolve.sweep, config=True, differs=("config-path", "plot")),
    "validate": Face("runs/x", convolve.Run.validate, differs=("all", "data-dir")),
    "predict": Face("runs/x a.png", convolve.predict, differs=("csv", "output", "top", "abstain")),
    "export": Face("runs/x", convolve.Run.export),
    "average": Face("runs/x --mode mean", convolve.Run.average),
    "report": Face("runs/x", convolve.report),
    "serve": Face("runs/x", convolve.serve, ServeOptions, differs=("reload", "runs-dir")),
    "plan": Face("", convolve.plan, Hardware, config=True, differs=("config-path",)),
    "align": Face("", convolve.align, AlignPlan, config=True, differs=("config-path", "out")),
    "convert": Face("a b", convolve.convert),
    "doctor": Face("", convolve.doctor),
    "describe": Face("", convolve.models.describe, differs=("schedule", "model")),
    "cache": Face("", convolve.cache, differs=("all",)),
    "validate --weights x": Face("", convolve.validate, config=True),
    "configs": Face("", convolve.configs, differs=("config-path", "schema")),
    "data clean": Face("x", convolve.data.clean),
    "data prepare": Face("x y", convolve.data.prepare),
    "data get": Face("x", convolve.data.get),
    "data check": Face("x", convolve.data.check),
    "data list": Face("", convolve.data.list),
}


class Parsed(Exception):
    pass


def parser_of(command, words):
    """Return the parser of a command."""

    def stop(parser):
        raise Parsed(parser)

    token = ON_PARSE.set(stop)
    try:
        with pytest.raises(Parsed) as caught:
            dispatch([*command.split(), *words.split()])
    finally:
        ON_PARSE.reset(token)
    return caught.value.args[0]


def parameters_of(face):
    """Return the parameters of a function and their defaults."""
    found = {name: one.default for name, one in inspect.signature(face.function).parameters.items()}
    if face.options is not None:
        found |= {one.name: one.default for one in fields(face.options)}
    if face.config or face.function is convolve.Run.resume:
        typed = ConfigOptions if face.config else ResumeOptions
        found |= dict.fromkeys(typed.__annotations__, MISSING)
    if face.function is convolve.sweep:
        found |= dict.fromkeys(SweepOptions.__annotations__, MISSING)
    return found


def flags_of(parser, command):
    """Return the actions of a parser by flag, without the flags that every command has."""
    action = command.partition(" ")[2]
    skipped = {group for group in ("clean", "prepare") if command.startswith("data") and group != action}
    hidden = {id(one) for group in parser._action_groups if group.title in skipped for one in group._group_actions}
    named = {
        one.option_strings[-1].removeprefix("--").removeprefix("no-") if one.dest != "count" else "count": one
        for one in parser._actions
        if one.option_strings and id(one) not in hidden
    }
    return {name: one for name, one in named.items() if name not in EVERYWHERE}


@pytest.mark.parametrize("command", FACES)
def test_every_flag_is_a_parameter_with_the_same_default_and_help(command):
    face = FACES[command]
    parameters, flags = parameters_of(face), flags_of(parser_of(command, face.words), command)
    opened = CODE if "runs/x" in face.words else set()
    for flag, action in flags.items():
        name = flag.replace("-", "_")
        if flag in face.differs or (name in opened and name not in parameters):
            continue
        assert name in parameters, f"--{flag} is no parameter of {face.function.__qualname__}"
        assert action.help, f"--{flag} has no help"
        default = parameters[name]
        given = action.default if action.default not in ("==SUPPRESS==", None, []) else None
        if given is not None and default not in (MISSING, None, inspect.Parameter.empty):
            same = tuple(given) if isinstance(given, list) else given
            assert same == default, f"--{flag} has another default"
        if given is None and default not in (MISSING, inspect.Parameter.empty):
            assert default in (None, (), False) or not default or flag in ("mode", "kinds"), f"--{flag} has no default"
    assert set(face.differs) <= set(flags), "a difference that is gone"


def test_the_options_of_a_config_have_the_help_of_the_schema():
    assert set(ConfigOptions.__annotations__) == set(SECTION_OF)
    assert set(ResumeOptions.__annotations__) == {*LAYOUT, "epochs", "iterations", "optimizer", "augment"}
    flags = flags_of(parser_of("train", ""), "train")
    for section in SECTIONS.values():
        for name, info in section.model_fields.items():
            shown = flags[name.replace("_", "-")].help.replace("%%", "%")
            assert shown.startswith(info.description or "") or name == "metrics", name


class Recorder:
    """Stands for a function or a handle, records the calls and returns a result."""

    def __init__(self, result):
        self.calls, self.result = [], result

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.record(name, arguments, options)

    def __call__(self, *arguments, **options):
        return self.record("call", arguments, options)

    def record(self, name, arguments, options):
        self.calls.append((name, arguments, options))
        if self.result is None:
            raise LookupError("recorded")
        return self.result


@dataclass
class Result:
    """A result that has what commands look at."""

    path: Path = Path("written")
    failures: dict = field(default_factory=dict)
    findings: tuple = ()
    name: str = "name"
    fetched: bool = True
    place: str = "place"
    train_samples: int = 1
    test_samples: int = 1
    files: int = 1
    stored_bytes: int = 1
    device_test: None = None


RECORD = ValidationRecord("step-000000001", 1, 1.0, 0.5, 0.25, 4, 1.0, 4.0)
AVERAGED = AverageReport(Path("written"), ["one"], "measured", None)
ALIGNED = AlignReport(Path("align"), [], "they agree", Path("page.html"))
CURVE = convolve.LRCurve((0.1,), (1.0,), 0.1)
SWEPT = convolve.SweepResult((convolve.Run("runs/x"),), ({"seed": 1},), (0.5,), (1.0,), (1.0,), Path("runs"))
CODE_OPTIONS = {"loss", "metrics", "callbacks", "progress"}
SWEEP = {"jobs", "draws", "halving", "loss", "metrics", "progress"}
SCORE = WeightsScore("resnet18", "x", Path("y"), 0.75, 1.0, 4, 0.5)
LRS = ScheduleCurve("x", "constant", 0.5, 1.0, 8, ((0.0, 0.5), (1.0, 0.5)))
# Command line, public function, options that it gets, result, and what is printed with --json.
CALLS = {
    "train --epochs 1 --dataset digits": ("train", {"config", *CODE_OPTIONS}, None, None),
    "train --dataset digits --model lenet5 --folds 2": ("cross_validate", {"config", "progress"}, None, None),
    "validate --weights x --data-dir y": (
        "validate",
        {"weights", "data_dir", "class_names", "progress"},
        SCORE,
        '"top1": 0.75',
    ),
    "cache": ("cache", {"kind", "remove"}, [], '"entries": []'),
    "cache remove a b": ("cache", {"kind", "remove"}, [], '"entries": []'),
    "describe lenet-digits --schedule": ("trace_schedule", set(), LRS, '"peak": 0.5'),
    "find-lr --dataset digits": ("find_lr", {"config", "loss", "low", "high", "steps"}, CURVE, '"suggestion": 0.1'),
    "sweep --grid seed=1": ("sweep", {"config", *SWEEP}, SWEPT, '"accuracy": 0.5'),
    "predict runs/x a.png": ("predict", {"invert", "explain", "engine", "progress"}, Result(), '"path": "written"'),
    "report runs/x": ("report", {"output", "progress"}, Result(), '"path": "written"'),
    "doctor": ("doctor", {"device", "seconds", "progress"}, Result(), '"path": "written"'),
    "convert a.pth b.safetensors": ("convert", set(), Result(), '"path": "written"'),
    "plan lenet5-mnist": ("plan", {"timetable"}, Result(), '"path": "written"'),
    "align --epochs 1": ("align", {"output", "progress"}, ALIGNED, '"verdict": "they agree"'),
    "serve runs/x": ("serve", {"options", "on_start", "progress"}, None, None),
    "configs": ("configs", set(), [Result()], '"path": "written"'),
    "configs lenet5-mnist": ("config_values", set(), [], "{}"),
    "configs --schema": ("config_schema", set(), {"title": "x"}, '"title": "x"'),
    "describe": ("models.list", set(), [], "{}"),
    "describe lenet5": ("models.describe", {"graph"}, Result(), '"path": "written"'),
    "data list": ("data.list", set(), [Result()], '"path": "written"'),
    "data get x": ("data.get", {"progress"}, Result(), '"path": "written"'),
    "data check x": ("data.check", {"progress"}, Result(), '"path": "written"'),
    "data clean x": ("data.clean", {"move", "kinds", "weights", "progress"}, Result(), '"path": "written"'),
    "data prepare x y": (
        "data.prepare",
        {"format", "image_size", "quality", "shard_samples", "workers"},
        Result(),
        '"path": "written"',
    ),
}
VALIDATE = {"metrics", "batch_size", "engine", "progress"}
EXPORT = {"output", "int8", "max_accuracy_loss", "progress"}
AVERAGE = {"count", "decay", "discard_last", "statistics", "filename", "progress"}
METHODS = {
    "validate runs/x --batch-size 3": ("validate", {*VALIDATE, "checkpoint"}, RECORD, '"accuracy": 0.25'),
    "validate runs/x --all": ("validate_all", VALIDATE, [RECORD, RECORD], '"accuracy": 0.25'),
    "export runs/x --format pt2": ("export", EXPORT, Result(), '"path": "written"'),
    "average runs/x --mode mean": ("average", AVERAGE, AVERAGED, '"path": "written"'),
}


def replace_function(monkeypatch, name, value):
    package, _, attribute = name.rpartition(".")
    monkeypatch.setattr(getattr(convolve, package) if package else convolve, attribute, value)


def run_recorded(line, recorder, printed, capsys):
    words = line.split() if printed is None else [*line.split(), "--json"]
    if recorder.result is None:
        with pytest.raises(LookupError, match="recorded"):
            dispatch(words)
        return
    assert dispatch(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert printed in last and isinstance(json.loads(last), dict)


@pytest.mark.parametrize("line", CALLS)
def test_a_verb_calls_its_function_once_and_prints_what_it_returns(line, monkeypatch, capsys):
    function, options, result, printed = CALLS[line]
    recorder = Recorder(result)
    replace_function(monkeypatch, function, recorder)
    run_recorded(line, recorder, printed, capsys)
    [(_, _, given)] = recorder.calls
    assert set(given) == options


@pytest.mark.parametrize("line", METHODS)
def test_a_verb_on_a_run_calls_its_method_once(line, monkeypatch, capsys):
    method, options, result, printed = METHODS[line]
    recorder = Recorder(result)
    monkeypatch.setattr(convolve, "open", lambda path, **code: recorder)
    run_recorded(line, recorder, printed, capsys)
    [(name, _, given)] = recorder.calls
    assert name == method and set(given) == options


def test_restore_calls_resume_once(tmp_path, monkeypatch):
    run = convolve.train("digits", "lenet5", run_dir=tmp_path / "run", iterations=1, report=False, curves=False)
    recorder = Recorder(None)
    monkeypatch.setattr(convolve.Run, "resume", recorder)
    with pytest.raises(LookupError, match="recorded"):
        dispatch(["restore", str(run.path), "--epochs", "1", "--replicas", "1"])
    [(_, _, given)] = recorder.calls
    assert set(given) == {"epochs", "iterations", "replicas", *CODE_OPTIONS}
    monkeypatch.undo()
    assert dispatch(["resume", str(run.path)]) == 0, "resume is an alias of restore"


def test_every_command_of_the_proposal_has_a_function():
    from convolve.cli.main import COMMANDS

    with_function = {line.partition(" ")[0] for line in (*CALLS, *METHODS, "restore")}
    assert set(COMMANDS) - with_function == {"launch", "bench", "completion"}
