"""Training runs of several processes, forked from one that has imported everything, to start fast."""

import os
import signal
import socket
import subprocess
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from convolve import device
from convolve.checkpoint.store import Store
from convolve.config.loading import dump
from convolve.data.readers.index import Index
from convolve.distributed.rendezvous import backends
from convolve.engine import loop, step, verification
from convolve.loggers.base import SilentConsole
from convolve.runs import session
from convolve.runs.folder import read_config
from forked_commands import FORKS, Running

PATIENCE = 120


def train_together(config):
    """Train a config in as many processes as its layout needs; return the report of the first one."""
    if config.parallel.replicas * config.parallel.shards == 1:
        return session.train(config, SilentConsole())
    return Job(config.parallel, session.train, config).finish()


def restore_together(folder, changes):
    """Resume a run in another layout and return the report of the first process."""
    layout = changes.apply(read_config(folder)).parallel
    if layout.replicas * layout.shards == 1:
        return session.resume(folder, SilentConsole(), changes)
    return Job(layout, restore_run, folder, changes).finish()


def restore_run(folder, changes, console):
    """`restore.run` with the console last."""
    return session.resume(folder, console, changes)


def train_in_open_group(config, console):
    """Train as in a worker of Ray: outside the main thread, in a process group that is open and stays open."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = backends(device.select(config.run.device).type)
    dist.init_process_group(backend, init_method="env://", rank=rank, world_size=world)
    with ThreadPoolExecutor() as threads:
        report = threads.submit(session.train, config, console).result()
    dist.destroy_process_group()  # fails if the run has closed it
    return report


def train_counting_reads(config, folder, console):
    """Train, and write the number of images that each process read."""
    counted = []
    read_one, read_many = Index.read, Index.read_jpegs
    Index.read = lambda self, row: counted.append(row) or read_one(self, row)
    Index.read_jpegs = lambda self, rows, memory: counted.extend(rows) or read_many(self, rows, memory)
    report = session.train(config, console)
    (folder / f"reads-{os.environ['RANK']}").write_text(str(len(counted)))
    return report


def train_verified(config, console):
    """Train with `--verify-steps`, and compute every micro batch twice."""
    verification.RECOMPUTED_EVERY = 1
    return session.train(config.replace(verify_steps=True), console)


def flip_weight(config, flipped_replica, console):
    """Train, and flip a bit in the optimizer update of one replica, where checksums cannot see it."""
    original = step.train_step

    def train_step(state, batch, parts, **given):
        if state.step == 3 and parts.collectives.topology.replica == flipped_replica:
            update = state.optimizer.step

            def wrong_update():
                update()
                next(state.model.parameters()).data.view(torch.int32).view(-1)[0] ^= 1

            state.optimizer.step = wrong_update
        return original(state, batch, parts, **given)

    loop.train_step = train_step
    return session.train(config.replace(verify_steps=True), console)


def train_with_slow_saves(config, console):
    """Train with a file system that takes a second to mark another checkpoint as best."""
    original = Store.mark_best

    def mark_best(store, path):
        time.sleep(1 if store.best else 0)
        original(store, path)

    Store.mark_best = mark_best
    return session.train(config, console)


def interrupt_command(config, how):
    """Train a config with the real command, which starts its processes, and interrupt it in its second epoch.

    SIGTERM goes to the command itself, SIGKILL to one of its processes. The job must end within a minute.
    """
    folder = config.run.run_dir
    file = folder.with_name("interrupted.yml")
    file.write_text("interrupted:\n" + "".join(f"  {line}\n" for line in dump(config).splitlines()[1:]))
    command = Running("train", "--config-path", file, "--config", "interrupted")
    with command.stdout:
        for line in command.stdout:
            if "epoch 1.5" in line:
                break
        children = subprocess.run(["pgrep", "-P", str(command.pid)], capture_output=True, text=True, check=True)
        os.kill(command.pid if how is signal.SIGTERM else int(children.stdout.split()[-1]), how)
        assert command.wait(60) != 0, command.stdout.read()


class Job:
    """The processes of one training run."""

    def __init__(self, layout, work, *given):
        world = layout.replicas * layout.shards
        environment, pipes = _environment(world), [FORKS.Pipe(duplex=False) for _ in range(world)]
        self.processes = [
            FORKS.Process(target=_child, args=(rank, environment, pipes[rank][1], work, given)) for rank in range(world)
        ]
        self.answers = [pipe[0] for pipe in pipes]
        for process in self.processes:
            process.start()
        for pipe in pipes:
            pipe[1].close()

    def wait(self, seconds=PATIENCE):
        """Return True if all processes exited within the time."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        ended = all(process.exitcode is not None for process in self.processes)
        for process in self.processes:
            process.kill()
        return ended

    def finish(self):
        """Return the report of the first process; raise the first error."""
        assert self.wait(), "a process did not end"
        found = [answer.recv() for answer in self.answers]
        for rank, (_, trouble) in enumerate(found):
            assert trouble is None, f"rank {rank}:\n{trouble}"
        return found[0][0]


def _environment(world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {name: os.environ[name] for name in ("CONVOLVE_CACHE",) if name in os.environ}
    return {**shared, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _child(rank, environment, answer, work, given):
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        report = work(*given, SilentConsole())
        answer.send((report if rank == 0 else None, None))
    except BaseException:
        answer.send((None, traceback.format_exc()))
