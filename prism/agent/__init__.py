"""The agent of one device: `python -m prism.agent --config RUN/cluster.json --device host:0`.

A request's way through the files: queue.py reads the device's queue into the table of requests.py.
serving.py steps the local scheduler over what admission.py shows it, admits in Redis and submits to
an engine through sockets.py. Tokens come back through inbox.py to serving.py, which sends them to
the frontends and acknowledges the finished ones. A model's way: inbox.py gives the cluster
scheduler's orders to lifecycle.py, which takes engines from pool.py; forkserver.py starts
processes; memory.py asks idle engines for theirs; reports.py tells the scheduler. agent.py wires
the parts, main.py is the entry point.
"""
