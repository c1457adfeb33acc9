"""Completion scripts complete commands, options, values, folders and runs in real shells."""

import argparse
import os
import pty
import re
import shutil
import subprocess

import pytest

from convolve.cli.completion import find_parser, find_specs, write_script
from convolve.cli.export import FORMATS
from convolve.cli.main import ALIASES, COMMANDS, dispatch
from convolve.errors import ConfigError
from convolve.inference import formats

# What is typed before the Tab, and what the last word may become.
CASES = {
    "convolve tr": {"train"},
    "convolve res": {"restore"},
    "convolve bench inf": {"infer"},
    "convolve train --optimizer-": {"--optimizer-epsilon"},
    "convolve train --no-ema-": set(),
    "convolve train --optimizer ad": {"adam", "adamw"},
    "convolve train --epochs 3 --optimizer ad": {"adam", "adamw"},
    "convolve train flow": {"flowers", "flow chart"},
    "convolve train flowers --config lenet-mni": {"lenet-mnist"},
    "convolve train flowers --model efficientnet-lite0 --weights no": {"none"},
    "convolve train --help sched": {"schedule"},
    "convolve bench train --precision-": {"--precision-mode"},
    "convolve export runs/flowers-1 --format saf": {"safetensors"},
    "convolve data prepare --format web": {"webdataset"},
    "convolve data che": {"check"},
    "convolve predict runs/flowers-1 phot": {"photo.jpg"},
    "convolve validate runs/fl": {"runs/flowers-1"},
    "convolve serve --engine onnx": {"onnxruntime"},
    "convolve infer-bench --variants eager --batch-sizes 1 8 --eng": {"--engine"},
    "convolve launch --hosts a,b -- train --optimizer ad": {"adam", "adamw"},
    "convolve cache remove --kind feat": {"features"},
    "convolve completion fi": {"fish"},
}
BASH_LOOP = """
source "$1"
while IFS= read -r line; do
  read -ra COMP_WORDS <<< "$line"
  [[ $line == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _convolve
  printf '%s\\t' "${COMPREPLY[@]}"
  echo
done
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with photos, runs and the scripts."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("flowers", "flow chart", "runs/flowers-1", "runs/not-a-run"):
        (folder / name).mkdir(parents=True)
    (folder / "runs" / "flowers-1" / "config.yml").touch()
    (folder / "photo.jpg").touch()
    for shell in ("bash", "zsh", "fish"):
        (folder / f"script.{shell}").write_text(write_script(shell), encoding="utf-8")
    return folder


def require(shell):
    return shutil.which(shell) or pytest.skip(f"{shell} is not installed")


def bash_completions(desk, lines):
    """Return what `_convolve` offers for each line."""
    words = [require("bash"), "--norc", "-c", BASH_LOOP, "bash", "script.bash"]
    done = subprocess.run(words, cwd=desk, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [{word for word in line.split("\t") if word} for line in done.stdout.splitlines()]


def test_bash_completes_the_last_word(desk):
    assert dict(zip(CASES, bash_completions(desk, CASES), strict=True)) == CASES


def test_bash_lists_everything_for_an_empty_word(desk):
    lines = ["convolve ", "convolve bench ", "convolve train --optimizer ", "convolve validate ", "convolve train --"]
    commands, parts, optimizers, runs, options = bash_completions(desk, lines)
    assert commands == set(COMMANDS) and parts == {"train", "data", "infer"}
    assert {"sgd", "adamw"} <= optimizers and runs == {"runs/flowers-1"}
    assert {"--json", "--data-dir", "--ema-decay", "--no-freeze-norms"} <= options


def test_fish_completes_the_last_word(desk):
    fish = require("fish")
    for line, expected in CASES.items():
        code = f"source script.fish; complete -C {line!r}"
        done = subprocess.run([fish, "--no-config", "-c", code], cwd=desk, capture_output=True, text=True, check=True)
        found = {re.sub(r"\\(.)", r"\1", row.partition("\t")[0]).rstrip("/") for row in done.stdout.splitlines()}
        prefix = line.rpartition(" ")[2]
        assert {word for word in found if word.startswith(prefix)} == expected, line


def type_line(shell, arguments, setup, keys, folder):
    """Type a line into an interactive shell, print it instead of running it, and return what was printed."""
    executable = require(shell)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="dumb", HOME=str(folder), HISTFILE="")
        os.execv(executable, [shell, *arguments])
    try:
        os.write(terminal, f"{setup}; echo REA''DY\n".encode())
        read_until(terminal, b"READY")
        # Ctrl-A moves to the start of the line.
        os.write(terminal, f"{keys}\x01echo RES''ULT \n".encode())
        output = read_until(terminal, b"\nRESULT ") + read_until(terminal, b"\n")
        os.write(terminal, b"exit\n")
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return output.rpartition(b"\nRESULT ")[2].decode().split()


def read_until(terminal, end):
    output = b""
    while end not in output:
        output += os.read(terminal, 1)
    return output


SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], "source script.bash"),
    "zsh": (["-f", "-i"], "autoload -U compinit; compinit -u -D; source script.zsh"),
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("convolve tra\t--optimizer-\t", "convolve train --optimizer-epsilon"),
        ("convolve bench inf\t--eng\tonnx\t", "convolve bench infer --engine onnxruntime"),
        ("convolve train flower\t", "convolve train flowers/"),
        ("convolve validate runs/fl\t", "convolve validate runs/flowers-1"),
        ("convolve train --weights=no\t", "convolve train --weights=none"),
        ("convolve launch --hosts a -- resto\truns/fl\t", "convolve launch --hosts a -- restore runs/flowers-1"),
    ],
)
def test_a_tab_in_an_interactive_shell_completes_a_word(shell, keys, expected, desk):
    arguments, setup = SHELLS[shell]
    found = type_line(shell, arguments, setup, keys, desk)
    assert " ".join(found).rstrip("/") == expected.rstrip("/")


def test_every_option_of_every_command_is_known():
    specs = {spec.name: spec for spec in find_specs()}
    assert set(specs) >= set(COMMANDS) - {"bench"} and set(specs) >= set(ALIASES)
    for name in ("train", "bench train", "sweep", "launch", "data"):
        shown = [action for action in find_parser(name, [])._actions if action.help is not argparse.SUPPRESS]
        flags = {flag for action in shown for flag in action.option_strings}
        assert flags == set(specs[name].options)
    assert "--class-names" in specs["validate"].options, "validate has other options with --weights"


def test_the_formats_of_the_help_are_those_of_export():
    assert list(FORMATS) == list(formats.FORMATS)


def test_the_command_prints_a_script(capsys):
    assert dispatch(["completion", "bash"]) == 0
    assert capsys.readouterr().out == write_script("bash")
    with pytest.raises(ConfigError, match=r"convolve completion: argument shell: invalid choice: 'csh' \(choose from"):
        dispatch(["completion", "csh"])
