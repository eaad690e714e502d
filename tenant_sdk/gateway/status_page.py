"""The page at ``/``: its content, and the rights of a browser with it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _hash(tag: str) -> str:
    """The only element of this name in the page, as Content-Security-Policy names it (CSP 3 §2.3.1)."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# Its own script and style, and what this server tells it; nothing from elsewhere, and in nobody's frame.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash('script')}; "
    f"style-src {_hash('style')}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
