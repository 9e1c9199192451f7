"""Reinforcement learning for diffusion and flow-matching generators.

Importing this package is light: torch and the model libraries load with the submodules that need them.
"""

from __future__ import annotations

__version__ = "0.1.0"
