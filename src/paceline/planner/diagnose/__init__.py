"""Diagnosis of differences between N processes and one: experiments, causes, remedies."""
