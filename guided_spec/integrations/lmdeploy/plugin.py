"""Guided speculative decoding inside LMDeploy's PyTorch engine: exact, and with each mask once.

``install()`` replaces LMDeploy's guided helper, its grammar manager and its rejection sampler in
this process and registers our proposers. ``uninstall()`` puts everything back. Engines that exist
already keep what they were built with. See docs/lmdeploy.md.
"""

from __future__ import annotations

import importlib.metadata

from guided_spec.errors import ConfigError
from guided_spec.integrations.lmdeploy import agent
from guided_spec.integrations.lmdeploy.helper import translate_for_draft
from guided_spec.integrations.lmdeploy.manager import GuidedManager
from guided_spec.integrations.patches import Patch, Target, find, replace

SUPPORTED_VERSION = "0.18.0"

_ENGINE = "lmdeploy.pytorch.engine"
_SPEC = "lmdeploy.pytorch.spec_decode"


_PATCHES = (
    Patch(
        f"{_ENGINE}.engine",
        "Engine.from_pretrained",
        "pretrained_model_name_or_path engine_config speculative_config trust_remote_code kwargs",
        agent.with_own_engine,
    ),
    Patch(
        f"{_ENGINE}.engine",
        "build_executor",
        "model_path cache_config backend_config dist_config misc_config adapters device_type "
        "distributed_executor_backend dtype specdecode_config trust_remote_code",
        agent.with_own_workers,
    ),
    Patch(
        f"{_ENGINE}.model_agent.agent",
        "GuidedDecodingManager",
        "tokenizer vocab_size",
        lambda _: GuidedManager,
    ),
    Patch(
        f"{_ENGINE}.model_agent.agent",
        "BaseModelAgent._step_postprocess_with_output",
        "self last_logits logits inputs sampling_inputs stopping_criteria model_metas "
        "need_broadcast_next return_logits return_ce_loss seq_length all_routed_experts "
        "extra_inputs",
        agent.with_ended_rows,
    ),
    Patch(
        f"{_SPEC}.spec_agent",
        "SpecModelAgent.__init__",
        "self specdecode_config backend_config inputs_strategy agent_strategy misc_config dist_ctx "
        "device guided_decoding_manager",
        agent.with_guided_helper,
    ),
    Patch(
        f"{_SPEC}.spec_agent",
        "SpecModelAgent._rejection_sampling",
        "self model_inputs extra_inputs sampling_inputs",
        agent.with_positions,
    ),
    Patch(
        f"{_SPEC}.spec_agent",
        "SpecModelAgent._guided_spec_logits_process",
        "self target_logits expanded_sampling_inputs guided_helper guided_processors batch_size "
        "num_expand draft_token_ids",
        lambda _: agent.guided_logits,
    ),
    Patch(
        f"{_SPEC}.spec_agent",
        "SpecModelAgent.build_graph_runner",
        "self",
        agent.with_no_draft_graph,
    ),
    Patch(
        "lmdeploy.pytorch.config",
        "ModelConfig.from_hf_config",
        "hf_config model_path dtype dist_config is_draft_model spec_method device_type "
        "num_spec_tokens",
        agent.with_no_draft_config,
    ),
    Patch(
        "lmdeploy.pytorch.config",
        "SpecDecodeConfig.from_config",
        "method num_speculative_tokens model target_cache_cfg target_model dtype trust_remote_code "
        "model_format hf_overrides dist_config",
        agent.with_no_draft_cache,
    ),
    Patch(
        f"{_SPEC}.proposers.eagle3",
        "Eagle3._translate_bitmask",
        "self target_bitmask",
        lambda _: translate_for_draft,
    ),
    Patch(
        f"{_SPEC}.proposers.dflash",
        "DFlash.propose",
        "self model_inputs extra_inputs sampling_inputs proposal_ctx",
        agent.with_guided_blocks,
    ),
    Patch(
        "lmdeploy.pytorch.strategies.ar.sampling",
        "ARSamplingStrategy.make_sampling_inputs",
        "self seqs",
        agent.with_turns,
    ),
    Patch(
        "lmdeploy.serve.core.async_engine",
        "AsyncEngine.preprocess",
        "self messages session_id gen_config tools reasoning_effort do_preprocess adapter_name "
        "input_ids enable_thinking chat_template_kwargs media_io_kwargs mm_processor_kwargs kwargs",
        agent.with_grammar_compiled,
    ),
)

# Called by the parts above, and not replaced.
_CALLED = (
    Patch(f"{_SPEC}.reject_sampler", "RejectionSampler.forward",
          "self target_logits draft_token_ids expanded_sampling_inputs draft_probs"),
    Patch(f"{_SPEC}.guided_spec_helper", "GuidedSpecHelper.apply_serial_bitmask",
          "self scores_3d processors draft_token_ids num_spec_tokens"),
    Patch(f"{_SPEC}.guided_spec_helper", "GuidedSpecHelper.accept_rejection_sampled_tokens",
          "self processors num_rejected output_token_ids next_token_ids num_spec_tokens"),
    Patch(f"{_SPEC}.guided_spec_helper", "GuidedSpecHelper.prepare_bitmask",
          "self logits processors"),
    Patch(f"{_SPEC}.guided_spec_helper", "GuidedSpecHelper.accept_draft_tokens",
          "self draft_token_ids processors"),
    Patch(f"{_ENGINE}.logits_process", "FusedLogitsProcessor.__init__",
          "self sampling_inputs logprobs_mode guided_decoding_manager"),
    Patch(f"{_ENGINE}.executor", "get_distributed_executor_backend",
          "world_size dp device_type logger"),
)  # fmt: skip

_replaced: list[Target] = []


def install() -> None:
    """Put guided_spec into LMDeploy, for engines that are built from now on in this process.

    A second call does nothing. Raises ConfigError, and changes nothing, where LMDeploy is absent or
    another version than ``SUPPORTED_VERSION``, or where one of its methods takes other parameters.
    """
    if _replaced:
        return
    _check_version()
    feature = f"guided_spec for lmdeploy {SUPPORTED_VERSION}"
    for patch in _CALLED:
        find(patch, feature)
    targets = [find(patch, feature) for patch in _PATCHES]
    agent.register_proposers()
    for target in targets:
        _replaced.append(target)
        replace(target)


def uninstall() -> None:
    """Put LMDeploy's own parts back; engines built in between keep ours. May be called again."""
    if _replaced:
        agent.unregister_proposers()
    while _replaced:
        target = _replaced.pop()
        setattr(target.owner, target.name, target.function)


def is_installed() -> bool:
    """Whether ``install`` is in force in this process."""
    return bool(_replaced)


def _check_version() -> None:
    try:
        version = importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        fix = f"is not installed; pip install lmdeploy=={SUPPORTED_VERSION}"
        raise ConfigError("lmdeploy", None, fix) from None
    if version.partition("+")[0] != SUPPORTED_VERSION:
        fix = (
            f"guided_spec changes LMDeploy's inside and knows {SUPPORTED_VERSION} only; install it"
        )
        raise ConfigError("lmdeploy", version, fix)
