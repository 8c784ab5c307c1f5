"""Child processes of a cluster on one machine: start, supervision, logs and end."""
