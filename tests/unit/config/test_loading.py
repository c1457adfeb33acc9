import pytest

from convolve.config.loading import COMMAND_LINE, build, dump, json_schema, parse, resolve, shipped
from convolve.config.schema import SECTIONS, fields
from convolve.errors import ConfigError


def write(folder, text):
    path = folder / "mine.yml"
    path.write_text(text)
    return path


def test_every_option_has_one_name_and_a_description():
    names = [name for _, name, _ in fields()]
    assert len(names) == len(set(names))
    assert all(info.description for _, _, info in fields())
    assert all(kind.__doc__ for kind in SECTIONS.values())


@pytest.mark.parametrize("name", list(shipped()))
def test_every_shipped_config_resolves(name):
    assert resolve(name).config.name == name


def test_the_command_line_wins_over_config_and_base(tmp_path):
    path = write(tmp_path, "root:\n  batch-size: 10\n  seed: 1\nleaf:\n  base: root\n  batch-size: 20\n")
    resolved = resolve("leaf", path, {"seed": "3"})
    assert (resolved.config.optim.batch_size, resolved.config.run.seed) == (20, 3)
    assert resolved.origins["batch_size"].endswith("mine.yml: leaf")
    assert resolved.origins["seed"] == COMMAND_LINE
    assert resolved.origins["momentum"] == "default"


def test_the_command_line_can_undo_any_value(tmp_path):
    path = write(tmp_path, "mine:\n  keep-checkpoints: 3\n  nesterov: true\n  optimizer: momentum\n")
    config = resolve("mine", path, {"keep_checkpoints": None, "nesterov": False}).config
    assert config.run.keep_checkpoints is None
    assert config.optim.nesterov is False


def test_naming_iterations_unsets_the_epochs_of_a_lower_layer(tmp_path):
    path = write(tmp_path, "mine:\n  epochs: 3\n")
    config = resolve("mine", path, {"iterations": 10}).config
    assert (config.optim.epochs, config.optim.iterations) == (None, 10)


def test_dashes_and_underscores_are_the_same_in_a_file(tmp_path):
    path = write(tmp_path, "mine:\n  batch_size: 7\n")
    assert resolve("mine", path).config.optim.batch_size == 7


def test_a_config_may_be_called_by_an_original_name(tmp_path):
    path = write(tmp_path, "mine:\n  also: [their_name]\n  seed: 5\n")
    resolved = resolve("their_name", path)
    assert (resolved.config.name, resolved.config.run.seed) == ("mine", 5)


def test_a_dumped_config_reads_back_to_itself():
    config = resolve("cnn-wide-mnist", None, {"seed": 9, "keep_checkpoints": 4}).config
    assert parse(dump(config), "text") == config


def test_the_schema_names_every_option():
    body = json_schema()["additionalProperties"]["properties"]
    assert {name.replace("_", "-") for _, name, _ in fields()} <= set(body)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine:\n  batch-sise: 3\n", "mine.yml, mine: unknown option 'batch-sise'; did you mean batch-size"),
        ("mine:\n  seed: 1\n  seed: 2\n", "mine.yml, line 3: key 'seed' is given twice; keep one of them"),
        ("mine:\n  base: mine\n", "`base:` leads back to 'mine'; remove the cycle"),
        ("mine:\n  base: lenet-bn-mnits\n", "unknown config 'lenet-bn-mnits'; did you mean lenet-bn-mnist"),
        ("mine:\n  base: 3\n", "mine.yml, mine: `base: 3`: must be the name of a config"),
        ("mine:\n  also: 7\n", "mine.yml, mine: `also: 7`: must be a list of names"),
        ("mine:\n  ? [1, 2]\n  : 3\n", "line 2: a list or mapping cannot be a key"),
        ("mine: 3\n", "mine.yml, mine: expected `option: value` lines"),
        ("- 1\n- 2\n", "expected `name: value` lines, found list"),
        ("mine: !!python/object/apply:os.system [ls]\n", "tags are not accepted"),
        ("mine: [\n", "not valid YAML"),
        ("mine:\n  learning-rate: -1\n", "mine.yml: mine: learning-rate: -1: must be greater than 0"),
        ("mine:\n  optimizer: adm\n", "optimizer: adm: unknown optimizer; did you mean adam or adamw?"),
        ("mine:\n  augment: crop\n", "augment: crop: unknown augmentation; did you mean pad-crop"),
        ("mine:\n  epochs: 1\n  iterations: 2\n", "--epochs 1 with --iterations 2 ("),
        ("mine:\n  epochs: 2\n  warmup-epochs: 2\n", "--warmup-epochs 2 with --epochs 2: the warm-up must end before"),
        ("mine:\n  learning-rate-schedule: [0.7, 0.2]\n", "--learning-rate-schedule 0.7 0.2: milestones must"),
        ("mine:\n  nesterov: true\n", "--nesterov with --optimizer sgd: is a form of momentum"),
        ("mine:\n  generated-data: true\n  synthetic-data: true\n", "--generated-data with --synthetic-data: "),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_clear_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        resolve("mine", write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deeply_nested_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="not valid YAML|expected"):
        resolve("mine", write(tmp_path, "mine: " + "[" * 5000 + "]" * 5000))


def test_a_large_file_is_rejected_before_it_is_read(tmp_path):
    with pytest.raises(ConfigError, match="at most 1048576"):
        resolve("mine", write(tmp_path, "#" * (1 << 20) + "\n\n"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="none.yml: cannot read"):
        resolve("mine", tmp_path / "none.yml")


def test_a_binary_file_is_named(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="mine.yml: not a text file"):
        resolve("mine", path)


def test_a_config_keeps_its_name():
    assert resolve("lenet-mnist", given={"seed": 3}).config.name == "lenet-mnist"
    assert build({"seed": 3}, name="mine").name == "mine"


def test_replacing_options_is_checked_by_every_rule():
    config = resolve("lenet5-mnist").config
    changed = config.replace(batch_size=8, seed=3)
    assert (changed.optim.batch_size, changed.run.seed, changed.name) == (8, 3, config.name)
    with pytest.raises(ConfigError, match="the warm-up must end before the run"):
        config.replace(epochs=1, warmup_epochs=2)
    with pytest.raises(ConfigError, match="--batch-size 0"):
        config.replace(batch_size=0)


def test_replacing_an_option_unsets_the_one_that_it_excludes():
    config = resolve("lenet5-mnist").config.replace(iterations=4)
    assert (config.optim.epochs, config.optim.iterations) == (None, 4)
    assert config.replace(epochs=2).optim.iterations is None
