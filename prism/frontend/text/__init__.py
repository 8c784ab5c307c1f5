"""Text and tokens of a model: tokenizer, chat template, detokenizer, and stop strings."""
