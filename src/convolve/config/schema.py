"""Every knob of convolve, declared once: its name, type, range, default and meaning.

Fields live in sections, and a room gets its own section only. Names are unique over all sections, so that one flat name
serves the command line (`--batch-size`), a config file (`batch-size:`) and an error message alike.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from convolve.config.section import Section
from convolve.config.training import OptimConfig, ParallelConfig, PrecisionConfig, ScheduleConfig


class ModelConfig(Section):
    """The network."""

    title = "model"

    model: str = Field("lenet5", description="network to train; `convolve describe` lists them")
    model_size: str | None = Field(
        None, coerce_numbers_to_str=True, description="size within a family, as in --model resnet --model-size 50"
    )
    norm_type: Literal["batch", "group", "layer", "none"] | None = Field(None, description="kind of normalization")
    groups: int | None = Field(None, ge=1, description="groups of group norm")
    bn_decay: float | None = Field(None, ge=0, lt=1, description="share of the old batch-norm statistics kept per pass")
    norm_epsilon: float | None = Field(None, gt=0, description="epsilon inside the root of the norms")
    last_gamma_zero: bool | None = Field(None, description="residual branches begin at zero: last norm's gamma is 0")
    stride_in_1x1: bool | None = Field(None, description="bottlenecks stride in the first 1x1 (v1), not the 3x3 (v1.5)")
    stage1_projection: bool | None = Field(None, description="projection in the first block of stage 1 too")
    convolution_groups: int | None = Field(None, ge=1, description="resnext: groups of the 3x3 convolutions")
    group_dim: int | None = Field(None, ge=1, description="channels in each group of a grouped convolution")
    widenet: bool | None = Field(None, description="resnext on small images: four times as wide")
    expand_ratio: int | None = Field(None, ge=1, description="efficientnet: widening inside a block")
    se: bool | None = Field(None, description="efficientnet: squeeze and excitation")
    depth_divisor: int | None = Field(None, ge=1, description="efficientnet: widths are multiples of this")
    top_width: int | None = Field(None, ge=0, description="width of the last 1x1 layer; 0 leaves it out (efficientnet)")
    width_coefficient: float | None = Field(None, gt=0, description="efficientnet: factor on widths")
    depth_coefficient: float | None = Field(None, gt=0, description="efficientnet: factor on repeats")
    use_relu: bool | None = Field(None, description="efficientnet: ReLU instead of swish")
    dropout_rate: float | None = Field(None, ge=0, lt=1, description="share dropped before the classifier")
    block_survival_prob: float | None = Field(None, gt=0, le=1, description="stochastic depth: last block's survival")
    proxy_norm: bool | None = Field(None, description="efficientnet: normalize activations by a Gaussian proxy")
    proxy_epsilon: float | None = Field(None, gt=0, description="epsilon of the proxy's variance")
    init_path: Path | None = Field(
        None, description="safetensors file or checkpoint to take initial weights from (also torchvision's, timm's)"
    )
    variable_filter: tuple[str, ...] = Field((), description="train only parameters whose name has one of these in it")
    freeze_until: str | None = Field(None, description="block from which on the network is trained; those before stay")


class DataConfig(Section):
    """Where images come from and how they enter the network."""

    title = "data"

    dataset: str | None = Field(
        None, description="data set name, see `convolve data list`; unset: MNIST, or the built-in digits without it"
    )
    data_dir: Path | None = Field(None, description="folder with the data; unset: $DATA_DIR, then the cache")
    download: bool = Field(True, description="fetch a known data set that is not there yet")
    generated_data: bool = Field(False, description="random images made once on the host, for speed measurements")
    synthetic_data: bool = Field(False, description="random images that live on the device, no host input at all")
    normalization: Literal["unit", "symmetric", "standard", "imagenet", "imagenet-mean"] = Field(
        "unit",
        description="pixels become [0, 1], [-1, 1], mean 0 and deviation 1 over the training set, the same with "
        "ImageNet's figures, or only ImageNet's mean is taken away",
    )
    hostside_norm: bool = Field(False, description="normalize on the host and move floats; off: move bytes")
    hold_out: int = Field(0, ge=0, description="number of first training images that are kept out of training")
    dataset_percentage_to_use: float = Field(100.0, gt=0, le=100, description="share of the training images to use")
    image_size: int | None = Field(
        None, ge=1, le=4096, description="side of the network's input; unset: the images' own, or the network's"
    )
    augment: Literal["auto", "none", "flip", "pad-crop", "pad-crop-flip", "resized-crop-flip"] = Field(
        "auto", description="what happens to training images; auto: what is usual for the data set"
    )
    train_with_valid_preprocessing: bool = Field(False, description="train on images prepared as in validation")
    flip: Literal["random", "alternating"] = Field(
        "random", description="mirror images by a coin, or each one in every second epoch"
    )
    crop_padding: int = Field(4, ge=1, description="pad-crop, pad-crop-flip: margin in pixels")
    padding_mode: Literal["mean", "black", "reflect"] = Field(
        "mean", description="pad-crop, pad-crop-flip: what the margin shows"
    )
    crop_area: tuple[float, float] = Field((0.08, 1.0), description="resized-crop-flip: range of the share of the area")
    crop_aspect: tuple[float, float] = Field((0.75, 4 / 3), description="resized-crop-flip: range of width to height")
    cutout: int = Field(0, ge=0, description="side of a square that is cut out of every training image")
    erase_probability: float = Field(0.0, ge=0, le=1, description="probability of erasing a random rectangle")
    color_jitter: tuple[float, float, float] = Field(
        (0.0, 0.0, 0.0), description="strength of random changes to brightness, contrast, saturation"
    )
    randaugment_layers: int = Field(0, ge=0, le=8, description="RandAugment: operations on each image")
    randaugment_magnitude: float = Field(9.0, ge=0, le=30, description="RandAugment: strength of each operation")
    mixup_alpha: float = Field(0.0, ge=0, description="mixup: both parameters of the beta distribution; 0: off")
    cutmix_lambda: float = Field(1.0, ge=0, le=1, description="cutmix: mean share kept of the base image; 1: off")
    cutmix_version: Literal["1", "2"] = Field(
        "1", coerce_numbers_to_str=True, description="cutmix-lambda is the mean of a random share (1), or constant (2)"
    )
    cutmix_lambda_low: float = Field(0.0, ge=0, le=1, description="uniform cutmix: least share kept; 0 and 0: off")
    cutmix_lambda_high: float = Field(0.0, ge=0, le=1, description="uniform cutmix: largest share kept")
    cutmix_disable_prob: float = Field(0.0, ge=0, le=1, description="uniform cutmix: share of steps without it")
    workers: int | None = Field(
        None, ge=0, le=256, description="threads that decode pictures; never changes results; unset: one per CPU thread"
    )
    dataset_cache: bool = Field(True, description="keep decoded pictures in memory while they fit")
    cache_memory: float = Field(2.0, ge=0, description="memory for decoded pictures in GB")
    bad_samples: Literal["error", "skip"] = Field(
        "error", description="a picture that cannot be read: stop and name it, or leave it out and list it"
    )
    bad_samples_limit: float = Field(0.001, ge=0, le=1, description="largest share of a split that may be left out")


class RunConfig(Section):
    """The run as a whole: seed, device, folder, checkpoints, validation."""

    title = "run"

    seed: int = Field(0, ge=0, lt=2**63, description="key of every random choice")
    device: str = Field("auto", description="auto, cpu, cuda, mps, xpu or npu, with an index if needed (cuda:1)")
    threads: int | None = Field(None, ge=1, description="CPU threads; unset: as many as the process may use")
    kernels: Literal["auto", "torch"] = Field(
        "auto", description="auto: layers in native code where there are some for this machine; torch: PyTorch's only"
    )
    run_dir: Path | None = Field(None, description="exact folder of the run")
    log_dir: Path = Field(Path("runs"), description="parent of run folders")
    name_suffix: str | None = Field(None, description="appended to the name of the run folder")
    checkpoints: bool = Field(True, description="save checkpoints")
    ckpts_per_epoch: int = Field(1, ge=0, description="checkpoints in each epoch; 0: only the last one")
    epochs_per_ckpt: int | None = Field(None, ge=1, description="epochs between checkpoints; instead of the above")
    keep_checkpoints: int | None = Field(
        None, ge=1, description="newest checkpoints that are kept, besides the best one; unset: all"
    )
    validation_mode: Literal["during", "after", "none"] = Field(
        "during", description="validate while training, every checkpoint after it, or never"
    )
    validation_views: Literal[1, 2, 6] = Field(
        1, description="views of each test image: 2 adds its mirror image, 6 also both moved by one pixel either way"
    )
    validation_frequency: float = Field(1.0, gt=0, description="epochs between validations while training")


class LogConfig(Section):
    """What is written down, where, and how often."""

    title = "log"

    logs_per_epoch: int = Field(16, ge=1, description="log points in each epoch")
    log_freq: int | None = Field(None, ge=1, description="steps between log points; instead of the above")
    logs: bool = Field(True, description="write log files into the run folder")
    metrics: bool = Field(True, description="count loss and accuracy while training")
    curves: bool = Field(True, description="draw curves.png at the end")
    report: bool = Field(True, description="write report.html at the end")
    mlperf_logging: bool = Field(False, description="write MLPerf's log into the run folder as result_SEED.txt")
    draw_graph: bool = Field(False, description="draw the network into the run folder as model.svg")
    tensorboard: bool = Field(False, description="write TensorBoard events (extra `logs`)")
    wandb: bool = Field(False, description="send metrics to Weights & Biases (extra `logs`)")
    wandb_project: str = Field("convolve", description="project at Weights & Biases")


class Config(BaseModel):
    """One training, said completely."""

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
        return self.optim.batch_size * self.optim.gradient_accumulation_count * self.parallel.replicas

    def settled_optim(self) -> OptimConfig:
        """The optim section with what depends on the global batch worked out: peak rate and rmsprop decay."""
        optim, settled = self.optim, dict[str, float]()
        if optim.base_learning_rate_exponent is not None:
            settled["learning_rate"] = 2**optim.base_learning_rate_exponent * self.global_batch_size
        if optim.rmsprop_base_decay_exp is not None:
            settled["rmsprop_decay"] = 1 - 2**optim.rmsprop_base_decay_exp * self.global_batch_size
        return optim.model_copy(update=settled)

    def replace(self, **options: Any) -> "Config":
        """Return a copy with these options changed, checked by every rule."""
        # The loader imports this module.
        from convolve.config.loading import replace_options

        return replace_options(self, options)

    def values(self) -> dict[str, Any]:
        """All knobs by their flat names, in plain YAML types."""
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
    """Every knob as (section, name, field), in the order of this file."""
    for section, kind in SECTIONS.items():
        for name, field in kind.model_fields.items():
            yield section, name, field


SECTION_OF: dict[str, str] = {name: section for section, name, _ in fields()}
