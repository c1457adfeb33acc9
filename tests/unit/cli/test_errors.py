"""Mistakes in the arguments of each command: one line that names the option and the rule, before any work starts."""

import pytest

from convolve.cli.main import COMMANDS, dispatch
from convolve.errors import ConfigError

CASES = [
    ("average runs/a", "convolve average: the following arguments are required: --mode"),
    ("average --mode mean", "convolve average: the following arguments are required: run"),
    ("average runs/a --mode median", "convolve average: argument --mode: invalid choice: 'median'"),
    ("average runs/a --mode mean -N 0", "-N 0: must be at least 1"),
    ("average runs/a --mode mean --discard-last -1", "--discard-last -1: must be at least 0"),
    ("average runs/a --mode exponential --decay 1", "--decay 1.0: must be at least 0 and below 1"),
    ("average runs/a --mode mean --weight-avg-N two", "convolve average: argument -N: invalid int value: 'two'"),
    ("bench gpu", "bench: unknown part 'gpu'"),
    ("bench train --repeats many", "convolve bench train: argument --repeats: invalid int value: 'many'"),
    ("bench train --compare-with model=lenet5 --profile", "--profile: profiles one config; omit --compare"),
    ("completion tcsh", "convolve completion: argument shell: invalid choice: 'tcsh'"),
    ("configs --config-path", "convolve configs: argument --config-path: expected one argument"),
    ("configs lenet-minst", "unknown config 'lenet-minst'; did you mean lenet-mnist"),
    ("convert only-one.pth", "convolve convert: the following arguments are required: target"),
    ("data", "convolve data: the following arguments are required: action"),
    ("data check", "data check: name a data set; list them with `convolve data list`"),
    ("data prepare a b --image-size 0", "--image-size 0: must be 1 to 4096"),
    ("data prepare a b --image-size 4097", "--image-size 4097: must be 1 to 4096"),
    ("data prepare a b --quality 101", "--quality 101: must be 1 to 100"),
    ("data prepare a b --shard-samples 0", "--shard-samples 0: must be 1 to 1000000"),
    ("data prepare a b --format zip", "convolve data: argument --format: invalid choice: 'zip'"),
    ("describe --grap x.svg", "convolve describe: unknown option --grap; did you mean --graph"),
    ("describe lenet5 more", "convolve describe: unexpected argument more"),
    ("doctor --jsn", "convolve doctor: unknown option --jsn; did you mean --json"),
    ("export", "convolve export: the following arguments are required: run"),
    ("launch", "launch: missing command; write it after `--`: `convolve launch --hosts a,b -- train ...`"),
    ("launch --hosts a,b -- validate runs/a", "launch: missing command; write it after `--`"),
    ("launch --hosts , --dry-run -- train", "--hosts ,: name at least one host"),
    ("launch --num-instances 0 --dry-run -- train", "--num-instances 0: must be at least 1"),
    ("launch --env GREETING --dry-run -- train", "--env GREETING: must be NAME=VALUE"),
    ("launch --hosts a,b --num-replicas 2 --num-instances 3 --dry-run -- train",
     "--num-instances 3: must be a multiple of the number of hosts; use a multiple of 2"),
    ("launch --hosts a,b --dry-run -- train --replicas 3",
     "--num-instances 2: must divide the 3 processes (replicas x shards); use a divisor of 3"),
    ("plan lenet-digits --cores 0", "--cores 0: must be greater than 0"),
    ("plan lenet-digits --latency -1", "--latency -1: must be greater than 0"),
    ("plan lenet-digits --bandwidth 0", "--bandwidth 0: must be greater than 0"),
    ("plan lenet-digits --device-memory 3TB", "--device-memory 3TB: must be a size such as 900MB or 32GiB"),
    ("plan lenet-digits --hosts two", "convolve plan: argument --hosts: invalid int value: 'two'"),
    ("predict runs/a", "convolve predict: the following arguments are required: images"),
    ("predict runs/a x.png --use-ipu", "--use-ipu is not offered by convolve predict: the checkpoint contains"),
    ("report", "convolve report: the following arguments are required: runs"),
    ("restore runs/a --epochs many", "convolve restore: argument --epochs: invalid float value: 'many'"),
    ("restore runs/a --learning-rate 1", "--learning-rate is not offered by convolve restore: the checkpoint contains"),
    ("serve", "convolve serve: the following arguments are required: [NAME=]RUN"),
    ("serve runs/a --reload soon", "--reload soon: must be seconds above 0, or none"),
    ("serve runs/a --reload 0", "--reload 0: must be seconds above 0, or none"),
    ("serve runs/a --port x", "convolve serve: argument --port: invalid int value: 'x'"),
    ("train --seed", "convolve train: argument --seed: expected one argument"),
    ("train --bacth-size=3", "convolve train: unknown option --bacth-size; did you mean --batch-size"),
    ("train --batch 3", "convolve train: unknown option --batch; did you mean"),
    ("train --restore-path runs/a", "--restore-path is not offered: resume a run with `convolve restore RUN`"),
    ("validate runs/a --batch-size 0", "--batch-size 0: must be at least 1"),
    ("validate runs/a --latency", "--latency is not offered by convolve validate: measure mean, p50, p99"),
    ("cache remove", "cache remove: give either names or --all"),
    ("find-lr --steps 0", "low=1e-06, high=1, steps=0: need"),
    ("sweep --grid x", "--grid x: write OPTION=VALUE,VALUE, such as learning-rate=0.01,0.1"),
    ("align --policies 32.32", "--policies: needs at least two, the reference first, for example 32.32 16.16"),
]  # fmt: skip


def test_every_command_with_arguments_is_here():
    assert {words.split()[0] for words, _ in CASES} == set(COMMANDS)


@pytest.mark.parametrize(("words", "message"), CASES, ids=[words for words, _ in CASES])
def test_a_mistake_is_reported_before_any_work_starts(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        dispatch(words.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
