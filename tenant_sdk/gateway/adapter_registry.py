"""The adapters that a gateway serves: added and removed by request, or as their folder changes."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.lora.request import LoRARequest

from shared.errors import ConfigurationError
from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.gateway.adapters import Adapter, folders_in, import_adapter
from tenant_sdk.gateway.admission import MAX_ADAPTERS, SequenceLimit
from tenant_sdk.gateway.client_locks import FairLock, current_client
from tenant_sdk.gateway.log_redaction import CALL_SITE_SECONDS, LINES_PER_CALL_SITE
from tenant_sdk.gateway.reservations import Reservations
from tenant_sdk.gateway.unused_copies import UnusedCopies
from tenant_sdk.storage import ADAPTER_CONFIG, ADAPTER_WEIGHTS, files_version
from tenant_sdk.tuning.provenance import RECORD

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

    from tenant_sdk.gateway.endpoints import GatewaySettings

SCAN_SECONDS = 1.0  # between two scans of the folder of adapters
SCANS_OF_REFUSED = 60  # one in so many also looks at refused adapters
NAMES_OF_SCAN = 8  # further names of folders that changed, which a scan serves anew
_NAMED = 20  # models in an error


class _RemovedError(Exception):
    """A name is not served any more."""


class AdapterRegistry:
    """Which adapters are served, and whose each is.

    Args:
        settings: of the server.
        engine: vLLM's client of it.
        models: vLLM's, whose ``lora_requests`` chooses the adapter of each request by its name.
        sequence_limit: with the sequences that may use copies of adapters.

    Attributes:
        served: adapters, by name.
        refused: folders that hold none, and why.
    """

    def __init__(
        self, settings: GatewaySettings, engine: EngineClient, models: Any, sequence_limit: SequenceLimit
    ) -> None:
        self._settings, self._engine, self._models = settings, engine, models
        self.served, self.refused = dict[str, Adapter](), dict[str, str]()
        self._changing = FairLock()
        # Names of each client, and of the folder if it is watched; and whose each is.
        authenticator = settings.authenticator
        self._names = Reservations.per_client_minimum(
            MAX_ADAPTERS, authenticator.clients + bool(authenticator.keys)
        )
        self._owners = dict[str, str]()
        self._last_id = 0
        # Of each folder below --adapters: its files when it was taken, and when it was last looked at.
        self._seen, self._marks = dict[str, object](), dict[str, object]()
        self._outdated = dict[str, None]()  # names whose folder has changed since, oldest first
        self._unused = UnusedCopies(sequence_limit)
        # Of lines for the operator, by client. The folder has more: each adapter has one at the start.
        self._limiters = defaultdict(
            lambda: LogRateLimiter(CALL_SITE_SECONDS, LINES_PER_CALL_SITE),
            {"": LogRateLimiter(CALL_SITE_SECONDS, MAX_ADAPTERS)},
        )

    def unserved(self, name: str) -> str:
        """Why a model of this name is not served; empty: it is."""
        if not name or name in self.served or self._models.is_base_model(name):
            return ""
        names = [self._models.model_name(), *self.served]
        others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return self.refused.get(name, f"the models here are {', '.join(names[:_NAMED])}{others}")

    async def add(self, folder: Path, name: str = "", *, renew: bool = False) -> Adapter:
        """Serve an adapter, in place of the one of this name if its content is another.

        Args:
            renew: only if the name is still served when the client has the lock.

        Raises:
            _RemovedError: it is not.
            SymbiosisError: see ``tenant_sdk.gateway.adapters.import_adapter``.
        """
        settings = self._settings
        async with self._changing.hold(current_client.get()):
            if renew and name not in self.served:
                raise _RemovedError
            adapter = await asyncio.to_thread(
                import_adapter,
                folder,
                settings.folder / "adapters",
                settings.manifest,
                name=name,
                most_rank=settings.most_rank,
                allow_other_base=settings.allow_other_base,
                within=settings.adapters,
            )
            if self._models.is_base_model(adapter.name):
                raise ConfigurationError(f"{adapter.name} is the base model's name; give the adapter another")
            if adapter.name != folder.name and (folder.parent / adapter.name).is_dir():
                raise ConfigurationError(f"{adapter.name} is the name of another folder there; give another")
            before = self.served.get(adapter.name)
            if before is not None and before.folder == adapter.folder:
                return before
            owner = self._owners.get(adapter.name, current_client.get())
            if adapter.name not in self._owners and not self._names.reserve(owner, 1):
                mine = self._names.taken.get(owner, 0)
                raise ConfigurationError(
                    f"{mine} adapters are yours, and of {MAX_ADAPTERS} a part is kept for others; remove one"
                )
            self._owners[adapter.name] = owner
            # The path is part of what its prefixes are cached under, and no other content has it.
            request = LoRARequest(adapter.name, self._id_of(adapter.folder), str(adapter.folder))
            try:
                await self._engine.add_lora(request)
            except Exception as error:
                if before is None:
                    self._release_owner(adapter.name)
                why = str(error).removeprefix("Call to add_lora method failed: ")
                why = why.replace(str(adapter.folder), str(folder))
                raise ConfigurationError(f"the adapter in {folder} cannot be loaded: {why}") from error
            # Without a moment in which nobody has the name.
            self._unused.used_again(adapter.folder)
            old = self._models.lora_requests.get(adapter.name)
            self._models.lora_requests[adapter.name], self.served[adapter.name] = request, adapter
            await self._unload(old)
            self._notify(f"adapter {adapter.name}: rank {adapter.rank}, of {folder}")
            if adapter.notes:
                self._notify(adapter.notes)
            return adapter

    async def remove(self, name: str) -> bool:
        """Serve it no more; sequences that use it go on. Whether it was served."""
        async with self._changing.hold(current_client.get()):
            return await self._forget(name)

    async def _forget(self, name: str) -> bool:
        # ``remove_unused_copies`` removes its copy later: the worker may load it again for sequences that use
        # it.
        request = self._models.lora_requests.pop(name, None)
        gone = self.served.pop(name, None)
        self._release_owner(name)
        if request is not None:
            await self._unload(request)
            self._notify(f"adapter {name} is served no more")
        return gone is not None

    def _notify(self, line: str) -> None:
        """Show a line to the operator: some a minute, since a client may add and remove adapters for ever."""
        limiter = self._limiters[current_client.get()]
        if limiter.due(time.monotonic()):
            self._settings.notify(f"{line}{limiter.more()}")

    def _id_of(self, folder: Path) -> int:
        """What the worker knows a content by, of which it has one in memory, whatever names it has."""
        for request in self._models.lora_requests.values():
            if request.lora_path == str(folder):
                return int(request.lora_int_id)
        self._last_id += 1
        return self._last_id

    async def _unload(self, request: LoRARequest | None) -> None:
        """Take it from memory if no name has its content any more."""
        if request is not None and all(
            other.lora_int_id != request.lora_int_id for other in self._models.lora_requests.values()
        ):
            await self._engine.remove_lora(request.lora_int_id)

    def _release_owner(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            self._names.release(owner, 1)

    async def remove_unused_copies(self) -> None:
        """Remove copies that no name has, and no request may use any more; to be done each second."""
        async with self._changing.hold(current_client.get()):
            present = [*(self._settings.folder / "adapters").iterdir()]
            used = {adapter.folder for adapter in self.served.values()}
            for folder in self._unused.removable(present, used):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def scan(self, folder: Path, *, begins: bool = False, again: bool = False) -> None:
        """Serve what is in the folder, and no more what was in it.

        Args:
            begins: all that is there is complete; later a folder may still be written until two scans see the
                same.
            again: also look at those that were refused, whose reason may have gone.
        """
        files = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, RECORD)
        marks = await asyncio.to_thread(
            lambda: {path.name: files_version(path, files) for path in folders_in(folder)}
        )
        last, self._marks = marks if begins else self._marks, marks
        self.refused = {name: why for name, why in self.refused.items() if name in marks}
        for name, adapter in list(self.served.items()):
            if adapter.source.parent == folder and adapter.source.name not in marks:
                await self.remove(name)
        self._seen = {name: mark for name, mark in self._seen.items() if name in marks}
        for name, mark in marks.items():
            # As it was; nor is one that was deleted by request served again.
            known = self._seen.get(name) == mark and not (again and name in self.refused)
            if known or last.get(name) != mark:
                continue
            self._seen[name] = mark
            await self._add_again(folder / name, name)
            self._outdated.update(
                dict.fromkeys(
                    other
                    for other, adapter in self.served.items()
                    if adapter.source == folder / name and other != name
                )
            )
        # One client may have given hundreds of names to one folder, and neither the next scan nor other
        # clients' names must wait for all.
        by_owner: dict[str, list[str]] = {}
        for name in self._outdated:
            by_owner.setdefault(self._owners.get(name, ""), []).append(name)
        alternating = [name for each in zip_longest(*by_owner.values()) for name in each if name is not None]
        for name in alternating[:NAMES_OF_SCAN]:
            del self._outdated[name]
            if name in self.served:
                await self._add_again(self.served[name].source, name, renew=True)

    async def _add_again(self, folder: Path, name: str, *, renew: bool = False) -> None:
        """Serve a folder that has changed under one of its names, or note why not."""
        try:
            await self.add(folder, name, renew=renew)
            if name == folder.name:
                self.refused.pop(name, None)
        except _RemovedError:  # by its owner, while it waited for the lock: it is nobody's any more
            return
        except Exception as error:  # whatever it is, the other folders are served
            if self.refused.get(folder.name) != str(error):
                self._notify(str(error))
            self.refused[folder.name] = str(error)

    async def watch(self, folder: Path) -> None:
        """Scan again and again. Libraries that are notified of changes follow links out of the folder."""
        reported = ""
        for scans in count(1):
            await asyncio.sleep(SCAN_SECONDS)
            try:
                await self.scan(folder, again=scans % SCANS_OF_REFUSED == 0)
                reported = ""
            except Exception as error:  # the next scan may be a better one
                if reported != str(error):
                    reported = str(error)
                    self._notify(f"cannot look into {folder}: {error}")
