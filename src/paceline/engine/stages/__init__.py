"""The stages of a pipeline: their order of passes, their micro-batches, and the devices on which they lie."""
