"""Options of training: optimizer, learning-rate schedule, number formats, parallelism. Conventions: see schema.py."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from convolve.config.section import Section, normalize_choice


def _as_words(value: Any) -> Any:
    """Accept a single word, and numbers besides text."""
    values = (value,) if isinstance(value, str | int | float) else value
    return tuple(map(str, values)) if isinstance(values, tuple | list) else values


OptimizerName = Literal["sgd", "momentum", "adam", "adamw", "rmsprop", "rmsprop-tf", "lars", "muon"]


def _read_optimizer(value: Any) -> Any:
    """Return a built-in optimizer in its usual spelling; other names stay as they are."""
    name = normalize_choice({"RMSprop": "rmsprop-tf", "sgd_combined": "momentum"}, value)
    return name if name in get_args(OptimizerName) else value


class OptimConfig(Section):
    """Batch size, length of the run and optimizer."""

    batch_size: int = Field(64, ge=1, description="micro batch: samples in one forward and backward pass")
    gradient_accumulation_count: int = Field(1, ge=1, description="micro batches per weight update and replica")
    valid_batch_size: int | None = Field(None, ge=1, description="samples per pass in validation [chosen]")
    epochs: float | None = Field(None, ge=0, description="length of the run in epochs")
    iterations: int | None = Field(None, ge=1, description="optimizer steps; replaces --epochs")
    minutes: float | None = Field(
        None, gt=0, description="time budget from the start of the process; a run that needs longer stops early"
    )
    patience: int | None = Field(
        None, ge=1, description="stop early after this many validations without improvement [never]"
    )
    optimizer: Annotated[OptimizerName | str, BeforeValidator(_read_optimizer)] = Field(
        "sgd",
        description="optimizer, a name of a plugin, or PACKAGE:NAME of your code; rmsprop-tf has epsilon inside the "
        "square root and starts its mean square at 1",
    )
    learning_rate: float = Field(0.01, gt=0, description="peak learning rate")
    base_learning_rate_exponent: float | None = Field(
        None, ge=-64, le=64, description="N for a learning rate of 2^N x global batch; replaces --learning-rate"
    )
    layer_decay: float = Field(
        1.0, gt=0, le=1, description="factor on the learning rate from each block to the one before it"
    )
    unfreeze_epochs: float | None = Field(
        None, gt=0, description="gradual unfreezing: train the classifier, then one stage more after every N epochs"
    )
    bias_rate_factor: float = Field(1.0, gt=0, description="factor on the learning rate of norms and biases")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of momentum, rmsprop, lars and muon")
    nesterov: bool = Field(False, description="Nesterov form of momentum")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="betas of adam and adamw")
    optimizer_epsilon: float = Field(1e-8, gt=0, description="epsilon in the denominator of adam and adamw")
    rmsprop_decay: float = Field(
        0.99, ge=0, lt=1, description="fraction of the mean square that rmsprop keeps per step"
    )
    rmsprop_base_decay_exp: float | None = Field(
        None, ge=-64, le=64, description="N for an rmsprop decay of 1 - 2^N x global batch; replaces --rmsprop-decay"
    )
    lars_eeta: float = Field(
        0.001, gt=0, description="lars: trust coefficient, the norm of an update relative to that of the weight"
    )
    lars_epsilon: float = Field(0.0, ge=0, description="lars: epsilon in the denominator of the trust ratio")
    muon_rest_factor: float = Field(
        0.1, gt=0, description="muon: factor on the learning rate of parameters that are not convolutions"
    )
    muon_rest_momentum: float | None = Field(
        None, ge=0, lt=1, description="muon: momentum of parameters that are not convolutions [--momentum]"
    )
    muon_rounds: int = Field(5, ge=1, description="muon: iterations of the orthogonalization")
    muon_fixed_norm: bool = Field(
        False, description="muon: scale each convolution to the norm sqrt(outputs) before each update, instead of decay"
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 decay (adamw and muon: decoupled; lars: inside the trust)")
    weight_decay_on: Literal["all", "layers", "matrices"] = Field(
        "matrices",
        description="parameters that decay: all, weights and biases of convolutions and linear layers, or those with "
        "two dimensions or more",
    )
    bias_weight_decay: float | None = Field(
        None, ge=0, description="decay of norms and biases [follows --weight-decay-on; lars: none]"
    )
    weight_decay_exclude: tuple[str, ...] = Field(
        (), description="exclude parameters whose name contains one of these from decay (and from the scaling of lars)"
    )
    class_weights: Annotated[tuple[str, ...], BeforeValidator(_as_words)] = Field(
        ("none",),
        description="weight of the loss by class: none, auto (inversely proportional to the number of training "
        "images, 1 on average), or one number for each class",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="fraction of the target spread evenly over classes")
    label_smoothing_over: Literal["all", "others"] = Field(
        "all",
        description="classes that label smoothing covers: all K, or the K - 1 others (Graphcore's TensorFlow code)",
    )
    teacher: Path | None = Field(None, description="run or checkpoint whose probabilities are learned (distillation)")
    teacher_weight: float = Field(
        0.5, gt=0, le=1, description="with --teacher: weight of its loss; the labels have the rest"
    )
    teacher_temperature: float = Field(
        2.0, gt=0, description="with --teacher: divides the logits of both models, so small probabilities count more"
    )
    ema_decay: float | None = Field(
        None, ge=0, lt=1, description="keep and validate a running average of the weights with this decay per step"
    )
    weight_avg_n: tuple[int, ...] = Field(
        (), description="average the checkpoints of the last N epochs at the end, for each N"
    )
    weight_avg_exp: tuple[float, ...] = Field(
        (), description="average all checkpoints exponentially at the end, for each decay"
    )
    clip_norm: float | None = Field(None, gt=0, description="max norm of the whole gradient [no clipping]")


_SCHEDULE_ALIASES = {"step": "stepped", "polynomial_decay_lr": "polynomial"}


class ScheduleConfig(Section):
    """The learning rate as a function of samples seen."""

    lr_schedule: Annotated[
        str, BeforeValidator(lambda name: _SCHEDULE_ALIASES.get(name, name) if isinstance(name, str) else name)
    ] = Field(
        "constant",
        description="learning-rate schedule: constant, stepped, cosine, exponential, polynomial, trapezoid, "
        "onecycle, or an entry point in the group convolve.schedules",
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of linear warm-up from zero")
    learning_rate_decay: float = Field(0.1, gt=0, description="stepped: factor at each milestone")
    learning_rate_schedule: tuple[float, ...] = Field(
        (0.5, 0.75), description="stepped: milestones, as fractions of the run"
    )
    lr_decay_rate: float = Field(0.97, gt=0, description="exponential: factor of each drop")
    lr_drops: float = Field(146.0, gt=0, description="exponential: number of drops in the run")
    lr_staircase: bool = Field(True, description="exponential: whole drops only, not a smooth curve")
    poly_lr_decay_power: float = Field(2.0, gt=0, description="polynomial: power of the decay")
    poly_lr_end_ratio: float = Field(
        1e-5, ge=0, description="polynomial: final learning rate as a fraction of the first"
    )
    abs_end_learning_rate: float | None = Field(
        None, ge=0, description="polynomial: final learning rate; replaces --poly-lr-end-ratio"
    )
    rise_share: float = Field(
        0.2, ge=0, lt=1, description="trapezoid, onecycle: fraction of the run with a rising learning rate"
    )
    fall_share: float = Field(
        0.3, gt=0, le=1, description="trapezoid: fraction of the run with a falling learning rate"
    )
    first_ratio: float = Field(
        0.2, ge=0, le=1, description="trapezoid, onecycle: first learning rate as a fraction of the peak"
    )
    last_ratio: float = Field(
        0.0, ge=0, le=1, description="trapezoid, onecycle: last learning rate as a fraction of the peak"
    )


class PrecisionConfig(Section):
    """Number formats, loss scaling and diagnostics."""

    precision: Literal["32.32", "16.32", "16.16"] | None = Field(
        None, description="bits of compute.master formats [the device model's, else 32.32]"
    )
    half_type: Literal["fp16", "bf16"] = Field("fp16", description="16-bit format")
    stochastic_rounding: bool | None = Field(
        None, description="round up or down at random, keyed by seed, step and operation [on for 16.16]"
    )
    enable_half_partials: bool | None = Field(
        None, description="accumulate convolutions and matrix products in 16 bits [the device model's, else off]"
    )
    saturate_on_overflow: bool | None = Field(
        None,
        description="clamp values beyond the range instead of overflowing to infinity [the device model's, else off]",
    )
    fp_exceptions: bool = Field(False, description="stop at the first overflow, invalid result or division by zero")
    force_fp32: tuple[str, ...] = Field(
        (), description="names of layers to keep in fp32; layer1 includes all layers inside"
    )
    half_norm_statistics: bool = Field(False, description="compute norm statistics in 16 bits instead of fp32")
    precision_mode: (
        Literal["must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_mix_precision", "force_fp16"] | None
    ) = Field(None, description="policy by operation, as named by Ascend; replaces --precision")
    mixlist_file: Path | None = Field(None, description="JSON file with white and black lists for allow_mix_precision")
    numerics: Literal["auto", "native", "emulated"] = Field(
        "auto",
        description="16-bit kernels of the machine (native), exact emulation, or native if it works and is fast (auto)",
    )
    device_model: Literal["ipu-mk1", "ipu-mk2", "ascend-910"] | None = Field(
        None, description="emulate the arithmetic and memory of a named accelerator on any device"
    )
    loss_scaling: float | None = Field(
        None, ge=1, description="factor on the loss during the backward pass [128 in 16 bits, else 1]"
    )
    loss_scaling_rule: Literal["static", "dynamic", "ascend", "ramp", "automatic"] = Field(
        "static", description="rule that changes the loss scale during the run"
    )
    initial_loss_scaling: float | None = Field(
        None, ge=1, description="initial loss scale of a changing rule [the rule's]"
    )
    data_dump_step: str | None = Field(None, description="steps whose tensors are dumped, such as 10|20|30-35")
    over_dump: bool = Field(False, description="dump the first operation that overflows, with its inputs")
    survey_freq: int | None = Field(
        None, ge=1, description="steps between surveys of exponents, underflow and overflow in each layer [never]"
    )


AUTO_SPLITS = ("auto",)


class ParallelConfig(Section):
    """Replicas, pipeline stages and recomputation."""

    replicas: int = Field(1, ge=1, description="data-parallel copies of the model, one process each")
    micro_batches: int | None = Field(
        None,
        ge=1,
        description="micro batches per weight update of all replicas, which run parts that differ by at most one "
        "[accumulation x replicas]",
    )
    bn_span: int = Field(1, ge=1, description="replicas that share batch-norm statistics")
    identical_replica_seeding: bool = Field(
        False, description="use the random masks and roundings of the first replica in all replicas"
    )
    rts: bool = Field(False, description="replicated tensor sharding: split the optimizer state over the replicas")
    shards: int = Field(1, ge=1, description="pipeline stages of the model, one process each")
    pipeline_splits: tuple[str, ...] = Field(
        AUTO_SPLITS, description="first blocks of the stages after the first; auto: balanced by measured time"
    )
    pipeline_schedule: Annotated[
        Literal["interleaved", "grouped", "sequential"], BeforeValidator(partial(normalize_choice, {}))
    ] = Field(
        "interleaved",
        description="order of passes: one forward one backward; the same with more micro batches in flight, as "
        "Graphcore's Grouped; or one micro batch at a time",
    )
    enable_recomputation: bool = Field(
        False, description="keep activations only at block boundaries and recompute the others in the backward pass"
    )
    recompute_checkpoints: tuple[str, ...] = Field(
        (), description="patterns of the blocks after which activations are kept, such as layer*/1 [every block]"
    )
    epochs_per_sync: float | None = Field(
        None, gt=0, description="epochs between checks that all replicas have the same weights [only at the start]"
    )
    max_restarts: int = Field(0, ge=0, description="restarts from the newest checkpoint after a rank has died")

    @property
    def processes(self) -> int:
        """Return the number of processes: one for every stage of every replica."""
        return self.replicas * self.shards
