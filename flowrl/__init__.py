"""Reinforcement learning for diffusion and flow-matching generators.

Importing this package is light: torch and the model libraries load with the submodules that need them.
"""

from __future__ import annotations

from flowrl.versions import version_of

__version__ = version_of("flowrl-toolkit") or "0.0"
