"""One batch: a regex, a choice and free text, each request with its own constraint."""

from guided_spec import LLM, GrammarSpec, SamplingParams

PROMPTS = [
    "The launch was moved to March 5, 2024.\n\nDate: ",
    "Everything arrived broken and nobody answered my mails.\n\nMood: ",
    "Call me at ",
]
PARAMS = [
    SamplingParams(grammar=GrammarSpec.regex(r"\d{4}-\d{2}-\d{2}")),
    SamplingParams(grammar=GrammarSpec.choice(["positive", "neutral", "negative"])),
    SamplingParams(max_tokens=8),
]

if __name__ == "__main__":
    with LLM() as llm:
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS), strict=True):
            print(prompt.splitlines()[-1] + output.text)
