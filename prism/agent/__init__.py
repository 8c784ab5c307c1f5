"""Agent of one device: `python -m prism.agent --config RUN/cluster.json --device host:0`.

Path of a request (requests/serving.py): requests/queue.py reads the device's queue, and
requests/arrivals.py puts the requests into the table of state/request_table.py.
requests/admission.py steps the local scheduler on the views of requests/engine_views.py and admits
in Redis, and requests/running.py submits to an engine through network/sockets.py. Tokens come back
through inbox.py to requests/running.py, which sends them to the frontends and acknowledges finished
requests.

Path of a model (hosting.py): inbox.py passes the scheduler's orders to engines/lifecycle.py, and
engines/activations.py takes engines from state/engine_pool.py. engines/fork_supervisor.py starts
processes, engines/reclaimer.py reclaims memory from idle engines, and reports.py reports to the
scheduler. device_agent.py runs both paths, main.py is the entry point.
"""
