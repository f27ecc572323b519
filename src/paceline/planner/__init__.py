"""The planner: predicts and benchmarks the configurations of a job, and chooses the fastest (autotuning)."""
