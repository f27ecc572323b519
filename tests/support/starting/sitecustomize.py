"""What Python imports as a process of a test starts: with torch, a third of the start is collection of garbage.

It goes on, rarely; at the end nothing is collected that the end of the process frees.
"""

import atexit
import gc

gc.set_threshold(100_000, 10, 10)
atexit.register(gc.freeze)
