"""Diagnosis of differences between training with N processes and with one: experiments, causes, remedies."""
