"""The training loop, on one device or many, with checkpoints from which it can be resumed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from guided_spec.errors import ConfigError, ModelError, TrainingStoppedError, reason_of
from guided_spec.models.attention import shape_free_kernels
from guided_spec.training.algorithm import TrainingBatch
from guided_spec.training.compiled_layers import compile_layers
from guided_spec.training.features import Features
from guided_spec.training.options import BEST, TrainOptions
from guided_spec.training.pictures import Place
from guided_spec.training.run_log import LOGS, RunLog
from guided_spec.training.validation import MetricSums, acceptance_lengths, evaluate

FLOOR = 0.1  # what is left of the learning rate at the end
BETAS = (0.9, 0.95)  # as EAGLE-3 trains its heads: https://github.com/SafeAILab/EAGLE


def rate_factor(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """What the learning rate is multiplied with in step ``step``, counted from 0.

    Rises linearly to 1 over the first ``warmup_steps``, then falls as half a cosine to ``FLOOR``
    at ``total_steps``. Never 0, so that every step moves the parameters.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW over the parameters that take a gradient; vectors (norms, biases) do not decay.

    Fused: one pass over memory instead of a dozen.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Takes SIGTERM and SIGINT while it is entered; the loop asks ``agreed`` between steps.

    The handlers that were there come back when it is left. Outside of the main thread there are
    none to set, and nothing is taken. A second SIGINT raises KeyboardInterrupt, but for a run of
    several processes: torchrun hands on the one that its terminal sent to all of them already.
    """

    def __init__(self, accelerator: Any) -> None:
        self._is_alone = accelerator.num_processes == 1
        # gloo: a collective on the CPU, so that the devices are not synchronized.
        self._group = None if self._is_alone else distributed.new_group(backend="gloo")
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._group is not None and kind is None:
            distributed.destroy_process_group(self._group)

    def agreed(self) -> signal.Signals | None:
        """The signal that any process has received; every process has to call it, as often."""
        number = self._received
        if self._group is not None:
            found = torch.tensor([number])
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group)
            number = int(found)
        return signal.Signals(number) if number else None

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received and number == signal.SIGINT and self._is_alone:
            raise KeyboardInterrupt
        self._received = number


class WorkerSignals:
    """Stop signals of a loader's workers, for ``DataLoader(worker_init_fn=...)``.

    Workers ignore them: a signal often goes to all processes of a job, and a worker that dies ends
    the trainer too. Once the training is over, however it ended, a signal ends a worker: at its
    exit Python waits for the processes that it has asked to stop.
    """

    def __init__(self) -> None:
        self._is_over = multiprocessing.Event()

    def __call__(self, worker: int) -> None:
        del worker
        for number in SIGNALS:
            signal.signal(number, self._take)

    def __enter__(self) -> None:
        """The training runs until the end of the block."""

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def _take(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._is_over.is_set():
            os._exit(0)


CHECKPOINTS = "checkpoints"  # in the output folder of a run

PROGRESS = "progress.json"
PARTIAL = "unfinished"
MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def check_output(folder: Path, *, resume: bool) -> None:
    """Refuse the output folder of a run that it cannot write to, or that holds another one's files.

    Raises ConfigError where a model would be overwritten, where there are checkpoints that
    ``resume`` does not ask for, and for a folder that cannot be written.
    """
    has_checkpoints = Checkpoints(folder / CHECKPOINTS, 1, {}).newest() is not None
    if has_checkpoints and not resume:
        fix = "holds the checkpoints of a run: pass --resume, or another folder"
        raise ConfigError("output", str(folder), fix)
    models = [name for name in MODEL_FILES if (folder / name).exists()]
    if models and not has_checkpoints:
        fix = f"holds a model ({', '.join(models)}) that would be overwritten: pass another folder"
        raise ConfigError("output", str(folder), fix)
    check_folder("output", folder)


def check_folder(option: str, folder: Path) -> None:
    """Make a folder, and raise ConfigError, naming the option, where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        fix = f"cannot be written to ({reason_of(error)}): pass another folder"
        raise ConfigError(option, str(folder), fix) from error


@dataclass
class Progress:
    """How far a run is.

    step: optimizer steps done. epoch: the one it is in, from 0. batch: batches of that epoch done
    by each process. tokens: document tokens seen by all processes. seconds: of training.
    best_step, best_length: of the validation whose acceptance was the longest so far; 0 before it.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_length: float = 0.0


class Checkpoints:
    """The newest few checkpoints of one run, in a folder each.

    folder: where they are. keep: how many. identity: what must not change when the run is resumed,
        because the order of the data depends on it; JSON values.
    """

    def __init__(self, folder: Path, keep: int, identity: Mapping[str, Any]) -> None:
        self._folder, self._keep = folder, keep
        self._identity = dict(identity)

    def newest(self) -> Path | None:
        """The folder of the last complete checkpoint; None where there is none."""
        found = self._complete()
        return found[-1] if found else None

    def save(self, accelerator: Any, progress: Progress) -> Path:
        """Write model, optimizer, random states and ``progress``; every process has to call it.

        Returns its folder, which gets its name when it is complete: a kill leaves no broken one.
        """
        partial, final = self._folder / PARTIAL, self._folder / f"step_{progress.step:06d}"
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            record = {"progress": asdict(progress), "identity": self._identity}
            (partial / PROGRESS).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self._complete()[: -self._keep]:
                shutil.rmtree(old)
        accelerator.wait_for_everyone()
        return final

    def load(self, accelerator: Any) -> Progress:
        """Restore the newest checkpoint; every process has to call it. A fresh start if none.

        Raises ConfigError when the run's identity was another one.
        """
        folder = self.newest()
        if folder is None:
            return Progress()
        record = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        for name, value in self._identity.items():
            before = record["identity"].get(name)
            if before != value:
                fix = f"was {before!r} in {folder}: pass that, or start anew in another folder"
                raise ConfigError(name, value, fix)
        accelerator.load_state(str(folder))
        return Progress(**record["progress"])

    def _complete(self) -> list[Path]:
        found = [path.parent for path in self._folder.glob(f"step_*/{PROGRESS}")]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


class TrainingData(NamedTuple):
    """Batches, as ``DataLoader``s whose ``batch_sampler`` is a ``TokenBatches``.

    heldout: None where nothing is kept for validation. signals: of the workers of both. place:
    gives each batch, before it is used, the rows of its pictures, and frees those of the last one.
    """

    train: Any
    heldout: Any
    signals: WorkerSignals
    place: Place


class TrainingResult(NamedTuple):
    """What a run came to.

    progress: how far the run came. metrics: the last that were logged. heldout: at the end.
    expected_bytes: of the device, stated before the first step; None without CUDA.
    """

    progress: Progress
    metrics: dict[str, float]
    heldout: dict[str, float]
    expected_bytes: int | None


class Trainer:
    """Trains a draft until its epochs or steps are done.

    accelerator: an ``accelerate.Accelerator``. model: a ``DraftAlgorithm`` on its device, with
    parameters in float32; it is changed in-place. features: where the target's states come from.
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
        compile_layers(model)
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
        self._expected_bytes: int | None = None

    def run(self, output: Path) -> TrainingResult:
        """Train, with checkpoints, logs and the best draft so far below the folder ``output``.

        Raises ConfigError as ``check_output`` does, and when there are checkpoints that cannot be
        gone on from, and ModelError, naming the step, when a loss is not a finite number. SIGTERM
        or SIGINT in any process saves after the step and raises TrainingStoppedError in all.
        """
        check_output(output, resume=self._options.resume)
        checkpoints = self._checkpoints(output / CHECKPOINTS)
        self._progress = checkpoints.load(self._accelerator)
        progress = self._progress
        started = time.perf_counter() - progress.seconds
        self.model.train()
        log = RunLog(
            self._accelerator,
            output / LOGS,
            self._options,
            done=progress.step,
            total=self.total_steps,
        )
        with (
            shape_free_kernels(),
            log,
            StopRequest(self._accelerator) as stop,
            self._data.signals,
        ):
            if self._accelerator.device.type == "cuda":
                self._expected_bytes = self._state_memory(log)
            for batch in self._batches():
                self._train_on(batch)
                if self._accelerator.sync_gradients:
                    progress.step += 1
                    progress.seconds = time.perf_counter() - started
                    self._after_step(log, checkpoints, stop)
                    if self._is_due(self._options.eval_every):
                        self._validate(log, output / BEST)
                    if self._is_due(self._options.save_every) or self._saves_last():
                        checkpoints.save(self._accelerator, progress)
                    log.advance(progress.step)
            heldout = self._validate(log, output / BEST)
            self._stop_if_asked(log, checkpoints, stop)  # a signal that came since the last step
        return TrainingResult(progress, self._metrics, heldout, self._expected_bytes)

    def try_largest(self) -> int:
        """Bytes of the device that a step of the largest batch takes; it is run, and forgotten.

        Every process has to call it. Raises ConfigError for a batch that does not fit.
        """
        loader = self._data.train
        rows = [loader.dataset[index] for index in loader.batch_sampler.largest()]
        batch = self._data.place(loader.collate_fn(rows)).to(self._accelerator.device)
        try:
            output = self.model(batch, self._features(batch), **self._forward[0])
            self._accelerator.backward(output.loss)
        except torch.OutOfMemoryError as error:
            fix = "so many tokens do not fit the device: lower it, and raise gradient_accumulation"
            raise ConfigError("batch_tokens", self._options.batch_tokens, fix) from error
        self._optimizer.zero_grad()
        held = sum(_local(p).nbytes for p in self.model.parameters() if p.requires_grad)
        moments = 0 if self._optimizer.state else 2 * held  # the first step makes them
        return torch.cuda.max_memory_allocated() + moments

    def _state_memory(self, log: RunLog) -> int:
        """What a step is expected to take; from here on what it does take is counted."""
        torch.cuda.reset_peak_memory_stats()
        needed, room = self.try_largest(), torch.cuda.mem_get_info()[1]
        log.say(f"the largest batch takes {needed / 2**30:.1f} of {room / 2**30:.1f} GiB")
        if needed > room:
            fix = "its gradients fit the device, and the optimizer's moments do not: lower it"
            raise ConfigError("batch_tokens", self._options.batch_tokens, fix)
        torch.cuda.reset_peak_memory_stats()
        return needed

    def export(self, folder: Path) -> None:
        """Write the draft into ``folder``, as it is now; every process has to call it."""
        tensors = self._accelerator.get_state_dict(self.model)
        if self._accelerator.is_main_process:
            draft = self._accelerator.unwrap_model(self.model)
            layout = choose_layout(self._options, tuple(draft.layouts))
            folder.mkdir(parents=True, exist_ok=True)
            draft.export(folder, layout=layout, tensors=tensors)

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
            for batch in _looked_ahead(loader, self._features):
                progress.batch += 1
                yield self._data.place(batch).to(self._accelerator.device)
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
        options = self._options
        self._stop_if_asked(log, checkpoints, stop)
        every = (options.save_every, options.eval_every, options.log_every)
        if self._progress.step == self.total_steps or any(map(self._is_due, every)):
            self._write_metrics(log)

    def _is_due(self, every: int) -> bool:
        """What is done every so many steps, and at the end of its own accord."""
        step = self._progress.step
        return bool(every) and step % every == 0 and step < self.total_steps

    def _saves_last(self) -> bool:
        """Whether to save after the last step, since what follows it may fail too."""
        return 0 < self._options.save_every <= self._progress.step == self.total_steps

    def _validate(self, log: RunLog, best: Path) -> dict[str, float]:
        """The held-out metrics; a draft that is better than those before is kept in ``best``.

        The last one is not: it is what the run exports.
        """
        heldout, progress = self._evaluate(), self._progress
        log.write(progress.step, {f"heldout_{name}": value for name, value in heldout.items()})
        length = heldout.get("acceptance_length", 0.0)
        if length > progress.best_length:
            progress.best_step, progress.best_length = progress.step, length
            partial = best.with_name(PARTIAL)
            is_last = progress.step == self.total_steps
            if not is_last:
                self.export(partial)
            if self._accelerator.is_main_process:
                shutil.rmtree(best, ignore_errors=True)
                if not is_last:
                    partial.rename(best)
        return heldout

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
        batches = map(self._data.place, loader)
        return evaluate(self._accelerator, self.model, self._features, batches, self._forward[1])


def _looked_ahead(loader: Iterable[TrainingBatch], features: Features) -> Iterator[TrainingBatch]:
    """Yield the batches; each is begun while at most ``features.ahead`` before it wait."""
    waiting: deque[TrainingBatch] = deque()
    for batch in loader:
        features.begin(batch)
        waiting.append(batch)
        if len(waiting) > features.ahead:
            yield waiting.popleft()
    yield from waiting


def _local(parameter: Tensor) -> Tensor:
    """What this process holds of it."""
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local


def choose_layout(options: TrainOptions, layouts: tuple[str, ...]) -> str:
    """The layout that is asked for, or the first. Raises ConfigError for one not in ``layouts``."""
    if options.layout is not None and options.layout not in layouts:
        fix = f"this {options.algorithm} draft is written as {' or '.join(layouts)}"
        raise ConfigError("layout", options.layout, fix)
    return options.layout or layouts[0]


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
