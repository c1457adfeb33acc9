"""The knobs of learning: what an update is made of, and the course of the learning rate.

Every knob of convolve, declared once: its name, type, range, default and meaning.

Fields live in sections, and a room gets its own section only. Names are unique over all sections, so that one flat name
serves the command line (`--batch-size`), a config file (`batch-size:`) and an error message alike.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from convolve.config.section import Section, normalize_choice


class OptimConfig(Section):
    """How weights are updated, and how long."""

    title = "optim"

    batch_size: int = Field(64, ge=1, description="micro batch: samples in one forward and backward pass")
    gradient_accumulation_count: int = Field(1, ge=1, description="micro batches per weight update and replica")
    valid_batch_size: int | None = Field(None, ge=1, description="samples per pass in validation; unset: chosen")
    epochs: float | None = Field(None, gt=0, description="passes over the training data")
    iterations: int | None = Field(None, ge=1, description="weight updates; instead of --epochs")
    optimizer: Annotated[
        Literal["sgd", "momentum", "adam", "adamw", "rmsprop", "rmsprop-tf", "lars", "muon"],
        BeforeValidator(partial(normalize_choice, {"RMSprop": "rmsprop-tf", "sgd_combined": "momentum"})),
    ] = Field("sgd", description="update rule; rmsprop-tf has its epsilon inside the root and begins at 1")
    learning_rate: float = Field(0.01, gt=0, description="learning rate at the top of the schedule")
    base_learning_rate_exponent: float | None = Field(
        None, description="N for a rate of 2^N x global batch; instead of --learning-rate"
    )
    bias_rate_factor: float = Field(1.0, gt=0, description="factor on the rate of norms and biases")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of momentum, rmsprop, lars and muon")
    nesterov: bool = Field(False, description="Nesterov form of momentum")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="moment decays of adam and adamw")
    optimizer_epsilon: float = Field(1e-8, gt=0, description="epsilon in the denominator of adam and adamw")
    rmsprop_decay: float = Field(0.99, ge=0, lt=1, description="share of the old mean square that rmsprop keeps")
    rmsprop_base_decay_exp: float | None = Field(
        None, description="N for an rmsprop decay of 1 - 2^N x global batch; instead of --rmsprop-decay"
    )
    lars_eeta: float = Field(0.001, gt=0, description="lars: trust, the length of an update as a share of the weight's")
    lars_epsilon: float = Field(0.0, ge=0, description="lars: epsilon in the denominator of the trust ratio")
    muon_rest_factor: float = Field(0.1, gt=0, description="muon: factor on the rate of what is not a convolution")
    muon_rest_momentum: float | None = Field(
        None, ge=0, lt=1, description="muon: momentum of what is not a convolution; unset: the same"
    )
    muon_rounds: int = Field(5, ge=1, description="muon: rounds of the orthogonalization")
    muon_fixed_norm: bool = Field(
        False, description="muon: bring each convolution to the norm sqrt(outputs) before each update, instead of decay"
    )
    weight_decay: float = Field(0.0, ge=0, description="L2 decay (adamw and muon: decoupled; lars: inside the trust)")
    weight_decay_on: Literal["all", "matrices"] = Field(
        "matrices", description="parameters that decay: all, or those with two dimensions or more"
    )
    bias_weight_decay: float | None = Field(
        None, ge=0, description="decay of norms and biases; unset: as --weight-decay-on says (lars: none)"
    )
    weight_decay_exclude: tuple[str, ...] = Field(
        (), description="parameters whose name has one of these in it do not decay (and lars treats them plainly)"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread evenly over classes")
    label_smoothing_over: Literal["all", "others"] = Field(
        "all", description="classes it is spread over: all K, or the K - 1 others (Graphcore's TensorFlow application)"
    )
    ema_decay: float | None = Field(
        None, ge=0, lt=1, description="keep a running average of the weights with this decay per step; validated too"
    )
    weight_avg_n: tuple[int, ...] = Field(
        (), description="at the end, average the checkpoints of the last N epochs, for each N given"
    )
    weight_avg_exp: tuple[float, ...] = Field(
        (), description="at the end, average all checkpoints exponentially, for each decay given"
    )
    clip_norm: float | None = Field(None, gt=0, description="largest norm of the whole gradient; unset: no clipping")


class ScheduleConfig(Section):
    """The learning rate as a function of samples seen."""

    title = "schedule"

    lr_schedule: Annotated[
        str, BeforeValidator(lambda name: {"step": "stepped", "polynomial_decay_lr": "polynomial"}.get(name, name))
    ] = Field(
        "constant",
        description="shape of the learning-rate curve: constant, stepped, cosine, exponential, polynomial, trapezoid, "
        "onecycle, or the name of an entry point in the group convolve.schedules",
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs over which the rate rises linearly from zero")
    learning_rate_decay: float = Field(0.1, gt=0, description="stepped: factor at each drop")
    learning_rate_schedule: tuple[float, ...] = Field((0.5, 0.75), description="stepped: drops, as shares of the run")
    lr_decay_rate: float = Field(0.97, gt=0, description="exponential: factor of each drop")
    lr_drops: float = Field(146.0, gt=0, description="exponential: number of drops in the run")
    lr_staircase: bool = Field(True, description="exponential: whole drops only, not a smooth curve")
    poly_lr_decay_power: float = Field(2.0, gt=0, description="polynomial: power of the decay")
    poly_lr_end_ratio: float = Field(1e-5, ge=0, description="polynomial: last rate as a share of the first")
    rise_share: float = Field(0.2, ge=0, lt=1, description="trapezoid, onecycle: share of the run in which it rises")
    fall_share: float = Field(0.3, gt=0, le=1, description="trapezoid: share of the run in which the rate falls")
    first_ratio: float = Field(0.2, ge=0, le=1, description="trapezoid, onecycle: first rate as a share of the peak")
    last_ratio: float = Field(0.0, ge=0, le=1, description="trapezoid, onecycle: last rate as a share of the peak")


class PrecisionConfig(Section):
    """What is stored and computed in which number format."""

    title = "precision"

    precision: Literal["32.32", "16.32", "16.16"] | None = Field(
        None, description="compute.master formats in bits; unset: what the device model has, else 32.32"
    )
    half_type: Literal["fp16", "bf16"] = Field("fp16", description="which 16-bit format")
    stochastic_rounding: bool | None = Field(
        None, description="round up or down by chance, keyed by seed, step and place; unset: on for 16.16"
    )
    enable_half_partials: bool | None = Field(
        None, description="convolutions and matrix products add up in 16 bits; unset: off, or the device model's"
    )
    saturate_on_overflow: bool | None = Field(
        None, description="values beyond the range become its end, not infinity; unset: off, or the device model's"
    )
    fp_exceptions: bool = Field(False, description="stop at the first overflow, invalid result or division by zero")
    force_fp32: tuple[str, ...] = Field((), description="layers that stay in fp32, by name (layer1 means all inside)")
    half_norm_statistics: bool = Field(False, description="norm statistics in 16 bits too; otherwise they are fp32")
    precision_mode: (
        Literal["must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_mix_precision", "force_fp16"] | None
    ) = Field(None, description="Ascend's name for a policy by operation; instead of --precision")
    mixlist_file: Path | None = Field(None, description="JSON with white and black lists for allow_mix_precision")
    numerics: Literal["auto", "native", "emulated"] = Field(
        "auto", description="16-bit kernels of the machine, exact emulation, or native where it works and is fast"
    )
    device_model: Literal["ipu-mk1", "ipu-mk2", "ascend-910"] | None = Field(
        None, description="arithmetic and memory of a named accelerator, on whatever device there is"
    )
    loss_scaling: float | None = Field(
        None, ge=1, description="factor on the loss while gradients are computed; unset: 128 in 16 bits, else 1"
    )
    loss_scaling_rule: Literal["static", "dynamic", "ascend", "ramp", "automatic"] = Field(
        "static", description="how the factor changes during the run"
    )
    initial_loss_scaling: float | None = Field(
        None, ge=1, description="first factor of a changing rule; unset: the rule's own"
    )
    data_dump_step: str | None = Field(None, description="steps whose tensors are written out, such as 10|20|30-35")
    over_dump: bool = Field(False, description="write the operation that overflows first, with its inputs")
    survey_freq: int | None = Field(
        None, ge=1, description="steps between surveys of exponents, underflow and overflow in each layer; unset: never"
    )


AUTO_SPLITS = ("auto",)


class ParallelConfig(Section):
    """How the work is laid out over devices."""

    title = "parallel"

    replicas: int = Field(1, ge=1, description="data-parallel copies of the model, one process each")
    bn_span: int = Field(1, ge=1, description="neighboring replicas whose batch norms see their samples as one batch")
    identical_replica_seeding: bool = Field(
        False, description="replicas draw the same random masks and roundings, as if each were the first"
    )
    rts: bool = Field(False, description="replicated tensor sharding: each replica keeps its share of optimizer state")
    shards: int = Field(1, ge=1, description="stages the model is split into, one process each")
    pipeline_splits: tuple[str, ...] = Field(
        AUTO_SPLITS, description="blocks at which the stages after the first begin; auto: balanced by measured time"
    )
    pipeline_schedule: Annotated[
        Literal["interleaved", "grouped", "sequential"], BeforeValidator(partial(normalize_choice, {}))
    ] = Field(
        "interleaved",
        description="order of passes: one forward one backward, all forward then all backward, or one micro batch "
        "after the other",
    )
    enable_recomputation: bool = Field(
        False, description="keep activations at block boundaries only and compute the others again in the backward pass"
    )
    recompute_checkpoints: tuple[str, ...] = Field(
        (), description="patterns of the blocks after which activations are kept, such as layer*/1; unset: every block"
    )
    epochs_per_sync: float | None = Field(
        None, gt=0, description="epochs between checks that all replicas hold the same weights; unset: at the start"
    )
    max_restarts: int = Field(0, ge=0, description="times a job goes on from its newest checkpoint after a dead rank")

    @property
    def processes(self) -> int:
        """One for every stage of every replica."""
        return self.replicas * self.shards
