"""`convolve launch`."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convolve.cli import restore as restore_verb
from convolve.cli import train as train_verb
from convolve.cli.command import Parser, read_config
from convolve.cli.console import print_json
from convolve.compat.options import translate_program
from convolve.config import Config
from convolve.distributed.launch import ssh
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from convolve.distributed.launch.ssh import Job


USAGE = "convolve launch --hosts a,b [--num-instances 4] [--num-replicas 8] [options] -- train --config NAME ..."
COMMANDS = ("train", "restore")


def run(arguments: Sequence[str]) -> int:
    """Start a training on many hosts and watch it."""
    parser = _parser()
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    options, command = parser.parse(translate_program("launch", arguments[:cut])), list(arguments[cut + 1 :])
    if not command or command[0] not in COMMANDS:
        raise ConfigError(
            "launch: give the training after two dashes, as in `convolve launch --hosts a,b -- train ...`"
        )

    config, folder, command = _resolve(command, options)
    job = _plan_job(options, config)
    if options.dry_run:
        _show(job, command, folder, options.max_restarts)
        return 0
    report = ssh.launch(job, command, folder, options.max_restarts, lambda line: print(line, flush=True))
    if options.json:
        print_json(report)
    return report.exit_code


def _parser() -> Parser:
    parser = Parser(prog="convolve launch", usage=USAGE, description="Start a training on many hosts and watch it.")
    parser.add_argument("--hosts", default="localhost", metavar="A,B", help="hosts, separated by commas [localhost]")
    parser.add_argument("--num-instances", type=int, metavar="N", help="launchers over all hosts; unset: one per host")
    parser.add_argument("--num-replicas", type=int, metavar="N", help="copies of the model over all hosts (--replicas)")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N", help="times to go on after a failure [0]")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and a script for sbatch")
    parser.add_argument("--master-addr", metavar="ADDRESS", help="where ranks meet; unset: the first host")
    parser.add_argument("--master-port", type=int, metavar="N", help="port there; each restart takes the next one")
    parser.add_argument("--interface", metavar="NAME", help="network interface that ranks talk through, such as eth0")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="S", help="seconds to wait for a host or rank [60]"
    )
    parser.add_argument("--env", action="append", default=[], metavar="K=V", help="set a variable on all hosts")
    parser.add_argument("--python", metavar="PATH", help="interpreter on the hosts; unset: the one that runs this")
    parser.add_argument("--all-output", action="store_true", help="every rank speaks, not the first one alone")
    parser.add_argument(
        "--remote-shell", metavar="WORDS", help="how a host is reached, with {host} in it; unset: ssh without questions"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    return parser


def _resolve(command: list[str], options: Namespace) -> tuple[Config, Path, list[str]]:
    """The config of the training, the folder of its run, and the command that says both."""

    from convolve.runs import session
    from convolve.runs.folder import reserve_run_dir

    if options.num_replicas is not None:
        command = [*command, "--replicas", str(options.num_replicas)]
    if command[0] == "restore":
        told = restore_verb.read_options(command[1:])
        config = restore_verb.read_changes(told).apply(session.read_config(told.run))
        return config, told.run.absolute(), command
    config = read_config(train_verb.read_options(command[1:]))
    claimed = config.run.run_dir is not None or not options.dry_run
    folder = reserve_run_dir(config) if claimed else (config.run.log_dir / "RUN").absolute()
    return config, folder, [*command, "--run-dir", str(folder)]


def _plan_job(options: Namespace, config: Config) -> Job:
    from convolve.distributed.launch.ssh import SSH, Job, pick_port

    hosts = tuple(host for host in options.hosts.split(",") if host)
    if not hosts or any(count is not None and count < 1 for count in (options.num_instances, options.num_replicas)):
        raise ConfigError(f"hosts={options.hosts}: name at least one host, and at least one instance and replica")
    # torch warns about every host name that it cannot look up.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "CONVOLVE_PATIENCE": f"{options.patience:g}"}
    environment = {**quiet, **_read_pairs(options.env)}
    if options.interface is not None:
        environment |= {"GLOO_SOCKET_IFNAME": options.interface, "NCCL_SOCKET_IFNAME": options.interface}
    if options.all_output:
        environment["CONVOLVE_ALL_OUTPUT"] = "1"
    given = {} if options.python is None else {"python": options.python}
    return Job(
        hosts=hosts,
        instances=options.num_instances or len(hosts),
        world=config.parallel.processes,
        master=options.master_addr or hosts[0],
        port=options.master_port or (29400 if options.dry_run else pick_port()),
        remote_shell=options.remote_shell or SSH,
        environment=environment,
        patience=options.patience,
        **given,
    )


def _read_pairs(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"env={pair}: must be NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _show(job: Job, command: Sequence[str], folder: Path, max_restarts: int) -> None:
    from convolve.distributed.launch.slurm import write_batch_script

    own = job.world // job.instances
    print(f"# {job.world} processes in {job.instances} instances on {len(job.hosts)} hosts; by hand, on each host:")
    for instance in range(job.instances):
        words = ["-m", "torch.distributed.run", f"--nnodes={job.instances}", f"--node-rank={instance}"]
        words += [f"--nproc-per-node={own}", f"--master-addr={job.master}", f"--master-port={job.port}"]
        script = job.script(*words, "-m", "convolve", *command)
        print(shlex.join(job.reach(job.host_of(instance), script)))
    print("# or, for sbatch:")
    print(write_batch_script(job, command, folder, max_restarts), end="")
