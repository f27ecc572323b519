"""How gradients leave and arrive: send queue and order, autotuner, cost model, control messages."""
