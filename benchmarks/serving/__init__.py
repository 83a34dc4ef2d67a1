"""Many clients at once: their throughput, the gateway, and swarms under churn."""
