"""Flip single bits during training: which of them `--verify-steps` finds, and what the others do. Also its cost.

    python benchmarks/bit_flips.py           2,000 flips, a fourth each in weights, moments, gradients and activations
    python benchmarks/bit_flips.py --cost    CPU time with and without verification, alternating step by step: median
                                             of the ratios of rounds of 100 steps

A flip hits a random bit of a random element at a random moment: weights and moments between two updates, a gradient
after its backward pass, an activation between two layers. Each trial starts from the same state after 40 steps of LeNet
on digits, trains 10 more and is compared with the undisturbed run. A flip that is not found is harmless if the weights
have the same bits, small if the loss on the test images changes by less than 0.01, visible if more, and fatal if it is
not finite. The seed makes everything reproducible; each trial has other micro batches that are computed again.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from convolve.config.loading import resolve
from convolve.data.loader.loader import StepBatch
from convolve.distributed.collectives import SingleProcess
from convolve.engine.build import build, build_numerics, open_data, run_span
from convolve.engine.callbacks import evaluate_state
from convolve.engine.loop import fit
from convolve.engine.step import train_step
from convolve.engine.verification import RECOMPUTED_EVERY, StepVerification, is_chosen
from convolve.errors import CorruptionError
from convolve.loggers.base import SilentConsole
from convolve.rng import generator

KINDS = ("weights", "moments", "gradients", "activations")
OUTCOMES = ("found", "harmless", "small", "visible", "fatal", "recomputed")
WARM_UP, TRIAL, SMALL = 40, 10, 0.01


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit in the memory of a float32 tensor, unseen by autograd."""
    words = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.int32).numpy().view("uint32")
    words[element] ^= 1 << bit


class Lab:
    """A run that can be set back to one state, and disturbed."""

    def __init__(self, folder: Path, *, verify: bool, **options: object) -> None:
        given = {"batch_size": 32, "threads": 1, "verify_steps": verify, **options}
        self.config = resolve("lenet-digits", None, {**given, "optimizer": "adam", **options, "run_dir": folder}).config
        self.data = open_data(self.config, SilentConsole())
        numerics = build_numerics(self.config, self.data.device, run_span(self.config, self.data), folder=folder)
        self.state, self.parts = build(
            config=self.config, data=self.data, collectives=SingleProcess(), numerics=numerics
        )
        self.train(self._batches(WARM_UP))
        self.batches = self._batches(TRIAL)
        self._snapshot = self.state.snapshot({})
        for tensors in self._snapshot.tensors.values():
            tensors.update({name: tensor.clone() for name, tensor in tensors.items()})

    def _batches(self, count: int) -> list[StepBatch]:
        size, loader = self.config.optim.batch_size, self.data.train_loader()
        return list(islice(loader.step_batches(0, self.state.samples, size, self.config.global_batch_size), count))

    def train(self, batches: list[StepBatch]) -> None:
        fit(self.state, batches, self.parts, [], total=1 << 60)

    def reset(self) -> None:
        """Return to the state after the warm-up."""
        self.state.restore(self._snapshot)

    def loss(self) -> float:
        """Return the loss on the test images."""
        loss = evaluate_state(self.state, self.parts, self.data.test_loader(), self.config).loss
        self.state.model.train()
        return loss

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.state.model.state_dict().items()}

    def choose(self, seed: int) -> None:
        """Set the seed by which verification chooses micro batches."""
        assert isinstance(self.parts.verification, StepVerification), "this lab verifies"
        self.parts.verification.seed = seed

    def disturb(self, kind: str, moment: int, draw: np.random.Generator) -> None:
        """Train with one flip in a step; raise CorruptionError if it is found."""
        done: list[bool] = []

        def hit(tensor: Tensor | None) -> None:
            if tensor is not None and not done and self.state.step == WARM_UP + moment:
                done.append(True)
                flip(tensor, int(draw.integers(tensor.numel())), int(draw.integers(32)))

        removed = self._install(kind, hit, draw)
        try:
            self.train(self.batches)
        finally:
            for handle in removed:
                handle.remove()
        assert done, "the flip has happened"

    def _install(
        self, kind: str, hit: Callable[[Tensor | None], None], draw: np.random.Generator
    ) -> list[RemovableHandle]:
        model, optimizer = self.state.model, self.state.optimizer
        parameters = list(model.parameters())
        sizes = torch.tensor([parameter.numel() for parameter in parameters], dtype=torch.float64)
        chosen = parameters[int(draw.choice(len(parameters), p=(sizes / sizes.sum()).numpy()))]
        layers = [module for module in model.modules() if not list(module.children())]
        layer = layers[int(draw.integers(len(layers)))]
        if kind == "gradients":
            return [chosen.register_post_accumulate_grad_hook(lambda parameter: hit(parameter.grad))]  # type: ignore[no-untyped-call]
        if kind == "activations":
            return [layer.register_forward_hook(lambda module, args, output: hit(output))]
        slot = ("exp_avg", "exp_avg_sq")[int(draw.integers(2))]
        # In the middle of a forward pass of the step, so between two updates.
        return [
            layer.register_forward_pre_hook(
                lambda module, args: hit(chosen if kind == "weights" else optimizer.state[chosen][slot])
            )
        ]


def run_trials(count: int, seed: int) -> dict[str, Counter[str]]:
    """Return the number of each outcome for each kind, and how many flips hit a micro batch that was computed again."""
    outcomes = {kind: Counter[str]() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder), verify=True)
        lab.train(lab.batches)
        weights, loss = lab.weights(), lab.loss()
        for trial in range(count):
            kind = KINDS[trial % len(KINDS)]
            draw = generator(seed, "flip", trial)
            moment = int(draw.integers(TRIAL))
            lab.reset()
            lab.choose(trial)
            outcomes[kind]["recomputed"] += is_chosen(trial, WARM_UP + moment, 0)
            try:
                lab.disturb(kind, moment, draw)
                outcomes[kind][_damage(lab, weights, loss)] += 1
            except CorruptionError:
                outcomes[kind]["found"] += 1
                lab.state.model.zero_grad(set_to_none=True)
                for norm in lab.state.model.modules():
                    getattr(norm, "_parts", {}).clear()
            if trial % 100 == 99:
                print(f"{trial + 1} of {count}", flush=True)
    return outcomes


def _damage(lab: Lab, weights: dict[str, Tensor], loss: float) -> str:
    if all(torch.equal(tensor, weights[name]) for name, tensor in lab.weights().items()):
        return "harmless"
    now = lab.loss()
    if not math.isfinite(now):
        return "fatal"
    return "small" if abs(now - loss) < SMALL else "visible"


def measure_cost(rounds: int, **options: object) -> list[float]:
    """Return the ratio of CPU times with and without verification in each round; both alternate step by step."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        labs = [Lab(Path(folder), verify=verify, **options) for verify in (False, True)]
        for lab in labs:
            lab.parts.verification.record(lab.state)
        for _ in range(rounds):
            seconds = [0.0, 0.0]
            for number in range(RECOMPUTED_EVERY):
                for which in (0, 1) if number % 2 else (1, 0):
                    lab = labs[which]
                    start = time.process_time()
                    train_step(lab.state, lab.batches[number % TRIAL], lab.parts)
                    seconds[which] += time.process_time() - start
            ratios.append(seconds[1] / seconds[0])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="measure the CPU time instead")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of 100 steps whose cost is measured")
    parser.add_argument("--model", default="lenet-bn", help="model whose cost is measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cost:
        ratios = measure_cost(options.rounds, model=options.model)
        print(
            f"{options.model}: CPU time with --verify-steps / without: {statistics.median(ratios):.4f}, median of "
            f"{options.rounds} rounds of {RECOMPUTED_EVERY} steps, {min(ratios):.4f} to {max(ratios):.4f}"
        )
        return
    outcomes = run_trials(options.flips, options.seed)
    print(f"{'kind':12}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
    for kind, counts in outcomes.items():
        print(f"{kind:12}" + "".join(f"{counts[outcome]:12}" for outcome in OUTCOMES))
    print(json.dumps({kind: dict(counts) for kind, counts in outcomes.items()}))
    missed = [kind for kind in ("weights", "moments") if set(outcomes[kind]) - {"found", "recomputed"}]
    if missed:
        raise SystemExit(f"not all flips were found: {', '.join(missed)}")


if __name__ == "__main__":
    main()
