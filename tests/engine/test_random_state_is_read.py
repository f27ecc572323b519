"""Random state is read by several threads while garbage is collected, and nothing waits for ever."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "support" / "scripts" / "collected.py"


def test_a_destructor_that_runs_meanwhile_stops_no_thread():
    """Torch keeps the generator's lock as it makes the tensor; a thread that waits for it keeps the interpreter's."""
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
