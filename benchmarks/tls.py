"""An executor's TLS against Mozilla's "modern" profile, as sslyze sees it.

    python benchmarks/tls.py --sslyze .venv-sslyze/bin/sslyze    # `make harden` installs it

It exits with 1 if sslyze finds something that is not explained below.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from common import executor
from rich.console import Console

MODEL = Path(__file__).resolve().parent.parent / "examples" / "base_model"
EXPLAINED = {
    r"certificate_path_validation: .*": "no public authority signed it; tenants name the one that did",
    r"tls_curves: TLS curves \{('X448'|'secp521r1'|, )+\} are supported.*": (
        "strong curves; a server on Python 3.15 has a list without them, and older ones cannot set one"
    ),
}
console = Console(width=None if sys.stdout.isatty() else 120)


def main() -> int:
    """Scan, and print each finding with its explanation; 1 if one has none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sslyze", default="sslyze", help="the program")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="symbiosis-bench-") as name,
        executor(MODEL, Path(name) / "executor", "--numerics", "ring") as running,
    ):
        at = urlsplit(running.url)
        command = [options.sslyze, "--mozilla_config=modern", f"{at.hostname}:{at.port}"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    console.print(said, markup=False)
    _, checked, verdict = said.partition('Checking results against Mozilla\'s "modern" configuration')
    findings = re.findall(r"(?m)^\s+\* (\w+: .*)$", verdict)
    unexplained = [] if checked else ["sslyze did not compare the executor with the profile"]
    for finding in findings:
        reasons = [reason for pattern, reason in EXPLAINED.items() if re.fullmatch(pattern, finding)]
        unexplained += [] if reasons else [finding]
        console.print(f"{finding}\n  {reasons[0] if reasons else 'not explained'}", markup=False)
    console.print(
        f"{len(findings)} findings; not explained: {'; '.join(unexplained) or 'none'}", markup=False
    )
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
