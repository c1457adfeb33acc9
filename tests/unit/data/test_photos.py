"""Images in every format: the same samples, the same bytes, and what happens to broken ones."""

import hashlib
import importlib.util
import io
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convolve.config.schema import DataConfig
from convolve.data.build import build_augment, fit_normalization, open_test_loader, open_train_loader
from convolve.data.check import check_data
from convolve.data.dataset import Dataset
from convolve.data.image_io import center_box
from convolve.data.loader.decoding import EncodedImages
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.loader.loader import ReplicaShard
from convolve.data.lookup import open_dataset
from convolve.data.prepare import PrepareOptions, prepare
from convolve.data.readers import index as index_room
from convolve.data.readers.detect import load_into_memory, open_images
from convolve.data.readers.index import Index
from convolve.data.transforms.augment import NUMBERS, draw_box, draw_box_on
from convolve.download import ignore_progress
from convolve.errors import ConfigError, DataError

CPU = torch.device("cpu")
FIXTURES = Path(__file__).parents[2] / "fixtures"
_SPEC = importlib.util.spec_from_file_location("make_foreign", FIXTURES / "make_foreign.py")
foreign = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(foreign)


def write_folder(root: Path, names=("train", "validation")) -> Path:
    """The images of the fixtures as class folders; file names keep the order of the other formats within a class."""
    for split, name in zip(("train", "validation"), names, strict=True):
        for number, (data, label, _) in enumerate(foreign.samples(split)):
            folder = root / name / f"class-{label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{split}{number:04d}.jpg").write_bytes(data)
    return root


def write_records(root: Path) -> Path:
    root.mkdir()
    for path in (FIXTURES / "foreign").iterdir():
        if path.is_file():
            shutil.copy(path, root)
    return root


def write_tars(root: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "foreign" / "tars", root))


def write_tfds(root: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "foreign" / "tfds", root))


WRITERS = {"tfrecord": write_records, "tar": write_tars, "tfds": write_tfds}


def opened(root: Path) -> Dataset:
    found = open_images(root, str(root), ignore_progress)
    assert found is not None
    return found


def digest(dataset: Dataset, *, workers=2, micro=4, replicas=1, seed=5, steps=4, **given) -> str:
    """A hash of the first batches of training, in the order of the global batch."""
    config = DataConfig(workers=workers, image_size=24, **given)
    loader = open_train_loader(dataset.train, fit_normalization(dataset.train, config), CPU, config)
    parts = [loader.step_batches(seed, 0, micro, 8, ReplicaShard(index, replicas)) for index in range(replicas)]
    found = hashlib.sha256()
    for _ in range(steps):
        batches = sorted((batch for part in parts for batch in next(part).micro_batches), key=lambda batch: batch.first)
        for batch in batches:
            found.update(batch.images.permute(0, 2, 3, 1).contiguous().numpy().tobytes())
        found.update(torch.cat([batch.labels for batch in batches]).numpy().tobytes())
    return found.hexdigest()


def test_a_stage_without_use_for_images_knows_their_number_labels_and_mixed_targets(tmp_path):
    """It does not notice that the images are gone."""
    dataset = opened(write_tars(tmp_path / "tar"))
    config = DataConfig(workers=0, image_size=24, mixup_alpha=0.3, cutmix_lambda=0.8)
    transform = fit_normalization(dataset.train, config)
    loaders = [open_train_loader(dataset.train, transform, CPU, config) for _ in range(2)]
    first, last = (
        loader.step_batches(5, 0, 3, 8, ReplicaShard(needs_images=number == 0)) for number, loader in enumerate(loaders)
    )
    expected = [next(first) for _ in range(3)]
    for file in (tmp_path / "tar").rglob("*.tar"):
        file.unlink()
    for step in expected:
        found = next(last)
        assert (found.leaves, found.used_samples) == (step.leaves, step.used_samples)
        for one, other in zip(step.micro_batches, found.micro_batches, strict=True):
            assert one.images.shape == other.images.shape and one.images.any() and not other.images.any()
            assert torch.equal(one.labels, other.labels) and one.first == other.first
            assert torch.equal(one.targets.labels, other.targets.labels)
            assert torch.equal(one.targets.weights, other.targets.weights)


@pytest.mark.parametrize("kind", WRITERS)
def test_files_of_tensorflow_and_webdataset_are_read_correctly(tmp_path, kind):
    dataset = opened(WRITERS[kind](tmp_path / kind))
    for split, name in ((dataset.train, "train"), (dataset.test, "validation")):
        expected = foreign.samples(name)
        assert isinstance(split, EncodedImages) and len(split) == len(expected)
        for row, (data, label, box) in enumerate(expected):
            assert split.read(row) == data
            assert split.labels[row] == label
            if kind != "tfds":
                assert split.objects(row).tolist() == [pytest.approx(box)]


def test_every_format_gives_the_same_samples_and_the_same_augmented_bytes(tmp_path):
    folder = opened(write_folder(tmp_path / "folder"))
    made = {}
    for kind, options in {
        "tar": PrepareOptions("webdataset", shard_samples=3),
        "raw": PrepareOptions("raw", size=64),
        "again": PrepareOptions("webdataset", shard_samples=4),
    }.items():
        prepare(folder, tmp_path / kind, options, 2, ignore_progress)
        made[kind] = opened(tmp_path / kind)
    assert digest(folder) == digest(made["tar"]) == digest(made["again"])
    assert made["raw"].classes == folder.classes == made["tar"].classes
    assert np.array_equal(made["raw"].train.labels, folder.train.labels)
    assert digest(opened(write_records(tmp_path / "records"))) == digest(opened(write_tars(tmp_path / "tars")))


def test_workers_micro_batches_and_replicas_do_not_change_a_byte(tmp_path):
    dataset = opened(write_tars(tmp_path / "tars"))
    whole = digest(dataset, workers=0, micro=8)
    assert {digest(dataset, workers=workers, micro=8) for workers in (0, 1, 2, 4)} == {whole}
    assert {digest(dataset, micro=2, replicas=replicas) for replicas in (1, 2, 4)} == {whole}
    assert digest(dataset, micro=8, dataset_cache=False) == whole
    assert digest(dataset, micro=8, seed=6) != whole


def test_the_cache_of_decoded_images_changes_nothing_in_later_epochs(tmp_path):
    dataset = opened(write_tars(tmp_path / "tars"))
    budgets = (0, 6e-6, 1.0)
    assert len({digest(dataset, steps=8, cache_memory=budget) for budget in budgets}) == 1


@pytest.mark.parametrize("names", [("train", "val"), ("train", "validation"), ("train", "test")])
def test_split_folders_are_found_by_their_usual_names(tmp_path, names):
    dataset = opened(write_folder(tmp_path, names))
    held_out = 0 if dataset.validation is None else len(dataset.validation)
    assert (len(dataset.train) + held_out, len(dataset.test)) == (10, 5)
    assert bool(held_out) == (names[1] == "test"), "a part of train selects only if nothing else does"
    assert dataset.test_name == ("test" if names[1] == "test" else "validation")
    assert dataset.classes == ("class-0", "class-1", "class-2")
    if not held_out:
        assert dataset.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_class_folders_without_a_split_are_divided_once_and_for_all(tmp_path):
    root = tmp_path / "photos"
    chance = np.random.default_rng(0)
    for number in range(300):
        folder = root / f"kind{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 256, (70, 70, 3), np.uint8)).save(folder / f"{number}.png")

    def test_names():
        return {Path(opened(root).test.name(row)).name for row in range(len(opened(root).test))}

    before = test_names()
    assert 15 <= len(before) <= 50
    Image.fromarray(chance.integers(0, 256, (70, 70, 3), np.uint8)).save(root / "kind0" / "new.png")
    assert test_names() - {"new.png"} == before


def test_small_images_of_one_size_live_in_memory(tmp_path):
    for label in range(2):
        for split in ("train", "val"):
            (tmp_path / split / f"c{label}").mkdir(parents=True)
            for number in range(3):
                pixels = np.full((32, 32, 3), 10 * number + label, np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / f"c{label}" / f"{number}.png")
    dataset = open_dataset(DataConfig(data_dir=tmp_path), announce=print, progress=ignore_progress)
    assert isinstance(dataset.train, InMemoryImages) and dataset.train.images.shape == (6, 32, 32, 3)
    assert dataset.train.images[:, 0, 0, 0].tolist() == [0, 10, 20, 1, 11, 21]
    kept = load_into_memory(opened(tmp_path), 10 * 32 * 32 * 3, ignore_progress)
    assert isinstance(kept.train, EncodedImages), "over the budget they stay on disk"


def test_an_index_is_built_once_and_again_when_the_files_change(tmp_path, monkeypatch):
    root = write_tars(tmp_path / "tars")
    opened(root)
    built = []
    make = index_room.make_index
    monkeypatch.setattr("convolve.data.readers.index.make_index", lambda *given: built.append(1) or make(*given))
    opened(root)
    assert not built
    os.utime(root / "train-000001.tar", (1, 1))
    assert len(opened(root).train) == 10 and len(built) == 1


def test_a_damaged_index_is_made_anew(tmp_path):
    root = write_tars(tmp_path / "tars")
    opened(root)
    for path in (Path(os.environ["CONVOLVE_CACHE"]) / "indexes").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data[: len(data) - 7])
    assert len(opened(root).train) == 10


class CountingIndex(Index):
    """An index that records the rows that are read."""

    def read(self, row):
        self.__dict__.setdefault("rows", []).append(row)
        return super().read(row)

    def read_jpegs(self, rows, memory):
        return {}


def test_any_position_of_a_tar_or_tfrecord_is_reached_without_reading_other_samples(tmp_path):
    for write in (write_tars, write_records):
        index = opened(write(tmp_path / write.__name__)).train
        reader = CountingIndex(**{field.name: getattr(index, field.name) for field in fields(index)})
        config = DataConfig(workers=0, image_size=24, normalization="symmetric")
        loader = open_train_loader(reader, fit_normalization(reader, config), CPU, config)
        far = next(loader.step_batches(0, 1_000_000 * len(reader) + 4, 4, 4))
        assert far.global_samples == 4 and len(reader.rows) == 4


def test_validation_keeps_the_short_last_batch(tmp_path):
    dataset = opened(write_tars(tmp_path / "tars"))
    config = DataConfig(image_size=24)
    loader = open_test_loader(dataset.test, fit_normalization(dataset.train, config), CPU, config)
    assert [len(batch.labels) for batch in loader.batches(2)] == [2, 2, 1]
    halves = [list(loader.batches(2, ReplicaShard(index, 2))) for index in range(2)]
    assert [len(batch.labels) for half in halves for batch in half] == [2, 1, 2]


def spoil(root: Path, name="train0003.jpg") -> Path:
    path = next(root.rglob(name))
    path.write_bytes(path.read_bytes()[:200])
    return path


def read_epoch(dataset, **given):
    config = DataConfig(image_size=24, **given)
    loader = open_train_loader(dataset.train, fit_normalization(dataset.train, config), CPU, config)
    steps = loader.step_batches(0, 0, 4, 4)
    return loader, [next(steps) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_stops_training_with_its_name(tmp_path, workers):
    path = spoil(write_folder(tmp_path))
    with pytest.raises(DataError, match=f"{path.name}: broken image .*--bad-samples skip"):
        read_epoch(opened(tmp_path), workers=workers)


@pytest.mark.parametrize("limit", [0.1, 0.001])
def test_a_broken_image_can_be_skipped_and_is_listed_even_if_it_is_more_than_the_fraction(tmp_path, limit):
    path = spoil(write_folder(tmp_path))
    loader, steps = read_epoch(opened(tmp_path), bad_samples="skip", bad_samples_limit=limit)
    assert [step.global_samples for step in steps] == [4, 4, 2]
    assert sum(step.used_samples for step in steps) == 9
    assert sum(len(batch.labels) for step in steps for batch in step.micro_batches) == 9
    assert len(loader.skipped) == 1 and path.name in loader.skipped[0]
    assert all(torch.isfinite(batch.images).all() for step in steps for batch in step.micro_batches)


def test_more_broken_images_than_allowed_stop_training(tmp_path):
    write_folder(tmp_path)
    for name in ("train0003.jpg", "train0005.jpg"):
        spoil(tmp_path, name)
    with pytest.raises(DataError, match="1 were skipped already, the most that --bad-samples-limit allows"):
        read_epoch(opened(tmp_path), bad_samples="skip", bad_samples_limit=0.1)


def test_a_file_that_vanishes_is_named(tmp_path):
    write_folder(tmp_path)
    dataset = opened(tmp_path)
    next(tmp_path.rglob("train0003.jpg")).unlink()
    with pytest.raises(DataError, match=r"train0003\.jpg: cannot read"):
        read_epoch(dataset)


def save(path: Path, image: Image.Image, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def test_a_check_finds_what_is_wrong_with_images(tmp_path):
    write_folder(tmp_path)
    broken = spoil(tmp_path)
    train = tmp_path / "train" / "class-1"
    gray = Image.fromarray(np.arange(900, dtype=np.uint8).reshape(30, 30))
    misnamed = save(train / "misnamed.jpg", gray, format="PNG")
    tiny = save(train / "tiny.png", gray.resize((8, 8)))
    cmyk = save(train / "cmyk.jpg", gray.convert("CMYK"))
    twin = shutil.copy(tmp_path / "validation" / "class-0" / "validation0000.jpg", train / "twin.jpg")
    report = check_data(str(tmp_path), announce=print, progress=ignore_progress)
    found = {(finding.kind, Path(finding.name).name) for finding in report.findings}
    assert found == {
        ("broken", broken.name),
        ("misnamed", misnamed.name),
        ("tiny", tiny.name),
        ("CMYK", cmyk.name),
        ("duplicate", "validation0000.jpg"),
    }
    assert report.train_samples == 14 and Path(twin).exists()


def test_preparing_is_byte_identical_for_any_number_of_threads_and_after_an_interruption(tmp_path):
    dataset = opened(write_folder(tmp_path / "folder"))

    def hashes(place: Path):
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(place.iterdir())}

    for kind in ("webdataset", "raw"):
        options = PrepareOptions(kind, size=20, shard_samples=3)
        for name, workers in (("one", 1), ("four", 4)):
            prepare(dataset, tmp_path / kind / name, options, workers, ignore_progress)
        assert hashes(tmp_path / kind / "one") == hashes(tmp_path / kind / "four")

        def stop(what, done, total):
            if what == "prepare train" and done >= 3:
                raise KeyboardInterrupt

        broken = tmp_path / kind / "broken"
        with pytest.raises(KeyboardInterrupt):
            prepare(dataset, broken, options, 2, stop)
        assert not (broken / "metadata.json").exists()
        with pytest.raises(ConfigError, match="contains an unfinished conversion"):
            prepare(dataset, broken, PrepareOptions(kind, size=21), 2, ignore_progress)
        prepare(dataset, broken, options, 2, ignore_progress)
        assert hashes(broken) == hashes(tmp_path / kind / "one")


def test_a_check_verifies_the_checksums_of_prepared_files(tmp_path):
    prepare(
        opened(write_folder(tmp_path / "folder")), tmp_path / "raw", PrepareOptions("raw", size=20), 2, ignore_progress
    )
    path = tmp_path / "raw" / "train-images.npy"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    findings = check_data(str(tmp_path / "raw"), announce=print, progress=ignore_progress).findings
    assert [(finding.kind, finding.what) for finding in findings] == [
        ("checksum", "has other contents than were written")
    ]


def test_a_folder_that_is_not_empty_is_not_written_to(tmp_path):
    dataset = opened(write_folder(tmp_path / "folder"))
    with pytest.raises(ConfigError, match="not empty"):
        prepare(dataset, tmp_path, PrepareOptions(), 1, ignore_progress)
    with pytest.raises(ConfigError, match="give --image-size"):
        prepare(dataset, tmp_path / "raw", PrepareOptions("raw"), 1, ignore_progress)


def test_boxes_beside_a_folder_are_used(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "imagenet_2012_bounding_boxes.csv").write_text("train0003.jpg,0.5,0.5,0.75,1\n")
    source = opened(tmp_path).train
    boxes = {source.names[row]: source.objects(row).tolist() for row in range(len(source))}
    assert boxes["train/class-0/train0003.jpg"] == [[0.5, 0.5, 0.75, 1]]
    assert sum(map(len, boxes.values())) == 1


def test_crops_with_boxes_show_a_part_of_the_object():
    numbers = np.random.default_rng(0).random((300, NUMBERS)).tolist()
    box = np.array([[0.8, 0.8, 0.95, 0.95]], np.float32)
    plain = [draw_box(row, (100, 200), (0.05, 1), (0.75, 4 / 3)) for row in numbers]
    aimed = [draw_box_on(row, (100, 200), (0.05, 1), (0.75, 4 / 3), box) for row in numbers]

    def shows(crop):
        top, left, rows, columns = crop
        return left + columns > 160 and top + rows > 80 and left < 190 and top < 95

    assert np.mean([shows(crop) for crop in plain]) < 0.6
    assert np.mean([shows(crop) for crop in aimed]) > 0.9


def test_random_crops_have_the_area_and_proportions_asked_for():
    numbers = np.random.default_rng(0).random((2000, NUMBERS)).tolist()
    boxes = np.array([draw_box(row, (300, 400), (0.08, 1), (0.75, 4 / 3)) for row in numbers])
    assert ((boxes[:, 0] + boxes[:, 2] <= 300) & (boxes[:, 1] + boxes[:, 3] <= 400) & (boxes >= 0).all(1)).all()
    area = boxes[:, 2] * boxes[:, 3] / 120_000
    assert area.min() > 0.075 and area.max() <= 1 and 0.4 < area.mean() < 0.6
    proportion = boxes[:, 3] / boxes[:, 2]
    assert proportion.min() > 0.74 and proportion.max() < 1.36


def test_the_center_equals_resizing_and_cropping():
    assert center_box((256, 341), 224 / 256) == (16, 58, 224, 224)


def test_scaled_decoding_agrees_with_full_decoding(tmp_path):
    smooth = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)).resize((900, 700))
    for split in ("train", "val"):
        save(tmp_path / split / "a" / "one.jpg", smooth, quality=95)
        save(tmp_path / split / "b" / "one.png", smooth)
    dataset = opened(tmp_path)
    config = DataConfig(image_size=64, normalization="unit")
    loader = open_test_loader(dataset.train, fit_normalization(dataset.train, config), CPU, config)
    jpeg, png = next(loader.batches(2)).images * 255
    assert float((jpeg - png).abs().mean()) < 3 and float((jpeg - png).abs().max()) < 16


def test_a_camera_note_turns_the_image_upright(tmp_path):
    wide = Image.fromarray(np.concatenate((np.zeros((80, 60, 3), np.uint8), np.full((80, 60, 3), 255, np.uint8)), 1))
    note = Image.Exif()
    note[0x0112] = 6  # to be turned by a quarter clockwise
    for split in ("train", "val"):
        save(tmp_path / split / "a" / "one.jpg", wide, quality=95, exif=note)
        save(tmp_path / split / "b" / "two.jpg", wide, quality=95)
    dataset = opened(tmp_path)
    config = DataConfig(image_size=80, normalization="unit")
    turned, plain = next(
        open_test_loader(dataset.train, fit_normalization(dataset.train, config), CPU, config).batches(2)
    ).images
    assert turned[0, 5, 40] < 0.1 and turned[0, 75, 40] > 0.9
    assert plain[0, 40, 5] < 0.1 and plain[0, 40, 75] > 0.9


def test_padding_is_not_for_photographs(tmp_path):
    dataset = opened(write_tars(tmp_path / "tars"))
    with pytest.raises(ConfigError, match="use resized-crop-flip for photographs"):
        build_augment(DataConfig(augment="pad-crop-flip"), dataset.train)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("train-000000.tar", lambda data: data[:5000], "cut off|not a readable tar"),
        ("train-000000.tar", lambda data: data[:600] + b"\0\0\0" + data[603:], "|"),
        ("train-000000.tar", lambda data: data.replace(b"0000.cls", b"0000.cla"), "label '' or its bbox"),
    ],
)
def test_a_damaged_tar_is_named(tmp_path, name, change, message):
    path = write_tars(tmp_path / "tars") / name
    path.write_bytes(change(path.read_bytes()))
    try:
        opened(tmp_path / "tars")
    except DataError as error:
        assert name in str(error)
    else:
        assert message == "|"


def test_a_missing_record_file_is_an_error(tmp_path):
    (write_records(tmp_path / "records") / "train-00001-of-00002").unlink()
    with pytest.raises(DataError, match="1 files of train, 2 belong together"):
        opened(tmp_path / "records")


def test_a_flipped_bit_in_a_record_is_found_by_its_crc(tmp_path):
    path = write_records(tmp_path / "records") / "train-00001-of-00002"
    data = bytearray(path.read_bytes())
    data[3000] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train-00001-of-00002: record \d at byte \d+: CRC of its contents is wrong"):
        opened(tmp_path / "records")


def test_a_folder_without_images_lists_what_was_looked_for(tmp_path):
    with pytest.raises(DataError, match="no images in .*looked for a folder for each class; train/ with val/"):
        open_dataset(DataConfig(dataset="pictures", data_dir=tmp_path), announce=print, progress=ignore_progress)


def test_metadata_names_the_classes(tmp_path):
    root = write_tars(tmp_path / "tars")
    (root / "metadata.json").write_text(json.dumps({"classes": ["x", "y", "z"]}))
    assert opened(root).classes == ("x", "y", "z")
    (root / "metadata.json").write_text(json.dumps({"classes": ["x"]}))
    with pytest.raises(DataError, match="label 2: must be 0 to 0"):
        opened(root)


def test_an_index_row_beyond_its_file_is_an_error(tmp_path):
    data = io.BytesIO()
    Image.new("RGB", (20, 20)).save(data, "PNG")
    (tmp_path / "file").write_bytes(data.getvalue())
    index = Index(
        tmp_path,
        ("file",),
        np.array([[0, 10, 5000]]),
        np.array([0]),
        ("one",),
        np.empty((0, 4), np.float32),
        np.zeros(2, np.int64),
    )
    with pytest.raises(DataError, match="sample one: contains .* of 5000 bytes"):
        index.read(0)
