"""What Ray is asked for, without Ray: in its place is one that starts no actors, or has them in threads."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
from commands import BASE_MODEL
from conftest import RING, Executor

from provider.config import ServeConfig
from provider.serve.provider import Provider
from provider.workers.actors import WorkerSupervisor, check_ray, placed
from provider.workers.world import World
from shared.errors import ConfigurationError, SymbiosisError


class RayError(Exception):
    pass


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """Records what it is asked for."""
    ray = MagicMock(__spec__=ModuleSpec("ray", None))
    ray.exceptions.RayError = RayError
    actor(ray).__ray_ready__ = MagicMock()
    ray.cluster_resources.return_value = {"CPU": 2.0}
    modules = {
        "ray": ray,
        "ray.exceptions": ray.exceptions,
        "ray.util": ray.util,
        "ray.util.placement_group": ray.util.placement_group,
        "ray.util.scheduling_strategies": ray.util.scheduling_strategies,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        yield ray


def actor(ray: MagicMock) -> MagicMock:
    found: MagicMock = ray.remote.return_value.options.return_value.remote.return_value
    return found


def told(ray: MagicMock) -> list[Mapping[str, str]]:
    """What actors are."""
    return [call.args[0] for call in actor(ray).run.options.return_value.remote.call_args_list]


def test_actors_are_told_where_to_join_and_are_gone_at_the_end(ray: MagicMock) -> None:
    group = ray.util.placement_group
    with placed(2, 3, "cuda") as world:
        group.placement_group.assert_called_once_with([{"CPU": 3, "GPU": 1}] * 2, strategy="SPREAD")
        options = ray.remote.return_value.options.call_args.kwargs
        assert (options["num_cpus"], options["num_gpus"], options["max_restarts"]) == (3, 1, -1)
        for rank, environment in enumerate(told(ray), 1):
            assert all(isinstance(value, str) for value in environment.values())
            with patch.dict(os.environ, environment):
                joins = World.from_environment()
            assert joins is not None
            assert (joins.rank, joins.size, joins.run) == (rank, 3, world.run)
            joins.store().add("here", 1)
        assert world.store().add("here", 0) == 2
        ray.kill.assert_not_called()
    assert ray.kill.call_count == 2
    group.remove_placement_group.assert_called_once_with(group.placement_group.return_value)
    ray.shutdown.assert_called_once_with()


def test_a_ray_of_its_own_asks_for_a_token_and_reports_nothing(ray: MagicMock) -> None:
    with placed(2, 3, "cpu") as world:
        assert world.local_size == 2  # which share this machine's memory
        asked = ray.init.call_args.kwargs
        assert (asked["address"], asked["num_cpus"], asked["include_dashboard"]) == ("local", 6, False)
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_cluster_that_is_there(ray: MagicMock) -> None:
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as head:
        os.environ["RAY_ADDRESS"] = address = f"127.0.0.1:{head.getsockname()[1]}"
        with placed(1, 1, "cpu") as world:
            assert world.local_size == 1
            ray.init.assert_called_once_with(address=address, log_to_driver=False, configure_logging=False)
        assert "RAY_AUTH_TOKEN" not in os.environ


@pytest.mark.parametrize(
    ("wrong", "said", "killed"),
    [
        ("room", r"no room for workers, 2 x \(1 CPU and 1 GPU\).* together have 2 CPU, 0 GPU", 0),
        ("actors", "cannot start the workers' actors .no module named provider.; install the same", 2),
    ],
)
def test_an_error_leaves_nothing_behind(ray: MagicMock, wrong: str, said: str, killed: int) -> None:
    group = ray.util.placement_group
    if wrong == "room":
        group.placement_group.return_value.wait.return_value = False
    else:
        ray.get.side_effect = RayError("trace\nno module named provider")
    with pytest.raises(SymbiosisError, match=said), placed(2, 1, "cuda"):
        pass
    assert ray.kill.call_count == killed
    group.remove_placement_group.assert_called_once_with(group.placement_group.return_value)
    ray.shutdown.assert_called_once_with()


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:1", "Connection refused"), ("auto", "Ray cannot find one")],
)
def test_no_cluster(ray: MagicMock, address: str, said: str) -> None:
    os.environ["RAY_ADDRESS"] = address
    ray.init.side_effect = ConnectionError("Ray cannot find one")
    with (
        pytest.raises(SymbiosisError, match=f"cannot use Ray at RAY_ADDRESS={address}: .*{said}"),
        placed(1, 1, "cpu"),
    ):
        pass
    ray.shutdown.assert_not_called()


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[ray\]'"):
        check_ray()


def test_workers_of_actors_give_the_bits_of_one_process(
    ray: MagicMock, serve: Callable[..., Executor], tls_dir: Path, token_file: tuple[Path, str]
) -> None:
    """All of them join; the executor multiplies nothing itself."""
    actors = []

    def run(environment: Mapping[str, str]) -> None:
        actors.append(threading.Thread(target=WorkerSupervisor().run, args=[environment]))
        actors[-1].start()

    actor(ray).run.options.return_value.remote.side_effect = run
    own = {"tls_dir": tls_dir, "token_file": token_file[0], "port": 0, "numerics": RING}
    config = ServeConfig(model_dir=BASE_MODEL, workers=2, launcher="ray", **own)
    outputs = []
    with Provider(config) as provider:
        assert len(told(ray)) == 2
        for executor in (
            serve(BASE_MODEL, numerics=RING),
            Executor(provider.url, token_file[1], tls_dir / "ca.pem"),
        ):
            with executor.connect() as session, torch.no_grad():
                outputs.append(session.load_model(progress=False)(torch.arange(20).view(1, -1)).logits)
    assert torch.equal(*outputs)
    for thread in actors:
        thread.join(800)
        assert not thread.is_alive()  # the executor said that there is nothing more to do
    ray.shutdown.assert_called_once_with()
