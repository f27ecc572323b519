"""A folder for PYTHONPATH, which holds `sitecustomize` alone."""
