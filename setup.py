"""Finds the packages; everything else about them is in pyproject.toml."""

import warnings

from setuptools import find_packages, setup

warnings.filterwarnings("ignore", "Editable installation")  # of folders that lie elsewhere

# `convert/` stands at the top of the checkout (`python -m convert`) and installs inside the
# package, so that no top-level name `convert` lands in a user's site-packages.
CONVERT = [f"ssmlx.{name}" for name in find_packages(include=["convert", "convert.*"])]

setup(packages=find_packages(include=["ssmlx", "ssmlx.*"]) + CONVERT)
