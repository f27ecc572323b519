"""What a gradient looks like on the wire."""
