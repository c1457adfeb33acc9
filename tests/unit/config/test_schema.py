"""Options as declared: aliases of values, quantities computed from several options, and the options of families."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.config import Config, ModelConfig
from convolve.config.loading import build, field_name, flag_name
from convolve.config.model_options import FAMILIES, family_of, reject_foreign_options
from convolve.config.schema import SECTION_OF
from convolve.config.spelling import canonical
from convolve.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "option", "typed", "value"),
    [
        ("optim", "optimizer", "RMSprop", "rmsprop-tf"),
        ("optim", "optimizer", "rmsprop", "rmsprop"),
        ("optim", "optimizer", "RMSPROP_TF", "rmsprop-tf"),
        ("optim", "optimizer", "sgd_combined", "momentum"),
        ("optim", "optimizer", "AdamW", "adamw"),
        ("schedule", "lr_schedule", "step", "stepped"),
        ("schedule", "lr_schedule", "polynomial_decay_lr", "polynomial"),
        ("parallel", "pipeline_schedule", "Interleaved", "interleaved"),
        ("parallel", "pipeline_schedule", "SEQUENTIAL", "sequential"),
        ("model", "model_size", 50, "50"),
    ],
)
def test_values_of_other_systems_are_aliases(section, option, typed, value):
    assert getattr(getattr(build({option: typed}), section), option) == value


@pytest.mark.parametrize(
    ("section", "option", "typed", "value"),
    [
        ("data", "cutmix_version", 2, "2"),
        ("precision", "precision", 16.16, "16.16"),
        ("precision", "precision", None, None),
        ("run", "validation_views", "6", 6),
        ("run", "validation_views", 2, 2),
    ],
)
def test_a_choice_may_be_a_number_or_text(section, option, typed, value):
    """YAML reads an unquoted 16.16 as a number; the command line has only text."""
    assert getattr(getattr(build({option: typed}), section), option) == value


def test_the_global_batch_is_the_product_of_micro_batch_accumulation_and_replicas():
    config = build({"batch_size": 3, "gradient_accumulation_count": 5, "replicas": 7, "shards": 2})
    assert config.global_batch_size == 105
    assert config.parallel.processes == 14


def test_rates_given_as_exponents_scale_with_the_global_batch():
    options = {"batch_size": 16, "gradient_accumulation_count": 2, "replicas": 4}
    optim = build({**options, "base_learning_rate_exponent": -8, "rmsprop_base_decay_exp": -10}).resolved_optim()
    assert optim.learning_rate == 128 / 256
    assert optim.rmsprop_decay == 1 - 128 / 1024
    plain = build({**options, "learning_rate": 0.3, "rmsprop_decay": 0.9}).resolved_optim()
    assert (plain.learning_rate, plain.rmsprop_decay) == (0.3, 0.9)


def test_a_config_cannot_be_changed_in_place():
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.optim.batch_size = 3
    assert config.optim.batch_size == 64


def test_the_values_of_a_config_are_plain_types_of_every_option():
    values = build({"weights": "a/b.safetensors", "pipeline_splits": ("conv2",), "shards": 2}).values()
    assert set(values) == set(SECTION_OF)
    assert (values["weights"], values["pipeline_splits"], values["log_dir"]) == ("a/b.safetensors", ["conv2"], "runs")


@given(st.sampled_from(sorted(SECTION_OF)))
def test_the_flag_of_every_option_leads_back_to_it(name):
    assert field_name(flag_name(name)) == field_name(name) == name


@pytest.mark.parametrize(
    ("british", "american"),
    [
        ("optimiser", "optimizer"),
        ("optimiser-epsilon", "optimizer-epsilon"),
        ("normalisation", "normalization"),
        ("normalise-input", "normalize-input"),
        ("colour-jitter", "color-jitter"),
        ("greyscale", "grayscale"),
        ("centre-crop", "center-crop"),
        ("licence", "license"),
        ("catalogue", "catalog"),
        ("analyse-nans", "analyze-nans"),
        ("noise", "noise"),
        ("rise-share", "rise-share"),
        ("precision", "precision"),
        ("dataset-percentage-to-use", "dataset-percentage-to-use"),
    ],
)
def test_british_names_become_american_and_others_stay(british, american):
    assert canonical(british) == american
    assert canonical(american) == american


def test_no_option_name_is_changed_by_the_spelling_rules():
    assert [name for name in SECTION_OF if canonical(name) != name] == []


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("lenet5", "lenet"),
        ("lenet-sigmoid", "lenet"),
        ("cnn-wide", "lenet"),
        ("resnet50", "resnet"),
        ("resnet20-cifar", "resnet"),
        ("resnext14", "resnext"),
        ("efficientnet-b3", "efficientnet"),
        ("mobilenet-v3-small", "mobilenet"),
        ("fastnet", "fastnet"),
    ],
)
def test_the_family_of_a_model_follows_from_its_name(model, family):
    assert family_of(model).family == family


def test_a_model_of_another_package_has_no_family_and_may_have_any_option():
    assert family_of("vgg16") is None
    reject_foreign_options(ModelConfig(model="vgg16", se=True, groups=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "lenet5", "norm_type": "group"},
         "--norm-type group: lenet5 has no such option, only resnet, resnext, efficientnet, efficientnet-lite, "
         "mobilenet; omit it"),
        ({"model": "resnet50", "expand_ratio": 4},
         "--expand-ratio 4: resnet50 has no such option, only efficientnet; omit it"),
        ({"model": "resnet50", "convolution_groups": 4},
         "--convolution-groups 4: resnet50 has no such option, only resnext; omit it"),
        ({"model": "fastnet", "dropout_rate": 0.0},
         "--dropout-rate 0.0: fastnet has no such option, only lenet, efficientnet, efficientnet-lite, mobilenet; "
         "omit it"),
        ({"model": "mobilenet-v2", "last_gamma_zero": False},
         "--last-gamma-zero False: mobilenet-v2 has no such option, only resnet, resnext; omit it"),
    ],
)  # fmt: skip
def test_an_option_of_another_family_is_rejected_with_the_families_that_have_it(options, message):
    with pytest.raises(ConfigError) as caught:
        reject_foreign_options(ModelConfig(**options))
    assert str(caught.value) == message


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_option_exists_in_the_schema_and_small_defaults_are_options(family):
    names = {field.name for field in fields(family)}
    assert names == set(family.names()) <= set(ModelConfig.model_fields)
    assert set(family.small_image_defaults) <= names


@pytest.mark.parametrize(
    ("family", "small", "given_options", "expected"),
    [
        ("resnet", False, {}, {"model_size": "18", "groups": 32, "last_gamma_zero": True, "bn_decay": 0.9}),
        ("resnet", True, {}, {"model_size": "20", "groups": 16, "last_gamma_zero": False, "bn_decay": 0.9}),
        ("resnet", True, {"groups": 8, "last_gamma_zero": True}, {"groups": 8, "last_gamma_zero": True}),
        ("resnext", True, {"model_size": "38"}, {"model_size": "38", "convolution_groups": 32, "group_dim": 4}),
        ("efficientnet", False, {"se": False}, {"se": False, "groups": 4, "top_width": 1280, "norm_epsilon": None}),
        ("mobilenet", False, {"dropout_rate": 0.0}, {"dropout_rate": 0.0, "model_size": "v2", "groups": 8}),
        ("fastnet", True, {}, {"bn_decay": 0.6, "norm_epsilon": 1e-5}),
        ("lenet", False, {}, {"dropout_rate": None}),
    ],
)
def test_a_family_reads_given_options_over_small_image_defaults_over_its_own(family, small, given_options, expected):
    options = FAMILIES[family].read(ModelConfig(**given_options), small_images=small)
    assert {name: getattr(options, name) for name in expected} == expected
