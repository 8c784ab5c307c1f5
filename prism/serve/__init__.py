"""`prism-serve`: checks the YAML, starts and supervises every process of one machine, and stops
them.

launcher.py is the life of a cluster. It uses run_dir.py (the directory), children.py and
supervisor.py (the processes) and progress.py (the console). operator.py, report.py and gpu_probe.py
implement subcommands of prism/cli/serve.py.
"""
