"""Connections to the executors that together serve all groups: one, unless each serves a part of them.

So hosts of one provider need not talk to each other: a request goes to the one that has its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shared.errors import ModelMismatch
from shared.wire.messages import Limits, Manifest
from shared.wire.protocol import validate_manifest
from tenant_sdk.connection.replicas.reconnecting import (
    ConnectionOptions,
    FindReplicas,
    ReconnectingConnection,
)


class PartConnections:
    """One connection for each part of the groups.

    Args:
        find, options: see ``ReconnectingConnection``. A part may have replicas.

    Attributes:
        all: the connections.
        manifest: what they serve together.

    Raises:
        SymbiosisError: no executor that can be used serves some group; see ``ReconnectingConnection``.
    """

    def __init__(self, find: FindReplicas, options: ConnectionOptions) -> None:
        self.all = [ReconnectingConnection(find, options)]
        first = self.all[0].manifest
        if first.part is not None:
            self.all[0].pin_to_part(first.part[0])
        try:
            while (group := self._missing(len(first.groups))) is not None:
                if len(self.all) >= len(find()):
                    raise ModelMismatch(
                        f"{', '.join(find())}: nobody there serves group {group} of {len(first.groups)}; "
                        "name all executors of the provider, each of which serves a part of the layers"
                    )
                party = f"{options.party}, groups from {group}"
                of_part = replace(options, party=party, digest=first.digest)
                self.all.append(ReconnectingConnection(find, of_part, group))
            self.manifest = merge_manifests([connection.manifest for connection in self.all])
        except BaseException:
            self.close()
            raise
        self._by_group = [
            next(each for each in self.all if each.manifest.serves(group))
            for group in range(len(first.groups))
        ]

    def connection_for(self, group: int) -> ReconnectingConnection:
        """Returns the connection to the executor that serves a group."""
        return self._by_group[group] if self._by_group else self.all[0]

    def _missing(self, groups: int) -> int | None:
        served = [connection.manifest for connection in self.all]
        return next((g for g in range(groups) if not any(each.serves(g) for each in served)), None)

    def close(self) -> None:
        """End all; none is opened again."""
        for connection in self.all:
            connection.close()


def merge_manifests(manifests: Sequence[Manifest]) -> Manifest:
    """Returns one manifest for executors that serve a part each.

    Each group is as the executor that serves it lists it, and limits are the smallest ones.

    Raises:
        ModelMismatch: they do not serve the same.
    """
    first = manifests[0]
    if len(manifests) == 1:
        return first
    numerics = sorted({manifest.numerics for manifest in manifests})
    if len(numerics) > 1:
        raise ModelMismatch(
            f"executors that serve a part of the layers each compute in {' and '.join(numerics)}; ask their "
            "operator for one of them"
        )
    for other in manifests[1:]:
        if _common(other) != _common(first):
            raise ModelMismatch(
                "executors that serve a part of the layers each do not group them alike; ask their operator "
                "to serve the same checkpoint with the same options"
            )
    whole = msgspec.structs.replace(
        first,
        part=None,
        groups=tuple(
            next(each.groups[group] for each in manifests if each.serves(group))
            for group in range(len(first.groups))
        ),
        limits=Limits(
            *(min(getattr(each.limits, name) for each in manifests) for name in Limits.__struct_fields__)
        ),
        recorded=any(each.recorded for each in manifests),
    )
    validate_manifest(whole)
    return whole


def _common(manifest: Manifest) -> tuple[object, ...]:
    """Returns what is the same in the manifests of all parts."""
    groups = tuple(msgspec.structs.replace(group, bounds=None) for group in manifest.groups)
    return groups, manifest.wire_dtypes, manifest.unavailable, manifest.model
