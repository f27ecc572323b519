"""Records as training would have written them, made in a moment."""

import json
import math
import random

PLAN = {
    "chosen": "processes:2",
    "reason": "fastest of 3 measured",
    "batch_size": 64,
    "machine": {"name": "box", "cpu": "AMD EPYC", "cores": 2},
    "rows": [
        {
            "engine": "sequential",
            "predicted_s": 0.0101,
            "measured_s": 0.0103,
            "spread_s": 0.0004,
            "speedup": 1.0,
            "per_s": 6190,
            "peak_bytes": 3.1e8,
            "fidelity": "exact",
            "reason": "39% slower",
        },
        {
            "engine": "threads:2",
            "predicted_s": 0.0079,
            "measured_s": 0.0084,
            "spread_s": 0.0003,
            "speedup": 1.23,
            "per_s": 7610,
            "peak_bytes": 3.2e8,
            "fidelity": "exact",
            "reason": "13% slower",
        },
        {
            "engine": "processes:2",
            "predicted_s": 0.0078,
            "measured_s": 0.0074,
            "spread_s": 0.0003,
            "speedup": 1.39,
            "per_s": 8614,
            "peak_bytes": 3.9e8,
            "fidelity": "exact, local BN",
            "reason": "chosen",
        },
        {
            "engine": "stages:2",
            "predicted_s": 0.0161,
            "measured_s": None,
            "spread_s": None,
            "speedup": None,
            "per_s": None,
            "peak_bytes": None,
            "fidelity": "exact",
            "reason": "not run: predicted 2.2x slower",
        },
    ],
}


def write(folder, *events):
    """Each event is a dict without a time, or with one; half a second passes between events."""
    folder.mkdir(parents=True, exist_ok=True)
    time = 1_800_000_000.0
    with (folder / "record.jsonl").open("a") as file:
        for event in events:
            time = event.get("time", time + 0.5)
            file.write(json.dumps({"time": time, **event}) + "\n")
    return folder


def step(number, **fields):
    return {"event": "step", "step": number, "loss": 1 / (1 + number), "weight": 64.0, "seconds": 0.01, **fields}


def join(**fields):
    known = {"engine": "threads:2", "exchange": "allreduce", "codec": "none", "num_nodes": 1, "batch_size": 64}
    return {"event": "join", **known, **fields}


def whole(folder, num_steps=600, engine="processes:2", speed=1.0, seed=0, plan=PLAN, num_epochs=6):
    """A run with everything a run can record."""
    chance, time, events = random.Random(seed), 1_800_000_000.0, []
    if plan:
        events.append({"event": "plan", "time": time - 9, **plan})
    events.append(join(time=time, engine=engine, num_nodes=2))
    per_epoch = num_steps // num_epochs
    next_look = time
    for number in range(num_steps):
        compute, exchange = (part * (1 + 0.25 * chance.random()) / speed for part in (0.055, 0.012))
        wait, update = 0.004 * chance.random(), 0.006
        seconds = (compute + exchange + wait + update) * (6 if number == 0 else 1) * 1.02
        time += seconds
        fall = math.exp(-4 * number / num_steps)
        events.append(
            step(
                number,
                time=round(time, 3),
                loss=0.05 + 1.05 * fall * (0.8 + 0.4 * chance.random()),
                seconds=seconds,
                compute_seconds=compute,
                exchange_seconds=exchange,
                wait_seconds=wait,
                update_seconds=update,
                sent_bytes=12_700_000,
                decision="apply",
            )
        )
        while next_look < time:
            next_look += 1
            events.append(_usage(time, chance, number, with_pss=int(next_look) % 5 == 0))
        if (number + 1) % per_epoch == 0:
            epoch = (number + 1) // per_epoch - 1
            right = 1 - 0.4 * math.exp(-0.8 * (epoch + 1)) - 0.01 * seed
            sums = {"rows": 6000, "right": 6000 * right, "loss_sum": 6000 * (0.05 + 1.05 * fall)}
            accuracy = right - 0.006 * chance.random()
            events.append({"event": "epoch", "time": time, "epoch": epoch, "test_accuracy": accuracy, **sums})
            events.append({"event": "checkpoint", "time": time, "step": number, "path": f"{number}", "seconds": 0.1})
    events += [
        {"event": "hint", "time": time, "text": "input was waited for 2 % of the time; packing would not help"},
        {"event": "end", "time": time, "reason": "finished"},
    ]
    return write(folder, *events)


def _usage(time, chance, number, with_pss):
    return {
        "event": "usage",
        "time": time,
        "cpu_percent": 170 + 25 * chance.random(),
        "machine_cpu_percent": 91 + 8 * chance.random(),
        "core_percents": [95, 97],
        "rss_bytes": 7.2e8,
        "memory_used_bytes": 2.6e9 + 2e8 * chance.random(),
        "memory_available_bytes": 2e10,
        "swap_used_bytes": 0,
        "disk_read_bytes_per_s": 4e6 * chance.random(),
        "disk_written_bytes_per_s": 2e5 * chance.random(),
        "net_sent_bytes_per_s": 1.1e8 * chance.random(),
        "net_received_bytes_per_s": 1.05e8 * chance.random(),
        "context_switches_per_s": 900 + 300 * chance.random(),
        **({"pss_bytes": 5.1e8 + 1e5 * number} if with_pss else {}),
    }
