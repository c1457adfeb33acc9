"""Typical mistakes of someone who trains on photos, with the line that each one prints (`photo_mistakes.txt`).

Write the file again with `PYTHONPATH=tests python tests/contract/test_photo_mistakes.py`, and read the difference.
"""

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

import pytest

from convolve.cli.main import main
from drawn_photos import draw_photo

SNAPSHOT = Path(__file__).with_name("photo_mistakes.txt")
QUICK = "--weights none --model resnet8-cifar --image-size 32 --threads 1 --no-curves --no-report"
MISTAKES = [
    "train nowhere",
    "train photo.jpg",
    "train empty",
    "train texts",
    "train flat",
    "train one-class",
    "train photos --data-dir photos",
    "train photos --dataset mnist",
    "train photos --config lenet-minst",
    "train photos --weights imagnet",
    "train photos --weights nothing.safetensors",
    "train photos --weights photo.jpg",
    "train photos --model efficientnet-lite9",
    "train photos --model resnet51",
    "train photos --epochs ten",
    "train photos --epochs -1",
    "train photos --batchsize 16",
    "train photos --batch-size 0",
    "train photos --learning_rate 0",
    "train photos --lr 0",
    "train photos --image-size 0",
    "train photos --imgsz big",
    "train photos --optimizer adamm",
    "train photos --device cuda",
    "train photos --device gpu",
    "train photos --minutes 0",
    "train photos --patience 0",
    "train photos --augment strong",
    "train photos --validation-fraction 2",
    "train photos --folds 1",
    "train photos --bad-samples ignore",
    "train photos --resume",
    "train photos --run-dir photos",
    "train photos photos",
    "data clean nowhere",
    "data clean photos --move photos/found",
    "predict runs/nothing photo.jpg",
    "predict photos photo.jpg",
    "predict run nothing.jpg",
    "predict run texts/notes.txt",
    "predict run empty",
    "predict run photo.jpg --abstain 80",
    "validate run --data-dir nowhere",
    "validate run --data-dir flat",
    "validate photos",
    "restore photos",
    "export run --format onxx",
    "export photos",
    "report photos",
    "serve nowhere",
    "serve photos",
]


def prepare(folder: Path) -> None:
    """Write folders of photos with one defect each, and a run."""
    for name in ("photos/cats", "photos/dogs", "flat", "one-class/cats"):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            draw_photo(len(name), number).save(folder / name / f"{number}.jpg")
    draw_photo(0, 0).save(folder / "photo.jpg")
    for name in ("empty", "texts", "broken/cats", "broken/dogs"):
        (folder / name).mkdir(parents=True)
    (folder / "texts" / "notes.txt").write_text("hello")
    for name in ("cats", "dogs"):
        for number in range(12):
            (folder / "broken" / name / f"{number}.jpg").write_bytes(b"no image")


def run_command(words: str) -> str:
    """Run one command and return what it prints to stderr, with its exit code."""
    lines = io.StringIO()
    with contextlib.redirect_stderr(lines), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(words.split())
        except SystemExit as ended:
            code = ended.code
    return f"{code}: {lines.getvalue().strip()}".strip()


def snapshot(folder: Path) -> dict[str, str]:
    """Return the message of every mistake."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepare(folder)
        done = run_command(f"train photos {QUICK} --epochs 1 --run-dir run")
        assert done.startswith("0:"), done
        found = {}
        for words in MISTAKES:
            found[words] = run_command(words).replace(str(folder), "FOLDER")
            left = sorted(path.name for path in folder.glob("runs/*"))
            assert not left, f"{words}: a failed start left {left}; {found[words]}"
        return found
    finally:
        os.chdir(before)


def format_snapshot(found: dict[str, str]) -> str:
    return "".join(f"$ convolve {words}\n{message}\n\n" for words, message in found.items())


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return snapshot(tmp_path_factory.mktemp("mistakes"))


def test_every_mistake_prints_its_line(messages: dict[str, str]) -> None:
    assert format_snapshot(messages) == SNAPSHOT.read_text(encoding="utf-8")


def test_every_message_is_one_line_for_people(messages: dict[str, str]) -> None:
    assert len(messages) >= 40
    for words, message in messages.items():
        assert not message.startswith("0:"), words
        assert "MNIST" not in message and "Traceback" not in message and "internal error" not in message, message
        assert len(message.splitlines()) <= 2, message


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        SNAPSHOT.write_text(format_snapshot(snapshot(Path(scratch).resolve())), encoding="utf-8")
    sys.exit(0)
