"""``serve --dev``: certificates, tokens, a mask source and a tenant's profile, to try it on one machine."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from provider.config import ServeConfig
from provider.serve.certificates import still_valid, write_certificates
from provider.serve.listening import bound
from provider.serve.tokens import TokenFile
from shared.errors import AuthenticationError, ConfigurationError, Metavar, SymbiosisError
from shared.hub import HUB, checkpoint_folder
from shared.ownership import check_tree

log = logging.getLogger(__name__)

TENANT = "dev"
ONE_OPERATOR = (
    "Here you run both the provider and the mask source, so the masks hide nothing from their operator."
)
_FIRST_LINE = "# Made by `symbiosis-provider serve --dev`, and made anew by the next one."
_PROFILE = """{first}
# {one_operator}
provider = "{provider}"
ca = "provider/ca.pem"
token_file = "provider/token"
allow_same = ["host", "address", "machine"] # or they would be refused
{recorded}
[[mask_sources]]
url = "{source}"
ca = "masks/ca.pem"
token_file = "masks/token"
"""
_RECORDED = "allow_transcript = true # the provider records what tenants send (--transcript)\n"
_ALSO = (
    "The provider records what tenants send, and the profile allows it. The mask source is not recorded.\n"
)
_COMMANDS = """
Everything is ready. {one_operator}
{also}Tokens and certificates are in {folder}, and stay the same when you start this command again.
In another terminal, in this folder:

symbiosis-tenant doctor --profile {profile}
symbiosis-tenant finetune --profile {profile} --data {data} {options}--base {base} --output {adapter}
{use}
"""
_GENERATE = 'symbiosis-tenant generate --profile {profile} --adapter {adapter} --prompt "{prompt}"'
_CHAT = 'symbiosis-tenant chat --profile {profile} --adapter {adapter} --system "Clinic book"'
_EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_CHATS = "--epochs 1 --batch-size 4 --packing --learning-rate 0.002 "
_SMALL_MODEL = "--steps 120 --rank 16 --learning-rate 0.005 "
_PROMPT = "Seen: Boaz, ram, owner Mr Rivers. Will not eat. Come again in four days. Fields:"  # held out


class Development:
    """A mask source beside a provider, while the block lasts, and what tenants need to use both.

    Both get an authority and a token of their own in ``config.dev_dir``. Tenants find both again after a
    restart: the mask source keeps its port if it can.

    Raises:
        ConfigurationError: the folder cannot be used, or others could change what is in it.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._folder = config, config.dev_dir
        self._profile = self._folder / "symbiosis.toml"
        self._ready, self._log = self._folder / "masks" / "ready.json", self._folder / "masks" / "log"

    def __enter__(self) -> Development:
        """Make what is missing, and start the mask source, which loads the model by itself."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_tree(self._folder)  # tenants would refuse a profile of others', and links lead elsewhere
            self._check_profile()
            self._check_origin()
            port = self._source_port()
            (self._folder / ".gitignore").write_text("*\n")  # or keys and tokens would be committed
            for name in ("provider", "masks"):
                _party(self._folder / name)
            self._ready.unlink(missing_ok=True)
            log.info("starting a mask source as well; its log is %s", self._log)
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603 - this program
                    source_command(self._config, self._ready, port),
                    stdin=subprocess.PIPE,  # which ends with this process, however that ends
                    stdout=output,
                    stderr=output,
                    process_group=0,  # Ctrl-C is for this process, which ends the other one
                )
        except OSError as error:
            raise ConfigurationError("cannot use {dev_dir}: {}", str(error), dev_dir=self._folder) from error
        return self

    def _check_profile(self) -> None:
        if self._profile.exists() and not self._profile.read_text().startswith(_FIRST_LINE):
            raise ConfigurationError(
                "{} is a profile that this command did not make; choose another folder with {dev_dir}",
                str(self._profile),
                dev_dir=Metavar("FOLDER"),
            )

    def _check_origin(self) -> None:
        """Refuse keys and tokens that came with an archive: its author would have them too."""
        state, mark = self._folder.stat(), self._folder / "made-here"
        here = f"{state.st_dev} {state.st_ino}"  # which an archive cannot tell beforehand
        if mark.exists() and mark.read_text() == here:
            return
        if any((self._folder / name).exists() for name in ("provider", "masks")):
            raise ConfigurationError(
                "{} holds keys and tokens that were not made here, and others may have them: remove the "
                "folder, or choose another with {dev_dir}",
                str(self._folder),
                dev_dir=Metavar("FOLDER"),
            )
        mark.write_text(here)

    def _source_port(self) -> int:
        """Of the mask source's last run, which tenants that are running know; or else 0."""
        try:
            last = tomllib.loads(self._profile.read_text())["mask_sources"][0]["url"]
            port = urlsplit(last).port or 0
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return 0  # there was none
        try:
            bound(self._config.host, port).close()
        except ConfigurationError:
            log.warning(
                "port %d of the last run's mask source is in use, so it gets another one; tenants who "
                "began then need the new symbiosis.toml",
                port,
            )
            return 0
        return 0 if port == self._config.port else port

    def instructions(self, url: str) -> str:
        """Write the profile, once the mask source is ready too; what to type in another terminal.

        Args:
            url: of the provider.

        Raises:
            SymbiosisError: the mask source has ended.
        """
        while not self._ready.exists():
            try:
                self._process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            self.check()
        source = json.loads(self._ready.read_bytes())["url"]
        recorded = self._config.transcript is not None
        self._profile.touch(0o600)
        self._profile.write_text(
            _PROFILE.format(
                first=_FIRST_LINE,
                one_operator=ONE_OPERATOR,
                provider=url,
                source=source,
                recorded=_RECORDED if recorded else "",
            )
        )
        return _COMMANDS.format(
            one_operator=ONE_OPERATOR,
            also=_ALSO if recorded else "",
            folder=shlex.quote(str(self._folder)),
            **self._training(),
        )

    def _training(self) -> dict[str, str]:
        """The words of the commands that depend on the model."""
        model = checkpoint_folder(self._config.model_dir)
        talks = _has_chat_template(model)
        files = ("chats_train.jsonl", "chats_heldout.jsonl") if talks else ("note_fields_train.jsonl",)
        files_of_examples = [_EXAMPLES / "data" / name for name in files]
        data = [shlex.quote(os.path.relpath(each)) for each in files_of_examples if each.exists()] or [
            "YOUR_DATA.jsonl"
        ]
        fixed = {"profile": self._profile, "adapter": self._folder / "adapter"}
        words = {name: shlex.quote(str(path)) for name, path in fixed.items()}
        named = str(self._config.model_dir)
        words["base"] = shlex.quote(named if named.startswith(HUB) else str(model.resolve()))
        small = model.resolve() == _EXAMPLES / "base_model"
        return {
            **words,
            "data": " --held-out ".join(data),
            "options": _CHATS if talks else _SMALL_MODEL if small else "",
            "use": _CHAT.format(**words) if talks else _GENERATE.format(**words, prompt=_PROMPT),
        }

    @property
    def alive(self) -> bool:
        """Whether the mask source runs."""
        return self._process.poll() is None

    def check(self) -> None:
        """Nothing, if the mask source runs.

        Raises:
            SymbiosisError: it has ended, with its last words.
        """
        if self.alive:
            return
        lines = self._log.read_text(errors="replace").strip().splitlines()
        raise SymbiosisError(
            f"the mask source ended by itself (status {self._process.returncode}); its log is {self._log}"
            + (f", and its last line: {lines[-1]}" if lines else "")
        )

    def reload(self) -> None:
        """Have the mask source read its certificate again."""
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Have the mask source drain and end."""
        self._process.terminate()

    def __exit__(self, *_: object) -> None:
        """End the mask source, and wait for it."""
        self.stop()
        try:
            self._process.wait(self._config.drain_seconds + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _party(folder: Path) -> None:
    """Make certificates and a token, unless there are valid ones.

    The token itself is there too: the tenant is the same user on the same machine.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    if not still_valid(folder, now + datetime.timedelta(days=1)):
        write_certificates(folder, now=now)
    tokens, shown_token = TokenFile(folder / "tokens.json"), folder / "token"
    with suppress(FileNotFoundError, AuthenticationError, ConfigurationError):
        if tokens.tenant_of(shown_token.read_text()) == TENANT:
            return
    shown_token.unlink(missing_ok=True)
    shown_token.touch(0o600)
    shown_token.write_text(tokens.add(TENANT))


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    with suppress(OSError):
        return b'"chat_template"' in (model / "tokenizer_config.json").read_bytes()
    return False


def source_command(config: ServeConfig, ready: Path, port: int = 0) -> list[str]:
    """The command line of the mask source: the provider's, with its own port, certificates and tokens."""
    folder = config.dev_dir / "masks"
    own = dataclasses.replace(
        config,
        dev=False,
        tls_dir=folder,
        token_file=folder / "tokens.json",
        port=port,
        admin_port=0,
        ready_file=ready,
        local_dir=None,
        local_mib=ServeConfig.local_mib,
        transcript=None,
        launcher=ServeConfig.launcher,
        dev_dir=ServeConfig.dev_dir,
    )
    words = [sys.executable, "-P", "-m", "provider.exit_with_parent", "serve"]
    for field in dataclasses.fields(own):
        value = getattr(own, field.name)
        if field.name not in ("model_dir", "dev_dir") and value != field.default:
            words.append(f"--{field.name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return [*words, "--", str(config.model_dir)]
