"""`prism-serve`: checks the YAML, starts and supervises every process of one machine, and stops
them.

launcher.py is the life of a cluster. It uses node/run_dir.py (the directory), processes/children.py
and processes/supervisor.py (the processes) and console/progress.py (the console). operator.py,
console/report.py and node/gpu_probe.py implement subcommands of prism/cli/serve.py.
"""
