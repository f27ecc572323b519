"""Elastic training. What happens when a node fails: `fault_tolerant`; when one joins: `joiner`, `admission`."""
