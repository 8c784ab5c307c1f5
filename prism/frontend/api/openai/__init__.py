"""Routes of OpenAI's API, and of vLLM's `/tokenize`."""
