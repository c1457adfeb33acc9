"""The wheel is complete: installed into an empty environment, it trains on a folder of photos without a checkout.

Only convolve comes from the wheel. torch and the other packages come from the environment of the tests, so nothing is
downloaded. The build uses the hatchling of the extra `dev`, for the same reason.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from drawn_photos import write_photos

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "convolve"
PACKAGES = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]

pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed")


def run(*words, folder, **environment):
    """Run a command to its end, without the import path of the tests, and return its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel offline and return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    packages = os.pathsep.join(PACKAGES)
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, ROOT, folder=folder, PYTHONPATH=packages)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel into an empty environment that finds all other packages, and return its folder of commands."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=os.name != "nt")
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", wheel, folder=environment, PYTHONPATH=os.pathsep.join(PACKAGES))
    # Folders named in a .pth file are searched last, and their .pth files have no effect: no checkout is found.
    (site_packages,) = {path.resolve() for path in environment.glob("lib*/**/site-packages")}
    (site_packages / "packages.pth").write_text("\n".join(PACKAGES) + "\n", encoding="utf-8")
    return scripts


def test_the_wheel_contains_every_file_of_the_package(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", str(PACKAGE)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == expected


@pytest.mark.slow
def test_an_installed_wheel_trains_on_a_folder_of_photos(installed, tmp_path):
    photos = write_photos(tmp_path / "photos", {"round": 12, "square": 12})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = run(installed / "python", "-c", "import convolve; print(convolve.__file__)", folder=elsewhere)
    assert Path(place.strip()).is_relative_to(installed.parent)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    small = ("--weights", "none", "--epochs", "1", "--image-size", "32")
    output = run(installed / "convolve", "train", photos, *small, folder=elsewhere, **environment)
    assert output.splitlines()[-1].startswith("accuracy ")
    report = (elsewhere / "runs" / "photos-1" / "report.html").read_text(encoding="utf-8")
    assert "<style>" in report and "data:image" in report
    assert "native kernels unavailable" not in output
