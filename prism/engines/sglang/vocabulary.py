"""A model's vocabulary as XGrammar wants it: for engines, and to try grammars."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast
from xgrammar import GrammarCompiler, TokenizerInfo

from prism.models.special_tokens import end_ids

COMPILE_THREADS = 2
CACHE_BYTES_MAX = 64 << 20  # of what a compiler keeps


def load(directory: Path) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer, and the tokens that end an output. Raises ValueError where there are none."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    _, ends = end_ids(directory, tokenizer.backend_tokenizer)
    if not ends:
        raise ValueError("the model's files name no end-of-sequence token, which grammars need")
    return tokenizer, list(ends)


def compiler(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, ends: list[int]
) -> tuple[GrammarCompiler, TokenizerInfo]:
    """Takes no more threads and memory than an engine can spare."""
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends)
    made = GrammarCompiler(info, max_threads=COMPILE_THREADS, cache_limit_bytes=CACHE_BYTES_MAX)
    return made, info
