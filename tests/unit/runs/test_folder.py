"""A run gets a folder that no other run has."""

import os
import tempfile
from pathlib import Path

import pytest

from convolve.config import RunConfig
from convolve.errors import ConfigError
from convolve.runs.folder import create_run_dir
from forked_commands import FORKS


def claim_many(parent: Path, suffix: str | None, count: int) -> list[str]:
    config = RunConfig(log_dir=parent, name_suffix=suffix)
    return [create_run_dir(config, "lenet").name for _ in range(count)]


def claim_exact(folder: Path) -> bool:
    try:
        create_run_dir(RunConfig(run_dir=folder), "lenet")
    except ConfigError:
        return False
    return True


def test_runs_are_numbered_from_one_after_the_highest(tmp_path: Path) -> None:
    config = RunConfig(log_dir=tmp_path / "deep" / "runs")
    assert [create_run_dir(config, "lenet5-mnist").name for _ in range(3)] == [
        "lenet5-mnist-1",
        "lenet5-mnist-2",
        "lenet5-mnist-3",
    ]
    (config.log_dir / "lenet5-mnist-1").rmdir()
    (config.log_dir / "lenet5-mnist-41-try").mkdir()
    assert create_run_dir(config, "lenet5-mnist") == config.log_dir / "lenet5-mnist-42"
    assert create_run_dir(config, "other").name == "other-1"


def test_a_suffix_comes_last_and_the_number_is_still_unique(tmp_path: Path) -> None:
    assert claim_many(tmp_path, "warm", 2) == ["lenet-1-warm", "lenet-2-warm"]
    assert claim_many(tmp_path, None, 1) == ["lenet-3"]
    assert sorted(os.listdir(tmp_path)) == ["lenet-1-warm", "lenet-2-warm", "lenet-3"]


def test_processes_that_claim_at_the_same_time_get_different_numbers(tmp_path: Path) -> None:
    with FORKS.Pool(4) as pool:
        jobs = [(tmp_path, suffix, 40) for suffix in (None, "a", "b", None)]
        names = [name for batch in pool.starmap(claim_many, jobs, chunksize=1) for name in batch]
    assert len(set(names)) == len({name.split("-")[1] for name in names}) == 160
    assert sorted(names) == sorted(os.listdir(tmp_path))


def test_an_exact_folder_is_made_or_taken_when_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "a" / "b", tmp_path / "empty"):
        assert create_run_dir(RunConfig(run_dir=folder), "lenet") == folder
        assert folder.is_dir()


def test_one_of_many_processes_gets_an_exact_folder(tmp_path: Path) -> None:
    with FORKS.Pool(4) as pool:
        for number in range(10):
            assert sum(pool.map(claim_exact, [tmp_path / str(number)] * 4, chunksize=1)) == 1


def test_an_exact_folder_that_is_not_empty_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("")
    with pytest.raises(ConfigError, match=r"is not empty; .*`convolve restore .*`, or choose another folder"):
        create_run_dir(RunConfig(run_dir=tmp_path), "lenet")
    assert os.listdir(tmp_path) == ["config.yml"]


@pytest.mark.parametrize("bad", ["a/b", "..", "a\\b", "", "a\nb", "a b"])
def test_a_name_that_is_not_a_folder_name_is_rejected(bad: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name-suffix"):
        create_run_dir(RunConfig(log_dir=tmp_path, name_suffix=bad), "lenet")
    with pytest.raises(ConfigError, match="config name"):
        create_run_dir(RunConfig(log_dir=tmp_path), bad)
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--log-dir .*file/runs: cannot create a run folder"):
        create_run_dir(RunConfig(log_dir=tmp_path / "file" / "runs"), "lenet")
    with pytest.raises(ConfigError, match="--run-dir .*file: cannot create a run folder"):
        create_run_dir(RunConfig(run_dir=tmp_path / "file"), "lenet")


def test_a_folder_without_permission_is_named() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match="Permission denied"):
                create_run_dir(RunConfig(log_dir=Path(place)), "lenet")
        finally:
            if root:
                os.seteuid(0)
            os.chmod(place, 0o755)
