"""Routes for operators: health, status and metrics, reload, and the dashboard."""
