"""How do our figures compare? Each contender in fresh processes, by turns."""

from pathlib import Path

import paceline

SOURCES = (str(Path(paceline.__file__).parents[1]), str(Path(__file__).parents[1]))  # for PYTHONPATH of processes
