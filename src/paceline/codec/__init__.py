"""Gradient compression: the encoding in which a gradient is communicated. The interface: `contract.Codec`."""
