"""Process of the cluster scheduler: `python -m prism.cluster --config RUN/cluster.json`.

One scheduler plans per cluster. agent_monitor.py takes the agents' reports, and state/agents.py
keeps them. view.py builds a ClusterView from them, and the policy plans on it. actuator.py executes
plans. repairs.py resolves differences between Redis and the agents. operator_commands.py executes
operators' commands. status.py builds the published status. The state is rebuilt from Redis
(placement) and the agents' reports, so the process can be killed and restarted at any time.
"""
