from __future__ import annotations

from benchmarks.schemas.new import cases_of, follow, prepare
from guided_spec.bundled import bundled_asset
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer


def test_texts_are_taken_by_their_schemas() -> None:
    tokenizer = load_tokenizer(bundled_asset("target"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    backend, endings = BackendChoice("auto", vocabulary), EndingsCache(vocabulary)
    pipeline = GrammarPipeline(backend, GrammarLimits(), endings=endings)
    for name in ("documents", "json-unique"):
        cases = cases_of(name, 3)
        assert len({case.spec for case in cases}) == 3
        assert all(seconds > 0 for seconds in prepare(cases, pipeline))
        for case in cases:
            token_ids = tokenizer(case.text, add_special_tokens=False)["input_ids"]
            compiled = backend.compile(case.spec)
            for grammar in (compiled, endings.bound(compiled, 600, is_required=True)):
                assert follow(grammar, token_ids, vocabulary.vocab_size) > 0
