"""Targets that read pictures: how they are taken apart, and the pictures of the batch that trains.

A picture is what it is when the target is served: rows of its embedding table, which a drafter
reads too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.config import EngineConfig
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.options import Options, find_tokenizer
from guided_spec.errors import ModelError
from guided_spec.models.attention import MaskBuilder
from guided_spec.models.heads.config import SECTIONS
from guided_spec.models.heads.draft_head import LayoutHead
from guided_spec.models.loading import has_layers
from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.pictures.picture import Picture, Sight
from guided_spec.models.pictures.rows import PictureRows
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.pictures.vision import split_vision
from guided_spec.models.stock.kv_cache import read_layers
from guided_spec.training.algorithm import TrainingBatch
from guided_spec.training.data.batches import padded_length
from guided_spec.training.data.pictures import TargetSight
from guided_spec.training.options import TrainOptions

Place = Callable[[TrainingBatch], TrainingBatch]


class TrainingTarget(NamedTuple):
    """A target as a run needs it.

    whole: what decodes. language: what drafts are trained for; it reads ids of rows, and is
    ``whole`` where that reads no pictures. sight: how they are read, or why not. rows: of the
    pictures of a batch; None where none are read.
    """

    whole: PreTrainedModel
    language: PreTrainedModel
    sight: TargetSight
    rows: PictureRows | None = None

    @classmethod
    def of(cls, whole: PreTrainedModel, options: TrainOptions) -> TrainingTarget:
        """Modules are shared: ``whole`` computes what it did."""
        blind = why_blind(options) or (None if has_layers(whole) else "it is not loaded whole")
        if blind is None:
            try:
                split = split_vision(whole, num_rows(options))
            except ModelError as error:
                blind = str(error)
        if blind is not None:
            return cls(whole, whole, TargetSight(PictureReader(None, Sight(blind))))
        # Documents that are too long are left out, and not refused.
        videos = "training takes none"
        sight = split.sight._replace(num_rows=sys.maxsize, videos=videos)
        load = {"trust_remote_code": options.trust_remote_code}
        reader = PictureReader.load(options.target, sight, None, load)
        return cls(whole, split.language, TargetSight(reader, split.tower), split.pictures)

    def tokenizer(self, options: TrainOptions) -> Any:
        """The target's own, or its processor's, with the chat template that has pictures."""
        load = {"trust_remote_code": options.trust_remote_code}
        asked = Options(load=load, config=EngineConfig())
        return find_tokenizer(options.target, asked, self.sight.reader)

    def place(self) -> Place:
        """What gives each batch in turn the rows of its pictures."""
        if self.rows is None:
            return lambda batch: batch
        return BatchRows(self.rows, self.sight.reader).place


def num_rows(options: TrainOptions) -> int:
    """Rows of the table: no batch has more tokens."""
    return max(options.batch_tokens, padded_length(options.max_length))


def why_blind(options: TrainOptions) -> str | None:
    """Why a run reads no pictures, whatever its target does; None where it may."""
    elsewhere = {
        "features_url": options.features_url,
        "tensor_parallel": options.tensor_parallel,
        "device_map": options.device_map,
    }
    named = next((name for name, value in elsewhere.items() if value), None)
    return None if named is None else f"with {named} no pictures are trained on"


class BatchRows:
    """The rows of the pictures of one batch at a time: those of the batch before are free then."""

    def __init__(self, rows: PictureRows, reader: PictureReader) -> None:
        self._rows, self._reader = rows, reader
        self._taken: list[Picture] = []

    def place(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch, on the CPU, with ids of rows where its pictures are.

        Raises ConfigError for a picture that cannot be read any more.
        """
        for picture in self._taken:  # one by one, as they were taken: some are there twice
            self._rows.release([picture])
        self._taken = []
        if batch.pictures is None:
            return batch
        token_ids = batch.token_ids.clone()
        for row, document in enumerate(batch.pictures.documents):
            ids = [] if document is None else self._take(document.kept)
            if document is not None:
                token_ids[row, document.places] = torch.tensor(ids)
        return batch._replace(token_ids=token_ids)

    def _take(self, kept: Any) -> list[int]:
        found = list[int]()
        for one in kept:
            picture = Picture(one.content, one.num_tokens, {})
            if not self._rows.holds(one.content):
                picture = one.read(self._reader)
            taken = self._rows.take([picture])
            assert taken is not None, "a batch has no more tokens than the table has rows"
            self._taken.append(picture)
            found += taken[0]
        return found


class PictureArguments:
    """What a target's decoder is told of a batch with pictures, besides tokens and padding."""

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        self._table: Any = model.get_input_embeddings()
        self._config, self._dtype = model.config, model.dtype
        self._spans = SlotSpans.of(target)

    def of(self, batch: TrainingBatch, token_ids: Tensor) -> dict[str, Any]:
        """token_ids: those of the batch, on the target's device. Nothing without pictures."""
        pictures = batch.pictures
        if pictures is None or not isinstance(self._table, PictureEmbedding):
            return {}
        found = self._table.deep_arguments(token_ids)
        if pictures.axes is not None:
            found["position_ids"] = pictures.axes.to(token_ids.device)
        if self._spans is not None:
            found["attention_mask"] = self._masks(batch, self._spans, token_ids.device)
        return found

    def _masks(self, batch: TrainingBatch, spans: SlotSpans, device: torch.device) -> Any:
        """Of both directions within pictures; what is padded is seen by padding alone."""
        assert batch.pictures is not None
        count, width = batch.token_ids.shape
        for row, document in enumerate(batch.pictures.documents):
            spans.put(row, () if document is None else document.spans)
        builder = MaskBuilder(self._config, *read_layers(self._config))
        positions = torch.arange(width, device=device).expand(count, -1)
        rows = range(count)
        ahead = spans.fed(rows, [0] * count, [width] * count, width)
        return builder.build(positions, width, self._dtype, ahead)


def as_read_by(head: Any, batch: TrainingBatch) -> TrainingBatch:
    """The batch as a head reads it: one with a table of its own reads placeholders.

    Only modules of the target's own kind keep positions of three axes. Raises ModelError for
    another head that drafts by these: it is not trained so.
    """
    pictures = batch.pictures
    if pictures is None or not isinstance(head, LayoutHead):
        return batch
    if pictures.axes is not None and SECTIONS[0] in head.config.rope_parameters:
        fix = "start from a head without it, or leave pictures out"
        raise ModelError(f"init: a head with {SECTIONS[0]} is not trained with pictures: {fix}")
    kept = pictures._replace(axes=None)
    token_ids = batch.token_ids if head.embed_tokens is None else batch.written_ids
    return batch._replace(token_ids=token_ids, pictures=kept)
