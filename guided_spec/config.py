"""The engine's settings, validated once, and what makes a setting an option of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from guided_spec.errors import ConfigError
from guided_spec.kinds import require_one_of
from guided_spec.types import Verifier, require_int, require_switches

if TYPE_CHECKING:
    from guided_spec.grammar.backends.registry import GrammarBackendName
    from guided_spec.grammar.limits import GrammarLimits

Kernels = Literal["auto", "packed", "stock"]
GrammarTables = Literal["auto", "always", "off"]
Drafting = Literal["auto", "always"]
KvDtype = Literal["auto", "fp8"]

LARGEST_DRAFT = 64
THREADS = "OMP_NUM_THREADS"  # of the environment: who sets it decides how many torch has
LARGEST_BATCH, MOST_THREADS = 2**16, 1024  # more are a slip, and take all memory


def option(help_text: str, *, default: Any) -> Any:
    """A dataclass field with the text that ``guided-spec COMMAND --help`` shows for it."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How much the engine drafts, batches and stores.

    num_draft_tokens: K, what a drafter proposes a step at most, 0 to 64.
    drafting: "auto" drafts as much as writes most tokens a second, down to nothing, but for texts
        that are sampled under "rejection" by a seed of the user's. "always" drafts
        ``num_draft_tokens`` in every step.
    max_forced_tokens: what the grammar may add to one draft where it leaves no choice, 0 to 64.
    max_batch_size: requests that decode together at most; more wait in a queue.
    max_model_len: prompt and output tokens of one request at most; None takes the model's own
        context, and less (with a warning, 4096 at least) where memory cannot hold so much in
        ``max_batch_size`` slots.
    prefill_tokens: prompt tokens of a prefill forward at most, of all rows; or a picture of Gemma.
    prefix_cache: whether prompts take what other texts left that began as they do; not for models
        that keep whole slots (docs/gpu.md).
    picture_tokens: of pictures that are kept at a time; requests of more wait.
    kv_memory_bytes: what the KV slots of the target may take; None takes a quarter of the machine's
        memory, or 0.7 of what is free on a CUDA device: half where that would leave less
        than 6 GiB, or where the draft is a model of its own. Where fewer slots than
        ``max_batch_size`` fit, requests queue.
    kv_dtype: "auto" keeps keys and values in the model's dtype; "fp8" in float8_e4m3fn, without
        scales: twice as many tokens as 16 bits in the same memory. Attention then reads rounded
        numbers, so texts may be others than those of "auto" (docs/gpu.md). What draft heads and
        draft models keep stays in their dtype. Needs the packed form, and on a GPU compute
        capability 8.9: else ConfigError.
    compile_threads: grammars compiled at the same time.
    grammar_cache_bytes: what compiled grammars that may be asked for again take together; the least
        recently used goes first.
    grammar_backend: what compiles grammars whose spec names no backend: "xgrammar", "llguidance",
        "auto": for each JSON schema the one of the two that enforces all of it and rejects the
        least, else xgrammar; or a registered name, which is looked up where the engine is made.
    grammar_limits: what one grammar may cost at most, a
        ``guided_spec.grammar.limits.GrammarLimits``; None takes its defaults.
    grammar_tables: whether grammars are made into tables of states, from which masks are looked up
        (docs/device_tables.md). "auto" makes the table of a grammar once 32 texts of it have begun,
        in a process of its own, and texts go over to it; "always" of each one that can have one,
        before its first text begins; "off" of none. The texts are the same.
    device_table_bytes: what the tables of running texts may take where drafts are made; an EAGLE-3
        head under ``mask`` then takes its masks, and the target's, from there without the host. The
        least recently used goes first; 0 leaves all of it to the host. None takes a sixty-fourth of
        a CUDA device's memory, 256 MiB of the host's for models on the CPU.
    verifier: "rejection" accepts as many sampled draft tokens as can be, "coupled" those that the
        target draws itself, so that the same seed gives the same text with any proposer and K.
    kernels: "auto" runs models and EAGLE-3 heads in packed form where they have one, on CUDA as
        graphs; its results differ from the stock modules' by rounding. "packed" raises ModelError
        where that form fails its trial; "stock" leaves everything to the stock modules.
    capture: whether CUDA graphs are captured and kernels compiled when the engine is made; False
        leaves that to the steps that first need them.

    Raises ConfigError for a value out of range.
    """

    num_draft_tokens: int = 5
    drafting: Drafting = "auto"
    max_forced_tokens: int = 32
    max_batch_size: int = 16
    max_model_len: int | None = None
    prefill_tokens: int = 4096
    prefix_cache: bool = True
    picture_tokens: int = 8192
    kv_memory_bytes: int | None = None
    kv_dtype: KvDtype = "auto"
    compile_threads: int = 2
    grammar_cache_bytes: int = 2**30
    grammar_backend: GrammarBackendName = "auto"
    grammar_limits: GrammarLimits | None = None
    grammar_tables: GrammarTables = "auto"
    device_table_bytes: int | None = None
    verifier: Verifier = "rejection"
    kernels: Kernels = "auto"
    capture: bool = True

    def __post_init__(self) -> None:
        require_int("num_draft_tokens", self.num_draft_tokens, low=0, high=LARGEST_DRAFT)
        require_int("max_forced_tokens", self.max_forced_tokens, low=0, high=LARGEST_DRAFT)
        require_int("max_batch_size", self.max_batch_size, low=1, high=LARGEST_BATCH)
        if self.max_model_len is not None:
            require_int("max_model_len", self.max_model_len, low=2)
        require_int("prefill_tokens", self.prefill_tokens, low=1)
        require_switches(prefix_cache=self.prefix_cache, capture=self.capture)
        require_int("picture_tokens", self.picture_tokens, low=1)
        if self.kv_memory_bytes is not None:
            require_int("kv_memory_bytes", self.kv_memory_bytes, low=1)
        require_int("compile_threads", self.compile_threads, low=1, high=MOST_THREADS)
        require_int("grammar_cache_bytes", self.grammar_cache_bytes, low=1)
        if self.device_table_bytes is not None:
            require_int("device_table_bytes", self.device_table_bytes, low=0)
        if not isinstance(self.grammar_backend, str) or not self.grammar_backend:
            fix = "must be the name of a grammar backend, such as 'auto'"
            raise ConfigError("grammar_backend", self.grammar_backend, fix)
        _require_limits(self.grammar_limits)
        require_one_of("kv_dtype", self.kv_dtype, get_args(KvDtype))
        require_one_of("drafting", self.drafting, get_args(Drafting))
        require_one_of("grammar_tables", self.grammar_tables, get_args(GrammarTables))
        require_one_of("verifier", self.verifier, get_args(Verifier))
        require_one_of("kernels", self.kernels, get_args(Kernels))

    @property
    def longest_draft(self) -> int:
        """Tokens of a draft at most: forced ones, and those drafted after them."""
        return self.num_draft_tokens + self.max_forced_tokens


def _require_limits(limits: object) -> None:
    if limits is not None and not hasattr(limits, "compile_seconds"):
        fix = "must be a GrammarLimits, such as GrammarLimits(compile_seconds=5), or None"
        raise ConfigError("grammar_limits", limits, fix)
