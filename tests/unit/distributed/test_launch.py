"""Jobs without ranks: where agents run, what they receive, and what happens after a failure."""

import io
import shlex
import signal
import subprocess
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.cli.main import dispatch
from convolve.distributed.launch.agent import AgentSpec, read_commands
from convolve.distributed.launch.local import Agent, run_attempts
from convolve.distributed.launch.ssh import Job, RemoteAgents, check_hosts, find_hosts
from convolve.distributed.rendezvous import read_timeout
from convolve.errors import ConfigError, ParallelError

TRAIN = ["train", "--config", "lenet-digits", "--json"]


def job(**given):
    return Job(**{"hosts": ("a", "b"), "instances": 4, "world": 8, "master": "a", "port": 29400, **given})


def test_instances_fill_one_host_after_the_other():
    assert [job().host_of(number) for number in range(4)] == ["a", "a", "b", "b"]


def test_a_spec_is_one_line_that_is_read_back_unchanged():
    spec = job().agent_spec(3, [*TRAIN, "--run-dir", "a\nb"], attempt=2)
    assert spec.to_line().count("\n") == 1
    assert AgentSpec.from_line(spec.to_line()) == spec
    assert spec.agent == Agent(3, 4, "a:29402", 2, 60.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"instances": 3}, "--num-instances 3: must be a multiple of the number of hosts"),
        ({"world": 6}, "--num-instances 4: must divide the 6 processes"),
    ],
)
def test_uneven_jobs_are_rejected(given, message):
    with pytest.raises(ConfigError, match=message):
        job(**given)


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "-l", "root@-oX", "a b", "a;b", "$(id)", "a\nb", "", "a/b"])
def test_a_host_name_cannot_be_an_option_or_several_words(host):
    with pytest.raises(ConfigError, match="^--hosts .*: not a host name; [^\n]*$"):
        job(hosts=("a", host))


@pytest.mark.parametrize("host", ["a", "node-1.cluster_x", "me@10.0.0.1", "fe80::1%eth0", "first.last@host"])
def test_usual_host_names_are_accepted(host):
    assert job(hosts=("a", host)).reach(host, "true")[-3:] == ["--", host, "true"]


def test_words_reach_a_program_unharmed_through_a_remote_shell():
    """A stand-in for ssh: joins its words and gives them to a shell, as ssh does."""
    remote = job(remote_shell="sh -c", environment={"GREETING": "it's $HOME"}, python="python3")
    script = remote.script("-c", "import os, sys; print(os.environ['GREETING'], sys.argv[1])", 'a "b" c')
    done = subprocess.run(remote.reach("a", script), capture_output=True, text=True, check=True)
    assert done.stdout == 'it\'s $HOME a "b" c\n'


@pytest.mark.parametrize(
    ("codes", "expected", "attempts"),
    [([0], 0, 1), ([137, 0], 0, 2), ([1, 1, 1], 1, 3), ([2], 2, 1), ([143], 143, 1), ([137, 130], 130, 2)],
)
def test_failures_are_retried_but_neither_user_errors_nor_requested_stops(codes, expected, attempts):
    left, said, pauses = list(codes), [], []
    assert run_attempts(lambda attempt: left.pop(0), 2, said.append, pauses.append) == expected
    assert len(codes) - len(left) == attempts == len(said) + 1
    assert pauses == [1, 2][: attempts - 1]


def test_a_dry_run_prints_commands_and_a_batch_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--hosts", "a,b", "--num-instances", "4", "--num-replicas", "8", "--max-restarts", "2"]
    assert dispatch([*words, "--dry-run", "--", *TRAIN, "--batch-size", "4"]) == 0
    text = capsys.readouterr().out
    assert text.count("ssh -o BatchMode=yes") == 4
    assert text.count("--nproc-per-node=2") == 4
    assert "#SBATCH --ntasks=8" in text and "seq 0 2" in text
    script = text.partition("# or, for sbatch:\n")[2]
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "a"], "write it after `--`"),
        (["--hosts", "a", "--", "serve"], "write it after `--`"),
        (["--hosts", ",", "--", "train"], "name at least one host"),
        (
            ["--hosts", "a,-oProxyCommand=x", "--", *TRAIN, "--run-dir", "r"],
            "--hosts '-oProxyCommand=x': not a host name",
        ),
        (["--env", "X", "--", *TRAIN, "--run-dir", "r"], "--env X: must be NAME=VALUE"),
        (["--hosts", "a,b", "--num-replicas", "3", "--", *TRAIN, "--run-dir", "r"], "must divide the 3 processes"),
        (["--", "train", "--confg", "x"], "convolve train: unknown option --confg"),
    ],
)
def test_a_user_error_is_found_before_any_host_is_contacted(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        dispatch(["launch", *words])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 5))
def test_specs_of_a_job_cover_all_agents_and_agree_on_the_rendezvous(hosts, per_host, processes, attempt):
    instances = hosts * per_host
    made = job(hosts=tuple(f"h{n}" for n in range(hosts)), instances=instances, world=instances * processes, master="m")
    agents = [made.agent_spec(number, TRAIN, attempt).agent for number in range(instances)]
    assert [agent.number for agent in agents] == list(range(instances))
    assert {agent.rdzv_endpoint for agent in agents} == {f"m:{29400 + attempt}"}
    assert {(agent.count, agent.agents_per_host) for agent in agents} == {(instances, per_host)}
    assert [made.host_of(number) for number in range(instances)] == [f"h{n // per_host}" for n in range(instances)]


@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), st.text("ab '\"$\\;&\n", max_size=9), max_size=3))
def test_any_environment_is_quoted_for_the_remote_shell(environment):
    script = job(environment=environment, python="py").script("-c", "x")
    words = shlex.split(script)
    assert words[-3:] == ["py", "-c", "x"]
    assert words[words.index("env") + 1 : -3] == [f"{name}={value}" for name, value in environment.items()]


@pytest.mark.parametrize(("timeout", "seconds"), [(0.2, 1), (60.0, 60), (12.6, 13)])
def test_ssh_gets_the_connection_timeout_in_whole_seconds_and_localhost_needs_none(timeout, seconds):
    made = job(timeout=timeout)
    assert f"ConnectTimeout={seconds}" in made.reach("a", "true") and made.reach("a", "true")[-2:] == ["a", "true"]
    assert made.reach("localhost", "true") == ["sh", "-c", "true"]


@pytest.mark.parametrize("flag", ["--timeout", "--patience"])
def test_the_timeout_reaches_the_ranks_under_both_of_its_names(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dispatch(["launch", "--hosts", "a", flag, "7.5", "--dry-run", "--", *TRAIN]) == 0
    text = capsys.readouterr().out
    assert "CONVOLVE_TIMEOUT=7.5" in text and "ConnectTimeout=8" in text


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [({}, 300), ({"CONVOLVE_PATIENCE": "5"}, 5), ({"CONVOLVE_TIMEOUT": "7", "CONVOLVE_PATIENCE": "5"}, 7)],
)
def test_ranks_read_the_timeout_under_both_of_its_names(environment, seconds):
    assert read_timeout(environment).total_seconds() == seconds


def test_a_stop_command_raises_sigterm_and_the_end_of_the_input_exits(monkeypatch):
    events = []
    monkeypatch.setattr("os.kill", lambda pid, number: events.append(number))
    monkeypatch.setattr("os._exit", lambda code: events.append(f"exit {code}"))
    read_commands(io.StringIO("\nunknown\nstop\n"))
    assert events == [signal.SIGTERM, "exit 1"]


def run_agents(job):
    lines = []
    agents = RemoteAgents(job, lines.append)
    try:
        agents.start(TRAIN, 0)
        return agents.wait(), lines
    finally:
        agents.end()


def stand_in(tmp_path, program):
    """A job whose agents run a shell script instead of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    return job(remote_shell="sh -c", python=str(path), folder=tmp_path, environment={"WHO": "me"}, timeout=5.0)


def test_agents_receive_their_specs_and_their_output_is_relayed(tmp_path):
    code, lines = run_agents(stand_in(tmp_path, 'read spec; echo "$WHO $spec"'))
    specs = [AgentSpec.from_line(line.split(" ", 1)[1]) for line in lines]
    assert code == 0 and all(line.startswith("me ") for line in lines)
    assert sorted(spec.agent.number for spec in specs) == [0, 1, 2, 3]
    assert {spec.argv for spec in specs} == {tuple(TRAIN)}


def test_one_failed_agent_ends_the_others_and_is_named(tmp_path):
    """The others would read their input forever; its end makes them exit."""
    program = 'read spec; case "$spec" in *\'"number": 2,\'*) exit 7;; esac; cat > /dev/null'
    code, lines = run_agents(stand_in(tmp_path, program))
    assert code == 7
    assert lines == ["instance 2 on b failed with exit code 7"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ('echo \'{"convolve": "1"}\'', None),
        ("echo broken >&2; exit 3", r"host a: cannot run convolve \(broken\); check the connection and --python"),
        ("exit 3", r"host a: cannot run convolve \(exit code 3\)"),
        (
            'case $HOST in a) echo \'{"torch": "1"}\';; *) echo \'{"torch": "2"}\';; esac',
            "host b: has torch 2, unlike a",
        ),
    ],
)
def test_a_host_that_cannot_run_the_job_is_named(program, message, tmp_path):
    made = replace(stand_in(tmp_path, program), remote_shell="env HOST={host} sh -c")
    with nullcontext() if message is None else pytest.raises(ParallelError, match=message):
        check_hosts(made)


@pytest.mark.parametrize(
    ("lost", "hosts"), [("b", ("a", "c", "d")), ("a", ("b", "c", "d")), ("none", ("a", "b", "c", "d"))]
)
def test_a_restart_uses_the_hosts_that_respond(lost, hosts, tmp_path):
    program = f"case $HOST in {lost}) exit 255;; *) echo '{{}}';; esac"
    made = replace(stand_in(tmp_path, program), remote_shell="env HOST={host} sh -c", hosts=("a", "b", "c", "d"))
    made, said = replace(made, instances=4, world=8, stages=2, master="a"), []
    found = find_hosts(made, said.append)
    assert (found.hosts, found.instances, found.world) == (hosts, len(hosts), 2 * len(hosts))
    assert (found.master, len(said)) == (hosts[0], 4 - len(hosts))
    assert found.arguments(["restore", "run"]) == ["restore", "run", "--replicas", str(len(hosts))]
    assert found.arguments(["train", "--resume"]) == ["train", "--resume"]


def test_hosts_that_are_too_few_for_a_replica_are_waited_for(tmp_path):
    program = "case $HOST in b) exit 255;; *) echo '{}';; esac"
    made = replace(stand_in(tmp_path, program), remote_shell="env HOST={host} sh -c", hosts=("a", "b"))
    made = replace(made, instances=2, world=2, stages=2)
    assert find_hosts(made, [].append) is made
