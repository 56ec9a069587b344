"""The training loop, on one device or many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ConfigError, ModelError, TrainingStoppedError
from guided_spec.models.attention_kernels import shape_free_kernels
from guided_spec.training.batch import TrainingBatch
from guided_spec.training.checkpoints import CHECKPOINTS, Checkpoints, Progress, check_output
from guided_spec.training.features import Features
from guided_spec.training.metrics import MetricSums, acceptance_lengths
from guided_spec.training.options import TrainOptions
from guided_spec.training.run_log import RunLog
from guided_spec.training.schedule import make_optimizer, rate_factor
from guided_spec.training.stopping import StopRequest
from guided_spec.training.validation import evaluate

__all__ = ["Trainer", "TrainingData", "TrainingResult"]


class TrainingData(NamedTuple):
    """Batches, as ``DataLoader``s whose ``batch_sampler`` is a ``TokenBatches``.

    heldout: None where nothing is kept for validation.
    """

    train: Any
    heldout: Any


class TrainingResult(NamedTuple):
    """progress: how far the run came. metrics: the last that were logged. heldout: at the end."""

    progress: Progress
    metrics: dict[str, float]
    heldout: dict[str, float]


class Trainer:
    """Trains a draft until its epochs or steps are done.

    accelerator: an ``accelerate.Accelerator``. model: a ``DraftAlgorithm`` on its device, with
    parameters in float32; it is changed in place. features: where the target's states come from.
    forward: the keyword arguments of the model's forward, while training and while validating.

    The losses of the processes are averaged, whatever their numbers of tokens. Raises ConfigError
    when there is not a single step to do.
    """

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        features: Features,
        data: TrainingData,
        forward: tuple[Mapping[str, Any], Mapping[str, Any]],
        options: TrainOptions,
    ) -> None:
        self._accelerator, self._features = accelerator, features
        self._data, self._forward, self._options = data, forward, options
        optimizer = make_optimizer(
            model, learning_rate=options.learning_rate, weight_decay=options.weight_decay
        )
        self.model, self._optimizer = accelerator.prepare(model, optimizer)
        self.total_steps = _count_steps(data.train.batch_sampler, options)
        self._progress = Progress()
        self._sums = MetricSums()
        self._losses: list[Tensor] = []
        self._tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        self._metrics: dict[str, float] = {}

    def run(self, output: Path) -> TrainingResult:
        """Train, with checkpoints and logs below the folder ``output``.

        Raises ConfigError as ``check_output`` does, and when there are checkpoints that cannot be
        gone on from, and ModelError, naming the step, when a loss is not a finite number. SIGTERM
        or SIGINT in any process saves behind the step and raises TrainingStoppedError in all.
        """
        check_output(output, resume=self._options.resume)
        checkpoints = self._checkpoints(output / CHECKPOINTS)
        self._progress = checkpoints.load(self._accelerator)
        progress = self._progress
        started = time.perf_counter() - progress.seconds
        self.model.train()
        folder = output / "logs"
        with (
            shape_free_kernels(),
            RunLog(self._accelerator, folder, done=progress.step, total=self.total_steps) as log,
            StopRequest(self._accelerator) as stop,
        ):
            for batch in self._batches():
                self._train_on(batch)
                if self._accelerator.sync_gradients:
                    progress.step += 1
                    progress.seconds = time.perf_counter() - started
                    self._after_step(log, checkpoints, stop)
            heldout = self._evaluate()
            self._stop_if_asked(log, checkpoints, stop)  # a signal that came since the last step
            log.write(progress.step, {f"heldout_{name}": v for name, v in heldout.items()})
        return TrainingResult(progress, self._metrics, heldout)

    def _checkpoints(self, folder: Path) -> Checkpoints:
        options = self._options
        names = ("algorithm", "seed", "batch_tokens", "gradient_accumulation", "heldout_share")
        identity = {name: getattr(options, name) for name in names}
        identity["documents"] = len(self._data.train.dataset)
        identity["processes"] = self._accelerator.num_processes
        return Checkpoints(folder, options.keep_checkpoints, identity)

    def _batches(self) -> Iterator[TrainingBatch]:
        """The batches that are left, on the device; counts them before they are used."""
        progress, loader = self._progress, self._data.train
        while progress.step < self.total_steps:
            loader.batch_sampler.set_epoch(progress.epoch)
            loader.batch_sampler.skip(progress.batch)
            for batch in loader:
                progress.batch += 1
                yield batch.to(self._accelerator.device)
                if progress.step == self.total_steps:
                    return
            progress.epoch, progress.batch = progress.epoch + 1, 0

    def _train_on(self, batch: TrainingBatch) -> None:
        states = self._features(batch)
        with self._accelerator.accumulate(self.model):
            output = self.model(batch, states, **self._forward[0])
            self._accelerator.backward(output.loss)
            if self._accelerator.sync_gradients:
                self._set_rate()
                parameters = self.model.parameters()
                self._accelerator.clip_grad_norm_(parameters, self._options.clip_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._sums.add(output.metrics)
        self._losses.append(output.loss.detach().float())
        self._tokens += batch.lengths.sum()

    def _set_rate(self) -> None:
        warmup = math.ceil(self._options.warmup_share * self.total_steps)
        step = self._progress.step
        factor = rate_factor(step, warmup_steps=warmup, total_steps=self.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.learning_rate * factor

    def _after_step(self, log: RunLog, checkpoints: Checkpoints, stop: StopRequest) -> None:
        step, options = self._progress.step, self._options
        self._stop_if_asked(log, checkpoints, stop)
        is_last = step == self.total_steps
        saves = options.save_every and (is_last or step % options.save_every == 0)
        evaluates = options.eval_every and step % options.eval_every == 0 and not is_last
        if is_last or saves or evaluates or step % options.log_every == 0:
            self._write_metrics(log)
        if evaluates:
            heldout = self._evaluate()
            log.write(step, {f"heldout_{name}": value for name, value in heldout.items()})
        if saves:
            checkpoints.save(self._accelerator, self._progress)
        log.advance(step)

    def _stop_if_asked(self, log: RunLog, checkpoints: Checkpoints, stop: StopRequest) -> None:
        received = stop.agreed()
        if received is not None:
            if self._losses:
                self._write_metrics(log)
            step, folder = self._progress.step, checkpoints.save(self._accelerator, self._progress)
            raise TrainingStoppedError(received.name, received, step, str(folder))

    def _write_metrics(self, log: RunLog) -> None:
        """Add up what the processes saw since the last time. The only wait for the device."""
        progress, accelerator = self._progress, self._accelerator
        losses = accelerator.reduce(torch.stack(self._losses), "mean").cpu()
        self._losses = []
        self._check_finite(losses)
        progress.tokens += int(accelerator.reduce(self._tokens, "sum"))
        self._tokens = torch.zeros_like(self._tokens)
        means = self._sums.means(accelerator)
        self._metrics = {
            "loss": float(losses.double().mean()),
            **means,
            **acceptance_lengths(means),
        }
        rate = self._optimizer.param_groups[0]["lr"]
        speed = progress.tokens / max(progress.seconds, 1e-9)
        log.write(progress.step, {**self._metrics, "rate": rate, "tokens_per_second": speed})

    def _check_finite(self, losses: Tensor) -> None:
        """losses: [n], of the batches since the last time, the last of them the current step's."""
        wrong = (~losses.isfinite()).nonzero()
        if len(wrong):
            batches_ago = len(losses) - 1 - int(wrong[0])
            step = self._progress.step - batches_ago // self._options.gradient_accumulation
            loss = float(losses[wrong[0]])
            fix = "lower learning_rate or clip_norm, or look at the target's dtype and the data"
            raise ModelError(f"step {step}: the loss is {loss}; {fix}")

    def _evaluate(self) -> dict[str, float]:
        loader = self._data.heldout
        if loader is None:
            return {}
        loader.batch_sampler.set_epoch(0)
        return evaluate(self._accelerator, self.model, self._features, loader, self._forward[1])


def _count_steps(sampler: Any, options: TrainOptions) -> int:
    """Optimizer steps of the whole run; batches that do not fill a last one are left out."""
    batches = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        batches += len(sampler)
    steps = batches // options.gradient_accumulation
    if steps == 0:
        fix = f"{batches} batches on each process make no step: lower it, or pass more documents"
        raise ConfigError("gradient_accumulation", options.gradient_accumulation, fix)
    return min(steps, options.max_steps or steps)
