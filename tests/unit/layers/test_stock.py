import pytest
import torch
from torch import nn
from torch.nn import functional

from convolve import rng
from convolve.layers.batch_norm import BatchNorm2d, NormStatistics
from convolve.layers.stock import is_exact, make_exact

IMAGES = torch.rand(16, 6, 5, 5, generator=torch.Generator().manual_seed(0)) + 0.5
DROPOUTS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]


class ActivatedNorm(nn.BatchNorm2d):
    """A subclass with another forward pass, as in timm."""

    def forward(self, x):
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        if self.training:
            self.num_batches_tracked.add_(1)
        return functional.relu(x)


def exact(layer):
    make_exact("features.3", layer)
    return layer.train()


def run(layer, x, first=0, step=0):
    with rng.at(seed=1, step=step, first=first):
        return layer(x)


@pytest.mark.parametrize("kind", DROPOUTS)
def test_a_mask_is_the_same_in_one_pass_and_in_micro_batches(kind):
    layer = exact(kind(0.4))
    whole = run(layer, IMAGES)
    parts = torch.cat([run(layer, IMAGES[:5]), run(layer, IMAGES[5:], first=5)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, IMAGES)
    assert not torch.equal(whole, run(layer, IMAGES, step=1))


@pytest.mark.parametrize("kind", DROPOUTS)
def test_the_distribution_is_that_of_the_stock_layer(kind):
    spatial = {nn.Dropout1d: (4,), nn.Dropout3d: (1, 2, 2)}.get(kind, (2, 2))
    x = torch.ones(400, 50, *spatial)
    keyed, stock = run(exact(kind(0.3)), x), kind(0.3)(x)
    assert torch.equal(keyed.unique(), stock.unique()) or torch.allclose(keyed.unique(), stock.unique(), rtol=1e-6)
    assert keyed.mean().item() == pytest.approx(stock.mean().item(), abs=0.02)
    channels = [out.flatten(2).amin(2).eq(out.flatten(2).amax(2)).all().item() for out in (keyed, stock)]
    assert channels[0] == channels[1]


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout])
def test_the_extreme_rates_are_those_of_torch(kind, p):
    assert torch.equal(run(exact(kind(p)), IMAGES), kind(p)(IMAGES))


def test_a_dropout_that_is_called_twice_has_two_masks_that_repeat_in_the_next_pass():
    layer = exact(nn.Dropout(0.5))
    with rng.at(seed=1, step=0, first=0):
        first, second = layer(IMAGES), layer(IMAGES)
    assert not torch.equal(first, second)
    with rng.at(seed=1, step=0, first=0):
        assert torch.equal(layer(IMAGES), first)
        assert torch.equal(layer(IMAGES), second)


def test_dropout_in_place_changes_its_input_and_evaluation_changes_nothing():
    layer, x = exact(nn.Dropout(0.5, inplace=True)), IMAGES.clone()
    assert run(layer, x) is x
    assert torch.equal(layer.eval()(IMAGES), IMAGES)


def test_outside_of_a_training_pass_the_stock_layer_draws():
    layer = exact(nn.Dropout(0.5))
    torch.manual_seed(0)
    expected = functional.dropout(IMAGES, 0.5)
    torch.manual_seed(0)
    assert torch.equal(layer(IMAGES), expected)


def test_a_subclass_with_a_forward_pass_of_its_own_is_left_alone():
    class Louder(nn.Dropout):
        def forward(self, x):
            return super().forward(x) * 2

    class Renamed(nn.Dropout):
        pass

    louder, renamed = Louder(0.5), Renamed(0.5)
    make_exact("a", louder)
    make_exact("b", renamed)
    assert type(louder) is Louder and not is_exact(louder)
    assert isinstance(renamed, Renamed) and is_exact(renamed)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, ActivatedNorm])
def test_statistics_are_updated_once_per_step_over_all_micro_batches(kind):
    torch.manual_seed(0)
    stock, layer = kind(6), exact(kind(6))
    out = [layer(IMAGES[:4]), layer(IMAGES[4:8])]
    assert torch.equal(layer.running_mean, torch.zeros(6)) and layer.num_batches_tracked == 0
    assert all(torch.equal(part, stock.train()(x)) for part, x in zip(out, (IMAGES[:4], IMAGES[4:8]), strict=True))
    statistics = NormStatistics(layer)
    statistics.update_running_stats(statistics.pending_sums)
    halves = IMAGES[:4].mean((0, 2, 3)), IMAGES[4:8].mean((0, 2, 3))
    variances = IMAGES[:4].var((0, 2, 3)), IMAGES[4:8].var((0, 2, 3))
    assert torch.allclose(layer.running_mean, 0.1 * sum(halves) / 2, rtol=1e-5)
    assert torch.allclose(layer.running_var, 0.9 + 0.1 * sum(variances) / 2, rtol=1e-5)
    assert layer.num_batches_tracked == 2


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, ActivatedNorm])
def test_one_micro_batch_updates_as_torch_does(kind):
    x = IMAGES[:, :, 0, 0] if kind is nn.BatchNorm1d else IMAGES
    stock, layer = kind(6).train(), exact(kind(6))
    assert torch.equal(layer(x), stock(x))
    statistics = NormStatistics(layer)
    statistics.update_running_stats(statistics.pending_sums)
    for name, value in stock.state_dict().items():
        assert torch.allclose(layer.state_dict()[name], value, rtol=1e-6), name
    assert torch.equal(layer.eval()(x), exact(stock).eval()(x)) or torch.allclose(layer(x), stock(x), rtol=1e-6)


def test_a_cumulative_average_counts_every_micro_batch_alike():
    stock, layer = nn.BatchNorm2d(6, momentum=None).train(), exact(nn.BatchNorm2d(6, momentum=None))
    for x in (IMAGES[:4], IMAGES[4:8], IMAGES[8:12]):
        stock(x), layer(x)
        statistics = NormStatistics(layer)
        statistics.update_running_stats(statistics.pending_sums)
    assert torch.allclose(layer.running_mean, stock.running_mean, rtol=1e-5)
    assert torch.allclose(layer.running_var, stock.running_var, rtol=1e-5)


def test_a_norm_that_did_not_run_keeps_its_statistics():
    layer = exact(nn.BatchNorm2d(6))
    statistics = NormStatistics(layer)
    statistics.update_running_stats(statistics.pending_sums)
    assert torch.equal(layer.running_var, torch.ones(6)) and layer.num_batches_tracked == 0
    elsewhere = exact(nn.BatchNorm2d(6))
    elsewhere(IMAGES)
    statistics = NormStatistics(layer)
    statistics.update_running_stats(NormStatistics(elsewhere).pending_sums)
    assert not torch.equal(layer.running_var, torch.ones(6))


def test_plain_norms_become_convolves_and_norms_without_statistics_stay():
    plain, untracked = nn.BatchNorm2d(6), nn.BatchNorm2d(6, track_running_stats=False)
    make_exact("a", plain)
    make_exact("b", untracked)
    assert type(plain) is BatchNorm2d
    assert type(untracked) is nn.BatchNorm2d


def test_norms_without_weights_work():
    layer, stock = exact(nn.BatchNorm2d(6, affine=False)), nn.BatchNorm2d(6, affine=False).train()
    assert torch.equal(layer(IMAGES), stock(IMAGES))
    statistics = NormStatistics(layer)
    statistics.update_running_stats(statistics.pending_sums)
    assert torch.allclose(layer.running_mean, stock.running_mean, rtol=1e-6)
