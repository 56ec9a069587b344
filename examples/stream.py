"""Text as it is committed, from two tasks that share the engine's batches."""

import asyncio

from guided_spec import LLM, GrammarSpec, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "email": {"type": "string"}},
    "required": ["name", "email"],
    "additionalProperties": False,
}


async def extract(llm: LLM, text: str) -> str:
    """The whole text, put together from its pieces."""
    params = SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA))
    pieces = [chunk.text async for chunk in llm.astream(f"{text}\n\nJSON: ", params)]
    return "".join(pieces)


async def main() -> None:
    """Two requests at once."""
    with LLM() as llm:
        texts = [
            "Please reach Dana Whitfield at dana.whitfield@example.com.",
            "Contact: Omar Haddad, omar@haddad.example",
        ]
        for text in await asyncio.gather(*(extract(llm, text) for text in texts)):
            print(text)


if __name__ == "__main__":
    asyncio.run(main())
