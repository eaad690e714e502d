"""How a gateway follows its folder of adapters; vLLM's part is a name here."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_gateway_front import awaited

from shared.errors import ConfigurationError
from tenant_sdk.gateway.admission import Authenticator, SequenceLimit


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with vLLM's request as an empty class."""
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.lora.request"].LoRARequest = object  # type: ignore[attr-defined]
    name = "tenant_sdk.gateway.adapter_registry"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def made(registries: Any, folder: Path) -> Any:
    settings = SimpleNamespace(authenticator=Authenticator([]), folder=folder, notify=print)
    return registries.AdapterRegistry(settings, None, None, SequenceLimit(4, 1))


@awaited
async def test_names_of_a_folder_that_changed_are_served_after_the_other_folders(
    registries: Any, tmp_path: Path
) -> None:
    """A client may have given hundreds of names to one folder."""
    registry = made(registries, tmp_path)
    added = list[str]()

    async def add(folder: Path, name: str = "", **_: bool) -> None:
        added.append(name)
        registry.served[name] = SimpleNamespace(source=folder)

    registry.add = add
    adapters = tmp_path / "adapters"
    for name in ("one", "two"):
        (adapters / name).mkdir(parents=True)
        (adapters / name / "adapter_config.json").write_text("{}")
    await registry.scan(adapters, begins=True)
    assert sorted(added) == ["one", "two"]
    names = [f"name-{at}" for at in range(registries.NAMES_OF_SCAN + 1)]
    registry.served |= {name: SimpleNamespace(source=adapters / "one") for name in names}
    registry.served["other"] = SimpleNamespace(source=adapters / "one")
    registry._owners |= {**dict.fromkeys(names, "0"), "other": "1"}
    added.clear()
    for name in ("one", "two"):
        (adapters / name / "adapter_config.json").write_text("{} ")
    await registry.scan(adapters)  # it may still be written
    assert added == []
    await registry.scan(adapters)
    assert sorted(added[:2]) == ["one", "two"]
    assert added[2:] == [names[0], "other", *names[1:-2]]
    await registry.scan(adapters)
    assert added[-2:] == names[-2:]
    count = len(added)
    await registry.scan(adapters)
    assert len(added) == count


@awaited
async def test_a_folder_that_was_refused_stays_so_if_another_name_of_it_is_served(
    registries: Any, tmp_path: Path
) -> None:
    """Or it would not be tried again."""
    registry = made(registries, tmp_path)
    fails = True

    async def add(folder: Path, name: str = "", **_: bool) -> None:
        if fails and name == folder.name:
            raise ConfigurationError("no room")
        registry.served[name] = SimpleNamespace(source=folder)

    registry.add = add
    adapters = tmp_path / "adapters"
    (adapters / "one").mkdir(parents=True)
    (adapters / "one" / "adapter_config.json").write_text("{}")
    registry.served |= {name: SimpleNamespace(source=adapters / "one") for name in ("one", "also")}
    await registry.scan(adapters, begins=True)
    assert registry.refused == {"one": "no room"}
    fails = False
    await registry.scan(adapters, again=True)
    assert registry.refused == {}


@awaited
async def test_a_name_that_is_removed_meanwhile_is_not_served_again(
    registries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be the folder's, which takes names that are kept for it."""
    registry = made(registries, tmp_path)
    imported = list[Path]()
    monkeypatch.setattr(registries, "import_adapter", lambda folder, *_, **__: imported.append(folder))
    registry.served["mine"] = SimpleNamespace(source=tmp_path, folder=tmp_path)
    async with registry._changing.hold("another"):
        scanning = asyncio.ensure_future(registry._add_again(tmp_path, "mine", renew=True))
        await asyncio.sleep(0)
        del registry.served["mine"]
    await scanning
    assert not imported
    assert not registry.served
    assert not registry.refused


def test_lines_on_adapters_are_limited_for_each_client(
    registries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can add and remove one without end; at the start, each adapter of the folder has a line."""
    lines, now, registry = list[str](), [0.0], made(registries, tmp_path)
    registry._settings.notify = lines.append
    monkeypatch.setattr(registries.time, "monotonic", lambda: now[0])
    for client, shown in (
        ("0", registries.LINES_PER_CALL_SITE),
        ("1", registries.LINES_PER_CALL_SITE),
        ("", registries.MAX_ADAPTERS),
    ):
        token = registries.current_client.set(client)
        lines.clear()
        for _ in range(2000):
            registry._notify("adapter a is served no more")
        assert len(lines) == shown
        registries.current_client.reset(token)
    now[0] = 61.0
    registry._notify("adapter b is served no more")
    assert (
        lines[-1]
        == f"adapter b is served no more ({2000 - registries.MAX_ADAPTERS} more since the last line)"
    )
