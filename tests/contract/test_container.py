"""The Dockerfile names what exists, and its image trains, exports, predicts and serves.

buildah builds the image on a base made by debootstrap, so no registry is needed. The base has the release of this
system and comes from the mirror of its apt. Packages come from the indexes that pip uses here, which must not be named
in the image.
"""

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import convolve
from convolve.device import cache_folder
from documents import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TOOLS = ("apt-get", "buildah", "debootstrap")
INDEXES = ("index-url", "extra-index-url", "find-links")
UID = 1234

# Serves a run, sends one request over loopback and stops the server.
SERVE = """
import subprocess, sys, urllib.request
server = subprocess.Popen([*sys.argv[3:], "serve", sys.argv[1], "--port", "0"], stdout=subprocess.PIPE, text=True)
url = next(line.split()[-1] for line in server.stdout if line.startswith("serving on "))
body, header = open(sys.argv[2], "rb").read(), {"Content-Type": "image/png"}
print(urllib.request.urlopen(urllib.request.Request(url + "predict", body, header), timeout=60).read().decode())
server.terminate()
sys.exit(server.wait())
"""


def instructions():
    """Return the instructions of the Dockerfile as (name, arguments)."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line]


def arguments(name):
    """Return the arguments of all instructions of one name."""
    return [rest for word, rest in instructions() if word == name]


def section(name):
    """Return a section of pyproject.toml."""
    return PROJECT.partition(f"\n[{name}]\n")[2].partition("\n[")[0]


def test_the_base_image_is_a_build_argument():
    (argument, default), base = instructions()[0], instructions()[1]
    assert argument == "ARG" and default.startswith("BASE=")
    assert base == ("FROM", "${BASE}") and len(arguments("FROM")) == 1


def test_the_extras_of_the_image_exist():
    (extras,) = [argument.removeprefix("EXTRAS=") for argument in arguments("ARG") if argument.startswith("EXTRAS=")]
    existing = re.findall(r"^(\w+) = \[", section("project.optional-dependencies"), re.M)
    assert {"export", "serve"} <= {*extras.split(",")} <= {*existing}


def test_the_entry_point_is_the_command_of_the_project():
    (entry,) = arguments("ENTRYPOINT")
    (command,) = json.loads(entry)
    assert f"\n{command} = " in f"\n{section('project.scripts')}"


def test_the_user_of_the_image_is_created_and_not_root():
    (user,) = arguments("USER")
    assert user not in ("root", "0")
    assert any(re.search(rf"useradd [^&]* {user}\b", step) for step in arguments("RUN"))


def test_the_cache_is_in_the_volume(monkeypatch):
    monkeypatch.delenv("CONVOLVE_CACHE")
    for name, value in re.findall(r"(\w+)=(\S+)", " ".join(arguments("ENV"))):
        monkeypatch.setenv(name, value)
    assert [str(cache_folder().parent)] == arguments("VOLUME")


def test_the_build_gets_what_the_wheel_is_made_of():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and all((ROOT / name).exists() for name in sent)
    named = re.findall(r'^(?:readme|license-files|packages) = \[?"([\w./]+)"', PROJECT, re.M)
    assert len(named) == 3 and sent == {"pyproject.toml", *(name.partition("/")[0] for name in named)}


def test_the_files_of_the_image_name_no_host():
    assert not any("://" in (ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", ".dockerignore"))


class Buildah:
    """The commands of buildah, with storage in a folder, which is removed at the end."""

    def __init__(self, folder):
        self.folder = folder
        self._options = ["--root", folder / "storage", "--runroot", folder / "state", "--storage-driver", "vfs"]

    def __call__(self, *words):
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
        line = [*map(str, ("buildah", *self._options, *words))]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout.strip()

    def remove(self):
        """Remove containers and images: gigabytes that pytest would keep."""
        self("rm", "--all")
        self("rmi", "--all", "--force")
        shutil.rmtree(self.folder)


@pytest.fixture
def buildah(tmp_path):
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    command = Buildah(tmp_path / "buildah")
    yield command
    command.remove()


def package_mirror():
    """Return the release of this system, and the mirror from which apt gets it."""
    fields = "$(REPO_URI) $(CODENAME) $(COMPONENT)"
    words = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    release = platform.freedesktop_os_release().get("VERSION_CODENAME")
    for line in subprocess.check_output(words, text=True).splitlines():
        mirror, *found = line.split()
        if found == [release, "main"]:
            return release, mirror
    pytest.skip("apt has no mirror of this system's release; run `apt-get update`")


def make_base(buildah, name):
    """Make an image with the packages that every Debian system has."""
    release, mirror = package_mirror()
    container = buildah("from", "scratch")
    folder = buildah("mount", container)
    subprocess.run(["debootstrap", "--variant=minbase", release, folder, mirror], check=True, stdout=subprocess.DEVNULL)
    buildah("umount", container)
    buildah("commit", "--rm", container, name)


def pip_options():
    """Return the options of pip that concern its indexes; those of the environment come last, as in pip."""
    lines = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True).splitlines()
    pairs = [line.partition("=")[::2] for line in sorted(lines, key=lambda line: line.startswith(":env:"))]
    known = (*INDEXES, "no-index", "trusted-host", "cert", "timeout", "default-timeout")
    found = {key.rpartition(".")[2]: ast.literal_eval(value) for key, value in pairs if not key.startswith("download.")}
    return {name: value for name, value in found.items() if name in known}


def copy_pip_settings(folder):
    """Write the pip.conf of the build, and return it with the local folders and files that it needs as volumes."""
    options, volumes = pip_options(), []

    def place(word, levels=0):
        path = Path(word.removeprefix("file://"))
        if not path.is_absolute() or not path.exists():
            return word
        # The links of a local index lead to files beside it.
        shared = path.parents[levels - 1] if levels else path
        target = Path(f"/run/pip-{len(volumes)}")
        volumes.append(f"--volume={shared}:{target}:ro")
        moved = target / path.relative_to(shared)
        return moved.as_uri() if word.startswith("file://") else str(moved)

    for name in INDEXES:
        if name in options:
            options[name] = " ".join(place(word, int(name != "find-links")) for word in options[name].split())
    if "cert" in options:
        options["cert"] = place(options["cert"])
    file = folder / "pip.conf"
    file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in options.items())]) + "\n")
    return file, volumes


def build(buildah, folder, name):
    """Build the Dockerfile on a base made here, check that pip's settings are not in it, and return its config."""
    make_base(buildah, "localhost/base")
    pip, volumes = copy_pip_settings(folder)
    given = ("--build-arg", "BASE=localhost/base", "--build-arg", f"UID={UID}", "--secret", f"id=pip.conf,src={pip}")
    buildah("build", "--pull-never", "--layers=false", *given, *volumes, "--tag", name, ".")
    settings = buildah("inspect", "--type", "image", name)
    values = [pip.read_text(), *pip_options().values()]
    assert [word for value in values for word in value.split() if "/" in word and word in settings] == []
    return json.loads(settings)["OCIv1"]["config"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(3600)
def test_the_image_trains_exports_predicts_and_serves(buildah, tmp_path):
    image = build(buildah, tmp_path, "localhost/convolve")
    assert image["User"] == "convolve"
    assert {entry.partition("=")[0] for entry in image["Env"]} == {"PATH", "XDG_CACHE_HOME"}

    container = buildah("from", "--pull-never", "localhost/convolve")
    folder = Path(buildah("mount", container))
    assert [path for path in (folder / "run").rglob("*") if path.is_file() and path.stat().st_size] == []
    assert [*folder.glob("etc/pip.conf"), *folder.glob("opt/convolve/pip.conf"), *folder.glob("root/.*/pip")] == []

    places = {name: tmp_path / name for name in ("work", "cache")}
    for place in places.values():
        place.mkdir()
        os.chown(place, UID, UID)
    shutil.copy(ROOT / "examples" / "digits" / "3.png", places["work"])
    volumes = [f"--volume={place}:/{name}" for name, place in places.items()]

    def run(*words):
        return buildah("run", *volumes, container, "--", *words)

    def run_json(*words):
        return json.loads(run(*image["Entrypoint"], *words, "--json").splitlines()[-1])

    assert run(*image["Entrypoint"], "--version") == f"convolve {convolve.__version__}"
    machine = run_json("doctor")
    assert machine["extras"]["export"] and machine["extras"]["serve"] and machine["native"]["layers"] == "compiled"
    assert [*places["cache"].glob("convolve/native/*.so")]
    run_json("train", "--config", "lenet-digits", "--epochs", "1", "--run-dir", "runs/digits")
    assert {path.stat().st_uid for path in places["work"].glob("runs/digits/*")} == {UID}
    assert run_json("export", "runs/digits", "--format", "onnx")["executed"]
    (predicted,) = run_json("predict", "runs/digits", "3.png")["predictions"]
    (served,) = json.loads(run("python", "-c", SERVE, "runs/digits", "3.png", *image["Entrypoint"]))["predictions"]
    assert served["probabilities"] == pytest.approx(predicted["probabilities"], abs=1e-5)
