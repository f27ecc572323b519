"""Gradient compression: what a gradient looks like on the wire."""
