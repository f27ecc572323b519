"""`pipeline:2` against `sequential` on two cores, and each step against the table of its schedule.

    python benchmarks/pipeline.py [--models alexnet,transformer] [--rounds 7] [--raw FILE]
        [--engines "pipeline:2,micros=4 ..."]

Every configuration is a process of its own, and they take turns of a step. Both have SGD with momentum, which takes the
factors of fully-connected layers; `sequential` has one thread. A line gives the median seconds of a step, the median
ratio of a round to `sequential` with the least and the largest, where the model was cut, and how far the time of all
passes of a step is from what their schedule made of the passes of the step before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BASE = "sequential"
ENGINES = "pipeline:2,micros=4 pipeline:2,micros=8 pipeline:2,micros=8,schedule=gpipe"
PRESETS = {"alexnet": "pipeline:2,micros=8,cut=preset"}


def job(name: str) -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    if name == "alexnet":
        from paceline.registry import find

        return find("models", name, 3), (torch.randn(32, 3, 224, 224), torch.randint(0, 3, (32,)))
    from paceline_bench.cluster.work import Transformer

    tokens = torch.randint(0, 4096, (16, 129))
    return Transformer(4096, 128, 320, 6, 5), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def work(engine: str, name: str) -> None:
    """For each line of stdin: seconds of a step; of all its passes, and as predicted by those of the step before."""
    import torch
    from torch.nn import functional as F

    import paceline
    from paceline.engine.pipeline import Pipelined
    from paceline.engine.stages.schedule import SCHEDULES, step_s

    model, batch = job(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pace = paceline.join(model, optimizer, F.cross_entropy, batch_size=len(batch[0]), engine=engine)
    backward, spent = pace.engine.backward, [0.0]
    run = backward.run

    def timed(*given: Any) -> Any:
        begin = time.perf_counter()
        try:
            return run(*given)
        finally:
            spent[0] = time.perf_counter() - begin

    backward.run = timed
    for _ in range(3):
        pace.step(batch)
    for _ in sys.stdin:
        before = dict(getattr(backward, "seconds", {}))
        begin = time.perf_counter()
        pace.step(batch)
        whole_s, told_s, cuts = time.perf_counter() - begin, 0.0, []
        if isinstance(backward, Pipelined):
            made = SCHEDULES[pace.engine.local_step.schedule](2, pace.engine.local_step.num_micros)
            told_s = step_s(made, lambda stage, one, before=before: before[stage, one])
            cuts = backward.cuts
        print(json.dumps([whole_s, spent[0], told_s, cuts]), flush=True)
    pace.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="alexnet,transformer")
    parser.add_argument("--engines", default=ENGINES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--raw", type=Path, help="a file for the seconds of each step")
    parser.add_argument("--work", nargs=2)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    raw: dict[str, dict[str, list[Any]]] = {}
    for name in options.models.split(","):
        engines = [BASE, *options.engines.split(), *([PRESETS[name]] if name in PRESETS else [])]
        started = {}
        for engine in engines:
            command = [sys.executable, __file__, "--work", engine, name]
            own = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # as the launcher sets it for a pipeline
            started[engine] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own
            )
        seen = raw[name] = {engine: [] for engine in engines}
        try:
            for i in range(-1, options.rounds):  # the first waits for those that begin
                for engine in engines if i % 2 else reversed(engines):
                    process = started[engine]
                    assert process.stdin
                    assert process.stdout
                    process.stdin.write("step\n")
                    process.stdin.flush()
                    answer = json.loads(process.stdout.readline())
                    if i >= 0:
                        seen[engine].append(answer)
        finally:
            for process in started.values():
                process.stdin.close()  # type: ignore[union-attr]
                process.wait(60)
        print(name)
        for engine, steps in seen.items():
            ratios = sorted(base[0] / one[0] for base, one in zip(seen[BASE], steps, strict=True))
            line = f"  {engine}: {statistics.median(one[0] for one in steps):.3f} s, {statistics.median(ratios):.2f}"
            line += f" ({ratios[0]:.2f} to {ratios[-1]:.2f}) times {BASE}"
            if steps[0][3]:
                errors = [abs(told / took - 1) for _, took, told, _ in steps]
                line += f"; cut before {', '.join(steps[0][3])}; off its table by {statistics.median(errors):.1%}"
            print(line, flush=True)
        if options.raw:
            options.raw.write_text(json.dumps(raw) + "\n")


if __name__ == "__main__":
    main()
