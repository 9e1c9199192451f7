"""`flowrl serve`: rewards behind HTTP, until Ctrl-C; see docs/serving.md."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

import torch

from flowrl.generation.drawing import find_device
from flowrl.generation.named_rewards import reward_label, reward_list
from flowrl.generation.scorers import load_rewards
from flowrl.rewards.serving import server
from flowrl.rewards.serving.wire import Limits
from flowrl.rewards.specs import validate_reward_specs


def run(parsed: argparse.Namespace) -> int:
    """Loads rewards and serves them until a signal; returns 0 after a graceful stop.

    Args:
        parsed: `rewards`, names or one YAML file with a list `rewards:`; `host`, `port`, `token_env`, `device`,
            `threads`, `batch_size`, `queue_size`, `max_items`, `max_mib`, `max_mpixels`, `grace`.

    Raises:
        ValueError: before any weights load for what can be known then: names, options, token, port, a missing package.
    """
    specs = reward_list(parsed.rewards)
    token = _token(parsed.token_env)
    server.check_extra()
    validate_reward_specs(specs)
    # The other half decodes images and speaks HTTP; where both fight for cores, torch's threads wait for each other.
    torch.set_num_threads(parsed.threads or max(1, (os.cpu_count() or 1) // 2))
    device = find_device(parsed.device)
    bound = server.open_socket(parsed.host, parsed.port, has_token=token is not None)
    try:
        start = time.monotonic()
        print(f"Loading {', '.join(reward_label(spec) for spec in specs)} on {device} ...", flush=True)
        rewards = load_rewards(specs, device)
        limits = Limits(
            max_bytes=parsed.max_mib * 2**20, max_pixels=parsed.max_mpixels * 10**6, max_items=parsed.max_items,
            queue_size=parsed.queue_size, batch_size=parsed.batch_size,
        )  # fmt: skip
        app = server.make_app(rewards, token=token, limits=limits)
        host, port = bound.getsockname()[:2]
        at = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"Serving at {at} after {time.monotonic() - start:.1f} s; Ctrl-C stops.")
        for name, reward in rewards.items():
            print(f"  {name} ({reward.kind}; needs {', '.join(sorted(reward.needs))}): {reward.version}")
        asks = f", token_env: {parsed.token_env}" if parsed.token_env else ""
        which = f", reward: {next(iter(rewards))}" if len(rewards) > 1 else ""
        print(f"In a configuration: {{name: remote, options: {{url: '{at}'{which}{asks}}}}}", flush=True)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stderr)
        server.make_server(app, grace=parsed.grace).run(sockets=[bound])
    finally:
        bound.close()
    print("Stopped.", flush=True)
    return 0


def _token(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"--token-env: the environment variable {variable} is not set: put the token there.")
    return token
