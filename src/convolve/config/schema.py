"""Every knob of convolve, declared once: its name, type, range, default and meaning.

Fields live in sections, and a room gets its own section only. Names are unique over all sections, so that one flat name
serves the command line (`--batch-size`), a config file (`batch-size:`) and an error message alike.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A group of knobs; unknown names are errors and values cannot change."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())

    title: ClassVar[str]


class ModelConfig(Section):
    """The network."""

    title = "model"

    model: str = Field("lenet5", description="network to train; `convolve describe` lists them")
    model_size: str | None = Field(
        None, coerce_numbers_to_str=True, description="size within a family, as in --model resnet --model-size 50"
    )
    norm_type: Literal["batch", "group", "layer", "none"] | None = Field(None, description="kind of normalisation")
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
    proxy_norm: bool | None = Field(None, description="efficientnet: normalise activations by those of a Gaussian proxy")
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
    normalisation: Literal["unit", "symmetric", "standard"] = Field(
        "unit", description="pixels become [0, 1], [-1, 1], or mean 0 and deviation 1 over the training set"
    )
    hold_out: int = Field(0, ge=0, description="number of first training images that are kept out of training")


class OptimConfig(Section):
    """How weights are updated, and how long."""

    title = "optim"

    batch_size: int = Field(64, ge=1, description="micro batch: samples in one forward and backward pass")
    gradient_accumulation_count: int = Field(1, ge=1, description="micro batches per weight update and replica")
    valid_batch_size: int | None = Field(None, ge=1, description="samples per pass in validation; unset: chosen")
    epochs: float | None = Field(None, gt=0, description="passes over the training data")
    iterations: int | None = Field(None, ge=1, description="weight updates; instead of --epochs")
    optimiser: Literal["sgd", "momentum", "adam", "adamw"] = Field("sgd", description="update rule")
    learning_rate: float = Field(0.01, gt=0, description="learning rate at the top of the schedule")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the `momentum` rule")
    nesterov: bool = Field(False, description="Nesterov form of momentum")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="moment decays of adam and adamw")
    optimiser_epsilon: float = Field(1e-8, gt=0, description="epsilon in the denominator of adam and adamw")
    weight_decay: float = Field(0.0, ge=0, description="L2 decay (adamw: decoupled)")
    weight_decay_on: Literal["all", "matrices"] = Field(
        "matrices", description="parameters that decay: all, or those with two dimensions or more"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread evenly over all classes")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of the whole gradient; unset: no clipping")


class ScheduleConfig(Section):
    """The learning rate as a function of samples seen."""

    title = "schedule"

    lr_schedule: Literal["constant", "stepped", "cosine", "exponential", "polynomial"] = Field(
        "constant", description="shape of the learning-rate curve"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs over which the rate rises linearly from zero")
    learning_rate_decay: float = Field(0.1, gt=0, description="stepped: factor at each drop")
    learning_rate_schedule: tuple[float, ...] = Field((0.5, 0.75), description="stepped: drops, as shares of the run")
    lr_decay_rate: float = Field(0.97, gt=0, description="exponential: factor of each drop")
    lr_drops: float = Field(146.0, gt=0, description="exponential: number of drops in the run")
    lr_staircase: bool = Field(True, description="exponential: whole drops only, not a smooth curve")
    poly_lr_decay_power: float = Field(2.0, gt=0, description="polynomial: power of the decay")
    poly_lr_end_ratio: float = Field(1e-5, ge=0, description="polynomial: last rate as a share of the first")


class PrecisionConfig(Section):
    """What is stored and computed in which number format."""

    title = "precision"

    precision: Literal["32.32"] = Field("32.32", description="compute.master formats in bits")


class ParallelConfig(Section):
    """How the work is laid out over devices."""

    title = "parallel"

    replicas: int = Field(1, ge=1, le=1, description="data-parallel copies of the model")
    shards: int = Field(1, ge=1, le=1, description="stages the model is split into")


class RunConfig(Section):
    """The run as a whole: seed, device, folder, checkpoints, validation."""

    title = "run"

    seed: int = Field(0, ge=0, lt=2**63, description="key of every random choice")
    device: str = Field("auto", description="auto, cpu, cuda, mps, xpu or npu, with an index if needed (cuda:1)")
    threads: int | None = Field(None, ge=1, description="CPU threads; unset: as many as the process may use")
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
    validation_frequency: float = Field(1.0, gt=0, description="epochs between validations while training")


class LogConfig(Section):
    """What is written down, where, and how often."""

    title = "log"

    logs_per_epoch: int = Field(16, ge=1, description="log points in each epoch")
    log_freq: int | None = Field(None, ge=1, description="steps between log points; instead of the above")
    logs: bool = Field(True, description="write log files into the run folder")
    metrics: bool = Field(True, description="count loss and accuracy while training")
    curves: bool = Field(True, description="draw curves.png at the end")
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
