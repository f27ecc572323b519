"""What codecs are made of: packing of payloads, wrapping, and a run in one process."""
