"""The knobs of learning: what an update is made of, and the course of the learning rate."""

from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from convolve.config.section import Section, respell


class OptimConfig(Section):
    """How weights are updated, and how long."""

    title = "optim"

    batch_size: int = Field(64, ge=1, description="micro batch: samples in one forward and backward pass")
    gradient_accumulation_count: int = Field(1, ge=1, description="micro batches per weight update and replica")
    valid_batch_size: int | None = Field(None, ge=1, description="samples per pass in validation; unset: chosen")
    epochs: float | None = Field(None, gt=0, description="passes over the training data")
    iterations: int | None = Field(None, ge=1, description="weight updates; instead of --epochs")
    optimiser: Annotated[
        Literal["sgd", "momentum", "adam", "adamw", "rmsprop", "rmsprop-tf", "lars", "muon"],
        BeforeValidator(partial(respell, {"RMSprop": "rmsprop-tf", "sgd_combined": "momentum"})),
    ] = Field("sgd", description="update rule; rmsprop-tf has its epsilon inside the root and begins at 1")
    learning_rate: float = Field(0.01, gt=0, description="learning rate at the top of the schedule")
    base_learning_rate_exponent: float | None = Field(
        None, description="N for a rate of 2^N x global batch; instead of --learning-rate"
    )
    bias_rate_factor: float = Field(1.0, gt=0, description="factor on the rate of norms and biases")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of momentum, rmsprop, lars and muon")
    nesterov: bool = Field(False, description="Nesterov form of momentum")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="moment decays of adam and adamw")
    optimiser_epsilon: float = Field(1e-8, gt=0, description="epsilon in the denominator of adam and adamw")
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
    muon_rounds: int = Field(5, ge=1, description="muon: rounds of the orthogonalisation")
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
