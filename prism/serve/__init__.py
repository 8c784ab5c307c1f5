"""`prism-serve`: checks the YAML, starts and supervises every process of one machine, stops them.

launcher.py is the life of one cluster, on top of run_dir.py (its
directory), children.py and supervisor.py (its processes) and progress.py (what the user sees);
operator.py, report.py and gpu_probe.py serve the subcommands of prism/cli/serve.py.
"""
