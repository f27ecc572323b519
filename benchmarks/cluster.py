"""Where tests and scripts beside this file find the cluster on one machine."""

from paceline_bench.cluster.namespaces import Cluster, sent_bytes, unavailable

__all__ = ["Cluster", "sent_bytes", "unavailable"]
