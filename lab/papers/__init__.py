"""The evaluations of the Prism, MuxServe and SeaLLM papers: `python -m lab.papers NAME`."""
