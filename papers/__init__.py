"""The evaluations of the Prism, MuxServe and SeaLLM papers: `python -m papers NAME`."""
