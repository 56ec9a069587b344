"""Tests of the bundled model pair: its data, a micro training run and the shipped folders."""

import json
import random
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.bundled_models.__main__ import main
from tools.bundled_models.configs import tiny_config
from tools.bundled_models.corpus import CorpusConfig, batches
from tools.bundled_models.documents import Document, Split, sample_document
from tools.bundled_models.domains import DOMAINS, FIELDS
from tools.bundled_models.evaluate import count_steps, field_accuracy
from tools.bundled_models.styles import HELD_LABELLED, LABELLED
from tools.bundled_models.tools import SLOTS, TOOLS
from tools.bundled_models.train import token_weights, use_causal_attention

ASSETS = Path(str(files("guided_spec") / "assets"))
SIZE_LIMIT = 40_000_000  # 10 more: a model that reads pictures


def _check(document: Document) -> None:
    if document.schema is not None:
        jsonschema.validate(json.loads(document.answer), document.schema)
        assert list(json.loads(document.answer)) == document.schema["required"]
    else:
        assert document.regex is not None
        assert re.fullmatch(document.regex, document.answer)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_satisfy_their_schema_or_pattern(split: Split) -> None:
    rng = random.Random(split)
    for _ in range(400):
        _check(sample_document(rng, split))


def test_generator_is_deterministic() -> None:
    first = [sample_document(random.Random(seed)) for seed in range(50)]
    again = [sample_document(random.Random(seed)) for seed in range(50)]
    assert first == again


def test_held_out_keys_and_templates_are_disjoint_from_training() -> None:
    for field in FIELDS.values():
        assert not set(field.keys) & set(field.held_keys)
        if field.sentences:
            assert field.held_sentence not in field.sentences[:-1]
    for domain in DOMAINS.values():
        assert domain.openings[-1] not in domain.openings[:-1]
        assert set(domain.fields) <= set(FIELDS)
    for tool in TOOLS:
        assert tool.requests[-1] not in tool.requests[:-1]
    for keys, _ in SLOTS.values():
        assert keys[-1] not in keys[:-1]
    assert not set(HELD_LABELLED) & set(LABELLED)


def test_record_schemas_of_the_two_splits_differ() -> None:
    kinds = set(DOMAINS)
    rng = random.Random(5)
    trained = {
        _signature(d) for d in (sample_document(rng) for _ in range(3000)) if d.kind in kinds
    }
    held = [sample_document(rng, "heldout") for _ in range(300)]
    seen = [_signature(d) in trained for d in held if d.kind in kinds]
    assert sum(seen) < 0.03 * len(seen)


def _signature(document: Document) -> str:
    assert document.schema is not None
    return " ".join(sorted(document.schema["properties"]))


def test_steps_of_greedy_speculation() -> None:
    assert count_steps([True] * 12, 5) == 2
    assert count_steps([False] * 3, 5) == 3
    assert count_steps([True, False, True, True], 5) == 2


def test_field_accuracy_counts_leaves() -> None:
    document = Document("x", "p", '{"a": 1, "b": ["c", "d"]}', schema={})
    found = field_accuracy([document, document], [document.answer, '{"a": 1, "b": ["c"]}'])
    assert found.fields == pytest.approx(5 / 6)
    assert found.documents == pytest.approx(0.5)
    assert field_accuracy([document], ['{"a": ']).fields == 0


def test_weights_leave_padding_out() -> None:
    weights = token_weights(
        torch.zeros(1, 5, dtype=torch.int32), torch.tensor([2]), torch.tensor([4])
    )
    assert weights.tolist() == [[pytest.approx(0.1), 1.0, 1.0, 0.0]]


def test_training_attention_equals_the_stock_model() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(64)).eval()
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        stock = model(input_ids=ids).logits
        use_causal_attention(model)
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, stock)


def test_batches_do_not_depend_on_workers() -> None:
    config = {"tokenizer_file": str(ASSETS / "target/tokenizer.json"), "tokens": 1024, "shard": 16}
    alone = list(batches(CorpusConfig(**config), 2))  # type: ignore[arg-type]
    again = list(batches(CorpusConfig(**config, workers=1), 2))  # type: ignore[arg-type]
    assert len(alone) == len(again) > 2
    for first, second in zip(alone, again, strict=True):
        np.testing.assert_array_equal(first.ids, second.ids)


def test_micro_run_writes_loadable_folders(tmp_path: Path) -> None:
    main(
        f"--output {tmp_path} --tiny --device cpu --target-steps 2 --draft-steps 2 "
        "--batch-tokens 1024 --tokenizer-documents 1500 --heldout-documents 2 "
        "--vocab-size 640 --shard 16".split()
    )
    for name in ("target", "draft"):
        model = LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.vocab_size == 640
    assert "| parameters |" in (tmp_path / "README.md").read_text()
    assert len((tmp_path / "heldout.jsonl").read_text().splitlines()) == 2


def test_shipped_pair_loads_and_shares_its_tokenizer() -> None:
    target, draft = (LlamaForCausalLM.from_pretrained(ASSETS / n) for n in ("target", "draft"))
    assert target.dtype == draft.dtype == torch.bfloat16
    assert target.config.head_dim == 128
    assert (target.config.num_attention_heads, target.config.num_key_value_heads) == (8, 2)
    assert target.config.vocab_size == draft.config.vocab_size == 4096
    contents = [(ASSETS / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert contents[0] == contents[1]
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()) <= SIZE_LIMIT


def test_shipped_tokenizer_and_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    assert len(tokenizer) == 4096
    every_byte = "".join(map(chr, range(1, 1500))) + "😀 123"
    assert tokenizer.decode(tokenizer(every_byte)["input_ids"]) == every_byte
    assert len(tokenizer("2025")["input_ids"]) == 4
    message = [{"role": "user", "content": "Call Ada."}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "Call Ada.\n\nJSON: "
    message = [{"role": "user", "content": "3 May 2025\n\nDate: "}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "3 May 2025\n\nDate: "


def test_held_out_file_is_valid() -> None:
    file = ASSETS / "heldout.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 300
    assert file.stat().st_size <= 400_000
    for line in lines:
        _check(Document(**json.loads(line)))
