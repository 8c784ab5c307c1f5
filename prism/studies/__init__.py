"""The evaluations of the Prism, MuxServe and SeaLLM papers, each one command: `prism-sim study`."""
