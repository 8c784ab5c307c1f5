"""Byte-level BPE tokenizer with a chat template, trained on the text in corpus.txt."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def corpus() -> list[str]:
    """Returns the paragraphs of the training text."""
    text = resources.files("prism.models").joinpath("corpus.txt").read_text(encoding="utf-8")
    return text.split("\n\n")


def write_tokenizer(directory: Path, vocab_size: int, context_length: int) -> None:
    """Trains the tokenizer and writes tokenizer.json and tokenizer_config.json, with the same bytes
    every time.

    Every byte is a token, so any text can be encoded and any output decoded. Raises ValueError if
    the text has too few words for `vocab_size`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call, unused-ignore]
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"corpus.txt yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
