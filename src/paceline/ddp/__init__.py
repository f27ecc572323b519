"""Scripts that use DistributedDataParallel, as they are: a subclass of torch's that sends fewer bytes."""
