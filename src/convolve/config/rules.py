"""Rules across several options. Each error has the options as typed, the broken rule, and what to set."""

from importlib.metadata import entry_points

from convolve.config.schema import Config
from convolve.errors import ConfigError, suggest

SCHEDULES = ("constant", "stepped", "cosine", "exponential", "polynomial", "trapezoid", "onecycle")
SCHEDULE_GROUP = "convolve.schedules"


def check(config: Config) -> None:
    """Raise on the first rule that a config breaks."""
    for rule in (
        *DATA_RULES,
        _one_kind_of_made_up_data,
        _drops_inside_the_run,
        _warmup_inside_the_run,
        _momentum_for_nesterov,
        _known_schedule,
        _trapezoid_inside_the_run,
        _decay_of_rmsprop,
        _checkpoints_to_average,
        _one_way_to_say_a_policy,
        _mix_list_has_a_use,
        _ramp_rises,
        _folder_to_resume,
        _enough_accumulation,
        _whole_spans,
        _spans_of_readable_samples,
        _each_split_once,
        _recomputation_is_on,
        *FINE_TUNING_RULES,
    ):
        rule(config)


def _one_kind_of_made_up_data(config: Config) -> None:
    if config.data.generated_data and config.data.synthetic_data:
        raise ConfigError(
            "--generated-data with --synthetic-data: images come either from the host (generated) or from the device "
            "(synthetic); omit one"
        )


def _drops_inside_the_run(config: Config) -> None:
    drops = config.schedule.learning_rate_schedule
    if any(not 0 < drop < 1 for drop in drops) or list(drops) != sorted(drops):
        raise ConfigError(
            f"--learning-rate-schedule {' '.join(map(str, drops))}: milestones must be increasing fractions of the run "
            "between 0 and 1, such as 0.5 0.75"
        )


def _warmup_inside_the_run(config: Config) -> None:
    epochs, warmup = config.optim.epochs, config.schedule.warmup_epochs
    if epochs and warmup >= epochs:
        raise ConfigError(f"--warmup-epochs {warmup:g} with --epochs {epochs:g}: the warm-up must end before the run")


def _momentum_for_nesterov(config: Config) -> None:
    if config.optim.nesterov and config.optim.optimizer != "momentum":
        raise ConfigError(
            f"--nesterov with --optimizer {config.optim.optimizer}: is a form of momentum; set --optimizer momentum"
        )


def _known_schedule(config: Config) -> None:
    name = config.schedule.lr_schedule
    if name not in SCHEDULES:
        known = {*SCHEDULES, *(entry.name for entry in entry_points(group=SCHEDULE_GROUP))}
        if name not in known:
            raise ConfigError(f"--lr-schedule {name}: unknown schedule; {suggest(name, known)}")


def _trapezoid_inside_the_run(config: Config) -> None:
    schedule = config.schedule
    if schedule.lr_schedule == "trapezoid" and schedule.rise_share + schedule.fall_share > 1:
        raise ConfigError(
            f"--rise-share {schedule.rise_share:g} with --fall-share {schedule.fall_share:g}: the sum exceeds 1, the "
            "whole run; lower one"
        )


def _decay_of_rmsprop(config: Config) -> None:
    decay = config.resolved_optim().rmsprop_decay
    if decay < 0:
        raise ConfigError(
            f"--rmsprop-base-decay-exp {config.optim.rmsprop_base_decay_exp:g} with a global batch of "
            f"{config.global_batch_size}: the decay of {decay:g} must not be negative; lower one"
        )


def _checkpoints_to_average(config: Config) -> None:
    optim = config.optim
    if (optim.weight_avg_n or optim.weight_avg_exp) and not config.run.checkpoints:
        raise ConfigError(
            "--weight-avg-n or --weight-avg-exp with --no-checkpoints: averages need checkpoints; omit --no-checkpoints"
        )
    if any(count < 1 for count in optim.weight_avg_n) or any(not 0 <= decay < 1 for decay in optim.weight_avg_exp):
        raise ConfigError(
            f"--weight-avg-n {' '.join(map(str, optim.weight_avg_n))} --weight-avg-exp "
            f"{' '.join(map(str, optim.weight_avg_exp))}: counts must be at least 1, decays in [0, 1)"
        )


def _one_way_to_say_a_policy(config: Config) -> None:
    precision = config.precision
    if precision.precision_mode is not None and precision.precision is not None:
        raise ConfigError(
            f"--precision-mode {precision.precision_mode} with --precision {precision.precision}: both set the number "
            "formats; omit one"
        )


def _mix_list_has_a_use(config: Config) -> None:
    precision = config.precision
    if precision.mixlist_file is not None and precision.precision_mode != "allow_mix_precision":
        raise ConfigError(
            f"--mixlist-file {precision.mixlist_file}: has no effect; add --precision-mode allow_mix_precision"
        )


def _ramp_rises(config: Config) -> None:
    precision = config.precision
    first, last = precision.initial_loss_scaling or 1.0, precision.loss_scaling or 128.0
    if precision.loss_scaling_rule == "ramp" and first > last:
        raise ConfigError(
            f"--initial-loss-scaling {first:g} with --loss-scaling {last:g}: a ramp must rise; lower the first"
        )


def _folder_to_resume(config: Config) -> None:
    if config.run.resume and config.run.run_dir is None:
        raise ConfigError("--resume: which run is not known; name its folder with --run-dir")


def _enough_accumulation(config: Config) -> None:
    most = config.optim.gradient_accumulation_count * config.parallel.replicas
    if config.micro_batches > most:
        raise ConfigError(
            f"--micro-batches {config.micro_batches}: accumulation x replicas are only {most}; raise "
            "--gradient-accumulation-count"
        )


def _whole_spans(config: Config) -> None:
    span, replicas = config.parallel.bn_span, config.parallel.replicas
    if replicas % span:
        raise ConfigError(
            f"--bn-span {span} with --replicas {replicas}: must divide the number of replicas; "
            f"choose a divisor of {replicas}"
        )


def _spans_of_readable_samples(config: Config) -> None:
    span = config.parallel.bn_span
    if span > 1 and config.data.bad_samples == "skip":
        raise ConfigError(
            f"--bad-samples skip with --bn-span {span}: replicas of a span wait for each other's micro batches, but "
            "one without readable samples is skipped; remove bad samples (`convolve data check` lists them)"
        )


def _each_split_once(config: Config) -> None:
    splits = config.parallel.pipeline_splits
    if len(set(splits)) != len(splits):
        raise ConfigError(f"--pipeline-splits {' '.join(splits)}: a block can start only one stage; name each once")


def _recomputation_is_on(config: Config) -> None:
    if config.parallel.recompute_checkpoints and not config.parallel.enable_recomputation:
        raise ConfigError("--recompute-checkpoints: has no effect; add --enable-recomputation")


def _partners_for_mixing(config: Config) -> None:
    data, batch = config.data, config.global_batch_size
    cutmix = data.cutmix_lambda < 1 or _is_range(config)
    needed = (4 if data.mixup_alpha else 2) if cutmix else 2 if data.mixup_alpha else 1
    if batch < needed:
        mixing = "mixup and cutmix" if needed == 4 else "cutmix" if cutmix else "mixup"
        raise ConfigError(f"--batch-size {batch} with {mixing}: a step needs {needed} samples; set a larger batch")


def _is_range(config: Config) -> bool:
    return (config.data.cutmix_lambda_low, config.data.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


def _one_kind_of_cutmix(config: Config) -> None:
    data = config.data
    if data.cutmix_lambda_low > data.cutmix_lambda_high:
        raise ConfigError(
            f"--cutmix-lambda-low {data.cutmix_lambda_low:g} with --cutmix-lambda-high {data.cutmix_lambda_high:g}: "
            "low must not exceed high"
        )
    if data.cutmix_lambda < 1 and _is_range(config):
        raise ConfigError(
            f"--cutmix-lambda {data.cutmix_lambda:g} with --cutmix-lambda-high {data.cutmix_lambda_high:g}: "
            "both set the fraction kept; omit one"
        )


def _cutmix_mean_within_reach(config: Config) -> None:
    """Version 1 keeps the whole image with probability 1.55 L - 0.96, which must be in [0, 1]."""
    data = config.data
    if data.cutmix_version == "1" and data.cutmix_lambda < 0.96 / 1.55:
        raise ConfigError(
            f"--cutmix-lambda {data.cutmix_lambda:g} with --cutmix-version 1: the mean fraction must be at least 0.62; "
            "set --cutmix-version 2 for a constant one"
        )


def _rising_ranges(config: Config) -> None:
    for name, (low, high), most in (
        ("crop-area", config.data.crop_area, 1.0),
        ("crop-aspect", config.data.crop_aspect, float("inf")),
    ):
        if not 0 < low <= high <= most:
            raise ConfigError(
                f"--{name} {low:g} {high:g}: must rise from above 0" + (" to at most 1" if most == 1 else "")
            )


def _strengths_from_zero_to_one(config: Config) -> None:
    if not all(0 <= strength <= 1 for strength in config.data.color_jitter):
        shown = " ".join(f"{strength:g}" for strength in config.data.color_jitter)
        raise ConfigError(f"--color-jitter {shown}: brightness, contrast and saturation must be 0 to 1")


def _fold_of_folds(config: Config) -> None:
    folds, fold = config.data.folds, config.data.fold
    if fold is not None and (folds is None or fold >= folds):
        rule = "add --folds" if folds is None else f"must be 0 to {folds - 1}"
        raise ConfigError(f"--fold {fold}{'' if folds is None else f' with --folds {folds}'}: {rule}")
    if config.is_cross_validation and config.parallel.processes > 1:
        raise ConfigError(f"--folds {folds} with several processes: train one fold at a time; add --fold 0, then 1")


def _one_cure_of_imbalance(config: Config) -> None:
    if config.data.sampler == "balanced" and config.optim.class_weights == ("auto",):
        raise ConfigError(
            "--sampler balanced with --class-weights auto: both make up for rare classes, together twice; omit one"
        )


DATA_RULES = (
    _one_cure_of_imbalance,
    _fold_of_folds,
    _one_kind_of_cutmix,
    _partners_for_mixing,
    _cutmix_mean_within_reach,
    _rising_ranges,
    _strengths_from_zero_to_one,
)


def _whole_model_for_fine_tuning(config: Config) -> None:
    optim, shards = config.optim, config.parallel.shards
    for option, value in (
        ("layer-decay", optim.layer_decay if optim.layer_decay < 1 else None),
        ("unfreeze-epochs", optim.unfreeze_epochs),
    ):
        if value is not None and shards > 1:
            raise ConfigError(
                f"--{option} {value:g} with --shards {shards}: needs all blocks in one process; use --replicas "
                "instead of --shards"
            )


def _layer_decay_without_lars(config: Config) -> None:
    if config.optim.layer_decay < 1 and config.optim.optimizer == "lars":
        raise ConfigError(
            f"--layer-decay {config.optim.layer_decay:g} with --optimizer lars: lars sets the rate of each layer "
            "itself; use adamw or momentum"
        )


def _head_in_one_process(config: Config) -> None:
    if config.model.fit_head and config.parallel.processes > 1:
        raise ConfigError(
            f"--fit-head with {config.parallel.processes} processes: runs in one process; train the head with "
            "--epochs 0 first, then give its run as initial weights"
        )


def _nothing_to_train(config: Config) -> None:
    if config.optim.epochs == 0 and not config.model.fit_head:
        raise ConfigError("--epochs 0: trains nothing; set more epochs, or add --fit-head to fit only the classifier")


def _whole_model_for_teacher(config: Config) -> None:
    if config.optim.teacher is not None and config.parallel.shards > 1:
        raise ConfigError(
            f"--teacher {config.optim.teacher} with --shards {config.parallel.shards}: needs the whole model in one "
            "process; use --replicas instead of --shards"
        )


def _average_to_select(config: Config) -> None:
    if config.run.select_ema and config.optim.ema_decay is None:
        raise ConfigError("--select-ema: has no effect; add --ema-decay")


def _validations_for_patience(config: Config) -> None:
    if config.optim.patience is not None and config.run.validation_mode != "during":
        raise ConfigError(
            f"--patience {config.optim.patience} with --validation-mode {config.run.validation_mode}: early stopping "
            "needs validations; set --validation-mode during"
        )


FINE_TUNING_RULES = (
    _whole_model_for_fine_tuning,
    _layer_decay_without_lars,
    _head_in_one_process,
    _nothing_to_train,
    _whole_model_for_teacher,
    _average_to_select,
    _validations_for_patience,
)
