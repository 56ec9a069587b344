"""A vision-language model in two: its language model, as one of text alone, and its tower."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from guided_spec.errors import ModelError
from guided_spec.models.attention import MaskBuilder
from guided_spec.models.pictures.embedding import PictureEmbedding, SeesAhead, WithoutPictures
from guided_spec.models.pictures.picture import Picture, PicturePrompt, Sight
from guided_spec.models.pictures.rows import PictureRows
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.stock.kv_cache import read_layers
from guided_spec.models.stock.slot_trial import errors_naming, refusal, require_close


class _Family(NamedTuple):
    """How a family is taken apart.

    language: the name of its language model in ``model.model``. headed: where positions have three
    axes, what puts an output head on that; else None. is_deep: whether its first layers take
    features too. sees_ahead: in which layers a picture is read in both directions, where its
    configuration does not say that it is in none.
    """

    language: str = "language_model"
    headed: Any = None
    is_deep: bool = False
    sees_ahead: SeesAhead = "never"


SERVED = {
    "idefics3": _Family("text_model"),
    "smolvlm": _Family("text_model"),
    "llava": _Family(),
    "llava_next": _Family(),
    "internvl": _Family(),
    "mistral3": _Family(),
    "qwen2_vl": _Family(headed=Qwen2ForCausalLM),
    "qwen2_5_vl": _Family(headed=Qwen2ForCausalLM),
    "qwen3_vl": _Family(headed=Qwen3ForCausalLM, is_deep=True),
    "qwen3_vl_moe": _Family(headed=Qwen3ForCausalLM, is_deep=True),
    "qwen3_5": _Family(headed=Qwen3_5ForCausalLM),
    "qwen3_5_moe": _Family(headed=Qwen3_5MoeForCausalLM),
    "gemma3": _Family(sees_ahead="always"),
    "gemma4": _Family(sees_ahead="windowed"),
}
"""By model_type: the families whose pictures are read."""

_AXES = "a picture's positions have three axes in it"
_REASONS = {
    "gemma4_unified": "transformers has two masks for one",
    "paligemma": "it attends to a prompt in both directions",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "it was loaded without its vision tower"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _AXES),
    "mllama": "its layers attend to pictures apart from the text",
}
_PIXELS_OF_VIDEO = "pixel_values_videos"  # where a processor does not make pictures of frames
_OF_POSITIONS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_TABLES = ("Embedding", "Gemma3TextScaledWordEmbedding", "Gemma4TextScaledWordEmbedding")
_TEXT_ALONE = (
    "gemma3_text",
    "gemma4_text",
)  # some of these are of a family that sees, and see nothing
_PROBE = (1, 2, 3, 5, 6, 7)  # token ids
_PROBED_SPANS = (range(1, 3), range(4, 6))  # where pictures would be


class SplitModel(NamedTuple):
    """language: reads text and ids of rows. pictures: these rows; None where it reads none.

    tower: where positions have three axes, what gives those of a prompt; else None.
    """

    language: PreTrainedModel
    sight: Sight
    pictures: PictureRows | None = None
    tower: VisionTower | None = None


def is_vision_config(config: Any) -> bool:
    """Whether transformers has a configuration's model as one of pictures alone, not of text."""
    kind = config.model_type
    return (
        kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def may_read_pictures(config: Any) -> bool:
    """Whether a configuration's model is served as one of pictures, if all of it is loaded."""
    return config.model_type in SERVED


def split_vision(model: PreTrainedModel, num_rows: int) -> SplitModel:
    """The language model of one that reads pictures; another model as it is.

    num_rows: of pictures, in its embedding table. Modules are shared: the model computes what it
    did. Raises ModelError for a model of pictures alone whose language model is not told apart.
    """
    family = SERVED.get(model.config.model_type)
    if family is None:
        return SplitModel(model, Sight(_refusal(model.config)))
    try:
        with errors_naming(model, "its language model cannot be told from its vision tower"):
            language, table = _language_of(model, family, num_rows)
            _try(model, language)
            _try_ahead(model, language)
    except ModelError as error:
        if is_vision_config(model.config):
            raise
        return SplitModel(model, Sight(str(error)))  # its text is read all the same
    tower = VisionTower(model, family)
    sight = Sight(None, table.placeholder, num_rows, tower.video_placeholder)
    rows = PictureRows(table, tower)
    return SplitModel(language, sight, rows, tower if family.headed else None)


def _refusal(config: Any) -> str:
    """Why a model of no kind in ``SERVED`` reads no pictures."""
    kind = config.model_type.removesuffix("_text")
    if config.model_type not in _TEXT_ALONE and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        reason = _REASONS.get(kind)
        return f"{kind} cannot read pictures yet{reason and f': {reason}' or ''}"
    name = str(config.name_or_path or "").rstrip("/").rsplit("/", 1)[-1]  # no path of the machine
    return f"{name} ({config.model_type}) has no vision tower".strip()


@torch.inference_mode()
def _try(model: PreTrainedModel, language: PreTrainedModel) -> None:
    """Compare the two for a few tokens of text."""
    whole: Any = model
    part: Any = language
    ids = torch.tensor([_PROBE], device=model.device)
    own, found = (one(input_ids=ids, use_cache=False).logits[0] for one in (whole, part))
    require_close(model, [found], [own], "of its language model alone")


@torch.inference_mode()
def _try_ahead(model: PreTrainedModel, language: PreTrainedModel) -> None:
    """Compare the two for a few tokens, of which some see each other where a picture's do."""
    whole: Any = model
    part: Any = language
    spans, size = SlotSpans.of(language), len(_PROBE)
    if spans is None:
        return
    ids = torch.tensor([_PROBE], device=model.device)
    spans.put(0, _PROBED_SPANS)
    builder = MaskBuilder(language.config, *read_layers(language.config))
    positions = torch.arange(size, device=ids.device).unsqueeze(0)
    masks = builder.build(positions, size, model.dtype, spans.fed([0], [0], [size]))
    found = part(input_ids=ids, attention_mask=masks, use_cache=False).logits[0]
    kinds = torch.zeros_like(ids)
    for span in _PROBED_SPANS:
        kinds[0, span.start : span.stop] = 1
    names = inspect.signature(model.forward).parameters
    name = next(one for one in ("mm_token_type_ids", "token_type_ids") if one in names)
    own = whole(input_ids=ids, use_cache=False, **{name: kinds}).logits[0]
    require_close(model, [found], [own], "where it reads in both directions")


def _language_of(
    model: Any, family: _Family, num_rows: int
) -> tuple[PreTrainedModel, PictureEmbedding]:
    if len({one.device for one in model.parameters()}) != 1:
        raise refusal(model, "it reads pictures on one device: pass no device_map and no tp_plan")
    decoder = getattr(model.model, family.language)
    stock = decoder.get_input_embeddings()
    if type(stock).__name__ not in _TABLES or not stock.weight.is_floating_point():
        raise refusal(model, "its embedding is no plain table, and takes no rows of pictures")
    text_config = decoder.config
    with torch.device("meta"):
        if family.headed:  # their own configurations lack some of its fields
            language: Any = family.headed(family.headed.config_class(num_hidden_layers=1))
            language.config, language.vocab_size = text_config, text_config.vocab_size
        else:
            known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
            language = known[type(text_config)](text_config)
    own = copy.copy(decoder)
    own._modules = dict(decoder._modules)
    tied = model.lm_head.weight.data_ptr() == stock.weight.data_ptr()
    table = PictureEmbedding.widening(stock, num_rows, model.config.image_token_id)
    table.sees_ahead = _sees_ahead(family, text_config)
    if family.is_deep:
        table.deepen(len(model.config.vision_config.deepstack_visual_indexes))
    if tied:
        model.lm_head.weight.data = stock.weight.data
    own.set_input_embeddings(table)
    if "embed_tokens_per_layer" in own._modules:
        padding = text_config.pad_token_id
        own.embed_tokens_per_layer = WithoutPictures(own.embed_tokens_per_layer, table, padding)
    language.model = own
    language.set_output_embeddings(model.lm_head)
    left = [name for name, one in language.named_parameters() if one.is_meta]
    if left:
        raise refusal(model, f"expected the weights of {text_config.model_type}, found no {left}")
    language.generation_config = model.generation_config
    for name in ("name_or_path", "architectures"):  # by which drafts name their target
        setattr(language.config, name, getattr(model.config, name))
    language.eval()
    return language, table


def _sees_ahead(family: _Family, text_config: Any) -> SeesAhead:
    """Gemma 4 does so in its larger models alone."""
    if family.sees_ahead == "windowed" and text_config.use_bidirectional_attention != "vision":
        return "never"
    return family.sees_ahead


def _rows_of(level: Any) -> Tensor:
    parts = [level] if isinstance(level, Tensor) else level
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _names_of(method: Any) -> set[str]:
    """Of its arguments."""
    return set(inspect.signature(method).parameters)


class VisionTower:
    """What a model makes of a picture or a video; it keeps nothing."""

    def __init__(self, model: PreTrainedModel, family: _Family) -> None:
        self._model: Any = model
        self._family = family
        inner: Any = model.model
        self._names = _names_of(inner.get_image_features)
        self._takes_videos = hasattr(inner, "get_video_features")
        if self._takes_videos:
            self._names |= _names_of(inner.get_video_features)
        self._of_positions = _names_of(inner.get_rope_index) if family.headed else set[str]()

    @property
    def video_placeholder(self) -> int:
        """The token that stands for each row of a video. Where a processor makes pictures of its
        frames, theirs."""
        config = self._model.config
        own = config.video_token_id if self._takes_videos else None
        return int(config.image_token_id if own is None else own)

    @torch.inference_mode()
    def features(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Of pictures that are ``alike``, each [picture.count, 1 + D, H], see ``PictureEmbedding``.

        Raises ModelError, also where the processor is another model's.
        """
        model, counts = self._model, [one.count for one in pictures]
        with errors_naming(model, "its vision tower failed"):
            is_video = _PIXELS_OF_VIDEO in pictures[0].inputs
            # The models of some families lack the first one, and what is in them has it.
            read = model.model.get_video_features if is_video else model.get_image_features
            found = read(**self._inputs(pictures), return_dict=True)
            levels = [found.pooler_output]
            if self._family.is_deep:
                levels += found.deepstack_features
            rows = torch.stack([_rows_of(level) for level in levels], 1)
        if len(rows) != sum(counts):
            media = "video" if is_video else "picture"
            shown = f"{len(rows)} rows for a {media} of {' + '.join(map(str, counts))} tokens"
            raise ModelError(f"the vision tower gave {shown}: pass the model's own processor")
        return list(rows.split(counts))

    @torch.inference_mode()
    def positions(self, prompt: PicturePrompt) -> Tensor:
        """int64 [3, P]: time, height and width of each token. Raises ModelError."""
        model, places = self._model.model, torch.tensor(prompt.places)
        ids = torch.tensor([prompt.token_ids])
        counts = torch.tensor([one.count for one in prompt.pictures])
        is_video = torch.tensor([_PIXELS_OF_VIDEO in one.inputs for one in prompt.pictures])
        kinds = torch.zeros_like(ids)
        kinds[0, places] = (1 + is_video.long()).repeat_interleave(counts)
        given = {"mm_token_type_ids": kinds}
        for name in _OF_POSITIONS:
            found = [one.inputs[name] for one in prompt.pictures if name in one.inputs]
            if found:
                given[name] = torch.cat([torch.from_numpy(array) for array in found])
        given = {name: given[name] for name in given.keys() & self._of_positions}
        with errors_naming(self._model, "its positions cannot be counted"):
            positions: Tensor
            positions, _ = model.get_rope_index(ids, **given)
        return positions[:, 0]

    def _inputs(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        device, inputs = self._model.device, {}
        for name in pictures[0].inputs.keys() & self._names:
            # Concatenated there: on the host new memory would take longer than all else.
            parts = [torch.from_numpy(one.inputs[name]).to(device) for one in pictures]
            tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
            is_float = tensor.is_floating_point()
            inputs[name] = tensor.to(self._model.dtype) if is_float else tensor
        return inputs
