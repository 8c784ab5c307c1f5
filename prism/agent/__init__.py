"""The agent of one device: `python -m prism.agent --config RUN/cluster.json --device host:0`.

A request's way through the files: intake.py reads the device's queue into mirror.py, serving.py
steps the local scheduler over what admission.py shows it, admits in Redis and submits to an engine
through engines.py; tokens come back through engines.py to serving.py, which hands them to
delivery.py (frontends) and acknowledges the finished ones. A model's way: scheduler_link.py gives
orders to lifecycle.py, which takes engines from pool.py; nursery_client.py starts processes;
memory.py asks idle engines for theirs; reports.py tells the scheduler. lease.py keeps the queue.
agent.py wires the parts, main.py is the entry point.
"""
