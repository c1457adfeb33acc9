"""Drafts of exports: written in a private folder beside the target, and moved there when they are complete."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convolve.errors import ConvolveError
from convolve.files import atomic_file, publish
from convolve.inference.formats import ExportFormat


@contextmanager
def draft_of(form: ExportFormat, target: Path) -> Iterator[Path]:
    """Yield the path of a draft to write; it replaces `target`, with the files beside it, if the block succeeds."""
    if form.is_folder:
        with _folder_draft(target) as draft:
            yield draft
        return
    with atomic_file(target) as draft:
        yield draft
        for path in sorted(draft.parent.iterdir()):
            # Before the export itself, which names their contents.
            if path != draft:
                publish(path, target.with_name(path.name))


@contextmanager
def _folder_draft(target: Path) -> Iterator[Path]:
    """Yield the path of a folder to write. An interrupted swap leaves the old folder, the new one, or none."""
    if target.is_symlink() or target.exists() and not target.is_dir():
        raise ConvolveError(f"{target}: exists and is not a folder; choose another --output")
    with tempfile.TemporaryDirectory(prefix=f".tmp-{target.name}-", dir=target.parent) as temporary:
        draft = Path(temporary) / target.name
        yield draft
        if target.exists():
            target.rename(Path(temporary) / "before")
        draft.rename(target)


def count_bytes(form: ExportFormat, target: Path) -> int:
    """Return the size of all files of an export."""
    files = target.rglob("*") if form.is_folder else (target, *map(target.with_suffix, form.companions))
    return sum(path.stat().st_size for path in files if path.is_file())
