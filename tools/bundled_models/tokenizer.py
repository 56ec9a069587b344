"""The pair's tokenizer: byte-level BPE with every digit on its own."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
SPECIAL_TOKENS = [END, "<|im_start|>", "<|im_end|>"]
# A message that already ends in a task label ("Date:") is the whole prompt; any other text
# gets the label of the JSON task, and the names of the tools if there are any, as in the training
# documents.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set content = (message['content'] or '') | trim -%}"
    "{%- if message['role'] == 'assistant' -%}{{ content }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{ '<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}{%- endfor -%}"
    "{{ eos_token }}"
    "{%- elif loop.last and content[-1:] == ':' -%}{{ content + ' ' }}"
    "{%- else -%}{{ content + '\n\n' }}{%- if loop.last -%}"
    "{%- if tools -%}{{ 'Tools: ' + tools | map(attribute='function.name') | join(', ') + '\n\n' }}"
    "{%- endif -%}{{ 'JSON: ' }}{%- endif -%}{%- endif -%}"
    "{%- endfor -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `texts`; its vocabulary has exactly `vocab_size` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {vocab_size}; "
            "use more documents or a smaller vocabulary"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        padding_side="left",
    )
