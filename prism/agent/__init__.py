"""Agent of one device: `python -m prism.agent --config RUN/cluster.json --device host:0`.

Path of a request: requests/queue.py reads the device's queue into the table of
state/request_table.py. requests/serving.py steps the local scheduler on the views of
requests/admission.py, admits in Redis and submits to an engine through network/sockets.py. Tokens
come back through inbox.py to requests/serving.py, which sends them to the frontends and
acknowledges finished requests.

Path of a model: inbox.py passes the cluster scheduler's orders to engines/lifecycle.py, which takes
engines from state/engine_pool.py. engines/fork_supervisor.py starts processes, engines/reclaimer.py
reclaims memory from idle engines, and reports.py reports to the scheduler. agent.py wires the
parts, main.py is the entry point.
"""
