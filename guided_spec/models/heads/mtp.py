"""Multi-token prediction modules as of DeepSeek-V3, R1 and V3.2, GLM-4.5 and GLM-4.5-Air.

Section 2.2 of DeepSeek-V3's report (arXiv:2412.19437). With N layers in the target, its checkpoint
holds module i as ``model.layers.{N + i}.*``: ``enorm``, ``hnorm``, ``eh_proj``,
``shared_head.norm``, the weights of one decoder layer, and copies of the target's embedding and
output layer, which are not read. ``MtpHead.fresh`` makes such modules of any target's layers.

Multi-token prediction modules as of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE.

Their checkpoints hold it as ``mtp.*``: ``pre_fc_norm_embedding``, ``pre_fc_norm_hidden``, ``fc``,
``layers.{i}.*`` and ``norm``. transformers skips these when it loads a model. What speculators
saves for such a module differs only in its names, and is read too. ``QwenMtpHead.fresh`` makes such
modules of any target's layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import Initialize, copy_layers, start_modules
from guided_spec.models.heads.draft_head import DraftVocabulary, HeadArguments
from guided_spec.models.heads.weights import fill_head, read_tensors
from guided_spec.models.target import TargetEnds, TargetLayers, cut_config
from guided_spec.models.transformers_version import cache_keyword
from guided_spec.types import require_int

# What a module holds besides its decoder layer, and what transformers' MtpLayer calls it.
OWN_NAMES = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "post_norm.",
}
# Copies of what the target has, and a buffer that old checkpoints hold.
UNREAD = ("embed_tokens.", "shared_head.head.", "self_attn.rotary_emb.")


class _TargetModules(nn.Module):
    """L modules of the target's own kind of decoder layer; see ``DraftHead`` for its attributes.

    Embedding, rotary embedding and output layer are the target's. A subclass says how the tensors
    of a checkpoint are called, builds its modules, and runs one of them.
    """

    aux_hidden_layers: tuple[int, ...] = (-1,)
    vocabulary: DraftVocabulary | None = None
    layers: nn.ModuleList

    def __init__(self, target: PreTrainedModel, num_modules: int) -> None:
        """Modules with weights not yet set, on torch's current default device."""
        super().__init__()
        self._ends, self._kind = TargetEnds(target), TargetLayers(target)
        self.config: Any = cut_config(self._kind, num_modules)
        self.hidden_size: int = self.config.hidden_size
        self.num_modules = num_modules
        types = getattr(self.config, "layer_types", None)
        self._layer_types: list[str] = types or ["full_attention"] * num_modules
        self._build()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> Self:
        """The modules in a checkpoint, on the target's device and in its dtype.

        Nothing else of the checkpoint is read. The head is in eval mode, and its weights take no
        gradient.

        Raises ModelError, listing what was expected and found, when the checkpoint has no such
        modules, belongs to another target, or has a quantization that cannot be read.
        """
        num_modules, names = cls._find(checkpoint, target)
        tensors = read_tensors(checkpoint, names, target.dtype)
        exact = TargetLayers(target).exact
        source = checkpoint.source
        return fill_head(lambda: cls(target, num_modules), tensors, target, source, exact=exact)

    @classmethod
    def fresh(
        cls, target: PreTrainedModel, num_modules: int = 1, *, initialize: Initialize = "target"
    ) -> Self:
        """New modules to be trained, on the target's device, in float32 and in train mode.

        initialize: "target" starts their decoder layers as the target's last one, where that
        attends and is not quantized; "random" does not. The rest is drawn from torch's generator
        as the target's class draws its own.

        Raises ConfigError for arguments out of range, and ModelError for a target whose layers do
        not run alone.
        """
        require_int("num_modules", num_modules, low=1)
        head = start_modules(lambda: cls(target, num_modules), target)
        copy_layers(head._blocks(), head._kind, initialize)
        return head

    @classmethod
    def _find(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> _Found:
        raise NotImplementedError

    def _build(self) -> None:
        raise NotImplementedError

    def _blocks(self) -> Iterator[nn.Module]:
        """The decoder layers of the target's kind, one in each module."""
        return iter(self.layers)

    @property
    def counts_axes(self) -> bool:
        """See ``TargetLayers``."""
        return self._kind.counts_axes

    def rotate(self, like: Tensor, position_ids: Tensor, module: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions int64 [B, T], or [3, B, T], for a module, as ``like``."""
        return self._kind.rotate(like, position_ids, self._layer_types[module])

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [...] to the target's embeddings [..., H]."""
        return self._ends.embed(token_ids)

    def forward(
        self, token_ids: Tensor, hidden: Tensor, **arguments: Unpack[HeadArguments]
    ) -> Tensor:
        """[B, T, H] after the last norm; see ``DraftHead``."""
        module, position_ids = arguments["module"], arguments["position_ids"]
        given = {
            "position_embeddings": self.rotate(hidden, position_ids, module),
            "attention_mask": arguments["attention_mask"],
            "position_ids": position_ids,
            **cache_keyword(self.layers[module], arguments["cache"]),
        }
        return self._run(module, self.embed(token_ids).to(hidden.dtype), hidden, given)

    def _run(
        self, module: int, embedded: Tensor, hidden: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., H], by the target's output layer."""
        return self._ends.logits(hidden)


class _Found(NamedTuple):
    """How many modules a checkpoint has, and the head's name of each tensor that is to be read."""

    num_modules: int
    names: dict[str, str]


class MtpHead(_TargetModules):
    """Modules run by transformers' ``MtpLayer``.

    With token embedding e and hidden state h, of the target's last layer after its final norm::

        y = layer(eh_proj([enorm(e); hnorm(h)]));   h' = shared_head.norm(y);   logits = output(h')

    h' is also what the next pass takes, as in transformers and SGLang. lmdeploy, and vLLM for
    GLM-4.5, pass on y instead, before the norm. vLLM also zeroes e at position 0; the others do
    not, and it is one key of a text.
    """

    @classmethod
    def _find(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> _Found:
        first: int = target.config.get_text_config(decoder=True).num_hidden_layers
        count = _count(checkpoint, "num_nextn_predict_layers")
        return _Found(count, _module_names(checkpoint, first, count))

    def _build(self) -> None:
        classes = self._kind.layer_class, self._kind.norm_class
        self.layers = nn.ModuleList(
            MtpLayer(self.config, *classes, index) for index in range(self.num_modules)
        )

    def _blocks(self) -> Iterator[nn.Module]:
        layers: Any = self.layers
        return (layer.mtp_block for layer in layers)

    def features(self, hidden_states: Tensor) -> Tensor:
        """See ``DraftHead``: the target's last hidden states, in the head's dtype."""
        first: Any = self.layers[0]
        return hidden_states.to(first.eh_proj.weight.dtype)

    def _run(
        self, module: int, embedded: Tensor, hidden: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        output: Tensor = self.layers[module](embedded, hidden, **arguments)
        return output


def _count(checkpoint: Checkpoint, name: str, default: object = None) -> int:
    """The number of modules in the configuration, at least 1."""
    config = checkpoint.config.get("text_config", checkpoint.config)
    count = config.get(name, default)
    if not isinstance(count, int) or count < 1:
        raise ModelError(
            f"{checkpoint.source}: config.json: expected {name} of at least 1, found "
            f"{count}; pass a checkpoint that has MTP modules"
        )
    return count


def _module_names(checkpoint: Checkpoint, first: int, count: int) -> dict[str, str]:
    """The head's name of each tensor of layers ``first`` to ``first + count - 1`` to be read."""
    names = {}
    for module in range(count):
        prefix = f"model.layers.{first + module}."
        found = [name.removeprefix(prefix) for name in checkpoint.matching(prefix)]
        if not found:
            layers = {name.split(".")[2] for name in checkpoint.matching("model.layers.")}
            listed = ", ".join(sorted(layers, key=int)) or "none"
            raise ModelError(
                f"{checkpoint.source}: expected an MTP module as {prefix}*, after "
                f"the {first} layers of the target, found layers {listed}; "
                "pass a checkpoint that was saved with its MTP modules"
            )
        kept = [name for name in found if not name.startswith(UNREAD)]
        names.update({prefix + name: f"layers.{module}.{_rename(name)}" for name in kept})
    return names


def _rename(name: str) -> str:
    """The name in an MtpLayer, where what is not the module's own belongs to its decoder layer."""
    for prefix, renamed in OWN_NAMES.items():
        if name.startswith(prefix):
            return renamed + name.removeprefix(prefix)
    return f"mtp_block.{name}"


# Prefixes of names, and what they are here: the first that fits counts.
PUBLISHED_NAMES = {"mtp.": ""}
SPECULATORS_NAMES = {
    "mtp_layers.0.token_layernorm.": "pre_fc_norm_embedding.",
    "mtp_layers.0.hidden_layernorm.": "pre_fc_norm_hidden.",
    "mtp_layers.0.input_proj.": "fc.",
    "mtp_layers.0.final_layernorm.": "norm.",
    "mtp_layers.": "layers.",
}


class QwenMtpHead(_TargetModules):
    """Decoder layers of the target's kind between a projection and a norm that they share.

    With token embedding e and hidden state h, of the target's last layer after its final norm::

        x = fc([pre_fc_norm_embedding(e); pre_fc_norm_hidden(h)])
        h' = norm(layer(x));   logits = output(h')

    h' is also what the next pass takes. The norms are of the target's class; Qwen's scale
    by 1 + weight. The equations are those of the serving engines (vLLM ``qwen3_next_mtp``, SGLang
    ``qwen3_next_mtp``).
    """

    @classmethod
    def _find(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> _Found:
        del target
        # Qwen3-Next's configuration does not say how many, and it has one.
        config = checkpoint.config.get("text_config", checkpoint.config)
        default = config.get("num_nextn_predict_layers", 1)
        count = _count(checkpoint, "mtp_num_hidden_layers", default)
        return _Found(count, _qwen_names(checkpoint))

    def _build(self) -> None:
        layer_class, norm_class = self._kind.layer_class, self._kind.norm_class
        width, eps = self.hidden_size, self.config.rms_norm_eps
        self.pre_fc_norm_embedding = norm_class(width, eps=eps)
        self.pre_fc_norm_hidden = norm_class(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(
            layer_class(self.config, index) for index in range(self.num_modules)
        )
        self.norm = norm_class(width, eps=eps)

    def features(self, hidden_states: Tensor) -> Tensor:
        """See ``DraftHead``: the target's last hidden states, in the head's dtype."""
        return hidden_states.to(self.fc.weight.dtype)

    def _run(
        self, module: int, embedded: Tensor, hidden: Tensor, arguments: dict[str, Any]
    ) -> Tensor:
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        output: Tensor = self.norm(self.layers[module](self.fc(torch.cat(both, -1)), **arguments))
        return output


def _qwen_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The head's name of each tensor to be read, by its name in the checkpoint."""
    published = dict.fromkeys(checkpoint.matching("mtp."), PUBLISHED_NAMES)
    saved = dict.fromkeys(checkpoint.matching("mtp_layers."), SPECULATORS_NAMES)
    if not published and not saved:
        parts = sorted({name.split(".")[0] for name in checkpoint.names})
        raise ModelError(
            f"{checkpoint.source}: expected an MTP module as mtp.*, or mtp_layers.* "
            f"in one of speculators, found only {', '.join(f'{part}.*' for part in parts)}; pass a "
            "checkpoint that was saved with its MTP module"
        )
    return {name: _renamed(name, table) for name, table in (published or saved).items()}


def _renamed(name: str, table: dict[str, str]) -> str:
    prefix = next(prefix for prefix in table if name.startswith(prefix))
    return table[prefix] + name.removeprefix(prefix)
