"""The compiled products on their own: no byte is read that is not the weight's, and ARM gives the same
integers.

For ARM, on a machine that is none: ``apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user``.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "tests" / "native" / "products.c", ROOT / "shared" / "ring" / "product.c"]


def built(compiler: str, output: Path, *options: str) -> Path:
    """The program, made by this compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    command = [compiler, "-O2", "-fopenmp", "-Wall", "-Wextra", "-Werror", *options, *SOURCES, "-o", output]
    subprocess.run(command, check=True, timeout=800)
    return output


def test_nothing_is_read_beyond_a_weight(tmp_path: Path) -> None:
    """By the compiler's own watch over every access."""
    program = built(
        "gcc", tmp_path / "products", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr


def test_arm_gives_the_same_integers(tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("there is no qemu-aarch64")
    program = built("aarch64-linux-gnu-gcc", tmp_path / "products", "-static")
    done = subprocess.run(["qemu-aarch64", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["neon"]
