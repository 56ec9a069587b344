"""Every algorithm learns one batch by heart, and what it exports drafts what it learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from guided_spec import SamplingParams
from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.loading import load_model
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.training.algorithm import TrainingBatch, TrainingOutput
from guided_spec.training.features import OnlineFeatures
from guided_spec.training.registry import ALGORITHMS, algorithm_names, find_algorithm, register
from guided_spec.training.run import train
from tests.models.heads.block_checkpoints import DIALECTS, write_block
from tests.models.heads.heads import write_eagle3
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, make_llm, tiny_tokenizer
from tests.training.test_memory import PeakMemory
from tests.training.toy_algorithm import make_options, write_documents, write_target

STEPS = 4

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle": ("eagle", "llama", {}),
    "eagle3": ("eagle3", "llama", {}),
    "eagle3 of two layers": ("eagle3", "qwen3", {"num_layers": 2, "norm_output": True}),
    "dflash": ("dflash", "llama", {"num_layers": 2, "anchors": 5}),
    "dflash of all tokens": ("dflash", "qwen3", {"num_layers": 1}),
    "dspark": ("dspark", "llama", {"num_layers": 2, "anchors": 5, "markov_rank": 8}),
    "dspark of all tokens": (
        "dspark",
        "qwen3",
        {"num_layers": 1, "markov_rank": 8, "markov_head_type": "gated"},
    ),
    "p_eagle": ("p_eagle", "llama", {"anchors": 5}),
    "mtp of Qwen": ("mtp", "qwen3_5", {}),
    "mtp of DeepSeek": ("mtp", "deepseek_v3", {}),
    "two modules of GLM": ("mtp", "glm4_moe", {"num_modules": 2}),
    "mtp of Llama": ("mtp", "llama", {"form": "qwen"}),
    "draft_model": (
        "draft_model",
        "llama",
        {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    ),
}


class Case(NamedTuple):
    """A draft in training, its target, a batch, and the options it was made with."""

    model: Any
    target: PreTrainedModel
    batch: TrainingBatch
    options: dict[str, Any]
    name: str
    key: str

    def run(self, *, masked: bool = False) -> TrainingOutput:
        states = OnlineFeatures(self.target, self.model.feature_layers)(self.batch)
        kwargs, _ = self.model.get_trainer_kwargs(masked=masked, **self.options)
        output: TrainingOutput = self.model(self.batch, states, **kwargs)
        return output


def greedy_texts(target: PreTrainedModel, count: int, length: int) -> torch.Tensor:
    """The target's own greedy texts, as a run that regenerates its answers trains on."""
    model: Any = target
    prompts = torch.randint(2, VOCAB_SIZE, (count, 3), generator=torch.Generator().manual_seed(2))
    texts: torch.Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length - 3,
        min_new_tokens=length - 3,
        do_sample=False,
        pad_token_id=0,
    )
    return texts


def make_case(folder: Path, key: str, **further: Any) -> Case:
    name, kind, changes = CASES[key]
    changes = {**changes, **further}
    built = build(kind, vocab_size=VOCAB_SIZE)
    built.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    target = load_model(folder, device="cpu")
    target.requires_grad_(requires_grad=False)
    tokens = greedy_texts(target, count=3, length=12)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :3] = False
    batch = TrainingBatch(
        tokens,
        mask,
        torch.full((3,), 12),
        torch.full((1, num_mask_words(VOCAB_SIZE)), -1, dtype=torch.int32),
        torch.zeros_like(tokens),
        torch.arange(3),
    )
    algorithm = find_algorithm(name)
    options = {"ttt_steps": STEPS, "loss": "cross_entropy", **changes}
    vocabulary = None
    if algorithm.reduced_vocabulary and not key.endswith("of all tokens"):
        known = sorted(set(range(0, VOCAB_SIZE, 2)) | set(tokens.flatten().tolist()))
        vocabulary = DraftVocabulary(torch.tensor(known), VOCAB_SIZE)
    torch.manual_seed(0)
    config = target.config.get_text_config(decoder=True)
    model = algorithm.from_training_args(config, target=target, vocabulary=vocabulary, **options)
    return Case(model, target, batch, options, name, key)


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = make_case(tmp_path_factory.mktemp("target"), request.param)
    optimizer = torch.optim.Adam(case.model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = case.run().loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        optimizer.step()
    return case


@pytest.mark.slow
def test_one_batch_by_heart(trained: Case) -> None:
    with torch.no_grad():
        output = trained.run()
    for depth in range(STEPS):
        metric = output.metrics[f"accept_{depth}"]
        assert metric.count > 0
        assert metric.total / metric.count > 0.95
    tokens = trained.batch.token_ids
    for depth in range(STEPS):
        found = output.output[depth][:, : 10 - depth]
        assert ((found == tokens[:, 2 + depth :]) | (found == -1)).float().mean() > 0.95


def test_the_target_is_not_touched(trained: Case) -> None:
    owned = {id(p) for p in trained.model.parameters()}
    assert not owned & {id(p) for p in trained.target.parameters()}
    assert all(p.grad is None for p in trained.target.parameters())
    assert all(p.dtype == torch.float32 for p in trained.model.parameters())
    assert {id(p) for p in trained.model.layers.parameters()} <= owned


def test_every_parameter_is_trained(trained: Case) -> None:
    trained.model.zero_grad()
    trained.run().loss.backward()
    idle = [name for name, p in trained.model.named_parameters() if p.grad is None]
    # Routers' biases are moved by the balance of the experts, not by gradients.
    assert [name for name in idle if "e_score_correction_bias" not in name] == []


def test_what_is_exported_drafts_what_was_learnt(trained: Case, tmp_path: Path) -> None:
    """In every layout; the prompts are the batch's, and nearly all drafts stay."""
    for layout in trained.model.layouts:
        folder = tmp_path / layout
        if trained.options.get("num_layers") == 2 and layout == "safeailab":
            with pytest.raises(ModelError, match="safeailab': it needs .*; save it as"):
                trained.model.export(folder, layout=layout)
            continue
        trained.model.export(folder, layout=layout)
        with make_llm(trained.target, "auto", draft=str(folder)) as llm:
            prompts = [row[:3].tolist() for row in trained.batch.token_ids]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
        for output, row in zip(outputs, trained.batch.token_ids, strict=True):
            assert list(output.token_ids) == row[3:].tolist()
            assert sum(output.stats.accepted) >= 0.8 * sum(output.stats.drafted) > 0


def test_a_state_dict_is_exported_instead(trained: Case, tmp_path: Path) -> None:
    """As a sharded run has it: the module's own weights may be anything."""
    layout = trained.model.layouts[0]
    state = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    trained.model.export(tmp_path / "own", layout=layout)
    changed = {
        name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in state.items()
    }
    trained.model.export(tmp_path / "given", layout=layout, tensors=state)
    trained.model.export(tmp_path / "changed", layout=layout, tensors=changed)
    own, given, other = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "given", "changed")
    )
    assert own == given
    assert own != other


def test_masks_change_the_loss_only_when_asked(trained: Case) -> None:
    legal = torch.ones(2, VOCAB_SIZE, dtype=torch.bool)
    legal[1] = False
    legal[1, trained.batch.token_ids.flatten().unique()] = True
    rows = trained.batch.loss_mask.long()
    constrained = trained._replace(
        batch=trained.batch._replace(bitmask=pack_bitmask(legal), mask_rows=rows)
    )
    with torch.no_grad():
        plain = trained.run()
        metrics_only, in_the_loss = constrained.run(), constrained.run(masked=True)
    torch.testing.assert_close(metrics_only.loss, plain.loss)
    assert not in_the_loss.loss.isclose(plain.loss, rtol=1e-3)
    assert metrics_only.metrics["accept_1"] == in_the_loss.metrics["accept_1"]


def test_starting_from_a_checkpoint(trained: Case, tmp_path: Path) -> None:
    layout = trained.model.layouts[0]
    trained.model.export(tmp_path, layout=layout)
    kind = type(trained.model)
    again = kind.from_training_args(
        trained.target.config.get_text_config(decoder=True),
        target=trained.target,
        vocabulary=None,
        **{**trained.options, "init": str(tmp_path)},
    )
    for (name, p), (other, q) in zip(
        trained.model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other
        assert q.requires_grad == p.requires_grad
        torch.testing.assert_close(q, p.to(torch.bfloat16).float(), rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "p_eagle"])
def test_blocks_are_drawn_the_same_again_where_a_run_goes_on(tmp_path: Path, name: str) -> None:
    """Two anchors a document, another two in each step; interrupted within an epoch."""
    target, data = write_target(tmp_path / "target"), tmp_path / "documents.jsonl"
    write_documents(data, 12)
    own = {"num_layers": 1, "ttt_steps": 3, "anchors": 2}
    settings = {"algorithm": name, "batch_tokens": 600, "save_every": 2}
    for part, steps in (("whole", 5), ("parts", 2), ("parts", 5)):
        resume = part == "parts" and steps == 5
        changes = {**settings, "max_steps": steps, "resume": resume}
        train(make_options(target, str(data), tmp_path / part, **changes), own)
    saved = tmp_path / "parts" / "checkpoints" / "step_000002" / "progress.json"
    assert json.loads(saved.read_text())["progress"]["batch"] > 0  # within an epoch
    whole, parts = (load_file(tmp_path / part / "model.safetensors") for part in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_step_draws_other_blocks_than_the_one_before(tmp_path: Path) -> None:
    case = make_case(tmp_path, "dflash")
    first, same = case.run(), case.run()
    assert torch.equal(first.output, same.output)
    kept = (first.output[0] >= 0).sum(1)
    assert kept.tolist() == [5, 5, 5]
    with torch.no_grad():
        case.model.head.norm.weight += 1e-3
    moved = case.run().output
    assert ((moved[0] >= 0) != (first.output[0] >= 0)).any()


@pytest.mark.parametrize(
    ("name", "kind", "own", "message"),
    [
        ("dflash", "dflash", {"anchors": 0}, "anchors=0: must be at least 1"),
        (
            "dflash",
            "dflash",
            {"ttt_steps": 8},
            "ttt_steps=8: must be at most 7, the tokens of a block of init=",
        ),
        ("dflash", "dspark", {}, "init=.*expected a DFlash head, found one of another kind"),
        ("dspark", "dflash", {}, "init=.*expected a DSpark head, found one of another kind"),
        ("dflash", "domino", {}, "init=.*expected a DFlash head, found one of another kind"),
        ("dflash", "lilicorr", {}, "init=.*expected a DFlash head, found one of another kind"),
        ("dspark", "rnn", {}, "init=.*expected a DSpark head, found one of another kind"),
        ("p_eagle", "eagle3", {}, "init=.*expected a P-EAGLE head, found one without mask_hidden"),
        ("dspark", "dspark", {"confidence_weight": -1.0}, "confidence_weight=-1.0: must be at"),
    ],
)
def test_blocks_that_are_not_trained(
    tmp_path: Path, name: str, kind: str, own: dict[str, Any], message: str
) -> None:
    target = build("llama", vocab_size=VOCAB_SIZE)
    if kind == "eagle3":
        write_eagle3(tmp_path, target)
    elif kind == "rnn":
        write_block(tmp_path, target, "dspark", "deepseek", markov_head_type=kind)
    else:
        write_block(tmp_path, target, kind, DIALECTS[kind][-1])
    config = {"init": str(tmp_path), **own}
    with pytest.raises((ConfigError, ModelError), match=message):
        find_algorithm(name).from_training_args(
            target.config, target=target, vocabulary=None, **config
        )


@pytest.fixture
def _registry() -> Iterator[None]:
    kept = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(kept)


@pytest.mark.usefixtures("_registry")
def test_registry() -> None:
    @register("mine")
    class Mine:
        pass

    assert find_algorithm("mine") is Mine
    assert {"dflash", "draft_model", "dspark", "eagle", "eagle3", "mine", "mtp"} <= {
        *algorithm_names()
    }
    with pytest.raises(ConfigError, match="name='mine': is taken"):
        register("mine")(int)
    with pytest.raises(ConfigError, match="must be one of dflash, draft_model, dspark"):
        find_algorithm("eagle4")


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("eagle3 of two layers", {}),
        ("dflash", {}),
        ("dspark", {"num_layers": 3}),
        ("p_eagle", {"num_layers": 2}),
        ("two modules of GLM", {}),
    ],
)
def test_gradient_checkpointing(key: str, own: dict[str, Any], tmp_path: Path) -> None:
    """The same loss and gradients, and less is held between the passes."""
    losses, gradients, held = [], [], []
    for again in (False, True):
        case = make_case(tmp_path / str(again), key, gradient_checkpointing=again, **own)
        case.model.train()
        with PeakMemory() as memory:
            loss = case.run().loss
            held.append(memory.held)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in case.model.parameters() if p.grad is not None])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert held[1] < held[0] / 4
