"""The cluster scheduler's process: `python -m prism.cluster --config RUN/cluster.json`.

One per cluster. agents.py keeps what agents report, view.py makes a ClusterView of it, the policy
plans, actuator.py carries plans out, repairs.py mends disagreements of Redis and the agents,
operator.py answers operators, status.py publishes. The state is rebuilt from Redis (placement)
and the agents' reports, so the process can be killed and started again at any time.
"""
