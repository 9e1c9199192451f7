"""Judges at full load: what is in flight, what is sent how often, limits, several servers, dead ones."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from reward_inputs import images_of
from served_judge import Served, served_judge
from two_processes import in_two_processes

from flowrl.rewards import build_reward
from flowrl.rewards.judges import call_limits, image_urls
from flowrl.rewards.judges.call_limits import Limits, Pace
from flowrl.rewards.judges.chat import Question, build_chat
from flowrl.rewards.judges.usage import USAGE, Usage, Used, usage_row
