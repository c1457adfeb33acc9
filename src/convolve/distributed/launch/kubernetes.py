"""Kubernetes: manifests of a run for Kubeflow Trainer (a TrainJob) and for JobSet alone.

Both start one pod per node with an equal part of the processes, mount one persistent volume with the run folder, and
run a command that continues its run, so a pod that is replaced loses only the steps since the newest checkpoint.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from convolve.distributed.launch.local import USER_ERROR
from convolve.distributed.launch.ssh import Job
from convolve.errors import ConfigError

Manifest = dict[str, Any]

KINDS = ("trainjob", "jobset")
# The runtime for PyTorch that Kubeflow Trainer installs. It sets the PET_ variables, which are the options of torchrun.
RUNTIME = "torch-distributed"
# The name of the replicated job and of its container, in that runtime too.
NODE = "node"
_GRACE_SECONDS = 120
_MAX_NAME = 40  # of 63, since JobSet appends the node to it
_SHARED_MEMORY = "shared-memory"
_STORAGE = "storage"


@dataclass(frozen=True)
class Cluster:
    """What pods consist of: an image, a persistent volume claim and where it is mounted, and resources of a node."""

    image: str
    claim: str
    mount: PurePosixPath
    resources: Mapping[str, str] = field(default_factory=dict)


def write_manifest(
    kind: str, job: Job, argv: Sequence[str], run_folder: Path, max_restarts: int, cluster: Cluster
) -> Manifest:
    """Return the manifest of a job, with one node per instance. The run folder must be on the volume."""
    folder = PurePosixPath(run_folder)
    if not folder.is_relative_to(cluster.mount) or folder == cluster.mount:
        raise ConfigError(f"--run-dir {folder}: not on the volume; use a folder below {cluster.mount}")
    write = _write_train_job if kind == "trainjob" else _write_job_set
    return write(_name(folder.name), job, argv, max_restarts, cluster)


def _write_train_job(name: str, job: Job, argv: Sequence[str], max_restarts: int, cluster: Cluster) -> Manifest:
    """Return a TrainJob whose nodes run torchrun; the runtime says where they meet."""
    command = [job.python, "-m", "torch.distributed.run", f"--max-restarts={max_restarts}", "-m", "convolve", *argv]
    trainer = {
        "image": cluster.image,
        "command": _literal(command),
        "env": _environment(job),
        "numNodes": job.instances,
        "numProcPerNode": job.world // job.instances,
        **({"resourcesPerNode": {"limits": dict(cluster.resources)}} if cluster.resources else {}),
    }
    pod = {
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "volumes": _volumes(cluster),
        "containers": [{"name": NODE, "volumeMounts": _mounts(cluster)}],
    }
    jobs = [{"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}]
    patch = {"manager": "convolve", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer, "runtimePatches": [patch]},
    }


def _write_job_set(name: str, job: Job, argv: Sequence[str], max_restarts: int, cluster: Cluster) -> Manifest:
    """Return a JobSet whose nodes run the agent of `convolve launch`; a user error is not repeated."""
    container = {
        "name": NODE,
        "image": cluster.image,
        "command": [job.python, "-m", "convolve.distributed.launch.agent", _spec_template(name, job, argv)],
        "env": _environment(job),
        "volumeMounts": _mounts(cluster),
        **({"resources": {"limits": dict(cluster.resources)}} if cluster.resources else {}),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "containers": [container],
        "volumes": _volumes(cluster),
    }
    user_error = {"containerName": NODE, "operator": "In", "values": [USER_ERROR]}
    nodes = {
        "completionMode": "Indexed",
        "completions": job.instances,
        "parallelism": job.instances,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": user_error}]},
        "template": {"spec": pod},
    }
    final = {"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": max_restarts, "rules": [final]},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": nodes}}],
        },
    }


def _spec_template(name: str, job: Job, argv: Sequence[str]) -> str:
    """Return the spec of an agent, in which Kubernetes replaces the number of the node."""
    spec = replace(job, master=f"{name}-{NODE}-0-0.{name}").agent_spec(0, argv, attempt=0)
    (text,) = _literal([spec.to_line().strip()])
    return text.replace('"number": 0', '"number": $(JOB_COMPLETION_INDEX)', 1)


def _literal(words: Sequence[str]) -> list[str]:
    """Return words in which Kubernetes replaces no variable."""
    return [word.replace("$", "$$") for word in words]


def _environment(job: Job) -> list[Manifest]:
    values = _literal([*job.environment.values()])
    return [{"name": name, "value": value} for name, value in zip(job.environment, values, strict=True)]


def _volumes(cluster: Cluster) -> list[Manifest]:
    """Return the volume of the run folder, and shared memory: that of a container has 64 MiB."""
    return [
        {"name": _STORAGE, "persistentVolumeClaim": {"claimName": cluster.claim}},
        {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
    ]


def _mounts(cluster: Cluster) -> list[Manifest]:
    return [
        {"name": _STORAGE, "mountPath": str(cluster.mount)},
        {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},
    ]


def _name(text: str) -> str:
    """Return a name that Kubernetes accepts, which starts with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", f"convolve-{text.lower()}")
    return label[:_MAX_NAME].strip("-")
