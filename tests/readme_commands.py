"""Every command line in the READMEs of the five originals, as typed there, and what it becomes here.

Line continuations are joined. `python tests/readme_commands.py` (with `PYTHONPATH=tests`) writes
docs/migrating/commands.md, which a test compares.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from convolve.compat.options import RejectedOptions, translate
from convolve.compat.programs import translate_program

PAGE = Path(__file__).parents[1] / "docs" / "migrating" / "commands.md"
PROGRAMS = {"train.py": "train", "validation.py": "validate", "restore.py": "restore"}

_LOCAL = '--mpi-local-args="--tag-output"'
_ROOT = '--mpi-global-args="--allow-run-as-root --tag-output" --numa-aware 1'
_POD16 = f"poprun -v --numa-aware 1 --num-instances 8 --num-replicas 16 --ipus-per-replica 1 {_LOCAL}"
_HOSTS = "--host xxx.xxx.xxx.1,xxx.xxx.xxx.2,xxx.xxx.xxx.3,xxx.xxx.xxx.4"
_POD64 = (
    f"poprun -v {_HOSTS} --numa-aware=yes --vipu-server-host=xxx.xxx.xxx.xxx --vipu-partition=pod64_partition_name "
    '--reset-partition=yes --update-partition=no --mpi-global-args="--tag-output --mca btl_tcp_if_include '
    'xxx.xxx.xxx.0/24"'
)
_CACHE = "-x IPUOF_VIPU_API_TIMEOUT=300 -x TF_POPLAR_FLAGS=--executable_cache_path=$WORKSPACE/exec_cache"
_TRAINING = "$WORKSPACE/examples/applications/tensorflow/cnns/training"
_ENGINE = """POPLAR_ENGINE_OPTIONS='{"opt.enableMultiAccessCopies":"false"}'"""
_MLPERF = (
    f"{_ENGINE} poprun -vv --mpi-global-args='--tag-output --allow-run-as-root' "
    "--mpi-local-args='-x POPLAR_ENGINE_OPTIONS' --ipus-per-replica 1 --numa-aware 1 --num-instances 8 "
    "--num-replicas 16"
)
_BENCHMARK = "--data imagenet --imagenet-data-path $DATASETS_DIR/imagenet-webdata-format"
_RESNET = (
    "--epoch 2 --optimizer sgd --momentum 0.85 --half-partial --validation-mode none --disable-metrics --precision "
    "16.16 --device-iterations 1 --norm-type group --norm-num-groups 32 --enable-stochastic-rounding"
)
_EFFICIENTNET = (
    "--epoch 2 --optimizer rmsprop --half-partial --validation-mode none --disable-metrics --precision 16.32 "
    "--device-iterations 1 --norm-type group --norm-num-groups 4 --efficientnet-group-dim 16 "
    "--efficientnet-expand-ratio 4 --pipeline-splits _blocks/3 _blocks/9 _blocks/22 --enable-stochastic-rounding"
)

COMMANDS = {
    "Graphcore, TensorFlow": (
        "python3 train.py --dataset imagenet --data-dir path-to/imagenet",
        "python restore.py --restore-path logs/RN20_bs32_BN_16.16_v0.9.115_3S9/",
        "python3 train.py --config my_config",
        "python3 train.py --config my_config --epochs 50",
        f"{_POD16} python3 train.py --config mk2_resnet50_gn_16ipus --data-dir your_dataset_dir_path --no-validation",
        f"{_POD16} python3 validation.py --config mk2_resnet50_gn_16ipus --data-dir your_dataset_dir_path "
        "--restore-path generated_checkpoints_dir_path",
        f"poprun -v --numa-aware 1 --num-instances 4 --num-replicas 4 --ipus-per-replica 4 {_LOCAL} python3 train.py "
        "--config mk2_resnet50_bn_16ipus --data-dir your_dataset_path --no-validation",
        f"{_POD16} python3 validation.py --config mk2_resnet50_bn_16ipus --shards 1 --data-dir your_dataset_dir_path "
        "--restore-path generated_checkpoints_dir_path",
        f'{_POD64} --mpi-local-args="-x LD_LIBRARY_PATH -x PATH -x PYTHONPATH -x TF_CPP_VMODULE=poplar_compiler=1 '
        f'{_CACHE}" --num-replicas=16 --num-instances=16 --ipus-per-replica 4 python3 {_TRAINING}/train.py '
        "--config mk2_resnet50_bn_64ipus --no-validation --data-dir your_dataset_path",
        f'{_POD64[:-1]} --mca oob_tcp_if_include xxx.xxx.xxx.0/24" --mpi-local-args="-x LD_LIBRARY_PATH -x PYTHONPATH '
        f'-x TF_CPP_VMODULE=poplar_compiler=1 {_CACHE}" --num-replicas=64 --num-instances=32 --ipus-per-replica 1 '
        f"python3 {_TRAINING}/validation.py --config mk2_resnet50_bn_64ipus --shards 1 --data-dir your_dataset_path "
        "--restore-path generated_checkpoints_dir_path",
        """POPLAR_ENGINE_OPTIONS='{"target.hostSyncTimeout": "900"}' poprun -v --host xxx.xxx.1.1,xxx.xxx.1.2,"""
        "xxx.xxx.1.3,xxx.xxx.1.4,xxx.xxx.2.1,xxx.xxx.2.2,xxx.xxx.2.3,xxx.xxx.2.4 --numa-aware=yes "
        "--vipu-server-host=xxx.xxx.xxx.xxx --vipu-server-timeout=300 --vipu-partition=pod128_partition_name "
        "--vipu-cluster=pod128_cluster_name --reset-partition=yes --update-partition=no --num-ilds=2 "
        '--mpi-global-args="--tag-output --allow-run-as-root --mca oob_tcp_if_include xxx.xxx.0.0/16 --mca '
        'btl_tcp_if_include xxx.xxx.0.0/16" --mpi-local-args="-x LD_LIBRARY_PATH -x TF_CPP_VMODULE=poplar_compiler=1 '
        '-x PATH -x PYTHONPATH -x IPUOF_VIPU_API_TIMEOUT=600 -x POPLAR_ENGINE_OPTIONS" --ipus-per-replica 4 '
        "--num-replicas=32 --num-instances=32 python3 --config mk2_resnet50_bn_128ipus --no-validation --data-dir "
        "your_dataset_path",
        f"{_MLPERF} python train.py --config mk2_resnet50_mlperf_pod16_bs20 --epochs-per-sync 20 --data-dir "
        "your_dataset_path --no-validation",
        f"{_MLPERF} python validation.py --config mk2_resnet50_mlperf_pod16_bs20 --no-stochastic-rounding --batch-size "
        "25 --available-memory-proportion 0.6 --data-dir your_dataset_path --restore-path "
        "generated_checkpoints_dir_path",
        f"""{_ENGINE} POPLAR_TARGET_OPTIONS='{{"gatewayMode":"false"}}' poprun -vv --host xxx.xxx.1.1,xxx.xxx.1.2,"""
        "xxx.xxx.1.3,xxx.xxx.1.4 --mpi-global-args='--tag-output --allow-run-as-root --mca oob_tcp_if_include "
        "xxx.xxx.xxx.0/24 --mca btl_tcp_if_include xxx.xxx.xxx.0/24' --mpi-local-args=' -x OPAL_PREFIX -x "
        "LD_LIBRARY_PATH -x PATH -x PYTHONPATH -x IPUOF_VIPU_API_TIMEOUT=600 -x POPLAR_LOG_LEVEL=WARN -x "
        "POPLAR_ENGINE_OPTIONS' --update-partition=no --reset-partition=yes --vipu-server-timeout 300 "
        "--ipus-per-replica 1 --numa-aware 1 --only-output-from-instance 0 --vipu-server-host xxx.xxx.xxx.xxx "
        "--vipu-partition=pod64_partition_name --num-instances 32 --num-replicas 64 python train.py --config "
        "mk2_resnet50_mlperf_pod64_bs20 --epochs-per-sync 20 --data-dir your_dataset_path --no-validation",
        "python train.py --model resnet --model-size 50 --dataset imagenet --data-dir .../imagenet-data --shards 4 "
        "--replicas 4 --batch-size 4 --gradient-accumulation-count 64 --epochs 65 --pipeline --pipeline-splits "
        "b1/2/relu b2/3/relu b3/5/relu --pipeline-schedule Grouped --enable-recomputation --optimiser momentum "
        "--momentum 0.90 --ckpts-per-epoch 1 --max-cross-replica-buffer-size 100000000 --available-memory-proportion "
        "0.6 0.6 0.6 0.6 0.6 0.6 0.16 0.2 --internal-exchange-optimisation-target balanced --normalise-input "
        "--stable-norm --enable-half-partials --lr-schedule cosine --label-smoothing 0.1 --eight-bit-io",
        f"poprun {_ROOT} --num-replicas 8 --ipus-per-replica 2 --num-instances 8 python3 train.py --config "
        "mk2_resnext101_16ipus --data-dir your_dataset_path --no-validation",
        f"poprun {_ROOT} --num-replicas 16 --ipus-per-replica 1 --num-instances 16 python3 validation.py --config "
        "mk2_resnext101_16ipus --shards 1 --data-dir your_dataset_path --restore-path generated_checkpoints_dir_path",
        f"poprun {_ROOT} --num-replicas 4 --num-instances 4 --ipus-per-replica 4 python3 train.py --config "
        "mk2_efficientnet_b4_g1_16ipus --data-dir your_dataset_path --no-validation",
        f"{_POD16} python3 validation.py --config mk2_efficientnet_b4_g1_16ipus --shards 1 --data-dir "
        "your_dataset_dir_path --restore-path generated_checkpoints_dir_path",
        f"poprun {_ROOT} --num-replicas 4 --num-instances 4 --ipus-per-replica 4 python3 train.py --config "
        "mk2_efficientnet_b4_g16_16ipus --data-dir your_dataset_path --no-validation",
        "python validation.py --model efficientnet --model-size B0 --dataset imagenet --batch-size 8 --generated-data "
        "--repeat 10 --batch-norm",
        "python train.py --config mk2_resnet8_test --wandb",
        "python train.py --model resnet --model-size 14 --dataset cifar-10 --pipeline --shards 1 --pipeline-schedule "
        "Sequential --enable-recompute --pipeline-splits b1/0/relu b2/0/relu",
        "python train.py --model efficientnet --help",
    ),
    "Graphcore, PyTorch": (
        f"python train.py --model resnet50 {_BENCHMARK} --replicas 4 --batch-size 6 --gradient-accumulation 44 "
        f"{_RESNET}",
        f"python train.py --model resnet50 {_BENCHMARK} --replicas 16 --batch-size 6 --gradient-accumulation 11 "
        f"{_RESNET}",
        f"python train.py --model efficientnet-b4 {_BENCHMARK} --replicas 1 --batch-size 4 --gradient-accumulation 256 "
        f"{_EFFICIENTNET}",
        f"python train.py --model efficientnet-b4 {_BENCHMARK} --replicas 4 --batch-size 4 --gradient-accumulation 64 "
        f"{_EFFICIENTNET}",
    ),
    "Ascend, TensorFlow 2": ("bash train_full_1p.sh --data_path=/dataset/",),
    "Ascend, TensorFlow 1": (
        'sh +x train_full_1p.sh --data_path="../MNIST"',
        'sh +x train_full_1p.sh --data_path="../MNIST" --precision_mode=allow_mix_precision',
    ),
    "Paddle": (
        "bash train_with_ipu.sh",
        "python train.py --use_ipu True --num_ipus 1 --no_pipelining",
        "bash infer_with_ipu.sh",
    ),
}

SCRIPTS = {
    "Ascend, TensorFlow 2": "ascend/tf2",
    "Ascend, TensorFlow 1": "ascend/tf1",
    "Paddle": "paddle",
}

# Commands of the shell that prepare a machine or show a file.
PREPARATION = {
    "`pip install -r requirements.txt`, `pip3 install requirements.txt`": "`make setup`, or `pip install .`",
    "`git clone`, `git checkout`, `git reset --hard`, `cd` of the model zoo": "clone this repository",
    "`python3 -m pytest`": "`make test`",
    "`gc-info -l`": "`convolve doctor` lists the devices",
    "`vim output/performance_precision.txt`": "the same file, written by `examples/ascend/tf1/train_full_1p.sh`",
}


INTRODUCTION = """\
Each command line in the READMEs of the five originals, as typed there, and the command here. Options of the original
work as typed, except the ones in the last column: they are rejected together, each with its reason, and the error ends
with the corrected command. The reasons are in the tables of the other pages. `poprun` becomes `convolve launch`, and
its hosts are shortened to `HOSTS`; without hosts, `--replicas` and `--shards` of the config start all processes, and
`launch` is not needed. `tests/contract/test_readmes.py` runs every row at reduced size (`tests/reduction.py`).

Added: `--config-path` for a config file in the current folder; `--precision 16.16`, the default of the original, if
half partials are requested without it; the config of Paddle's program. The README names the options of recomputation on
one device without a model; the row here has one. Other defaults of the TensorFlow application are in named configs
([TensorFlow](graphcore-tf-cnns.md))."""


@dataclass(frozen=True)
class Translated:
    """A command line of an original here: what is run, and the options that were rejected."""

    argv: tuple[str, ...]
    rejected: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()


def translate_command(readme: str, command: str) -> Translated:
    """Return what a command becomes, by the translations that the program uses."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    launch: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    if words[0] == "poprun":
        place = next(number for number, word in enumerate(words) if word.startswith("python"))
        launch, rejected = _without_rejected("launch", words[1:place])
        words = words[place:]
    program, options = (words[1], words[2:]) if not words[1].startswith("-") else ("train.py", words[1:])
    name = PROGRAMS[program.rsplit("/", 1)[-1]]
    if name == "validate" and "--generated-data" in options:
        return Translated(
            tuple(shlex.split("bench infer --model efficientnet --model-size B0 --batch-size 8 --batch-norm"))
        )
    if readme == "Paddle":
        options = ["--config", "lenet-bn-mnist", *options]
    if "my_config" in options:
        options = [*options, "--config-path", "configs.yml"]
    kept, more = _without_rejected(name, options)
    if "--enable-half-partials" in kept:
        kept = (*kept, "--precision", "16.16")
    return Translated((name, *kept), rejected + more, launch)


def _without_rejected(command: str, options: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options here and the flags that are rejected; training options stay as they were typed."""
    try:
        if command == "train":
            translate(options)
            return tuple(options), ()
        return tuple(translate_program(command, options)), ()
    except RejectedOptions as error:
        flags = tuple(re.findall(r"--[\w-]+(?=: | is not offered)", "\n".join(map(str, (error, *error.args[1:])))))
        corrected = shlex.split(error.corrected_command([command, *options]))[2:]
        return tuple(corrected), flags


def render() -> str:
    """Return the page with all commands."""
    parts = ["# Every command of the READMEs", INTRODUCTION]
    for readme, commands in COMMANDS.items():
        parts.append(f"## {readme}")
        rows = ["| original | here | not offered |", "|---|---|---|"]
        rows += ["| " + " | ".join(_cells(readme, command)) + " |" for command in commands]
        parts.append("\n".join(rows))
    rows = ["| original | here |", "|---|---|", *(f"| {old} | {new} |" for old, new in PREPARATION.items())]
    parts += ["## Preparation", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _cells(readme: str, command: str) -> tuple[str, str, str]:
    old = f"`{command}`".replace("|", "\\|")
    script = re.search(r"(\w+\.sh)(.*)", command)
    if script:
        return old, f"[`examples/{SCRIPTS[readme]}/{script[1]}{script[2]}`](../../examples/README.md)", ""
    found = translate_command(readme, command)
    inner = shlex.join(found.argv)
    if found.launch and "--hosts" in found.launch and found.argv[0] == "train":
        launch = list(found.launch)
        launch[launch.index("--hosts") + 1] = "HOSTS"
        inner = f"launch {shlex.join(launch)} -- {inner}"
    return old, f"`convolve {inner}`", ", ".join(f"`{flag}`" for flag in found.rejected)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
