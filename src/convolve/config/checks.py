"""Rules that join several knobs. Each says what was given, which rule it breaks, and what to set."""

from importlib.metadata import entry_points

from convolve.config.data_rules import DATA_RULES
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
        _whole_spans,
        _each_split_once,
        _recomputation_is_on,
    ):
        rule(config)


def _one_kind_of_made_up_data(config: Config) -> None:
    if config.data.generated_data and config.data.synthetic_data:
        raise ConfigError(
            "generated-data and synthetic-data are both on; generated data come from the host, "
            "synthetic ones live on the device: choose one"
        )


def _drops_inside_the_run(config: Config) -> None:
    drops = config.schedule.learning_rate_schedule
    if any(not 0 < share < 1 for share in drops) or list(drops) != sorted(drops):
        raise ConfigError(
            f"learning-rate-schedule={list(drops)}: drops are rising shares of the run between 0 and 1, "
            "for example 0.5 0.75"
        )


def _warmup_inside_the_run(config: Config) -> None:
    epochs, warmup = config.optim.epochs, config.schedule.warmup_epochs
    if epochs is not None and warmup >= epochs:
        raise ConfigError(f"warmup-epochs={warmup:g} with epochs={epochs:g}: the warm-up must end before the run does")


def _momentum_for_nesterov(config: Config) -> None:
    if config.optim.nesterov and config.optim.optimiser != "momentum":
        raise ConfigError(
            f"nesterov with optimiser={config.optim.optimiser}: it is a form of momentum; set --optimiser momentum"
        )


def _known_schedule(config: Config) -> None:
    name = config.schedule.lr_schedule
    if name not in SCHEDULES:
        known = {*SCHEDULES, *(entry.name for entry in entry_points(group=SCHEDULE_GROUP))}
        if name not in known:
            raise ConfigError(f"lr-schedule={name}: no schedule has that name; {suggest(name, known)}")


def _trapezoid_inside_the_run(config: Config) -> None:
    schedule = config.schedule
    if schedule.lr_schedule == "trapezoid" and schedule.rise_share + schedule.fall_share > 1:
        raise ConfigError(
            f"rise-share={schedule.rise_share:g} with fall-share={schedule.fall_share:g}: together they are more than "
            "the whole run; lower one of them"
        )


def _decay_of_rmsprop(config: Config) -> None:
    decay = config.settled_optim().rmsprop_decay
    if decay < 0:
        raise ConfigError(
            f"rmsprop-base-decay-exp={config.optim.rmsprop_base_decay_exp:g} with a global batch of "
            f"{config.global_batch_size}: gives a decay of {decay:g}; it must not be negative, so lower one of them"
        )


def _checkpoints_to_average(config: Config) -> None:
    optim = config.optim
    if (optim.weight_avg_n or optim.weight_avg_exp) and not config.run.checkpoints:
        raise ConfigError("weight-avg-n or weight-avg-exp with no-checkpoints: checkpoints are what is averaged")
    if any(count < 1 for count in optim.weight_avg_n) or any(not 0 <= decay < 1 for decay in optim.weight_avg_exp):
        raise ConfigError(
            f"weight-avg-n={list(optim.weight_avg_n)}, weight-avg-exp={list(optim.weight_avg_exp)}: "
            "counts begin at 1, decays lie between 0 and 1"
        )


def _one_way_to_say_a_policy(config: Config) -> None:
    precision = config.precision
    if precision.precision_mode is not None and precision.precision is not None:
        raise ConfigError(
            f"precision-mode={precision.precision_mode} with precision={precision.precision}: both say what is "
            "computed in which format; give one of them"
        )


def _mix_list_has_a_use(config: Config) -> None:
    precision = config.precision
    if precision.mixlist_file is not None and precision.precision_mode != "allow_mix_precision":
        raise ConfigError(
            f"mixlist-file={precision.mixlist_file}: only read with --precision-mode allow_mix_precision; set that"
        )


def _ramp_rises(config: Config) -> None:
    precision = config.precision
    first, last = precision.initial_loss_scaling or 1.0, precision.loss_scaling or 128.0
    if precision.loss_scaling_rule == "ramp" and first > last:
        raise ConfigError(
            f"initial-loss-scaling={first:g} with loss-scaling={last:g}: a ramp rises from the first to the second"
        )


def _whole_spans(config: Config) -> None:
    span, replicas = config.parallel.bn_span, config.parallel.replicas
    if replicas % span:
        raise ConfigError(
            f"bn-span={span} with replicas={replicas}: spans are groups of neighbours and must divide the replicas; "
            f"choose a divisor of {replicas}"
        )


def _each_split_once(config: Config) -> None:
    splits = config.parallel.pipeline_splits
    if len(set(splits)) != len(splits):
        raise ConfigError(f"pipeline-splits={' '.join(splits)}: a block can begin one stage only; name each once")


def _recomputation_is_on(config: Config) -> None:
    if config.parallel.recompute_checkpoints and not config.parallel.enable_recomputation:
        raise ConfigError("recompute-checkpoints without recomputation has no effect; add --enable-recomputation")
