"""Kubernetes: manifests that lose no key in the models of the API, and whose command trains."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from convolve.cli.main import dispatch
from convolve.errors import ConfigError
from digit_runs import weights_hash

CLUSTER = ["--dry-run", "--image", "me/convolve:1", "--volume", "my-claim:/data", "--resource", "nvidia.com/gpu=4"]
CLUSTER += ["--num-instances", "2", "--num-replicas", "8", "--max-restarts", "3", "--env", "GREETING=it's $(HOME)"]
TRAIN = ["train", "--config", "lenet-digits", "--batch-size", "4", "--name-suffix", "$(x)"]


def manifest(capsys, kind, run_dir="/data/runs/My_run.1", options=CLUSTER):
    assert dispatch(["launch", "--kubernetes", kind, *options, "--", *TRAIN, "--run-dir", run_dir]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("kind", "model"), [("trainjob", "TrainerV1alpha1TrainJob"), ("jobset", "JobsetV1alpha2JobSet")]
)
def test_no_key_is_lost_in_the_models_of_the_api(capsys, kind, model):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    written = manifest(capsys, kind)
    assert getattr(models, model).from_dict(written).to_dict() == written
    written["spec"]["misspelled"] = 1
    assert getattr(models, model).from_dict(written).to_dict() != written, "an unknown key is found"


def test_a_train_job_has_its_nodes_and_lets_torchrun_continue_the_run(capsys):
    spec = manifest(capsys, "trainjob")["spec"]
    assert spec["runtimeRef"] == {"name": "torch-distributed"}
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert trainer["command"][:5] == ["python3", "-m", "torch.distributed.run", "--max-restarts=3", "-m"]
    assert trainer["command"][-3:] == ["--resume", "--run-dir", "/data/runs/My_run.1"]
    assert "$$(x)" in trainer["command"], "Kubernetes would replace $(x)"
    assert {"name": "GREETING", "value": "it's $$(HOME)"} in trainer["env"]


def test_a_job_set_restarts_everything_but_user_errors(capsys):
    written = manifest(capsys, "jobset")
    assert written["metadata"]["name"] == "convolve-my-run-1"
    policy = written["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["rules"][0]["action"]) == (3, "FailJobSet")
    nodes = written["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (nodes["completions"], nodes["parallelism"], nodes["backoffLimit"]) == (2, 2, 0)
    assert nodes["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert nodes["template"]["spec"]["volumes"][0]["persistentVolumeClaim"] == {"claimName": "my-claim"}


@pytest.mark.dist
def test_the_command_of_each_node_of_a_job_set_trains_with_the_bits_of_one_process(capsys, tmp_path):
    """As Kubernetes would: the number of the node is replaced, and the name of the first one has an address."""
    train = ["train", "--config", "lenet-digits", "--iterations", "3", "--threads", "1", "--no-report", "--run-dir"]
    options = ["--dry-run", "--image", "x", "--volume", f"claim:{tmp_path}", "--num-instances", "2", "--python"]
    options += [sys.executable, "--num-replicas", "2", "--master-port", str(21000 + os.getpid() % 8000), "--json"]
    assert dispatch(["launch", "--kubernetes", "jobset", *options, "--", *train, str(tmp_path / "run")]) == 0
    spec = json.loads(capsys.readouterr().out)["manifest"]["spec"]
    command = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    nodes = []
    for number in range(2):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(number)) for word in command]
        words[-1] = words[-1].replace("convolve-run-node-0-0.convolve-run", "127.0.0.1")
        nodes.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    assert [node.wait(120) for node in nodes] == [0, 0]
    alone = [*train, str(tmp_path / "alone"), "--gradient-accumulation-count", "2"]
    subprocess.run([sys.executable, "-m", "convolve", *alone], check=True, capture_output=True)
    assert weights_hash(tmp_path / "run") == weights_hash(tmp_path / "alone")


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        (CLUSTER[1:], TRAIN, "--kubernetes jobset: only prints a manifest; add --dry-run"),
        (["--hosts", "a,b", *CLUSTER], TRAIN, "--kubernetes jobset: Kubernetes chooses the hosts"),
        (CLUSTER, ["restore", "run"], "--kubernetes jobset: needs `train`"),
        (CLUSTER[:3] + CLUSTER[5:], TRAIN, "--kubernetes jobset: missing --volume"),
        ([*CLUSTER, "--volume", "claim:data"], TRAIN, "--volume claim:data: must be CLAIM:PATH with an absolute path"),
        ([*CLUSTER, "--resource", "gpu"], TRAIN, "--resource gpu: must be NAME=VALUE"),
        (CLUSTER, [*TRAIN, "--run-dir", "/other/run"], "--run-dir /other/run: not on the volume; use a folder below"),
        ([*CLUSTER, "--num-instances", "3"], TRAIN, "--num-instances 3: must divide the 8 processes"),
    ],
)
def test_what_a_manifest_cannot_express_is_rejected(options, command, message):
    command = [*command, "--run-dir", "/data/run"] if "--run-dir" not in command and command[0] == "train" else command
    with pytest.raises(ConfigError, match=message):
        dispatch(["launch", "--kubernetes", "jobset", *options, "--", *command])
