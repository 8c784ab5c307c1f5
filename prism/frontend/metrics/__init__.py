"""Prometheus metrics of requests and of the cluster, and OpenTelemetry traces."""
