"""Cost model of one machine: seconds per step of a configuration that was never run, from a profile of the job.

That of several machines is `cluster_model`, that of messages `exchange/flow/cost_model.py`.

    layers        forward and backward of each layer, timed at the candidate's threads, batch share, copies and options
    calibration   time of the whole model divided by the sum of its layers, at the baseline: work outside layers
    update        the optimizer alone, on the same number of cores
    engine        gradients moved in memory, messages, and a constant per step; with stages also their idle time
    input         fetching the batch, divided among the processes

A setting that was not timed is estimated: with options (bf16, channels_last), as the setting without them times the
ratio that the options gave for another setting; without options, by a timed setting with equal total cores and samples.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.planner.candidates import EngineSpec, predictable, split
from paceline.planner.measure.profile import Profile, Setting

STEP_S = 0.35e-3  # batch, snapshot, loss, vote and event log, beyond the layers and the update
THREAD_SYNC_S = 3e-3  # per further replica, a thread of one interpreter: wake-up, and waiting for the GIL
PROCESS_SYNC_S = 1.2e-3  # processes: wake-up, and waiting for the slowest; measured with layers of a few ms
CALL_S = 20e-6  # per layer call of each further thread of one interpreter
MESSAGES = 4  # per step and process


def predicted_s(candidate: str, profile: Profile, cores: int) -> float | None:
    """None if the profile does not suffice: compiled models, engines that count something else, models that cannot be
    cut so."""
    spec = split(candidate, cores)
    if "compile" in spec.words or not predictable(spec.engine) or 0 < profile.facts.max_stages < spec.stages:
        return None
    setting = Setting.of(spec, profile.facts.part_rows, profile.absorbs)
    pass_s = _pass_s(setting, profile)
    if pass_s is None:
        return None
    largest = profile.largest.get(str(spec.stages), 1 / spec.stages)
    return (
        pass_s * profile.facts.parts * spec.stretch(largest)
        + _update_s(spec, setting, profile, cores)
        + _engine_s(spec, setting, profile)
        + profile.input_s / spec.processes
        + STEP_S
    )


def _pass_s(setting: Setting, profile: Profile) -> float | None:
    """Forward and backward of the whole model for a micro-batch."""
    if setting.stages > 1:
        whole_s = _layers_s(setting, profile)
        return whole_s if whole_s is not None else _pass_s(replace(setting, stages=1), profile)
    layers_s, base_s = _layers_s(setting, profile), profile.layers_s[profile.base]
    return layers_s and layers_s * (profile.whole_s / base_s if base_s else 1.0)


def _layers_s(setting: Setting, profile: Profile) -> float | None:
    found = profile.layers_s
    if str(setting) in found:
        return found[str(setting)]
    if setting.words:
        plain_s = _layers_s(replace(setting, words=(), factors=profile.absorbs), profile)
        for key, worded_s in found.items():
            other = Setting.parse(key)
            elsewhere = str(replace(other, words=(), factors=profile.absorbs))
            if other.words == setting.words and elsewhere in found and plain_s:
                return plain_s * worded_s / found[elsewhere]
        return None
    if setting.threads == 1 and (line_s := _line_s(setting, found)) is not None:
        return line_s
    return next((found[key] for key in found if _amount(Setting.parse(key)) == _amount(setting)), None)


def _amount(setting: Setting) -> Setting:
    """Total cores and samples of a setting, with its options."""
    return replace(setting, threads=setting.threads * setting.copies, rows=setting.rows * setting.copies, copies=1)


def _line_s(setting: Setting, found: dict[str, float]) -> float | None:
    """One thread on more samples than were timed: linear extrapolation from the smallest and largest timed batch.

    Two points are noisy, so the result is bounded: more samples take no less time, and at most proportionally more.
    """
    alike = replace(setting, copies=1)
    points = sorted(
        (other.rows, found[key]) for key in found if replace(other := Setting.parse(key), rows=setting.rows) == alike
    )
    if not points:
        return None
    (low, low_s), (high, high_s) = points[0], points[-1]
    if low == high:
        return high_s * setting.rows / high
    line_s = high_s + (high_s - low_s) * (setting.rows - high) / (high - low)
    return min(max(line_s, high_s), high_s * setting.rows / high)


def _update_s(spec: EngineSpec, setting: Setting, profile: Profile, cores: int) -> float:
    """Several copies or stages share the update among all cores; a single one uses its own threads."""
    threads = spec.threads if spec.at_once == 1 else cores
    kinds = ["/fused"] if "fused" in spec.words else ["/factors"] if setting.factors else []
    times = profile.update_s
    nearest = min((int(key.partition("/")[0]) for key in times), key=lambda n: abs(n - threads), default=1)
    return next((times[key] for key in (f"{nearest}{kind}" for kind in [*kinds, ""]) if key in times), 0.0)


def _engine_s(spec: EngineSpec, setting: Setting, profile: Profile) -> float:
    """Sum over k copies: each writes its gradient to shared memory; the owner of a slice reads it from all k copies."""
    calls_s = (spec.stages - 1) * CALL_S * profile.num_calls
    turns_s = spec.micros * (2 * spec.turn_s + calls_s) * profile.facts.parts
    if spec.copies == 1:
        return turns_s
    k = spec.copies
    gradient = profile.dense_bytes if setting.factors else profile.facts.gradient_bytes
    moved = gradient * (k - 1) / k * 1.5 + (gradient if spec.processes > 1 else 0)
    moving_s = turns_s + (moved / profile.copy_per_s if profile.copy_per_s else 0.0)
    if spec.processes > 1:
        return moving_s + MESSAGES * profile.message_s + PROCESS_SYNC_S
    return moving_s + (k - 1) * (THREAD_SYNC_S + CALL_S * profile.num_calls * profile.facts.parts)
