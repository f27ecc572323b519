"""What codecs are made of: packing of payloads, and wrapping of another codec."""
