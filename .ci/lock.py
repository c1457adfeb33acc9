"""Write or check requirements.lock: the development environment with the sha256 of every package.

    python .ci/lock.py write PYTHON       resolve `convolve[dev]` and zoo.txt with the pip of PYTHON, and lock them
    python .ci/lock.py applies            exit with 0 if the lock is for this interpreter and system

The lock holds for one system and Python version, named in its first line, since wheels with native code have other
hashes elsewhere. torch is not in it: its CPU and CUDA builds have the same version and different hashes. Install torch
first, then `pip install --require-hashes --no-deps -r requirements.lock`.
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path(__file__).parents[1] / "requirements.lock"
ZOO = Path(__file__).with_name("zoo.txt")
EXCLUDED = {"torch", "convolve"}


def first_line() -> str:
    """Return the first line of a lock for this interpreter."""
    version = ".".join(platform.python_version_tuple()[:2])
    return f"# {platform.system()} {platform.machine()}, Python {version}; written by `make lock`"


def resolve(python: str) -> dict[str, str]:
    """Return `name==version` and sha256 of every file that pip would install for development, without installing it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check", "--report", str(report)]
        items = []
        for wanted in ([f"{LOCK.parent}[dev]"], ["--no-deps", "-r", str(ZOO)]):
            subprocess.run([python, "-m", "pip", "install", *options, *wanted], check=True)
            items += json.loads(report.read_text())["install"]
    return {
        f"{item['metadata']['name']}=={item['metadata']['version']}": item["download_info"]["archive_info"]["hashes"][
            "sha256"
        ]
        for item in items
        if item["metadata"]["name"].lower() not in EXCLUDED
    }


def write(python: str) -> None:
    """Write the lock of an environment."""
    locked = resolve(python)
    lines = [
        f"{name} --hash=sha256:{digest}" for name, digest in sorted(locked.items(), key=lambda item: item[0].lower())
    ]
    LOCK.write_text("\n".join([first_line(), *lines]) + "\n")


def applies() -> bool:
    """Compare the first line of the lock with this interpreter."""
    return LOCK.is_file() and LOCK.read_text().splitlines()[0] == first_line()


if __name__ == "__main__":
    if sys.argv[1:] == ["applies"]:
        sys.exit(not applies())
    if len(sys.argv) != 3 or sys.argv[1] != "write":
        sys.exit(__doc__)
    write(sys.argv[2])
