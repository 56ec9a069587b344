"""The options that commands share: a grammar, a model with its proposer, and how to sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "After",
    "Chat",
    "Choice",
    "Device",
    "Draft",
    "Dtype",
    "Grammar",
    "MaxTokens",
    "MinP",
    "Model",
    "NumDraftTokens",
    "Prompt",
    "Proposer",
    "Regex",
    "Schema",
    "Seed",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
]

Prompt = Annotated[str, typer.Argument(help="The text to continue; - is standard input.")]
Chat = Annotated[bool, typer.Option("--chat", help="Send it as a chat message.")]

Schema = Annotated[Path | None, typer.Option(help="JSON schema file; - is standard input.")]
Regex = Annotated[str | None, typer.Option(help="Regular expression.")]
Choice = Annotated[list[str] | None, typer.Option(help="One option; repeat it.")]
Grammar = Annotated[Path | None, typer.Option(help="EBNF file, or a .lark file.")]
After = Annotated[str | None, typer.Option(help="Free text up to this marker.")]

Model = Annotated[str | None, typer.Option(help="Hub id or folder.")]
Proposer = Annotated[str | None, typer.Option(help="See `guided-spec proposers`.")]
Draft = Annotated[str | None, typer.Option(help="Draft model or head: hub id, folder.")]
NumDraftTokens = Annotated[int, typer.Option("--num-draft-tokens", "-k")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")]

MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 keeps all tokens.")]
TopP = Annotated[float, typer.Option(help="1 keeps all tokens.")]
MinP = Annotated[float, typer.Option(help="0 keeps all tokens.")]
Seed = Annotated[int | None, typer.Option(help="For repeatable sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; repeat it.")]
