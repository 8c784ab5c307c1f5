"""SGLang's scheduler in the engine's process, and the requests that it runs."""
