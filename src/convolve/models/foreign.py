"""Models of other packages: `timm:NAME`, `torchvision:NAME`, `package:attribute`, and those that plugins register.

A maker is a module, or a class or function that returns one. It is called with those of the arguments below that it
has; the global generators are keyed by the seed meanwhile, so equal arguments give equal weights.

    classes, num_classes                 number of classes
    channels, in_channels, in_chans      number of image channels
    input_shape                          (channels, height, width)
    image_size, img_size                 height, which is the width
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convolve.errors import ConfigError, describe, suggest
from convolve.layers.generators import keyed_generators
from convolve.models.adopt import adopt_model
from convolve.models.network import Network, Shape
from convolve.models.spec import BuildArgs

LIBRARIES = ("timm", "torchvision")
_NAME = re.compile(r"[A-Za-z0-9_.]+")


@dataclass(frozen=True)
class ModuleSpec:
    """How to build a model that is any `nn.Module`; the counterpart of `ModelSpec`."""

    make: Callable[[BuildArgs], nn.Module]
    summary: str
    input_shape: Shape = (3, 224, 224)
    classes: int = 1000
    fixed_options: tuple[str, ...] = ()
    resolve: None = None

    def build(self, args: BuildArgs, seed: int) -> Network:
        """Build the model on the CPU."""
        with keyed_generators(seed, "init", args.name):
            module = self.make(args)
        return adopt_model(module, input_shape=args.input_shape, classes=args.classes, subject=f"model {args.name}")

    def build_meta(self, args: BuildArgs) -> Network:
        """Build the model and drop its values: other constructors need not support the meta device."""
        return self.build(args, 0).to("meta")

    def materialize(self, model: Network, seed: int) -> Network:
        """Allocate a model on the CPU with some weights, to measure its speed."""
        model.to_empty(device="cpu")
        with torch.no_grad(), keyed_generators(seed, "materialize"):
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.02)
            for buffer in model.buffers():
                buffer.fill_(1)
        return model


def spec_of(maker: Any, *, summary: str = "", input_shape: Shape = (3, 224, 224)) -> ModuleSpec:
    """Return the spec of a module, or of a class or function that makes one."""
    doc = (inspect.getdoc(maker) or "").splitlines() if not isinstance(maker, nn.Module) else []
    return ModuleSpec(lambda args: call_maker(maker, args), summary or (doc[0] if doc else ""), input_shape)


def call_maker(maker: Any, args: BuildArgs) -> nn.Module:
    """Return the module that a maker makes; of a ready module, a copy."""
    if isinstance(maker, nn.Module):
        return deepcopy(maker)
    if not callable(maker):
        kind = type(maker).__name__
        raise ConfigError(f"model {args.name}: is {kind}; give an nn.Module, or a class or function that makes one")
    try:
        module = maker(**_choose_arguments(maker, args))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model {args.name}: cannot be built ({describe(error)}); fix it") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model {args.name}: returns {type(module).__name__}; return an nn.Module")
    return module


def _choose_arguments(maker: Any, args: BuildArgs) -> dict[str, Any]:
    channels, height, _ = args.input_shape
    offered = {
        **dict.fromkeys(("classes", "num_classes"), args.classes),
        **dict.fromkeys(("channels", "in_channels", "in_chans"), channels),
        **dict.fromkeys(("image_size", "img_size"), height),
        "input_shape": args.input_shape,
    }
    parameters = inspect.signature(maker).parameters.values()
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in offered
    ]
    if missing:
        raise ConfigError(
            f"model {args.name}: argument '{missing[0]}' has no default; give it one, or use {', '.join(offered)}"
        )
    taken = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return {name: value for name, value in offered.items() if name in taken}


def library_spec(name: str) -> ModuleSpec:
    """Return the spec of a model of timm or torchvision, without pretrained weights."""
    library, _, model = name.partition(":")
    try:
        package = import_library(library)
    except Exception as error:
        raise ConfigError(
            f"model {name}: cannot import {library} ({describe(error)}); install it: pip install --no-deps {library}"
        ) from error
    known = package.list_models() if library == "timm" else package.models.list_models()
    if not _NAME.fullmatch(model) or model.partition(".")[0] not in known:
        raise ConfigError(f"model {name}: {library} has no such model; {suggest(model, known)}")
    if library == "timm":
        config = package.get_pretrained_cfg(model, allow_unregistered=False)
        shape = tuple(config.input_size) if config is not None else (3, 224, 224)
        return ModuleSpec(lambda args: _make_timm(package, model, args), f"{model} of timm", shape)
    return ModuleSpec(lambda args: _make_torchvision(package, model, args), f"{model} of torchvision")


def _make_timm(package: Any, model: str, args: BuildArgs) -> nn.Module:
    def make() -> Any:
        return package.create_model(model, pretrained=False, num_classes=args.classes, in_chans=args.input_shape[0])

    return call_maker(make, args)


def _make_torchvision(package: Any, model: str, args: BuildArgs) -> nn.Module:
    # These return auxiliary logits in training.
    options = {"aux_logits": False, "init_weights": True} if model in ("googlenet", "inception_v3") else {}

    def make() -> Any:
        built = package.models.get_model(model, weights=None, num_classes=args.classes, **options)
        return _fit_stem(built, args)

    return call_maker(make, args)


_declared: list[torch.library.Library] = []


def _fit_stem(module: nn.Module, args: BuildArgs) -> nn.Module:
    """Replace the first convolution if the images have another number of channels; torchvision's models have three."""
    channels = args.input_shape[0]
    path, stem = next(
        ((path, layer) for path, layer in module.named_modules() if isinstance(layer, nn.Conv2d)), ("", None)
    )
    if stem is None or stem.in_channels == channels:
        return module
    if type(stem) is not nn.Conv2d or stem.in_channels != 3 or stem.groups != 1:
        raise ConfigError(f"model {args.name}: takes 3 channels, the images have {channels}; use timm:NAME")
    parent, _, name = path.rpartition(".")
    fitted = nn.Conv2d(
        channels,
        stem.out_channels,
        stem.kernel_size,  # type: ignore[arg-type]
        stem.stride,  # type: ignore[arg-type]
        stem.padding,  # type: ignore[arg-type]
        stem.dilation,  # type: ignore[arg-type]
        bias=stem.bias is not None,
        padding_mode=stem.padding_mode,
    )
    setattr(module.get_submodule(parent), name, fitted)
    return module


def import_library(library: str) -> Any:
    """Import timm or torchvision. If torchvision's compiled operators are missing, declare those that it extends."""
    try:
        return importlib.import_module(library)
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
    for module in [module for module in sys.modules if module.partition(".")[0] in LIBRARIES]:
        del sys.modules[module]
    operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        signature = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        operators.define(signature)  # type: ignore[no-untyped-call]
    _declared.append(operators)
    return importlib.import_module(library)
