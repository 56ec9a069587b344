"""Whether a model computes over slots what it computes without them: tried where it is loaded.

transformers does not promise that a model uses the positions, masks and past that are passed to it.
One that does not would write other texts, without an error. So a few tokens go through the slots as
an engine feeds them, and their logits are compared:

1. In pieces, padded, next to another row, followed by tokens that do not stay, some before the
   fewest columns of their slots and some before all: with the model's own forward of the whole
   texts. A model that counts positions by itself, keeps its past elsewhere, looks ahead, or has a
   mask of its own in its attention shows here, whatever its configuration says.
   Where positions have three axes, those of these tokens differ, as a picture's do. Where pictures
   are read in both directions, some of these are. Where there are adapters, rows have their own.
2. At the end of a slot full of other keys, under our masks: with the same under the masks that the
   model makes for itself. Windows that were read wrongly from its configuration show here.

The packed form goes through both, and in 2 it is compared with the stock one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.lora.slot_adapters import reading_adapters
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput, StockSlots
from guided_spec.models.transformers_version import name_of_cache


@contextmanager
def errors_naming(model: PreTrainedModel, what: str, cause: str = "") -> Iterator[None]:
    """Turn errors into ModelErrors that name the model's type, what failed, and its cause if known.

    ModelErrors stay as they are, and so do errors for lack of memory.
    """
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models raise nearly every class of exception here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise refusal(model, f"{what}{cause and f', {cause}'}: {reason}") from error


def refusal(model: PreTrainedModel, what: str) -> ModelError:
    """The error for a model that cannot be used, for the reason ``what``."""
    kind = model.config.model_type
    return ModelError(f"model_type={kind!r}: {what}; docs/models.md lists the families that run")


def likely_cause(model: PreTrainedModel) -> str:
    """What about the model explains that slots do not serve it; empty if nothing does."""
    if model.training:
        return "for it is in training mode: call model.eval() first"
    if getattr(model.config, "is_decoder", True) is False:
        return "for its configuration says is_decoder=False: a decoder needs is_decoder=True"
    arguments = inspect.signature(model.forward).parameters
    if "input_ids" not in arguments:  # a wrapper, which tells nothing
        return ""
    if name_of_cache(model.forward) is None:
        return "for it keeps its past in a form of its own, and takes no cache"
    if "position_ids" not in arguments:
        return (
            "for it counts positions by itself and takes no position_ids, as rows of different "
            "lengths need them"
        )
    return ""


class MissingRowError(IndexError):
    """An embedding lacks a row that was looked up."""


class CheckedEmbeddings(TorchFunctionMode):
    """While it is open, rows that an embedding does not have raise MissingRowError on any device.

    Without it, a CUDA device would be of no more use to the process.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at the arguments of ``torch.nn.functional.embedding``, and at no others."""
        del types
        # Of a sharded model they are tensors of another kind, without values to look at.
        if func is functional.embedding and type(args[0]) is Tensor:
            row, rows = int(args[0].max()), len(args[1])
            if row >= rows:
                raise MissingRowError(
                    f"it looks up row {row} of an embedding of {rows} rows; if that is a table of "
                    "positions, use a smaller max_model_len"
                )
        return func(*args, **(kwargs or {}))


# How the first tokens are fed: which logits, tokens of each row that stay, and others after them.
PIECES: tuple[tuple[LogitsKind, tuple[int, int], int], ...] = (
    ("none", (3, 2), 1),
    ("last", (2, 2), 0),
    ("all", (1, 2), 1),
)
NUM_FIRST = 6
PADDING = 3  # after the longest row: further than any column of the slots that is read
NUM_LAST = 4  # tokens at the end of a slot
# Time, height and width of each row's first tokens, as of a picture of four or five between others.
PLACES = (
    ((0, 1, 1, 1, 1, 3), (0, 1, 1, 2, 2, 3), (0, 1, 2, 1, 2, 3)),
    ((0, 1, 1, 1, 1, 1), (0, 1, 2, 3, 4, 5), (0, 2, 1, 1, 2, 1)),
)
# Which of each row's first tokens see each other, where pictures do; each in a piece.
SPANS = ((range(1, 3),), (range(2), range(4, 6)))
STRIDE = 7  # between the ids of tokens

# Of the logits of a token, without their mean: the norm of the difference by the norm.
LARGEST_ERROR = 5e-3
ROUGH_ERROR = 0.1  # of a median token: half precision takes some of them to other experts

Forward = Callable[[SlotInputs, LogitsKind], SlotOutput]


class _Piece(NamedTuple):
    """Some of the first tokens, fed in one forward. keep: [B], how many of each row are kept."""

    inputs: SlotInputs
    kind: LogitsKind
    keep: list[int]


class SlotTrial:
    """The trial of one model over its slots, which it writes to: no text may be in them yet.

    It runs the model six times on a few tokens, and leaves everything else as it was.
    """

    def __init__(self, slots: StockSlots) -> None:
        self._slots, self._model = slots, slots.model
        self._call: Any = slots.model
        cache = slots.cache
        self._length = cache.max_length
        self._rows = [*range(min(2, cache.num_slots))]
        vocab_size: int = self._model.config.get_text_config(decoder=True).vocab_size
        steps = STRIDE * torch.arange(2 * (NUM_FIRST + NUM_LAST)).view(2, -1)
        # From the middle: ids that mean something else than text are at the ends.
        ids = (vocab_size // 2 + steps)[: len(self._rows)] % vocab_size
        self._first, self._last = ids[:, : min(NUM_FIRST, self._length)], ids[:1, NUM_FIRST:]
        self._cause = likely_cause(self._model)
        self._axes, self._adapters = slots.axes, slots.adapters
        if self._adapters is not None:
            self._adapters.try_in(self._rows)
        self._place([torch.tensor(PLACES[row]) for row in self._rows])
        self._span([SPANS[row] for row in self._rows])
        self._own: Tensor | None = None  # logits of the first tokens, by the model's own forward
        self._full: Tensor | None = None  # of the last ones, at the end of a full slot

    def check_stock(self) -> None:
        """Raises ModelError, with the reason, where texts over slots would be others."""
        with CheckedEmbeddings():
            with errors_naming(self._model, "its own forward of a few tokens failed"):
                ids, more = self._first.to(self._model.device), {}
                steps = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
                if self._axes is not None:
                    more["position_ids"] = self._axes.at(self._rows, steps)
                if self._slots.spans is not None:
                    whole = [ids.shape[1]] * len(ids)
                    inputs = SlotInputs(ids, self._rows, [0] * len(ids), whole)
                    masks = self._slots.masks(inputs, steps, ids.shape[1])
                    more["attention_mask"] = masks
                with reading_adapters(self._adapters, self._rows, ids.shape[1]):
                    self._own = self._call(input_ids=ids, use_cache=False, **more).logits
            with errors_naming(self._model, "a forward over KV slots failed", self._cause):
                self._check_pieces(self._forward_viewing, "over KV slots", self._slots.cache.commit)
                if self._length <= NUM_FIRST + NUM_LAST:
                    return
                self._fill()
                self._full = self._slots.forward(self._at_the_end()).logits
                own = self._slots.forward(self._at_the_end(), has_masks=False).logits
                self._require_close(self._full, own, "under the windows of its configuration")

    def check_packed(self, forward: Forward) -> None:
        """Compare the logits of the packed form too; call it after ``check_stock``."""
        self._cause = ""  # the stock form has passed
        with errors_naming(self._model, "a forward in packed form failed"):
            self._check_pieces(forward, "in packed form")
            if self._full is None:
                return
            expected: Tensor | None = self._full
            if self._slots.cache.has_linear_state:
                # A state is where its text is: both read what is between, instead of repeating it.
                middle = self._middle()
                self._slots.forward(middle, "none")
                self._slots.cache.commit(middle.counts)
                expected = self._slots.forward(self._at_the_end()).logits
                forward(middle, "none")
            else:
                self._fill()
            found = forward(self._at_the_end(), "all").logits
            self._require_close(found, expected, "in packed form, at the end of a slot,")

    def leave(self) -> None:
        """Texts may be in the slots from now on."""
        if self._adapters is not None:
            self._adapters.clear()
        self._place([None] * len(self._rows))
        self._span([()] * len(self._rows))

    def _place(self, prompts: Sequence[Tensor | None]) -> None:
        """The positions of each row's text, where they have three axes."""
        if self._axes is not None:
            for row, prompt in zip(self._rows, prompts, strict=True):
                self._axes.put(row, prompt)

    def _span(self, spans: Sequence[Sequence[range]]) -> None:
        """What of each row's text sees each other, where pictures do."""
        if self._slots.spans is not None:
            size = self._first.shape[1]
            for row, own in zip(self._rows, spans, strict=True):
                self._slots.spans.put(row, [one for one in own if one.stop <= size])

    def feed(self, forward: Forward) -> None:
        """What ``check_packed`` feeds, without a look at what comes out: for its kernels."""
        for piece in self._pieces():
            forward(piece.inputs, piece.kind)
        if self._full is not None:
            forward(self._at_the_end(), "all")

    def _forward_viewing(self, inputs: SlotInputs, logits: LogitsKind) -> SlotOutput:
        """The last piece over all columns of the slots, the others over as few as can be."""
        view = self._length if logits == "all" else min(self._first.shape[1] + 1, self._length)
        return self._slots.forward(inputs, logits, view=view)

    def _check_pieces(
        self, forward: Forward, where: str, commit: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        assert self._own is not None
        found, expected = list[Tensor](), list[Tensor]()
        for piece in self._pieces():
            logits = forward(piece.inputs, piece.kind).logits
            if commit is not None:
                commit(piece.keep)
            if logits is None:
                continue
            # Of one slot, a piece may have one token, which rounding may take to other experts.
            merges = bool(found) and len(found[-1]) == 1
            scored, own = ([found.pop()], [expected.pop()]) if merges else ([], [])
            for row, keep in enumerate(piece.keep):
                scored.append(logits[row, :keep])
                end = piece.inputs.starts[row] + keep
                own.append(self._own[row, end - len(scored[-1]) : end])
            found.append(torch.cat(scored))
            expected.append(torch.cat(own))
        if found:
            require_close(self._model, found, expected, where, self._cause)

    def _pieces(self) -> Iterator[_Piece]:
        starts = [0] * len(self._rows)
        for kind, staying, others in PIECES:
            ends = [min(s + n, self._first.shape[1]) for s, n in zip(starts, staying, strict=False)]
            keep = [end - start for start, end in zip(starts, ends, strict=True)]
            if not any(keep):
                continue
            counts = [
                min(end + others, self._length) - s for s, end in zip(starts, ends, strict=True)
            ]
            fed = torch.zeros(len(starts), max(counts) + PADDING, dtype=torch.int64)
            for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
                fed[row, : end - start] = self._first[row, start:end]
            yield _Piece(SlotInputs(fed, self._rows, starts, counts), kind, keep)
            starts = ends

    def _at_the_end(self) -> SlotInputs:
        return SlotInputs(self._last, self._rows[:1], [self._length - NUM_LAST], [NUM_LAST])

    def _middle(self) -> SlotInputs:
        count = self._length - NUM_FIRST - NUM_LAST
        ids = self._first[:1].repeat(1, -(-count // NUM_FIRST))[:, :count]
        return SlotInputs(ids, self._rows[:1], [NUM_FIRST], [count])

    def _fill(self) -> None:
        """Keys and values everywhere between the first and the last tokens; half and half."""
        middle = self._length // 2
        self._slots.cache.repeat(self._rows[0], 0, NUM_FIRST, middle)
        self._slots.cache.repeat(self._rows[0], 1, middle, self._length - NUM_LAST)

    def _require_close(self, found: Tensor | None, expected: Tensor | None, where: str) -> None:
        assert found is not None
        assert expected is not None
        require_close(self._model, [found], [expected], where, self._cause)


def require_close(
    model: PreTrainedModel,
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    where: str,
    cause: str = "",
) -> None:
    """Raises ModelError where logits differ by more than rounding, or are no numbers.

    found, expected: [..., V] of tokens which one fault would change together, in each of them: a
        form that is right for most forwards and wrong in one kind is wrong.
    cause: why they may differ; where: how they were computed.
    """
    errors = [
        _errors(one.flatten(0, -2), other.flatten(0, -2).to(one.device))
        for one, other in zip(found, expected, strict=True)
    ]
    # Rounding takes single tokens to other experts, a fault all tokens of such a group.
    exact = _is_exact(model)
    by_group = torch.stack([each.max() if exact else each.median() for each in errors])
    error, largest = float(by_group.max()), LARGEST_ERROR if exact else ROUGH_ERROR
    if not error <= largest:  # nor is NaN
        cause = cause or "for it does not keep to its masks and positions"
        what = f"its logits {where} differ from its own by {error:.2g} of their size"
        raise refusal(model, f"{what} and it would write other texts, {cause}")


def _is_exact(model: PreTrainedModel) -> bool:
    """Whether nothing is rounded beyond the model's own float32: on GPUs convolutions may be."""
    if model.dtype not in (torch.float32, torch.float64):
        return False
    if torch.get_float32_matmul_precision() != "highest":
        return False
    if model.device.type != "cuda" or not torch.backends.cudnn.allow_tf32:
        return True
    return not any(isinstance(module, nn.Conv1d | nn.Conv2d) for module in model.modules())


def _errors(found: Tensor, expected: Tensor) -> Tensor:
    """[N]: how far logits [N, V] are apart; NaN where some are no numbers."""
    # Some models mark tokens that do not exist by the lowest number there is.
    real = (expected > torch.finfo(expected.dtype).min / 2) | (expected != found)
    shown = [logits.double().where(real, 0) for logits in (found, expected)]
    shown = [logits - logits.mean(-1, keepdim=True) for logits in shown]
    sizes = [logits.norm(dim=-1) for logits in (shown[0] - shown[1], shown[1])]
    errors: Tensor = sizes[0] / sizes[1].clamp_min(1e-9)
    return errors
