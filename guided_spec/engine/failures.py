"""Which failures of requests are raised, and which come back with their outputs."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from guided_spec.engine.outputs import Chunk
from guided_spec.errors import ConfigError

__all__ = ["Failures", "OnError"]

OnError = Literal["raise", "return"]


class Failures(NamedTuple):
    """of_written: whether to raise what ended a text that had begun. of_unwritten: all others."""

    of_unwritten: bool
    of_written: bool

    @classmethod
    def before_the_first_token(cls, on_error: OnError) -> Failures:
        """With "raise" only those that left no text. Raises ConfigError for another word."""
        return cls(_is_raised(on_error), of_written=False)

    @classmethod
    def at_any_time(cls, on_error: OnError) -> Failures:
        """With "raise" all of them. Raises ConfigError for another word."""
        is_raised = _is_raised(on_error)
        return cls(is_raised, is_raised)

    def look_at(self, chunk: Chunk, num_prompts: int) -> None:
        """Raise the error of a request's last chunk, if it is one of these.

        Among several prompts a note on the error says which one it was.
        """
        completion = chunk.completion
        if completion is None or completion.error is None:
            return
        if self.of_written if completion.token_ids else self.of_unwritten:
            if num_prompts > 1:
                place = f"prompt {chunk.prompt_index} of {num_prompts}, counted from 0"
                # Set, not added: a grammar's error is remembered, and raised by other calls too.
                completion.error.__notes__ = [f'{place}; on_error="return" serves the others']
            raise completion.error


def _is_raised(on_error: str) -> bool:
    if on_error not in get_args(OnError):
        raise ConfigError("on_error", on_error, f"must be one of {', '.join(get_args(OnError))}")
    return on_error == "raise"
