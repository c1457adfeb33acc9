"""Config files of Graphcore's applications load as they are, with the values of the built-in configs."""

from fnmatch import fnmatch

import pytest
import yaml

from convolve.cli.main import main
from convolve.compat.config_files import load_entries, resolve
from convolve.errors import ConfigError
from originals import ALL, ORIGINALS, P, T, compare, intended

# Named differently here; the names of blocks are compared in tests/unit/compat/test_tables.py.
NAMES = {"model", "model_size", "pipeline_splits", "recompute_checkpoints", "data_dir"}
CASES = [(system, name) for system in (T, P) for name in ALL[system] if ORIGINALS.get(name) == system]
FULL = [(system, name) for system, name in CASES if "base" not in ALL[system][name]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The recorded configs of each application as one file."""
    folder = tmp_path_factory.mktemp("files")
    for system in (T, P):
        recorded = {name: ALL[system][name] for one, name in FULL if one == system}
        (folder / system).write_text(yaml.safe_dump(recorded))
    return folder


@pytest.mark.parametrize(("system", "name"), FULL)
def test_a_config_of_a_graphcore_file_has_the_values_of_its_original(system, name, files):
    found = compare(name, resolve(name, files / system).config.values())
    listed = {row[1].replace("-", "_") for row in intended() if fnmatch(name, row[0])}
    # The differences of the built-in config are choices of ours. A number of groups has no meaning for batch norm.
    assert {key: pair for key, pair in found.items() if key not in NAMES | listed | {"groups"}} == {}


MERGED = """
base: &base
  model: resnet
  model_size: 20
  dataset: cifar-10
  normalise_input: False
  optimiser: momentum
  stable_norm: True
big: &big
  <<: *base
  abs_learning_rate: 0.5
  batch_size: 64
bigger:
  <<: [*big, *base]
  batch_size: 128
  validation: False
typo:
  <<: *big
  optimser: SGD
"""


def test_anchors_and_merge_keys_are_resolved(tmp_path):
    (tmp_path / "configs.yml").write_text(MERGED)
    resolved = resolve("bigger", tmp_path / "configs.yml", {"epochs": 30})
    optim = resolved.config.optim
    assert (optim.batch_size, optim.learning_rate, optim.optimizer, optim.epochs) == (128, 0.5, "momentum", 30)
    assert optim.base_learning_rate_exponent is None
    assert (resolved.config.run.validation_mode, resolved.config.precision.precision) == ("none", "16.16")
    assert [line.partition("bigger: ")[2] for line in resolved.notices] == [
        "the defaults of Graphcore's TensorFlow application apply",
        "no use here for stable-norm; docs/migrating has the reasons",
    ]


def test_a_bad_entry_does_not_block_the_others(tmp_path):
    (tmp_path / "configs.yml").write_text(MERGED)
    assert resolve("big", tmp_path / "configs.yml").config.optim.batch_size == 64
    with pytest.raises(ConfigError, match="configs.yml, typo: unknown option 'optimser'"):
        resolve("typo", tmp_path / "configs.yml")


def test_a_config_of_a_file_takes_precedence_over_the_name_of_an_original(tmp_path):
    (tmp_path / "configs.yml").write_text("mk2_resnet8_test:\n  model: resnet\n  model_size: 20\n  epochs: 7\n")
    assert resolve("mk2_resnet8_test", tmp_path / "configs.yml").config.optim.epochs == 7


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30))]),
        "\n".join(
            [
                "a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(50)) + "}",
                *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 30)),
            ]
        ),
        "a: &a {<<: *a, epochs: 3}",
    ],
    ids=["nested lists", "nested merges", "recursion"],
)
def test_expansion_is_bounded(text, tmp_path):
    (tmp_path / "configs.yml").write_text(text)
    with pytest.raises(ConfigError):
        resolve("a29", tmp_path / "configs.yml")


def test_the_command_line_prints_the_notices_once(tmp_path, capsys):
    (tmp_path / "configs.yml").write_text(MERGED)
    with pytest.raises(SystemExit):
        main(["plan", "big", "--config-path", str(tmp_path / "configs.yml"), "--device-flops", "1e12"])
    printed = capsys.readouterr().err
    assert printed.count("no use here for stable-norm") == 1
    assert load_entries(tmp_path / "configs.yml")["typo"].problem is not None


def test_the_corrected_command_can_be_copied(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "train", "--model", "resnet50", "--stable-norm", "--gather-conv-output"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "convolve: 2 options are not offered"
    assert lines[-1] == "convolve: corrected command: convolve bench train --model resnet50"
