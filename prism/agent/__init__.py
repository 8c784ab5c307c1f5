"""Agent of one device: `python -m prism.agent --config RUN/cluster.json --device host:0`.

Path of a request: queue.py reads the device's queue into the table of requests.py. serving.py steps
the local scheduler on the views of admission.py, admits in Redis and submits to an engine through
sockets.py. Tokens come back through inbox.py to serving.py, which sends them to the frontends and
acknowledges finished requests.

Path of a model: inbox.py passes the cluster scheduler's orders to lifecycle.py, which takes engines
from pool.py. forkserver.py starts processes, memory.py reclaims memory from idle engines, and
reports.py reports to the scheduler. agent.py wires the parts, main.py is the entry point.
"""
