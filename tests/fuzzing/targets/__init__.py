"""All targets, by name."""

from __future__ import annotations

from fuzzing.oracle import Target
from fuzzing.targets import checkpoints, gateway, training, wire, workers

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (wire, workers, checkpoints, training, gateway)
    for target in module.TARGETS
}
