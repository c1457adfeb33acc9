"""Random options and headers: each is accepted or rejected in one line; none crashes or hangs."""

import json
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from convolve.checkpoint.manifest import encode_manifest
from convolve.checkpoint.pretrained import read_weights
from convolve.checkpoint.store import load
from convolve.cli import train as train_verb
from convolve.cli.command import read_config
from convolve.cli.main import COMMANDS, dispatch
from convolve.compat.options import RENAMED, RejectedOptions
from convolve.compat.refused import REFUSED
from convolve.config import Config
from convolve.config.loading import flag_name, resolve
from convolve.config.schema import SECTION_OF
from convolve.errors import CheckpointError, ConvolveError

SLOWEST_SECONDS = 3.0
FEW_OR_ALL = pytest.mark.parametrize("rounds", [150, pytest.param(5000, marks=pytest.mark.slow)])

OPTIONS = [flag_name(name) for name in SECTION_OF]
WORDS = """0 1 -1 2 10 0.5 1e-3 1e400 -0 nan inf none None true no [] {} ~ 16.16 auto adam lenet5 digits mnist 0x10 1e3
99999999999999999999999 1_000 1/3 a,b,c , = : - -- é 数字 % %s {0} $HOME `id` ; ' &a *a"""
VALUES = WORDS.split()
VALUES += ["", " ", '"', "\\", "\t", "\0", "\u202e", "\x1b[2J", "two\nlines", "../../etc/passwd", "a: b", "- 1\n- 2"]
VALUES += ["x" * 5000, "1" * 400, "[" * 200, "!!python/object/apply:os.system [id]"]


def is_understood(act):
    """Return if a random input is accepted; a rejection is one line for each cause and takes little CPU time."""
    start = time.process_time()
    try:
        act()
        return True
    except ConvolveError as error:
        assert "\n" not in str(error) or isinstance(error, RejectedOptions), str(error)
        assert len(str(error)) < 8000
        return False
    finally:
        assert time.process_time() - start < SLOWEST_SECONDS


# YAML

SEED = (Path(__file__).parents[2] / "fuzz" / "corpus" / "config" / "two").read_text()
PIECES = ["\n", ": ", "- ", "  ", "[", "]", "{", "}", "&a ", "*a", "!!python/name:os.system ", "!!binary x", "<<: "]
PIECES += ["base: mine", "base: 3", "also: 7", "also: {a: b}", "summary: [1]", "? ", "%YAML 9.9\n", "---\n", "\t", "'"]
PIECES += ['"', "|", ">", "#", "@", "`", "\x00", "\x1b", "\u202e", "\ud800", "batch-size: [1, 2]", "model: {}"]


def invent_yaml(draw):
    """The seed with pieces put in, lines doubled or lost, and options with made-up values."""
    text = SEED
    for _ in range(draw.randint(1, 4)):
        lines, place = text.splitlines(keepends=True), draw.randrange(len(text) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            text = text[:place] + draw.choice(PIECES) + text[place:]
        elif kind == 1 and lines:
            line = draw.choice(lines)
            text = text.replace(line, line * draw.choice((0, 2)))
        elif kind == 2:
            text += f"  {draw.choice(OPTIONS)}: {draw.choice(VALUES)}\n"
        else:
            text = text[:place] + text[place + draw.randrange(20) :]
    return text


@FEW_OR_ALL
def test_a_random_config_file_is_a_config_or_a_one_line_error(rounds, tmp_path, counted):
    draw, path, understood = random.Random(rounds), tmp_path / "configs.yml", 0
    for _ in counted.each("YAML fuzzed", range(rounds)):
        path.write_bytes(invent_yaml(draw).encode("utf-8", "surrogatepass"))
        understood += is_understood(lambda: resolve(draw.choice(["mine", "yours"]), path))
    assert 0 < understood < rounds


# Flags


def invent_flags(draw):
    names = [*OPTIONS, *RENAMED, *REFUSED, "config", "config-path", "json", "nonsense", "batch--size", "é"]
    words = []
    for _ in range(draw.randint(1, 5)):
        name, value = draw.choice(names).lstrip("-"), draw.choice(VALUES)
        dashes = draw.choice(["--", "--", "--", "-", "", "--no-"])
        words += draw.choice([[f"{dashes}{name}", value], [f"{dashes}{name}={value}"], [f"{dashes}{name}"], [value]])
    return [word for word in words if word not in ("-h", "--help")]


def parse_training(words):
    config = read_config(train_verb.read_options(words))
    assert isinstance(config, Config)


@FEW_OR_ALL
def test_random_options_are_a_config_or_a_one_line_error(rounds, counted):
    draw, understood = random.Random(rounds), 0
    for _ in counted.each("flags fuzzed", range(rounds)):
        words = invent_flags(draw)
        understood += is_understood(lambda words=words: parse_training(words))
    assert 0 < understood < rounds


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_of_any_command_is_a_one_line_error(command, counted):
    draw = random.Random(command)
    for _ in counted.each("flags fuzzed", range(10)):
        words = [*invent_flags(draw), "--surely-no-such-option"]
        assert not is_understood(lambda words=words: dispatch([command, *words]))


# safetensors

WHOLE = save({"conv.weight": torch.arange(24.0).reshape(2, 3, 4), "conv.bias": torch.ones(2)})
HEADER = json.loads(WHOLE[8 : 8 + struct.unpack("<Q", WHOLE[:8])[0]])
HEADERS = [
    {**HEADER, "conv.bias": {**HEADER["conv.bias"], change: value}}
    for change, value in [
        *(("dtype", kind) for kind in ("F16", "I64", "F8_E4M3", "F4", "X", "", None, 7, "BOOL", "C64", "U64")),
        *(("shape", shape) for shape in ([], [3], [2, 2], [-2], [2**63], [2**40, 2**40], [0], None, "2", [1.5])),
        *(("data_offsets", at) for at in ([0, 8], [8, 0], [96, 2**62], [-8, 0], [97, 105], [], [96], None, [0, 104])),
    ]
]
HEADERS += [{}, [], None, {"__metadata__": {"a": 1}}, {"": HEADER["conv.bias"]}, {**HEADER, "x": HEADER["conv.bias"]}]


def invent_safetensors(draw):
    """Return a header with other content, a wrong length or changed bytes."""
    kind = draw.randrange(3)
    if kind == 0:
        text = json.dumps(draw.choice(HEADERS)).encode()
        return struct.pack("<Q", len(text)) + text + WHOLE[-104:]
    if kind == 1:
        length = draw.choice([0, 1, 7, len(WHOLE), 2**31, 2**63, 2**64 - 1, draw.randrange(400)])
        return struct.pack("<Q", length) + WHOLE[8:]
    data = bytearray(WHOLE)
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(len(WHOLE) - 104)] = draw.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("rounds", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_random_safetensors_header_is_tensors_or_a_one_line_error(rounds, tmp_path, counted):
    """Both ways in: as initial weights, and inside a checkpoint that a stranger sealed."""
    draw, path, folder = random.Random(rounds), tmp_path / "weights.safetensors", tmp_path / "checkpoint"
    folder.mkdir()
    understood = []
    for _ in range(rounds):
        data = invent_safetensors(draw)
        path.write_bytes(data)
        files = {"model.safetensors": data, "state.json": b'{"step": 1}'}
        for name, content in {**files, "manifest.json": encode_manifest(files)}.items():
            (folder / name).write_bytes(content)
        for read in counted.each("safetensors header fuzzed", (lambda: read_weights(path), lambda: load(folder))):
            understood.append(is_understood(read))
    assert understood[::2] == understood[1::2] and 0 < sum(understood) < len(understood)


def test_a_safetensors_header_that_announces_a_huge_size_takes_no_memory(tmp_path):
    path = tmp_path / "weights.safetensors"
    text = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_weights(path)
