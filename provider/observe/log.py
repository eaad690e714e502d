"""What an executor writes to standard error."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler

console = Console(stderr=True, soft_wrap=True)


def log_to_console() -> None:
    """From now on, what this process logs goes there."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, rich_tracebacks=False)],
    )
    with console.capture():  # the first line imports modules; a later one may say that no file can be opened
        logging.getLogger(__name__).info("")
