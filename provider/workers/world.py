"""A group of processes that others start: ``torchrun``, or programs that set the same variables."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

CONNECT_SECONDS = 30.0


def processors_each(workers: int) -> int:
    """How many threads of one product each of so many workers has that share this machine's processors."""
    return max(1, (os.cpu_count() or 1) // max(1, workers))


class World(NamedTuple):
    """Who takes part, as ``torchrun`` and others say in the environment.

    Attributes:
        rank: of this process; 0 is the executor.
        size: of all.
        local_size: of those on this machine.
        address, port: of the store.
        hosts_store: this process holds it; else whoever started it does.
        run: told from others that use the same store.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosts_store: bool
    run: str = "symbiosis/0/0"

    @classmethod
    def from_environment(cls) -> World | None:
        """None: this process was started alone.

        Raises:
            ConfigurationError: some of it is missing, or no number.
        """
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None

        def number(name: str, default: str | None = None) -> int:
            value = os.environ.get(name, default)
            if value is None or not value.isdecimal():
                raise ConfigurationError(
                    f"RANK is set, as by torchrun, but {name} is {value!r}, which is no number; "
                    "start with torchrun, or unset RANK"
                )
            return int(value)

        rank, size = number("RANK"), number("WORLD_SIZE")
        if size == 1:
            return None
        if rank >= size:
            raise ConfigurationError(f"RANK={rank} is not below WORLD_SIZE={size}")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        run = [os.environ.get(name, "0") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
        return cls(
            rank,
            size,
            number("LOCAL_RANK", "0"),
            number("LOCAL_WORLD_SIZE", "1"),
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            number("MASTER_PORT"),
            rank == 0 and not agent,
            "/".join(["symbiosis", *run]),
        )

    def environment(self, rank: int) -> dict[str, str]:
        """What a process is told that shall take part as ``rank``, with one device that it may use."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def store(self) -> Store:
        """Where those who join leave word.

        Raises:
            ConfigurationError: it is not there.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        try:
            store = TCPStore(
                self.address,
                self.port,
                is_master=self.hosts_store,
                wait_for_workers=False,
                timeout=timedelta(seconds=CONNECT_SECONDS),
            )
        except RuntimeError as error:  # DistNetworkError and others
            reason = str(error).splitlines()[0]
            raise ConfigurationError(
                f"no store at MASTER_ADDR={self.address}, MASTER_PORT={self.port}: {reason}"
            ) from error
        return PrefixStore(self.run, store)
