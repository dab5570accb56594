"""Thin shells around `pipeline`: where Ray is used, and how what runs there is placed, watched and replaced."""

import os

# Read by Ray when it is imported or when it starts processes, hence before any of that.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # workers without a GPU see what the machine has

import pipeline  # noqa: F401 - settings of the processor kernels, before torch is imported
