"""The planner: measures and predicts the ways to train, and chooses the fastest."""
