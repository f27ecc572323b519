"""Imported by Python as it starts, in a script that `paceline run` has started and in all of its children."""

import importlib.machinery
import importlib.util
import os
import sys

try:
    from paceline.ddp.import_hook import install
except ImportError:
    pass  # another Python, that has no paceline
else:
    install()
# the machine's own, which this file hides
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _spec and _spec.loader:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["sitecustomize"])
