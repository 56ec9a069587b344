"""What the config.json of a block head says, in the dialects that are written.

z-lab's (DFlash, DFlash 2; Domino and JetSpec too) has the keys of a Qwen3 configuration, and
``dflash_config``; DeepSeek's
(DeepSpec: DSpark, and DFlash trained with it) has the same keys and all others at the same level;
speculators' describes the layers in ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.heads.block.fields import require_fields, require_numbers
from guided_spec.models.heads.block.lattice import LatticeShape
from guided_spec.models.heads.block.transitions import MarkovShape, PrefixShape, SelectorShape
from guided_spec.models.heads.config import (
    HeadShape,
    build_head_config,
    check_fit,
    derive_head_config,
)
from guided_spec.models.pictures.embedding import token_rows
from guided_spec.types import require_int

SECTION = "dflash_config"
KNOWN = (
    "block_size",
    "causal",
    "causal_head",
    "conv_group_size",
    "conv_kernel_size",
    "emb_dim",
    "final_logit_softcapping",
    "gru_hidden_dim",
    "input_embedding_scale",
    "lilicorr_enabled",
    *(f"lilicorr_{name}" for name in LatticeShape._fields),
    "is_causal",
    "mask_token_id",
    "output_multiplier",
    "projector_type",
    "pure_draft_prefix_len",
    "selector_rank",
    "selector_top_k",
    "shift_label",
    "swa_window_size",
    "target_layer_ids",
    "use_swa",
)
DEFAULT_BLOCK = 8  # of speculators, which leaves out what is default
DEFAULT_TOP_K = 16
CONFIDENCE = "confidence_head.proj.weight"
MARKOV = "markov_head"
MARKOV_KINDS = ("vanilla", "gated", "rnn")
TRAINED_KINDS = ("vanilla", "gated")
DOMINO, LILICORR = "domino", "lilicorr"


class ConvShape(NamedTuple):
    """The convolutions of DFlash 2. taps: positions that one reads. group_size: channels that share
    what is added to its kernel."""

    taps: int
    group_size: int


class BlockLayout(NamedTuple):
    """A block head without its weights.

    config: transformers configuration of its layers. aux_hidden_layers: see ``DraftHead``.
    block_size: positions of a block, the last token's among them. mask_token_id: the token at the
    others. is_causal: whether positions of a block see only those before them; None: in layers with
    a window. from_anchor: whether the output at the last token predicts the next token, and that at
    a mask the token after the mask; else that at a mask predicts the token of its own position.
    draft_vocab_size: D. embedding_scale, logit_scale, softcap: of embeddings and logits; softcap 0
    is none. conv, markov, selector, prefix, lattice: parts that some heads have. confidence_width:
    what the confidence head reads; 0: there is none.
    """

    config: Any
    aux_hidden_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    is_causal: bool | None
    from_anchor: bool
    draft_vocab_size: int
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    conv: ConvShape | None = None
    markov: MarkovShape | None = None
    selector: SelectorShape | None = None
    prefix: PrefixShape | None = None
    lattice: LatticeShape | None = None
    confidence_width: int = 0

    @property
    def width(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @classmethod
    def fresh(
        cls,
        target: PreTrainedModel,
        shape: HeadShape,
        *,
        width: int,
        aux_hidden_layers: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        draft_vocab_size: int | None = None,
    ) -> BlockLayout:
        """The layout of a new DFlash head for ``target`` that drafts ``width`` tokens.

        aux_hidden_layers: by default as many as the head has layers, spread from the input of layer
        2 to that of the last but one, as z-lab's are. mask_token_id: by default the last row of the
        target's embedding. draft_vocab_size: by default all tokens.

        Raises ConfigError for sizes that do not go together, ModelError for layers or a token that
        the target has not.
        """
        config = derive_head_config(target, "qwen3", shape)
        text_config: Any = target.config.get_text_config(decoder=True)
        last = len(token_rows(target.get_input_embeddings())) - 1
        layers = aux_hidden_layers or _spread(shape.num_layers, text_config.num_hidden_layers)
        layout = cls(
            config=config,
            aux_hidden_layers=tuple(layers),
            block_size=width + 1,
            mask_token_id=last if mask_token_id is None else mask_token_id,
            is_causal=None,
            from_anchor=False,
            draft_vocab_size=draft_vocab_size or config.vocab_size,
        )
        _check(layout, target, "a new head")
        return layout

    def with_markov(self, markov: MarkovShape, *, confidence: bool) -> BlockLayout:
        """The layout of a DSpark head of the same width, which predicts at the last token too.

        confidence: whether it has a confidence head, which then reads the token before.
        Raises ConfigError for a Markov head that cannot be.
        """
        require_int("markov_rank", markov.rank, low=1)
        if markov.kind not in TRAINED_KINDS:
            raise ConfigError("markov_head_type", markov.kind, f"must be one of {TRAINED_KINDS}")
        return self._replace(
            block_size=self.width,
            from_anchor=True,
            markov=markov,
            confidence_width=self.config.hidden_size + markov.rank if confidence else 0,
        )

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        target: PreTrainedModel,
        source: str,
    ) -> BlockLayout:
        """Raises ModelError, naming ``source``, for what is missing or unknown, or does not fit."""
        require_fields(config, source)
        is_speculators = config.get("speculators_model_type") is not None
        found = _speculators(config) if is_speculators else _zlab(config, source)
        head = build_head_config(found.pop("layers"), "qwen3", target, source)
        sizes = {"hidden_size": head.hidden_size, "vocab_size": head.vocab_size}
        check_fit(source, target, sizes)
        layout = cls(
            config=head,
            draft_vocab_size=config.get("draft_vocab_size") or head.vocab_size,
            markov=_markov(config, source),
            confidence_width=(0, *tensors[CONFIDENCE].shape)[-1] if CONFIDENCE in tensors else 0,
            **found,
        )
        _check(layout, target, source)
        return layout


def _spread(count: int, depth: int) -> list[int]:
    """Inputs of layers; z-lab counts outputs: from 1 to depth - 3, or depth // 2 alone."""
    first, last = 2, max(depth - 2, 2)
    steps = (last - first) / max(count - 1, 1)
    wanted = [round(first + at * steps) for at in range(count)] if count > 1 else [depth // 2 + 1]
    return sorted({min(index, depth) for index in wanted})


def _zlab(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    own: dict[str, Any] = config.get(SECTION) or {}
    unknown = sorted(own.keys() - set(KNOWN))
    if unknown:
        fix = f"expected {', '.join(KNOWN)}, found {', '.join(unknown)}"
        raise ModelError(f"{source}: {SECTION}: {fix}; such heads are not read")
    require_fields(own, f"{source}: {SECTION}")
    found = {name: own.get(name, config.get(name)) for name in KNOWN}
    said = (found[name] for name in ("causal", "causal_head", "is_causal"))
    causal = next((value for value in said if value is not None), None)
    layers = dict(config)
    types, window = config.get("layer_types") or (), found["swa_window_size"]
    if found["use_swa"] and "sliding_attention" not in types:
        layers["layer_types"] = ["sliding_attention"] * config.get("num_hidden_layers", 0)
        causal = bool(causal)  # such layers see the whole block, where nothing else is said
    if found["use_swa"]:
        layers["use_sliding_window"] = True
        layers["sliding_window"] = window or config.get("sliding_window")
    conv = selector = None
    if found["conv_kernel_size"]:
        conv = ConvShape(found["conv_kernel_size"], found["conv_group_size"] or 1)
    if found["selector_rank"]:
        selector = SelectorShape(found["selector_rank"], found["selector_top_k"] or DEFAULT_TOP_K)
    ids = found["target_layer_ids"]
    return {
        "layers": layers,
        "aux_hidden_layers": tuple(index + 1 for index in ids or ()),
        "block_size": found["block_size"] or 16,
        "mask_token_id": found["mask_token_id"],
        "is_causal": None if causal is None else bool(causal),
        # DeepSpec's own, of which "dflash" ones have a rank of 0; Domino's say so.
        "from_anchor": "markov_rank" in config or bool(found["shift_label"]),
        "embedding_scale": float(found["input_embedding_scale"] or 1.0),
        "logit_scale": float(found["output_multiplier"] or 1.0),
        "softcap": float(found["final_logit_softcapping"] or 0.0),
        "conv": conv,
        "selector": selector,
        "prefix": _prefix(found, source),
        "lattice": _lattice(config, found, source),
    }


def _prefix(found: Mapping[str, Any], source: str) -> PrefixShape | None:
    """Of Domino; found: by ``KNOWN``."""
    kind = found["projector_type"]
    if kind in (None, LILICORR):
        return None
    if kind != DOMINO:
        raise ModelError(
            f"{source}: projector_type: expected {DOMINO}, {LILICORR} or none, found {kind!r}; "
            "such heads are not read"
        )
    sizes = {name: found[name] for name in ("gru_hidden_dim", "emb_dim")}
    require_numbers(source, "", sizes)
    num_plain = found["pure_draft_prefix_len"] or 0
    return PrefixShape(found["gru_hidden_dim"], found["emb_dim"], num_plain)


def _lattice(
    config: Mapping[str, Any], found: Mapping[str, Any], source: str
) -> LatticeShape | None:
    """Of LiLiCorr; found: by ``KNOWN``."""
    named = config.get("architectures")
    is_named = isinstance(named, list) and "LiLiCorrDraftModel" in named
    if not (is_named or found["lilicorr_enabled"] or found["projector_type"] == LILICORR):
        return None
    shape = LatticeShape(*(found[f"lilicorr_{name}"] for name in LatticeShape._fields))
    require_numbers(source, "lilicorr_", shape._asdict())
    if shape.hidden_size % shape.num_heads:
        raise ModelError(
            f"{source}: lilicorr_hidden_size: expected a multiple of {shape.num_heads} heads, "
            f"found {shape.hidden_size}"
        )
    return shape


def _speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config["speculators_model_type"]
    is_second = kind == "dflash2"
    conv = selector = None
    if is_second:
        taps, group = config.get("conv_kernel_size") or 2, config.get("conv_group_size") or 16
        conv = ConvShape(taps, group)
        rank, top_k = config.get("selector_rank"), config.get("selector_top_k")
        selector = SelectorShape(rank or 256, top_k or DEFAULT_TOP_K)
    sees_all = config.get("sliding_window_non_causal", is_second)
    return {
        "layers": config.get("transformer_layer_config") or {},
        "aux_hidden_layers": tuple(config.get("aux_hidden_state_layer_ids") or ()),
        "block_size": config.get("block_size") or DEFAULT_BLOCK,
        "mask_token_id": config.get("mask_token_id"),
        "is_causal": False if sees_all else None,
        "from_anchor": bool(config.get("sample_from_anchor", kind == "dspark")),
        "conv": conv,
        "selector": selector,
    }


def _markov(config: Mapping[str, Any], source: str) -> MarkovShape | None:
    rank = config.get("markov_rank") or 0
    if not rank:
        return None
    kind = str(config.get("markov_head_type") or "vanilla").lower()
    if kind not in MARKOV_KINDS:
        raise ModelError(
            f"{source}: markov_head_type: expected {', '.join(MARKOV_KINDS)}, found {kind!r}"
        )
    return MarkovShape(rank, kind)  # type: ignore[arg-type]


def _check(layout: BlockLayout, target: PreTrainedModel, source: str) -> None:
    text_config: Any = target.config.get_text_config(decoder=True)
    depth, layers = text_config.num_hidden_layers, layout.aux_hidden_layers
    if not layers or not all(0 <= index <= depth for index in layers):
        found = [index - 1 for index in layers] or None
        raise ModelError(
            f"{source}: target_layer_ids: expected layers 0 to {depth - 1} of the "
            f"target, found {found}; pass a head for this target"
        )
    embedding: Any = target.get_input_embeddings()
    mask = layout.mask_token_id
    if mask is None or not 0 <= mask < len(token_rows(embedding)):
        raise ModelError(
            f"{source}: mask_token_id: expected a row of the target's embedding, "
            f"found {mask}; pass a head for this target"
        )
    if layout.lattice is not None and layout.from_anchor:
        raise ModelError(
            f"{source}: shift_label: expected false in a head with {LILICORR}, which scores masks"
        )
    least = 1 if layout.from_anchor else 2
    if layout.block_size < least:
        raise ModelError(
            f"{source}: block_size: expected {least} or more, found {layout.block_size}"
        )
    _check_parts(layout, source)
    size, conv = layout.config.hidden_size, layout.conv
    widths = (0, size, size + (layout.markov.rank if layout.markov else 0))
    if layout.confidence_width not in widths:
        raise ModelError(
            f"{source}: {CONFIDENCE}: expected {widths[1]} or {widths[2]} columns, "
            f"found {layout.confidence_width}"
        )
    if conv is not None and (conv.group_size < 1 or size % conv.group_size):
        raise ModelError(
            f"{source}: conv_group_size: expected a divisor of {size}, found {conv.group_size}"
        )


def _check_parts(layout: BlockLayout, source: str) -> None:
    """Of what makes a position depend on the one before."""
    shapes = {
        "candidate_selector": layout.selector,
        "prefix_gru": layout.prefix,
        LILICORR: layout.lattice,
        MARKOV: layout.markov,
    }
    parts = [name for name, shape in shapes.items() if shape is not None]
    if len(parts) > 1:
        raise ModelError(
            f"{source}: expected one part that reads the tokens drafted before, found "
            f"{' and '.join(parts)}; such heads are not read"
        )
    lattice, total = layout.lattice, layout.config.vocab_size
    if lattice is not None and lattice.candidate_topk > total:
        raise ModelError(
            f"{source}: lilicorr_candidate_topk: expected at most all {total} tokens, "
            f"found {lattice.candidate_topk}"
        )
    part = next((name for name in parts if name != MARKOV), None)
    if part is not None and layout.draft_vocab_size != layout.config.vocab_size:
        raise ModelError(
            f"{source}: draft_vocab_size: expected all {layout.config.vocab_size} "
            f"tokens in a head with a {part}, found {layout.draft_vocab_size}"
        )
