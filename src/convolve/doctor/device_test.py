"""The self-test of a device: runs the checks in child processes and collects their findings."""

import json
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from convolve import device
from convolve.distributed.launch.local import start_processes
from convolve.doctor.checks import CHECKS, Finding, findings_file
from convolve.errors import describe
from convolve.loggers.base import Console

LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class DeviceTest:
    """Result of the self-test; `backend` is that of torch.distributed."""

    device: str
    model: str
    count: int
    backend: str
    seconds: float
    failed: int
    findings: list[Finding]


def run(name: str, console: Console, limit: float = LIMIT_SECONDS) -> DeviceTest:
    """Test the device of a name, for at most about `limit` seconds. A check that fails does not stop the others."""
    place, started = device.select(name), time.monotonic()
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="convolve-") as folder:
        for number, check in enumerate(CHECKS):
            console.progress(f"check {check}", number, len(CHECKS))
            found = _run_check(check, place, Path(folder), (started + limit, limit / 2))
            for finding in found:
                console.info(f"{finding.check}: {finding.status}, {finding.detail}")
            findings += found
    return DeviceTest(
        device=str(place),
        model=_model(place),
        count=_count(place),
        backend=_backend(place),
        seconds=time.monotonic() - started,
        failed=sum(finding.status == "failed" for finding in findings),
        findings=findings,
    )


def _count(place: torch.device) -> int:
    return 1 if place.type == "cpu" else torch.accelerator.device_count()


def _model(place: torch.device) -> str:
    if place.type == "cpu":
        return device.cpu_name()
    describe_model = getattr(torch.get_device_module(place), "get_device_name", None)
    return str(describe_model(place)) if describe_model else place.type


def _backend(place: torch.device) -> str:
    try:
        return dist.get_default_backend_for_device(place)
    except ValueError as error:
        return describe(error)


def _run_check(check: str, place: torch.device, folder: Path, limits: tuple[float, float]) -> list[Finding]:
    """Run one check before the deadline of all of them, and within its own number of seconds."""
    processes, (deadline, seconds) = CHECKS[check][1], limits
    if time.monotonic() >= deadline:
        return [Finding(check, "skipped", "no time is left")]
    if processes > 1 and place.type != "cpu" and _count(place) < processes:
        return [Finding(check, "skipped", f"needs {processes} devices, this host has {_count(place)}")]
    # Processes beside each other use one device each, by local rank.
    name = place.type if processes > 1 else str(place)
    end = min(deadline, time.monotonic() + seconds)
    code = start_processes(
        processes,
        [check, name, str(folder)],
        module="convolve.doctor.checks",
        on_poll=lambda: signal.SIGKILL if time.monotonic() >= end else None,
    )
    findings = _read_findings(check, processes, folder)
    if code == 128 + signal.SIGKILL and time.monotonic() >= end:
        late = Finding(check, "failed", f"did not end within {seconds:.0f} s")
        findings.append(late if end < deadline else Finding(check, "skipped", "no time is left"))
    elif code and all(finding.status != "failed" for finding in findings):
        findings.append(Finding(check, "failed", f"a process ended with exit code {code}"))
    return findings


def _read_findings(check: str, processes: int, folder: Path) -> list[Finding]:
    """Return the findings of rank 0 and the failures of the others, which are often their cause."""
    ranks = [_read(findings_file(folder, check, rank)) for rank in range(processes)]
    others = [finding for found in ranks[1:] for finding in found if finding.status == "failed"]
    return list(dict.fromkeys([*others, *ranks[0]]))


def _read(path: Path) -> list[Finding]:
    return [Finding(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
