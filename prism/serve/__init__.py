"""`prism-serve`: checks the YAML, starts and supervises every process of one machine, stops them.

cli.py reads the command line; launcher.py is the life of one cluster, on top of run_dir.py (its
directory), children.py and supervisor.py (its processes) and progress.py (what the user sees);
check.py, operator.py and report.py serve the subcommands.
"""
