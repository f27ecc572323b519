"""What the processes of one node share: memory, sums of gradients, the optimizer's work, cores."""
