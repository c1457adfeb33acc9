"""Plans: every shipped config has one, and its numbers are consistent."""

import json
from dataclasses import replace

import pytest

from convolve.cli.main import dispatch, main
from convolve.cli.plan import read_bytes
from convolve.config.loading import resolve, shipped
from convolve.errors import ConfigError
from convolve.models import registry
from convolve.models.network import freeze_before
from convolve.models.timing import time_blocks
from convolve.planning import plan
from convolve.planning.plan import Hardware

FAST = Hardware(device_flops=50e12)
SPLIT = {"shards": 4, "gradient_accumulation_count": 16, "batch_size": 8}


def make(name=None, hardware=FAST, **given):
    """Return the plan of a config, by default of a ResNet-50 without recomputation on 64 GB."""
    if name is None:
        given = {"enable_recomputation": False, **given}
        hardware = hardware if hardware.device_memory else replace(hardware, device_memory=64 * 10**9)
    return plan.plan(resolve(name or "resnet50-imagenet", None, given).config, hardware)[0]


@pytest.mark.parametrize("name", list(shipped()))
def test_every_shipped_config_has_a_plan(name):
    found = make(name)
    config = resolve(name).config
    assert found.devices == config.parallel.replicas * config.parallel.shards
    assert len(found.stages) == config.parallel.shards
    assert found.length.steps >= found.length.steps_per_epoch > 0 or config.optim.iterations
    assert found.speed.images_per_second > 0
    assert found.room.fits == (not found.room.advice)


def test_thousands_of_devices_are_planned_without_having_one():
    found = make(hardware=Hardware(hosts=512, device_flops=50e12), replicas=1024, **SPLIT)
    assert (found.devices, found.global_batch_size) == (4096, 1024 * 16 * 8)
    assert found.traffic.sent_bytes == round(2 * 1023 / 1024 * found.traffic.summed_bytes)


def test_stages_sum_to_the_whole_model():
    whole, split = make(), make(**SPLIT)
    assert sum(stage.parameters for stage in split.stages) == whole.stages[0].parameters == 25_557_032
    assert sum(stage.multiply_adds for stage in split.stages) == whole.stages[0].multiply_adds
    assert sum(stage.blocks for stage in split.stages) == whole.stages[0].blocks


def test_the_schedule_determines_the_micro_batches_in_flight():
    held = {
        name: [stage.held_micro_batches for stage in make(pipeline_schedule=name, **SPLIT).stages]
        for name in ("grouped", "interleaved", "sequential")
    }
    assert held == {"grouped": [7, 5, 3, 1], "interleaved": [4, 3, 2, 1], "sequential": [1] * 4}


def test_with_too_few_micro_batches_all_forward_passes_come_first():
    assert make(shards=4, gradient_accumulation_count=2).passes.schedule == "gpipe"


def test_recomputation_saves_memory_and_costs_a_forward_pass():
    plain, again = make(batch_size=32), make(batch_size=32, enable_recomputation=True)
    assert again.stages[0].memory.activations < plain.stages[0].memory.activations / 1.5
    extra = again.stages[0].backward_ms - plain.stages[0].backward_ms
    assert extra == pytest.approx(plain.stages[0].forward_ms)


def test_a_plan_accepts_the_split_names_that_training_accepts(capsys):
    """Names of other systems included, in any order."""
    words = ["plan", "resnet50-imagenet", "--device-flops", "5e13", "--shards", "2", "--pipeline-splits", "b2/0"]
    assert dispatch([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passes"]["splits"] == ["layer2/0"]
    found = make(pipeline_splits=("fc1", "b2/0", "layer3/0"), **SPLIT)
    assert found.passes.splits == ("layer2/0", "layer3/0", "fc")


def test_a_plan_rejects_a_wrong_number_of_splits_as_training_does():
    with pytest.raises(ConfigError, match="--pipeline-splits layer2/0: --shards 4 needs 3 splits"):
        make(pipeline_splits=("layer2/0",), **SPLIT)


def test_named_splits_are_used_and_unknown_ones_rejected():
    names = ("layer2/0", "layer3/0", "layer4/0")
    assert make(pipeline_splits=names, **SPLIT).passes.splits == names
    with pytest.raises(ConfigError, match="layer9/0.*did you mean layer"):
        make(pipeline_splits=("layer2/0", "layer3/0", "layer9/0"), **SPLIT)


def test_the_automatic_split_is_no_slower_than_one_by_hand():
    by_hand = make(pipeline_splits=("layer2/0", "layer3/0", "layer4/0"), **SPLIT)
    automatic = make(**SPLIT)
    slowest = [max(stage.forward_ms + stage.backward_ms for stage in one.stages) for one in (by_hand, automatic)]
    assert slowest[1] <= slowest[0]


def test_splits_follow_memory_if_the_fastest_one_does_not_fit():
    """The stage that holds most micro batches must be short, although that makes another one slower."""
    free = make(hardware=Hardware(device_flops=50e12, device_memory=10**12), **SPLIT)
    needed = max(stage.memory_bytes for stage in free.stages)
    tight = make(hardware=Hardware(device_flops=50e12, device_memory=int(needed * 0.8)), **SPLIT)
    assert tight.room.fits
    assert tight.passes.splits != free.passes.splits


def test_a_device_model_brings_its_memory():
    found = make("resnet50-imagenet", device_model="ipu-mk1")
    assert (found.room.device_bytes, found.room.source) == (300 * 10**6, "ipu-mk1")


def test_a_config_is_planned_for_the_device_that_it_was_published_for():
    for name, memory in (("mk1_resnet50_16ipus", 300 * 10**6), ("resnet50_mk2", 900 * 10**6)):
        room = make(name).room
        assert (room.device_bytes, room.source.partition(", ")[2]) == (memory, "for which the config was published")


def test_a_run_that_does_not_fit_has_suggestions_that_do():
    hardware = Hardware(device_flops=50e12, device_memory=8 * 10**9)
    found = make(hardware=hardware, batch_size=128, precision="32.32", replicas=4)
    assert not found.room.fits
    assert any(line.startswith("--enable-recomputation") for line in found.room.advice)
    smaller = next(line for line in found.room.advice if line.startswith("--batch-size"))
    size = int(smaller.split()[1].rstrip(":"))
    assert size == found.room.largest_batch_size
    assert make(hardware=hardware, batch_size=size, precision="32.32").room.fits
    assert not make(hardware=hardware, batch_size=size + 1, precision="32.32").room.fits


def test_every_piece_of_advice_is_true():
    hardware = Hardware(device_flops=50e12, device_memory=10**9)
    base = {
        "batch_size": 64,
        "precision": "32.32",
        "replicas": 2,
        **{k: v for k, v in SPLIT.items() if k != "batch_size"},
    }
    found = make(hardware=hardware, pipeline_schedule="grouped", **base)
    for line in found.room.advice:
        words = line.partition(":")[0].split()
        changed = {**base, "pipeline_schedule": "grouped", **read_flags(words)}
        assert make(hardware=hardware, **changed).room.fits, line


def read_flags(words):
    """Flags as given values; several values become a tuple, none hardware on."""
    given = {}
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            given[name] = []
        else:
            given[name].append(word)
    lists = ("pipeline_splits",)
    return {name: (values if name in lists else values[0]) if values else True for name, values in given.items()}


def test_nothing_fits_in_a_thousand_bytes():
    lines = list(make(hardware=Hardware(device_flops=50e12, device_memory=1000)).room.advice)
    assert lines == ["no change that was tried is enough; use devices with more memory"]


def test_more_processes_than_cores_share_the_cores():
    assert Hardware(cores=2).share_cores(1) == (2, 1.0)
    assert Hardware(cores=2).share_cores(2) == (1, 1.0)
    assert Hardware(cores=2).share_cores(4) == (1, 2.0)
    assert Hardware(cores=2, hosts=2).share_cores(4) == (1, 1.0)


def test_a_slower_link_makes_a_slower_step():
    quick, slow = (
        make(hardware=Hardware(device_flops=50e12, hosts=2, bandwidth=rate), replicas=2).speed for rate in (1e12, 1e8)
    )
    assert slow.exposed_ms > quick.exposed_ms and slow.step_ms > quick.step_ms


def test_steps_count_the_short_ones_at_the_end_of_epochs():
    found = make("lenet-digits", epochs=2.5, batch_size=64)
    assert (found.length.samples_per_epoch, found.length.steps_per_epoch) == (1500, 24)
    assert found.length.steps == 24 + 24 + 12


def test_measured_blocks_are_as_long_as_their_pass():
    network = registry.build("resnet8-cifar", classes=10, input_shape=(3, 32, 32), seed=0,
                             options=resolve("resnet8-cifar10-test").config.model)  # fmt: skip
    timing = time_blocks(network, samples=8, seconds=0.2)
    assert len(timing.blocks) == len(network.blocks)
    assert all(block.forward > 0 and block.backward >= 0 for block in timing.blocks)
    assert sum(block.backward for block in timing.blocks) > 0


def test_frozen_blocks_have_no_backward_pass():
    options = {"freeze_until": "layer3", "shards": 3, "batch_size": 4, "gradient_accumulation_count": 4}
    found = make("resnet20-cifar10", **options)
    assert found.stages[0].memory.gradients == 0 < found.stages[-1].memory.gradients
    assert found.stages[0].backward_ms == 0 < found.stages[-1].backward_ms


def test_frozen_blocks_are_measured_without_a_backward_pass():
    network = registry.build("resnet8-cifar", classes=10, input_shape=(3, 32, 32), seed=0,
                             options=resolve("resnet8-cifar10-test").config.model)  # fmt: skip
    freeze_before(network, "layer3")
    times = dict(zip(network.blocks, time_blocks(network, samples=2, seconds=0.01).blocks, strict=True))
    trained = list(network.blocks)[list(network.blocks).index("layer3/0") :]
    assert sum(times[name].backward for name in trained) > 0
    assert all(time.backward == 0 for name, time in times.items() if name not in trained)


@pytest.mark.parametrize(
    ("text", "size"), [("900MB", 900 * 10**6), ("32GiB", 32 * 2**30), ("1.5 GB", 15 * 10**8), ("7", 7)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert read_bytes(text) == size


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memory", "much"], "--device-memory much: must be a size such as 900MB"),
        (["--hosts", "0"], "--hosts 0: must be greater than 0"),
        (["--device-flops", "-1"], "--device-flops -1: must be greater than 0"),
        (["--timetable", "nowhere/x.svg", "--device-flops", "1e12"], "nowhere/x.svg: cannot write"),
    ],
)
def test_a_user_error_is_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["plan", "lenet-digits", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_text_a_drawing_and_json(capsys, tmp_path):
    drawing = tmp_path / "t.svg"
    words = ["plan", "resnet50-imagenet", "--device-flops", "5e13", "--shards", "4", "--replicas", "2"]
    words += ["--gradient-accumulation-count", "8", "--batch-size", "4"]
    assert dispatch([*words, "--timetable", str(drawing)]) == 0
    text = capsys.readouterr().out
    for part in (
        "8 devices",
        "memory:",
        "pipeline: interleaved, bubble",
        "all-reduce:",
        "predicted:",
        "learning rate:",
    ):
        assert part in text
    assert drawing.read_text().count("<title>") == 2 * 4 * 8
    assert dispatch([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        result["devices"] == 8
        and len(result["stages"]) == 4
        and result["passes"]["bubble_ideal"] == pytest.approx(3 / 11)
    )


def test_a_run_that_fits_has_no_suggestions():
    assert make("lenet-digits").room.advice == ()
