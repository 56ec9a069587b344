"""Everything guided_spec raises.

GuidedSpecError
├── ConfigError (also a ValueError)      an argument is out of range or of the wrong kind
│   ├── UnknownOptionError               an option, or a field of a value, that is not known
│   └── UnknownProposerError             a proposer name that is not registered
├── ModelError                           a model or tokenizer cannot be loaded or used
│   └── VocabularyMismatchError          a draft model with another vocabulary than the target
├── OtherProcessError                    an LLM in, or sent to, a process that did not make it
├── TrainingStoppedError                 a signal ended a training run, which was saved
├── RequestError                         one request cannot be served; the others continue
│   ├── PromptError                      empty or of the wrong type
│   │   └── PromptTooLongError           longer than the context
│   ├── BudgetTooSmallError              max_tokens is below the grammar's shortest text
│   ├── TextCutShortError                max_tokens ended the text, and on_short says "error"
│   ├── NoTokenLeftError                 bans, or bans and the grammar, forbid every token
│   └── RequestCancelledError            the caller cancelled it
└── GrammarError                         something about one request's grammar
    ├── GrammarCompileError              the schema, regex or grammar is broken
    │   ├── UnsupportedSchemaError       valid, but the backend would not enforce all of it
    │   └── UnsatisfiableGrammarError    no text at all can match it
    ├── GrammarWorkerError               a worker process was killed or did not start: try again
    ├── GrammarTooSlowError              its masks took more of the CPU than one text may
    ├── GrammarStateError                the matcher failed, or refused a token that is committed
    └── GrammarDeadEndError              no token of the vocabulary can continue the text
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = [
    "BudgetTooSmallError",
    "ConfigError",
    "GrammarCompileError",
    "GrammarDeadEndError",
    "GrammarError",
    "GrammarStateError",
    "GrammarTooSlowError",
    "GrammarWorkerError",
    "GuidedSpecError",
    "ModelError",
    "NoTokenLeftError",
    "OtherProcessError",
    "PromptError",
    "PromptTooLongError",
    "RequestCancelledError",
    "RequestError",
    "TextCutShortError",
    "TrainingStoppedError",
    "UnknownOptionError",
    "UnknownProposerError",
    "UnsatisfiableGrammarError",
    "UnsupportedSchemaError",
    "VocabularyMismatchError",
]
# The last words of a fix: to pass an argument, in Python's spelling.
_ADVICE = re.compile(r"[;,] (?:or )?pass (?:it with )?(\w+)=.*$", re.MULTILINE)


class GuidedSpecError(Exception):
    """The root: catch this to catch everything guided_spec raises on purpose.

    exit_code: of a command that it ends.
    """

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and sent to other processes as it is: a constructor may take other arguments."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[GuidedSpecError], args: Any, state: dict[str, Any]) -> GuidedSpecError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(GuidedSpecError, ValueError):
    """An argument is out of range or of the wrong kind.

    The message names the argument, the value it had and what to pass instead.
    """

    def __init__(self, argument: str, value: object, fix: str) -> None:
        self.argument = argument
        self.value = value
        self.fix = fix
        super().__init__(f"{argument}={_shorten(value)}: {fix}")


class UnknownOptionError(ConfigError):
    """An option, or a field of a value, that is not known."""


class UnknownProposerError(ConfigError):
    """A proposer name that is neither built in, registered nor an entry point."""


class ModelError(GuidedSpecError):
    """A model or tokenizer cannot be loaded or used; the message says what is missing."""


class VocabularyMismatchError(ModelError):
    """The draft model's vocabulary is not the target's."""


class OtherProcessError(GuidedSpecError):
    """What has threads is used in a fork, or was to be pickled or copied."""


class TrainingStoppedError(GuidedSpecError):
    """A signal ended a training run between two steps; it was saved and can be resumed.

    exit_code: 128 and the signal's number, as a shell says of what a signal has ended.
    """

    def __init__(self, signal_name: str, number: int, step: int, folder: str) -> None:
        self.exit_code = 128 + number
        super().__init__(
            f"{signal_name} after step {step}: saved in {folder}; go on with the same command and "
            "--resume"
        )


class RequestError(GuidedSpecError):
    """One request cannot be served; the rest of its batch continues."""


class PromptError(RequestError):
    """The prompt is empty, of the wrong type, or too long."""


class PromptTooLongError(PromptError):
    """The prompt leaves no capacity in the context for a token."""


def _in_context(room: int) -> str:
    return f"the context has room for {room} tokens: send a shorter prompt"


class BudgetTooSmallError(RequestError):
    """No text of the grammar is known that is as short as the request wants it.

    max_tokens: what the request asked for. least: tokens of the shortest known text, the one that
    ends it among them; None if no end was found at all. room: what the context has for it, None
    if that is more. reason: in words.
    """

    def __init__(self, max_tokens: int, least: int | None, room: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.least = least
        self.room = max_tokens if room is None else room
        self.reason = "no way to end a text of the grammar was found"
        if least is not None:
            texts = f"the grammar's shortest text takes {least} tokens, with the one that ends it"
            allowing = [f"allow at least {least}"] if least > max_tokens else []
            context = [_in_context(self.room)] if self.room < max_tokens else []
            self.reason = f"{texts}; {', but '.join(allowing + context)}"
        fix = "; pass complete=False" if least is None else ", or pass complete=False"
        super().__init__(f"max_tokens={max_tokens}: {self.reason}{fix}")


class TextCutShortError(RequestError):
    """The text was ended early to fit, and ``SamplingParams.on_short`` is "error".

    max_tokens: what the request asked for. room: what there was of it, in the context.
    reason: in words.
    """

    def __init__(self, max_tokens: int, room: int) -> None:
        self.max_tokens = max_tokens
        self.room = room
        self.reason = "the text was ended early to fit, so that it may be cut short; "
        self.reason += "allow more tokens" if room >= max_tokens else _in_context(room)
        super().__init__(f'max_tokens={max_tokens}: {self.reason}, or pass on_short="return"')


class NoTokenLeftError(RequestError):
    """No token may come next: bans, or bans and the grammar together, forbid every one.

    Of a request without either, the target gave no token a probability. ``GrammarDeadEndError`` is
    the grammar's alone.
    """


class RequestCancelledError(RequestError):
    """The caller cancelled the request before it finished."""


class GrammarError(GuidedSpecError):
    """Something about one request's grammar."""


class GrammarCompileError(GrammarError):
    """The schema, regex or grammar is broken; the message carries the backend's reason.

    owner: whose it is, of several in one request, as in ("the tool", "book"); () of a single one.
    """

    owner: tuple[str, ...] = ()


class UnsupportedSchemaError(GrammarCompileError):
    """The schema is valid, but the backend would silently leave some of it unenforced."""


class UnsatisfiableGrammarError(GrammarCompileError):
    """No text made of the model's tokens can match the grammar."""


class GrammarWorkerError(GrammarError):
    """The worker process that compiles large grammars was killed, or could not be started.

    Nothing is known about the grammar, so the failure is not remembered: the request may be sent
    again.
    """


class GrammarStateError(GrammarError):
    """The matcher failed, or refused a committed token: text and grammar state disagree."""


class GrammarTooSlowError(GrammarError):
    """The masks of one text took more of the CPU than ``GrammarLimits.text_seconds``."""


class GrammarDeadEndError(GrammarError):
    """No token of the vocabulary can legally continue the text generated so far."""


def reason_of(error: Exception) -> str:
    """Why something failed: a system's error in words, without its number and path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def without_advice(message: str, takes: Callable[[str], bool]) -> str:
    """A message without advice, last in its line, to pass an argument that its reader lacks.

    takes: whether the reader has an argument of this name.
    """
    return _ADVICE.sub(lambda found: found[0] if takes(found[1]) else "", message)


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
