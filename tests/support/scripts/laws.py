"""Trains tables of cases, joining anew for each: laws.py FOLDER ROWS TABLE..."""

import os
import sys
from pathlib import Path

import cases
import tables


def main(folder, rows, *chosen):
    for table in chosen:
        for name, case in tables.TABLES[table].items():
            if case.alone:
                continue
            result = case.train(int(rows))
            if os.environ["RANK"] == "0":
                cases.write(Path(folder), f"{table} {name}", result)


if __name__ == "__main__":
    main(*sys.argv[1:])
