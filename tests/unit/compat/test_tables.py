"""Tables of old option names: every entry leads to an option that exists, and values are translated one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.cli.command import Parser, add_config_flags
from convolve.compat.combinations import SWITCHES, split_options
from convolve.compat.names import canonical_splits
from convolve.compat.options import RENAMED, REPLACED, SPECIAL, WORDED, translate
from convolve.compat.programs import LAYOUT, PROGRAMS, translate_program
from convolve.compat.refused import REFUSED
from convolve.config.loading import field_name
from convolve.config.schema import SECTION_OF
from convolve.errors import ConfigError


def parse(words):
    parser = Parser("train", "Train a model.")
    add_config_flags(parser)
    return parser.parse(words)


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=RENAMED)
def test_a_renamed_option_exists_and_keeps_its_value(old, new):
    assert field_name(new) in SECTION_OF
    config = ["--config", "a"]
    expected = translate([*config, f"--{new}", "1"])
    assert translate([*config, f"--{old}", "1"]) == translate([*config, f"--{old.replace('-', '_')}=1"]) == expected


@pytest.mark.parametrize(("old", "words"), REPLACED.items(), ids=REPLACED)
def test_a_replaced_option_becomes_flags_that_the_parser_accepts(old, words):
    assert translate([f"--{old}"]) == words
    parse(words)


@pytest.mark.parametrize(("old", "new"), WORDED.items(), ids=WORDED)
@pytest.mark.parametrize(
    ("value", "prefix"),
    [
        *((word, "") for word in ("True", "true", "1", "yes")),
        *((word, "no-") for word in ("False", "FALSE", "0", "no")),
    ],
)
def test_a_worded_switch_becomes_a_flag(old, new, value, prefix):
    assert translate([f"--{old}", value]) == [f"--{prefix}{new}"]
    assert translate([f"--{old}"]) == [f"--{new}"]


@pytest.mark.parametrize("name", [*WORDED, "use-ipu", *SWITCHES])
def test_a_word_that_is_neither_true_nor_false_is_rejected(name):
    with pytest.raises(ConfigError) as caught:
        translate([f"--{name}", "perhaps"])
    assert str(caught.value) == f"--{name} perhaps: must be True or False"


def test_no_option_is_in_two_tables():
    tables = (RENAMED, REPLACED, WORDED, SWITCHES, SPECIAL, REFUSED)
    names = [name for table in tables for name in table]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--batchnorm-momentum", "0.1"], ["--bn-decay", "0.9"]),
        (["--batchnorm-momentum", "0.003"], ["--bn-decay", "0.997"]),
        (["--normalization-location", "host"], ["--hostside-norm"]),
        (["--normalisation-location", "ipu"], ["--no-hostside-norm"]),
        (["--normalization-location", "none"], ["--normalization", "unit"]),
        (["--stochastic-rounding", "RI_PRNG_STABLE"], ["--stochastic-rounding"]),
        (["--stochastic-rounding", "on"], ["--stochastic-rounding"]),
        (["--stochastic-rounding"], ["--stochastic-rounding"]),
        (["--stochastic-rounding", "False"], ["--no-stochastic-rounding"]),
        (["--ds", "mirrored"], []),
        (["--distribution_strategy", "OFF"], []),
        (["--data", "synthetic"], ["--synthetic-data"]),
        (["--recompute-mode", "manual"], ["--enable-recomputation"]),
        (["--loss_scale_value", "0.0"], ["--loss-scaling-rule", "ascend"]),
        (["--loss_scale_value", "128"], ["--loss-scaling", "128"]),
        (["--optimizer", "sgd", "--momentum", "0.9"], ["--optimizer", "momentum", "--momentum", "0.9"]),
        (["--optimizer", "sgd", "--momentum", "0.0"], ["--optimizer", "sgd", "--momentum", "0.0"]),
        (["--optimizer", "sgd", "--momentum", "0"], ["--optimizer", "sgd", "--momentum", "0"]),
        (["--optimizer", "adam", "--momentum", "0.9"], ["--optimizer", "adam", "--momentum", "0.9"]),
        (["--optimiser", "sgd"], ["--optimizer", "sgd"]),
        (["--use_mixlist"], ["--mixlist-file", "ops_info.json"]),
        (["--use_mixlist", "False", "--mixlist_file", "m.json"], []),
        (["--steps", "10", "--num-epochs", "3"], ["--iterations", "30"]),
        (["--auto-loss-scaling", "--seed", "3"], ["--loss-scaling-rule", "automatic", "--seed", "3"]),
    ],
)  # fmt: skip
def test_a_value_is_translated_with_its_option(old, new):
    assert translate(old) == new


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batchnorm-momentum", "low"], "--batchnorm-momentum low: must be a number; it is 1 - bn-decay"),
        (["--batchnorm-momentum"], "--batchnorm-momentum None: must be a number; it is 1 - bn-decay"),
        (["--normalization-location", "tpu"], "--normalization-location tpu: must be host, ipu or none"),
        (["--recompute-mode", "all"], "--recompute-mode all: must be none, auto or manual"),
        (["--steps"], "--steps : must be an integer, steps per epoch; 0 means a whole epoch"),
        (["--steps", "3", "--epochs", "2.5"], "--steps 3: must be an integer, steps per epoch; 0 means a whole epoch"),
        (["--ds", "tpu"], "--distribution-strategy tpu: strategies are not selected by name; use --replicas N for the "
                          "number of copies, on any device"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_translated_is_rejected(words, message):
    with pytest.raises(ConfigError) as caught:
        translate(words)
    assert str(caught.value) == message


def test_options_of_the_command_itself_are_not_translated():
    words = ["--repeat", "3", "--profile", "trace.json"]
    assert translate(words, reserved=("repeat", "profile")) == words
    with pytest.raises(ConfigError, match="^--repeat is not offered: "):
        translate(words, reserved=("profile",))


@given(st.lists(st.sampled_from(["run", "a_b.png", "-N", "2", "-1"])), st.lists(st.text(max_size=5)))
def test_positional_words_and_words_after_two_dashes_are_never_touched(before, after):
    words = [*before, "--", *after]
    assert split_options(words) == [(None, words)]
    assert translate(words) == words


@given(
    st.lists(st.tuples(st.sampled_from(["seed", "batch-size", "epochs"]), st.integers(0, 9)), unique_by=lambda x: x[0])
)
def test_our_own_options_are_kept_in_order(pairs):
    words = [word for name, value in pairs for word in (f"--{name}", str(value))]
    assert translate(words) == words
    assert translate([f"--{name.replace('-', '_')}={value}" for name, value in pairs]) == words


@pytest.mark.parametrize("command", PROGRAMS)
def test_a_program_neither_renames_nor_places_what_it_rejects(command):
    program = PROGRAMS[command]
    assert not set(program.refused) & {*program.renamed, *program.places, *program.flags}
    assert all(reason and not reason.endswith(".") for reason in program.refused.values())


@pytest.mark.parametrize("command", [name for name, program in PROGRAMS.items() if program.stored])
def test_a_command_that_reads_a_checkpoint_rejects_every_other_training_option(command):
    program = PROGRAMS[command]
    for name in (option.replace("_", "-") for option in SECTION_OF):
        if name in program.flags:
            assert translate_program(command, ["runs/a", f"--{name}", "1"]) == ["runs/a", f"--{name}", "1"]
        elif name not in program.renamed and name not in program.places:
            with pytest.raises(ConfigError, match=f"^--{name} is not offered by convolve {command}: "):
                translate_program(command, ["runs/a", f"--{name}", "1"])


def test_restore_accepts_every_option_of_the_layout():
    assert {"replicas", "shards", "pipeline-splits", "max-restarts"} <= set(LAYOUT) <= set(PROGRAMS["restore"].flags)


BLOCKS = ["conv1", "layer1/0", "layer1/1", "layer2/0", "avgpool", "fc"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("b1/0", "layer1/0"),
        ("b1/1/relu", "layer2/0"),
        ("stage1/unit1", "layer1/0"),
        ("stage1/unit2/relu", "layer2/0"),
        ("stage2/unit1/relu", "avgpool"),
        ("reduce_mean", "avgpool"),
        ("fc1", "fc"),
        ("layer1/1", "layer1/1"),
        ("b3/0", "b3/0"),
        ("stage9/unit9/relu", "stage9/unit9/relu"),
        ("Top", "Top"),
        ("nothing", "nothing"),
    ],
)
def test_a_split_name_becomes_a_block_or_stays_as_typed(theirs, ours):
    assert canonical_splits([theirs], BLOCKS) == (ours,)


def test_splits_keep_their_order():
    assert canonical_splits(["fc1", "conv1", "b1/1"], BLOCKS) == ("fc", "conv1", "layer1/1")
