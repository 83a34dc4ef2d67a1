"""What is counted and measured, for Prometheus. The only importer of prometheus_client."""
