import asyncio
import re

import pytest

from convolve.checkpoint.store import choose_checkpoint
from convolve.errors import ConfigError
from convolve.inference.classifier import LoadOptions

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
pytest.importorskip("uvicorn", reason="the extra 'serve' is not installed")

from convolve.serving.app import ServedModel, Server, Settings
from convolve.serving.server import ServeOptions, check, make_reload, parse_models


def test_a_reload_loads_a_checkpoint_once(digits_run):
    reload = make_reload(digits_run, LoadOptions(threads=1))
    assert reload().version == choose_checkpoint(digits_run).name
    assert reload() is None


def test_an_unexpected_exception_does_not_end_the_watcher(digits_run):
    """One error of another kind, then a checkpoint: it is loaded, and the error was reported once."""
    first, second = (make_reload(digits_run, LoadOptions(threads=1))() for _ in range(2))
    lines = []
    answers = [RecursionError(), RecursionError(), second]

    def reload():
        answer = answers.pop(0) if answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run():
        settings = Settings(reload_seconds=0.0)
        server = Server({"digits": ServedModel(first, reload)}, settings, lines.append)
        async with server.application().router.lifespan_context(None):
            while server._batchers["digits"].classifier is not second:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [line for line in lines if "RecursionError" in line] == [
        f"digits: reload failed (RecursionError); still serving {first.version}"
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"token": "short"}, "at least 8 characters"),
        ({"port": 70000}, "must be 0 to 65535"),
        ({"queue": 0}, "--queue 0: must be greater than 0"),
        ({"max_delay_ms": -1}, "must be 0 or more"),
        ({"host": "0.0.0.0"}, "reachable from other machines; add --token"),
    ],
)
def test_impossible_options_are_reported_in_one_line(options, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check(ServeOptions(**options))


def test_models_are_named_by_argument_or_run_folder():
    assert list(parse_models(["a=x", "runs/b-1", "runs/c/checkpoints/step-000000001"])) == ["a", "b-1", "c"]
    for arguments in (["a=x", "a=y"], ["a b=x"]):
        with pytest.raises(ConfigError, match="model name"):
            parse_models(arguments)
