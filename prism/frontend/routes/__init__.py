"""The HTTP routes, one file per OpenAI resource."""
