"""`convolve launch`."""

from __future__ import annotations

import shlex
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import yaml

from convolve.cli import restore, train
from convolve.cli.command import Parser, read_config, resumable
from convolve.cli.console import print_json
from convolve.compat.programs import translate_program
from convolve.config import Config
from convolve.distributed.launch import ssh
from convolve.distributed.launch.kubernetes import KINDS, Cluster, write_manifest
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from convolve.distributed.launch.ssh import Job

USAGE = "convolve launch --hosts a,b [options] -- train --config NAME ..."
COMMANDS = ("train", "restore")
LOCALHOST = "localhost"


def run(argv: Sequence[str]) -> int:
    """Start a run on several hosts and supervise it."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    options, command = _parser().parse(translate_program("launch", argv[:end])), list(argv[end + 1 :])
    if not command or command[0] not in COMMANDS:
        raise ConfigError("launch: missing command; write it after `--`: `convolve launch --hosts a,b -- train ...`")

    if options.kubernetes:
        _check_kubernetes(options, command)
    config, folder, command = _resolve(command, options)
    job = _plan_job(options, config)
    if options.kubernetes:
        _print_manifest(job, command, folder, options)
        return 0
    if options.dry_run:
        _print_dry_run(job, command, folder, options)
        return 0
    if options.verbose:
        _print_dry_run(job, command, folder, options)
    report = ssh.launch(job, command, folder, options.max_restarts, lambda line: print(line, flush=True))
    if options.json:
        print_json(report)
    return report.exit_code


def _parser() -> Parser:
    parser = Parser("launch", "Start a run on several hosts and supervise it.", usage=USAGE)
    parser.add_argument("--hosts", default=LOCALHOST, metavar="A,B", help="hosts, separated by commas [localhost]")
    parser.add_argument("--num-instances", type=int, metavar="N", help="launchers over all hosts [one per host]")
    parser.add_argument("--num-replicas", type=int, metavar="N", help="replicas over all hosts, as --replicas")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="restarts after a failure [0]")
    parser.add_argument("-v", "--verbose", action="count", help="print the command of each host before it starts")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and an sbatch script, start nothing")
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="K=V", help="request of the sbatch script, as gpus-per-task=1"
    )
    parser.add_argument("--master-addr", metavar="ADDRESS", help="address of rank 0 [the first host]")
    parser.add_argument("--master-port", type=int, metavar="N", help="port of rank 0; each restart uses the next one")
    parser.add_argument("--interface", metavar="NAME", help="network interface between ranks, such as eth0")
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="connection timeout of hosts and ranks, in seconds [60]"
    )
    # The name in version 0.1.
    parser.add_argument("--patience", dest="timeout", type=float, default=SUPPRESS, help=SUPPRESS)
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="environment variable for all hosts")
    parser.add_argument("--python", metavar="PATH", help="Python interpreter on the hosts [this one]")
    parser.add_argument("--all-output", action="store_true", help="print the output of all ranks, not only rank 0")
    parser.add_argument(
        "--remote-shell", metavar="COMMAND", help="command that reaches a host, with {host} in it [ssh in batch mode]"
    )
    _add_kubernetes_flags(parser)
    return parser


def _add_kubernetes_flags(parser: Parser) -> None:
    parser.add_argument(
        "--kubernetes", choices=KINDS, help="with --dry-run, print a manifest with one node per instance instead"
    )
    parser.add_argument("--image", metavar="NAME", help="container image with convolve, for --kubernetes")
    parser.add_argument(
        "--volume", metavar="CLAIM:PATH", help="persistent volume claim with the run folder, for --kubernetes"
    )
    parser.add_argument(
        "--resource", action="append", default=[], metavar="K=V", help="resource per node, as nvidia.com/gpu=8"
    )


def _check_kubernetes(options: Namespace, command: Sequence[str]) -> None:
    subject = f"--kubernetes {options.kubernetes}"
    if not options.dry_run:
        raise ConfigError(f"{subject}: only prints a manifest; add --dry-run and pass the output to `kubectl apply`")
    if options.hosts != LOCALHOST:
        raise ConfigError(f"{subject}: Kubernetes chooses the hosts; replace --hosts by --num-instances, the nodes")
    if command[0] != "train":
        raise ConfigError(f"{subject}: needs `train`; it continues a run that has started")
    for flag, value in (("--image", options.image), ("--volume", options.volume)):
        if value is None:
            raise ConfigError(f"{subject}: missing {flag}; see `convolve launch --help`")


def _resolve(command: list[str], options: Namespace) -> tuple[Config, Path, list[str]]:
    """Return the config of the run, its folder, and the command that names both."""
    from convolve.runs import folder as run_folder

    if options.num_replicas is not None:
        command = [*command, "--replicas", str(options.num_replicas)]
    if command[0] == "restore":
        restored = restore.read_options(command[1:])
        config = restore.read_changes(restored).apply(run_folder.read_config(restored.run))
        return config, restored.run.absolute(), command
    config = read_config(train.read_options(command[1:]))
    if options.dry_run:
        folder = (config.run.run_dir or config.run.log_dir / "RUN").absolute()
        return config, folder, [*command, "--resume", "--run-dir", str(folder)]
    command = resumable(command, config)
    return config, Path(command[-1]), command


def _plan_job(options: Namespace, config: Config) -> Job:
    from convolve.distributed.launch.ssh import SSH, Job, pick_port

    hosts = tuple(host for host in options.hosts.split(",") if host)
    if options.kubernetes:
        hosts = tuple(f"node-{number}" for number in range(options.num_instances or 1))
    if not hosts:
        raise ConfigError(f"--hosts {options.hosts}: name at least one host")
    for flag, count in (("--num-instances", options.num_instances), ("--num-replicas", options.num_replicas)):
        if count is not None and count < 1:
            raise ConfigError(f"{flag} {count}: must be at least 1")
    # torch warns about every host name that it cannot resolve.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "CONVOLVE_TIMEOUT": f"{options.timeout:g}"}
    environment = {**quiet, **_read_pairs("--env", options.env)}
    if options.interface is not None:
        environment |= {"GLOO_SOCKET_IFNAME": options.interface, "NCCL_SOCKET_IFNAME": options.interface}
    if options.all_output:
        environment["CONVOLVE_ALL_OUTPUT"] = "1"
    return Job(
        hosts=hosts,
        instances=options.num_instances or len(hosts),
        world=config.parallel.processes,
        master=options.master_addr or hosts[0],
        port=options.master_port or (29400 if options.dry_run else pick_port()),
        remote_shell=options.remote_shell or SSH,
        environment=environment,
        timeout=options.timeout,
        stages=config.parallel.shards,
        python=options.python or ("python3" if options.kubernetes else sys.executable),
    )


def _read_pairs(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"{flag} {pair}: must be NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _print_manifest(job: Job, command: Sequence[str], folder: Path, options: Namespace) -> None:
    claim, _, mount = options.volume.partition(":")
    if not claim or not mount.startswith("/"):
        raise ConfigError(f"--volume {options.volume}: must be CLAIM:PATH with an absolute path, as my-claim:/data")
    resources = _read_pairs("--resource", options.resource)
    cluster = Cluster(options.image, claim, PurePosixPath(mount), resources)
    manifest = write_manifest(options.kubernetes, job, command, folder, options.max_restarts, cluster)
    if options.json:
        print_json({"manifest": manifest})
    else:
        print(yaml.safe_dump(manifest, sort_keys=False), end="")


def _print_dry_run(job: Job, command: Sequence[str], folder: Path, options: Namespace) -> None:
    from convolve.distributed.launch.slurm import write_batch_script

    processes = job.world // job.instances
    commands = []
    for instance in range(job.instances):
        words = ["-m", "torch.distributed.run", f"--nnodes={job.instances}", f"--node-rank={instance}"]
        words += [f"--nproc-per-node={processes}", f"--master-addr={job.master}", f"--master-port={job.port}"]
        script = job.script(*words, "-m", "convolve", *command)
        commands.append(shlex.join(job.reach(job.host_of(instance), script)))
    batch_script = write_batch_script(job, command, folder, options.max_restarts, options.sbatch)
    if options.json:
        print_json({"commands": commands, "batch_script": batch_script})
        return
    print(f"# {job.world} processes in {job.instances} instances on {len(job.hosts)} hosts; by hand, on each host:")
    print("\n".join(commands))
    print("# or, for sbatch:")
    print(batch_script, end="")
