"""Services of a Compose file as processes of this machine, without containers.

Each service gets an address of the loopback (127.x.y.z) in place of a network of its own, so that ports stay
as the file has them. Replaced are: folders that are mounted, by those of this machine; 0.0.0.0, 127.0.0.1 and
names of services, by their addresses; the image's interpreter, by this one.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
_PROGRAM = {
    "serve": (sys.executable, "-m", "provider.cli", "serve"),
    "python": (sys.executable,),
}


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """With ``${NAME}``, ``${NAME:-other}`` and ``${NAME:?why}`` replaced.

    Raises:
        KeyError: a variable that is needed.
    """

    def value(match: re.Match[str]) -> str:
        name, kind, other = match.groups()
        if variables.get(name):
            return variables[name]
        if kind != "-":
            raise KeyError(f"{name}: {other or 'not set'}")
        return str(other)

    return _VARIABLE.sub(value, text)


def seconds(duration: str) -> float:
    """Of ``45s`` or ``15m``."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


class Composed:
    """A Compose file, whose services are started one by one.

    Args:
        file: the Compose file.
        variables: what it takes from the environment.
        scratch: for logs, and for files that name addresses.
    """

    def __init__(self, file: Path, variables: Mapping[str, str], scratch: Path) -> None:
        self._folder, self._scratch = file.parent, scratch
        document = yaml.safe_load(interpolated(file.read_text(), variables))
        self.services: dict[str, dict[str, Any]] = document["services"]
        # Tests at the same time have others: one in sixteen million is the same.
        net = f"127.{secrets.randbelow(250) + 1}.{secrets.randbelow(256)}.{{}}"
        self.address = {name: net.format(at) for at, name in enumerate(self.services, 1)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Composed:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def mounted(self, service: str) -> dict[str, Path]:
        """Folders and files of this machine by where they are in the container; all are read-only."""
        there = {}
        for volume in self.services[service]["volumes"]:
            source, target, mode = volume.rsplit(":", 2)
            assert mode == "ro"
            there[target] = self._folder / source
        return there

    def placed(self, service: str, text: str) -> str:
        """With this service's address for those that it has in its container, and others' for names."""
        own = self.address[service]
        text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", own, text)
        for name, address in self.address.items():
            text = re.sub(rf"(?<=\s){name}:", f"{address}:", text)
        return re.sub(r"(?<=bind ):", f"{own}:", text)

    def words(self, service: str, command: list[str]) -> list[str]:
        """A command of the file as it is run here. Files that are mounted are read for addresses, too."""
        words = [self.placed(service, word) for word in command]
        for target, source in self.mounted(service).items():
            if source.is_file():
                copy = self._scratch / f"{service}-{source.name}"
                copy.write_text(self.placed(service, source.read_text()))
                source = copy
            words = [re.sub(rf"(^|=){re.escape(target)}(?=/|$)", rf"\g<1>{source}", word) for word in words]
        return [*_PROGRAM.get(words[0], (words[0],)), *words[1:]]

    def environment(self, service: str) -> dict[str, str]:
        """What the file sets, on top of what is here."""
        return {**os.environ, **self.services[service].get("environment", {})}

    def log(self, service: str) -> str:
        return (self._scratch / f"{service}.log").read_text()

    def start(self, service: str, *more: str) -> None:
        """Start a service, with more options at the end."""
        command = [*self.words(service, self.services[service]["command"]), *more]
        with (self._scratch / f"{service}.log").open("wb") as log:
            self.processes[service] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(service)
            )

    def healthy(self, service: str) -> bool:
        """Run the health check of the file; a service that has ended is an error."""
        status = self.processes[service].poll()
        assert status is None, f"{service} ended with {status}:\n{self.log(service)}"
        kind, *command = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        done = subprocess.run(self.words(service, command), capture_output=True, timeout=800, check=False)
        return done.returncode == 0

    def stop(self, service: str) -> int:
        """As ``docker compose stop`` does; the exit status, if it ends within its grace."""
        self.processes[service].terminate()
        return self.processes[service].wait(seconds(self.services[service]["stop_grace_period"]))
