"""Every option of convolve, declared once: name, type, range, default and help.

Options are grouped in sections, and each package receives only its section. Names are unique over all sections, so one
flat name serves the command line (`--batch-size`), config files (`batch-size:`) and messages. The help of an option
whose default is None ends with the effective default in brackets; other defaults are appended from the field.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from convolve.config.section import Section
from convolve.config.selection import SelectBy
from convolve.config.training import OptimConfig, ParallelConfig, PrecisionConfig, ScheduleConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from convolve.config.options import ConfigOptions

NormType = Literal["batch", "group", "layer", "none"]
Padding = Literal["symmetric", "same"]
Normalization = Literal["unit", "symmetric", "standard", "imagenet", "imagenet-mean"]


def _read_weights(value: Any) -> Any:
    """Accept a path, and `none` for random weights."""
    if isinstance(value, Path):
        return str(value)
    return None if value == "none" else value


class ModelConfig(Section):
    """The model. Options of some families only default to None: the family decides (model_options.py)."""

    model: str = Field("lenet5", description="model to train; list them: `convolve describe`")
    model_size: str | None = Field(
        None, coerce_numbers_to_str=True, description="size within a family, such as 50 with --model resnet"
    )
    norm_type: NormType | None = Field(None, description="kind of normalization")
    groups: int | None = Field(None, ge=1, description="groups of group norm")
    bn_decay: float | None = Field(
        None, ge=0, lt=1, description="fraction of the running batch-norm statistics kept per pass"
    )
    norm_epsilon: float | None = Field(None, gt=0, description="epsilon added to the variance in norms")
    conv_padding: Padding | None = Field(
        None, description="padding of convolutions with a stride: symmetric, or same as in TensorFlow"
    )
    last_gamma_zero: bool | None = Field(
        None, description="start residual branches at zero: gamma of the last norm is 0"
    )
    stride_in_1x1: bool | None = Field(
        None, description="stride in the first 1x1 of a bottleneck (v1), not in its 3x3 (v1.5)"
    )
    stage1_projection: bool | None = Field(None, description="use a projection in the first block of stage 1 too")
    convolution_groups: int | None = Field(None, ge=1, description="resnext: groups of the 3x3 convolutions")
    group_dim: int | None = Field(None, ge=1, description="channels in each group of a grouped convolution")
    widenet: bool | None = Field(None, description="resnext on small images: four times as wide")
    expand_ratio: int | None = Field(
        None, ge=1, le=256, description="efficientnet: expansion of the width inside a block"
    )
    se: bool | None = Field(None, description="efficientnet: squeeze and excitation")
    depth_divisor: int | None = Field(
        None, ge=1, le=1024, description="efficientnet: round widths to multiples of this"
    )
    top_width: int | None = Field(
        None, ge=0, le=65536, description="width of the last 1x1 layer; 0 omits it (efficientnet)"
    )
    width_coefficient: float | None = Field(None, gt=0, le=64, description="efficientnet: factor on widths")
    depth_coefficient: float | None = Field(None, gt=0, le=64, description="efficientnet: factor on repeats")
    use_relu: bool | None = Field(None, description="efficientnet: ReLU instead of swish")
    dropout_rate: float | None = Field(None, ge=0, lt=1, description="dropout probability before the classifier")
    block_survival_prob: float | None = Field(
        None, gt=0, le=1, description="stochastic depth: survival probability of the last block"
    )
    proxy_norm: bool | None = Field(None, description="efficientnet: normalize activations by a Gaussian proxy")
    proxy_epsilon: float | None = Field(None, gt=0, description="epsilon of the proxy's variance")
    weights: Annotated[str | None, BeforeValidator(_read_weights)] = Field(
        None,
        description="initial weights: imagenet (those of the model), a name such as efficientnet-lite0, a file (also "
        "torchvision's and timm's), a checkpoint or a run [random]",
    )
    weights_dir: Path | None = Field(
        None, description="folder with published weight files, to use without a network [$CONVOLVE_WEIGHTS_DIR]"
    )
    weights_mirror: str | None = Field(
        None, description="URL to fetch weights from instead of the publisher's server [$CONVOLVE_WEIGHTS_MIRROR]"
    )
    variable_filter: tuple[str, ...] = Field(
        (), description="train only parameters whose name contains one of these [all]"
    )
    freeze_until: str | None = Field(None, description="freeze all blocks before this one")
    freeze_norms: bool = Field(
        False, description="train with the running statistics of batch norms, and keep them (fine-tuning)"
    )
    fit_head: bool = Field(
        False, description="fit the classifier on the features of the frozen model before the first step"
    )


AugmentName = Literal["auto", "none", "flip", "pad-crop", "pad-crop-flip", "resized-crop-flip"]


class DataConfig(Section):
    """Source of the images, augmentation and loading."""

    dataset: str | None = Field(
        None,
        description="data set; list them: `convolve data list` [MNIST, or the built-in digits if it is unavailable]",
    )
    data_dir: Path | None = Field(None, description="folder with the data [$DATA_DIR, then the cache]")
    task: Literal["auto", "single-label", "multi-label", "soft-label"] = Field(
        "auto",
        description="what an image has: one class, any number of labels, or a probability of each class; auto follows "
        "the data",
    )
    download: bool = Field(True, description="download a known data set if it is missing")
    generated_data: bool = Field(
        False, description="train on random images generated once on the host, to measure speed"
    )
    synthetic_data: bool = Field(False, description="train on random images on the device, without any host input")
    normalization: Normalization | None = Field(
        None,
        description="scale pixels to [0, 1], to [-1, 1], to mean 0 and standard deviation 1 of the training set or of "
        "ImageNet, or subtract only ImageNet's mean [that of --weights, else unit]",
    )
    hostside_norm: bool = Field(
        False, description="normalize on the host and copy floats to the device, instead of bytes"
    )
    hold_out: int = Field(0, ge=0, description="number of training images, from the start, to exclude from training")
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="fraction of each class of the training images that selects the best checkpoint; the test images "
        "are then used only once, at the end [0; 0.1 for a folder with train/ and test/]",
    )
    test_fraction: float = Field(
        0.1, gt=0, lt=1, description="fraction of each class of a folder without splits that is held out for testing"
    )
    split_rule: Literal["content", "name"] = Field(
        "content",
        description="content: hold out by image contents, duplicates together; name: by file name, as version 0.1 did",
    )
    folds: int | None = Field(
        None, ge=2, le=100, description="cross-validation: train once for each of this many folds"
    )
    fold: int | None = Field(None, ge=0, description="cross-validation: train only with this fold held out [all]")
    sampler: Literal["shuffle", "balanced"] = Field(
        "shuffle",
        description="order of training images: every one once in each epoch, or as many of each class, those of rare "
        "classes several times",
    )
    dataset_percentage_to_use: float = Field(
        100.0, gt=0, le=100, description="percentage of the training images to use"
    )
    image_size: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="side of the model's input in pixels [that of --weights, of the images, or of the model]",
    )
    crop_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="photographs: fraction of the shorter side that validation keeps [that of --weights, else 0.875]",
    )
    augment: AugmentName | str = Field(
        "auto",
        description="augmentation of training images, a name of a plugin, or PACKAGE:NAME of your code; auto: the "
        "usual one for the data set",
    )
    train_with_valid_preprocessing: bool = Field(False, description="preprocess training images as in validation")
    flip: Literal["random", "alternating"] = Field(
        "random", description="flip images at random, or each one in every second epoch"
    )
    crop_padding: int = Field(4, ge=1, description="pad-crop, pad-crop-flip: padding in pixels")
    padding_mode: Literal["mean", "black", "reflect"] = Field(
        "mean", description="pad-crop, pad-crop-flip: contents of the padding"
    )
    crop_area: tuple[float, float] = Field(
        (0.08, 1.0), description="resized-crop-flip: range of the area as a fraction"
    )
    crop_aspect: tuple[float, float] = Field((0.75, 4 / 3), description="resized-crop-flip: range of width / height")
    cutout: int = Field(
        0, ge=0, description="cutout: side of the square removed from every training image, in pixels; 0: off"
    )
    erase_probability: float = Field(0.0, ge=0, le=1, description="probability of erasing a random rectangle")
    color_jitter: tuple[float, float, float] = Field(
        (0.0, 0.0, 0.0), description="max random change of brightness, contrast and saturation"
    )
    randaugment_layers: int = Field(0, ge=0, le=8, description="RandAugment: operations on each image")
    randaugment_magnitude: float = Field(9.0, ge=0, le=30, description="RandAugment: strength of each operation")
    mixup_alpha: float = Field(0.0, ge=0, description="mixup: both parameters of the beta distribution; 0: off")
    cutmix_lambda: float = Field(1.0, ge=0, le=1, description="cutmix: mean fraction kept of the base image; 1: off")
    cutmix_version: Literal["1", "2"] = Field(
        "1",
        description="cutmix: --cutmix-lambda is the mean of a random fraction (1) or constant (2)",
    )
    cutmix_lambda_low: float = Field(0.0, ge=0, le=1, description="uniform cutmix: min fraction kept; 0 and 0: off")
    cutmix_lambda_high: float = Field(0.0, ge=0, le=1, description="uniform cutmix: max fraction kept")
    cutmix_disable_prob: float = Field(0.0, ge=0, le=1, description="uniform cutmix: fraction of steps without it")
    workers: int | None = Field(
        None, ge=0, le=256, description="threads that decode images; do not change results [one per CPU thread]"
    )
    dataset_cache: bool = Field(True, description="keep decoded images in memory while they fit")
    cache_memory: float = Field(2.0, ge=0, description="memory for decoded images in GB")
    check_data: bool = Field(
        False,
        description="check a folder of photos before the first step: broken files, duplicates, wrong labels",
    )
    bad_samples: Literal["error", "skip"] = Field(
        "error", description="on an unreadable image: stop with an error, or skip and log it"
    )
    bad_samples_limit: float = Field(
        0.001, ge=0, le=1, description="max fraction of a split that may be skipped, but at least one image"
    )


class RunConfig(Section):
    """Seed, device, run folder, checkpoints and validation."""

    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers")
    device: str = Field("auto", description="auto, cpu, cuda, mps, xpu or npu, with an index if needed (cuda:1)")
    threads: int | None = Field(None, ge=1, description="CPU threads [all that the process may use]")
    kernels: Literal["auto", "torch"] = Field(
        "auto", description="auto: use native kernels if this machine supports them; torch: only PyTorch's"
    )
    run_dir: Path | None = Field(None, description="run folder [a new one in --log-dir]")
    resume: bool = Field(
        False, description="continue the run in --run-dir, if it has started, with as many replicas as were started"
    )
    log_dir: Path = Field(Path("runs"), description="parent folder of run folders")
    name_suffix: str | None = Field(None, description="suffix of the run folder's name")
    checkpoints: bool = Field(True, description="save checkpoints")
    ckpts_per_epoch: int = Field(1, ge=0, description="checkpoints in each epoch; 0: only the last one")
    epochs_per_ckpt: int | None = Field(
        None, ge=1, description="epochs between checkpoints; replaces --ckpts-per-epoch"
    )
    keep_checkpoints: int | None = Field(
        None, ge=1, description="number of newest checkpoints to keep, besides the best one [all]"
    )
    validation_mode: Literal["during", "after", "none"] = Field(
        "during", description="validate during training, all checkpoints after it, or never"
    )
    validation_views: Literal[1, 2, 6] = Field(
        1, description="views of each test image: 2 adds the flipped image, 6 also both shifted by one pixel either way"
    )
    validation_frequency: float = Field(1.0, gt=0, description="epochs between validations during training")
    select_ema: bool = Field(
        False, description="with --ema-decay: a checkpoint provides the average if it validates better than the weights"
    )
    select_by: SelectBy = Field(
        "accuracy",
        description="what the best checkpoint is best in; loss varies less than accuracy with few validation images",
    )
    verify_steps: bool = Field(
        False,
        description="find silent data corruption: checksums of the state, equal replicas, a sample of passes twice",
    )
    strict: bool = Field(False, description="stop with an error, instead of a warning, if a guarantee does not hold")


class LogConfig(Section):
    """Log files, metrics, reports and logging services."""

    logs_per_epoch: int = Field(16, ge=1, description="log points in each epoch")
    log_freq: int | None = Field(None, ge=1, description="steps between log points; replaces --logs-per-epoch")
    logs: bool = Field(True, description="write log files into the run folder")
    metrics: bool = Field(True, description="compute loss and accuracy during training")
    curves: bool = Field(True, description="draw curves.png at the end")
    report: bool = Field(True, description="write report.html at the end")
    mlperf_logging: bool = Field(False, description="write an MLPerf log, result_SEED.txt, into the run folder")
    draw_graph: bool = Field(False, description="draw the model into the run folder as model.svg")
    tensorboard: bool = Field(False, description="write TensorBoard events (extra `logs`)")
    wandb: bool = Field(False, description="send metrics to Weights & Biases (extra `logs`)")
    wandb_project: str = Field("convolve", description="project name at Weights & Biases")


class Config(BaseModel):
    """All options of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: str = "custom"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()
    log: LogConfig = LogConfig()

    @property
    def global_batch_size(self) -> int:
        """Samples per weight update: micro batch x gradient accumulation x replicas."""
        return self.optim.batch_size * self.micro_batches

    @property
    def micro_batches(self) -> int:
        """Micro batches per weight update of all replicas."""
        return self.parallel.micro_batches or self.optim.gradient_accumulation_count * self.parallel.replicas

    @property
    def is_cross_validation(self) -> bool:
        """True if this config trains once for each fold."""
        return self.data.folds is not None and self.data.fold is None

    def resolved_optim(self) -> OptimConfig:
        """Return the optim section with the learning rate and rmsprop decay computed from the global batch size."""
        optim, resolved = self.optim, dict[str, float]()
        if optim.base_learning_rate_exponent is not None:
            resolved["learning_rate"] = 2**optim.base_learning_rate_exponent * self.global_batch_size
        if optim.rmsprop_base_decay_exp is not None:
            resolved["rmsprop_decay"] = 1 - 2**optim.rmsprop_base_decay_exp * self.global_batch_size
        return optim.model_copy(update=resolved)

    @classmethod
    def read(cls, source: str | Path, name: str | None = None, **options: "Unpack[ConfigOptions]") -> "Config":
        """Return a named config, or one of a YAML file: the config of a run, or the one called `name`.

        A `str` is the name of a shipped config, a `Path` a file. Options are set on top.
        """
        from convolve.config.loading import read_config

        return read_config(source, name, options)

    def dump(self) -> str:
        """Return the config as YAML text, which `read` accepts as a file."""
        from convolve.config.loading import dump

        return dump(self)

    def replace(self, **options: "Unpack[ConfigOptions]") -> "Config":
        """Return a copy with these options changed, checked by every rule."""
        # The loader imports this module.
        from convolve.config.loading import replace_options

        return replace_options(self, options)

    def values(self) -> dict[str, Any]:
        """Return all options by flat name, in plain YAML types."""
        return {
            field: value
            for section in SECTIONS
            for field, value in getattr(self, section).model_dump(mode="json").items()
        }


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "parallel": ParallelConfig,
    "run": RunConfig,
    "log": LogConfig,
}


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield every option as (section, name, field), in order of declaration."""
    for section, kind in SECTIONS.items():
        for name, field in kind.model_fields.items():
            yield section, name, field


SECTION_OF: dict[str, str] = {name: section for section, name, _ in fields()}
