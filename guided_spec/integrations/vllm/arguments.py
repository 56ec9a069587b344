"""The arguments of ``LLM(engine="vllm")`` as vLLM's own; what does not translate is refused.

Also as the command line of vLLM's own server, for ``guided-spec serve --engine vllm``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from guided_spec.bundled import bundled_asset
from guided_spec.config import EngineConfig
from guided_spec.engine.runner import Wanted
from guided_spec.errors import ConfigError, UnknownOptionError
from guided_spec.integrations.vllm.drafts import lookup
from guided_spec.integrations.vllm.plugin import (
    ENDINGS,
    FEATURES,
    GRAPHS,
    TABLES,
    VARIABLE,
    installed_root,
    requested,
    require_plugin,
)
from guided_spec.kinds import did_you_mean

RENAMED = {
    "data_parallel_size": "data_parallel_size",
    "dtype": "dtype",
    "kv_dtype": "kv_cache_dtype",
    "kv_memory_bytes": "kv_cache_memory_bytes",
    "max_batch_size": "max_num_seqs",
    "max_model_len": "max_model_len",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "prefill_tokens": "max_num_batched_tokens",
    "prefix_cache": "enable_prefix_caching",
    "revision": "revision",
    "tensor_parallel_size": "tensor_parallel_size",
    "tokenizer": "tokenizer",
    "trust_remote_code": "trust_remote_code",
}
"""Options of ``LLM``, and what vLLM calls them."""

_OURS = ("compile_threads", "grammar_cache_bytes", "grammar_limits", "num_draft_tokens")
# Options that vLLM lacks: the values that change nothing, and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attn_implementation": ((), "pass engine_options={'attention_backend': ...}"),
    "capture": ((True,), "pass engine_options={'enforce_eager': True}"),
    "device": (("cuda",), "vLLM takes what CUDA_VISIBLE_DEVICES leaves it: set that"),
    "device_map": ((), "pass tensor_parallel_size or pipeline_parallel_size"),
    "device_table_bytes": ((None,), "tables may take a 64th of the device: leave it out"),
    "drafting": (("auto", "always"), "vLLM always drafts: leave it out"),
    "grammar_backend": (("auto", "xgrammar"), "the plugin needs vLLM's xgrammar: leave it out"),
    "grammar_tables": (("auto", "off"), "a grammar that comes again gets a table: leave it out"),
    "kernels": (("auto",), "vLLM has its own: leave it out"),
    "loras": (({},), "adapters of requests need engine='guided_spec'"),
    "max_forced_tokens": ((), "drafts have num_draft_tokens at most: leave it out"),
    "quantization_config": ((), "pass engine_options={'quantization': ...}"),
    "tp_plan": ((), "pass tensor_parallel_size"),
    "verifier": (("rejection",), "vLLM verifies by rejection: leave it out"),
}
_TAKEN = {theirs: ours for ours, theirs in RENAMED.items()} | {
    "model": "model",
    "spec_method": "proposer",
    "spec_model": "draft",
    "spec_tokens": "num_draft_tokens",
}
_WIDER = ("kv_cache_dtype",)  # for which vLLM knows more values
_TAKEN_OF_DRAFTS = {
    "method": "proposer",
    "model": "draft",
    "num_speculative_tokens": "num_draft_tokens",
}

NO_DRAFTS = "none"
LOOKUP = "chain:grammar_forced+ngram"
FORCED = "chain:grammar_forced+"
METHODS: dict[str, str | None] = {
    "auto": None,  # what vLLM finds in the draft's configuration
    "dflash": "dflash",
    "draft_model": "draft_model",
    "dspark": "dspark",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
}
"""Proposers with a model: what vLLM calls their methods."""
_NATIVE, _CUSTOM = "ngram_gpu", "custom_class"  # of vLLM's new runner; of its older one
_GUIDED = "guided_spec.integrations.vllm.proposer.GuidedProposer"
_EXACT_METHODS = (None, "standard", "block")


class Arguments(NamedTuple):
    """engine: of vLLM's AsyncEngineArgs, but ``structured_outputs_config`` is still a dict.

    features: of the plugin. proposer: its name. config: this package's view of them.
    """

    engine: dict[str, Any]
    features: tuple[str, ...]
    proposer: str
    config: EngineConfig


def read_arguments(wanted: Wanted, known: Collection[str] | None, *, has_lookup: bool) -> Arguments:
    """Translate them.

    known: the arguments of vLLM's AsyncEngineArgs; None leaves unknown ones to vLLM. has_lookup:
        whether vLLM's new runner has a drafter without a model, see ``lookup``.

    Raises ConfigError for what vLLM does not have or would not honour.
    """
    model = _path("model", bundled_asset("target") if wanted.model is None else wanted.model)
    given = {name: value for name, value in wanted.options.items() if value is not None}
    own = {field.name for field in fields(EngineConfig)}
    for name, value in given.items():
        _require_option(name, value, known or ())
    config = EngineConfig(**{name: value for name, value in given.items() if name in own})
    extra = dict(wanted.engine_options)
    for name, value in extra.items():
        _require_engine_option(name, value, {"model", *given})
        _require_known(name, value, known)
    engine: dict[str, Any] = {"model": model}
    engine |= {RENAMED[name]: value for name, value in given.items() if name in RENAMED}
    if "tokenizer" in engine:
        engine["tokenizer"] = _path("tokenizer", engine["tokenizer"])
    if isinstance(dtype := engine.get("dtype"), torch.dtype):
        engine["dtype"] = str(dtype).removeprefix("torch.")
    named = wanted.proposer or (NO_DRAFTS if wanted.draft is None else FORCED + "auto")
    proposer, depth = named if config.num_draft_tokens else NO_DRAFTS, config.num_draft_tokens
    drafts = speculative(named, wanted.draft, depth, has_lookup=has_lookup) if depth else None
    more = dict(_mapping("speculative_config", extra.pop("speculative_config", {})))
    _require_drafts(more, proposer)
    engine["speculative_config"] = None if drafts is None else {**drafts, **more}
    outputs = _mapping("structured_outputs_config", extra.pop("structured_outputs_config", {}))
    engine["structured_outputs_config"] = {"backend": "xgrammar", **_own_outputs(outputs)}
    asked = _features(proposer, drafts, more, has_tables=config.grammar_tables != "off")
    if not _names_graphs(extra.get("compilation_config")):
        asked |= {GRAPHS}
    features = tuple(name for name in FEATURES if name in asked)
    engine |= extra
    _require_drafter_of_ranks(engine, proposer, has_lookup=has_lookup)
    return Arguments(engine, features, proposer, config)


def speculative(
    proposer: str, draft: Any, num_draft_tokens: int, *, has_lookup: bool
) -> dict[str, Any] | None:
    """vLLM's ``speculative_config``; None for a proposer that drafts nothing.

    In front of a head, and of the n-grams of the new runner, ``chain:grammar_forced+`` is a feature
    of the plugin. Raises ConfigError for
    a proposer that vLLM does not have.
    """
    if proposer == NO_DRAFTS:
        _refuse_draft(proposer, draft)
        return None
    if proposer in (LOOKUP, "ngram"):
        _refuse_draft(proposer, draft)
        own = {"method": "ngram"}
        if proposer == LOOKUP:
            own = {"method": _NATIVE} if has_lookup else {"method": _CUSTOM, "model": _GUIDED}
        return {**own, "num_speculative_tokens": num_draft_tokens}
    name = proposer.removeprefix(FORCED)
    if name not in METHODS:
        names = f"{NO_DRAFTS}, ngram, {LOOKUP}, {', '.join(METHODS)}, or {FORCED}eagle3"
        meant = did_you_mean(proposer, [NO_DRAFTS, "ngram", LOOKUP, *METHODS])
        raise ConfigError("proposer", proposer, f"engine='vllm' has {names}{meant}")
    found: dict[str, Any] = {"num_speculative_tokens": num_draft_tokens}
    if METHODS[name] is not None:
        found["method"] = METHODS[name]
    if name == "mtp":
        _refuse_draft(proposer, draft)
        return found
    if draft is None:
        raise ConfigError("draft", None, f"proposer={proposer!r} needs one: a hub id or a folder")
    return {**found, "model": _path("draft", draft)}


def _require_drafter_of_ranks(
    engine: Mapping[str, Any], proposer: str, *, has_lookup: bool
) -> None:
    """Over pipeline ranks vLLM's older runner fails with any drafter, at its first request."""
    drafts, size = engine["speculative_config"], engine.get("pipeline_parallel_size", 1)
    is_old = drafts is not None and drafts.get("method") in (_CUSTOM, "ngram") and not has_lookup
    if is_old and size > 1:
        fix = f"this release of vLLM has no {proposer!r} there: pass 1, or proposer='none'"
        raise ConfigError("pipeline_parallel_size", size, fix)


def _refuse_draft(proposer: str, draft: Any) -> None:
    if draft is not None:
        fix = f"proposer={proposer!r} drafts without it: leave it out, or name another proposer"
        raise ConfigError("draft", draft, fix)


def _features(
    proposer: str, drafts: Mapping[str, Any] | None, more: Mapping[str, Any], *, has_tables: bool
) -> set[str]:
    """The plugin's features: those of the environment, and those that the drafts need."""
    asked = {"counts", ENDINGS, *requested()}
    method = None if drafts is None else drafts.get("method")
    if drafts is not None and method not in (_CUSTOM, _NATIVE, "ngram"):
        asked |= {"drafts", TABLES} if has_tables else {"drafts"}
    if drafts is not None and method != _CUSTOM and proposer.startswith(FORCED):
        asked.add("forced")
    if more.get("draft_sample_method") == "probabilistic":
        asked.add("exact")
    return asked


def _names_graphs(compilation: Any) -> bool:
    """Whether vLLM's ``compilation_config`` may say which graphs there are."""
    if isinstance(compilation, Mapping):
        return compilation.get("cudagraph_mode") is not None
    return compilation is not None  # an object of vLLM's, which the caller has made


def _require_option(name: str, value: Any, theirs: Collection[str]) -> None:
    """theirs: the arguments of vLLM, as far as they are known."""
    if name in RENAMED or name in _OURS:
        return
    if name not in _REFUSED:
        listed = f"the options are {', '.join(sorted([*RENAMED, *_OURS]))}"
        if name in theirs and name not in _TAKEN:
            fix = f"is vLLM's own; pass engine_options={{{name!r}: ...}}"
            raise UnknownOptionError(name, value, fix)
        meant = did_you_mean(name, [*RENAMED, *_OURS, *_REFUSED]) or ";"
        fix = f"is no option{meant} {listed}; vLLM's others go into engine_options"
        raise UnknownOptionError(name, value, fix)
    harmless, fix = _REFUSED[name]
    if not any(value is one or value == one for one in harmless):
        raise ConfigError(name, value, f"not under engine='vllm': {fix}")


def _require_engine_option(name: str, value: Any, given: Collection[str]) -> None:
    """One that has another name here is passed by that; one of the same name only once."""
    ours = _TAKEN.get(name)
    if ours is not None and (ours in given or (ours != name and name not in _WIDER)):
        raise ConfigError(f"engine_options[{name!r}]", value, f"pass {ours}, outside of it")


def _require_known(name: str, value: Any, known: Collection[str] | None) -> None:
    if known is not None and name not in known:
        fix = did_you_mean(name, known) or "; see its AsyncEngineArgs"
        reason = f"this release of vLLM has no such argument{fix}"
        raise ConfigError(f"engine_options[{name!r}]", value, reason)


def _require_drafts(more: Mapping[str, Any], proposer: str) -> None:
    """Raise ConfigError for keys of ``speculative_config`` that clash with the proposer."""
    for name, value in more.items():
        argument = f"engine_options['speculative_config'][{name!r}]"
        if name in _TAKEN_OF_DRAFTS:
            raise ConfigError(argument, value, f"pass {_TAKEN_OF_DRAFTS[name]}, outside of it")
        if proposer == NO_DRAFTS:
            raise ConfigError(argument, value, "nothing is drafted: name a proposer")
    method = more.get("rejection_sample_method")
    if method not in _EXACT_METHODS:
        fix = "it changes what texts are likely: only 'standard' and 'block' do not"
        raise ConfigError("rejection_sample_method", method, fix)


def _own_outputs(outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    backend = outputs.get("backend", "xgrammar")
    if backend != "xgrammar":
        fix = "the plugin follows xgrammar's grammars: leave it out"
        raise ConfigError("structured_outputs_config['backend']", backend, fix)
    return outputs


def require_own_start(arguments: Arguments) -> None:
    """Raise ConfigError where vLLM would bind grammars after reasoning: here specs decide that."""
    for options in (arguments.engine, arguments.engine["structured_outputs_config"]):
        parser = options.get("reasoning_parser")
        if parser:
            fix = "write GrammarSpec.after(marker) for a grammar that binds after reasoning"
            raise ConfigError("reasoning_parser", parser, fix)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"engine_options[{name!r}]", value, "must be a dict")
    return value


def _path(argument: str, value: Any) -> str:
    if not isinstance(value, str | Path):
        fix = "vLLM loads it itself, in processes of its own: pass a hub id or a folder"
        raise ConfigError(argument, type(value).__name__, fix)
    return str(value)


_PROGRAM = ("-m", "vllm.entrypoints.cli.main", "serve")
_KEY_VARIABLE = "VLLM_API_KEY"


class ServeCommand(NamedTuple):
    """arguments: after the interpreter. variables: added to this process's environment."""

    arguments: list[str]
    variables: dict[str, str]


def serve_command(
    wanted: Wanted,
    *,
    host: str,
    port: int,
    names: Sequence[str] = (),
    api_keys: Sequence[str] = (),
) -> ServeCommand:
    """vLLM's server for what is ``wanted``; options that it does not know are refused by itself.

    names: what requests call the model. api_keys: that they must bring.

    Schemas that cannot be enforced are answered with 400, and JSON has no free whitespace unless
    ``structured_outputs_config`` says otherwise.

    Raises ConfigError for what does not translate.
    """
    found = read_arguments(wanted, None, has_lookup=lookup.has_lookup(installed_root()))
    engine = dict(found.engine)
    outputs = {"disable_any_whitespace": True, **engine.pop("structured_outputs_config")}
    engine |= {"structured_outputs_config": outputs, "host": host, "port": port}
    if names:
        engine["served_model_name"] = list(names)
    features = [name for name in FEATURES if name in (*found.features, "schemas")]
    variables = {VARIABLE: ",".join(features)}
    if len(api_keys) > 1:
        fix = "vLLM takes one from the environment: pass one"
        raise ConfigError("--api-key", f"{len(api_keys)} keys", fix)
    if api_keys:  # not among the arguments, which other users of the machine can read
        variables[_KEY_VARIABLE] = api_keys[0]
    model = engine.pop("model")
    return ServeCommand([*_PROGRAM, model, *_flags(engine)], variables)


def run(command: ServeCommand) -> NoReturn:
    """Become vLLM's server. Raises ConfigError where vLLM or the plugin is missing."""
    require_plugin()
    program = [sys.executable, *command.arguments]
    os.execve(sys.executable, program, {**os.environ, **command.variables})


def _flags(engine: Mapping[str, Any]) -> Iterator[str]:
    """vLLM's options on a command line, as its parser reads them."""
    for name, value in engine.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case dict():
                yield from (f"--{flag}", json.dumps(value))
            case list() | tuple():
                yield from (f"--{flag}", *map(str, value))
            case _:
                yield from (f"--{flag}", str(value))
