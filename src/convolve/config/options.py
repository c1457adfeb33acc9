"""The options of a run as typed keyword arguments. Written by scripts/write_options.py; do not edit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class ModelOptions(TypedDict, total=False):
    """The model. Options of some families only default to None: the family decides (model_options.py)."""

    model_size: str | None
    norm_type: Literal["batch", "group", "layer", "none"] | None
    groups: int | None
    bn_decay: float | None
    norm_epsilon: float | None
    conv_padding: Literal["symmetric", "same"] | None
    last_gamma_zero: bool | None
    stride_in_1x1: bool | None
    stage1_projection: bool | None
    convolution_groups: int | None
    group_dim: int | None
    widenet: bool | None
    expand_ratio: int | None
    se: bool | None
    depth_divisor: int | None
    top_width: int | None
    width_coefficient: float | None
    depth_coefficient: float | None
    use_relu: bool | None
    dropout_rate: float | None
    block_survival_prob: float | None
    proxy_norm: bool | None
    proxy_epsilon: float | None
    weights: str | None
    weights_dir: str | Path | None
    weights_mirror: str | None
    variable_filter: Sequence[str]
    freeze_until: str | None
    freeze_norms: bool
    fit_head: bool


class DataOptions(TypedDict, total=False):
    """Source of the images, augmentation and loading."""

    dataset: str | None
    data_dir: str | Path | None
    task: Literal["auto", "single-label", "multi-label", "soft-label"]
    download: bool
    generated_data: bool
    synthetic_data: bool
    normalization: Literal["unit", "symmetric", "standard", "imagenet", "imagenet-mean"] | None
    hostside_norm: bool
    hold_out: int
    validation_fraction: float
    test_fraction: float
    split_rule: Literal["content", "name"]
    folds: int | None
    fold: int | None
    sampler: Literal["shuffle", "balanced"]
    dataset_percentage_to_use: float
    image_size: int | None
    crop_fraction: float | None
    augment: str | Callable[..., object]
    train_with_valid_preprocessing: bool
    flip: Literal["random", "alternating"]
    crop_padding: int
    padding_mode: Literal["mean", "black", "reflect"]
    crop_area: Sequence[float]
    crop_aspect: Sequence[float]
    cutout: int
    erase_probability: float
    color_jitter: Sequence[float]
    randaugment_layers: int
    randaugment_magnitude: float
    mixup_alpha: float
    cutmix_lambda: float
    cutmix_version: Literal["1", "2"]
    cutmix_lambda_low: float
    cutmix_lambda_high: float
    cutmix_disable_prob: float
    workers: int | None
    dataset_cache: bool
    cache_memory: float
    check_data: bool
    bad_samples: Literal["error", "skip"]
    bad_samples_limit: float


class OptimOptions(TypedDict, total=False):
    """Batch size, length of the run and optimizer."""

    batch_size: int
    gradient_accumulation_count: int
    valid_batch_size: int | None
    epochs: float | None
    iterations: int | None
    minutes: float | None
    patience: int | None
    optimizer: str | Callable[..., object]
    learning_rate: float
    base_learning_rate_exponent: float | None
    layer_decay: float
    unfreeze_epochs: float | None
    bias_rate_factor: float
    momentum: float
    nesterov: bool
    adam_betas: Sequence[float]
    optimizer_epsilon: float
    rmsprop_decay: float
    rmsprop_base_decay_exp: float | None
    lars_eeta: float
    lars_epsilon: float
    muon_rest_factor: float
    muon_rest_momentum: float | None
    muon_rounds: int
    muon_fixed_norm: bool
    weight_decay: float
    weight_decay_on: Literal["all", "layers", "matrices"]
    bias_weight_decay: float | None
    weight_decay_exclude: Sequence[str]
    class_weights: Sequence[str]
    label_smoothing: float
    label_smoothing_over: Literal["all", "others"]
    teacher: str | Path | None
    teacher_weight: float
    teacher_temperature: float
    ema_decay: float | None
    weight_avg_n: Sequence[int]
    weight_avg_exp: Sequence[float]
    clip_norm: float | None


class ScheduleOptions(TypedDict, total=False):
    """The learning rate as a function of samples seen."""

    lr_schedule: str
    warmup_epochs: float
    learning_rate_decay: float
    learning_rate_schedule: Sequence[float]
    lr_decay_rate: float
    lr_drops: float
    lr_staircase: bool
    poly_lr_decay_power: float
    poly_lr_end_ratio: float
    abs_end_learning_rate: float | None
    rise_share: float
    fall_share: float
    first_ratio: float
    last_ratio: float


class PrecisionOptions(TypedDict, total=False):
    """Number formats, loss scaling and diagnostics."""

    precision: Literal["32.32", "16.32", "16.16"] | None
    half_type: Literal["fp16", "bf16"]
    stochastic_rounding: bool | None
    enable_half_partials: bool | None
    saturate_on_overflow: bool | None
    fp_exceptions: bool
    force_fp32: Sequence[str]
    half_norm_statistics: bool
    precision_mode: Literal["must_keep_origin_dtype", "allow_fp32_to_fp16", "allow_mix_precision", "force_fp16"] | None
    mixlist_file: str | Path | None
    numerics: Literal["auto", "native", "emulated"]
    device_model: Literal["ipu-mk1", "ipu-mk2", "ascend-910"] | None
    loss_scaling: float | None
    loss_scaling_rule: Literal["static", "dynamic", "ascend", "ramp", "automatic"]
    initial_loss_scaling: float | None
    data_dump_step: str | None
    over_dump: bool
    survey_freq: int | None


class LayoutOptions(TypedDict, total=False):
    """Replicas, pipeline stages and recomputation."""

    replicas: int
    micro_batches: int | None
    bn_span: int
    identical_replica_seeding: bool
    rts: bool
    shards: int
    pipeline_splits: Sequence[str]
    pipeline_schedule: Literal["interleaved", "grouped", "sequential"]
    enable_recomputation: bool
    recompute_checkpoints: Sequence[str]
    epochs_per_sync: float | None
    max_restarts: int


class RunOptions(TypedDict, total=False):
    """Seed, device, run folder, checkpoints and validation."""

    seed: int
    device: str
    threads: int | None
    kernels: Literal["auto", "torch"]
    run_dir: str | Path | None
    resume: bool
    log_dir: str | Path
    name_suffix: str | None
    checkpoints: bool
    ckpts_per_epoch: int
    epochs_per_ckpt: int | None
    keep_checkpoints: int | None
    validation_mode: Literal["during", "after", "none"]
    validation_views: Literal[1, 2, 6]
    validation_frequency: float
    select_ema: bool
    select_by: Literal["accuracy", "loss"]
    verify_steps: bool
    strict: bool


class LogOptions(TypedDict, total=False):
    """Log files, metrics, reports and logging services."""

    logs_per_epoch: int
    log_freq: int | None
    logs: bool
    curves: bool
    report: bool
    mlperf_logging: bool
    draw_graph: bool
    tensorboard: bool
    wandb: bool
    wandb_project: str


class ResumeOptions(LayoutOptions, total=False):
    """What may be given when a run is resumed: its length, its layout over processes, and the user's code again."""

    epochs: float | None
    iterations: int | None
    optimizer: str | Callable[..., object]
    augment: str | Callable[..., object]


class Options(
    ModelOptions,
    DataOptions,
    OptimOptions,
    ScheduleOptions,
    PrecisionOptions,
    LayoutOptions,
    RunOptions,
    LogOptions,
    total=False,
):
    """The options of `convolve.train`, by the names of the command line with underscores."""


class ConfigOptions(Options, total=False):
    """All options of a config."""

    model: str
    metrics: bool
