"""Loss and gradients equal those of speculators; skipped where that package is absent."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.export import save_head
from guided_spec.models.heads.mtp import QwenMtpHead
from guided_spec.models.loading import load_model
from guided_spec.training.algorithm import TargetStates, TrainingBatch, TrainingOutput
from guided_spec.training.algorithms.blocks import read_and_mask
from guided_spec.training.algorithms.heads import forward_head
from guided_spec.training.objective import Objective
from guided_spec.training.registry import find_algorithm
from guided_spec.training.target_rows import TargetHead
from tests.models.heads import mtp_checkpoints
from tests.models.heads.heads import SPECULATORS_CONFIG, write_eagle3
from tests.models.heads.test_qwen_mtp import build_speculators
from tests.models.tiny import build

pytestmark = pytest.mark.filterwarnings("ignore")  # another package's

LENGTH, STEPS, VOCAB = 12, 3, 64
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
LOSSES = {
    "kl": "kl_div",
    "reverse_kl": "rkl",
    "total_variation": "tv",
    "cross_entropy": "ce",
    "kl=0.7,total_variation=0.3": json.dumps({"kl_div": 0.7, "tv": 0.3}),
}


def make_batch(vocab_size: int) -> TrainingBatch:
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab_size, (1, LENGTH), generator=random)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    nothing = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32)
    rows, index = torch.zeros(1, LENGTH, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return TrainingBatch(tokens, mask, torch.tensor([LENGTH]), nothing, rows, index)


def run_ours(head: Any, target: Any, states: TargetStates, objective: Objective) -> TrainingOutput:
    for parameter in head.parameters():
        parameter.requires_grad_(requires_grad=True)
    batch = make_batch(target.config.get_text_config().vocab_size)
    return forward_head(head, TargetHead(target), batch, states, objective)


def check_gradients(ours: Any, theirs: Any, renamed: dict[str, str]) -> None:
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, parameter in ours.named_parameters():
        wanted = expected[renamed.get(name, name)]
        # Rounding of float32 in another order: attention has no mask here and a dense one there.
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=5e-6, msg=name)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("flags", [(), FLAGS], ids=["plain", "all flags"])
def test_eagle3(tmp_path: Path, loss: str, flags: tuple[str, ...]) -> None:
    core = pytest.importorskip("speculators.models.eagle3.core")
    target: Any = build("llama")
    target.save_pretrained(tmp_path / "target")
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    write_eagle3(
        tmp_path,
        target,
        layout="speculators",
        flags=dict.fromkeys(flags, True),
        changes={"speculators_config": {**SPECULATORS_CONFIG, "verifier": verifier}},
    )
    random = torch.Generator().manual_seed(9)
    states = TargetStates(
        torch.randn(1, LENGTH, 3, 32, generator=random),
        torch.randn(1, LENGTH, 32, generator=random),
    )
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    objective = Objective.parse(steps=STEPS, decay=0.8, loss=loss, masked=False)
    ours = run_ours(head, target, states, objective)
    theirs = core.Eagle3DraftModel.from_pretrained(tmp_path, config=eager(core, tmp_path))
    theirs.lm_head.weight.requires_grad_(requires_grad=True)  # it leaves this one as it was
    wanted = eagle3_loss(theirs.float(), states, loss)
    torch.testing.assert_close(ours.loss, wanted, rtol=1e-4, atol=1e-5)
    ours.loss.backward()
    wanted.backward()
    check_gradients(head, theirs, {})


def eager(core: Any, folder: Path) -> Any:
    config = core.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def eagle3_loss(model: Any, states: TargetStates, loss: str) -> Tensor:
    """As its trainer calls it: tokens one further than the states, targets beside them."""
    batch = make_batch(64)
    # Its mask stands at the place a token is predicted from; here it stands at the token.
    mask = torch.cat([batch.loss_mask[:, 2:], torch.zeros(1, 1, dtype=torch.bool)], 1)
    resolve = importlib.import_module("speculators.losses").resolve_loss_config
    result: Tensor = model(
        hidden_states=states.aux[:, :-1].flatten(2),
        input_ids=batch.token_ids[:, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.int64),
        loss_mask=mask,
        verifier_last_hidden_states=states.last[:, 1:],
        ttt_steps=STEPS,
        ttt_step_loss_decay=0.8,
        loss_config=resolve(LOSSES[loss], "eager"),
    )[1]
    return result


def test_mtp(tmp_path: Path) -> None:
    """One step: behind it speculators attends to recycled keys of other places.

    Drafting does not find those in its cache; `test_unroll` says what it finds.
    """
    pytest.importorskip("speculators")
    mtp_checkpoints.write(tmp_path, "qwen3_5")
    target: Any = load_model(tmp_path, device="cpu")
    theirs = build_speculators(tmp_path, target, 1)
    head = QwenMtpHead.from_checkpoint(Checkpoint.open(tmp_path), target)
    config = target.config.get_text_config()
    batch = make_batch(config.vocab_size)
    last = torch.randn(1, LENGTH, 32, generator=torch.Generator().manual_seed(9))
    states = TargetStates(torch.zeros(1, LENGTH, 0, 32), last)
    objective = Objective.parse(steps=1, decay=1.0, loss="token_cross_entropy", masked=False)
    ours = run_ours(head, target, states, objective)
    with torch.no_grad():
        normed = TargetHead(target).normed(last)
    wanted = theirs(input_ids=batch.token_ids, hidden_states=normed, loss_mask=batch.loss_mask)[1]
    torch.testing.assert_close(ours.loss, wanted, rtol=1e-4, atol=1e-5)
    ours.loss.backward()
    wanted.backward()
    renamed = {
        name: name.replace("layers.0.", "mtp_layers.0.")
        .replace("pre_fc_norm_embedding.", "mtp_layers.0.token_layernorm.")
        .replace("pre_fc_norm_hidden.", "mtp_layers.0.hidden_layernorm.")
        for name, _ in head.named_parameters()
    }
    renamed |= {"fc.weight": "mtp_layers.0.input_proj.weight"}
    renamed |= {"norm.weight": "mtp_layers.0.final_layernorm.weight"}
    check_gradients(head, theirs, renamed)


def make_trained(folder: Path, name: str, **options: Any) -> Any:
    """A fresh draft of the algorithm ``name``, saved for speculators beside its target."""
    torch.manual_seed(3)
    target: Any = build("llama", vocab_size=VOCAB)
    target.save_pretrained(folder / "target")
    target.config.name_or_path = str(folder / "target")
    vocabulary = DraftVocabulary(torch.arange(0, VOCAB, 2), VOCAB)
    model = find_algorithm(name).from_training_args(
        target.config, target=target, vocabulary=vocabulary, aux_layers=[1, 2], **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save_head(model.head, folder, layout="speculators", target=target, dtype=torch.float32)
    return model


def make_states() -> TargetStates:
    random = torch.Generator().manual_seed(9)
    aux = torch.randn(1, LENGTH, 2, 32, generator=random)
    return TargetStates(aux, torch.randn(1, LENGTH, 32, generator=random))


def load_theirs(core: Any, name: str, folder: Path) -> Any:
    config = vars(core)[f"{name}SpeculatorConfig"].from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return vars(core)[f"{name}DraftModel"].from_pretrained(folder, config=config).float().eval()


def call_theirs(core: Any, monkeypatch: pytest.MonkeyPatch, model: Any, **inputs: Any) -> Any:
    """What its loss is made of, by the names that it has there."""
    found: dict[str, Any] = {}

    def compute_metrics(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        names = ("logits", "targets", "confidence")
        found.update(dict(zip(names, args, strict=False)), **kwargs)
        return torch.zeros(()), {}

    monkeypatch.setattr(core, "compute_metrics", compute_metrics)
    length = inputs["input_ids"].shape[1]
    document = torch.zeros(1, length, dtype=torch.int64)
    model(loss_mask=torch.ones(1, length), document_ids=document, **inputs)
    return found


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_dspark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Scores and confidence of each place, so loss and gradients; it averages otherwise."""
    core = pytest.importorskip("speculators.models.dspark.core")
    options = {"ttt_steps": STEPS, "num_layers": 2, "markov_rank": 4, "markov_head_type": kind}
    model = make_trained(tmp_path, "dspark", confidence_weight=0.5, **options)
    states, theirs = make_states(), load_theirs(core, "DSpark", tmp_path)
    theirs.lm_head.weight.requires_grad_(requires_grad=True)
    last = 8  # its blocks begin at 0 to 8, and end within the text; ours where a token is trained
    batch = make_batch(VOCAB)
    mask = torch.zeros_like(batch.loss_mask)
    mask[:, 2 : last + 1] = True
    objective = Objective.parse(steps=STEPS, decay=0.8, loss="kl", masked=False)
    ours = model(batch._replace(loss_mask=mask), states, objective=objective)
    found = call_theirs(
        core,
        monkeypatch,
        theirs,
        hidden_states=states.aux.flatten(2),
        input_ids=batch.token_ids,
        verifier_last_hidden_states=states.last,
        max_anchors=LENGTH - STEPS,
    )
    shape = (LENGTH - STEPS, STEPS, -1)
    logits, targets = (found[name].view(shape) for name in ("logits", "targets"))
    confidence, wanted = found["confidence"].view(shape[:2]), torch.zeros(())
    for depth in range(STEPS):
        rows = slice(1, last - depth)
        q, p = logits[rows, depth].log_softmax(-1), targets[rows, depth].log_softmax(-1)
        overlap = p.exp().minimum(q.exp()).sum(-1).detach()
        doubt = functional.binary_cross_entropy_with_logits(confidence[rows, depth], overlap)
        wanted = wanted + 0.8**depth * ((p.exp() * (p - q)).sum(-1).mean() + 0.5 * doubt)
    torch.testing.assert_close(ours.loss, wanted, rtol=1e-5, atol=1e-5)
    ours.loss.backward()
    wanted.backward()
    check_gradients(model.head, theirs, {})


def test_p_eagle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of every place that it draws."""
    core = pytest.importorskip("speculators.models.peagle.core")
    model = make_trained(tmp_path, "p_eagle", num_layers=2, mask_token_id=5)
    states, theirs = make_states(), load_theirs(core, "PEagle", tmp_path)
    tokens = make_batch(VOCAB).token_ids
    starts = torch.arange(1, LENGTH + 1)[None]
    with torch.no_grad():
        found = call_theirs(
            core,
            monkeypatch,
            theirs,
            hidden_states=states.aux[:, :-1].flatten(2),
            input_ids=tokens[:, 1:],
            verifier_last_hidden_states=states.last[:, 1:],
            num_depths=4,
            down_sample_ratio=1.0,
        )
        read, masked = read_and_mask(model.head, tokens, starts, 4, states.aux.flatten(2))
        outputs = torch.cat([read.unsqueeze(2), masked], 2)
        place, depth = found["anchor_pos"], found["depth"]
        ours = model.head.logits(outputs[0, place, depth])
    assert (depth[place >= 0].bincount() >= LENGTH - 4).all()
    # It draws masks before a text too, which have nothing to go by.
    theirs_at = found["logits"][0, place >= 0]
    torch.testing.assert_close(ours[place >= 0], theirs_at, rtol=1e-5, atol=1e-5)
