"""The options of a plan for networks and devices, as people write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from provider.config import SERVED, WorkerOptions
from shared.errors import CheckpointError, ConfigurationError
from shared.options import Option, check_fields

Assumed = Mapping[str, Sequence[float]]
_FORECAST = "Forecast"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class NetworkLink(NamedTuple):
    """An alpha-beta link: a message of n bytes is there after ``seconds + n / bytes_per_second``."""

    seconds: float
    bytes_per_second: float

    def take(self, size: float) -> float:
        """Seconds until a message of so many bytes is there."""
        return self.seconds + size / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class PlanOptions(WorkerOptions):
    """What `symbiosis-provider plan` is asked.

    Raises:
        ConfigurationError: a value is out of bounds, or does not fit the others.
    """

    model: Annotated[
        Path, Option(SERVED, "Checkpoint folder, or a folder with only a config.json.", argument=True)
    ]
    answers: Annotated[
        str,
        Option(
            _FORECAST,
            "Bits of each number of a product that tenants request, with ring numerics: exact (all) or half.",
            choices=("exact", "half"),
            unit="WHICH",
        ),
    ] = "exact"
    mask_sources: Annotated[
        int,
        Option(
            _FORECAST,
            "Number of mask sources, with ring numerics. The printed bytes of a token include the effects of "
            "these mask sources. The simulated network does not carry effects.",
            minimum=0,
            unit="COUNT",
        ),
    ] = 1
    network: Annotated[
        str,
        Option(
            _FORECAST,
            "Network to the tenants: bits a second in each direction, and the round-trip time.",
            unit="RATE,TIME",
        ),
    ] = "10Gbit,0.5ms"
    tenants: Annotated[
        int, Option(_FORECAST, "Tenants that work at the same time.", minimum=1, maximum=1024, unit="COUNT")
    ] = 8
    rows: Annotated[
        int,
        Option(
            _FORECAST,
            "Rows in a fine-tuning step: the number of sequences times the tokens in each.",
            minimum=1,
            unit="COUNT",
        ),
    ] = 512
    assume: Annotated[
        Sequence[str],
        Option(
            _FORECAST,
            "Figures of a device that this machine lacks, such as cuda=141e9,4.8e12,2e13: bytes of memory, "
            "bytes a second, multiplications a second.",
            unit="FIGURES",
            cli_singular="assume",
        ),
    ] = ()
    json: Annotated[bool, Option(_FORECAST, "Print the forecast as JSON.")] = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check_fields(self)
        self.check_workers()


def parse_network(text: str) -> NetworkLink:
    """``10Gbit,0.5ms``: bits a second each way, and the time of a way there and back, as ``ping`` shows it.

    Raises:
        ConfigurationError: it is something else.
    """
    rate, _, time = text.replace(" ", "").partition(",")
    bits, seconds = _amount(rate.lower().removesuffix("/s"), _UNITS), _amount(time.lower(), _TIMES)
    if bits is None or seconds is None or not bits > 0 or not seconds >= 0:
        raise ConfigurationError(
            "{network} must be bits a second and the time there and back, such as 10Gbit,0.5ms", network=text
        )
    return NetworkLink(seconds / 2, bits / 8)


def _amount(text: str, units: dict[str, float]) -> float | None:
    for unit, factor in units.items():
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * factor
            except ValueError:
                pass  # "ms" ends with "s" too
    return None


def parse_assumed(texts: Sequence[str]) -> Assumed:
    """``cuda=141e9,4.8e12,2e13``: bytes of memory, bytes and multiplications a second of devices so called.

    Raises:
        ConfigurationError: it is something else.
    """
    speeds = {}
    for text in texts:
        name, _, figures = text.partition("=")
        try:
            numbers = [float(each) for each in figures.split(",")]
        except ValueError:
            numbers = []
        if not name or len(numbers) != 3 or not all(0 < each < float("inf") for each in numbers):
            raise ConfigurationError(
                "{assume} must be bytes of memory, bytes and multiplications a second, such as "
                "cuda=141e9,4.8e12,2e13",
                assume=text,
            )
        speeds[name] = numbers
    return speeds


def check_shapes(model: Path) -> Path:
    """The folder with a model's ``config.json``; ``model`` is that folder, or the file.

    Raises:
        CheckpointError: there is none.
    """
    folder = model.parent if model.name == "config.json" else model
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has no config.json, which says what shapes a model's layers have: give a checkpoint's "
            "folder, or one with that file alone; nothing is downloaded for a plan"
        )
    return folder
