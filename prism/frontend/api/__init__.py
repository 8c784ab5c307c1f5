"""HTTP routes, one folder per API and one file per resource."""
