"""The shape of the model that reads pages, and its folder."""

from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from tools.drawn_documents.page import CELL, CELLS, SIDE

TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
PATCH = 8  # pixels; two by two make a cell
_WIDTH, _VISION_LAYERS, _TEXT_LAYERS = 192, 4, 4
# A picture stands before the text; like the bundled model's, an answer begins after "JSON: ".
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['content'] is string -%}{%- set parts = [{'type': 'text', 'text': "
    "message['content']}] -%}{%- else -%}{%- set parts = message['content'] or [] -%}{%- endif -%}"
    "{%- for part in parts -%}"
    "{%- if part['type'] == 'image' -%}{{ '<image>' }}{%- else -%}{{ part['text'] | trim }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- else -%}{{ '\n\n' }}"
    "{%- if loop.last -%}{{ 'JSON: ' }}{%- endif -%}{%- endif -%}{%- endfor -%}"
)


def make_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """The bundled pair's tokenizer with the tokens of a picture."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)  # type: ignore[assignment]
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerFast) -> Idefics3Config:
    """Return its shape: 4.6 M parameters, two fifths of them in the vision tower."""
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=512,
        num_hidden_layers=_TEXT_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    vision = {
        "hidden_size": _WIDTH,
        "intermediate_size": 4 * _WIDTH,
        "num_hidden_layers": _VISION_LAYERS,
        "num_attention_heads": 3,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.get_vocab()["<image>"],
        scale_factor=CELL // PATCH,
        tie_word_embeddings=True,
    )
    config.pad_token_id = 0
    return config


def save(
    model: Idefics3ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write weights in bf16, configs, tokenizer and processor."""
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=False,
    )
    processor = Idefics3Processor(
        images, tokenizer, image_seq_len=CELLS * CELLS, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(folder, save_jinja_files=False)
    copy = Idefics3ForConditionalGeneration(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0, do_sample=False)
    copy.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
