"""Workers that Ray places: each is looked after by an actor, on one of the machines of a Ray cluster.

Ray starts the actors, and starts them again when they or their machines are lost. It carries no tensors and
nothing of tenants: actors are told numbers and strings, and the workers, which are processes of their own,
join the executor over ``torch.distributed`` like those of ``torchrun``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from provider.workers.rank import run_until_stopped
from provider.workers.world import CONNECT_SECONDS, World
from shared.errors import ConfigurationError, SymbiosisError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

PLACE_SECONDS = 600.0  # for the cluster to have capacity: it may have to start machines first
START_SECONDS = 120.0  # for actors that have a place
_OBJECT_STORE_BYTES = 100 << 20  # of a Ray of our own, which keeps nothing there


class WorkerSupervisor:
    """An actor: looks after one worker."""

    def run(self, environment: Mapping[str, str]) -> None:
        """Until the executor has ended.

        Args:
            environment: of the worker, beside that of this process, which has the GPU that Ray chose.
        """
        run_until_stopped(threading.Event(), 0.0, environment)


def check_ray() -> None:
    """Refuse to do without Ray.

    Raises:
        ConfigurationError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            "{launcher} needs Ray, which is not installed: pip install '.[ray]' in a checkout of this "
            "project",
            launcher="ray",
        )


@contextmanager
def placed(workers: int, threads: int, device: str) -> Iterator[World]:
    """Actors that start workers, while the block lasts; who takes part, for ``WorkerPool``.

    The cluster is that of ``RAY_ADDRESS``, which this machine is part of; else one of this machine, for this
    block.

    Args:
        workers: how many; each on a machine of its own, if there are enough.
        threads: processors of each.
        device: cpu, or cuda: a GPU for each.

    Raises:
        ConfigurationError: Ray is not installed.
        SymbiosisError: the cluster cannot be reached, or has no capacity, or cannot start actors.
    """
    check_ray()
    with ExitStack() as opened:
        address = _connect(workers * threads, opened)
        from ray.exceptions import RayError

        try:
            actors = _actors(workers, {"CPU": threads} | ({"GPU": 1} if device != "cpu" else {}), opened)
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise SymbiosisError(
                f"Ray cannot start the workers' actors ({reason}); install the same version of this program "
                "on all its machines"
            ) from error
        # Of a cluster's machines it is not known which has how many: each is taken to have one.
        _store, world = _hosted(address, workers, 1 if os.environ.get("RAY_ADDRESS") else workers)
        _runs = [  # kept: Ray need not run again what nobody waits for
            actor.run.options(max_task_retries=-1, retry_exceptions=True).remote(world.environment(rank))
            for rank, actor in enumerate(actors, 1)
        ]
        yield world


def _connect(processors: int, opened: ExitStack) -> str:
    """Join a cluster, or start one; this machine's address, as workers reach it."""
    cluster = os.environ.get("RAY_ADDRESS")
    # Before Ray is imported, which looks at once.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not cluster:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray
    from ray.exceptions import RayError

    options: dict[str, Any] = {
        "num_cpus": processors,  # whatever there are: these workers are all that is placed
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    log.info("joining Ray at %s" if cluster else "starting Ray%s", cluster or "")
    try:
        if cluster:
            _reach(cluster)
        ray.init(
            address=cluster or "local",
            log_to_driver=False,
            configure_logging=False,
            **({} if cluster else options),
        )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise SymbiosisError(
            f"cannot use Ray at RAY_ADDRESS={cluster}: {error}; this machine must be part of the cluster"
            if cluster
            else f"cannot start Ray: {error}"
        ) from error
    opened.callback(ray.shutdown)
    return ray.util.get_node_ip_address() if cluster else "127.0.0.1"


def _reach(cluster: str) -> None:
    """Find out at once that nobody is there, for which Ray takes a quarter of an hour.

    Raises:
        OSError: nobody is.
    """
    host, _, port = cluster.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _actors(workers: int, bundle: Mapping[str, int], opened: ExitStack) -> list[Any]:
    """One in each bundle of a placement group; they are gone when ``opened`` is closed."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([dict(bundle)] * workers, strategy="SPREAD")
    opened.callback(remove_placement_group, group)
    wanted = f"{workers} x ({' and '.join(f'{number} {name}' for name, number in bundle.items())})"
    log.info("waiting until Ray has room for workers: %s", wanted)
    if not group.wait(PLACE_SECONDS):
        resources = ", ".join(f"{ray.cluster_resources().get(name, 0):g} {name}" for name in bundle)
        raise SymbiosisError(
            f"Ray has had no room for workers, {wanted}, for {PLACE_SECONDS:.0f} s; all its machines "
            f"together have {resources}, in use or not: add some, or ask for less"
        )
    actors = []
    for index in range(workers):
        at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        actor = (
            ray.remote(WorkerSupervisor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=at,
            )
            .remote()
        )
        opened.callback(ray.kill, actor)
        actors.append(actor)
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=START_SECONDS)
    return actors


def _hosted(address: str, workers: int, local_size: int) -> tuple[Store, World]:
    """Where workers leave word, at a free port of this address and of no other."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
            master_listen_fd=listener.detach(),
        )
    return store, World(0, workers + 1, 0, local_size, address, port, hosts_store=False)
