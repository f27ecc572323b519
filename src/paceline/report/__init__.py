"""The event log of a run, and what is shown of it: text, page, live status, trackers."""
