"""Every command line in the READMEs of the originals runs here, with all its options, at reduced size."""

import importlib.util
import shlex

import pytest

from convolve.config.loading import resolve
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from documents import ROOT, run_command
from readme_commands import COMMANDS, PAGE, SCRIPTS, render, translate_command
from reduction import reduced

RUNS = ("logs/RN20_bs32_BN_16.16_v0.9.115_3S9", "generated_checkpoints_dir_path")
MY_CONFIG = "my_config:\n  model: resnet\n  model_size: 8\n  dataset: cifar-10\n  normalise_input: True\n  epochs: 10\n"
ROWS = [(readme, command) for readme, commands in COMMANDS.items() for command in commands if ".sh" not in command]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the finished runs and the config file that the commands name."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "configs.yml").write_text(MY_CONFIG)
    for run in RUNS:
        given = {"iterations": 1, "threads": 1, "curves": False, "report": False, "run_dir": folder / run}
        session.train(resolve("lenet-digits", None, given).config, SilentConsole())
    return folder


def test_the_page_lists_every_command_and_what_it_becomes():
    assert PAGE.read_text(encoding="utf-8") == render(), "run PYTHONPATH=tests python tests/readme_commands.py"


@pytest.mark.parametrize(("readme", "command"), ROWS, ids=[f"{readme}-{n}" for n, (readme, _) in enumerate(ROWS)])
def test_a_command_of_a_readme_runs_with_all_its_options(readme, command, desk, monkeypatch):
    monkeypatch.chdir(desk)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = translate_command(readme, command)
    if found.launch:
        hosts = [] if "--hosts" in found.launch else ["--hosts", "a,b"]
        inner = found.argv if found.argv[0] == "train" else ("train", "--config", "lenet-digits")
        run_command(["convolve", "launch", "--dry-run", *found.launch, *hosts, "--", *inner], readme)
    words = ["convolve", *found.argv]
    if "--help" not in words:
        words = reduced(words)
    if "--wandb" in words and importlib.util.find_spec("wandb") is None:
        with pytest.raises(BaseException, match="logs"):
            run_command(words, readme)
        return
    run_command(words, readme)


@pytest.mark.parametrize("readme", SCRIPTS)
def test_a_script_of_a_readme_exists_and_is_run_by_the_tests_of_the_examples(readme):
    tested = (ROOT / "tests" / "contract" / "test_examples.py").read_text(encoding="utf-8")
    for command in COMMANDS[readme]:
        name = next((word for word in shlex.split(command) if word.endswith(".sh")), None)
        if name is not None:
            path = ROOT / "examples" / SCRIPTS[readme] / name
            assert path.is_file() and name in tested
