"""Six models of timm and torchvision, unmodified, keep every guarantee; `make zoo` checks sixty."""

import importlib.util
import sys

import pytest

from convolve.errors import ConfigError
from convolve.models import registry
from documents import ROOT

MODELS = [
    "timm:resnet10t",
    "timm:convnext_atto",
    "timm:tinynet_e",
    "torchvision:squeezenet1_1",
    "torchvision:squeezenet1_0",
    "torchvision:mnasnet0_5",
]


@pytest.fixture(scope="module")
def zoo():
    spec = importlib.util.spec_from_file_location("zoo", ROOT / "benchmarks" / "zoo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["zoo"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
def test_an_unmodified_model_keeps_every_guarantee(zoo, model):
    try:
        registry.find(model)
    except ConfigError as error:
        pytest.skip(str(error))
    result = zoo.check(model)
    assert result.passed, result
    assert result.restart and not result.warnings


def test_the_script_has_40_and_20_different_models(zoo):
    assert len(set(zoo.TIMM)) == 40 and len(set(zoo.TORCHVISION)) == 20
    assert {*MODELS} <= {*zoo.MODELS}
