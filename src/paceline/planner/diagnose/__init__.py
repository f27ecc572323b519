"""Why N processes are not one: experiments, causes, remedies."""
