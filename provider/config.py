"""All options of ``symbiosis-provider serve``, in one object that is checked when it is made."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from shared.errors import ConfigurationError, Metavar, OptionReference, OptionText
from shared.hosts import LOOPBACK
from shared.options import Option, check_fields

FLOATS = ("float32", "bfloat16")
_WORKERS = OptionText("{workers}", workers=Metavar("N"))
_TRIED = "Trial"
SERVED = "Model and products"
_ADMITTED = "Access"
_LOCAL = "Tenants of this machine"
_LIMITS = "Limits"
_SCHEDULING = "Scheduling"
_OBSERVED = "Monitoring"


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How a model's products are computed, and by how many workers; see ``check_workers``."""

    numerics: Annotated[
        str,
        Option(
            SERVED,
            "ring, ring-fine (more exact, answers of twice the size), float32 or bfloat16. One-time masks "
            "and verification need ring or ring-fine.",
            choices=(*FLOATS, "ring", "ring-fine"),
        ),
    ] = "ring"
    workers: Annotated[
        int,
        Option(
            SERVED,
            "Worker processes, which share the layers and are restarted if they end. 0: this process "
            "computes everything.",
            minimum=0,
        ),
    ] = 0
    devices: Annotated[
        str,
        Option(
            SERVED,
            "Devices where products run, one worker on each, such as cuda:0,cuda:1. Layers are placed by "
            "free memory and speed. cpu,cpu means the same as {workers} 2.",
        ),
    ] = ""
    stripes: Annotated[
        int,
        Option(
            SERVED,
            "Workers that share each layer's outputs, for layers that are too large for one worker, or for "
            "faster products. The number of workers must be a multiple of this. 1: each layer is in one "
            "worker.",
            minimum=1,
        ),
    ] = 1

    def check_workers(self) -> None:
        """Refuse workers that contradict each other, or cannot share layers evenly.

        Raises:
            ConfigurationError: see above.
        """
        if self.devices and self.workers:
            self._refuse_beside_devices("workers", self.workers)
        if not all(self.worker_devices):
            raise ConfigurationError(
                "{devices} lacks a name between two commas or at an end", devices=self.devices
            )
        if max(1, len(self.worker_devices)) % self.stripes:
            argument = (
                OptionReference("devices", self.devices)
                if self.devices
                else OptionReference("workers", self.workers)
            )
            raise ConfigurationError(
                "{} cannot be divided into {stripes}: give a multiple of {} workers",
                *(argument, self.stripes),
                stripes=self.stripes,
            )

    def _refuse_beside_devices(self, name: str, value: object) -> NoReturn:
        raise ConfigurationError(
            "{devices} has a worker for each device it names: leave out {}",
            OptionReference(name, value),
            devices=self.devices,
        )

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each worker; empty: there are none, all is in one process."""
        if self.devices:
            return tuple(name.strip() for name in self.devices.split(","))
        return ("cpu",) * self.workers


@dataclass(frozen=True, kw_only=True)
class ServeConfig(WorkerOptions):
    """Options of a provider. The annotation of each field has its meaning; its name may have the unit.

    Raises:
        ConfigurationError: A value is not valid, or two options contradict each other.
    """

    model_dir: Annotated[
        Path,
        Option(
            SERVED,
            "Checkpoint: a folder with safetensors, a GGUF file, or hub:NAME[@REVISION].",
            unit="MODEL",
            argument=True,
        ),
    ]
    serve_head: Annotated[
        bool, Option(SERVED, "Also serve the output head. Default: tenants compute it.", negative=True)
    ] = False
    device: Annotated[str, Option(SERVED, "Device of products: cpu, cuda, cuda:1, ...")] = "cpu"
    threads: Annotated[
        int,
        Option(
            SERVED,
            "Threads for one product. 0: the default. Without workers, it is torch's. With workers on the "
            "CPU, these share the machine's processors equally. If no worker is on the CPU, all workers "
            "share them. With Ray, it is one.",
            minimum=0,
        ),
    ] = 0
    part: Annotated[
        str,
        Option(
            SERVED,
            "Serve only part k of n parts of the layers, written k/n. The hosts of the parts do not "
            "communicate; tenants give the URLs of all. Default: all layers.",
        ),
    ] = ""
    fsdp: Annotated[
        bool,
        Option(
            SERVED,
            "Each worker holds a shard of every layer, and gathers the layer for each product, as PyTorch's "
            "FSDP does: a slow baseline for float32 and bfloat16.",
            negative=True,
        ),
    ] = False
    launcher: Annotated[
        str,
        Option(
            SERVED,
            "Launcher of the workers. process: this process starts them, on this machine. ray: Ray starts "
            "them, in the cluster at RAY_ADDRESS, or on this machine if that is not set. Workers of Ray or "
            "torchrun join without authentication, and rows travel to them without TLS: use a "
            "network that only the executor's machines reach.",
            choices=("process", "ray"),
        ),
    ] = "process"
    plan: Annotated[
        bool,
        Option(
            SERVED,
            "Print the planned layers of each worker, with reasons, and exit. This loads no weights and "
            "opens no port.",
        ),
    ] = False
    json: Annotated[bool, Option(SERVED, "Print the output of {plan} as JSON, for programs.")] = False
    tls_dir: Annotated[
        Path | None,
        Option(
            _ADMITTED, "Folder with server.pem and server.key. Required, unless {dev} or {plan} is given."
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        Option(_ADMITTED, "Token file that `token add` makes. Required, unless {dev} or {plan} is given."),
    ] = None
    host: Annotated[str, Option(_ADMITTED, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Option(_ADMITTED, "Port to listen on. 0: any free port.", minimum=0, maximum=65535)
    ] = 8765
    client_ca: Annotated[
        Path | None,
        Option(
            _ADMITTED,
            "PEM file of the authority that signed tenants' certificates. Tenants without such a "
            "certificate are refused.",
        ),
    ] = None
    max_connections: Annotated[
        int,
        Option(
            _LIMITS, "Maximum number of connections. Further connections are closed immediately.", minimum=1
        ),
    ] = 256
    tenant_connections: Annotated[
        int, Option(_LIMITS, "Maximum number of connections of one tenant.", minimum=1)
    ] = 64
    tenant_mib: Annotated[
        int,
        Option(
            _LIMITS,
            "MiB of requests and answers that one tenant may have in flight. 0: no limit.",
            minimum=0,
        ),
    ] = 512
    total_mib: Annotated[
        int,
        Option(
            _LIMITS,
            "MiB of all tenants' requests and answers in flight. If a tenant has nothing in flight, it may "
            "send one request of at most 1/128 of this limit, even if the limit is reached. 0: no limit.",
            minimum=0,
        ),
    ] = 2048
    tenant_rows: Annotated[
        int, Option(_LIMITS, "Rows that one tenant may have in flight. 0: no limit.", minimum=0)
    ] = 0
    tenant_requests: Annotated[
        float, Option(_LIMITS, "Requests that one tenant may send in a second. 0: no limit.", minimum=0)
    ] = 0.0
    tenant_mib_per_second: Annotated[
        float,
        Option(_LIMITS, "MiB of requests that one tenant may send in a second. 0: no limit.", minimum=0),
    ] = 0.0
    drain_seconds: Annotated[
        float,
        Option(
            _LIMITS,
            "Maximum time after SIGTERM in which the executor answers the requests that have arrived. It "
            "then ends all sessions.",
            minimum=0,
        ),
    ] = 10.0
    max_connection_seconds: Annotated[
        float,
        Option(
            _LIMITS,
            "Maximum age of a connection, varied by up to 10 %. When a connection reaches it, the "
            "executor answers the requests that have arrived, reads no others, and ends the connection. The "
            "tenant's SDK connects again, perhaps to another replica. 0: no maximum.",
            minimum=0,
        ),
    ] = 0.0
    batching: Annotated[
        str,
        Option(
            _SCHEDULING,
            "Requests that share a product. opportunistic: all that have arrived. none: each has its own "
            "product. lockstep: one request of each active tenant.",
            choices=("opportunistic", "none", "lockstep"),
        ),
    ] = "opportunistic"
    decode_objective_ms: Annotated[
        float,
        Option(
            _SCHEDULING,
            "Time that the executor aims to take for one decoded token, in all layers together.",
            minimum=1,
        ),
    ] = 100.0
    decode_rows: Annotated[
        int,
        Option(
            _SCHEDULING,
            "Sequences that one tenant may decode at once. Further sequences get the priority of prompts.",
            minimum=1,
        ),
    ] = 256
    batch_wait_ms: Annotated[
        float,
        Option(
            _SCHEDULING,
            "Longest time that a request waits for others that could share its product.",
            minimum=0,
        ),
    ] = 5.0
    local_dir: Annotated[
        Path | None,
        Option(
            _LOCAL,
            "Also admit tenants of the same user on this machine, through this directory (ipc://DIR).",
        ),
    ] = None
    local_mib: Annotated[
        int, Option(_LOCAL, "MiB of shared memory for all sessions of {local_dir} together.", minimum=1)
    ] = 2048
    admin_host: Annotated[
        str,
        Option(
            _OBSERVED,
            "Address of {admin_port}. Its pages have no password. If the address is not loopback, make sure "
            "that only your cluster reaches it.",
        ),
    ] = "127.0.0.1"
    admin_port: Annotated[
        int,
        Option(
            _OBSERVED,
            "Port of the status page, /metrics, /usage.csv, /healthz and /readyz. 0: any free port.",
            minimum=0,
            maximum=65535,
        ),
    ] = 0
    ready_file: Annotated[
        Path | None,
        Option(
            _OBSERVED,
            "JSON file that is written when tenants can connect, with url, pid, admin_url and, with "
            "{local_dir}, local_url.",
        ),
    ] = None
    log_format: Annotated[
        str, Option(_OBSERVED, "text, or json: one object a line.", choices=("text", "json"))
    ] = "text"
    usage_file: Annotated[
        Path | None,
        Option(
            _OBSERVED,
            "Append each tenant's usage to this CSV file; %Y-%m in its name makes one file a month.",
        ),
    ] = None
    usage_seconds: Annotated[
        int,
        Option(_OBSERVED, "Seconds between two entries in {usage_file}. 3600: at each full hour.", minimum=1),
    ] = 3600
    transcript: Annotated[
        Path | None,
        Option(
            _OBSERVED,
            "Folder for a recording of tenants' messages, for an audit. The manifest tells tenants that the "
            "executor records. The mask source of {dev} records nothing.",
        ),
    ] = None
    dev: Annotated[
        bool,
        Option(
            _TRIED,
            "Make certificates and tokens, also run a mask source, and print commands for a tenant.",
        ),
    ] = False
    dev_dir: Annotated[
        Path, Option(_TRIED, "Folder for the files that {dev} makes. Later runs use them again.")
    ] = Path("symbiosis-dev")

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        check_fields(self)
        for name in ("tls_dir", "token_file", "client_ca"):
            value = getattr(self, name)
            if self.dev and value is not None:
                raise ConfigurationError(
                    "{dev} makes certificates and tokens in {dev_dir}: leave out {}",
                    OptionReference(name, value),
                    dev=True,
                    dev_dir=self.dev_dir,
                )
            if not (self.dev or self.plan) and value is None and name != "client_ca":
                raise ConfigurationError(
                    "{} is missing: see `symbiosis-provider certs` and `token add`; or try it all out on "
                    "one machine with {dev}, which makes certificates and tokens",
                    OptionReference(name, Metavar("PATH")),
                    dev=True,
                )
        self._check_together()
        if self.dev and not self.numerics.startswith("ring"):
            raise ConfigurationError(
                "{dev} is for one-time masks, which need integers: leave out {numerics}; to try these "
                "numerics, serve without {dev}, with the files of `symbiosis-provider certs` and `token "
                "add`, and give tenants --privacy plain",
                dev=True,
                numerics=self.numerics,
            )
        if self.dev and self.host not in LOOPBACK:
            raise ConfigurationError(
                "{dev} is for one machine: {host} must be one of {}",
                ", ".join(LOOPBACK),
                dev=True,
                host=self.host,
            )

    def _check_together(self) -> None:
        """Refuse values that contradict each other, and those that without another one mean nothing."""
        if self.port and self.port == self.admin_port:
            raise ConfigurationError(
                "{port} and {admin_port} are the same; change one of them",
                port=self.port,
                admin_port=self.admin_port,
            )
        changed = {each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default}
        for part, whole in (("tenant_mib", "total_mib"), ("tenant_connections", "max_connections")):
            limit = getattr(self, whole)
            if part in changed and limit and getattr(self, part) > limit:
                raise ConfigurationError(
                    "{} is too much: all tenants together have {}; lower one, or raise the other",
                    OptionReference(part, getattr(self, part)),
                    OptionReference(whole, limit),
                )
        for name, other, wanted in (
            ("usage_seconds", "usage_file", OptionText("{usage_file}", usage_file=Metavar("FILE"))),
            ("local_mib", "local_dir", OptionText("{local_dir}", local_dir=Metavar("FOLDER"))),
            ("dev_dir", "dev", OptionText("{dev}", dev=True)),
            ("fsdp", "workers", _WORKERS),
            ("launcher", "workers", _WORKERS),
            (
                "stripes",
                "worker_devices",
                OptionText("{} or {devices}", _WORKERS, devices=Metavar("NAME,NAME")),
            ),
            ("json", "plan", OptionText("{plan}", plan=True)),
        ):
            if name in changed and not getattr(self, other):
                raise ConfigurationError(
                    "{} has no effect without {}: add the second, or leave out the first",
                    OptionReference(name, getattr(self, name)),
                    wanted,
                )
        if self.part and not re.fullmatch(r"[1-9]\d{0,5}/[1-9]\d{0,5}", self.part):
            raise ConfigurationError(
                "{part} must be written k/n, such as 1/2 for the first of two", part=self.part
            )
        if (own := self.part_of_groups) is not None and own[0] > own[1]:
            raise ConfigurationError(
                "{part} must be one of {} parts, and there is no number {}", own[1], own[0], part=self.part
            )
        if self.part and self.plan:
            raise ConfigurationError("{plan} covers all layers: leave out {part}", plan=True, part=self.part)
        if self.fsdp and self.plan:
            raise ConfigurationError("{plan} covers whole layers and stripes: leave out {fsdp}", plan=True)
        if self.devices and "device" in changed:
            self._refuse_beside_devices("device", self.device)
        self.check_workers()
        self._check_fsdp()
        self._check_ray()

    def _check_fsdp(self) -> None:
        """Refuse what cannot be sharded so."""
        if self.fsdp and self.numerics not in FLOATS:
            raise ConfigurationError(
                "{} shards floats, but {numerics} has none: choose {}, or leave out {fsdp}",
                OptionReference("fsdp", True),
                " or ".join(FLOATS),
                numerics=self.numerics,
            )
        if self.fsdp and self.stripes > 1:
            raise ConfigurationError(
                "{fsdp} shards each layer among all workers: leave out {stripes}",
                fsdp=True,
                stripes=self.stripes,
            )
        if self.fsdp and self.device.startswith("cuda:"):
            raise ConfigurationError(
                "{fsdp} gives each worker a GPU of its own: replace {} by {}",
                OptionReference("device", self.device),
                OptionReference("device", "cuda"),
                fsdp=True,
            )

    def _check_ray(self) -> None:
        """Refuse what Ray's workers cannot do."""
        if self.launcher != "ray":
            return
        if self.fsdp:
            raise ConfigurationError(
                "{launcher} gives each layer to one worker: leave out {fsdp}", launcher="ray"
            )
        if self.stripes > 1:
            raise ConfigurationError(
                "{launcher} gives each layer to one worker: leave out {stripes}",
                launcher="ray",
                stripes=self.stripes,
            )
        if self.device not in ("cpu", "cuda"):
            raise ConfigurationError(
                "{launcher} gives each worker a GPU that Ray chooses: replace {} by {}",
                OptionReference("device", self.device),
                OptionReference("device", "cuda"),
                launcher="ray",
            )

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each worker; empty: there are no workers."""
        return super().worker_devices if self.devices else (self.device,) * self.workers

    @property
    def part_of_groups(self) -> tuple[int, int] | None:
        """The number of the part, from 1, and the number of parts; None: all layers."""
        if not self.part:
            return None
        index, count = self.part.split("/")
        return int(index), int(count)

    @property
    def certificates(self) -> Path:
        """The folder with ``server.pem`` and ``server.key``."""
        return self.tls_dir or self.dev_dir / "provider"

    @property
    def tokens(self) -> Path:
        """The file with the tokens' hashes."""
        return self.token_file or self.dev_dir / "provider" / "tokens.json"
