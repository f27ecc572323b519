"""outlived.py on nodes whose wall clocks jump by a day, to and fro, whenever somebody looks: jumping.py FOLDER."""

import itertools
import sys
import time

import outlived

real, jumps = time.time, itertools.cycle([86_400.0, -86_400.0, 0.0, 1e9])
time.time = lambda: real() + next(jumps)
outlived.main(sys.argv[1], "1:3:forward")
