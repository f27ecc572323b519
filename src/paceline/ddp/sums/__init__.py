"""How the ranks of a wrapper sum a bucket: as factors, packed, in shared memory, or as torch does."""
