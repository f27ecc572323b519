"""What a run saves and resumes from: whole or not there, checked by hashes, read by any number of nodes."""
