"""The compiled part of the package, which is optional; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "shared.ring._native",
            ["shared/ring/product.c", "shared/ring/rows.c"],
            depends=["shared/ring/product_kernel.h", "shared/ring/product_amx.h"],
            # The rounding mode and floating-point traps are nobody's business here, which lets
            # rounding be done by vectors.
            extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"],
            extra_link_args=["-fopenmp"],
            optional=True,  # without a compiler, torch computes the same
        )
    ]
)
